"""How long the histories were that a run has trained on: exact counts by length.

A count is a whole number, so the counts of ranks and of the parts of a resumed run add up to those
of an unbroken run on one rank.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gem.data.batch import ExampleBatch
from gem.data.schema import StreamInput
from gem_parallel.collectives import all_reduce_sum
from gem_parallel.launch import World


class HistoryCounts:
    """Number of examples by the number of events that a stream gave them.

    Args:
        streams: of the batches.

    Attributes:
        counts: stream -> examples by length, int64, from length 0 to the longest that is read;
            None after a checkpoint that holds none, which an older version has written.
    """

    def __init__(self, streams: Iterable[StreamInput]) -> None:
        self.counts: dict[str, NDArray[np.int64]] | None = {
            stream.name: np.zeros(stream.max_events + 1, dtype=np.int64) for stream in streams
        }

    def add(self, batch: ExampleBatch) -> None:
        """Count the examples of a batch, from its lengths in host memory.

        Args:
            batch: this rank's examples.
        """
        if self.counts is None:
            return
        for name, counts in self.counts.items():
            lengths = batch.streams[name].numbers.lengths.numpy()
            counts += np.bincount(lengths, minlength=counts.size)

    def merged(self, world: World) -> "HistoryCounts":
        """The counts of all ranks. Every rank has to call this.

        Args:
            world: the ranks.

        Returns:
            New counts, the same on every rank.
        """
        whole = HistoryCounts(())
        whole.counts = None
        known = torch.tensor([int(self.counts is None)], device=world.device)
        if all_reduce_sum(known, world).item() or self.counts is None:
            return whole
        whole.counts = {}
        for name, counts in self.counts.items():
            total = all_reduce_sum(torch.from_numpy(counts.copy()).to(world.device), world)
            whole.counts[name] = total.cpu().numpy()
        return whole

    def tensors(self) -> dict[str, Tensor]:
        """The counts by stream, for a checkpoint; none where they are not known."""
        return {n: torch.from_numpy(c.copy()) for n, c in (self.counts or {}).items()}

    def load(self, tensors: Mapping[str, Tensor], *, keep: bool) -> None:
        """Continue from what ``tensors`` returned.

        Args:
            tensors: by stream, over all ranks; a stream that is missing makes all unknown.
            keep: take the counts: True on exactly one rank, the others begin at 0.
        """
        if self.counts is None or not tensors.keys() >= self.counts.keys():
            self.counts = None
            return
        for name, counts in self.counts.items():
            counts[:] = tensors[name].numpy() if keep else 0
