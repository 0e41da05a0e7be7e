"""Tables of a recipe, and what they cost under a plan, as `gem_embeddings.plan` says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gem.config import RunConfig
from gem.data.schema import BatchSchema, IdInput
from gem.model.spec import GemSpec
from gem.model.structure import reduce_schema, streams_read
from gem.planning.chosen import names_a_plan
from gem.planning.lengths import LengthLaw, id_laws, id_skew, length_laws
from gem.planning.schema import declared_schema
from gem_embeddings.contract import (
    ROW_BYTES,
    LookupSpec,
    OptimizerSpec,
    RowDtype,
    TableLoad,
    TableSpec,
)
from gem_embeddings.plan import explain_tables, place_tables
from gem_embeddings.planning.explain import Explanation
from gem_embeddings.planning.spec import PlanningSpec, TableRates
from gem_embeddings.planning.step import Exchange, StepCost
from gem_opkit.errors import ConfigError
from gem_parallel.contract import ParallelPlan, TableCopies, Topology
from gem_parallel.planning.forecast import accelerator_of
from gem_parallel.planning.work import Collective, Hider, TableStep, TableTraffic

# The words of `gem_embeddings.planning.step` for what travels, the collective that carries it, and
# what it runs beside.
_COLLECTIVES: tuple[tuple[str, str, Collective, Hider], ...] = (
    ("counts", "table_shard", "all_to_all", "model"),
    ("ids", "table_shard", "all_to_all", "optimizer"),
    ("vectors", "table_shard", "all_to_all", "optimizer"),
    ("gradients", "table_shard", "all_to_all", "norms"),
    ("square sums", "table_shard", "all_to_all", "nothing"),
    ("ids and gradients of replicated tables", "table_shard", "all_gather", "nothing"),
    ("gather weights to read", "table_replicate", "all_gather", "nothing"),
    ("gather weights and optimizer rows to update", "table_replicate", "all_gather", "nothing"),
    ("scatter their mean", "table_replicate", "reduce_scatter", "nothing"),
    ("average weights and optimizer rows", "table_replicate", "all_reduce", "nothing"),
)
# What merged gradients take the place of.
_MEANS = ("average weights and optimizer rows", "scatter their mean")


# table_shard, table_replicate, whether copies are cut, and where they lie.
Axes = tuple[int, int, bool, TableCopies]


@dataclass(frozen=True)
class TablesOf:
    """The tables of a recipe with the statistics of their ids.

    Attributes:
        specs: the tables.
        lookups: features and the tables that they look up.
        loads: statistics of each feature.
        optimizer: how rows learn.
        examples: examples of a rank.
        replicas: what copies of a part exchange after a step: rows, of which the mean is kept, or
            the gradients of rows.
        wire_dtype: format in which vectors and their gradients travel, where an engine holds them.
        in_engine: whether an engine holds tables that no plan cuts, too.
        ahead: whether the next batch is known to the step, so that its ids and vectors travel
            beside the dense optimizer; not where a batch is run in several parts.
    """

    specs: tuple[TableSpec, ...]
    lookups: tuple[LookupSpec, ...]
    loads: tuple[TableLoad, ...]
    optimizer: OptimizerSpec
    examples: int
    replicas: Literal["weights", "gradients"] = "weights"
    wire_dtype: RowDtype = "fp32"
    in_engine: bool = False
    ahead: bool = True

    def step(
        self, plan: ParallelPlan, topology: Topology, *, memory_gib: float | None = None
    ) -> TableStep:
        """Say what the tables cost one rank in a step.

        Args:
            plan: its table axes.
            topology: machines, of as many ranks.
            memory_gib: GiB of tables that a rank may hold between steps; None for no limit.

        Returns:
            the cheapest placement's costs. A plan that cuts no table merges the row gradients of
            all ranks, as training does with tables of its own.

        Raises:
            ConfigError: the tables do not fit, with the bytes that are missing.
        """
        key = _axes_of(plan)
        return _step(self, key, topology, memory_gib)

    def explain(
        self, plan: ParallelPlan, topology: Topology, *, memory_gib: float | None = None
    ) -> Explanation:
        """Place the tables under a plan, with costs and reasons.

        Args:
            plan: as in `step`.
            topology: as in `step`.
            memory_gib: as in `step`.

        Returns:
            what `gem_embeddings.plan.explain_tables` says.

        Raises:
            ConfigError: as in `step`.
        """
        key = _axes_of(plan)
        return _explain(self, key, topology, memory_gib)


def _axes_of(plan: ParallelPlan) -> Axes:
    return plan.table_shard, plan.table_replicate, plan.fully_sharded_tables, plan.table_copies


def tables_of(
    config: RunConfig,
    schema: BatchSchema | None = None,
    *,
    examples: int | None = None,
    lengths: Mapping[str, LengthLaw] | None = None,
    ids: Mapping[str, float] | None = None,
) -> TablesOf:
    """Describe the tables of a recipe.

    Args:
        config: the recipe.
        schema: as in `gem.planning.work.work_of`.
        examples: as there.
        lengths: as there.
        ids: as there.

    Returns:
        one table for each table name of the schema, in the order of their first use.

    Raises:
        ConfigError: as there.
    """
    spec = config.model
    whole = declared_schema(config) if schema is None else schema
    laws = length_laws(config.data, whole, lengths or {})
    schema = reduce_schema(whole, spec.leave_out)
    counts = id_laws(config.data, schema.ids, ids or {})
    owners: dict[str, IdInput] = {}
    lookups: list[LookupSpec] = []
    loads: list[TableLoad] = []
    embeddings = spec.embeddings

    def add(feature: str, source: IdInput, mean: float, skew: float) -> None:
        owners.setdefault(source.table, source)
        pooling = embeddings.pooling if source.multi else "none"
        lookups.append(LookupSpec(feature_name=feature, table_name=source.table, pooling=pooling))
        loads.append(TableLoad(feature_name=feature, ids_per_example=mean, zipf_exponent=skew))

    for source in schema.ids:
        law = counts[source.name]
        add(source.name, source, law.mean, law.zipf_exponent)
    streams = streams_read(spec, schema) if isinstance(spec, GemSpec) else schema.streams
    for stream in streams:
        drawn = laws[stream.name].quantiles(1024, most=stream.max_events)
        mean = sum(drawn) / len(drawn)
        for source in stream.ids:
            skew = id_skew(config.data, source.table)
            add(f"{stream.name}.{source.name}", source, mean, skew)
    return TablesOf(
        specs=tuple(
            TableSpec(
                name=table,
                embedding_dim=embeddings.embedding_dim,
                num_embeddings=owner.num_embeddings,
                id_space="hash" if owner.id_space == "hash" else "row",
                out_of_range=embeddings.out_of_range,
                init_std=embeddings.init_std,
            )
            for table, owner in owners.items()
        ),
        lookups=tuple(lookups),
        loads=tuple(loads),
        optimizer=config.train.tables,
        examples=config.train.batch_examples if examples is None else examples,
        ahead=config.train.accumulation_parts == 1,
        **_exchanged(config),
    )


def _exchanged(config: RunConfig) -> dict[str, Any]:
    """What ranks send of tables: as the recipe says, but copies average where it names no plan."""
    own = config.parallel
    if own is None:
        return {}
    said = names_a_plan(config) or "table_replicas" in own.model_fields_set
    replicas = own.table_replicas if said else "weights"
    engine = own.table_engine not in (None, "local")
    return {"replicas": replicas, "wire_dtype": own.table_wire_dtype, "in_engine": engine}


def _effective(topology: Topology) -> Topology:
    """The same machines with links as fast as collectives find them: tables are costed by that."""
    tiers = {}
    for name in ("host_tier", "zone_tier", "cluster_tier"):
        tier = getattr(topology, name)
        if tier is not None:
            reached = tier.gbytes_per_s * tier.collective_frac
            tiers[name] = tier.model_copy(update={"gbytes_per_s": reached, "collective_frac": 1.0})
    return topology.model_copy(update=tiers)


def _planning(
    tables: TablesOf, axes: Axes, topology: Topology, memory_gib: float | None
) -> PlanningSpec:
    shard, replicate, fully, copies = axes
    bandwidth = accelerator_of(topology).memory_gbytes_per_s
    return PlanningSpec(
        topology=_effective(topology),
        loads=tables.loads,
        batch_per_rank=tables.examples,
        memory_gib=memory_gib,
        table_shard=shard,
        table_replicate=replicate,
        fully_sharded=fully and replicate > 1,
        table_copies=copies,
        wire_dtype=tables.wire_dtype,
        rates=TableRates(memory_gbytes_per_s=bandwidth),
    )


def _explain(
    tables: TablesOf, axes: Axes, topology: Topology, memory_gib: float | None
) -> Explanation:
    return explain_tables(
        tables.specs,
        tables.lookups,
        ranks=axes[0] * axes[1],
        optimizer=tables.optimizer,
        planning=_planning(tables, axes, topology, memory_gib),
    )


def _step(tables: TablesOf, axes: Axes, topology: Topology, memory_gib: float | None) -> TableStep:
    shard, replicate, _, _ = axes
    if shard == 1 and not axes[2]:
        return _local(tables, replicate, topology)
    explanation = _explain(tables, axes, topology, memory_gib)
    step = explanation.solution.step
    kinds = [line.sharding for line in explanation.lines]
    # Rows of fully sharded tables are whole in the passes alone, so that none are read ahead.
    ahead = tables.ahead and not (axes[2] and replicate > 1)
    traffic = tuple(
        _traffic(each, replicate, ahead=ahead, told=tables.ahead) for each in step.exchanges
    )
    local_ms = step.owner_ms + step.batch_ms
    if tables.replicas == "gradients" and replicate > 1:
        merged = _merged(tables, explanation)
        traffic = (*(each for each in traffic if each.what not in _MEANS), merged)
        local_ms += _update_ms(merged.given_bytes * (replicate - 1), topology)
    return TableStep(
        local_ms=local_ms,
        traffic=traffic,
        held_bytes=step.held_bytes[0],
        gathered_bytes=step.gathered_bytes[0] - step.held_bytes[0],
        buffer_bytes=_buffers(step),
        cut={kind: kinds.count(kind) for kind in sorted(set(kinds))},
    )


def _merged(tables: TablesOf, explanation: Explanation) -> TableTraffic:
    """Gradients of a rank's rows, merged over its group, which all copies of its part hear."""
    widths = {spec.name: spec.embedding_dim for spec in tables.specs}
    asked = explanation.solution.traffic
    size = ROW_BYTES[tables.wire_dtype]
    group = sum(asked[name].group_unique * (8 + size * widths[name]) for name in widths)
    given = group / explanation.plan.table_shard
    return TableTraffic("gradients of rows", "table_replicate", "all_gather", given)


def _update_ms(heard_bytes: float, topology: Topology) -> float:
    """Time of merging gradients that come from elsewhere and moving their rows."""
    rates = TableRates(memory_gbytes_per_s=accelerator_of(topology).memory_gbytes_per_s)
    return 3 * heard_bytes / (rates.memory_gbytes_per_s * 1e6 * rates.update_frac)


def _traffic(exchange: Exchange, replicate: int, *, ahead: bool, told: bool) -> TableTraffic:
    for what, axis, collective, beside in _COLLECTIVES:
        if exchange.name == what:
            if (beside == "optimizer" and not ahead) or (beside == "model" and not told):
                beside = "nothing"
            given = exchange.rank_bytes
            if axis == "table_replicate":
                # The planner counts what a ring sends; here it is what a rank gives.
                passes = 2 if collective == "all_reduce" else 1
                given *= replicate / (passes * (replicate - 1))
                if collective == "all_gather":
                    given /= replicate
            return TableTraffic(what, axis, collective, given, exchange.ms, beside)
    raise ConfigError(f"gem plan: the planner of tables names a collective {exchange.name!r}")


def _buffers(step: StepCost) -> int:
    return round(sum(each.rank_bytes for each in step.exchanges if "weights" not in each.name))


def _local(tables: TablesOf, ranks: int, topology: Topology) -> TableStep:
    """Whole tables on every rank; gradients of rows are gathered from all ranks and merged."""
    whole = place_tables(tables.specs, {}, table_shard=1, optimizer=tables.optimizer)
    alone = topology.model_copy(update={"hosts": 1, "ranks_per_host": 1})
    planning = _planning(tables, (1, 1, False, "near"), alone, None)
    explanation = explain_tables(
        tables.specs, tables.lookups, optimizer=tables.optimizer, planning=planning, plan=whole
    )
    step = explanation.solution.step
    traffic: tuple[TableTraffic, ...] = ()
    heard = step.owner_ms
    given = 0.0
    if ranks > 1:
        widths = {spec.name: spec.embedding_dim for spec in tables.specs}
        unique = {name: asked.unique for name, asked in explanation.solution.traffic.items()}
        size = ROW_BYTES[tables.wire_dtype] if tables.in_engine else 4
        given = sum(unique[name] * (8 + size * widths[name]) for name in unique)
        axis = "table_replicate" if tables.in_engine else "world"
        traffic = (TableTraffic("gradients of rows", axis, "all_gather", given),)
        # Every rank moves the rows that all ranks have hit, instead of its own.
        heard += _update_ms(given * (ranks - 1), topology)
    return TableStep(
        local_ms=heard + step.batch_ms,
        traffic=traffic,
        held_bytes=step.held_bytes[0],
        buffer_bytes=round(given * ranks),
        cut={"whole on every rank": len(tables.specs)},
        whole=True,
    )
