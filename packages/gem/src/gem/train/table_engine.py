"""Where the tables of a run lie on its ranks, and the engine that holds them there."""

from collections.abc import Sequence

from torch import nn

from gem.config import RunConfig
from gem.data.names import suggestion
from gem.data.schema import BatchSchema
from gem.model.build import model_tables
from gem.model.sharded_tables import ShardedTables
from gem.model.tables import event_feature
from gem.train.parallel_spec import ParallelSpec
from gem_embeddings.contract import LookupSpec, TableLoad, TablePlan, TableSpec
from gem_embeddings.engine import build_tables
from gem_embeddings.plan import plan_tables
from gem_embeddings.planning.spec import PlanningSpec
from gem_embeddings.tables import EmbeddingTables
from gem_opkit.errors import ConfigError, refusal
from gem_parallel.copy_engine.choose import GatherChoice
from gem_parallel.launch import World

# Part of the longest history that an example is planned to have.
_FILL = 0.5


def shard_tables(
    config: RunConfig, plan: ParallelSpec, model: nn.Module, schema: BatchSchema, world: World
) -> None:
    """Put an engine in the place of a model's tables, where the plan wants one.

    Every rank has to call this. Rows that the model has are dropped: the engine draws its own.

    Args:
        config: the run.
        plan: of these ranks.
        model: built by `gem.model.build.build_model`.
        schema: of the batches.
        world: the ranks.

    Raises:
        ConfigError: a table that is not there, or tables that do not fit.
    """
    own = model.get_submodule("tables")
    if plan.tables_are_local or not isinstance(own, EmbeddingTables):
        return
    specs, lookups = model_tables(model)
    engine = build_tables(
        specs,
        lookups,
        table_plan(config, plan, specs, lookups, schema),
        config.train.tables,
        world,
        seed=config.seed,
        update="step",
        wire_dtype=plan.table_wire_dtype,
        replicas=plan.table_replicas,
        single_pass=config.train.accumulation_parts == 1,
        gathers=GatherChoice(plan.gathers, named=("recipe", "parallel.gathers"), what="tables"),
    )
    names = {id(weight): name for name, weight in own.weights.items()}
    weights = zip(own.specs, own.table_parameters(), strict=True)
    keys = {spec.name: names[id(weight)] for spec, weight in weights}
    tables = ShardedTables(engine, lookups, keys)
    tables.train(own.training)
    model.add_module("tables", tables)


def table_plan(
    config: RunConfig,
    plan: ParallelSpec,
    specs: Sequence[TableSpec],
    lookups: Sequence[LookupSpec],
    schema: BatchSchema,
) -> TablePlan:
    """Decide where every table lies. The same on every rank.

    Args:
        config: the run.
        plan: of its ranks.
        specs: the tables.
        lookups: who looks them up.
        schema: of the batches.

    Returns:
        the cheapest plan that fits and is allowed.

    Raises:
        ConfigError: ``parallel.table_sharding`` names a table that is not there, or they do not
            fit into ``parallel.table_memory_gib``.
    """
    names = [spec.name for spec in specs]
    for name in plan.table_sharding:
        if name not in names:
            raise ConfigError(
                refusal(
                    "gem train",
                    "parallel.table_sharding",
                    must=f"name tables of the model ({', '.join(names)})",
                    got=repr(name) + suggestion(name, names),
                    fix="correct or remove it",
                )
            )
    looked_up = {lookup.feature_name for lookup in lookups}
    loads = [
        TableLoad(feature_name=feature, ids_per_example=_FILL * stream.max_events)
        for stream in schema.streams
        for source in stream.ids
        if (feature := event_feature(stream.name, source.name)) in looked_up
    ]
    ranks = plan.world_size
    return plan_tables(
        specs,
        lookups,
        ranks=ranks,
        optimizer=config.train.tables,
        planning=PlanningSpec(
            loads=tuple(loads),
            batch_per_rank=max(1, -(-config.train.batch_examples // ranks)),
            memory_gib=plan.table_memory_gib,
            allowed=dict(plan.table_sharding),
            table_shard=plan.table_shard,
            table_replicate=plan.table_replicate,
            table_copies=plan.table_copies,
            fully_sharded=plan.fully_sharded_tables,
            wire_dtype=plan.table_wire_dtype,
        ),
    )
