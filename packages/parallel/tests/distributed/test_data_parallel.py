"""Data-parallel training on gloo ranks equals training on one process."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from gem_opkit.errors import ConfigError, UnsupportedError
from gem_parallel.collectives import all_gather_rows, all_reduce_sum, barrier, broadcast_tensors
from gem_parallel.contract import ParallelPlan
from gem_parallel.dense import data_parallel, loss_scale
from gem_parallel.launch import World
from gem_parallel.mesh import plan_mesh
from gem_parallel.testing import run_ranks

# Examples of each rank: unequal, and none at all on one of them.
PARTS = {2: [(0, 5), (5, 8)], 4: [(0, 3), (3, 3), (3, 7), (7, 8)]}


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x_BD = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    y_BA = torch.randn(8, 1, generator=generator, dtype=torch.float64)
    return x_BD, y_BA


def train(model: nn.Module, world: World, parts: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Three steps of SGD; every rank begins with other weights, and rank 0's must win."""
    wrapped = data_parallel(model, ParallelPlan.data_parallel(world.size), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x_BD, y_BA = make_data()
    begin, end = parts[world.rank]
    for _ in range(3):
        optimizer.zero_grad()
        error_BA = wrapped(x_BD[begin:end]) - y_BA[begin:end]
        mean = error_BA.square().sum() / max(end - begin, 1)
        (mean * loss_scale(end - begin, world)).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_rank(world: World) -> list[torch.Tensor]:
    return train(make_model(seed=world.rank), world, PARTS[world.size])


@pytest.mark.parametrize("world_size", [2, 4])
def test_uneven_ranks_train_like_one(world_size):
    alone = train(make_model(seed=0), World(), [(0, 8)])
    for rank_parameters in run_ranks(train_rank, world_size):
        for got, expected in zip(rank_parameters, alone, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def ignore_last_layer(world: World) -> list[bool]:
    model = make_model(seed=world.rank)
    ignored = list(model[2].parameters())
    wrapped = data_parallel(model, ParallelPlan.data_parallel(world.size), world, ignored=ignored)
    x_BD, _ = make_data()
    begin, end = PARTS[world.size][world.rank]
    wrapped(x_BD[begin:end]).sum().backward()
    gathered = [all_gather_rows(p.grad[None], world) for p in model.parameters()]
    return [bool((rows == rows[:1]).all()) for rows in gathered]


def test_ignored_parameters_keep_their_own_gradients():
    for equal in run_ranks(ignore_last_layer, 2):
        # The first layer's gradients are averaged. The last weight's differ from rank to rank.
        assert equal[:2] == [True, True]
        assert equal[2] is False


def collect(world: World) -> dict[str, torch.Tensor]:
    rows = torch.arange(world.rank * 2, dtype=torch.int64).reshape(world.rank, 2) + 10 * world.rank
    start = torch.full((3,), float(world.rank))
    broadcast_tensors([start], world)
    barrier(world)
    return {
        "sum": all_reduce_sum(torch.tensor([1.0, world.rank]), world),
        "rows": all_gather_rows(rows, world),
        "none": all_gather_rows(torch.empty(0, 3), world),
        "start": start,
    }


@pytest.mark.parametrize("world_size", [2, 4])
def test_collectives_with_uneven_and_empty_parts(world_size):
    expected = torch.cat([torch.arange(2 * r).reshape(r, 2) + 10 * r for r in range(world_size)])
    for got in run_ranks(collect, world_size):
        assert got["sum"].tolist() == [world_size, sum(range(world_size))]
        assert torch.equal(got["rows"], expected)
        assert got["none"].shape == (0, 3)
        assert got["start"].tolist() == [0.0, 0.0, 0.0]


def mesh_neighbours(world: World) -> dict[str, list[int]]:
    plan = ParallelPlan(replicate=2, expert=2, table_shard=2, table_replicate=2)
    dense, sparse = plan_mesh(plan, world, "dense"), plan_mesh(plan, world, "sparse")
    return {
        "axes": [*dense.mesh_dim_names, *sparse.mesh_dim_names],
        "expert": dense["expert"].mesh.tolist(),
        "table_replicate": sparse["table_replicate"].mesh.tolist(),
        "replicate": dense["replicate"].mesh.tolist(),
    }


def test_innermost_axis_holds_neighbouring_ranks():
    first = run_ranks(mesh_neighbours, 4)[0]
    assert first["axes"] == ["replicate", "shard", "expert", "table_shard", "table_replicate"]
    assert first["expert"] == [0, 1]
    assert first["table_replicate"] == [0, 1]
    assert first["replicate"] == [0, 2]


def fail_on_rank_one(world: World) -> None:
    if world.rank == 1:
        raise ValueError("rank one breaks")


def test_a_failing_rank_is_reported_with_its_traceback():
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed[\s\S]*rank one breaks"):
        run_ranks(fail_on_rank_one, 2)


def wait_for_ever(world: World) -> None:
    if world.rank == 1:
        import time

        time.sleep(60)


def test_a_silent_rank_is_named():
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]|ranks \[1\]"):
        run_ranks(wait_for_ever, 2, timeout_s=3)


@pytest.mark.parametrize("axis", ["shard", "expert"])
def test_what_is_not_built_is_refused_by_name(axis):
    plan = ParallelPlan.model_validate({axis: 2, "table_replicate": 2})
    with pytest.raises(UnsupportedError, match=f"{axis} must be 1; got 2"):
        data_parallel(make_model(0), plan, World(size=2))


def test_one_rank_needs_no_process_group():
    model = make_model(0)
    world = World()
    assert data_parallel(model, ParallelPlan(), world) is model
    assert loss_scale(3, world) == 1.0
    assert not torch.distributed.is_initialized()
    with pytest.raises(ConfigError, match="a single rank needs no mesh"):
        plan_mesh(ParallelPlan(), world, "dense")


def test_foreign_ignored_parameters_are_refused():
    with pytest.raises(ConfigError, match="got 1 that are not"):
        data_parallel(
            make_model(0),
            ParallelPlan.data_parallel(2),
            World(size=2),
            ignored=[nn.Parameter(torch.zeros(1))],
        )


def test_torchrun_ranks_find_each_other(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import torch\n"
        "from gem_parallel.collectives import all_reduce_sum\n"
        "from gem_parallel.launch import process_group\n"
        "with process_group('cpu') as world:\n"
        "    total = all_reduce_sum(torch.tensor([world.rank + 1.0]), world)\n"
        "    if world.is_first:\n"
        "        print('total', total.item(), 'of', world.size)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert "total 3.0 of 2" in done.stdout, done.stderr
