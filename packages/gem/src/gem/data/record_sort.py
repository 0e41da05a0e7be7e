"""Records sorted on disk, for more of them than fit into memory.

Three passes. The first looks at the keys alone: records that are in order already are left as they
are; otherwise it draws a sample. The sample gives boundaries between buckets of about equal size,
the second pass deals the records out to one file a bucket, and the third sorts each bucket in
memory. A boundary is a whole key with the record's number behind it, so a bucket stays small even
where one user has most of the log. Equal keys keep their order.
As many records come out as went in, or an error does.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from gem.data.array_folder import append_bytes
from gem_opkit.errors import DataError

# A bucket is held three times while it is sorted: read, order and result.
_COPIES = 3
_SAMPLES_A_BUCKET = 64


class Records(Protocol):
    """Gives all records in pieces, as structured arrays, anew with each call."""

    def __call__(self, *, keys_only: bool) -> Iterator[np.ndarray]:
        """All of them, in their order; `keys_only` leaves the other fields as they may be."""
        ...


def sorted_records(
    records: Records,
    keys: Sequence[str],
    *,
    most: int,
    budget_bytes: int,
    work: Path,
) -> Iterator[np.ndarray]:
    """Give records in the order of their keys.

    Args:
        records: gives the records.
        keys: names of the key fields, the most significant first.
        most: how many records there are at most.
        budget_bytes: memory for sorting, > 0.
        work: an empty folder for temporary files; it is empty again at the end.

    Yields:
        the records in order, in pieces.

    Raises:
        DataError: `records` gave other ones the second time.
        OSError: the disk is full, or fails otherwise.

    Cost: two passes over the records where they are in order already; else three, and one writing
        and reading of all of them in between.
    """
    in_order, sample, seen, record_bytes = _look_at_keys(records, keys, most, budget_bytes)
    boundaries = _boundaries(sample, -(-seen * record_bytes * _COPIES // budget_bytes))
    given = 0
    for piece in _ordered(records, keys, boundaries, in_order=in_order, work=work):
        given += len(piece)
        yield piece
    if given != seen:  # a file that changed, or a temporary one that lost its end
        raise DataError(
            f"gem data: sorted events must be as many as there are, {seen}; got {given}; leave "
            f"the files of the data set alone while it is indexed, and start again"
        )


def _ordered(
    records: Records,
    keys: Sequence[str],
    boundaries: list[tuple[int, ...]],
    *,
    in_order: bool,
    work: Path,
) -> Iterator[np.ndarray]:
    if in_order:
        yield from records(keys_only=False)
        return
    if not boundaries:
        everything = np.concatenate(list(records(keys_only=False)))
        yield everything[_order(everything, keys)]
        return
    dtype = _deal_out(records, keys, boundaries, work)
    for bucket in range(len(boundaries) + 1):
        path = _bucket_file(work, bucket)
        if path.exists():
            mine = np.fromfile(path, dtype)
            path.unlink()
            yield mine[_order(mine, keys)]


def _look_at_keys(
    records: Records, keys: Sequence[str], most: int, budget_bytes: int
) -> tuple[bool, list[tuple[int, ...]], int, int]:
    """Whether they are in order, keys of some with their numbers, how many, bytes of each."""
    random = np.random.default_rng(0)
    before: list[np.ndarray] = []  # the last record of the piece before
    in_order, first, record_bytes = True, 0, 0
    sample: list[tuple[int, ...]] = []
    for piece in records(keys_only=True):
        if not len(piece):
            continue
        in_order = in_order and _rises(np.concatenate([*before, piece]), keys)
        before = [piece[-1:]]
        buckets = -(-most * piece.dtype.itemsize * _COPIES // budget_bytes)
        wanted = -(-len(piece) * buckets * _SAMPLES_A_BUCKET // most)
        for row in random.choice(len(piece), min(wanted, len(piece)), replace=False):
            sample.append((*(int(piece[key][row]) for key in keys), first + int(row)))
        first += len(piece)
        record_bytes = piece.dtype.itemsize
    return in_order, sample, first, record_bytes


def _rises(records: np.ndarray, keys: Sequence[str]) -> bool:
    left, right = records[:-1], records[1:]
    equal, later = np.ones(len(left), bool), np.zeros(len(left), bool)
    for key in keys:
        later |= equal & (right[key] > left[key])
        equal &= right[key] == left[key]
    return bool(np.all(later | equal))


def _order(records: np.ndarray, keys: Sequence[str]) -> np.ndarray:
    return np.lexsort([records[key] for key in reversed(keys)])  # stable


def _boundaries(sample: list[tuple[int, ...]], buckets: int) -> list[tuple[int, ...]]:
    sample.sort()
    places = [len(sample) * one // buckets for one in range(1, buckets)]
    return sorted({sample[place] for place in places if place < len(sample)})


def _deal_out(
    records: Records, keys: Sequence[str], boundaries: list[tuple[int, ...]], work: Path
) -> np.dtype:
    first, dtype = 0, np.dtype([])
    limits = np.asarray(boundaries, np.int64)
    for piece in records(keys_only=False):
        dtype = piece.dtype
        order = _order(piece, keys)
        ranked = piece[order]
        cuts = _first_not_below([*(ranked[key] for key in keys), first + order], limits).tolist()
        ends = zip([0, *cuts], [*cuts, len(ranked)], strict=True)
        for bucket, (start, stop) in enumerate(ends):
            if start < stop:
                append_bytes(_bucket_file(work, bucket), ranked[start:stop].view(np.uint8).data)
        first += len(piece)
    return dtype


def _first_not_below(columns: Sequence[np.ndarray], limits: np.ndarray) -> np.ndarray:
    """Where in sorted records the keys reach each limit: all of them bisected at once.

    Args:
        columns: of the keys, the most significant first, each (n,).
        limits: whole keys, int64 (B, keys).

    Returns:
        int64 (B,), 0 .. n.
    """
    low, high = np.zeros(len(limits), np.int64), np.full(len(limits), len(columns[0]), np.int64)
    while True:
        open_ranges = low < high
        if not open_ranges.any():
            return low
        middle = (low + high) >> 1
        probed = np.where(open_ranges, middle, 0)
        below, equal = np.zeros(len(limits), bool), np.ones(len(limits), bool)
        for column, wanted in zip(columns, limits.T, strict=True):
            values = column[probed]
            below |= equal & (values < wanted)
            equal &= values == wanted
        low = np.where(open_ranges & below, middle + 1, low)
        high = np.where(open_ranges & ~below, middle, high)


def _bucket_file(work: Path, bucket: int) -> Path:
    return work / f"bucket-{bucket}"
