"""`[memory]`: the trainer's own step under a budget, packed activations, the command."""

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from gem import faults
from gem.cli import app
from gem.config import load_recipe
from gem.dry_run.build import build_step
from gem.dry_run.inputs import random_batch, uniform_lengths
from gem.memory.command import memory_of
from gem.memory.packing import Fp4Packing, Fp8Packing, packing_of
from gem.memory.profiling import batch_tensors, profile_of
from gem.planning.schema import declared_schema
from gem.train.clock import StepClock
from gem.train.dense_adam import WorkingWeights
from gem.train.spec import MemorySpec
from gem_opkit.errors import ConfigError, UnsupportedError
from gem_parallel.launch import World
from gem_parallel.recompute.apply import recompute_by
from gem_parallel.recompute.choose import choose, plan_by_hand, region_plan
from gem_precision.contract import PrecisionRecipe
from gem_precision.norms import has_kernel
from gem_precision.ops import mx_dequantize, mx_quantize

# The whole model of h200 on narrow layers, and few rows.
TABLES = ("user", "item", *(f"feature_{place:02d}" for place in range(24)))
SMALL = (
    *("model.width=64", "model.stream.width=64", "model.stream.heads=2", "model.stream.seeds=32"),
    *("model.experts.mlp_widths=[256]", "model.experts.rank=16", "model.summary_tokens=16"),
    *("model.embeddings.embedding_dim=32", "data.streams.impressions.max_events=64"),
    *("data.synthetic.max_backlog_events=64", "model.heads.trunk_widths=[64]"),
    *("train.deterministic=true", "train.log_every_steps=1", "train.window_steps=1"),
    *(f"data.hash_rows.{table}=500" for table in TABLES),
)
EXAMPLES, MIB = 16, 2**20


def step_of(device, *settings):
    """The trainer's step on one batch, which is given too."""
    config = load_recipe("h200", [*SMALL, f"train.batch_examples={EXAMPLES}", *settings])
    schema, draw = declared_schema(config), torch.Generator().manual_seed(0)
    lengths = {s.name: uniform_lengths(EXAMPLES, s.max_events, draw) for s in schema.streams}
    batch = random_batch(schema, lengths, draw).to(device)
    world = World(device=device)
    step = build_step(config, schema, world, total_steps=8, clock=StepClock(device))
    return step, batch


def learn(device, *settings, steps=2):
    """Losses, norms and weights of some steps; the step and its batch."""
    torch.use_deterministic_algorithms(device.type == "cpu")
    step, batch = step_of(device, *settings)
    told = []
    for number in range(steps):
        scored = step(batch, number)
        told.append((scored.loss.item(), scored.grad_norm.item()))
    weights = {n: p.detach().clone() for n, p in step.model.named_parameters()}
    return told, weights, step, batch


def packing_all(kept):
    return f"memory.kept={kept}", "memory.pack_above_bytes=1"


def counted(step, batch):
    copies = [] if step.working is None else list(step.working.copies.values())
    alive = [*step.model.parameters(), *step.model.buffers(), *batch_tensors(batch), *copies]
    run = step.wrapped if step.working is None else None
    with step.precision(), step.memory.recomputing.counting(alive) as count:
        if run is None:
            step.working.forward(step.wrapped, batch)
        else:
            run(batch)
    return count.total


CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["fp32", "bf16_autocast"])
def plain(request):
    precision = f"precision.default={request.param}"
    told, weights, _, _ = learn(CPU, precision)
    return precision, told, weights


def test_a_budget_changes_no_bit_and_holds(plain):
    precision, told, weights = plain
    _, _, first, batch = learn(CPU, precision, "memory.budget_gib=1.0", steps=1)
    least, most = first.memory.plan.least_bytes, first.memory.plan.unchanged_bytes
    assert {r.kind for r in first.memory.plan.regions} == {"keep"}
    for part in (0.02, 0.5):
        budget = least + part * (most - least)
        found, found_weights, step, batch = learn(
            CPU, precision, f"memory.budget_gib={budget / 2**30!r}"
        )
        plan = step.memory.plan
        assert found == told
        assert all(torch.equal(found_weights[n], w) for n, w in weights.items())
        assert any(r.kind == "recompute" for r in plan.regions)
        assert plan.kept_bytes <= plan.peak_bytes <= budget < most
        # Products of the CPU round some of their results' memory up by 256 bytes.
        assert plan.kept_bytes <= counted(step, batch) <= plan.kept_bytes + 8 * 256


def test_too_small_a_budget_names_the_least_that_there_is():
    step, batch = step_of(CPU, "memory.budget_gib=0.0005")
    with pytest.raises(ConfigError, match=r"memory.budget_gib must be at least 0\.\d{3}, ") as told:
        step(batch, 0)
    least = str(told.value).partition("at least ")[2].partition(",")[0]
    step, batch = step_of(CPU, f"memory.budget_gib={least}")
    assert torch.isfinite(step(batch, 0).loss)


# Of the norm of all gradients together; and of single ones where that is more than a hundredth or a
# thousandth part of it: what attention's queries get is a difference of nearly equal sums.
BOUNDS = {"fp8": (0.03, 0.08, 0.002), "fp4": (0.25, 0.6, 0.01)}


@pytest.mark.parametrize("kept", ["fp8", "fp4"])
def test_packed_activations_bound_the_error_of_every_gradient(kept):
    exact, exact_batch = step_of(CPU, "precision.default=fp32")
    step, batch = step_of(CPU, "precision.default=fp32", *packing_all(kept))
    for each in (exact, step):
        torch.manual_seed(5)
        with torch.no_grad():  # heads begin with zeros, and no gradient passes them
            for name, p in each.model.named_parameters():
                if name.startswith("heads"):
                    p.normal_(std=0.1)
    _, loss = step._gradients(batch)
    assert torch.equal(loss, exact._gradients(exact_batch)[1])
    packed = step.memory.plan.packed
    assert len(packed) > 20
    theirs = dict(exact.model.named_parameters())
    pairs = {
        name: (p.grad, theirs[name].grad)
        for name, p in step.model.named_parameters()
        if p.grad is not None and not p.grad.is_sparse
    }
    size = {name: wanted.norm().item() for name, (_, wanted) in pairs.items()}
    error = {name: (found - wanted).norm().item() for name, (found, wanted) in pairs.items()}
    assert sum(each > 0 for each in error.values()) > 20
    whole, single, negligible = BOUNDS[kept]
    total = sum(each**2 for each in size.values()) ** 0.5
    assert sum(each**2 for each in error.values()) ** 0.5 <= whole * total
    for name, each in error.items():
        assert each <= max(single * size[name], negligible * total), (name, each, size[name])


@pytest.mark.parametrize(("kept", "share"), [("fp8", 0.6), ("fp4", 0.35)])
def test_two_fifths_of_the_kept_memory_of_h200_are_saved(kept, share):
    answer = memory_of("h200", [f"memory.kept={kept}"])
    (plan,) = answer.plans
    assert answer.examples == 1024
    assert plan.kept_bytes <= share * plan.unchanged_bytes
    assert {r.kind for r in plan.regions} == {"keep"}


def test_fp8_is_mxfp8_to_the_bit():
    torch.manual_seed(0)
    x = torch.randn(40, 96) * torch.logspace(-20, 20, 96)
    x[3, :32], x[4, 5], x[5, 64:] = 0.0, torch.inf, 2.0**-130
    packing = Fp8Packing()
    for dtype in (torch.float32, torch.bfloat16):
        given = x.to(dtype)
        packed = packing.pack(given)
        assert sum(part.numel() for part in packed) == packing.bytes_of(x.numel())
        expected = mx_dequantize(mx_quantize(given)).to(dtype)
        torch.testing.assert_close(
            packing.unpack(packed, dtype), expected, rtol=0, atol=0, equal_nan=True
        )


def test_fp4_keeps_its_own_numbers_and_is_off_by_a_fifth_at_most():
    packing = Fp4Packing()
    own = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    rows = torch.stack([torch.cat([own, -own, own * s, -own * s]) for s in (1.0, 0.5)])
    scaled = torch.cat([rows[:1] * 2.0**power for power in (-100, -3, 0, 5, 100)])
    back = packing.unpack(packing.pack(scaled), torch.float32)
    assert torch.equal(back, scaled)
    torch.manual_seed(1)
    x = torch.randn(500, 64).bfloat16()
    x[2, :32], x[3, 40] = 0.0, torch.nan
    x[4, :32], x[4, 7] = 0.5, 5.0  # midway from 4 to 6, the worst that there is
    packed = packing.pack(x)
    assert sum(part.numel() for part in packed) == packing.bytes_of(x.numel())
    found = packing.unpack(packed, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert found[3, 32:].isnan().all()
    assert not found[3, :32].isnan().any()
    found[3], x[3] = 0.0, 0.0
    largest = x.view(500, 2, 32).float().abs().amax(2, keepdim=True)
    error = (found.float() - x.float()).view(500, 2, 32).abs()
    # The scale takes the largest to 3 up to 6; from 4 on the step is 2, so it is off by 1 of 5.
    assert (error <= largest * (0.2 + 1e-6)).all()
    assert error[4, 0, 7] == 1.0
    assert error.mean() < 0.12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.compile=inductor"], r'train\.compile must be "off" with a memory budget'),
        (["parallel.expert=2"], r"parallel\.expert must be 1 with a memory budget"),
        (
            ["parallel.overlap_sides=true", "parallel.replicate=1"],
            r"overlap_sides must be false with",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(settings, message):
    from gem.memory.limit import MemoryLimit

    config = load_recipe("h200", [*SMALL, "memory.kept=fp8", *settings])
    with pytest.raises(UnsupportedError, match=message):
        MemoryLimit(config, declared_schema(config), torch.nn.Linear(1, 1), World())
    with pytest.raises(UnsupportedError, match=message):
        memory_of("h200", [*SMALL, *settings], budgets_gib=(1.0,))


def test_a_size_to_pack_from_needs_a_format_to_pack_to():
    message = r"pack_above_bytes must come with memory\.kept, .*got 4096 with kept = 'as_is'"
    with pytest.raises(ConfigError, match=message):
        load_recipe("h200", ["memory.pack_above_bytes=4096"])
    packed = load_recipe("h200", ["memory.pack_above_bytes=4096", "memory.kept=fp8"])
    assert packed.memory.pack_above_bytes == 4096
    # The default in words, as in the resolved recipe of every run.
    assert load_recipe("h200", ["memory.pack_above_bytes=1048576"]).memory.kept == "as_is"


def test_data_that_is_not_there_is_told_in_the_name_of_the_command():
    with pytest.raises(ConfigError, match=r"^gem memory: data\.dataset must be synthetic"):
        memory_of("ml100k-time", ["data.folder=nowhere"])


def test_a_model_without_regions_is_refused():
    with pytest.raises(UnsupportedError, match=r"model\.kind must be \"gem\".*got 'din'"):
        memory_of("ml100k-din", ["memory.kept=fp8"])


def said(*words):
    return CliRunner().invoke(app, words, obj=faults.Asked())


def test_the_command_says_what_is_kept_and_why():
    common = ["memory", "h200", "--batch", "8", *(x for s in SMALL for x in ("--set", s))]
    run = said(*common, "--budget", "0.004", "--budget", "1", "--json")
    assert run.exit_code == 0, run.output
    found = json.loads(run.output)
    tight, loose = found["plans"]
    assert found["examples"] == 8
    assert tight["peak_bytes"] <= 0.004 * 2**30
    assert loose["kept_bytes"] == loose["unchanged_bytes"] > tight["kept_bytes"]
    names = [r["region"] for r in tight["regions"]]
    assert names[:2] == ["layers.0.summary", "layers.0.streams.stream_impressions"]
    assert any(r["kind"] == "recompute" and r["again"] and r["kept"] for r in tight["regions"])
    assert all(r["why"] for r in tight["regions"])
    shown = said(*common, "--budget", "0.004").output
    assert "budget 4.10 MiB" in shown
    assert "layers.3.streams.stream_impressions" in shown
    assert "ms a GiB" in shown
    for wrong in (["--budget", "-1"], ["--budget", "1e300"], ["--batch", "99999999999"]):
        bad = said("memory", "h200", *wrong)
        assert f"gem memory: {wrong[0]} must be " in str(bad.exception)


def test_bf16_copies_of_weights_stand_in_when_a_region_runs_again():
    """What a step on one GPU does: projections read copies that are there between steps."""
    precision = "precision.default=bf16_autocast"
    told = []
    for settings in ([], ["memory.budget_gib=1.0"]):
        step, batch = step_of(CPU, precision, *settings)
        working = WorkingWeights(step.model)
        if settings:
            step.memory.prepare(step.model, batch, count_weights=False)
            profile, calls = step.memory.profile, 0
            step.memory.recomputing.undo()
            regions = []
            for place, region in enumerate(profile.regions):
                kept = [c for c in region.calls if c.can_be_kept and "mm." in c.name]
                calls += len(kept)
                regions.append(region_plan(profile, place, kept))
            assert calls > 20
            plan = plan_by_hand(profile, regions)
            handle = recompute_by(step.model, plan)
            alive = [*step.model.parameters(), *step.model.buffers(), *batch_tensors(batch)]
            with step.precision(), handle.counting([*alive, *working.copies.values()]) as count:
                working.forward(step.model, batch)
            assert plan.kept_bytes <= count.total <= plan.kept_bytes + 8 * 256
        with step.precision():
            loss = working.forward(step.model, batch).square().sum()
        loss.backward()
        told.append((loss.item(), [copy.grad for copy in working.copies.values()]))
    (loss, gradients), (again_loss, again) = told
    assert loss == again_loss
    for one, other in zip(gradients, again, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.gpu
def test_on_a_gpu_a_budget_holds_too(tiny):
    """The recipe of the other tests on a GPU: its kernels are compiled once for all of them."""
    device = torch.device("cuda")
    precision = PrecisionRecipe(default="bf16_autocast")
    recipe, draw = tiny(), torch.Generator().manual_seed(0)
    schema = declared_schema(recipe)
    lengths = {s.name: uniform_lengths(32, s.max_events, draw) for s in schema.streams}
    batch = random_batch(schema, lengths, draw).to(device)
    told, budget = [], None
    for _ in range(2):
        memory = MemorySpec(budget_gib=budget)
        config = recipe.model_copy(update={"memory": memory, "precision": precision})
        clock = StepClock(device)
        step = build_step(config, schema, World(device=device), total_steps=8, clock=clock)
        if budget is not None:
            step.memory.prepare(step.model, batch, count_weights=step.working is None)
            plan = step.memory.plan
            assert any(region.kind == "recompute" for region in plan.regions)
            assert counted(step, batch) == pytest.approx(plan.kept_bytes, rel=0.02)
        told.append(step(batch, 0).loss.item())
        profile = profile_of(config, schema, batch, count_weights=step.working is None)
        budget = choose(profile, None).least_bytes * 1.02 / 2**30
    # Sums of atomic additions differ in their last bits.
    assert told[0] == pytest.approx(told[1], rel=1e-3)


def test_a_run_in_name_takes_the_operators_of_a_gpu():
    """A budget is spent on what a GPU keeps: a norm in plain torch keeps other tensors."""
    with FakeTensorMode():
        here, there = (torch.empty(4, 64, device=device) for device in ("cpu", "cuda"))
    assert has_kernel(there)
    assert not has_kernel(here)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", ["fp8", "fp4"])
def test_on_a_gpu_packing_saves_two_fifths(kept):
    """Streams as wide as those of h200: what the backward pass finds, beside what it would."""
    device, draw = torch.device("cuda"), torch.Generator().manual_seed(0)
    tables = (f"data.hash_rows.{table}=500" for table in TABLES)
    config = load_recipe("h200", [f"memory.kept={kept}", "model.experts.mlp_widths=[256]", *tables])
    schema = declared_schema(config)
    lengths = {s.name: uniform_lengths(32, s.max_events, draw) for s in schema.streams}
    batch = random_batch(schema, lengths, draw).to(device)
    clock, world = StepClock(device), World(device=device)
    step = build_step(config, schema, world, total_steps=8, clock=clock)
    step.memory.prepare(step.model, batch, count_weights=step.working is None)
    plan = step.memory.plan
    found = counted(step, batch)
    assert found == pytest.approx(plan.kept_bytes, rel=0.01)
    assert found < 0.6 * plan.unchanged_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("packing", [Fp8Packing(), Fp4Packing()])
def test_on_a_gpu_packing_gives_the_bytes_of_a_cpu(packing):
    torch.manual_seed(0)
    x = torch.randn(256, 512).bfloat16()
    packed, on_gpu = packing.pack(x), packing.pack(x.cuda())
    for one, other in zip(packed, on_gpu, strict=True):
        assert torch.equal(one, other.cpu())
    back = packing.unpack(on_gpu, torch.bfloat16)
    assert torch.equal(packing.unpack(packed, torch.bfloat16), back.cpu())


def test_words_of_the_recipe_name_packings():
    assert packing_of("as_is") is None
    assert isinstance(packing_of("fp8"), Fp8Packing)
    assert isinstance(packing_of("fp4"), Fp4Packing)
