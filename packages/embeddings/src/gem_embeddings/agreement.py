"""How ranks agree to go on, or to stop together, before one of them would wait for another."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from gem_opkit.errors import DataError, GemError, refusal
from gem_parallel.launch import World

# Held for a while after their collective. A thread of gloo lets go of a tensor some time after the
# rank has gone on; if it is the last to do so it needs the interpreter, and a process that ends at
# that moment aborts. Python's own reference spares it that.
_held: deque[Tensor] = deque(maxlen=64)


def most_of(value: int, world: World, group: dist.ProcessGroup | None = None) -> int:
    """Return the largest of a number over all ranks. Every rank has to call this.

    Args:
        value: of this rank.
        world: the ranks.
        group: a gloo group over which they talk; None for the default one, whatever it is.

    Returns:
        the same on every rank. Waits for the device where ranks talk over NCCL.
    """
    if world.size == 1:
        return value
    device: Any = world.device if group is None else "cpu"
    number = torch.tensor([value], dtype=torch.int64, device=device)
    _held.append(number)
    dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
    return int(number)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Ranks that do something to one thing, all of them or none.

    Attributes:
        world: the ranks.
        group: a gloo group over which they talk; None for the default one.
        op: who refuses.
        name: of the thing, for errors.
        must: what has to be done to it.
        fix: what can be done where it fails.
    """

    world: World
    group: dist.ProcessGroup | None
    op: str
    name: str
    must: str
    fix: str

    def refused(self, got: object) -> DataError:
        """Make the error of a rank.

        Args:
            got: what happened.
        """
        return DataError(refusal(self.op, self.name, must=self.must, got=got, fix=self.fix))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Let a block succeed on every rank, or fail on every rank. Every rank has to enter it.

        No rank may talk to others within the block: one that fails would leave them waiting.

        Raises:
            DataError: another rank failed; its own error is in the message. The rank that failed
                raises its own: as it is where it is one of ours, otherwise within a DataError.
        """
        fault: BaseException | None = None
        try:
            yield
        except BaseException as own:  # noqa: BLE001 - raised again below, after the others were told
            fault = own
        if most_of(int(fault is not None), self.world, self.group) and self.world.size > 1:
            told: list[str | None] = [None] * self.world.size
            # Words, not the error: not every error can be sent.
            own_words = None if fault is None else first_words(fault)
            dist.all_gather_object(told, own_words, group=self.group)
            failed = [rank for rank, words in enumerate(told) if words is not None]
            if fault is None:
                raise self.refused(f"rank {failed[0]}: {told[failed[0]]}")
        if fault is not None:
            if isinstance(fault, GemError) or not isinstance(
                fault, CheckpointException | Exception
            ):
                raise fault
            raise self.refused(first_words(fault)) from fault


def first_words(fault: BaseException) -> str:
    """What really happened: torch wraps the fault of a rank into one that is no Exception.

    Args:
        fault: as it was raised.
    """
    if isinstance(fault, CheckpointException) and fault.failures:
        fault = next(iter(fault.failures.values()))[0]
    return str(fault) if isinstance(fault, GemError) else f"{type(fault).__name__}: {fault}"
