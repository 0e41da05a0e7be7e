"""Tables that an engine shards over ranks, in the place of a model's own.

To the model, the log and the counters they are what `EmbeddingTables` are: the same features, the
same counts, the same buffer of ids outside. What differs is who learns: rows are no parameters,
and the engine moves them when a step is applied.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gem_embeddings.contract import LookupSpec, TableSpec
from gem_embeddings.counters import TableCounts
from gem_embeddings.engine import StartedLookup, TableEngine
from gem_jagged.batch import Jagged


class EngineCounts:
    """Counts of an engine since they were last taken; as `TableCounters` to those who read them.

    Args:
        engine: counts from its first call on.
    """

    def __init__(self, engine: TableEngine) -> None:
        self._engine = engine
        self._gone = {spec.name: TableCounts() for spec in engine.specs}

    def take(self) -> dict[str, TableCounts]:
        """Return all counts and begin at 0 again. Waits for the device.

        Returns:
            table name -> counts, of this rank.
        """
        now = self._engine.counters()
        found = {name: minus(counts, self._gone[name]) for name, counts in now.items()}
        self._gone = now
        return found

    def mark(self) -> Mapping[str, TableCounts]:
        """Remember where the counts stand; ``return_to`` undoes what follows."""
        return self._engine.counters()

    def return_to(self, mark: Mapping[str, TableCounts]) -> None:
        """Forget what has been counted since a mark.

        Args:
            mark: from ``mark``.
        """
        for name, counts in self._engine.counters().items():
            self._gone[name] = self._gone[name] + minus(counts, mark[name])


def minus(one: TableCounts, other: TableCounts) -> TableCounts:
    """Subtract, count by count.

    Args:
        one: counts.
        other: counts of the same table.
    """
    return TableCounts(
        looked_up=one.looked_up - other.looked_up,
        unique=one.unique - other.unique,
        out_of_range=one.out_of_range - other.out_of_range,
        empty_bags=one.empty_bags - other.empty_bags,
        clipped=one.clipped - other.clipped,
    )


class ShardedTables(nn.Module):
    """An engine as the tables of a model.

    Args:
        engine: holds this rank's part of the rows.
        lookups: who looks them up.
        keys: table name -> key of its weight in `EmbeddingTables`, by which a checkpoint knows it.

    Attributes:
        engine: as given.
        keys: as given.
        counts: what each table was asked for in training, on this rank.
        out_of_range: as in `EmbeddingTables`: for each table, ids of this rank that were clamped
            or read as zeros; saved with the model.
    """

    def __init__(
        self, engine: TableEngine, lookups: list[LookupSpec], keys: Mapping[str, str]
    ) -> None:
        super().__init__()
        self.engine = engine
        self.keys = dict(keys)
        self.counts = EngineCounts(engine)
        self._held: StartedLookup | None = None
        self.out_of_range: Tensor
        counts = torch.zeros(len(engine.specs), dtype=torch.int64, device=engine.world.device)
        self.register_buffer("out_of_range", counts)
        # Features whose ids may lie outside without an error, with place and rows of their table.
        self._watched = [
            (place, lookup.feature_name, spec.num_embeddings)
            for place, spec in enumerate(engine.specs)
            for lookup in lookups
            if lookup.table_name == spec.name
            and spec.id_space == "row"
            and spec.out_of_range != "error"
        ]

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The tables."""
        return self.engine.specs

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Every feature that ``forward`` needs, table by table."""
        return self.engine.feature_names

    def table_parameters(self) -> list[nn.Parameter]:
        """Return nothing: the rows are no parameters."""
        return []

    def hold(self, started: StartedLookup) -> None:
        """Give the next forward pass of training what was started of its ids.

        Args:
            started: by the engine, of the ids that the pass will be given.
        """
        self._held = started

    def forward(
        self, ids: Mapping[str, Jagged], weights: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Look up every feature of this rank's own batch; as ``EmbeddingTables.forward``.

        Args:
            ids: feature -> ids.
            weights: feature -> weight of each id.

        Returns:
            feature -> x_BE, or for pooling ``none`` x_IE; fp32.

        Raises:
            DataError: bad ids on any rank of the sharding group; every rank of it raises.
        """
        started = None
        if self.training:
            started, self._held = self._held, None
        found = self.engine(ids, weights) if started is None else self.engine(started)
        for place, feature, rows in self._watched:
            ids_I = ids[feature].values
            outside_I = (ids_I < 0) | (ids_I >= rows)
            self.out_of_range[place] += outside_I.sum()
        return found
