"""Gradients of rows on their way to an update: arrived, held over several passes, merged.

They lie where the rows lie. What ranks of one sharding group send is there after the backward pass;
what other groups have is fetched here, where groups exchange gradients rather than rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gem_embeddings.contract import OptimizerSpec
from gem_embeddings.ops import TableLayout, table_update
from gem_embeddings.sharded.collectives import Collectives
from gem_embeddings.sharded.storage import RowStore
from gem_embeddings.sharded.to_host import ToHost

# Of what is held, no element may be larger: sums of its squares would overflow in fp32.
LARGEST = 2.0**60
_SUM = OptimizerSpec(kind="sgd", lr=1.0)


@dataclass(frozen=True, slots=True)
class RowGradients:
    """What is to move rows of one store.

    Attributes:
        store: of the rows.
        ids_I: its rows, from rank after rank, shard after shard; a row may occur several times.
        grad: their flat gradients, in the format in which they travelled.
        counts: ids from each rank for each shard, (ranks, shards), on the host; a rank that sent
            several times counts as several.
    """

    store: RowStore
    ids_I: Tensor
    grad: Tensor
    counts: Tensor


def joined(parts: Sequence[RowGradients]) -> RowGradients:
    """Put gradients of one store behind each other.

    Args:
        parts: of the store, at least one.

    Returns:
        all of them; the part itself where there is one.
    """
    if len(parts) == 1:
        return parts[0]
    return RowGradients(
        parts[0].store,
        torch.cat([part.ids_I for part in parts]),
        torch.cat([part.grad for part in parts]),
        torch.cat([part.counts for part in parts]),
    )


def one_bag(ids_I: Tensor) -> Tensor:
    """Return the offsets of one bag with all ids, for a feature without pooling.

    Args:
        ids_I: ids of the feature.

    Returns:
        two offsets, on the device; nothing waits for it.
    """
    offsets = ids_I.new_zeros(2)
    offsets[1:].fill_(ids_I.shape[0])
    return offsets


def merged(
    rows_I: Tensor, grad: Tensor, width: int, *, beyond: int, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Add up gradients of equal rows without asking a device how many differ.

    Args:
        rows_I: rows, int64.
        grad: their flat gradients.
        width: elements of a row.
        beyond: number of no row, above all of them.
        scale: what the sums are multiplied by.

    Returns:
        different rows, ascending, then ``beyond`` up to the number of gradients, and their sums
        (I, width), fp32, then zeros.

    Numerics: fp32, in a fixed order: replicas that merge the same gradients get the same bits.
    """
    count = rows_I.shape[0]
    sorted_I, order_I = torch.sort(rows_I, stable=True)
    new_I = torch.zeros_like(sorted_I)
    new_I[1:] = sorted_I[1:] != sorted_I[:-1]
    place_I = new_I.cumsum(0)
    sums = torch.zeros(count * width, dtype=torch.float32, device=grad.device)
    # Gradient descent of zeros: the operator adds in a fixed order on a GPU too.
    table_update(
        sums,
        (),
        torch.empty_like(place_I).scatter_(0, order_I, place_I),
        one_bag(rows_I),
        grad,
        TableLayout.packed([(count, width)], [(0, "none")]),
        counts=[count],
        spec=_SUM,
        grad_scale=-scale,
    )
    different_I = torch.full_like(rows_I, beyond).scatter_(0, place_I, sorted_I)
    return different_I, sums.view(count, width)


class HeldGradients:
    """Gradients of several backward passes.

    Args:
        ranks: that may each send a row once a pass.
        travels_in: format in which sums of all of them travel on; None where they stay.

    Attributes:
        passes: backward passes since the last ``take`` or ``drop``.
    """

    def __init__(self, ranks: int = 1, travels_in: torch.dtype | None = None) -> None:
        self.passes = 0
        # What a sum may reach, spread over the ranks that may add to it.
        self._most = (float("inf") if travels_in is None else torch.finfo(travels_in).max) / ranks
        self._parts: list[list[RowGradients]] = []
        self._coming: list[Any] = []
        self._told: ToHost | None = None

    def add(self, found: Sequence[RowGradients], work: Any, told: ToHost | None = None) -> None:
        """Hold what one backward pass has brought.

        Args:
            found: gradients of each store, of the same stores every time.
            work: to ``wait`` for before they are read.
            told: what other groups were told of its rows.
        """
        self.passes += 1
        self._parts.append(list(found))
        self._coming.append(work)
        # Rows of several passes may be the same ones.
        self._told = told if self.passes == 1 else None

    @property
    def told(self) -> ToHost | None:
        """What other groups were told of all rows that are held."""
        return self._told

    def take(self) -> list[RowGradients]:
        """Hand over what is held of each store."""
        parts = self._parts
        self.drop()
        return [joined(of_store) for of_store in zip(*parts, strict=True)]

    def drop(self) -> None:
        """Hold nothing."""
        self._arrive()
        self.passes, self._parts, self._told = 0, [], None

    def _arrive(self) -> None:
        """Wait for what is on its way."""
        for work in self._coming:
            work.wait()
        self._coming.clear()

    def finite(self, device: torch.device) -> Tensor:
        """Tell whether all elements, and sums of their squares, are finite. Waits for nothing.

        Where sums travel on, elements that are so large that a sum could leave their format count
        as not finite too.

        Args:
            device: of the answer.

        Returns:
            a bool scalar.
        """
        self._arrive()
        grads = [one.grad for found in self._parts for one in found if one.grad.numel()]
        if not grads:
            return torch.ones((), dtype=torch.bool, device=device)
        # The largest absolute value of each; NaN where one is NaN.
        norms = torch._foreach_norm(grads, float("inf"))
        largest = min(LARGEST, self._most / self.passes)
        return (torch.stack([norm.float() for norm in norms]) <= largest).all()


class ReplicaGradients:
    """Merges the gradients of all sharding groups.

    Args:
        replicas: collectives over the ranks that hold the same rows.
        index: of this rank among them.
        wire: dtype of gradients between ranks.
    """

    def __init__(self, replicas: Collectives, index: int, wire: torch.dtype) -> None:
        self._replicas, self._index, self._wire = replicas, index, wire
        self.waits = 0

    def tell(self, rows: Sequence[tuple[RowStore, Tensor]]) -> ToHost:
        """Tell the other groups how many different rows will have gradients. Collective.

        Between this and the gradients lies a backward pass, so that no host waits for its device.

        Args:
            rows: each store on this rank, and its rows that were asked for.

        Returns:
            what `__call__` takes.
        """
        counts: list[Tensor] = []
        for store, rows_I in rows:
            sorted_I = torch.sort(rows_I).values
            new_I = torch.ones_like(sorted_I)
            new_I[1:] = sorted_I[1:] != sorted_I[:-1]
            seen_P = new_I.new_zeros(new_I.shape[0] + 1)
            torch.cumsum(new_I, 0, out=seen_P[1:])
            counts.append(seen_P[torch.searchsorted(sorted_I, store.cuts)].diff())
        return self._gather(torch.cat(counts))

    def _gather(self, counts_K: Tensor) -> ToHost:
        told = counts_K.new_empty(self._replicas.size * counts_K.shape[0])
        self._replicas.all_gather(told, counts_K).wait()
        return ToHost(told)

    def __call__(
        self, found: Sequence[RowGradients], told: ToHost | None = None
    ) -> list[RowGradients]:
        """Fetch what the other groups have. Collective over the replicas.

        Args:
            found: gradients of each store on this rank.
            told: different rows of each group, where `tell` has told them; every rank has it, or
                none.

        Returns:
            gradients of each store from all replicas, in their order: the same on each of them.

        Cost: three exchanges whatever the number of tables: 8 bytes a shard, then 8 bytes and a
            vector for each different row, to every replica. The host waits once, for the counts,
            unless they were told before.
        """
        sums = [
            merged(one.ids_I, one.grad, one.store.width, beyond=one.store.rows) for one in found
        ]
        if told is None:
            # Different rows of each shard: shard follows shard in a store.
            of_stores = [
                torch.searchsorted(rows_I, one.store.cuts).diff()
                for one, (rows_I, _) in zip(found, sums, strict=True)
            ]
            told = self._gather(torch.cat(of_stores))
        shards = [len(one.store.shards) for one in found]
        counts = told.read().view(self._replicas.size, -1).split(shards, dim=1)
        self.waits += told.waited
        # Ids of each replica for each store.
        sizes_MS = torch.stack([of_store.sum(dim=1) for of_store in counts], dim=1)
        sizes = sizes_MS.tolist()
        own = sizes[self._index]
        ids = torch.cat([rows_I[:n] for (rows_I, _), n in zip(sums, own, strict=True)])
        grads = torch.cat([sum_IE[:n].view(-1) for (_, sum_IE), n in zip(sums, own, strict=True)])
        widths = [one.store.width for one in found]
        heard_ids = self._split(ids, sizes, [1] * len(found))
        heard_grads = self._split(grads.to(self._wire), sizes, widths)
        return [
            RowGradients(one.store, torch.cat(of_ids), torch.cat(of_grads), of_counts)
            for one, of_ids, of_grads, of_counts in zip(
                found,
                zip(*heard_ids, strict=True),
                zip(*heard_grads, strict=True),
                counts,
                strict=True,
            )
        ]

    def _split(
        self, sent: Tensor, sizes: Sequence[Sequence[int]], widths: Sequence[int]
    ) -> list[list[Tensor]]:
        """Exchange a flat message, and take it apart by replica and store."""
        lengths = [[n * w for n, w in zip(one, widths, strict=True)] for one in sizes]
        heard = self._replicas.all_gather_uneven(sent, [sum(one) for one in lengths])
        parts = list(heard.split([n for one in lengths for n in one]))
        stores = len(widths)
        return [parts[k * stores : (k + 1) * stores] for k in range(len(sizes))]
