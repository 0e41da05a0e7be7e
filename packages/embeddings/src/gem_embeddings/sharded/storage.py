"""The rows that one rank holds: all shards of one number format and width in one flat buffer.

Shard follows shard, so that the store is one table to the operators: one launch reads or moves the
rows of any number of shards, and one collective gathers or averages them. Optimizer rows lie
beside them: one number a row, or one an element, at the same places.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gem_embeddings.contract import OptimizerSpec, TableSpec
from gem_embeddings.initial import fill_initial
from gem_embeddings.ops import TableLayout
from gem_embeddings.rules import STATE_NAMES, is_row_wise
from gem_embeddings.sharded.places import TORCH_DTYPE, Shard, StoreKey
from gem_embeddings.sharded.replicas import ReplicaBuffer, Replicas
from gem_opkit.stochastic import philox_words, round_stochastically


class RowStore:
    """The shards of one number format and width on this rank.

    Args:
        key: what the shards share.
        shards: what this rank holds, in the order in which it travels; may be none.
        specs: all tables.
        optimizer: how rows learn.
        replicas: who else holds the same rows.
        device: of the rows.
        seed: of the initial weights and of rounding.

    Attributes:
        shards: as given.
        first_rows: row of the store at which each begins.
        rows: of all shards.
        cuts: ``first_rows`` and ``rows``, int64 on the device.
        width: elements of a row.
        dtype: of the rows.
        weights: the rows.
        states: optimizer rows by name, fp32.
        row_wise: optimizer rows are one number a row.
        layout: the store as one table with one feature without pooling.
    """

    def __init__(
        self,
        key: StoreKey,
        shards: Sequence[Shard],
        specs: Sequence[TableSpec],
        optimizer: OptimizerSpec,
        replicas: Replicas,
        *,
        device: torch.device,
        seed: int,
    ) -> None:
        row_dtype, _, self.width = key
        self.shards = tuple(shards)
        self.dtype = TORCH_DTYPE[row_dtype]
        self._seed = seed
        self.first_rows: list[int] = []
        rows = 0
        for shard in self.shards:
            self.first_rows.append(rows)
            rows += shard.rows
        self.rows = rows
        self.cuts = torch.tensor([*self.first_rows, rows], dtype=torch.int64).to(device)
        self.layout = TableLayout.packed([(rows, self.width)], [(0, "none")])
        self.row_wise = is_row_wise(optimizer.kind)
        elements = rows * self.width
        self.weights = ReplicaBuffer(elements, self.dtype, device, replicas)
        self.states = {
            name: ReplicaBuffer(
                rows if self.row_wise else elements, torch.float32, device, replicas
            )
            for name in STATE_NAMES[optimizer.kind]
        }
        for index, shard in enumerate(self.shards):
            fill_initial(
                self.shard_weight(index),
                specs[shard.table],
                seed=seed,
                row_start=shard.row_start,
                column_start=shard.column_start,
            )
        for buffer in self.buffers():
            buffer.keep()

    def buffers(self) -> Iterator[ReplicaBuffer]:
        """Yield weights, then optimizer rows."""
        yield self.weights
        yield from self.states.values()

    def shard_weight(self, index: int) -> Tensor:
        """View the rows of one shard; the whole must be there.

        Args:
            index: of the shard in ``shards``.

        Returns:
            (rows, columns), in the memory of the table.
        """
        begin, rows = self.first_rows[index] * self.width, self.shards[index].rows
        return self.weights.whole[begin : begin + rows * self.width].view(rows, self.width)

    def take_slices(self) -> None:
        """Keep the own slice of what all replicas have moved alike; nothing where all is kept."""
        for buffer in self.buffers():
            buffer.take_slice()

    def average(self, step: int) -> None:
        """Replace weights and optimizer rows by their mean over the replicas.

        Args:
            step: of the tables, so that each rounding draws anew.
        """

        def rounded(mean: Tensor, begin: int) -> Tensor:
            places = torch.arange(begin, begin + mean.shape[0], device=mean.device)
            zero = torch.zeros_like(places)
            # Apart from the words of an update, whose third counter counts groups of a row.
            word = philox_words(self._seed, places, places >> 32, zero - 1, zero + step)[0]
            return round_stochastically(mean, word, self.dtype)

        for buffer in self.buffers():
            buffer.average(rounded)
