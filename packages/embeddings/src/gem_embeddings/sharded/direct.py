"""The short way of a sharding group of one rank: rows are pooled where they lie, and moved so.

With nobody to send to, different rows need not be picked out, and nothing waits for the device: one
launch pools all features of a store, and one merges their gradients and moves the rows. Pooled
features whose numbers of examples differ go the long way, through vectors of different rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gem_embeddings.contract import OptimizerSpec
from gem_embeddings.ops import (
    FeatureSlot,
    TableLayout,
    TableSlot,
    id_weight_gradient,
    table_lookup,
    table_update,
)
from gem_embeddings.sharded.gradients import LARGEST
from gem_embeddings.sharded.places import OP, Places
from gem_embeddings.sharded.requests import Features, Request
from gem_embeddings.sharded.storage import RowStore
from gem_opkit.errors import ConfigError, refusal


@dataclass(frozen=True, slots=True)
class Part:
    """What of a call belongs to one store.

    Attributes:
        index: of the store.
        members: indices of its features.
        ids_I: their ids as rows of their shards, -1 for one that is read as zeros.
        bags_O: first id of each bag of each feature, and the end.
        counts: ids of each feature.
        longest: the most ids of a bag.
    """

    index: int
    members: tuple[int, ...]
    ids_I: Tensor
    bags_O: Tensor
    counts: list[int]
    longest: int


@dataclass(frozen=True, slots=True)
class Pending:
    """A backward pass whose rows have yet to move.

    Attributes:
        parts: of the call.
        weights: of the ids of each part.
        grads: gradients of what was looked up.
    """

    parts: Sequence[Part]
    weights: Sequence[Tensor | None]
    grads: Sequence[Tensor]


class Direct:
    """Look up and move rows of one rank.

    Args:
        places: where the tables lie: all on this rank.
        stores: their rows.
        features: who looks them up.
        optimizer: how rows learn.
        seed: of rounding.
        device: of the rows.

    Attributes:
        pending: the backward pass whose rows are to move when they are told to; None for none.
    """

    def __init__(
        self,
        places: Places,
        stores: Sequence[RowStore],
        features: Features,
        optimizer: OptimizerSpec,
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        self._places, self._stores, self._features = places, tuple(stores), features
        self._optimizer, self._seed = optimizer, seed
        self._first_key_T = torch.tensor(places.first_key, dtype=torch.int64).to(device)
        self.pending: Pending | None = None
        holder: dict[int, tuple[int, int]] = {}
        for index, store in enumerate(self._stores):
            for slot, shard in enumerate(store.shards):
                holder[shard.table] = (index, slot)
        self._members = [
            tuple(i for i, f in enumerate(features.features) if holder[f.table][0] == index)
            for index in range(len(self._stores))
        ]
        self._layouts = [
            TableLayout(
                tuple(
                    TableSlot(first * store.width, shard.rows, store.width, first)
                    for shard, first in zip(store.shards, store.first_rows, strict=True)
                ),
                tuple(
                    FeatureSlot(holder[features.features[i].table][1], features.features[i].pooling)
                    for i in members
                ),
            )
            for store, members in zip(self._stores, self._members, strict=True)
        ]

    def parts(self, request: Request) -> list[Part] | None:
        """Take a request apart by store.

        Args:
            request: the ids.

        Returns:
            the parts; None where pooled features have different numbers of examples.
        """
        pooled = [
            batch
            for batch, feature in zip(request.batches, self._features.features, strict=True)
            if feature.pooling != "none"
        ]
        sizes = {batch.batch for batch in pooled}
        if len(sizes) > 1:
            return None
        batch = sizes.pop() if sizes else 1
        if batch == 0 and request.keys_I.shape[0]:
            # Ids without pooling beside pooled features without examples.
            return None
        first_key = self._places.first_key
        counts = [given.total_tokens for given in request.batches]
        begins = [first_key[feature.table] for feature in self._features.features]
        rows_I = self._features.counted_from(request, request.keys_I, begins)
        rows = rows_I.split(counts)
        found: list[Part] = []
        for index, members in enumerate(self._members):
            ids_I = rows_I if len(members) == len(counts) else torch.cat([rows[i] for i in members])
            longest = [
                request.batches[i].max_length
                for i in members
                if self._features.features[i].pooling != "none"
            ]
            found.append(
                Part(
                    index,
                    members,
                    ids_I,
                    self._features.bags(request, members, batch),
                    [counts[i] for i in members],
                    max(longest, default=0),
                )
            )
        return found

    def different(self, keys_I: Tensor) -> Tensor:
        """Count the different rows of each table among ids. Nothing waits for a GPU.

        Args:
            keys_I: rows numbered through all tables.

        Returns:
            int64, one for each table, on the device of the rows.
        """
        sorted_I = torch.sort(keys_I).values
        new_I = torch.ones_like(sorted_I)
        new_I[1:] = sorted_I[1:] != sorted_I[:-1]
        seen_P = torch.zeros(keys_I.shape[0] + 1, dtype=torch.int64, device=keys_I.device)
        torch.cumsum(new_I, 0, out=seen_P[1:])
        return seen_P[torch.searchsorted(sorted_I, self._first_key_T)].diff()

    def hold(
        self,
        parts: Sequence[Part],
        weights: Sequence[Tensor | None],
        grads: Sequence[Tensor],
    ) -> None:
        """Keep a backward pass until ``move`` takes it.

        Args:
            parts: of the call.
            weights: of the ids of each part.
            grads: gradients of what ``look_up`` returned.

        Raises:
            ConfigError: another one is held already.
        """
        self.check_alone()
        self.pending = Pending(parts, weights, grads)

    def check_alone(self, others: int = 0) -> None:
        """Refuse a backward pass behind another one, of which one alone would move its rows.

        Args:
            others: passes that are held elsewhere.

        Raises:
            ConfigError: one is held.
        """
        if self.pending is not None or others:
            raise ConfigError(
                refusal(
                    OP,
                    "single_pass",
                    must="be false where a step has several backward passes",
                    got="a second one before apply or discard",
                    fix="build the tables without it",
                )
            )

    def finite(self) -> Tensor | None:
        """Tell whether what is held, and sums of its squares, are finite; None where nothing is."""
        if self.pending is None:
            return None
        grads = [grad for grad in self.pending.grads if grad.numel()]
        if not grads:
            return None
        norms = torch._foreach_norm(grads, float("inf"))
        return (torch.stack(list(norms)) <= LARGEST).all()

    def look_up(
        self,
        parts: Sequence[Part],
        weights: Sequence[Tensor | None],
        *,
        out_dtype: torch.dtype = torch.float32,
    ) -> list[Tensor]:
        """Pool rows.

        Args:
            parts: of the call.
            weights: of the ids of each part.
            out_dtype: of the outputs; sums are fp32.

        Returns:
            the flat output of each part.
        """
        return [
            table_lookup(
                self._stores[part.index].weights.whole,
                part.ids_I,
                part.bags_O,
                self._layouts[part.index],
                counts=part.counts,
                id_weights_I=weight,
                longest=part.longest,
                out_dtype=out_dtype,
            )[0]
            for part, weight in zip(parts, weights, strict=True)
        ]

    def weight_gradients(
        self,
        parts: Sequence[Part],
        weights: Sequence[Tensor | None],
        grads: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """Differentiate by the weights of ids: by the rows that were looked up, before they move.

        Args:
            parts: of the call.
            weights: of the ids of each part.
            grads: gradients of what ``look_up`` returned.

        Returns:
            the gradient of each part's weights, where they need one.
        """
        return [
            None
            if weight is None or not weight.requires_grad
            else id_weight_gradient(
                grad,
                self._stores[part.index].weights.whole,
                part.ids_I,
                part.bags_O,
                self._layouts[part.index],
                counts=part.counts,
            )
            for part, weight, grad in zip(parts, weights, grads, strict=True)
        ]

    def move(self, passed: Pending, *, lr: float, step: int) -> None:
        """Move the rows of a backward pass.

        Args:
            passed: the pass.
            lr: learning rate.
            step: of the tables, this one included.
        """
        for part, weight, grad in zip(passed.parts, passed.weights, passed.grads, strict=True):
            store = self._stores[part.index]
            table_update(
                store.weights.whole,
                [state.whole for state in store.states.values()],
                part.ids_I,
                part.bags_O,
                grad,
                self._layouts[part.index],
                counts=part.counts,
                spec=self._optimizer,
                lr=lr,
                step=step,
                id_weights_I=weight,
                seed=self._seed,
            )

    def outputs(
        self, request: Request, parts: Sequence[Part], flats: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """View flat outputs by feature.

        Args:
            request: the ids.
            parts: of the call.
            flats: the flat output of each part.

        Returns:
            feature -> output.
        """
        features = self._features.features
        found: dict[str, Tensor] = {}
        for part, flat in zip(parts, flats, strict=True):
            batch = (part.bags_O.shape[0] - 1) // max(1, len(part.members))
            shapes = self._layouts[part.index].output_shapes(batch, part.counts)
            views = flat.split([rows * width for rows, width in shapes])
            for index, view, shape in zip(part.members, views, shapes, strict=True):
                found[features[index].name] = view.view(shape)
        return {feature.name: found[feature.name] for feature in features}

    def weights(self, request: Request, parts: Sequence[Part]) -> list[Tensor | None]:
        """Return the weights of the ids of each part."""
        return [self._features.id_weights(request, part.members) for part in parts]
