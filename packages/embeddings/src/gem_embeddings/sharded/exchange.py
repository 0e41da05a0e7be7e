"""Ids to the ranks that hold their rows: what a call asks for, and what arrives.

The ids of all tables are numbered through, sorted once and sent once each, however many features
and examples have them. The host reads one short tensor a call: how many ids go to and come from
each rank, which ``all_to_all`` has to know. In the same message travels whether a rank refuses its
batch, so that bad ids on one rank end the call on all of them and none is left waiting.

A call has two halves. ``begin`` leaves that tensor on its way to the host, ``finish`` reads it:
with work between the two, such as a step of training, the host waits for no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gem_embeddings.sharded.collectives import Collectives
from gem_embeddings.sharded.places import Places
from gem_embeddings.sharded.to_host import ToHost


@dataclass(slots=True)
class Arrived:
    """What one call asks for, and what it is asked for.

    Attributes:
        asked: different rows of each table that this rank asks for.
        first: place of the first of them among ``keys``.
        keys: the different rows that this rank asks for, numbered through all tables, ascending;
            longer than needed.
        places_I: for each id its place among ``keys``.
        sent_K: ids for each route, on the device.
        begin_K: place of the first of them among ``keys``, on the device.
        first_T: ``first`` on the device, and the number of all.
        sent: ids for each route, on the host.
        received: ids from each rank for each own shard, (ranks, shards), on the host.
        everywhere: different rows of each replicated table on each rank, (ranks, tables).
        refused: ranks of the group that refused their batch.
        outside: whether this rank refuses its batch.
        rows: rows of own stores, from rank after rank, for each shard after shard.
        work: what to wait for before ``rows`` is read.
        order: place of each part of the vectors in the message, where it was worked out.
    """

    asked: list[int]
    first: list[int]
    keys: Tensor
    places_I: Tensor
    sent_K: Tensor
    begin_K: Tensor
    first_T: Tensor
    sent: Tensor
    received: Tensor
    everywhere: Tensor
    refused: list[int]
    outside: bool
    rows: Tensor
    work: Any = None
    order: Tensor | None = None


@dataclass(slots=True)
class Begun:
    """A call whose sizes are on their way to the host.

    Attributes:
        arrived: what is known of it without them.
        sizes: on their way.
    """

    arrived: Arrived
    sizes: ToHost


class IdExchange:
    """Send ids.

    Args:
        places: where the tables lie.
        rank: of this rank in its sharding group.
        collectives: over the sharding group.
        device: of the ids.

    Attributes:
        waits: calls whose sizes had not come when they were read, so that the host waited.
    """

    def __init__(
        self, places: Places, rank: int, collectives: Collectives, device: torch.device
    ) -> None:
        self._collectives, self._device = collectives, device
        self.waits = 0
        first_key, routes = places.first_key, places.routes
        starts = [first_key[route.table] + route.row_start for route in routes]
        ends = [first_key[route.table] + route.row_end for route in routes]
        cuts = sorted({*starts, *ends, *first_key})
        at = {cut: index for index, cut in enumerate(cuts)}

        def on_device(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64).to(device)

        self._cuts_X = on_device(cuts)
        copied = [(at[first_key[t]], at[first_key[t + 1]]) for t in places.replicated]
        self._from_K = on_device([*(at[cut] for cut in starts), *(a for a, _ in copied)])
        self._to_K = on_device([*(at[cut] for cut in ends), *(b for _, b in copied)])
        self._tables_T = on_device([at[cut] for cut in first_key])
        # What turns a key into a row of the store that holds it.
        first_rows = [row for shards in places.by_rank for row in places.first_rows(shards)]
        self._shift_K = on_device([s - row for s, row in zip(starts, first_rows, strict=True)])
        # For each rank: this rank's flag, counts of its shards, those of replicated tables.
        message: list[int] = []
        copies = [1 + len(routes) + index for index in range(len(copied))]
        sizes = [len(shards) for shards in places.by_rank]
        self._route_ends = list(accumulate(sizes))
        for begin, size in zip([0, *self._route_ends], sizes, strict=False):
            message += [0, *range(1 + begin, 1 + begin + size), *copies]
        self._message = on_device(message)
        self._sizes = [1 + size + len(copies) for size in sizes]
        self._own = sizes[rank]

    def send(self, keys_I: Tensor, refuses: Tensor | int, *, send_rows: bool = True) -> Arrived:
        """Send ids to the ranks that hold their rows. Collective over the sharding group.

        Args:
            keys_I: rows numbered through all tables, int64; beyond the last row for an id that is
                not looked up.
            refuses: above 0 where this rank refuses its batch; its ids are not sent then.
            send_rows: False where counts are all that is wanted.

        Returns:
            what arrived; where a rank refused, without rows.
        """
        return self.finish(self.begin(keys_I, refuses), send_rows=send_rows)

    def begin(self, keys_I: Tensor, refuses: Tensor | int) -> Begun:
        """Tell the ranks how many ids they will get. Collective; nothing waits for a GPU.

        Args:
            keys_I: as for ``send``.
            refuses: as for ``send``.

        Returns:
            what ``finish`` takes, on every rank in the order in which calls have begun.
        """
        device, routes = self._device, self._shift_K.shape[0]
        sorted_I, order_I = torch.sort(keys_I)
        new_I = torch.ones_like(sorted_I)
        new_I[1:] = sorted_I[1:] != sorted_I[:-1]
        seen_P = torch.zeros(keys_I.shape[0] + 1, dtype=torch.int64, device=device)
        torch.cumsum(new_I, 0, out=seen_P[1:])
        place_I = seen_P[1:] - 1
        # Different rows before each boundary of a shard or table.
        before_X = seen_P[torch.searchsorted(sorted_I, self._cuts_X)]
        begin_K = before_X[self._from_K]
        sent_K = before_X[self._to_K] - begin_K
        first_T = before_X[self._tables_T]
        # Filled on the device: a copy from the host would wait for it.
        flag = torch.zeros(1, dtype=torch.int64, device=device).add_(refuses)
        step = self._sizes[0] - self._route_ends[0] + self._own
        told, _ = self._collectives.all_to_all(
            torch.cat([flag, sent_K])[self._message], [step] * self._ranks, self._sizes
        )
        told = torch.cat([flag, first_T, sent_K[:routes], told])
        arrived = Arrived(
            asked=[],
            first=[],
            keys=torch.empty_like(sorted_I).scatter_(0, place_I, sorted_I),
            places_I=torch.empty_like(keys_I).scatter_(0, order_I, place_I),
            sent_K=sent_K[:routes],
            begin_K=begin_K[:routes],
            first_T=first_T,
            sent=told[:0],
            received=told[:0],
            everywhere=told[:0],
            refused=[],
            outside=False,
            rows=keys_I[:0],
        )
        return Begun(arrived, ToHost(told))

    def finish(self, begun: Begun, *, send_rows: bool = True) -> Arrived:
        """Send the ids of a call that has begun. Collective over the sharding group.

        Args:
            begun: from ``begin``; taken once.
            send_rows: as for ``send``.

        Returns:
            as ``send``.
        """
        arrived, routes = begun.arrived, self._shift_K.shape[0]
        host = begun.sizes.read()
        self.waits += begun.sizes.waited
        step = self._sizes[0] - self._route_ends[0] + self._own
        parts = [1, arrived.first_T.shape[0], routes, step * self._ranks]
        flags, first, sent, words = host.split(parts)
        words = words.view(self._ranks, step)
        arrived.asked, arrived.first = first.diff().tolist(), first.tolist()[:-1]
        arrived.sent = sent
        arrived.received = words[:, 1 : 1 + self._own]
        arrived.everywhere = words[:, 1 + self._own :]
        arrived.refused = (words[:, 0] > 0).nonzero().flatten().tolist()
        arrived.outside = bool(flags[0] > 0)
        if send_rows and not arrived.refused:
            self._send_rows(arrived)
        return arrived

    @property
    def _ranks(self) -> int:
        return self._collectives.size

    def by_rank(self, numbers: Tensor) -> list[int]:
        """Add up what each route has, for each rank.

        Args:
            numbers: one for each route, on the host.

        Returns:
            a sum for each rank of the group.
        """
        reached = torch.cat([numbers.new_zeros(1), numbers.cumsum(0)])
        return reached[torch.tensor([0, *self._route_ends])].diff().tolist()

    def _send_rows(self, arrived: Arrived) -> None:
        total = int(arrived.sent.sum())
        # Where a route's ids begin in the message, and so which key each of its places takes.
        move_K = arrived.begin_K - (arrived.sent_K.cumsum(0) - arrived.sent_K)
        both = torch.stack([move_K, self._shift_K]).repeat_interleave(
            arrived.sent_K, dim=1, output_size=total
        )
        source = torch.arange(total, device=self._device) + both[0]
        arrived.rows, arrived.work = self._collectives.all_to_all(
            arrived.keys[source] - both[1],
            arrived.received.sum(dim=1).tolist(),
            self.by_rank(arrived.sent),
            later=True,
        )
