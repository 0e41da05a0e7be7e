"""Smoothed rates and counts of keys, as of each row's time. Part of `gem.data.statistics`."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gem.data.entity_table import IdInfo, Ids
from gem.data.names import nearest
from gem.data.sources import Sources
from gem.data.statistics.keyed_sums import KeyedSums, OpenBlock, Reading, mix64, to_fixed
from gem.data.statistics.late_labels import LateLabels
from gem.data.statistics.spec import RateStatistic
from gem_opkit.errors import ConfigError, refusal

_LEAST_RATE, _MOST_RATE = 2.0**-1022, 1.0 - 2.0**-53


@dataclass(frozen=True, slots=True)
class Block:
    """A run of rows in time order.

    Attributes:
        rows: example rows, int64 (n,), consecutive.
        groups: number of each row's distinct time within the block, int64 (n,), from 0.
        learns: whether each row may add to the statistics: it belongs to the training split.
    """

    rows: np.ndarray
    groups: np.ndarray
    learns: np.ndarray


class KeySpace:
    """The key of an example: one id, several combined, or none at all.

    Attributes:
        size: number of keys.
        multi: whether an example has several keys, because one of the ids is multi-valued.
    """

    def __init__(self, sources: Sources, names: tuple[str, ...], max_keys: int) -> None:
        self._infos = [sources.id_info(name) for name in names]
        self._take = [sources.ids(name) for name in names]
        several = [name for name, info in zip(names, self._infos, strict=True) if info.multi]
        if len(several) > 1:
            raise ConfigError(
                refusal(
                    "statistics",
                    "keys",
                    must="hold at most one multi-valued input",
                    got=", ".join(several),
                    fix="declare one statistic for each",
                )
            )
        self.multi = bool(several)
        size = 1
        for info in self._infos:
            size *= info.rows if info.id_space == "row" else max_keys + 1
        self._dense = size <= max_keys
        self.size = size if self._dense else max_keys

    def keys(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Keys of example rows.

        Args:
            rows: example rows, int64 (n,).

        Returns:
            int64 keys, and for a multi-valued key where each row's begin, (n+1,), otherwise None.
        """
        ids = [take(rows) for take in self._take]
        offsets = next((one.offsets for one in ids if one.offsets is not None), None)
        return self.of_ids([_spread(one, offsets) for one in ids], len(rows)), offsets

    def of_ids(self, ids: list[np.ndarray], count: int) -> np.ndarray:
        """Combine ids into keys.

        Args:
            ids: one int64 array for each part of the key, equal in length.
            count: number of keys where the key has no part.

        Returns:
            int64 keys in [0, size).
        """
        if not ids:
            return np.zeros(count, np.int64)
        if self._dense:
            key = ids[0]
            for info, more in zip(self._infos[1:], ids[1:], strict=True):
                key = key * info.rows + more
            return key
        mixed = mix64(ids[0])
        for more in ids[1:]:
            mixed = mix64(mixed ^ more.astype(np.uint64))
        return (mixed % np.uint64(self.size)).astype(np.int64)

    @property
    def single(self) -> IdInfo | None:
        """The table of a key of exactly one single-valued id; None for any other key."""
        return self._infos[0] if len(self._infos) == 1 and not self.multi else None


def _spread(ids: Ids, offsets: np.ndarray | None) -> np.ndarray:
    if offsets is None or ids.offsets is not None:
        return ids.values
    return np.repeat(ids.values, np.diff(offsets))


class Counter:
    """Sum and count of a label per key, shared by the statistics that declare the same."""

    def __init__(self, sources: Sources, keys: tuple[str, ...], label: str, max_keys: int) -> None:
        known = [declared.name for declared in sources.dataset.spec.examples.labels]
        if label not in known:
            raise ConfigError(
                refusal(
                    "statistics",
                    "label",
                    must="be a label of the data set",
                    got=repr(label) + nearest(label, known),
                    fix="correct the name",
                )
            )
        self.space = KeySpace(sources, keys, max_keys)
        self._labels, self._times = sources.example_column(label), sources.times
        delay_ms = label_delay_ms(sources, label)
        self._late = LateLabels(delay_ms) if delay_ms > 1 else None
        self._sums = KeyedSums(self.space.size)
        self._open: OpenBlock | None = None
        self.keys = np.empty(0, np.int64)
        self.offsets: np.ndarray | None = None
        self.groups = np.empty(0, np.int64)
        self.reading = Reading(self.keys, self.keys)

    def open(self, block: Block, *, reads: bool) -> None:
        """Take a block.

        Args:
            block: rows in time order; those that learn add their known labels.
            reads: whether to read what the rows hold, too.
        """
        self.keys, self.offsets = self.space.keys(block.rows)
        labels = self._labels[block.rows]
        adds, groups = block.learns & ~np.isnan(labels), block.groups
        if self.offsets is not None:
            each = np.diff(self.offsets)
            labels, adds = np.repeat(labels, each), np.repeat(adds, each)
            groups = np.repeat(groups, each)
        self.groups = groups
        added, when = self.keys[adds], groups[adds]
        values = to_fixed(labels[adds].astype(np.float64))
        if self._late is not None:
            group_times = self._times[block.rows[np.flatnonzero(np.diff(block.groups, prepend=-1))]]
            added, when, values = self._late.open(
                self._sums, added, values, group_times[when], group_times
            )
        self._open = self._sums.open_block(added, when, values)
        if reads:
            self.reading = self._open.read(self.keys, groups)

    def read(self, keys: np.ndarray, groups: np.ndarray) -> Reading:
        """Read other keys for rows of the open block.

        Args:
            keys: int64 (Q,).
            groups: of the reading rows, int64 (Q,).

        Returns:
            what each key holds as of its group.

        Raises:
            RuntimeError: no block is open.
        """
        if self._open is None:
            raise RuntimeError("Counter.read: open a block first")
        return self._open.read(keys, groups)

    def saved(self) -> dict[str, np.ndarray]:
        """Sums so far, and labels that are not known yet; for `restore`."""
        return self._sums.saved() | ({} if self._late is None else self._late.saved())

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Stand where another counter stood, for reading alone.

        Args:
            arrays: of `saved`.

        Raises:
            DataError: they are of another number of keys.
        """
        self._sums.restore(arrays)
        if self._late is not None:
            self._late.restore(arrays)

    def close(self, *, add: bool) -> None:
        """Leave the block.

        Args:
            add: whether what its rows add shall stay.
        """
        if self._open is not None:
            self._open.close(add=add)
            if self._late is not None:
                self._late.close(add=add)
        self._open = None


def label_delay_ms(sources: Sources, label: str) -> int:
    """How long after its row a label is known.

    Args:
        sources: of the data set.
        label: one of its labels.

    Returns:
        the declared delay in ms; 0 and 1 both mean: to every row strictly later.
    """
    labels = sources.dataset.spec.examples.labels
    return next(one.visible_after_ms for one in labels if one.name == label)


class Rate:
    """A rate statistic of the open block.

    Attributes:
        spec: its declaration.
        counter: the sums behind it.
        rate: one a key of the block, float64; `counter.offsets` says whose.
        row_towards: the prior rate of each row, float64 (n,).
    """

    def __init__(self, spec: RateStatistic, counter: Counter, towards: "Rate | None") -> None:
        self.spec, self.counter, self.towards = spec, counter, towards
        if towards is not None and towards.counter.space.multi:
            _must_stand_side_by_side(spec, counter, towards.spec)
        self.rate = self.row_towards = self._towards_each = np.empty(0)

    def open(self, rows: int) -> None:
        """Compute the rates of the open block's rows.

        Args:
            rows: number of rows of the block.
        """
        offsets, towards = self.counter.offsets, self.towards
        if towards is None:
            self.row_towards = np.full(rows, self.spec.towards)
            each = self.row_towards
        elif towards.counter.offsets is None:
            each = self.row_towards = towards.rate
        else:
            each, self.row_towards = towards.rate, towards.row_towards
        if offsets is not None and (towards is None or towards.counter.offsets is None):
            each = np.repeat(each, np.diff(offsets))
        self._towards_each = each
        self.rate = self.counter.reading.means(self.spec.prior, each)

    def output(self) -> np.ndarray:
        """The statistic's column, float64 (n,)."""
        offset = self.spec.output == "offset"
        values = logit(self.rate) - (logit(self._towards_each) if offset else 0.0)
        empty = np.zeros(len(self.row_towards)) if offset else logit(self.row_towards)
        return mean_of_each(values, self.counter.offsets, empty)


def _must_stand_side_by_side(spec: RateStatistic, counter: Counter, towards: RateStatistic) -> None:
    """Where both are multi-valued by the same input, their values pair up one by one."""
    if counter.space.multi and set(towards.keys) <= set(spec.keys):
        return
    raise ConfigError(
        refusal(
            "statistics",
            f"towards of {spec.name!r}",
            must="have one value a row, or keys that are among this one's keys",
            got=f"{towards.name!r} with keys {', '.join(towards.keys)}",
            fix="lean towards another rate",
        )
    )


def count_output(counter: Counter) -> np.ndarray:
    """log(1 + count) of each row of the open block.

    Args:
        counter: has a block open, with readings.

    Returns:
        float64 (n,); the mean over a multi-valued key, 0 for a row without a value.
    """
    values = np.log1p(counter.reading.counts)
    rows = len(values) if counter.offsets is None else len(counter.offsets) - 1
    return mean_of_each(values, counter.offsets, np.zeros(rows))


def logit(rate: np.ndarray) -> np.ndarray:
    """log(p / (1 - p)).

    Args:
        rate: p, in [0, 1], any shape.

    Returns:
        the same shape, finite: a rate that was rounded to 0 or 1, as with a tiny prior, counts as
        the nearest number to it.
    """
    inside = np.clip(rate, _LEAST_RATE, _MOST_RATE)
    return np.log(inside / (1.0 - inside))


def sum_of_each(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Sums of packed rows. A row's sum depends on nothing else, not even by rounding.

    Args:
        values: float64 (T,).
        offsets: where each row begins, int64 (n+1,).

    Returns:
        float64 (n,); 0 for an empty row.
    """
    sums = np.zeros(len(offsets) - 1)
    filled = np.flatnonzero(np.diff(offsets))
    if len(filled):
        # reduceat adds each run by itself; a running sum would carry rounding across rows.
        sums[filled] = np.add.reduceat(values, offsets[filled])
    return sums


def mean_of_each(values: np.ndarray, offsets: np.ndarray | None, empty: np.ndarray) -> np.ndarray:
    """Means of packed rows.

    Args:
        values: float64 (T,).
        offsets: where each row begins, int64 (n+1,); None: one value a row.
        empty: what a row without values gets, float64 (n,).

    Returns:
        float64 (n,); `values` themselves without offsets.
    """
    if offsets is None:
        return values
    counts = np.diff(offsets)
    means = sum_of_each(values, offsets) / np.maximum(counts, 1)
    return np.where(counts > 0, means, empty)
