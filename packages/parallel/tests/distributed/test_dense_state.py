"""What is saved under one plan goes on under another; what cannot be is refused by name."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from small_model import (
    MIXTURES,
    UNITS,
    loss_of,
    make_batch,
    make_model,
    name_of,
    optimizer_of,
    own_rows,
    plan_of,
    spread,
)
from torch import nn

from gem_opkit.errors import ConfigError
from gem_parallel.collectives import all_reduce_sum
from gem_parallel.contract import ParallelPlan
from gem_parallel.dense import parallelise
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

SAVED_AT, END = 3, 6


def go_on(world, dense, table, optimizer, steps):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(dense.module, own_rows(make_batch(step), step, world), world)
        loss.backward()
        table.grad = all_reduce_sum(table.grad, world) / world.size
        losses.append(all_reduce_sum(loss.detach() / world.size, world).item())
        optimizer.step()
    return losses


def all_state(dense, table, optimizer):
    """Parameters and Adam's moments, under the names of the single-process model."""
    named = {**dense.parameters, "table.weight": table}
    moments = {
        f"{name}.{key}": value
        for name, p in named.items()
        for key, value in optimizer.state[p].items()
    }
    return {"dense": dense.state(), "table": table.detach(), "moments": moments}


def made(world, plan, seed):
    dense, table = spread(world, plan, seed=seed)
    return dense, table, optimizer_of(dense, table)


def load(world, plan, folder):
    """Other weights at first, and moments of a step that must be forgotten."""
    dense, table, optimizer = made(world, plan, seed=77)
    go_on(world, dense, table, optimizer, [0])
    state = all_state(dense, table, optimizer)
    dcp.load(state, checkpoint_id=folder)
    with torch.no_grad():
        table.copy_(state["table"])
    return dense, table, optimizer


def save_then_go_on(world, folder, saved_under, plans):
    dense, table, optimizer = made(world, saved_under, seed=0)
    go_on(world, dense, table, optimizer, range(SAVED_AT))
    dcp.save(all_state(dense, table, optimizer), checkpoint_id=folder)
    return load_then_go_on(world, folder, plans)


def load_then_go_on(world, folder, plans):
    torch.use_deterministic_algorithms(True)
    found = []
    for plan in plans:
        dense, table, optimizer = load(world, plan, folder)
        losses = go_on(world, dense, table, optimizer, range(SAVED_AT, END))
        found.append((losses, {**dense.full_state(), "table.weight": table.detach()}))
    return found


def test_a_run_goes_on_under_every_other_plan(tmp_path):
    dense, table, optimizer = made(World(), ParallelPlan(), seed=0)
    losses = go_on(World(), dense, table, optimizer, range(END))[SAVED_AT:]
    unbroken = losses, {**dense.full_state(), "table.weight": table.detach()}

    plans = [plan_of(2, 2, 1)]
    by_rank = run_ranks(save_then_go_on, 4, tmp_path / "four", plan_of(1, 2, 2), plans)
    for found in by_rank:
        for plan, got in zip(plans, found, strict=True):
            torch.testing.assert_close(
                {name_of(plan): got}, {name_of(plan): unbroken}, rtol=1e-10, atol=1e-12
            )
    # Fewer ranks, and one.
    for found in run_ranks(load_then_go_on, 2, tmp_path / "four", [plan_of(1, 1, 2)]):
        torch.testing.assert_close(found[0], unbroken, rtol=1e-10, atol=1e-12)
    alone = load_then_go_on(World(), tmp_path / "four", [ParallelPlan()])
    torch.testing.assert_close(alone[0], unbroken, rtol=1e-10, atol=1e-12)


def tag(world, folder):
    """Expert e holds e everywhere."""
    dense, _ = spread(world, plan_of(1, 1, 2))
    with torch.no_grad():
        for name, p in dense.parameters.items():
            if ".experts." in name:
                p.fill_(int(name.split(".experts.")[1].split(".")[0]))
    dcp.save(dense.state(), checkpoint_id=folder)
    return tags(world, plan_of(1, 1, 2), folder)


def tags(world, plan, folder):
    dense, _ = spread(world, plan, seed=5)
    dcp.load(dense.state(), checkpoint_id=folder)
    full = dense.full_state()
    return {name: set(p.flatten().tolist()) for name, p in full.items() if ".experts." in name}


def test_each_expert_comes_back_as_itself(tmp_path):
    names = [name for name, _ in make_model().named_parameters() if ".experts." in name]
    expected = {name: {float(name.split(".experts.")[1].split(".")[0])} for name in names}
    assert len(names) == 24
    for found in run_ranks(tag, 2, tmp_path / "saved"):
        assert found == expected
    assert tags(World(), ParallelPlan(), tmp_path / "saved") == expected


def refused(match, plan, *, model=None, world_size=2, **given):
    given = {"units": UNITS, "experts": MIXTURES} | given
    with pytest.raises(ConfigError, match=match):
        parallelise(model or make_model(), plan, World(size=world_size), **given)


def test_names_and_plans_that_cannot_be_are_refused_before_anything_is_sent():
    two = plan_of(1, 1, 2)
    refused(r"units must name .* got 'layer.0'; did you mean 'layers.0'\?", two, units=["layer.0"])
    refused(r"experts must name .* 'layers.0.mixtur'; did you", two, experts=["layers.0.mixtur"])
    refused(r"hold a ModuleList 'experts'; got 'head', a Linear", two, experts=["head"])
    three = r"divide the 3 experts of layers.0.mixture; got replicate=1 \* shard=1 \* expert=2"
    refused(three, two, model=make_model(count=3))
    refused(r"be 1 for a model without experts; got replicate=1", two, experts=())
    refused(r"world size 3; got 1 \* 1 \* 2 = 2", two, world_size=3)
    refused(r"got 1 that are not", two, ignored=[nn.Parameter(torch.zeros(1))])


class TwiceAtOdds(nn.Module):
    """Asks the same experts twice in a pass, about different examples."""

    def __init__(self):
        super().__init__()
        self.model = make_model()

    def forward(self, x_BND):
        mixture = self.model.layers[0].mixture
        return mixture(x_BND), mixture(x_BND[:1])


def ask_twice(world):
    plan = plan_of(1, 1, 2)
    dense = parallelise(TwiceAtOdds(), plan, world, units=(), experts=["model.layers.0.mixture"])
    dense.module(torch.ones(3, 7, 6, dtype=torch.float64))


def call_another_ranks_expert(world):
    dense, _ = spread(world, plan_of(1, 1, 2))
    experts = dense.module.layers[0].mixture.experts
    experts[3 - 3 * world.rank](torch.ones(1, 2, 6))


def test_calls_that_would_be_wrong_are_refused():
    with pytest.raises(RuntimeError, match=r"ShapeError.* the 3 examples of .* got 1;"):
        run_ranks(ask_twice, 2)
    with pytest.raises(RuntimeError, match="run by the rank that keeps it"):
        run_ranks(call_another_ranks_expert, 2)
