"""All rows that one rank holds: its shards, and copies of tables that every rank has."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gem_embeddings.contract import OptimizerSpec
from gem_embeddings.sharded.collectives import Collectives
from gem_embeddings.sharded.places import TORCH_DTYPE, Places, Shard, StoreKey
from gem_embeddings.sharded.replicas import Gathered, ReplicaBuffer, Replicas
from gem_embeddings.sharded.storage import RowStore


class Rows:
    """The rows of one rank.

    Args:
        places: where the tables lie.
        rank: of this rank in its sharding group.
        optimizer: how rows learn.
        replicas: who else holds the same rows.
        alike: whether all replicas move their rows by the same gradients.
        device: of the rows.
        seed: of the initial weights and of rounding.

    Attributes:
        stores: shards of this rank, for every store that any rank has.
        copies: replicated tables.
    """

    def __init__(
        self,
        places: Places,
        rank: int,
        optimizer: OptimizerSpec,
        replicas: Replicas,
        *,
        alike: bool,
        device: torch.device,
        seed: int,
    ) -> None:
        self._places, self._alike, self._device = places, alike, device

        def stores_of(
            shards: Sequence[Shard], keys: Iterable[StoreKey]
        ) -> dict[StoreKey, RowStore]:
            return {
                key: RowStore(
                    key,
                    [shard for shard in shards if places.store_of(shard) == key],
                    places.specs,
                    optimizer,
                    replicas,
                    device=device,
                    seed=seed,
                )
                for key in keys
            }

        self.stores = stores_of(places.by_rank[rank], places.stores)
        # Apart from the shards, so that all ranks of a group hold equal buffers of copies and
        # their means are formed in the same order.
        copies = [
            Shard(table, rank, 0, spec.num_embeddings, 0, spec.embedding_dim)
            for table, spec in enumerate(places.specs)
            if table in places.replicated
        ]
        self.copies = stores_of(copies, sorted({places.store_of(shard) for shard in copies}))

    @property
    def all(self) -> list[RowStore]:
        """Stores of shards, then those of copies."""
        return [*self.stores.values(), *self.copies.values()]

    def buffers(self, *, states: bool = True) -> Iterator[ReplicaBuffer]:
        """Yield the buffers of all stores.

        Args:
            states: whether optimizer rows are among them.
        """
        for store in self.all:
            yield from store.buffers() if states else (store.weights,)

    def whole(self, *, states: bool) -> Gathered:
        """Gather what is kept as slices for the length of a block.

        Args:
            states: whether optimizer rows are needed too.
        """
        return Gathered(self.buffers(states=states))

    def average(self, step: int) -> None:
        """Make all replicas equal after an update. Collective over the replicas.

        Args:
            step: of the tables, so that each rounding draws anew.
        """
        for store in self.all:
            if self._alike:
                store.take_slices()
            else:
                store.average(step)

    def full_weight(self, table: int, group: Collectives) -> Tensor:
        """Gather one table. Collective over all ranks.

        Args:
            table: its index.
            group: collectives over the sharding group.

        Returns:
            (R, E) in the dtype of its rows; a copy.
        """
        spec = self._places.specs[table]
        shape, dtype = (spec.num_embeddings, spec.embedding_dim), TORCH_DTYPE[spec.row_dtype]
        with self.whole(states=False) as rows:
            rows.wait()
            whole_RE = torch.zeros(shape, dtype=dtype, device=self._device)
            for store in self.all:
                for index, shard in enumerate(store.shards):
                    if shard.table == table:
                        columns = slice(shard.column_start, shard.column_end)
                        part = store.shard_weight(index)
                        whole_RE[shard.row_start : shard.row_end, columns] = part
        if table not in self._places.replicated:
            # Every element is on one rank, and zero on the others.
            group.all_reduce_sum(whole_RE)
        return whole_RE

    def resident_bytes(self) -> int:
        """Return the bytes that weights and optimizer rows take now."""
        return sum(buffer.resident_bytes for buffer in self.buffers())
