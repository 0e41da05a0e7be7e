"""Ranks that do something together, each its part: all of them succeed, or all of them fail."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from gem_embeddings.agreement import first_words
from gem_opkit.errors import DataError, refusal
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

        No rank may talk to others within the block: one that fails would leave them waiting.
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
        told = self.gather(None if fault is None else first_words(fault))
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

    def seen_alike(
        self, place: Path, found: Iterator[tuple[Path, bool]]
    ) -> Iterator[tuple[Path, bool]]:
        """Go through checkpoints as long as all ranks find the same. Every rank has to call this.

        Ranks that began at different steps would wait for each other, or learn from different
        weights.

        Args:
            place: the folder that holds them.
            found: checkpoint and whether it is whole, as this rank sees it.

        Yields:
            what ``found`` does.

        Raises:
            DataError: ranks see different ones, or one of them cannot look.
        """
        while True:
            with self.together("look for the newest checkpoint"):
                one = next(found, None)
            told = self.gather(None if one is None else (one[0].name, one[1]))
            other = next((rank for rank, seen in enumerate(told) if seen != told[0]), None)
            if other is not None:
                raise DataError(
                    refusal(
                        "checkpoint",
                        str(place),
                        must="hold the same for every rank",
                        got=f"{_seen(told[0])} for rank 0 and {_seen(told[other])} for rank "
                        f"{other}",
                        fix="give --out a folder that all hosts share; if it is one, start again "
                        "once they all see its newest files",
                    )
                )
            if one is None:
                return
            yield one


def _seen(one: tuple[str, bool] | None) -> str:
    if one is None:
        return "none"
    return one[0] if one[1] else f"{one[0]} with files missing"
