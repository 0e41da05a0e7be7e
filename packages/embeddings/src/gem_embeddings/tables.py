"""Embedding tables in plain torch: the definition of what a lookup returns, on any device.

``EmbeddingTables`` holds any number of tables and looks up all features of a batch. Its gradients
are sparse, each row once, for the optimizers of ``gem_embeddings.optimizer``.

Left out: tables that are sharded over ranks, and ids that own their row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gem_embeddings.contract import LookupSpec, TableSpec
from gem_embeddings.counters import TableCounters, TableCounts
from gem_embeddings.hashing import hash_to_rows
from gem_embeddings.inputs import (
    check_weight_names,
    checked_ids,
    checked_weight,
    features_of_tables,
    id_outside,
    refuse_specs,
)
from gem_embeddings.lookup import FeatureLookup, look_up, take_sparse_notice
from gem_jagged.batch import Jagged
from gem_opkit.errors import UnsupportedError, refusal

_NAME = "EmbeddingTables"


@dataclass(frozen=True, slots=True)
class _Table:
    """A table, the key of its weight, and its features with their pooling, in order."""

    spec: TableSpec
    key: str
    features: tuple[tuple[str, str], ...]


class EmbeddingTables(nn.Module):
    """Look up the ids of features in embedding tables.

    A feature is looked up in one table: the one whose ``feature_names`` has it, pooled as the
    table says, or the one that a ``LookupSpec`` names, which also decides the pooling. Features
    that are looked up and ids of other features may come in the same dict; the order of the dicts
    does not matter.

    Args:
        tables: the tables; names differ.
        lookups: features whose pooling differs from their table's, or that no table names.
        device: where the weights are made.

    Attributes:
        weights: table name -> weight (R, E), fp32. A name that ``nn.ParameterDict`` has taken for
            itself (``items``, ``type``) gets the suffix ``_table``.
        out_of_range: for each table, ids that were clamped or read as zeros, int64, on the device
            of the weights; saved with them.
        counts: what each table was asked for in training; not saved.

    Raises:
        ConfigError: tables or lookups that contradict each other.
        UnsupportedError: a table whose ``row_dtype`` is not fp32; the engines hold those.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        lookups: Sequence[LookupSpec] = (),
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _refuse_narrow_rows(tables)
        take_sparse_notice()
        features = features_of_tables(_NAME, tables, lookups)
        self._tables = tuple(
            _Table(spec, _key(spec.name), tuple(features[spec.name].items())) for spec in tables
        )
        keys = [table.key for table in self._tables]
        if len(set(keys)) != len(keys):
            refuse_specs(
                _NAME, "tables", "have different names, also after the suffix _table", keys
            )
        self.weights = nn.ParameterDict(
            {
                table.key: nn.Parameter(
                    torch.empty(
                        table.spec.num_embeddings,
                        table.spec.embedding_dim,
                        dtype=torch.float32,
                        device=device,
                    )
                )
                for table in self._tables
            }
        )
        self.out_of_range: Tensor
        self.register_buffer(
            "out_of_range", torch.zeros(len(self._tables), dtype=torch.int64, device=device)
        )
        self.counts = TableCounters(self.specs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew from torch's generator, and set the counts to 0."""
        for table in self._tables:
            weight, std = self.weights[table.key], table.spec.init_std
            if std is None:
                bound = table.spec.num_embeddings**-0.5
                nn.init.uniform_(weight, -bound, bound)
            else:
                nn.init.normal_(weight, 0.0, std)
        self.out_of_range.zero_()

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The tables, in the order of their parameters."""
        return tuple(table.spec for table in self._tables)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Every feature that ``forward`` needs, table by table."""
        return tuple(name for table in self._tables for name, _ in table.features)

    def table_parameters(self) -> list[nn.Parameter]:
        """Return the weights, one for each table, in the order of ``specs``."""
        return [self.weights[table.key] for table in self._tables]

    def out_of_range_counts(self) -> dict[str, int]:
        """Return how many ids each table has clamped or read as zeros. Waits for a GPU.

        Returns:
            table name -> count since the weights were drawn, over restarts, on this rank; 0 for a
            table whose policy is ``error``.
        """
        counts = self.out_of_range.tolist()
        return {table.spec.name: count for table, count in zip(self._tables, counts, strict=True)}

    def counters(self) -> dict[str, TableCounts]:
        """Return what each table was asked for in training. Waits for a GPU.

        ``unique`` is counted by the backward pass, which has to find the different rows anyway:
        rows that get no gradient are not in it.

        Returns:
            table name -> counts since ``counts`` was last taken, on this rank.
        """
        return self.counts.read()

    def forward(
        self, ids: Mapping[str, Jagged], weights: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Look up every feature.

            sum:  out[b] = Σ w_i · row(id_i)         over the ids i of example b
            mean: out[b] = that, divided by the number of ids of b
            none: out[i] = row(id_i)

        An example without ids gives 0. A mean divides by the number of ids, not by the sum of
        their weights, and counts an id that is read as zeros.

        Args:
            ids: feature -> ids, int64 or int32. Features that no table has are ignored.
            weights: feature -> weight of each id, (I,), floating point; for pooled features, and
                1 where a feature has none.

        Returns:
            feature -> x_BE, or for pooling ``none`` x_IE in the order of the ids; fp32.

        Raises:
            DataError: an id outside its table whose policy is ``error``, or a feature is missing.
                On a GPU this check waits for the device once a call; with the policies ``clamp``
                and ``zero`` and with hashed ids nothing does in the forward.
            DtypeError: ids that are not int32 or int64, or weights that are not floating point.
            ShapeError: ids or weights that do not match their lengths.
            ConfigError: weights of an unpooled or unknown feature.

        Numerics: sums in fp32 in the order of the ids on a CPU. The gradient of a table has a row
            for every row that was looked up within range, and no other.
        """
        # Left out of compiled graphs: sparse gradients cannot be traced, and a full graph that
        # holds tables would be refused with a message about something else. A local name,
        # because torch gives the decorated method no type that a checker can call.
        look_up_all: Any = self._look_up_all
        return look_up_all(ids, {} if weights is None else weights)

    @torch.compiler.disable
    def _look_up_all(
        self, ids: Mapping[str, Jagged], weights: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        poolings = {name: pooling for table in self._tables for name, pooling in table.features}
        check_weight_names(_NAME, poolings, weights)
        given = [
            {name: checked_ids(_NAME, name, ids) for name, _ in table.features}
            for table in self._tables
        ]
        self._refuse_ids_outside(ids, given)
        outputs: dict[str, Tensor] = {}
        for index, table in enumerate(self._tables):
            lookups = [
                self._lookup(index, ids[name], given[index][name], pooling)
                for name, pooling in table.features
            ]
            id_weights = [checked_weight(_NAME, name, ids, weights) for name, _ in table.features]
            weight_RE = self.weights[table.key]
            # One dtype for the gradients of all features, which are added up.
            id_weights = [w if w is None else w.to(weight_RE.dtype) for w in id_weights]
            seen: Any = partial(_count_unique, self.counts, table.spec.name)
            found = look_up(weight_RE, lookups, id_weights, seen=seen if self.training else None)
            names = (name for name, _ in table.features)
            outputs.update(zip(names, found, strict=True))
        return outputs

    def _lookup(self, index: int, batch: Jagged, ids_I: Tensor, pooling: str) -> FeatureLookup:
        spec = self._tables[index].spec
        outside_I: Tensor | None = None
        if self.training:
            empty = 0 if pooling == "none" else int((batch.lengths == 0).sum())
            self.counts.add(spec.name, looked_up=batch.total_tokens, empty_bags=empty)
        if spec.id_space == "hash":
            rows_I = hash_to_rows(ids_I, spec.num_embeddings, seed=spec.hash_seed)
        elif spec.out_of_range == "error":
            rows_I = ids_I
        else:
            rows_I = ids_I.clamp(0, spec.num_embeddings - 1)
            moved_I = rows_I != ids_I
            moved = moved_I.sum()
            self.out_of_range[index] += moved
            if self.training:
                self.counts.add_outside(spec.name, moved)
            # Only a CPU can ask for free whether there is any; elsewhere the mask is kept.
            if spec.out_of_range == "zero" and (ids_I.is_cuda or bool(moved_I.any())):
                outside_I = moved_I
        # All examples have one id: as many ids as examples, and none has more than one.
        single = batch.max_length <= 1 and batch.total_tokens == batch.batch
        offsets_O = batch.offsets_O.to(torch.int64)
        return FeatureLookup(rows_I, pooling, offsets_O, single, outside_I)

    def _refuse_ids_outside(
        self, ids: Mapping[str, Jagged], given: list[dict[str, Tensor]]
    ) -> None:
        """Look for ids outside tables with the policy ``error``: one host read for all."""
        watched = [
            (table.spec, name, given[index][name])
            for index, table in enumerate(self._tables)
            if table.spec.id_space == "row" and table.spec.out_of_range == "error"
            for name, _ in table.features
            if given[index][name].shape[0] > 0
        ]
        if not watched:
            return
        bounds = torch.stack([torch.stack(ids_I.aminmax()) for _, _, ids_I in watched]).tolist()
        for (spec, name, _), (low, high) in zip(watched, bounds, strict=True):
            if low < 0 or high >= spec.num_embeddings:
                raise id_outside(_NAME, spec, name, ids[name])


def _count_unique(counts: TableCounters, table: str, rows: int) -> None:
    counts.add(table, unique=rows)


def _refuse_narrow_rows(tables: Sequence[TableSpec]) -> None:
    for spec in tables:
        if spec.row_dtype != "fp32":
            raise UnsupportedError(
                refusal(
                    _NAME,
                    f"row_dtype of table {spec.name!r}",
                    must="be fp32",
                    got=spec.row_dtype,
                    fix="hold it in an engine: gem_embeddings.engine.build_tables",
                )
            )


def _key(name: str) -> str:
    taken = name == "training" or hasattr(nn.ParameterDict, name) or name in _OWN_ATTRIBUTES
    return f"{name}_table" if taken else name


# What an instance has beyond its class: a parameter of that name would replace it.
_OWN_ATTRIBUTES = frozenset(vars(nn.ParameterDict()))
