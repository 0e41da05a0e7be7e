"""Raw tables, batch by batch: CSV files of many dialects, and Parquet.

Cells of a CSV file come as text, columns of a Parquet file as what they are; `gem.data.declared.
encode` reads both. Every fault is a DataError that names the file.
"""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

from gem.data.declared.spec import RawFiles
from gem.data.names import nearest
from gem_opkit.errors import DataError, refusal

WHERE = "gem data prepare"
BATCH_ROWS = 65_536
_BLOCK_BYTES = 1 << 20  # of which Arrow reads some thirty ahead
# What Arrow raises where bytes are not what they should be; names in a heading may be no text.
_DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError, LookupError)
_UNIT_SEPARATOR = "\x1f"


class RawTable:
    """One table, in one file or several.

    Args:
        key: what the declaration calls it.
        files: where it is and how it is written.
        source: folder that holds the files, itself or in a folder below.

    Raises:
        DataError: a file is not there.
    """

    def __init__(self, key: str, files: RawFiles, source: Path) -> None:
        self.key = key
        self.files = files
        self.paths = [path for pattern in files.paths for path in _found(source, pattern)]

    def batches(self, columns: Sequence[str]) -> Iterator[tuple["Place", pa.RecordBatch]]:
        """Read some columns.

        Args:
            columns: names, as the declaration has them.

        Yields:
            where a batch comes from, and its columns in that order.

        Raises:
            DataError: a file cannot be read or lacks a column.

        Cost: memory of a batch; a file whose separator has several characters is read whole.
        """
        wanted = list(dict.fromkeys(columns))
        for path in self.paths:
            read = _parquet if path.suffix == ".parquet" else self._csv
            row = 0
            try:
                for batch in read(path, wanted):
                    yield Place(path, row), batch
                    row += batch.num_rows
            except _DAMAGE as fault:
                raise _broken(path, fault) from fault

    def _csv(self, path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
        files = self.files
        content = separated = None
        if len(files.separator) > 1:
            if path.suffix in (".gz", ".bz2", ".zst", ".lz4"):
                raise DataError(
                    refusal(
                        WHERE,
                        str(path),
                        must="not be compressed, as its separator has several characters",
                        got=path.suffix,
                        fix="unpack it",
                    )
                )
            content = path.read_bytes()
            separated = content.replace(
                files.separator.encode(files.encoding), _UNIT_SEPARATOR.encode()
            )
        parse = pcsv.ParseOptions(
            delimiter=_UNIT_SEPARATOR if separated is not None else files.separator,
            quote_char='"' if files.quoted else False,
        )

        def opened(convert: pcsv.ConvertOptions) -> pcsv.CSVStreamingReader:
            read = pcsv.ReadOptions(
                column_names=files.columns, block_size=_BLOCK_BYTES, encoding=files.encoding
            )
            file = path if separated is None else io.BytesIO(separated)
            return pcsv.open_csv(
                file, read_options=read, parse_options=parse, convert_options=convert
            )

        # Headings are matched without the blanks around them, which spreadsheets leave.
        with opened(pcsv.ConvertOptions()) as probe:
            names = probe.schema.names
        raw = _chosen(path, names, columns)
        convert = pcsv.ConvertOptions(
            column_types=dict.fromkeys(raw, pa.string()),
            include_columns=raw,
            strings_can_be_null=True,
            null_values=list(files.missing),
        )
        with opened(convert) as reader:
            for batch in reader:
                yield batch.rename_columns(columns)


class Place:
    """Where a batch comes from, for messages.

    Attributes:
        path: the file.
        first_row: position of the batch's first row among the file's, from 0.
    """

    def __init__(self, path: Path, first_row: int) -> None:
        self.path = path
        self.first_row = first_row

    def refuse(self, column: str, must: str, got: object, row: int | None = None) -> DataError:
        """The error for a value.

        Args:
            column: of the raw table.
            must: the rule.
            got: what came.
            row: within the batch; None where it is not known.

        Returns:
            the error, to be raised.
        """
        found = f"{got}" if row is None else f"{got} in row {self.first_row + row + 1}"
        return DataError(
            refusal(
                WHERE,
                f"{self.path}: column {column!r}",
                must=must,
                got=" ".join(found.split()),
                fix="mend the file or declare the column otherwise",
            )
        )


def find_files(source: Path, pattern: str) -> list[Path]:
    """The files of a pattern in a folder, else in one folder below it.

    Args:
        source: the folder.
        pattern: path within it; `*` stands for any text.

    Returns:
        the files, sorted; none where there is none, or where two folders below have such.
    """
    if "*" in pattern:
        found = sorted(path for path in source.glob(pattern) if path.is_file())
    else:
        found = [source / pattern] if (source / pattern).is_file() else []
    if not found:
        found = sorted(path for path in source.glob(f"*/{pattern}") if path.is_file())
        if len({path.parent for path in found}) > 1:
            found = []
    return found


def _found(source: Path, pattern: str) -> list[Path]:
    found = find_files(source, pattern)
    if not found:
        raise DataError(
            refusal(
                WHERE,
                "source",
                must=f"hold {pattern}",
                got=f"{source} without it" if source.is_dir() else f"no folder {source}",
                fix="name the folder of the raw files with --source, or correct the declaration",
            )
        )
    return found


def _parquet(path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        raw = _chosen(path, file.schema_arrow.names, columns)
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=raw):
            yield batch.select(raw).rename_columns(columns)


def _chosen(path: Path, names: list[str], columns: Sequence[str]) -> list[str]:
    trimmed = [name.strip() for name in names]
    fix = "correct the declaration, or take the right file"
    if len(names) == 1 and path.suffix != ".parquet":
        fix = "say under [files.NAME] which separator it has"
    for column in columns:
        if trimmed.count(column) != 1:
            raise DataError(
                refusal(
                    WHERE,
                    str(path),
                    must=f"have one column {column!r}",
                    got=f"{trimmed.count(column)} of that name{nearest(column, trimmed)}",
                    fix=fix,
                )
            )
    return [names[trimmed.index(column)] for column in columns]


def _broken(path: Path, fault: Exception) -> DataError:
    fix = "take another file, or correct its entry in the declaration"
    if path.suffix != ".parquet":
        fix = (
            "take another file, or say under [files.NAME] how it is written: separator, quoted, "
            "encoding, columns"
        )
    return DataError(
        refusal(
            WHERE,
            str(path),
            must="be readable as its declaration says",
            got=" ".join(str(fault).split()).rstrip("."),
            fix=fix,
        )
    )
