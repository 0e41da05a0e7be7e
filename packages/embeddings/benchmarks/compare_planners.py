"""Plan the same tables with torchrec's planner and with ours, and cost both by one model.

Both plans are for torchrec's engine, so ours takes only kinds that it has. The model is ours, with
its assumptions; what it says of both plans is time, balance and memory of the most loaded rank.

Needs torchrec (README.md names its versions). Run
``python packages/embeddings/benchmarks/compare_planners.py`` in the repository's root.
"""

import argparse
import logging
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gem_embeddings.contract import (
    OptimizerSpec,
    Sharding,
    TablePlacement,
    TablePlan,
    TableShard,
    TableSpec,
)
from gem_embeddings.plan import explain_tables
from gem_embeddings.planning.__main__ import with_gpus
from gem_embeddings.planning.layout import GroupLayout
from gem_embeddings.planning.spec import PlanningFile, PlanningSpec

FILE = Path(__file__).with_name("large_tables.toml")


def main() -> None:
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--tables", type=int, default=40, help="pooled tables, evenly picked")
    parser.add_argument("--memory-gib", type=float, default=60.0)
    given = parser.parse_args()
    tables, planning, optimizer = chosen(given.tables, given.gpus, given.memory_gib)
    started = time.process_time()
    ours = explain_tables(tables, optimizer=optimizer, planning=planning)
    ours_s = time.process_time() - started
    started = time.process_time()
    theirs_plan = torchrec_plan(tables, planning, optimizer)
    theirs_s = time.process_time() - started
    theirs = explain_tables(tables, optimizer=optimizer, planning=planning, plan=theirs_plan)
    for name, explained, seconds in (("ours", ours, ours_s), ("torchrec", theirs, theirs_s)):
        step = explained.solution.step
        kinds = [line.sharding for line in explained.lines]
        counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        print(
            f"{name}: {counted}; step {step.ms:.2f} ms, balance of time {step.balance_ms:.2f}, of "
            f"bytes {step.balance_bytes:.2f}, held {step.held_bytes[0] / 2**30:.2f} GiB, planned "
            f"in {seconds:.1f} s"
        )


def chosen(
    count: int, gpus: int, memory_gib: float
) -> tuple[Sequence[TableSpec], PlanningSpec, OptimizerSpec]:
    """Pick pooled tables of the large set, evenly over their list."""
    described = PlanningFile.model_validate(tomllib.loads(FILE.read_text(encoding="utf-8")))
    tables, planning = described.expanded()
    pooled = [table for table in tables if table.pooling != "none"]
    picked = pooled[:: max(1, len(pooled) // count)][:count]
    names = {name for table in picked for name in table.feature_names}
    loads = tuple(load for load in planning.loads if load.feature_name in names)
    changes = {"loads": loads, "engine": "torchrec", "wire_dtype": "fp32", "table_replicate": 1}
    changed = with_gpus(planning, gpus).model_copy(update={**changes, "memory_gib": memory_gib})
    return picked, changed, described.optimizer


def torchrec_plan(
    tables: Sequence[TableSpec], planning: PlanningSpec, optimizer: OptimizerSpec
) -> TablePlan:
    """Let torchrec's planner decide, with the same machines, batch and bag sizes."""
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
    from torchrec.distributed.planner.types import ParameterConstraints

    machines: Any = planning.topology
    world = machines.world_size
    per_ms = 1e9 / 1000
    topology = Topology(
        world_size=world,
        local_world_size=machines.ranks_per_host,
        compute_device="cuda",
        hbm_cap=int((planning.memory_gib or 0) * 2**30 / 0.85),
        ddr_cap=200 * 2**30,
        intra_host_bw=machines.host_tier.gbytes_per_s * per_ms,
        inter_host_bw=machines.zone_tier.gbytes_per_s * per_ms,
    )
    ids = {load.feature_name: load.ids_per_example for load in planning.loads}
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=planning.batch_per_rank,
        storage_reservation=HeuristicalStorageReservation(percentage=0.15),
        constraints={
            table.name: ParameterConstraints(
                sharding_types=["table_wise", "row_wise", "table_row_wise"],
                compute_kernels=["fused"],
                pooling_factors=[ids[name] for name in table.feature_names],
            )
            for table in tables
        },
    )
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            embedding_dim=table.embedding_dim,
            num_embeddings=table.num_embeddings,
            feature_names=list(table.feature_names),
        )
        for table in tables
    ]
    model = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    sharder: Any = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    )
    found: Any = planner.plan(model, [sharder])
    layout = GroupLayout(
        table_shard=world,
        table_replicate=1,
        fully_sharded=False,
        host_ranks=machines.ranks_per_host,
        optimizer=optimizer,
    )
    placements = [
        _placement(table, parameter, layout)
        for table in tables
        for parameter in [found.plan[""][table.name]]
    ]
    return TablePlan(ranks=world, table_shard=world, placements=tuple(placements))


def _placement(table: TableSpec, parameter: Any, layout: GroupLayout) -> TablePlacement:
    kind: Sharding = parameter.sharding_type
    shards = []
    for rank, shard in zip(parameter.ranks, parameter.sharding_spec.shards, strict=True):
        (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
        shards.append(
            TableShard(
                rank=rank,
                row_start=row,
                row_end=row + rows,
                column_start=column,
                column_end=column + columns,
                shard_bytes=layout.held_bytes(table, rows, columns),
            )
        )
    return TablePlacement(table_name=table.name, sharding=kind, shards=tuple(shards))


if __name__ == "__main__":
    main()
