"""Row-wise AdaGrad of rows whose columns lie on several ranks: one accumulator for the whole row.

The rule divides a row's gradient by a mean over all of its columns. The ranks that hold the columns
of a range of rows receive the same ids in the same order, so they exchange one number for each id,
the square sum of their own columns, and each adds up the same numbers in the same order. All keep
equal accumulators, and the table learns as if it were whole; a state can be loaded under any plan.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gem_embeddings.contract import OptimizerSpec
from gem_embeddings.ops import table_update
from gem_embeddings.sharded.collectives import Collectives
from gem_embeddings.sharded.gradients import RowGradients, merged, one_bag
from gem_embeddings.sharded.places import Places, Shard, StoreKey
from gem_embeddings.sharded.storage import RowStore


class CutRows:
    """Move rows that lie in pieces.

    Args:
        places: where the tables lie.
        rank: of this rank in its sharding group.
        collectives: over the sharding group.
        stores: shards of this rank.
        optimizer: row-wise AdaGrad, where there are such rows.
        seed: of rounding.
    """

    def __init__(
        self,
        places: Places,
        rank: int,
        collectives: Collectives,
        stores: Mapping[StoreKey, RowStore],
        optimizer: OptimizerSpec,
        *,
        seed: int,
    ) -> None:
        self._places, self._collectives, self._seed = places, collectives, seed
        self._optimizer = optimizer
        self._sgd = OptimizerSpec(kind="sgd", lr=optimizer.lr)
        # The pieces of the same rows, in the order of their columns.
        pieces: dict[tuple[int, int], list[Shard]] = {}
        for shard in places.routes:
            if shard.table in places.in_pieces:
                pieces.setdefault((shard.table, shard.row_start), []).append(shard)
        own = [shard for store in stores.values() for shard in store.shards]
        self._families = {
            shard: sorted(
                pieces[shard.table, shard.row_start], key=lambda other: other.column_start
            )
            for shard in own
            if shard.table in places.in_pieces
        }

    def move(self, found: Sequence[RowGradients], *, lr: float, step: int, scale: float) -> None:
        """Move rows. Collective over the sharding group.

        Args:
            found: gradients of each store whose rows lie in pieces; a store may be empty on this
                rank.
            lr: learning rate.
            step: of the tables.
            scale: what gradients are multiplied by.
        """
        sums: dict[Shard, tuple[RowStore, Tensor, Tensor]] = {}
        for of_store in found:
            store, shards = of_store.store, len(of_store.store.shards)
            sizes = of_store.counts.flatten().tolist()
            ids = of_store.ids_I.split(sizes) if sizes else ()
            grads = of_store.grad.view(-1, store.width).split(sizes) if sizes else ()
            for k, shard in enumerate(store.shards):
                ids_I, grad = torch.cat(ids[k::shards]), torch.cat(grads[k::shards]).view(-1)
                sums[shard] = (
                    store,
                    *merged(ids_I, grad, store.width, beyond=store.rows, scale=scale),
                )
        nothing = torch.empty(0, dtype=torch.float32, device=found[0].grad.device)
        totals = self._totals(
            {shard: grad_IE.square().sum(dim=1) for shard, (_, _, grad_IE) in sums.items()},
            nothing,
        )
        for shard, (store, rows_I, grad_IE) in sums.items():
            if rows_I.shape[0] == 0:
                continue
            sum_R = store.states["sum"].whole
            inside_I = rows_I.clamp(max=store.rows - 1)
            width = self._places.specs[shard.table].embedding_dim
            sum_R.index_add_(0, inside_I, totals[shard] / width)
            scaled_I = sum_R[inside_I] / self._optimizer.moment_scale
            scale_I = scaled_I.sqrt_().add_(self._optimizer.eps).reciprocal_()
            table_update(
                store.weights.whole,
                (),
                rows_I,
                one_bag(rows_I),
                (grad_IE * scale_I[:, None]).reshape(-1),
                store.layout,
                counts=[rows_I.shape[0]],
                spec=self._sgd,
                lr=lr,
                step=step,
                seed=self._seed,
            )

    def _totals(self, sums: Mapping[Shard, Tensor], nothing: Tensor) -> dict[Shard, Tensor]:
        """Add up the square sums of all pieces of a row, in the order of their columns."""
        size = self._collectives.size
        # For each rank, own shards whose rows it shares; both sides walk them in one order.
        shared: list[list[Shard]] = [[] for _ in range(size)]
        for shard in sorted(sums, key=lambda s: (s.table, s.row_start)):
            for piece in self._families[shard]:
                shared[piece.rank].append(shard)
        sent = [sums[shard] for members in shared for shard in members]
        splits = [sum(sums[shard].shape[0] for shard in members) for members in shared]
        heard, _ = self._collectives.all_to_all(torch.cat([nothing, *sent]), splits, splits)
        parts: Sequence[Tensor] = heard.split([part.shape[0] for part in sent]) if sent else ()
        told = dict(
            zip([(r, s) for r, members in enumerate(shared) for s in members], parts, strict=True)
        )
        return {
            shard: torch.stack([told[piece.rank, shard] for piece in self._families[shard]]).sum(0)
            for shard in sums
        }
