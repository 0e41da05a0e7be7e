"""What the tables of a run were asked for, summed over its steps and ranks.

The tables count what a rank has done since somebody last looked. Here this goes into the counters
of the run, under names of their own, so that it is saved, resumed and added up with them.
"""

from collections.abc import Iterator, Mapping
from typing import cast

from torch import nn

from gem.model.sharded_tables import ShardedTables
from gem_embeddings.counters import COUNTS
from gem_embeddings.tables import EmbeddingTables

_PREFIX = "tables"


def counter_names(model: nn.Module) -> list[str]:
    """Every counter that the tables of a model add to, the same on all ranks.

    Args:
        model: has its tables under the name ``tables``.
    """
    return [_name(spec.name, count) for spec in _tables(model).specs for count in COUNTS]


def taken_counts(model: nn.Module) -> Iterator[tuple[str, int]]:
    """What the tables have counted since this was last asked. Waits for the device.

    Args:
        model: has its tables under the name ``tables``.

    Yields:
        counter and amount, of this rank.
    """
    for table, counts in _tables(model).counts.take().items():
        for count in COUNTS:
            yield _name(table, count), getattr(counts, count)


def counts_by_table(model: nn.Module, counters: Mapping[str, float]) -> dict[str, dict[str, int]]:
    """Pick the counts of tables from the counters of a run.

    Args:
        model: has its tables under the name ``tables``.
        counters: summed over ranks; what is missing counts as 0, as in a run that began with a
            version that did not count.

    Returns:
        table -> ``{looked_up, unique, out_of_range, empty_bags, clipped}``.
    """
    return {
        spec.name: {count: int(counters.get(_name(spec.name, count), 0)) for count in COUNTS}
        for spec in _tables(model).specs
    }


def _name(table: str, count: str) -> str:
    return f"{_PREFIX}/{table}/{count}"


def _tables(model: nn.Module) -> EmbeddingTables | ShardedTables:
    return cast(EmbeddingTables | ShardedTables, model.get_submodule("tables"))
