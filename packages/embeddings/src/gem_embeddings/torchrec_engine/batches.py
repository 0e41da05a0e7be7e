"""From a batch to the rows that torchrec is asked for, and from its vectors to outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gem_embeddings.contract import LookupSpec, TableSpec
from gem_embeddings.lookup import unique_rows
from gem_embeddings.sharded.requests import Features
from gem_embeddings.torchrec_engine.placing import OP
from gem_jagged.batch import Jagged
from gem_jagged.offsets import sequence_ids


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One feature of a call.

    Attributes:
        batch: as given.
        rows_I: rows of the ids that are looked up, in range.
        lengths_B: how many of them each example has.
        kept_I: places of these ids among those given; None where all are looked up.
        weight_I: weight of each id given; None where the feature has none.
    """

    batch: Jagged
    rows_I: Tensor
    lengths_B: Tensor
    kept_I: Tensor | None
    weight_I: Tensor | None

    @property
    def sent_weight_I(self) -> Tensor:
        """Weights of the ids that are looked up, fp32, without gradient; 1 where there are none."""
        if self.weight_I is None:
            return torch.ones(self.rows_I.shape[0], device=self.rows_I.device)
        weight_I = self.weight_I.detach().to(torch.float32)
        return weight_I if self.kept_I is None else weight_I.index_select(0, self.kept_I)

    def padded_lengths(self, examples: int) -> Tensor:
        """Return the lengths with empty examples behind, so that there are as many as on all ranks.

        Args:
            examples: at least those of the batch.
        """
        missing = examples - self.lengths_B.shape[0]
        return torch.nn.functional.pad(self.lengths_B, (0, missing)) if missing else self.lengths_B


class Batches:
    """Prepare batches of a set of tables.

    Args:
        specs: the tables.
        lookups: features whose pooling differs from their table's.
        device: of the ids.

    Attributes:
        counts: what tables were asked for in training; ``unique`` is counted here.
        table_of: feature -> index of its table, in the order of ``feature_names``.
        poolings: feature -> pooling.
        count_unique: whether different rows are counted, for which the ids of a step are sorted.
    """

    def __init__(
        self, specs: Sequence[TableSpec], lookups: Sequence[LookupSpec], device: torch.device
    ) -> None:
        self._specs = tuple(specs)
        self._first_key = tuple(accumulate((s.num_embeddings for s in specs), initial=0))
        self._features = Features(specs, lookups, self._first_key, device, op=OP)
        self.counts = self._features.counts
        self.count_unique = True
        self.table_of = {f.name: f.table for f in self._features.features}
        self.poolings = {f.name: f.pooling for f in self._features.features}

    def ask(
        self, ids: Mapping[str, Jagged], weights: Mapping[str, Tensor], *, count: bool
    ) -> dict[str, Asked]:
        """Check a batch, hash its ids and bring them into range. Waits for a GPU.

        Args:
            ids: feature -> ids.
            weights: feature -> weight of each id.
            count: whether the counts grow.

        Returns:
            feature -> what is asked for.

        Raises:
            DataError, DtypeError, ShapeError, DeviceError, ConfigError: as ``EmbeddingTables``
                raises them.
        """
        request = self._features.request(ids, weights, count=count)
        if int(request.refuses):
            raise self._features.refusal(request)
        asked: dict[str, Asked] = {}
        keys = request.keys_I.split([batch.total_tokens for batch in request.batches])
        for (name, table), batch, keys_I in zip(
            self.table_of.items(), request.batches, keys, strict=True
        ):
            lengths_B, kept_I = batch.offsets_O.diff().to(torch.int64), None
            spec = self._specs[table]
            if spec.id_space == "row" and spec.out_of_range == "zero":
                # Only this policy leaves ids out: torchrec would take a row of zeros for a row.
                is_kept_I = keys_I != self._first_key[-1]
                kept_I = is_kept_I.nonzero().squeeze(1)
                ends_O = torch.cat([kept_I.new_zeros(1), is_kept_I.cumsum(0)])
                lengths_B = ends_O.index_select(0, batch.offsets_O.to(torch.int64)).diff()
                keys_I = keys_I.index_select(0, kept_I)
            rows_I = keys_I - self._first_key[table]
            asked[name] = Asked(batch, rows_I, lengths_B, kept_I, request.weights.get(name))
        if count and self.count_unique:
            self._count_unique(asked)
        return asked

    def _count_unique(self, asked: Mapping[str, Asked]) -> None:
        rows: dict[int, list[Tensor]] = {}
        for name, feature in asked.items():
            rows.setdefault(self.table_of[name], []).append(feature.rows_I)
        for table, parts in rows.items():
            spec = self._specs[table]
            different, _ = unique_rows(torch.cat(parts), spec.num_embeddings)
            self.counts.add(spec.name, unique=different.shape[0])

    def output(self, name: str, asked: Asked, found: Tensor, *, pooled: bool) -> Tensor:
        """Bring what torchrec returns into the form that the contract promises.

        Args:
            name: of the feature.
            asked: what was asked for.
            found: sums of all examples, padded ones behind; or a vector for each row.
            pooled: whether they are sums.

        Returns:
            x_BE, or without pooling x_IE.
        """
        batch, pooling, kept_I = asked.batch, self.poolings[name], asked.kept_I
        if pooling == "none":
            if kept_I is None:
                return found
            zeros_IE = found.new_zeros(batch.total_tokens, found.shape[1])
            return zeros_IE.index_copy(0, kept_I, found)
        sums_BE = found[: batch.batch] if pooled else _sums(asked, found)
        if pooling == "sum":
            return sums_BE
        return sums_BE * batch.offsets_O.diff().clamp(min=1).to(torch.float32).reciprocal()[:, None]


def _sums(asked: Asked, found: Tensor) -> Tensor:
    """Pool vectors here, with a gradient for the weights of ids."""
    if asked.weight_I is not None:
        kept_I = asked.kept_I
        weight_I = asked.weight_I if kept_I is None else asked.weight_I.index_select(0, kept_I)
        found = found * weight_I.to(found.dtype)[:, None]
    offsets_O = torch.cat([asked.lengths_B.new_zeros(1), asked.lengths_B.cumsum(0)])
    bags_I = sequence_ids(offsets_O, found.shape[0])
    return found.new_zeros(asked.batch.batch, found.shape[1]).index_add(0, bags_I, found)
