"""Vectors from the ranks that hold rows to those that asked, and gradients the other way.

One flat message a direction: for each rank its shards, store after store, for each shard its ids in
ascending order, for each id the columns of the shard. Who asked and who answers know the order from
the plan and the counts, so nothing but elements is sent.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gem_embeddings.ops import table_lookup
from gem_embeddings.sharded.collectives import Collectives, Done
from gem_embeddings.sharded.exchange import Arrived, IdExchange
from gem_embeddings.sharded.gradients import RowGradients, one_bag
from gem_embeddings.sharded.places import Places, StoreKey
from gem_embeddings.sharded.storage import RowStore


class Traffic:
    """Read the rows that a call asks for, and bring their gradients to them.

    Args:
        places: where the tables lie.
        rank: of this rank in its sharding group.
        exchange: of the ids.
        collectives: over the sharding group.
        stores: shards of this rank, for every store that any rank has.
        copies: replicated tables, which every rank has.
        wire: dtype of vectors and gradients between ranks.
        device: of the rows.
    """

    def __init__(
        self,
        places: Places,
        rank: int,
        exchange: IdExchange,
        collectives: Collectives,
        stores: Mapping[StoreKey, RowStore],
        copies: Mapping[StoreKey, RowStore],
        *,
        wire: torch.dtype,
        device: torch.device,
    ) -> None:
        self._places, self._exchange, self._collectives = places, exchange, collectives
        self._stores, self._copies = stores, copies
        # Nothing travels on a single rank, so nothing is rounded.
        self._wire = wire if collectives.talks else torch.float32
        routes = places.routes
        self._columns = torch.tensor([route.columns for route in routes], dtype=torch.int64)
        # Own shards of each store are neighbours in the message.
        own = [places.store_of(shard) for shard in places.by_rank[rank]]
        self._own = {key: (own.index(key) if key in own else 0, own.count(key)) for key in stores}
        # Whether vectors travel in the order of tables and rows, so that none has to be moved.
        order = [(route.table, route.row_start) for route in routes]
        whole = all(r.columns == places.specs[r.table].embedding_dim for r in routes)
        self._in_order = whole and not copies and order == sorted(order)
        # Vectors are moved in parts of as many elements as divide every width and cut.
        widths = [spec.embedding_dim for spec in places.specs]
        self._part = math.gcd(*widths, *(r.column_start for r in routes))

        def in_parts(elements: Sequence[int]) -> Tensor:
            return torch.tensor([n // self._part for n in elements], dtype=torch.int64).to(device)

        self._widths_T = in_parts(widths)
        self._columns_K = in_parts([route.columns for route in routes])
        self._strides_K = in_parts([widths[route.table] for route in routes])
        self._starts_K = in_parts([route.column_start for route in routes])
        self._table_K = torch.tensor([r.table for r in routes], dtype=torch.int64).to(device)

    def fetch(self, arrived: Arrived) -> Tensor:
        """Return the vectors of the different rows that this rank asked for.

        Args:
            arrived: the ids.

        Returns:
            flat fp32: table after table, row after row.
        """
        found = [
            table_lookup(
                store.weights.whole,
                ids_I,
                one_bag(ids_I),
                store.layout,
                counts=[ids_I.shape[0]],
                out_dtype=self._wire,
            )[0]
            for store, ids_I in zip(self._stores.values(), self._ids(arrived), strict=True)
        ]
        told = arrived.keys.new_empty(0, dtype=self._wire)
        if self._stores:
            asked, answered = self._elements(arrived)
            told, _ = self._collectives.all_to_all(self._joined(found, arrived), asked, answered)
        told = told.to(torch.float32)
        if self._in_order:
            return told
        vectors = told.new_empty(self._size(arrived))
        parts = told.view(-1, self._part)
        vectors.view(-1, self._part).index_copy_(0, self._order(arrived), parts)
        tables = self._tables(arrived, vectors)
        for store in self._copies.values():
            for index, shard in enumerate(store.shards):
                rows_I = self._rows_of(arrived, shard.table)
                tables[shard.table].copy_(store.shard_weight(index).index_select(0, rows_I))
        return vectors

    def asked_for(self, arrived: Arrived) -> list[tuple[RowStore, Tensor]]:
        """Return the rows of each store of this rank that any rank asks for.

        Args:
            arrived: the ids.

        Returns:
            stores with their rows, from rank after rank; those of copies left out.
        """
        return list(zip(self._stores.values(), self._ids(arrived), strict=True))

    def bring(self, arrived: Arrived, grad: Tensor) -> tuple[list[RowGradients], Any]:
        """Bring gradients to the ranks that hold the rows. Collective over the sharding group.

        Args:
            arrived: the ids.
            grad: gradient of what ``fetch`` returned.

        Returns:
            what all ranks have for the rows of this one: for each store, then each store of copies;
            and something to ``wait`` for before the gradients are read.
        """
        found: list[RowGradients] = []
        work: Any = Done()
        if self._stores:
            sent = grad
            if not self._in_order:
                order = self._order(arrived)
                sent = grad.view(-1, self._part).index_select(0, order).view(-1)
            asked, answered = self._elements(arrived)
            heard, work = self._collectives.all_to_all(
                sent.to(self._wire), answered, asked, later=True
            )
            widths = [store.width for store in self._stores.values()]
            if len(widths) > 1:  # taken apart by store, which reads it
                work.wait()
                work = Done()
            found = [
                RowGradients(store, ids_I, of_store, arrived.received[:, self._shards(key)])
                for (key, store), ids_I, of_store in zip(
                    self._stores.items(),
                    self._ids(arrived),
                    self._parted(heard, arrived, widths),
                    strict=True,
                )
            ]
        tables = self._tables(arrived, grad) if self._copies else []
        found += [self._everyones(store, arrived, tables) for store in self._copies.values()]
        return found, work

    def _shards(self, key: StoreKey) -> slice:
        begin, count = self._own[key]
        return slice(begin, begin + count)

    def _counts(self, arrived: Arrived) -> list[list[int]]:
        """Ids from each rank for each store."""
        sums = [arrived.received[:, self._shards(key)].sum(dim=1) for key in self._stores]
        return torch.stack(sums, dim=1).tolist() if sums else []

    def _ids(self, arrived: Arrived) -> list[Tensor]:
        """Rows of each store that are asked for, from rank after rank."""
        return self._parted(arrived.rows, arrived, [1] * len(self._stores))

    def _parted(self, message: Tensor, arrived: Arrived, widths: Sequence[int]) -> list[Tensor]:
        """Take a message from all ranks apart by store."""
        if len(widths) == 1:
            return [message]
        counts = self._counts(arrived)
        sizes = [n * w for of_rank in counts for n, w in zip(of_rank, widths, strict=True)]
        parts = message.split(sizes) if sizes else ()
        return [torch.cat(parts[index :: len(widths)]) for index in range(len(widths))]

    def _joined(self, found: Sequence[Tensor], arrived: Arrived) -> Tensor:
        """Put what the stores answer into a message to all ranks."""
        if len(found) == 1:
            return found[0]
        if not found:
            return torch.empty(0, dtype=self._wire, device=arrived.rows.device)
        counts = self._counts(arrived)
        by_store = [
            flat.split([of_rank[index] * store.width for of_rank in counts])
            for index, (flat, store) in enumerate(zip(found, self._stores.values(), strict=True))
        ]
        return torch.cat([part for parts in zip(*by_store, strict=True) for part in parts])

    def _elements(self, arrived: Arrived) -> tuple[list[int], list[int]]:
        """Elements that this rank asks each rank for, and those that it answers."""
        asked = self._exchange.by_rank(arrived.sent * self._columns)
        widths = [store.width for store in self._stores.values()]
        answered = [
            sum(n * w for n, w in zip(of_rank, widths, strict=True))
            for of_rank in self._counts(arrived)
        ]
        return asked, answered or [0] * self._collectives.size

    def _size(self, arrived: Arrived) -> int:
        specs = self._places.specs
        return sum(n * spec.embedding_dim for n, spec in zip(arrived.asked, specs, strict=True))

    def _tables(self, arrived: Arrived, flat: Tensor) -> list[Tensor]:
        """View vectors table by table."""
        shapes = [
            (n, spec.embedding_dim)
            for n, spec in zip(arrived.asked, self._places.specs, strict=True)
        ]
        parts = flat.split([rows * width for rows, width in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _order(self, arrived: Arrived) -> Tensor:
        """For each part of the message, its place among the parts of the vectors.

        Worked out on the device, without a loop over routes, of which there are as many as ranks
        times tables.
        """
        if arrived.order is not None:
            return arrived.order
        first_T = arrived.first_T[:-1]
        sizes_T = arrived.first_T.diff() * self._widths_T
        tables_T = sizes_T.cumsum(0) - sizes_T
        rows_K = arrived.begin_K - first_T[self._table_K]
        begin_K = tables_T[self._table_K] + rows_K * self._strides_K + self._starts_K
        parts_K = arrived.sent_K * self._columns_K
        before_K = parts_K.cumsum(0) - parts_K
        total = int((arrived.sent * self._columns).sum()) // self._part
        spread = torch.stack([begin_K, before_K, self._strides_K, self._columns_K])
        begin, before, stride, columns = spread.repeat_interleave(parts_K, dim=1, output_size=total)
        within = torch.arange(total, device=begin.device) - before
        row = within // columns
        arrived.order = begin + row * stride + (within - row * columns)
        return arrived.order

    def _rows_of(self, arrived: Arrived, table: int) -> Tensor:
        begin = arrived.first[table]
        return arrived.keys[begin : begin + arrived.asked[table]] - self._places.first_key[table]

    def _everyones(
        self, store: RowStore, arrived: Arrived, grads: Sequence[Tensor]
    ) -> RowGradients:
        """What all ranks have for the rows of copies, told to all, so that all move them alike."""
        tables = [shard.table for shard in store.shards]
        ids_I = torch.cat(
            [
                self._rows_of(arrived, table) + first
                for table, first in zip(tables, store.first_rows, strict=True)
            ]
        )
        flat = torch.cat([grads[table].reshape(-1) for table in tables]).to(self._wire)
        counts = arrived.everywhere[:, [self._places.replicated.index(t) for t in tables]]
        sizes = counts.sum(dim=1).tolist()
        return RowGradients(
            store,
            self._collectives.all_gather_uneven(ids_I, sizes),
            self._collectives.all_gather_uneven(flat, [n * store.width for n in sizes]),
            counts,
        )
