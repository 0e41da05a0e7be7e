"""From the features of a batch to the rows asked for, and from their vectors to outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gem_embeddings.contract import LookupSpec, Pooling, TableSpec
from gem_embeddings.counters import TableCounters
from gem_embeddings.inputs import (
    check_weight_names,
    checked_ids,
    checked_weight,
    features_of_tables,
    id_outside,
)
from gem_embeddings.ops import TableLayout, table_lookup
from gem_embeddings.sharded.keys import RowNumbers, sums_of
from gem_embeddings.sharded.places import OP
from gem_jagged.batch import Jagged
from gem_opkit.errors import DataError, DeviceError, refusal


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature, its table's index, and how it is pooled."""

    name: str
    table: int
    pooling: Pooling


@dataclass(frozen=True, slots=True)
class Request:
    """The ids of one call.

    Attributes:
        batches: ids of each feature as given, in the order of the features.
        keys_I: rows numbered through all tables, feature after feature; the number of all rows for
            an id that is not looked up.
        weights: weight of each id by feature, for features that have any.
        refuses: above 0 where an id lies outside a table that refuses it; on the device.
    """

    batches: tuple[Jagged, ...]
    keys_I: Tensor
    weights: Mapping[str, Tensor]
    refuses: Tensor | int


class Features:
    """All features of a set of tables.

    Args:
        specs: the tables.
        lookups: features whose pooling differs from their table's.
        first_key: number of the first row of each table, and of all rows.
        device: of the ids.
        op: who refuses.

    Attributes:
        features: in the order of their ids in a request.
        counts: what tables were asked for in training.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        lookups: Sequence[LookupSpec],
        first_key: Sequence[int],
        device: torch.device,
        *,
        op: str = OP,
    ) -> None:
        self._op = op
        self._specs, self._first_key, self._device = tuple(specs), tuple(first_key), device
        found = features_of_tables(op, specs, lookups)
        self.features = tuple(
            Feature(name, index, pooling)
            for index, spec in enumerate(specs)
            for name, pooling in found[spec.name].items()
        )
        self._poolings = {feature.name: feature.pooling for feature in self.features}
        self.counts = TableCounters(self._specs)
        tables = [feature.table for feature in self.features]
        self._numbers = RowNumbers(self._specs, tables, first_key, device)

    def request(
        self, ids: Mapping[str, Jagged], weights: Mapping[str, Tensor], *, count: bool
    ) -> Request:
        """Read a batch. Nothing waits for a GPU.

        Args:
            ids: feature -> ids.
            weights: feature -> weight of each id.
            count: whether the counts grow.

        Returns:
            the request.

        Raises:
            DataError, DtypeError, ShapeError, DeviceError, ConfigError: as ``EmbeddingTables``
                raises them, but for ids outside their table, which the request reports.
        """
        check_weight_names(self._op, self._poolings, weights)
        given = [checked_ids(self._op, feature.name, ids) for feature in self.features]
        checked = {f.name: checked_weight(self._op, f.name, ids, weights) for f in self.features}
        for feature, ids_I in zip(self.features, given, strict=True):
            if ids_I.device.type != self._device.type:
                raise DeviceError(
                    refusal(
                        self._op,
                        f"ids[{feature.name!r}]",
                        must=f"be on {self._device} like the tables",
                        got=ids_I.device,
                        fix="move the batch",
                    )
                )
        batches = tuple(ids[feature.name] for feature in self.features)
        numbered = self._numbers.number(given, count=count)
        if count:
            self._count(batches)
            if numbered.outside_T is not None:
                self.counts.add_outside_all(numbered.outside_T)
        return Request(
            batches=batches,
            keys_I=numbered.keys_I,
            weights={name: w for name, w in checked.items() if w is not None},
            refuses=numbered.refuses,
        )

    def _count(self, batches: Sequence[Jagged]) -> None:
        """Count what the host knows: lengths lie there."""
        empty = sums_of(
            torch.cat([batch.lengths for batch in batches]) == 0,
            [batch.batch for batch in batches],
        ).tolist()
        for feature, batch, bags in zip(self.features, batches, empty, strict=True):
            self.counts.add(
                self._specs[feature.table].name,
                looked_up=batch.total_tokens,
                empty_bags=0 if feature.pooling == "none" else bags,
            )

    def nothing(self) -> Request:
        """Return the request of a rank that refuses its batch."""
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        return Request((), none, {}, 1)

    def refusal(self, request: Request) -> DataError:
        """Name the first id that lies outside a table which refuses it. Waits for a GPU."""
        for feature, batch in zip(self.features, request.batches, strict=True):
            spec = self._specs[feature.table]
            if spec.id_space == "hash" or spec.out_of_range != "error" or not batch.total_tokens:
                continue
            low, high = (int(bound) for bound in batch.values.aminmax())
            if low < 0 or high >= spec.num_embeddings:
                return id_outside(self._op, spec, feature.name, batch)
        return DataError(
            refusal(
                self._op, "ids", must="stay as they are", got="a change", fix="do not reuse them"
            )
        )

    def outputs(
        self, request: Request, vectors: Tensor, places_I: Tensor, rows: Sequence[int]
    ) -> dict[str, Tensor]:
        """Pool vectors.

        Args:
            request: what was asked for.
            vectors: flat vectors of the different rows, table after table, fp32.
            places_I: for each id its place among the different rows of its table; -1 for one that
                is read as zeros.
            rows: different rows of each table.

        Returns:
            feature -> output, differentiable by ``vectors`` and by the weights.
        """
        shapes = [
            (count, spec.embedding_dim) for count, spec in zip(rows, self._specs, strict=True)
        ]
        counts = [batch.total_tokens for batch in request.batches]
        places = places_I.split(counts)
        outputs: dict[str, Tensor] = {}
        for batch, members in self._by_batch(request).items():
            pooled = [i for i in members if self.features[i].pooling != "none"]
            _, found = table_lookup(
                vectors,
                torch.cat([places[i] for i in members]) if len(members) < len(places) else places_I,
                self.bags(request, members, batch),
                TableLayout.packed(
                    shapes, [(self.features[i].table, self.features[i].pooling) for i in members]
                ),
                counts=[counts[i] for i in members],
                id_weights_I=self.id_weights(request, members),
                longest=max((request.batches[i].max_length for i in pooled), default=0),
            )
            outputs.update(zip((self.features[i].name for i in members), found, strict=True))
        return {feature.name: outputs[feature.name] for feature in self.features}

    def _by_batch(self, request: Request) -> dict[int, list[int]]:
        """Group features by their number of examples; one without pooling goes with any."""
        groups: dict[int, list[int]] = {}
        for index, feature in enumerate(self.features):
            if feature.pooling != "none":
                groups.setdefault(request.batches[index].batch, []).append(index)
        for index, feature in enumerate(self.features):
            if feature.pooling == "none":
                batch = next((size for size in groups if size), 1)
                groups.setdefault(batch, []).append(index)
        return {batch: sorted(members) for batch, members in groups.items()}

    def counted_from(self, request: Request, numbers_I: Tensor, begins: Sequence[int]) -> Tensor:
        """Number the ids of each feature from a place of its own.

        Args:
            request: the ids.
            numbers_I: number of each id.
            begins: what is taken off those of each feature.

        Returns:
            (I,) int64; -1 for an id that is not looked up.
        """
        found_I = numbers_I.clone()
        parts = found_I.split([batch.total_tokens for batch in request.batches])
        # All features in one launch.
        torch._foreach_sub_(list(parts), list(begins))
        return found_I.masked_fill_(request.keys_I == self._first_key[-1], -1)

    def bags(self, request: Request, members: Sequence[int], batch: int) -> Tensor:
        """Join the examples of features.

        Args:
            request: the ids.
            members: indices of the features.
            batch: examples of each; those of a feature without pooling are not read.

        Returns:
            first id of each example of each feature, counted over all, and the end, int64.
        """
        none = torch.zeros(1, dtype=torch.int64, device=self._device)
        given = [request.batches[index] for index in members]
        # Without pooling the examples do not matter, and are not read.
        parts = [one.offsets_O[:-1] if one.batch == batch else none.expand(batch) for one in given]
        offsets_O = torch.cat([*parts, none])
        begins = list(accumulate((one.total_tokens for one in given), initial=0))
        # All features in one launch.
        torch._foreach_add_(offsets_O.split([*(batch for _ in given), 1]), begins)
        return offsets_O

    def id_weights(self, request: Request, members: Sequence[int]) -> Tensor | None:
        """Join the weights of features.

        Args:
            request: the ids.
            members: indices of the features.

        Returns:
            weight of each id, fp32, 1 for features without; None where no feature has any.
        """
        names = [self.features[index].name for index in members]
        if not any(name in request.weights for name in names):
            return None
        one = torch.ones(1, device=self._device)
        return torch.cat(
            [
                request.weights[name].to(torch.float32)
                if name in request.weights
                else one.expand(request.batches[index].total_tokens)
                for name, index in zip(names, members, strict=True)
            ]
        )
