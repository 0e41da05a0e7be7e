"""Cuts the attention of a ragged batch into rectangles that padded matrix products can take.

A *task* is some consecutive queries of one sequence and the consecutive keys that any of them
sees. A *chunk* is a set of tasks of similar size, padded to the largest of them and computed by
one batched product. Both come from host lengths alone: nothing here reads a device tensor.

- Unwindowed attention makes one task a sequence. A window makes tasks of a few queries with the
  band of keys around them, so that cost is linear in length; block attention one a block.
- Queries that see no key are in no task. So every row that a chunk computes has a visible key,
  and results of the others stay what they were initialised to.
- Tasks are sorted by size, so that little of a chunk is padding; only the ragged ends of its
  columns need a mask, and only where a window cuts through a chunk is there a mask of its own.

Private to the reference implementations. Left out: the arithmetic (``softmax``,
``activation``) and the tile lists of GPU kernels.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

# Score elements of a chunk and head. On a CPU a chunk should stay in the cache between its five
# passes (2^18 floats are 1 MiB; 2^16 and 2^22 were slower); a GPU wants fewer launches.
_CPU_BUDGET = 2**18
_GPU_BUDGET = 2**24
# Elements whose arithmetic costs about as much as starting the operations of one more chunk.
_CHUNK_OVERHEAD = 2**14
# Padding that a chunk may have, as a factor, before it is worth starting another.
_PADDING = 1.15
# Elements that one task for a whole sequence may have, as a factor, before cutting it pays: every
# cut gathers keys again.
_TASK_OVERHEAD = 1.2

_INT32_MAX = 2**31 - 1


class Task(NamedTuple):
    """A rectangle of scores of one sequence.

    Attributes:
        q_count: queries, at least 1.
        k_count: keys, at least 1.
        diagonal: key number minus the query's place, for the first key and the first query: key
            j of the task is j - i + diagonal keys after the place of its query i.
        q_first: row of the first query in the packed queries.
        out_first: row of its result; another than q_first where sequences share queries.
        k_first: row of the first key in the packed keys.
    """

    q_count: int
    k_count: int
    diagonal: int
    q_first: int
    out_first: int
    k_first: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows that a chunk reads and writes, padded to (tasks, width).

    Attributes:
        gather: row to read for each place; padding repeats the last row of its own task, so that
            no value of another sequence comes near.
        scatter: row to write; padding goes to the spare row behind the last one.
        padding: flat places that are padding; None where there are none.
        tasks: number of tasks.
    """

    gather: Tensor
    scatter: Tensor
    padding: Tensor | None
    tasks: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tasks that are computed together.

    Attributes:
        table: int64 (6, tasks) on the CPU, the fields of ``Task`` in order.
        queries: largest q_count.
        keys: largest k_count.
        even_queries: all q_count are equal.
        least_keys: smallest k_count; columns before it need no mask.
        cut: whether the window hides a pair inside some task.
        even_diagonal: all diagonals are equal.
    """

    table: Tensor
    queries: int
    keys: int
    even_queries: bool
    least_keys: int
    cut: bool
    even_diagonal: bool

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return self.table.shape[1]

    def q_rows(self, spare: int, device: torch.device) -> Rows:
        """Return the rows of the queries.

        Args:
            spare: row behind the last query.
            device: of the tensors.

        Returns:
            rows to read, and rows to write their gradients to.
        """
        padded = not self.even_queries
        return self._rows(3, 0, self.queries, spare, device, padded=padded)

    def out_rows(self, spare: int, device: torch.device) -> Rows:
        """Return the rows of the results; arguments as in ``q_rows``."""
        padded = not self.even_queries
        return self._rows(4, 0, self.queries, spare, device, padded=padded)

    def k_rows(self, spare: int, device: torch.device) -> Rows:
        """Return the rows of the keys and values; arguments as in ``q_rows``."""
        padded = self.least_keys < self.keys
        return self._rows(5, 1, self.keys, spare, device, padded=padded)

    def _rows(
        self, first: int, count: int, width: int, spare: int, device: torch.device, *, padded: bool
    ) -> Rows:
        # first and count are rows of the table.
        begin, last = self.table[first][:, None], self.table[count][:, None] - 1
        step = torch.arange(width, device="cpu")
        gather = (begin + torch.minimum(step, last)).flatten()
        if not padded:
            on_device = gather.to(device, non_blocking=True)
            return Rows(on_device, on_device, None, self.tasks)
        outside = (step > last).flatten()
        scatter = torch.where(outside, spare, gather)
        return Rows(
            gather.to(device, non_blocking=True),
            scatter.to(device, non_blocking=True),
            outside.nonzero().flatten().to(device, non_blocking=True),
            self.tasks,
        )

    def hidden_tail(self, device: torch.device) -> Tensor | None:
        """Return where the columns from ``least_keys`` on are padding.

        Args:
            device: of the result.

        Returns:
            bool (tasks, 1, keys - least_keys), or None where there are none.
        """
        if self.least_keys == self.keys:
            return None
        column = torch.arange(self.least_keys, self.keys, device="cpu")
        return (column >= self.table[1, :, None])[:, None, :].to(device, non_blocking=True)

    def hidden_by_window(
        self, left_tokens: int | None, right_tokens: int | None, device: torch.device
    ) -> Tensor | None:
        """Return which scores the window hides.

        Args:
            left_tokens: keys visible before the query's place; None for all.
            right_tokens: keys visible after it; None for all.
            device: of the result.

        Returns:
            bool (tasks or 1, queries, keys), or None where the window hides nothing.
        """
        if not self.cut:
            return None
        diagonal = self.table[2, :1] if self.even_diagonal else self.table[2]
        diagonal = diagonal.to(device, torch.int32, non_blocking=True)[:, None, None]
        query = torch.arange(self.queries, dtype=torch.int32, device=device)[:, None]
        key = torch.arange(self.keys, dtype=torch.int32, device=device)
        after = (key - query) + diagonal
        hidden = torch.zeros_like(after, dtype=torch.bool)
        # A comparison takes its number in the tensor's dtype, where more than 2^31 - 1 wraps.
        if left_tokens is not None:
            hidden |= after < -min(left_tokens, _INT32_MAX)
        if right_tokens is not None:
            hidden |= after > min(right_tokens, _INT32_MAX)
        return hidden


def plan_window(
    q_lengths: Tensor,
    k_lengths: Tensor,
    left_tokens: int | None,
    right_tokens: int | None,
    device: torch.device,
) -> tuple[Chunk, ...]:
    """Plan attention in which each query sees a window of its sequence's keys.

    Args:
        q_lengths: queries of each sequence, int64 on the CPU.
        k_lengths: keys of each sequence, likewise.
        left_tokens: keys visible before the query's place, at least 0; None for all.
        right_tokens: keys visible after it, at least 0; None for all.
        device: where it will run; decides how large a chunk is.

    Returns:
        the chunks. Plans of recent lengths are remembered, so that the layers of a model, and
        forward and backward, share one.
    """
    return _window_chunks(
        tuple(q_lengths.tolist()),
        tuple(k_lengths.tolist()),
        left_tokens,
        right_tokens,
        _budget(device),
    )


def plan_blocks(lengths: Tensor, block_tokens: int, device: torch.device) -> tuple[Chunk, ...]:
    """Plan attention inside blocks of each sequence.

    Args:
        lengths: tokens of each sequence, int64 on the CPU.
        block_tokens: length of a block, above 0.
        device: where it will run.

    Returns:
        the chunks.
    """
    return _block_chunks(tuple(lengths.tolist()), block_tokens, _budget(device))


def plan_shared(queries: int, k_lengths: Tensor, device: torch.device) -> tuple[Chunk, ...]:
    """Plan attention of the same queries over the keys of each sequence.

    Args:
        queries: queries P that all sequences share; result p of sequence b is row b P + p.
        k_lengths: keys of each sequence, int64 on the CPU.
        device: where it will run.

    Returns:
        the chunks.
    """
    return _shared_chunks(queries, tuple(k_lengths.tolist()), _budget(device))


def _budget(device: torch.device) -> int:
    return _CPU_BUDGET if device.type == "cpu" else _GPU_BUDGET


@lru_cache(maxsize=32)
def _window_chunks(
    q_lengths: tuple[int, ...],
    k_lengths: tuple[int, ...],
    left: int | None,
    right: int | None,
    budget: int,
) -> tuple[Chunk, ...]:
    tasks: list[Task] = []
    q_first = k_first = 0
    for q_tokens, k_tokens in zip(q_lengths, k_lengths, strict=True):
        tasks.extend(_sequence_tasks(q_tokens, k_tokens, left, right, budget, q_first, k_first))
        q_first += q_tokens
        k_first += k_tokens
    return tuple(_chunks(tasks, left, right, budget))


@lru_cache(maxsize=32)
def _block_chunks(lengths: tuple[int, ...], block: int, budget: int) -> tuple[Chunk, ...]:
    tasks: list[Task] = []
    begin = 0
    for tokens in lengths:
        for first in range(0, tokens, block):
            count = min(block, tokens - first)
            row = begin + first
            tasks.append(Task(count, count, 0, row, row, row))
        begin += tokens
    return tuple(_chunks(tasks, None, None, budget))


@lru_cache(maxsize=32)
def _shared_chunks(queries: int, k_lengths: tuple[int, ...], budget: int) -> tuple[Chunk, ...]:
    tasks: list[Task] = []
    k_first = 0
    step = 1
    for row, k_tokens in enumerate(k_lengths):
        if k_tokens:
            step = _queries_a_task(queries, k_tokens, budget)
        for first in range(0, queries if k_tokens else 0, step):
            count = min(step, queries - first)
            tasks.append(Task(count, k_tokens, 0, first, row * queries + first, k_first))
        k_first += k_tokens
    return tuple(_chunks(tasks, None, None, budget))


def _queries_a_task(queries: int, keys: int, budget: int) -> int:
    return max(1, min(queries, max(16, budget // keys)))


def _sequence_tasks(
    q_tokens: int,
    k_tokens: int,
    left: int | None,
    right: int | None,
    budget: int,
    q_first: int,
    k_first: int,
) -> list[Task]:
    if not q_tokens or not k_tokens:
        return []
    shift = k_tokens - q_tokens
    # The places of the first queries lie before key 0 where there are more queries than keys; the
    # window of some may end there too. Those see nothing. No query stands behind the last key.
    begin = 0 if right is None else max(0, -shift - right)
    if begin >= q_tokens:
        return []
    whole = _task(begin, q_tokens, q_tokens, k_tokens, left, right, q_first, k_first)
    step = _queries_a_task(q_tokens, whole.k_count, budget)
    if left is not None and right is not None:
        # Half a window of queries costs 1.5 times the visible pairs; much shorter tasks gather
        # every key many times.
        step = min(step, max(32, (left + right + 17) // 32 * 16))
    elif left is not None or right is not None:
        # One side open: a triangle, of which the tasks cut the empty half into steps.
        step = min(step, max(64, q_tokens // 8))
    elif step >= q_tokens:
        return [whole]
    tasks = [
        _task(first, min(first + step, q_tokens), q_tokens, k_tokens, left, right, q_first, k_first)
        for first in range(begin, q_tokens, step)
    ]
    area = sum(task.q_count * task.k_count for task in tasks)
    one_is_enough = whole.q_count * whole.k_count <= min(budget, _TASK_OVERHEAD * area)
    return [whole] if one_is_enough else tasks


def _task(
    first: int,
    end: int,
    q_tokens: int,
    k_tokens: int,
    left: int | None,
    right: int | None,
    q_first: int,
    k_first: int,
) -> Task:
    shift = k_tokens - q_tokens
    k_begin = 0 if left is None else max(0, first + shift - left)
    k_end = k_tokens if right is None else min(k_tokens, end + shift + right)
    row = q_first + first
    return Task(
        end - first, k_end - k_begin, k_begin - (first + shift), row, row, k_first + k_begin
    )


def _chunks(
    tasks: Iterable[Task], left: int | None, right: int | None, budget: int
) -> Iterator[Chunk]:
    windowed = left is not None or right is not None

    def is_cut(task: Task) -> bool:
        lowest, highest = task.diagonal - (task.q_count - 1), task.diagonal + task.k_count - 1
        return (left is not None and lowest < -left) or (right is not None and highest > right)

    def order(task: Task) -> tuple[int, int, int, int]:
        # Queries in classes 1.25 apart and keys inside them: both dims stay near the largest of
        # a chunk. The tasks of one diagonal share a mask, so they stand together.
        diagonal = task.diagonal if windowed else 0
        size_class = math.ceil(4.5 * math.log(task.q_count))
        return diagonal, -size_class, -task.k_count, -task.q_count

    gathered: list[Task] = []
    queries = keys = area = 0
    for task in sorted(tasks, key=order):
        grown_queries, grown_keys = max(queries, task.q_count), max(keys, task.k_count)
        padded = (len(gathered) + 1) * grown_queries * grown_keys
        real = area + task.q_count * task.k_count
        other_mask = bool(gathered) and windowed and task.diagonal != gathered[-1].diagonal
        too_much = padded > budget or padded > _PADDING * real + _CHUNK_OVERHEAD
        if gathered and (too_much or (other_mask and area > _CHUNK_OVERHEAD)):
            yield _chunk(gathered, cut=any(map(is_cut, gathered)))
            gathered, real = [], task.q_count * task.k_count
            grown_queries, grown_keys = task.q_count, task.k_count
        gathered.append(task)
        queries, keys, area = grown_queries, grown_keys, real
    if gathered:
        yield _chunk(gathered, cut=any(map(is_cut, gathered)))


def _chunk(tasks: list[Task], *, cut: bool) -> Chunk:
    q_counts = [task.q_count for task in tasks]
    k_counts = [task.k_count for task in tasks]
    return Chunk(
        table=torch.tensor(tasks, dtype=torch.int64, device="cpu").T.contiguous(),
        queries=max(q_counts),
        keys=max(k_counts),
        even_queries=min(q_counts) == max(q_counts),
        least_keys=min(k_counts),
        cut=cut,
        even_diagonal=len({task.diagonal for task in tasks}) == 1,
    )
