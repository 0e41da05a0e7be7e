"""How many ids, different rows and vectors a step brings to each table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gem_embeddings.contract import LookupSpec, TableLoad, TableSpec
from gem_opkit.errors import ConfigError, refusal

# Popularities are summed in bins whose edges grow by this factor: the sum is then right to 1 %.
_BIN_GROWTH = 1.15


def expected_unique(draws: Sequence[tuple[float, float]], rows: int) -> float:
    """Return the number of different rows that random ids hit, on average.

        Σ_k 1 − Π_f (1 − p_fk)^ids_f,   p_fk ∝ k^−zipf_exponent_f,   k = 1 … rows

    Args:
        draws: for each feature its number of ids and its skew; 0 draws all rows alike. The rows
            popular with one feature are taken to be popular with the others.
        rows: rows that can be drawn.

    Returns:
        between 0 and the smaller of all ids and ``rows``.

    Numerics: rows of similar popularity are summed together, in bins of 15 %; within 1 %.
    """
    bins = popularity_bins(rows)
    missed = [0.0] * len(bins)
    for ids, zipf_exponent in draws:
        masses = [count * middle**-zipf_exponent for count, middle in bins]
        total = sum(masses)
        for index, (mass, (count, _)) in enumerate(zip(masses, bins, strict=True)):
            share = mass / count / total
            # Logarithm of the chance that none of the ids is this row.
            missed[index] += ids * math.log1p(-share) if share < 1 else -math.inf * min(ids, 1)
    hit = -sum(count * math.expm1(log) for (count, _), log in zip(bins, missed, strict=True))
    return min(sum(ids for ids, _ in draws), rows, hit)


def popularity_bins(rows: int) -> list[tuple[int, float]]:
    """Put the ranks of popularity, 1 to ``rows``, into bins of similar ones.

    Args:
        rows: rows of a table.

    Returns:
        for each bin, from the most popular on, its number of ranks and their geometric middle.
    """
    bins, first = [], 1
    while first <= rows:
        last = min(rows, max(first, int(first * _BIN_GROWTH) - 1))
        bins.append((last - first + 1, math.sqrt(first * last)))
        first = last + 1
    return bins


@dataclass(frozen=True, slots=True)
class TableTraffic:
    """What one table is asked for in a step.

    Attributes:
        ids: ids of one rank's batch, over all features of the table.
        unique: different rows among them.
        group_unique: different rows among the ids of a whole sharding group.
        pooled_vectors: vectors that pooled features get for one rank's batch.
        sequence_ids: ids of features without pooling.
        weighted: whether ids carry weights of pooling.
        unpooled: whether a feature keeps one vector an id.
    """

    ids: float
    unique: float
    group_unique: float
    pooled_vectors: int
    sequence_ids: float
    weighted: bool
    unpooled: bool


def table_traffic(
    table: TableSpec,
    lookups: Mapping[str, Sequence[LookupSpec]],
    loads: Mapping[str, TableLoad],
    *,
    batch_per_rank: int,
    table_shard: int,
) -> TableTraffic:
    """Count what one table is asked for.

    Rows are taken to be hit independently of where they lie, so that each part of a table gets its
    share of the ids, and features of one table to draw from the same popularities.

    Args:
        table: the table.
        lookups: table name -> features beyond those that the table names.
        loads: feature -> statistics; features left out bring one id an example, all rows alike.
        batch_per_rank: examples of a rank.
        table_shard: ranks of a sharding group.

    Returns:
        the counts of a step.
    """
    features = [(name, table.pooling) for name in table.feature_names]
    features += [(lookup.feature_name, lookup.pooling) for lookup in lookups.get(table.name, ())]
    found = [(loads.get(name) or TableLoad(feature_name=name), pool) for name, pool in features]
    counts = [load.ids_per_example * batch_per_rank for load, _ in found]
    unique, group_unique = _unique(
        [load for load, _ in found], counts, table.num_embeddings, table_shard
    )
    pooled = sum(pooling != "none" for _, pooling in found)
    return TableTraffic(
        ids=sum(counts),
        unique=unique,
        group_unique=group_unique,
        pooled_vectors=pooled * batch_per_rank,
        sequence_ids=sum(
            n for n, (_, pooling) in zip(counts, found, strict=True) if pooling == "none"
        ),
        weighted=any(load.weighted for load, _ in found),
        unpooled=any(pooling == "none" for _, pooling in found),
    )


def _unique(
    loads: Sequence[TableLoad], counts: Sequence[float], rows: int, ranks: int
) -> tuple[float, float]:
    """Different rows of one rank's ids and of a group's, over all features of a table."""
    draws = [(n, load.zipf_exponent) for n, load in zip(counts, loads, strict=True)]
    drawn = expected_unique(draws, rows)
    together = expected_unique([(n * ranks, exponent) for n, exponent in draws], rows)
    if drawn == 0 or all(load.unique_fraction is None for load in loads):
        return drawn, together
    # Measured shares replace drawn ones; how features overlap, and how ranks do, stays as drawn.
    alone = [expected_unique([draw], rows) for draw in draws]
    measured = sum(
        one if load.unique_fraction is None else min(load.unique_fraction * n, rows)
        for one, load, n in zip(alone, loads, counts, strict=True)
    )
    given = min(rows, sum(counts), measured * drawn / sum(alone))
    return given, min(rows, ranks * given, max(given, together * given / drawn))


def check_loads(
    tables: Sequence[TableSpec], lookups: Sequence[LookupSpec], loads: Mapping[str, TableLoad]
) -> None:
    """Refuse statistics of features that look up nothing, and lookups of unknown tables.

    Args:
        tables: the tables.
        lookups: further features.
        loads: feature -> statistics.

    Raises:
        ConfigError: a name that is not there.
    """
    names = {table.name for table in tables}
    features = {name for table in tables for name in table.feature_names}
    features |= {lookup.feature_name for lookup in lookups}
    wrong = (
        ("lookups", "tables", sorted({x.table_name for x in lookups} - names)),
        ("loads", "features", sorted(set(loads) - features)),
    )
    for argument, what, unknown in wrong:
        if unknown:
            raise ConfigError(
                refusal(
                    "plan_tables",
                    argument,
                    must=f"name {what} that are there",
                    got=", ".join(unknown),
                    fix=f"use the names of the {what}",
                )
            )
