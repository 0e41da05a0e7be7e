"""The raw files of KuaiRand-Pure, in two layouts, as Arrow tables of the same columns.

Official layout, `KuaiRand-Pure/data`: `log_standard_4_08_to_4_21_pure.csv`,
`log_standard_4_22_to_5_08_pure.csv`, `user_features_pure.csv`, `video_features_basic_pure.csv`.
Earlier impressions of a user are rows of the first file.

Six-day layout: `impressions.parquet` in place of the logs, and `user_sequences.parquet`, which
holds what a user watched before, without times, up to a last known one.
"""

import os
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

from gem.data.columns import MOST_MS
from gem.data.made_from import Sources, sources_of
from gem.data.names import nearest
from gem_opkit.errors import DataError, refusal

SOURCE_VARIABLE = "GEM_KUAIRAND"
USERS_FILE, VIDEOS_FILE = "user_features_pure.csv", "video_features_basic_pure.csv"
OFFICIAL_LOGS = ("log_standard_4_08_to_4_21_pure.csv", "log_standard_4_22_to_5_08_pure.csv")
DAYS_LOG, DAYS_SEQUENCES = "impressions.parquet", "user_sequences.parquet"
_LAYOUTS = {
    "official": (*OFFICIAL_LOGS, USERS_FILE, VIDEOS_FILE),
    "six-days": (DAYS_LOG, DAYS_SEQUENCES, USERS_FILE, VIDEOS_FILE),
}
LOG_COLUMNS = ("user_id", "video_id", "time_ms", "date", "tab", "duration_ms")
LABEL_COLUMNS = ("is_click", "long_view")
SEQUENCE_COLUMNS = ("user_id", "history_len", "last_time_ms", "watch_seq", "long_watch_seq")

# By name in any of the files: what lies outside is no id, and no table could have a row for it.
_ID_RANGE = (0, 2**31 - 1)
_RANGES = {
    **dict.fromkeys(("user_id", "video_id", "tab", "history_len"), _ID_RANGE),
    **dict.fromkeys(("time_ms", "last_time_ms"), (-MOST_MS, MOST_MS)),
    "date": (19700101, 99991231),
}


@dataclass(frozen=True, slots=True)
class RawFiles:
    """What was read.

    Attributes:
        folder: that holds the files.
        layout: ``"official"`` or ``"six-days"``.
        log: LOG_COLUMNS and LABEL_COLUMNS, int64, without exact repeats, in order of the files.
        sequences: SEQUENCE_COLUMNS; None where the log holds the histories itself.
        users, videos: all columns of the feature files, as text.
        sources: what the files were before they were read.
    """

    folder: Path
    layout: str
    log: dict[str, np.ndarray]
    sequences: pa.Table | None
    users: pa.Table
    videos: pa.Table
    sources: Sources


def read_raw_files(source: Path | None) -> RawFiles:
    """Find and read the raw files.

    Args:
        source: folder that holds them, itself or in `data` or `KuaiRand-Pure/data`; None: the one
            that the environment variable GEM_KUAIRAND names.

    Returns:
        their contents.

    Raises:
        DataError: no folder is named, it does not hold KuaiRand-Pure, or a file is not as
            published.
    """
    folder, layout = _find(_named_folder(source))
    sources = sources_of(folder, _LAYOUTS[layout])
    users, videos = _read_text(folder / USERS_FILE), _read_text(folder / VIDEOS_FILE)
    _check_key(folder / USERS_FILE, users, "user_id")
    _check_key(folder / VIDEOS_FILE, videos, "video_id")
    if layout == "official":
        logs = [_read_log(folder / name) for name in OFFICIAL_LOGS]
        log = {name: np.concatenate([one[name] for one in logs]) for name in logs[0]}
        return RawFiles(folder, layout, log, None, users, videos, sources)
    sequences = _read_parquet(folder / DAYS_SEQUENCES)
    need_columns(folder / DAYS_SEQUENCES, sequences, SEQUENCE_COLUMNS)
    _check_key(folder / DAYS_SEQUENCES, sequences, "user_id")
    for name in ("watch_seq", "long_watch_seq"):
        _check_lists(folder / DAYS_SEQUENCES, sequences, name)
    log = _read_log(folder / DAYS_LOG)
    return RawFiles(folder, layout, log, sequences, users, videos, sources)


def known_folder(source: Path | None) -> Path | None:
    """The folder of the raw files, where they are still there.

    Args:
        source: as in `read_raw_files`.
    """
    try:
        return _find(_named_folder(source))[0]
    except DataError:
        return None


def _named_folder(source: Path | None) -> Path:
    named = source or os.environ.get(SOURCE_VARIABLE)
    if not named:
        raise DataError(
            refusal(
                "kuairand",
                "source",
                must="name the folder of KuaiRand-Pure, which is not downloaded",
                got="none",
                fix=f"set {SOURCE_VARIABLE}, or data.source in the recipe, or give --source to "
                f"gem data prepare; the files are at https://kuairand.com",
            )
        )
    folder = Path(named)
    if not folder.is_dir():
        raise DataError(
            refusal(
                "kuairand",
                "source" if source else SOURCE_VARIABLE,
                must="be a folder",
                got=folder,
                fix="name the folder that holds the files of KuaiRand-Pure",
            )
        )
    return folder


def _find(folder: Path) -> tuple[Path, str]:
    missing: dict[str, list[str]] = {}
    for place in (folder, folder / "data", folder / "KuaiRand-Pure" / "data"):
        for layout, names in _LAYOUTS.items():
            lacks = [name for name in names if not (place / name).is_file()]
            if not lacks:
                return place, layout
            if layout not in missing or len(lacks) < len(missing[layout]):
                missing[layout] = lacks
    nearest_layout = min(missing, key=lambda layout: len(missing[layout]))
    raise DataError(
        refusal(
            "kuairand",
            "source",
            must=f"hold {', '.join(_LAYOUTS[nearest_layout])}",
            got=f"{folder} without {', '.join(missing[nearest_layout])}",
            fix="name the folder of KuaiRand-Pure",
        )
    )


def _read_text(path: Path) -> pa.Table:
    """A CSV file whose columns all are text; an empty cell is null."""
    try:
        with pcsv.open_csv(path) as probe:
            names = probe.schema.names
        return pcsv.read_csv(
            path,
            convert_options=pcsv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                strings_can_be_null=True,
                null_values=["", "nan", "NaN"],
            ),
        )
    except (pa.ArrowException, OSError, UnicodeDecodeError) as fault:  # names may be no text
        raise _broken(path, fault) from fault


def _read_parquet(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (pa.ArrowException, OSError) as fault:
        raise _broken(path, fault) from fault


def _read_log(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".parquet":
        table = _read_parquet(path)
    else:
        try:
            table = pcsv.read_csv(path)
        except (pa.ArrowException, OSError) as fault:
            raise _broken(path, fault) from fault
    need_columns(path, table, (*LOG_COLUMNS, *LABEL_COLUMNS))
    kept = _first_of_repeats(path, table)
    log = {name: integers(path, table, name)[kept] for name in (*LOG_COLUMNS, *LABEL_COLUMNS)}
    for name in LABEL_COLUMNS:
        wrong = (log[name] != 0) & (log[name] != 1)
        if wrong.any():
            raise DataError(
                refusal(
                    "kuairand",
                    f"{path}: {name}",
                    must="be 0 or 1",
                    got=log[name][np.argmax(wrong)],
                    fix="take the file as it is published",
                )
            )
    return log


def _first_of_repeats(path: Path, table: pa.Table) -> np.ndarray:
    """The first of the rows that agree in every column, rising, int64."""
    codes = np.empty((table.num_rows, table.num_columns), np.int32)
    for place, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if pa.types.is_nested(column.type):
            raise _wrong(path, name, "hold plain values", str(column.type))
        coded = column.combine_chunks().dictionary_encode(null_encoding="encode")
        codes[:, place] = coded.indices.to_numpy(zero_copy_only=False)
    _, first = np.unique(codes, axis=0, return_index=True)
    return np.sort(first)


def integers(path: Path, table: pa.Table, name: str) -> np.ndarray:
    """A column of whole numbers without gaps.

    Args:
        path: of the table, for messages.
        table: holds the column as integers, whole floats or text of integers.
        name: of the column.

    Returns:
        int64, one a row.

    Raises:
        DataError: a value that is missing, no whole number, or outside the range of such ids or
            times.
    """
    column = table.column(name).combine_chunks()
    if column.null_count:
        row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise _wrong(path, name, "be there in every row", f"none in row {row}")
    try:
        values = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
    except pa.ArrowException as fault:
        raise _wrong(path, name, "hold whole numbers", str(fault).rstrip(".")) from fault
    low, high = _RANGES.get(name, (None, None))
    if low is not None:
        outside = (values < low) | (values > high)
        if outside.any():
            row = int(np.argmax(outside))
            raise _wrong(path, name, f"lie in {low} .. {high}", f"{values[row]} in row {row}")
    return values


def days(path: Path, table: pa.Table, name: str) -> np.ndarray:
    """A column of dates with gaps.

    Args:
        path: of the table, for messages.
        table: holds the column as text, such as 2022-04-01; what follows the date is left out.
        name: of the column.

    Returns:
        days since 1970, float64, NaN where the value is missing.

    Raises:
        DataError: a value that is no date.
    """
    found = np.full(table.num_rows, np.nan)
    for row, text in enumerate(words(table, name)):
        if not text:
            continue
        try:
            found[row] = (date.fromisoformat(text[:10]) - date(1970, 1, 1)).days
        except ValueError:
            got = f"{text!r} in row {row}"
            raise _wrong(path, name, "hold dates such as 2022-04-01", got) from None
    return found


def log_days(path: Path, dates: np.ndarray) -> np.ndarray:
    """Days of the log's column `date`.

    Args:
        path: of the log, for messages.
        dates: such as 20220425, int64.

    Returns:
        days since 1970, int64, the same shape.

    Raises:
        DataError: a number that is no date.
    """
    month = (dates // 10_000 - 1970) * 12 + dates // 100 % 100 - 1
    first = month.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    found = first + dates % 100 - 1
    written_back = found.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64)
    wrong = (written_back != month) | (dates // 100 % 100 < 1) | (dates // 100 % 100 > 12)
    if wrong.any():
        got = f"{dates[np.argmax(wrong)]}"
        raise _wrong(path, "date", "hold dates such as 20220425", got)
    return found


def _check_key(path: Path, table: pa.Table, name: str) -> None:
    need_columns(path, table, (name,))
    keys, counts = np.unique(integers(path, table, name), return_counts=True)
    if (counts > 1).any():
        raise _wrong(path, name, "be unique", f"{keys[np.argmax(counts > 1)]} twice")


def _check_lists(path: Path, table: pa.Table, name: str) -> None:
    kind = table.column(name).type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not lists or not pa.types.is_integer(kind.value_type):
        raise _wrong(path, name, "hold lists of integers", str(kind))
    ids = table.column(name).combine_chunks().flatten()
    low, high = _ID_RANGE
    if ids.null_count:
        raise _wrong(path, name, "hold lists without gaps", "a null in one")
    values = ids.to_numpy(zero_copy_only=False)
    outside = (values < low) | (values > high)
    if outside.any():
        raise _wrong(path, name, f"hold ids in {low} .. {high}", str(values[np.argmax(outside)]))


def numbers(path: Path, table: pa.Table, name: str) -> pa.Array:
    """A column of numbers with gaps.

    Args:
        path: of the table, for messages.
        table: holds the column as text or numbers.
        name: of the column.

    Returns:
        float32, null where the value is missing.

    Raises:
        DataError: a value that is no number.
    """
    try:
        return table.column(name).combine_chunks().cast(pa.float64()).cast(pa.float32())
    except pa.ArrowException as fault:
        raise _wrong(path, name, "hold numbers", str(fault).rstrip(".")) from fault


def words(table: pa.Table, name: str) -> list[str]:
    """A column of categories as text, "" where the value is missing.

    Args:
        table: holds the column as text.
        name: of the column.

    Returns:
        one a row; a number that is written as 1.0 in some rows and as 1 in others is one category.
    """
    return [(text or "").removesuffix(".0") for text in table.column(name).to_pylist()]


def need_columns(path: Path, table: pa.Table, names: tuple[str, ...]) -> None:
    """Refuse a table that lacks a column.

    Args:
        path: of the table, for messages.
        table: what was read.
        names: columns that it has to have.

    Raises:
        DataError: it lacks one, and the message names the nearest that it has; or it has two.
    """
    for name in names:
        if name not in table.column_names:
            raise _wrong(path, name, "be a column", f"none{nearest(name, table.column_names)}")
        if table.column_names.count(name) > 1:
            raise _wrong(path, name, "be one column", str(table.column_names.count(name)))


def _wrong(path: Path, column: str, must: str, got: str) -> DataError:
    return DataError(
        refusal(
            "kuairand",
            f"{path}: {column}",
            must=must,
            got=got,
            fix="take the file as it is published",
        )
    )


def _broken(path: Path, fault: Exception) -> DataError:
    return DataError(
        refusal(
            "kuairand",
            str(path),
            must="be readable",
            got=str(fault).rstrip("."),
            fix="take the file as it is published",
        )
    )
