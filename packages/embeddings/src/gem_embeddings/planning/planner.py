"""Decide how every table is cut and which ranks hold the parts, by cost and within memory.

For a given size of the sharding group: each table takes the cheapest cut whose parts are not too
large for one rank; what is too large is tried at several sizes, parts are given to ranks, and the
arrangement whose most loaded rank has the least to do wins. Group sizes are compared by the time
of the whole step, with the collectives between the groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from gem_embeddings.contract import LookupSpec, OptimizerSpec, TablePlan, TableSpec
from gem_embeddings.planning.balance import DoesNotFitError, Limits, RankLoads, assign
from gem_embeddings.planning.candidates import Candidate, Setting, candidates
from gem_embeddings.planning.layout import GroupLayout, cut_table
from gem_embeddings.planning.links import group_links
from gem_embeddings.planning.spec import PlanningSpec
from gem_embeddings.planning.step import StepCost, step_cost
from gem_embeddings.planning.traffic import TableTraffic, check_loads, table_traffic
from gem_opkit.errors import ConfigError, UnsupportedError, refusal

_GIB = 1 << 30
# Largest part that a table may put on one rank, as multiples of the mean time and of the mean
# bytes of a rank. Small parts are tried first, and larger ones have to be worth it.
_PART_TIMES = (0.1, 0.3, 1.0, 3.0, float("inf"))
_PART_BYTES = (0.5, 2.0, 8.0, float("inf"))
_WORTH_IT = 0.98


@dataclass(frozen=True, slots=True)
class Solution:
    """An arrangement of tables with everything that led to it.

    Attributes:
        setting: the sharding group that it is for.
        traffic: table name -> what a step asks it for.
        options: table name -> every way in which it could be cut.
        chosen: table name -> the way taken.
        loads: what every rank of a group has to do and to hold.
        limits: bytes that a rank may hold.
        part_ms: time of the largest part that a table might put on one rank, milliseconds.
        part_bytes: bytes of the largest part that a table might put on one rank.
        step: time and bytes of a step.
    """

    setting: Setting
    traffic: Mapping[str, TableTraffic]
    options: Mapping[str, Sequence[Candidate]]
    chosen: Mapping[str, Candidate]
    loads: RankLoads
    limits: Limits
    part_ms: float
    part_bytes: float
    step: StepCost

    def plan(self, tables: Sequence[TableSpec]) -> TablePlan:
        """Cut the tables as was decided.

        Args:
            tables: the tables, in the order that the placements shall have.

        Returns:
            where every table lies.
        """
        layout = self.setting.layout
        return TablePlan(
            ranks=layout.table_shard * layout.table_replicate,
            table_shard=layout.table_shard,
            table_replicate=layout.table_replicate,
            table_copies=self.setting.spec.table_copies,
            fully_sharded=layout.fully_sharded,
            host_ranks=layout.host_ranks,
            placements=tuple(
                cut_table(
                    table, self.chosen[table.name].sharding, self.loads.ranks[table.name], layout
                )
                for table in tables
            ),
        )


class TooLargeError(ConfigError):
    """Tables do not fit.

    Attributes:
        missing_bytes: bytes that the emptiest rank lacks.
    """

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


def solve(
    tables: Sequence[TableSpec],
    lookups: Sequence[LookupSpec],
    *,
    ranks: int,
    optimizer: OptimizerSpec,
    spec: PlanningSpec,
) -> Solution:
    """Find the plan of least time that fits.

    Args:
        tables: the tables, in any order.
        lookups: features beyond those that the tables name.
        ranks: ranks that train together.
        optimizer: whose state lies beside the rows.
        spec: what the plan is made for.

    Returns:
        what was decided, and what it costs.

    Raises:
        ConfigError: unknown names, factors whose product is not ``ranks``, or tables that do not
            fit; the message then names a table and the bytes that are missing.
        UnsupportedError: only cuts are allowed that the engine does not have, whatever the size of
            the group.
    """
    _check_names(tables, spec)
    check_loads(tables, lookups, {load.feature_name: load for load in spec.loads})
    best: Solution | None = None
    refused: TooLargeError | None = None
    missing: UnsupportedError | None = None
    for table_shard, table_replicate in _group_sizes(ranks, spec):
        modes = (False, True) if spec.fully_sharded is None else (spec.fully_sharded,)
        if spec.engine == "torchrec":  # which has no such plans
            modes = (False,)
        # One copy has nothing to cut, so the second way would be the first.
        for fully_sharded in modes if table_replicate > 1 else modes[:1]:
            try:
                found = _solve_group(
                    tables,
                    lookups,
                    GroupShape(ranks, table_shard, table_replicate, fully_sharded),
                    optimizer,
                    spec,
                )
            except TooLargeError as error:
                # What comes nearest to fitting is told in the end.
                if refused is None or error.missing_bytes < refused.missing_bytes:
                    refused = error
                continue
            except UnsupportedError as error:
                # The engine has no kind for a table in a group of this size; in another it may.
                missing = error
                break
            if best is None or found.step.ms < best.step.ms:
                best = found
            break
    if best is not None:
        return best
    # Where some sizes do not run and the others do not fit, memory is what can be mended.
    if refused is not None:
        raise refused from missing
    raise _wrong_factors(ranks, spec) if missing is None else missing


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The axes of the ranks.

    Attributes:
        ranks: all of them.
        table_shard: ranks of a sharding group.
        table_replicate: sharding groups.
        fully_sharded: whether copies are cut between steps.
    """

    ranks: int
    table_shard: int
    table_replicate: int
    fully_sharded: bool


def _check_names(tables: Sequence[TableSpec], spec: PlanningSpec) -> None:
    names = [table.name for table in tables]
    repeated = sorted({name for name in names if names.count(name) > 1})
    unknown = sorted(set(spec.allowed) - set(names))
    for argument, wrong in (("tables", repeated), ("allowed", unknown)):
        if wrong:
            rule = "have different names" if argument == "tables" else "name tables that are there"
            raise ConfigError(
                refusal(
                    "plan_tables", argument, must=rule, got=", ".join(wrong), fix="mend the names"
                )
            )


def _group_sizes(ranks: int, spec: PlanningSpec) -> list[tuple[int, int]]:
    """Return the (table_shard, table_replicate) to compare."""
    if spec.table_shard is not None and spec.table_replicate is not None:
        if spec.table_shard * spec.table_replicate != ranks:
            raise _wrong_factors(ranks, spec)
        return [(spec.table_shard, spec.table_replicate)]
    if spec.table_shard is not None:
        return (
            [(spec.table_shard, ranks // spec.table_shard)] if ranks % spec.table_shard == 0 else []
        )
    if spec.table_replicate is not None:
        copies = [spec.table_replicate]
    elif spec.topology is None:
        copies = [1]
    else:
        # Copies of a shard stay on one host: their collectives carry whole shards.
        copies = [
            n
            for n in range(1, spec.topology.ranks_per_host + 1)
            if spec.topology.ranks_per_host % n == 0
        ]
    return [(ranks // count, count) for count in copies if ranks % count == 0]


def _wrong_factors(ranks: int, spec: PlanningSpec) -> ConfigError:
    return ConfigError(
        refusal(
            "plan_tables",
            "table_shard and table_replicate",
            must="have ranks as their product",
            got=f"ranks={ranks}, table_shard={spec.table_shard}, table_replicate="
            f"{spec.table_replicate}",
            fix="change one of the three, or leave a factor to the planner",
        )
    )


def _solve_group(
    tables: Sequence[TableSpec],
    lookups: Sequence[LookupSpec],
    shape: GroupShape,
    optimizer: OptimizerSpec,
    spec: PlanningSpec,
) -> Solution:
    setting = setting_of(shape, optimizer, spec)
    traffic = traffic_of(tables, lookups, spec, shape.table_shard)
    by_name = {table.name: table for table in tables}
    options = {name: candidates(by_name[name], asked, setting) for name, asked in traffic.items()}
    return _arrange(by_name, traffic, options, setting)


def setting_of(shape: GroupShape, optimizer: OptimizerSpec, spec: PlanningSpec) -> Setting:
    """Return what all tables of a plan share.

    Args:
        shape: the axes of the ranks.
        optimizer: whose state lies beside the rows.
        spec: what the plan is made for.

    Raises:
        ConfigError: the axes do not fit the topology.
    """
    links = group_links(
        spec.topology,
        ranks=shape.ranks,
        table_shard=shape.table_shard,
        table_replicate=shape.table_replicate,
        copies=spec.table_copies,
    )
    layout = GroupLayout(
        table_shard=shape.table_shard,
        table_replicate=shape.table_replicate,
        fully_sharded=shape.fully_sharded,
        host_ranks=links.host_ranks,
        optimizer=optimizer,
    )
    return Setting(layout=layout, links=links, spec=spec)


def traffic_of(
    tables: Sequence[TableSpec],
    lookups: Sequence[LookupSpec],
    spec: PlanningSpec,
    table_shard: int,
) -> dict[str, TableTraffic]:
    """Count what every table is asked for, in the order of their names.

    Args:
        tables: the tables.
        lookups: features beyond those that the tables name.
        spec: batch and statistics.
        table_shard: ranks of a sharding group.

    Returns:
        table name -> counts of a step.
    """
    by_table: dict[str, list[LookupSpec]] = {}
    for lookup in lookups:
        by_table.setdefault(lookup.table_name, []).append(lookup)
    loads = {load.feature_name: load for load in spec.loads}
    return {
        table.name: table_traffic(
            table, by_table, loads, batch_per_rank=spec.batch_per_rank, table_shard=table_shard
        )
        for table in sorted(tables, key=lambda table: table.name)
    }


def limits_of(spec: PlanningSpec) -> Limits:
    """Return the bytes that a rank may hold.

    Args:
        spec: with its budgets.
    """
    return Limits(
        held_bytes=float("inf") if spec.memory_gib is None else spec.memory_gib * _GIB,
        gathered_bytes=float("inf") if spec.gathered_gib is None else spec.gathered_gib * _GIB,
    )


def _arrange(
    tables: Mapping[str, TableSpec],
    traffic: Mapping[str, TableTraffic],
    options: Mapping[str, Sequence[Candidate]],
    setting: Setting,
) -> Solution:
    """Try several sizes of the largest part; keep the arrangement whose step takes least."""
    ranks, limits = setting.links.table_shard, limits_of(setting.spec)
    mean_ms = sum(min(c.total_ms(ranks) for c in ways) for ways in options.values()) / ranks
    held = [min(c.part.held_bytes * (c.parts or ranks) for c in ways) for ways in options.values()]
    best: Solution | None = None
    refused: DoesNotFitError | None = None
    tried: set[tuple[int, ...]] = set()
    for size, share in product(_PART_TIMES, _PART_BYTES):
        part_ms, part_bytes = size * (mean_ms or 1.0), share * (sum(held) or 1) / ranks
        chosen = {
            name: _cheapest(ways, part_ms, part_bytes, limits, ranks)
            for name, ways in options.items()
        }
        cuts = tuple(map(id, chosen.values()))
        if cuts in tried:
            continue
        tried.add(cuts)
        try:
            loads = _fit(chosen, options, setting, limits)
        except DoesNotFitError as error:
            refused = error
            continue
        step = step_cost(tables, traffic, chosen, loads, setting)
        if best is None or step.ms < best.step.ms * _WORTH_IT:
            best = Solution(
                setting=setting,
                traffic=traffic,
                options=options,
                chosen=chosen,
                loads=loads,
                limits=limits,
                part_ms=part_ms,
                part_bytes=part_bytes,
                step=step,
            )
    if best is None:
        raise _too_large(refused, setting, limits)
    return best


def _cheapest(
    ways: Sequence[Candidate], part_ms: float, part_bytes: float, limits: Limits, ranks: int
) -> Candidate:
    """Return the way of least time on all ranks whose parts are small enough for one rank."""
    fitting = [
        way
        for way in ways
        if way.part.held_bytes <= limits.held_bytes
        and way.part.held_bytes + way.part.copy_bytes <= limits.gathered_bytes
    ]
    if not fitting:
        return min(ways, key=lambda way: way.part.held_bytes)
    small = [w for w in fitting if w.part.ms <= part_ms and w.part.held_bytes <= part_bytes]
    if small:
        return min(small, key=lambda way: way.total_ms(ranks))
    # Nothing is small enough: take what exceeds the two sizes least.
    return min(
        fitting,
        key=lambda way: max(way.part.ms / part_ms, way.part.held_bytes / part_bytes),
    )


def _fit(
    chosen: dict[str, Candidate],
    options: Mapping[str, Sequence[Candidate]],
    setting: Setting,
    limits: Limits,
) -> RankLoads:
    """Give parts to ranks; cut a table finer when its parts find no room."""
    while True:
        try:
            return assign(chosen, setting.links.table_shard, setting.links.host_ranks, limits)
        except DoesNotFitError as error:
            now = chosen[error.table_name].part
            finer = [
                way
                for way in options[error.table_name]
                if way.part.held_bytes + way.part.copy_bytes < now.held_bytes + now.copy_bytes
            ]
            if not finer:
                raise
            chosen[error.table_name] = max(finer, key=lambda way: way.part.held_bytes)


def _too_large(refused: DoesNotFitError | None, setting: Setting, limits: Limits) -> TooLargeError:
    name = refused.table_name if refused else ""
    missing = refused.missing_bytes if refused else 0
    layout = setting.layout
    budget = " and ".join(
        f"{label} {limit / _GIB:.6g} GiB"
        for label, limit in (
            ("memory_gib", limits.held_bytes),
            ("gathered_gib", limits.gathered_bytes),
        )
        if limit != float("inf")
    )
    return TooLargeError(
        refusal(
            "plan_tables",
            f"table {name}",
            must=f"fit beside the others within {budget} a rank",
            got=f"{missing} bytes ({missing / _GIB:.3g} GiB) too many on the emptiest rank, with "
            f"table_shard={layout.table_shard}, table_replicate={layout.table_replicate}, "
            f"fully_sharded={layout.fully_sharded}",
            fix="use more ranks, fewer rows, 16-bit rows, fully_sharded, or more memory",
        ),
        missing,
    )
