"""Regions that run again inside units whose parameters are gathered: the bits of plain training."""

import torch
from small_model import (
    MIXTURES,
    loss_of,
    make_batch,
    make_model,
    optimizer_of,
    own_rows,
    plan_of,
    spread,
)

from gem_parallel.recompute.apply import recompute_by
from gem_parallel.recompute.choose import plan_by_hand, region_plan
from gem_parallel.recompute.record import record
from gem_parallel.testing import run_ranks

STEPS = 2
PLANS = [plan_of(1, 2, 1), plan_of(2, 1, 1)]


def plan_for(rows):
    """Of one process: every mixture runs again but for the products of its experts."""
    model = make_model()
    profile = record(model, MIXTURES, lambda: model(*rows[:2]), alive=rows)
    kept = [
        [c for c in region.calls if c.can_be_kept and "mm" in c.name] for region in profile.regions
    ]
    assert all(kept)
    return plan_by_hand(profile, [region_plan(profile, i, calls) for i, calls in enumerate(kept)])


def train(world, plan, *, again):
    dense, table = spread(world, plan)
    if again:
        # The batch decides how much is kept, and not what is run again.
        model = getattr(dense.module, "module", dense.module)  # within data parallelism
        recompute_by(model, plan_for(own_rows(make_batch(0), 0, world)))
    optimizer = optimizer_of(dense, table)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(dense.module, own_rows(make_batch(step), step, world), world)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, dense.full_state()


def train_both(world):
    torch.use_deterministic_algorithms(True)
    return [(train(world, p, again=False), train(world, p, again=True)) for p in PLANS]


def test_ranks_that_run_regions_again_learn_the_same_bits():
    for found in run_ranks(train_both, 2):
        assert len(found) == len(PLANS)
        for (losses, state), (again_losses, again_state) in found:
            assert losses == again_losses
            for name, value in state.items():
                assert torch.equal(value, again_state[name]), name
