"""Every dense plan trains as one process does: losses, gradients, norms, parameters."""

from contextlib import nullcontext

import pytest
import torch
from small_model import (
    EXAMPLES,
    MIXTURES,
    STATISTICS,
    loss_of,
    make_batch,
    make_model,
    name_of,
    nccl_world,
    optimizer_of,
    own_rows,
    plan_of,
    plans_of,
    spread,
)
from torch import nn

from gem_parallel.collectives import all_gather_rows, all_reduce_sum
from gem_parallel.contract import ParallelPlan
from gem_parallel.dense import parallelise
from gem_parallel.launch import World
from gem_parallel.sharding import copies
from gem_parallel.testing import run_ranks

STEPS = 10
CLIP = 0.2
# Float64: only the order of the sums differs.
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def train(world, plan):
    """What a run shows: losses, norms, the last gradients, parameters, scores; all whole."""
    # Every rank begins with other weights, and rank 0's must win.
    dense, table = spread(world, plan, seed=world.rank)
    optimizer = optimizer_of(dense, table)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = own_rows(make_batch(step), step, world)
        with no_waiting(world, step):
            loss = loss_of(dense.module, rows, world)
            loss.backward()
            norm = dense.clip_(CLIP)
        # The caller's part: gradients of what was ignored.
        table.grad = all_reduce_sum(table.grad, world) / world.size
        losses.append(all_reduce_sum(loss.detach() / world.size, world).item())
        norms.append(norm.item())
        optimizer.step()
    parameters = {**dense.full_state(), "table.weight": table.detach()}
    with torch.no_grad():
        scores_BA = [score(dense, world)]
        for p in dense.parameters.values():
            p.mul_(1.5)  # as a checkpoint that is loaded, or averages that are put in
        scores_BA.append(score(dense, world))
        for p in dense.parameters.values():
            p.copy_(p.grad)
            p.grad = torch.ones_like(p)
    found = {"parameters": parameters, "gradients": dense.full_state()}
    found["scores"] = torch.stack(scores_BA)
    found = {k: on_cpu(v) for k, v in found.items()}
    return found | {"losses": losses, "norms": norms, "of_ones": dense.grad_norm().item()}


def score(dense, world):
    """Logits of a batch of which some ranks have no examples."""
    return all_gather_rows(dense.module(*own_rows(make_batch(1), 1, world)[:2]), world)


def no_waiting(world, step):
    """After warming up, a step on a GPU makes the host wait for nothing."""
    return NoWaiting() if world.device.type == "cuda" and step > 1 else nullcontext()


class NoWaiting:
    def __enter__(self):
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_):
        torch.cuda.set_sync_debug_mode("default")


def on_cpu(value):
    if isinstance(value, dict):
        return {name: part.cpu() for name, part in value.items()}
    return value.cpu()


def train_all(world, plans):
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    return [train(world, plan) for plan in plans]


@pytest.fixture(scope="module")
def alone():
    return train(World(), ParallelPlan())


def check_all(alone, plans, found):
    for plan, got in zip(plans, found, strict=True):
        named = {f"{name_of(plan)} {what}": value for what, value in got.items()}
        expected = {f"{name_of(plan)} {what}": value for what, value in alone.items()}
        torch.testing.assert_close(named, expected, **TIGHT)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_plan_trains_like_one_process(alone, ranks):
    plans = plans_of(ranks)
    assert len(plans) == {2: 3, 4: 6}[ranks]
    for found in run_ranks(train_all, ranks, plans):
        check_all(alone, plans, found)


def test_parameters_that_are_kept_whole_are_let_go_when_they_change(alone):
    # Scores come from forward passes without a backward pass, and parameters change in between.
    plans = [p.model_copy(update={"keep_gathered": True}) for p in plans_of(2) if p.replicate == 1]
    assert len(plans) == 2
    for found in run_ranks(train_all, 2, plans):
        check_all(alone, plans, found)


def test_constant_gradients_have_the_norm_of_their_number(alone):
    model = make_model()
    elements = sum(p.numel() for p in model.parameters()) - model.table.weight.numel()
    # The test above holds the norm of every plan to this one.
    assert alone["of_ones"] == pytest.approx(elements**0.5, rel=1e-12)


def train_over_nccl(world, store, plans):
    world = nccl_world(world, store)
    return [train(world, plan) for plan in plans]


@pytest.mark.gpu2
def test_two_gpus_train_like_one_process(alone, tmp_path):
    plans = plans_of(2)
    for found in run_ranks(train_over_nccl, 2, tmp_path / "store", plans):
        check_all(alone, plans, found)


SINGLE = torch.float32


def sums_of(world, plans):
    """What ranks give to each sum, all told, and gradients of one step under each plan, whole."""
    rows = own_rows(make_batch(0, dtype=SINGLE), 0, world)
    model = make_model(dtype=SINGLE)
    loss_of(model, rows, world).backward()
    given = {
        name: all_reduce_sum(p.grad.abs(), world) / world.size
        for name, p in model.named_parameters()
    }
    found = []
    for plan in plans:
        for narrow in ("fp32", "bf16"):
            dense, _ = spread(world, plan.model_copy(update={"reduce_dtype": narrow}), dtype=SINGLE)
            loss_of(dense.module, rows, world).backward()
            kinds = {g.dtype for g in dense.local_gradients()}
            with torch.no_grad():
                for p in dense.parameters.values():
                    p.copy_(p.grad)
            found.append((dense.full_state(), kinds | {p.dtype for p in dense.parameters.values()}))
    return given, found


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_in_bf16_are_those_of_fp32_to_a_rounding_a_rank(ranks):
    """A rounding of what each rank gives, one of each sum of two, and one of the mean."""
    plans, unit = plans_of(ranks), 2.0**-9
    for given, found in run_ranks(sums_of, ranks, plans):
        for plan, place in zip(plans, range(0, len(found), 2), strict=True):
            (wide, kinds), (narrow, narrow_kinds) = found[place : place + 2]
            assert kinds == narrow_kinds == {SINGLE}
            rounded = {}
            for name, right in wide.items():
                error = (narrow[name] - right).abs()
                bound = (ranks + 1) * unit * given[name] + 1e-6 * given[name].max()
                assert bool((error <= bound).all()), (name_of(plan), name)
                rounded[name] = bool((error > 1e-6 * given[name]).any())
            assert sum(rounded.values()) > len(rounded) // 4, name_of(plan)
            # Where nobody shares an expert its gradient is not rounded.
            if plan.replicate * plan.shard == 1:
                assert not any(is_ for name, is_ in rounded.items() if ".experts." in name)


class OneOfEach(nn.Module):
    """A scalar that all ranks share and one scalar for each of two experts."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([3.0]))
        self.experts = nn.ModuleList([Scalar(5.0), Scalar(7.0)])
        self.run = lambda experts, parts: experts[0](parts[0]) + experts[1](parts[1])

    def forward(self, x_BND):
        return self.gain * self.run(self.experts, [x_BND, 2 * x_BND])


class Scalar(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = nn.Parameter(torch.tensor([value]))

    def forward(self, x_BND):
        return self.value * x_BND


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixture = OneOfEach()

    def forward(self, x_BND):
        return self.mixture(x_BND)


def scalar_gradients(world, below):
    model = Holder()
    plan = ParallelPlan(expert=2, table_replicate=2, replicate_below=below)
    dense = parallelise(model, plan, world, units=["mixture"], experts=["mixture"])
    x_BND = torch.full((1 + world.rank, 1, 1), 10.0**world.rank)
    dense.module(x_BND).sum().backward()
    total = {}
    for name, p in dense.parameters.items():
        total[name] = (
            p.grad.full_tensor().item() if hasattr(p.grad, "full_tensor") else p.grad.item()
        )
    return total


@pytest.mark.parametrize("below", [0, 100])
def test_gradients_of_experts_are_means_over_all_ranks_too(below):
    first, second = run_ranks(scalar_gradients, 2, below)
    # Σ x is 1 on rank 0 and 20 on rank 1. Out is gain * (a x + 2 b x).
    assert first == {
        "mixture.gain": pytest.approx((5 + 14) * 21 / 2),
        "mixture.experts.0.value": pytest.approx(3 * 21 / 2),
    }
    assert second == {
        "mixture.gain": pytest.approx((5 + 14) * 21 / 2),
        "mixture.experts.1.value": pytest.approx(2 * 3 * 21 / 2),
    }


def accumulate(world, plans):
    """Gradients of a batch run in three parts, one of them without examples."""
    copies.BUCKET_BYTES = 1  # as if every parameter were large enough to travel alone
    found = []
    for plan in plans:
        dense, _ = spread(world, plan)
        batch = make_batch(0)
        for part, (low, high) in enumerate([(0, 4), (4, 4), (4, EXAMPLES)]):
            with dense.no_sync() if part < 2 else nullcontext():
                rows = own_rows([x[low:high] for x in batch], part, world, examples=high - low)
                loss_of(dense.module, rows, world).backward()
        with torch.no_grad():
            for p in dense.parameters.values():
                p.copy_(p.grad)
        found.append(dense.full_state())
    return found


def test_parts_of_a_batch_add_up_and_merge_once():
    plans = [plan_of(4, 1, 1), plan_of(2, 2, 1), plan_of(2, 1, 2), plan_of(1, 2, 2)]
    model = make_model()
    loss_of(model, make_batch(0), World()).backward()
    whole = {n: p.grad for n, p in model.named_parameters() if n != "table.weight"}
    for found in run_ranks(accumulate, 4, plans):
        assert len(found) == len(plans)
        for got in found:
            torch.testing.assert_close(got, whole, **TIGHT)


def traffic(world):
    """What the four kinds of parameters have become, and who is in which foreach call."""
    dense, _ = spread(world, plan_of(1, 2, 2))
    groups = dense.foreach_groups(dense.parameters.values())
    names = {id(p): name for name, p in dense.parameters.items()}
    local = {name: tuple(p.shape) for name, p in dense.state().items() if "experts" in name}
    held = sum(getattr(p, "_local_tensor", p).numel() for p in dense.parameters.values())
    return [sorted(names[id(p)] for p in group) for group in groups], local, held


def test_parameters_are_cut_copied_or_elsewhere():
    by_rank = run_ranks(traffic, 4)
    for rank, (groups, local, _) in enumerate(by_rank):
        kept = [2 * (rank % 2), 2 * (rank % 2) + 1]  # expert is the innermost axis
        assert {name.split(".")[4] for name in local} == {str(place) for place in kept}
        common, plain, of_experts = groups  # widen, of the outermost module, comes first
        assert "scale" in plain
        assert f"layers.0.mixture.experts.{kept[0]}.gain" in plain
        assert {"widen", "layers.1.stream.weight"} <= set(common)
        assert of_experts == sorted(
            f"{mixture}.experts.{place}.wide.weight" for mixture in MIXTURES for place in kept
        )
    alone = sum(STATISTICS.values())
    cut = STATISTICS["cut"] / 4 + STATISTICS["cut, expert"] / 4
    copied = STATISTICS["copied"] + STATISTICS["copied, expert"] / 2
    # Rows are dealt out whole, so that ranks differ by a row or two.
    assert sum(held for *_, held in by_rank) == pytest.approx(4 * (cut + copied), rel=1e-12)
    assert all(held < 0.75 * alone for *_, held in by_rank)


def leave_one_out(world):
    dense, _ = spread(world, plan_of(1, 2, 1))
    rows = own_rows(make_batch(0), 0, world)
    dense.module.scaled = world.rank == 0
    loss_of(dense.module, rows, world).backward()


def test_a_parameter_that_takes_no_part_is_named_and_nobody_waits():
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed[\s\S]*got no gradient of scale;"):
        run_ranks(leave_one_out, 2, timeout_s=30)
