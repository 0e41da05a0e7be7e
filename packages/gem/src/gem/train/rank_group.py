"""Ranks that do something together, each its part: all of them succeed, or all of them fail."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from gem_opkit.errors import DataError, GemError, refusal
from gem_parallel.launch import World


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks, and how they talk.

    Attributes:
        world: the ranks.
        group: a process group of their own, so that what they say may run beside the collectives
            of training; None for the default one.
    """

    world: World
    group: Any = None

    @classmethod
    def of_its_own(cls, world: World) -> "RankGroup":
        """Make a group that a thread may use while training goes on. Every rank has to call this.

        Args:
            world: the ranks.
        """
        return cls(world, dist.new_group(backend="gloo") if world.size > 1 else None)

    def gather(self, own: Any) -> list[Any]:
        """Tell all ranks something. Every rank has to call this.

        Args:
            own: can be pickled.

        Returns:
            what each rank told, in their order.
        """
        if self.world.size == 1:
            return [own]
        told: list[Any] = [None] * self.world.size
        dist.all_gather_object(told, own, group=self.group)
        return told

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Let a block end well on every rank, or on none. Every rank has to enter it.

        A KeyboardInterrupt or the end of the process is not waited for.

        Args:
            what: the ranks do, for the message of those that did not fail themselves.

        Raises:
            DataError: another rank failed; its own words are in the message.
        """
        fault: BaseException | None = None
        try:
            yield
        except (CheckpointException, Exception) as own:  # noqa: BLE001 - raised below, on all ranks
            fault = own
        told = self.gather(None if fault is None else _words(fault))
        if fault is not None:
            raise fault
        failed = [rank for rank, words in enumerate(told) if words is not None]
        if failed:
            raise DataError(
                refusal(
                    "checkpoint",
                    f"rank {failed[0]}",
                    must=what,
                    got=told[failed[0]],
                    fix="mend that, then continue with --resume",
                )
            )


def _words(fault: BaseException) -> str:
    if isinstance(fault, CheckpointException) and fault.failures:
        fault = next(iter(fault.failures.values()))[0]
    return str(fault) if isinstance(fault, GemError) else f"{type(fault).__name__}: {fault}"
