"""Move the rows of a rank by the gradients that have arrived for them."""

from collections.abc import Callable, Mapping, Sequence

from gem_embeddings.contract import OptimizerSpec
from gem_embeddings.ops import table_update
from gem_embeddings.sharded.collectives import Collectives
from gem_embeddings.sharded.cut_rows import CutRows
from gem_embeddings.sharded.gradients import ReplicaGradients, RowGradients, one_bag
from gem_embeddings.sharded.places import Places, StoreKey
from gem_embeddings.sharded.storage import RowStore
from gem_embeddings.sharded.to_host import ToHost


class RowMoves:
    """Move rows.

    Args:
        places: where the tables lie.
        rank: of this rank in its sharding group.
        group: collectives over the sharding group.
        stores: shards of this rank, for every store that any rank has.
        optimizer: how rows learn.
        others: fetches what other sharding groups have; None where each moves its rows alone.
        ranks: whose gradients are added up.
        seed: of rounding.
    """

    def __init__(
        self,
        places: Places,
        rank: int,
        group: Collectives,
        stores: Mapping[StoreKey, RowStore],
        optimizer: OptimizerSpec,
        *,
        others: ReplicaGradients | None,
        ranks: int,
        seed: int,
    ) -> None:
        self._optimizer, self._seed = optimizer, seed
        self.others, self._scale = others, 1.0 / ranks
        self._in_pieces = [store for (_, cut, _), store in stores.items() if cut]
        self._cut = CutRows(places, rank, group, stores, optimizer, seed=seed)

    def move(
        self,
        found: Sequence[RowGradients],
        *,
        lr: float,
        step: int,
        rows_are_there: Callable[[], None],
        told: ToHost | None = None,
    ) -> None:
        """Move rows by the mean of gradients. Collective.

        Args:
            found: gradients of each store.
            lr: learning rate.
            step: of the tables, this one included.
            rows_are_there: waits for rows that are still being gathered.
            told: what other groups were told of these rows.
        """
        if self.others is not None:
            found = self.others(found, told)
        rows_are_there()
        in_pieces: list[RowGradients] = []
        for one in found:
            if one.store in self._in_pieces:
                in_pieces.append(one)
                continue
            table_update(
                one.store.weights.whole,
                [state.whole for state in one.store.states.values()],
                one.ids_I,
                one_bag(one.ids_I),
                one.grad,
                one.store.layout,
                counts=[one.ids_I.shape[0]],
                spec=self._optimizer,
                lr=lr,
                step=step,
                grad_scale=self._scale,
                seed=self._seed,
            )
        if in_pieces:
            self._cut.move(in_pieces, lr=lr, step=step, scale=self._scale)
