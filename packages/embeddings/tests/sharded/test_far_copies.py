"""Copies of tables on ranks far apart train as copies on neighbours do, place by place."""

import pytest
import torch

from gem_embeddings.checkpoint import TableSaver, load_tables
from gem_embeddings.contract import OptimizerSpec, TablePlan, TableSpec
from gem_embeddings.engine import build_tables
from gem_embeddings.planning.layout import place_tables
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, DataError
from gem_parallel.contract import ParallelPlan
from gem_parallel.mesh import plan_mesh, table_mesh
from gem_parallel.testing import run_ranks

WIDTH, ROWS = 16, 60
RULE = OptimizerSpec(lr=0.1, eps=0.05)
SPECS = (
    TableSpec(name="big", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=("big",)),
    TableSpec(name="few", embedding_dim=WIDTH, num_embeddings=3, feature_names=("few",)),
)
CASES = [(False, "weights"), (True, "weights"), (False, "gradients"), (True, "gradients")]


def plan_of(copies: str, *, shard: int = 2, replicate: int = 2, fully: bool = False) -> TablePlan:
    return place_tables(
        SPECS,
        {"big": "row_wise"},
        table_shard=shard,
        table_replicate=replicate,
        table_copies=copies,
        fully_sharded=fully,
        optimizer=RULE,
    )


def engine_of(world, copies, fully, exchanged, mesh=None):
    plan = plan_of(copies, shard=world.size // 2, fully=fully)
    return build_tables(SPECS, (), plan, RULE, world, seed=5, replicas=exchanged, mesh=mesh)


def ids_of(step, place, bad=False):
    """Ids of a place in the mesh: its rank in the group, and the group."""
    numbers = torch.Generator().manual_seed(100 * step + 10 * place[0] + place[1])
    big = torch.randint(0, ROWS, (30,), generator=numbers)
    big[3] = ROWS if bad else big[3]
    few = torch.randint(0, 3, (10,), generator=numbers)
    return {"big": Jagged.from_lengths(big, [3] * 10), "few": Jagged.from_lengths(few, [1] * 10)}


def train(world, copies, fully, exchanged, folder=None):
    """Losses by place, tables at the end, and the error of a bad id on the rank of place (0, 1)."""
    engine = engine_of(world, copies, fully, exchanged)
    place, losses = engine.plan.place_of(world.rank), []
    assert engine.plan.world_rank(*place) == world.rank
    for step in range(3):
        vectors = engine(ids_of(step, place))
        loss = (vectors["big"] * vectors["few"]).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        engine.sync()
    tables = [engine.full_weight(spec.name) for spec in SPECS]
    if folder is not None:
        with TableSaver(engine) as saver:
            saver.save(folder)
        other = engine_of(world, "near" if copies == "far" else "far", not fully, exchanged)
        load_tables(other, folder)
        assert all(
            torch.equal(other.full_weight(s.name), t) for s, t in zip(SPECS, tables, strict=True)
        )
    if fully or exchanged == "gradients":  # then groups talk in a forward pass too
        return place, losses, tables, None
    try:
        engine(ids_of(9, place, bad=place == (0, 1)))
    except DataError as refused:
        return place, losses, tables, str(refused)
    return place, losses, tables, None


def train_all(world, folder):
    return {
        (copies, *case): train(world, copies, *case, folder / f"{copies}-{case}")
        for copies in ("near", "far")
        for case in CASES
    }


def test_far_copies_train_as_near_ones_do(tmp_path):
    by_rank = run_ranks(train_all, 4, tmp_path)
    for case in CASES:
        near, far = (
            {found[copies, *case][0]: found[copies, *case][1:] for found in by_rank}
            for copies in ("near", "far")
        )
        assert near.keys() == far.keys() == {(g, m) for g in range(2) for m in range(2)}
        for place, (losses, tables, error) in near.items():
            assert far[place][0] == losses, (case, place)
            assert len(set(losses)) == 3
            assert all(map(torch.equal, far[place][1], tables)), (case, place)
            # The group of the bad batch stops; the error names the rank that has it.
            if place[1] == 1 and case == CASES[0]:
                assert error is not None
                assert far[place][2] is not None
                if place[0] == 1:
                    assert "a refusal by rank 1" in error  # place (0, 1) with near copies
                    assert "a refusal by rank 2" in far[place][2]
            else:
                assert error is far[place][2] is None


def meshes(world):
    found = []
    for copies in ("near", "far"):
        plan = ParallelPlan(replicate=4, table_shard=2, table_replicate=2, table_copies=copies)
        mesh = plan_mesh(plan, world, "sparse")
        found.append((mesh.mesh.tolist(), list(mesh.mesh_dim_names)))
    wrong = table_mesh("cpu", 2, 2, "near")
    with pytest.raises(ConfigError, match=r"over ranks \[0, 2, 1, 3\]; got .* over \[0, 1, 2, 3\]"):
        engine_of(world, "far", False, "weights", mesh=wrong)
    engine_of(world, "far", False, "weights", mesh=table_mesh("cpu", 2, 2, "far"))
    return found


def test_the_ranks_of_a_group_are_neighbours():
    names = ["table_shard", "table_replicate"]
    for near, far in run_ranks(meshes, 4):
        assert near == ([[0, 1], [2, 3]], names)
        assert far == ([[0, 2], [1, 3]], names)


def test_every_rank_has_one_place():
    for copies in ("near", "far"):
        plan = plan_of(copies, shard=3, replicate=4)
        places = [plan.place_of(rank) for rank in range(12)]
        assert sorted(places) == [(g, m) for g in range(3) for m in range(4)]
        assert [plan.world_rank(*place) for place in places] == list(range(12))
    assert [plan_of("far", shard=3, replicate=4).place_of(r)[1] for r in range(12)] == [
        *(0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3)
    ]
