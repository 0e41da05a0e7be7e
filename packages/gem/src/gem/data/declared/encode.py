"""Columns of raw tables as the arrays of a data set: ids, numbers, times and labels.

Cells are text or what Parquet holds. A cell that cannot be read is a DataError that names the
file, the column and, where it can, the row.
"""

import hashlib
import re
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gem.data.columns import MOST_MS
from gem.data.declared.files import WHERE, Place
from gem.data.declared.spec import CategoryColumn, LabelColumn, NumberColumn
from gem_opkit.errors import DataError, refusal

MISSING_ID = 0  # of tables with a row for each text
MISSING_HASH = -1
MOST_VALUES = 1 << 23
_EPOCH_US = {"s": 1_000_000, "ms": 1_000, "us": 1}


class Vocabulary:
    """A row for each distinct text: 1, 2, ... in sorted order; 0 stands for a missing one.

    Args:
        name: of the table, for messages.
        known: texts that have the first rows, in their order, whether they come again or not.
    """

    def __init__(self, name: str, known: Sequence[str] = ()) -> None:
        self.name = name
        self._known = tuple(known)
        self._seen: set[str] = set()
        self.values: tuple[str, ...] = ()
        self._ids: dict[str, int] = {}

    def collect(self, texts: pa.Array) -> None:
        """Take note of the texts of a batch; nulls do not count."""
        self._seen.update(pc.call_function("unique", [texts]).drop_null().to_pylist())
        if len(self._seen) > MOST_VALUES:
            raise DataError(
                refusal(
                    WHERE,
                    f"table {self.name!r}",
                    must=f"have at most {MOST_VALUES} distinct values",
                    got="more",
                    fix=f"declare hash_rows.{self.name}, the rows that they shall share",
                )
            )

    def close(self) -> None:
        """Give the ids: no text is taken any more."""
        self.values = (*self._known, *sorted(self._seen.difference(self._known)))
        self._ids = {text: place + 1 for place, text in enumerate(self.values)}
        self._seen.clear()

    def ids(self, texts: pa.Array) -> np.ndarray:
        """Ids of texts, int64, one each; 0 for a null."""
        return _by_distinct(texts, lambda text: self._ids[text], MISSING_ID)

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return len(self.values) + 1


class Hashes:
    """Any int64 for each text: a whole number is itself, any other text its hash.

    Args:
        rows: of the table that the ids are hashed to.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def collect(self, texts: pa.Array) -> None:
        """Nothing has to be known in advance."""

    def close(self) -> None:
        """Nothing is kept."""

    def ids(self, texts: pa.Array) -> np.ndarray:
        """Ids of texts, int64, one each; -1 for a null."""
        return _by_distinct(texts, text_hash, MISSING_HASH)


def text_hash(text: str) -> int:
    """The id of a text in a table with hashed ids.

    Args:
        text: as in the raw table.

    Returns:
        a whole number itself, and of any other text 63 bits of its hash.
    """
    # Only as it would be written again: 007 and 7 are two texts. -1 is the missing one's.
    if len(text) <= 18 and text.isascii() and text.isdigit() and (text == "0" or text[0] != "0"):
        return int(text)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _by_distinct(texts: pa.Array, function, missing: int) -> np.ndarray:  # noqa: ANN001
    """A function of texts, called once for each distinct one."""
    coded = texts.dictionary_encode()
    each = [function(text) for text in coded.dictionary.to_pylist()]
    table = np.array([*each, missing], np.int64)
    return table[coded.indices.fill_null(len(each)).to_numpy(zero_copy_only=False)]


def texts_of(array: pa.Array, place: Place, column: str) -> pa.Array:
    """A column as text.

    Args:
        array: of text, numbers, truth values or times.
        place: where it comes from.
        column: its name.

    Returns:
        strings; a column of whole numbers that holds nulls as floats reads as whole numbers.

    Raises:
        DataError: lists or anything else that is no plain value.
    """
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_nested(array.type) or pa.types.is_binary(array.type):
        raise place.refuse(column, "hold plain values", array.type)
    if pa.types.is_floating(array.type):
        values = array.drop_null().to_numpy(zero_copy_only=False)
        if np.isfinite(values).all() and (values == np.floor(values)).all():
            array = array.cast(pa.int64(), safe=False)
    try:
        return array.cast(pa.string())
    except pa.ArrowException as fault:
        raise place.refuse(column, "hold plain values", fault) from fault


def ids_of(
    array: pa.Array, column: CategoryColumn, table: Vocabulary | Hashes, place: Place
) -> pa.Array:
    """Ids of a categorical column.

    Args:
        array: the raw column.
        column: its declaration.
        table: gives the ids.
        place: where it comes from.

    Returns:
        int64, or lists of int64 where a cell holds several; null where the cell is missing.
    """
    texts = texts_of(array, place, column.column)
    missing = texts.is_null().to_numpy(zero_copy_only=False)
    if column.separator is None:
        return pa.array(table.ids(texts), mask=missing)
    parts = split(texts, column.separator)
    lengths = parts.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(table.ids(parts.flatten())), mask=pa.array(missing)
    )


def split(texts: pa.Array, separator: str) -> pa.Array:
    """The several values of each cell, as lists of text."""
    return pc.call_function("split_pattern", [texts], pc.SplitPatternOptions(separator))


def numbers_of(array: pa.Array, column: NumberColumn, place: Place) -> pa.Array:
    """A continuous column, float32, null where a cell is missing.

    Args:
        array: the raw column.
        column: its declaration.
        place: where it comes from.

    Raises:
        DataError: a cell that is no finite number.
    """
    original = array
    if column.pattern is not None:
        pattern = re.compile(column.pattern)
        found = [
            None if text is None or not (hit := pattern.search(text)) else hit[1]
            for text in texts_of(array, place, column.column).to_pylist()
        ]
        array = original = pa.array(found, pa.string())
    if column.decimal == "," and (pa.types.is_string(array.type) or pa.types.is_null(array.type)):
        # Exchanged, not replaced: 1.5 and 1.234,5 are refused, as nobody can tell what they mean.
        swapped = str.maketrans(".,", ",.")
        array = pa.array(
            [text and text.translate(swapped) for text in array.to_pylist()], pa.string()
        )
    must = "hold numbers (with a unit: pattern; with a decimal comma: decimal = ',')"
    try:
        return pa.array(*_reals(array, np.float32))
    except _NoNumber as fault:
        got = fault.got if fault.row is None else _shown(original[fault.row])
        raise place.refuse(column.column, fault.must or must, got, fault.row) from fault


class _NoNumber(Exception):
    """A column that is not of finite numbers: the rule (None: to be numbers), what came, where."""

    def __init__(self, must: str | None, got: object, row: int | None) -> None:
        super().__init__(must, got, row)
        self.must, self.got, self.row = must, got, row


def _reals(
    array: pa.Array, kind: type[np.floating] = np.float64
) -> tuple[np.ndarray, None, np.ndarray]:
    """Values, nothing, and which are missing, in the order in which Arrow takes them."""
    if pa.types.is_nested(array.type) or pa.types.is_temporal(array.type):
        raise _NoNumber(None, array.type, None)
    if pa.types.is_string(array.type):
        array = pc.call_function("utf8_trim_whitespace", [array])
    try:
        array = array.cast(pa.float64())
    except pa.ArrowException as fault:
        row = _first_fault(array, lambda part: part.cast(pa.float64()))
        raise _NoNumber(None, fault if row is None else _shown(array[row]), row) from fault
    missing = array.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        values = array.fill_null(0.0).to_numpy(zero_copy_only=False).astype(kind)
    bad = ~np.isfinite(values) & ~missing
    if bad.any():
        row = int(np.argmax(bad))
        raise _NoNumber("be finite, as float32", array[row], row)
    return values, None, missing


def _first_fault(array: pa.Array, read: Callable[[pa.Array], object]) -> int | None:
    """The first row that cannot be read; None where each can, but not all of them together."""
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        if _reads(array.slice(low, middle - low), read):
            low = middle
        else:
            high = middle
    return None if _reads(array.slice(low, 1), read) else low


def _reads(array: pa.Array, read: Callable[[pa.Array], object]) -> bool:
    try:
        read(array)
    except pa.ArrowException:
        return False
    return True


def _shown(cell: pa.Scalar) -> str:
    text = str(cell)
    return repr(text if len(text) <= 60 else f"{text[:60]}...")


def times_of(
    array: pa.Array, column: str, form: str | None, zone: str | None, place: Place
) -> np.ndarray:
    """A column of times, ms since 1970, int64.

    Args:
        array: whole numbers, text, or times as Parquet knows them.
        column: its name.
        form: as `TimedTable.time_format`.
        zone: as `TimedTable.time_zone`. Of an hour that a clock shows twice, the first is meant.
        place: where it comes from.

    Raises:
        DataError: a missing cell, one that is no such time, or one too far away.
    """
    missing = array.is_null()
    if missing.true_count:
        row = int(np.argmax(missing.to_numpy(zero_copy_only=False)))
        raise place.refuse(column, "have a time in every row", "none", row)
    if pa.types.is_date(array.type):
        array = array.cast(pa.timestamp("ms"))
    try:
        if pa.types.is_timestamp(array.type):
            moments = array.cast(pa.timestamp("us", array.type.tz), safe=False)
        elif form in _EPOCH_US:
            return _epoch(array, column, form, place)
        elif form is None:
            raise place.refuse(
                column,
                "have a time_format in the declaration (s, ms, us, iso or a pattern)",
                f"none for {array.type}",
            )
        else:
            moments = _parsed(array, form)
        micros = _in_zone(moments, zone).cast(pa.int64())
    except pa.ArrowException as fault:
        row = _first_fault(array, lambda part: _read_times(part, form, zone))
        got = str(fault).rstrip(".") if row is None else _shown(array[row])
        must = f"hold times ({form})" if zone is None else f"hold times ({form}) of {zone}"
        if row is None:  # each can be read, but as another kind than those before it
            must += ", all of them with a zone or all without"
        raise place.refuse(column, must, got, row) from fault
    return np.floor_divide(micros.to_numpy(zero_copy_only=False), 1000)


def _read_times(array: pa.Array, form: str | None, zone: str | None) -> None:
    """As `times_of` reads them; raises Arrow's own errors."""
    if pa.types.is_timestamp(array.type):
        _in_zone(array, zone)
    elif form in _EPOCH_US:
        _whole(array)
    elif form is not None:
        _in_zone(_parsed(array, form), zone)


def _in_zone(moments: pa.Array, zone: str | None) -> pa.Array:
    if zone is None or moments.type.tz is not None:
        return moments
    # A moment that the clock skips is a fault of the log; one that it shows twice is not.
    options = pc.AssumeTimezoneOptions(zone, ambiguous="earliest", nonexistent="raise")
    return pc.call_function("assume_timezone", [moments], options)


def _whole(array: pa.Array) -> pa.Array:
    if pa.types.is_string(array.type):
        array = pc.call_function("utf8_trim_whitespace", [array])
    return array.cast(pa.int64())


def _epoch(array: pa.Array, column: str, form: str, place: Place) -> np.ndarray:
    units = _whole(array).to_numpy(zero_copy_only=False)
    most = MOST_MS // 1000 if form == "s" else MOST_MS
    bad = (units > most) | (units < -most)
    if bad.any():
        row = int(np.argmax(bad))
        raise place.refuse(column, f"be a time in {form} since 1970", units[row], row)
    return units * 1000 if form == "s" else units if form == "ms" else units // 1000


def _parsed(array: pa.Array, form: str) -> pa.Array:
    if form != "iso":
        options = pc.StrptimeOptions(format=form, unit="us")
        return pc.call_function("strptime", [array], options)
    # With a zone in all rows or in none; more than six decimals need nanoseconds.
    kinds = [pa.timestamp(unit, zone) for unit in ("us", "ns") for zone in ("UTC", None)]
    for kind in kinds[:-1]:
        try:
            return array.cast(kind).cast(pa.timestamp("us", kind.tz), safe=False)
        except pa.ArrowException:
            continue
    return array.cast(kinds[-1]).cast(pa.timestamp("us"), safe=False)


def label_of(array: pa.Array, label: LabelColumn, place: Place) -> tuple[np.ndarray, np.ndarray]:
    """A target column.

    Args:
        array: the raw column.
        label: its declaration.
        place: where it comes from.

    Returns:
        values, float32, and which are known.

    Raises:
        DataError: a cell that is no number, or outside [0, 1] where no rule makes it 0 or 1.
    """
    column = label.column or label.name
    if label.values is not None:
        texts = texts_of(array, place, column)
        known = texts.is_valid().to_numpy(zero_copy_only=False)
        options = pc.SetLookupOptions(pa.array(label.values, pa.string()))
        hit = pc.call_function("is_in", [texts], options).to_numpy(zero_copy_only=False)
        return hit.astype(np.float32), known
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    try:
        values, _, missing = _reals(array)
    except _NoNumber as fault:
        must = fault.must or "hold numbers"
        if fault.must is None and label.at_least is None and label.above is None:
            must += ", or have values = [...], the texts that mean 1"
        raise place.refuse(column, must, fault.got, fault.row) from fault
    if label.at_least is not None:
        values = values >= label.at_least
    elif label.above is not None:
        values = values > label.above
    else:
        bad = ((values < 0) | (values > 1)) & ~missing
        if bad.any():
            row = int(np.argmax(bad))
            must = "lie in [0, 1], or have values, at_least or above in the declaration"
            raise place.refuse(column, must, values[row], row)
    return values.astype(np.float32), ~missing
