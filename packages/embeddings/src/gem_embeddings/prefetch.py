"""Send the ids of the next batch while this one trains.

    for ready in Prefetcher(engine, batches, ids=lambda batch: batch.ids):
        vectors = engine(ready.lookup)
        loss(ready.batch, vectors).backward()

Only ids travel ahead: rows are read in ``engine(...)``, after the backward pass of the batch
before, so the numbers are those of the plain loop, bit for bit.

Ranks may have different numbers of batches. One that has run out joins with empty batches until
all have. A batch that cannot be read or looked up on one rank ends the loop on every rank.

Left out: reading the batches themselves ahead of time; a stream of its own on a GPU, where
``start`` waits for the work that was queued before it; and faults of the loop's own body, which
only the launcher of the ranks can end.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gem_embeddings.agreement import most_of
from gem_embeddings.engine import StartedLookup, TableEngine
from gem_jagged.batch import Jagged
from gem_opkit.errors import DataError, refusal

_NAME = "Prefetcher"
_ENDED, _HAS, _FAULT = 0, 1, 2

Batch = TypeVar("Batch")
Ids = Mapping[str, Jagged]


@dataclass(frozen=True, slots=True)
class Ready(Generic[Batch]):
    """A batch whose ids are under way.

    Attributes:
        batch: the batch; None where this rank has run out and no ``empty`` was given.
        lookup: what ``engine(...)`` takes in place of ids; to be given to it exactly once, and by
            a rank that has run out too.
    """

    batch: Batch | None
    lookup: StartedLookup


class Prefetcher(Generic[Batch]):
    """Iterates over batches, with the ids of the next one on their way.

    Every rank has to iterate equally far; a rank must not leave the loop early on its own.

    Args:
        engine: the tables.
        batches: of this rank, any number, also none.
        ids: feature -> ids of a batch, as ``engine(...)`` takes them; None where a batch is that.
        weights: feature -> weights of ids of a batch; None where there are none.
        empty: makes a batch without examples, for a rank that has run out before others; called
            once more than is needed, since the others may have run out too.

    Raises:
        DataError: while iterating: another rank could not read or look up a batch. The rank itself
            raises what went wrong there.

    Cost: one number a step is exchanged between the hosts of all ranks, so that all know whether
        any of them goes on.
    """

    def __init__(
        self,
        engine: TableEngine,
        batches: Iterable[Batch],
        *,
        ids: Callable[[Batch], Ids] | None = None,
        weights: Callable[[Batch], Mapping[str, Tensor]] | None = None,
        empty: Callable[[], Batch] | None = None,
    ) -> None:
        self._engine, self._batches = engine, batches
        self._ids, self._weights, self._empty = ids, weights, empty
        # Over gloo also beside NCCL: the answer is wanted on the host, and a GPU need not wait.
        several, on_gpu = engine.world.size > 1, engine.world.device.type == "cuda"
        self._group: Any = dist.new_group(backend="gloo") if several and on_gpu else None

    def __iter__(self) -> Iterator[Ready[Batch]]:
        """Go through the batches. Every rank has to begin together."""
        batches = iter(self._batches)
        ready, fault = self._begin(batches, None)
        while ready is not None or fault is not None:
            # Told with the state of the next batch, so that all ranks stop before the same one.
            following, next_fault = self._begin(batches, fault)
            if ready is not None:
                yield ready
            ready, fault = following, next_fault

    def _begin(
        self, batches: Iterator[Batch], fault: BaseException | None
    ) -> tuple[Ready[Batch] | None, BaseException | None]:
        """Read a batch and send its ids, unless all ranks have run out.

        Args:
            batches: the rest of them.
            fault: of the batch before, which all ranks are told now.

        Returns:
            the batch, or None at the end of all; and why its ids could not be sent.
        """
        # Whatever the caller's own functions do is done before ranks agree: a rank that fails
        # between that and its lookup would leave its group waiting there.
        batch: Batch | None = None
        ids: Any = None
        weights: Mapping[str, Tensor] | None = None
        code = _FAULT
        if fault is None:
            try:
                batch, ended = self._next(batches)
                ids, weights = self._parts(batch)
                code = _ENDED if ended else _HAS
            except Exception as own:  # noqa: BLE001 - raised by _agree, once the others know
                fault = own
        if self._agree(code, fault) == _ENDED:
            return None, None
        try:
            return Ready(batch, self._engine.start(ids, weights)), None
        except Exception as own:  # noqa: BLE001 - raised by _agree, when the next batch is due
            return None, own

    def _next(self, batches: Iterator[Batch]) -> tuple[Batch | None, bool]:
        """Read a batch, or make an empty one where others may go on; and whether none was left."""
        try:
            return next(batches), False
        except StopIteration:
            if self._empty is None or self._engine.world.size == 1:
                return None, True
            return self._empty(), True

    def _parts(self, batch: Batch | None) -> tuple[Any, Mapping[str, Tensor] | None]:
        """What the engine takes of a batch."""
        if batch is None:
            none = torch.zeros(0, dtype=torch.int64, device=self._engine.world.device)
            return dict.fromkeys(self._engine.feature_names, Jagged.from_lengths(none, [])), None
        ids: Any = batch if self._ids is None else self._ids(batch)
        return ids, None if self._weights is None else self._weights(batch)

    def _agree(self, code: int, fault: BaseException | None) -> int:
        """Tell all ranks how this one goes on, and learn how they do; raises where one cannot."""
        world = self._engine.world
        code = most_of(code, world, self._group)
        if code != _FAULT:
            return code
        if fault is not None and world.size == 1:
            raise fault
        words: list[str | None] = [None] * world.size
        own = None if fault is None else f"{type(fault).__name__}: {fault}"
        dist.all_gather_object(words, own, group=self._group)
        if fault is not None:
            raise fault
        rank = next(rank for rank, told in enumerate(words) if told is not None)
        raise DataError(
            refusal(
                _NAME,
                "batches",
                must="be read and looked up on every rank",
                got=f"on rank {rank}: {words[rank]}",
                fix="mend the data of that rank; all ranks have stopped before the same batch",
            )
        )
