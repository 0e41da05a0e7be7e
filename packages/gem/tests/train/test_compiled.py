"""Regions of a model under torch.compile: what they compute, and how often they are traced."""

import pytest
import torch
from torch._dynamo.utils import counters

from gem.config import load_recipe
from gem.data.prepare import default_folder, prepare
from gem.data.reader import open_reader
from gem.dry_run.build import build_step
from gem.dry_run.inputs import random_batch, uniform_lengths
from gem.model.build import build_model
from gem.planning.schema import declared_schema
from gem.train import step as step_module
from gem.train.clock import StepClock
from gem.train.compiled import compile_regions, regions
from gem.train.dense_adam import DenseAdam
from gem.train.step import TrainStep
from gem_opkit.budget import check_budget
from gem_opkit.errors import UnsupportedError
from gem_parallel.contract import ParallelPlan
from gem_parallel.launch import World

SMALL = ("model.dropout=0.0", "data.max_rows=64", 'model.layers=["interaction"]')
SIZES = (32, 27, 19)
STEPS = 6
# Long enough to learn four batches by heart; slow enough for rounding not to grow into chaos.
MEMORISED, CURVE_STEPS = 4, 50
CURVE = ("model.dropout=0.0", 'model.layers=["interaction"]', "train.dense.lr=2e-4")


def losses_of(config, folder):
    """Losses of steps on batches of several sizes, and the regions."""
    torch.manual_seed(config.seed)
    found = []
    step = None
    for number, size in enumerate(SIZES):
        reader = open_reader(folder, config.data, batch_size=size)
        if step is None:
            model = build_model(config.model, reader.schema)
            clock = StepClock(torch.device("cpu"))
            step = TrainStep(config, model, reader.schema, World(), total_steps=9, clock=clock)
        batch = next(iter(reader.batches("train")))
        found.append(float(step(batch, number).loss))
    return found, regions(step.model)


def test_compiled_regions_learn_the_same_in_one_graph_each(tiny, data_root):
    config = tiny(*SMALL)
    folder = default_folder(config.data, data_root)
    prepare("synthetic", folder, options=config.data.synthetic)
    plain, names = losses_of(config, folder)
    assert len(names) == 3
    torch._dynamo.reset()
    counters.clear()
    compiled, _ = losses_of(tiny(*SMALL, 'train.compile="aot_eager"'), folder)
    assert compiled == pytest.approx(plain, rel=1e-4)
    assert not counters["graph_break"]
    # Once for the first size, once for any other; three sizes make no more.
    assert len(names) <= counters["stats"]["unique_graphs"] <= 2 * len(names)


def test_layers_of_different_shapes_compile_for_every_number_of_examples():
    """Layers share their code, and torch would end a run at the ninth graph of a code."""
    settings = (
        'model.layers=["interaction","transformer","interaction"]',
        # It enters late, so that the layers' experts read different numbers of tokens.
        *("model.streams.impressions.layers=[2]", "train.device=cpu", "train.compile=aot_eager"),
        *("model.stream.ffn=none", "model.transformer_gate=false"),  # no summaries
    )
    config = load_recipe("synthetic-debug", settings)
    # Torch makes graphs of their own for the first size, any other one, and one example.
    sizes = (16, 12, 1, 9)
    schema = declared_schema(config)
    clock, draw = StepClock(torch.device("cpu")), torch.Generator().manual_seed(2)
    step = build_step(config, schema, World(), total_steps=len(sizes), clock=clock)
    assert regions(step.model) == [*(f"layers.{n}.experts" for n in range(3)), "heads"]
    torch._dynamo.reset()
    counters.clear()
    for number, size in enumerate(sizes):
        lengths = {s.name: uniform_lengths(size, s.max_events, draw) for s in schema.streams}
        assert torch.isfinite(step(random_batch(schema, lengths, draw), number).loss)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 3 * 4


def test_sharded_plans_are_refused(tiny, data_root):
    config = tiny()
    folder = default_folder(config.data, data_root)
    prepare("synthetic", folder, options=config.data.synthetic)
    reader = open_reader(folder, config.data, batch_size=8)
    model = build_model(config.model, reader.schema)
    with pytest.raises(UnsupportedError, match=r"train\.compile must be"):
        compile_regions(model, ParallelPlan(shard=2, table_replicate=2), "aot_eager")


@pytest.fixture
def working_weights(monkeypatch):
    """Let steps in bf16 read copies of their weights, as on a GPU, and Adam write them."""
    torch_optimizer = step_module.dense_optimizer

    def optimizer(spec, parameters, *, names=()):
        made = torch_optimizer(spec, parameters, names=names)
        settings = {key: made.defaults[key] for key in ("betas", "eps")}
        return DenseAdam(made.param_groups, **settings)

    monkeypatch.setattr(step_module, "dense_optimizer", optimizer)
    monkeypatch.setattr(
        TrainStep,
        "_reads_working_weights",
        lambda self, config: config.precision.formats() == ("bf16_autocast",),
    )


def losses_of_other_lengths(*settings, device="cpu"):
    """Losses of steps with other lengths each, and of an evaluation behind them."""
    fewer = 'model.layers=["interaction"]'
    given = [fewer, "precision.default=bf16_autocast", f"train.device={device}", *settings]
    config = load_recipe("synthetic-debug", given)
    schema = declared_schema(config)
    world = World(device=torch.device(device))
    clock = StepClock(world.device)
    step = build_step(config, schema, world, total_steps=STEPS, clock=clock)
    draw, losses = torch.Generator().manual_seed(2), []
    for number in range(STEPS):
        lengths = {s.name: uniform_lengths(16, s.max_events, draw) for s in schema.streams}
        batch = random_batch(schema, lengths, draw).to(world.device)
        losses.append(step(batch, number).loss)
    step.model.eval()
    with torch.no_grad(), step.precision():
        losses.append(step.model(batch).float().square().mean())
    return torch.stack(losses).double(), step


def curve_of(*settings, device="cpu"):
    """Losses of steps that see the same few batches again and again."""
    config = load_recipe("synthetic-debug", [*CURVE, f"train.device={device}", *settings])
    schema = declared_schema(config)
    world, clock = World(device=torch.device(device)), StepClock(torch.device(device))
    torch._dynamo.reset()
    step = build_step(config, schema, world, total_steps=CURVE_STEPS, clock=clock)
    draw, batches = torch.Generator().manual_seed(2), []
    for _ in range(MEMORISED):
        lengths = {s.name: uniform_lengths(32, s.max_events, draw) for s in schema.streams}
        batches.append(random_batch(schema, lengths, draw).to(world.device))
    losses = [step(batches[n % MEMORISED], n).loss for n in range(CURVE_STEPS)]
    found = torch.stack(losses).double().cpu()
    first, last = found[:MEMORISED].mean(), found[-MEMORISED:].mean()
    assert last < 0.97 * first  # something was learned
    return found, step


# The second one also decides, as inductor does, what the backward pass computes again; it needs no
# compiler of C++.
BACKENDS = ("aot_eager", "aot_eager_decomp_partition")


def compiled_curves(monkeypatch, *settings):
    """The losses that each backend gives."""
    for backend in BACKENDS:
        monkeypatch.setattr(
            step_module,
            "compile_regions",
            lambda model, plan, _, backend=backend: compile_regions(model, plan, backend),
        )
        yield curve_of(*settings, "train.compile=aot_eager")


def test_compiled_regions_memorise_as_fast_as_plain_ones(monkeypatch, working_weights):
    """In fp32 as the step as written does, and in bf16 no further from fp32 than that one.

    In bf16 copies stand in the place of weights, as on a GPU.
    """
    halves = "precision.default=bf16_autocast"
    exact, step = curve_of()
    assert step.working is None
    plain, _ = curve_of(halves)
    for compiled, _ in compiled_curves(monkeypatch):
        torch.testing.assert_close(compiled, exact, rtol=1e-4, atol=0.0)
    for compiled, step in compiled_curves(monkeypatch, halves):
        assert step.working is not None
        check_budget(compiled, plain, exact, what="losses", band_dtype=torch.bfloat16)


@pytest.mark.gpu
def test_compiled_regions_memorise_as_fast_on_a_gpu():
    halves = "precision.default=bf16_autocast"
    exact, _ = curve_of(device="cuda")
    plain, _ = curve_of(halves, device="cuda")
    compiled, step = curve_of(halves, "train.compile=inductor", device="cuda")
    assert step.working is not None
    check_budget(compiled, plain, exact, what="losses", band_dtype=torch.bfloat16)


def test_lengths_make_no_graph_anew_and_losses_stay_within_the_budget():
    exact, _ = losses_of_other_lengths("precision.default=fp32")
    plain, _ = losses_of_other_lengths()
    torch._dynamo.reset()
    counters.clear()
    compiled, step = losses_of_other_lengths('train.compile="aot_eager"')
    assert not counters["graph_break"]
    # Once, whatever the lengths; the evaluation runs as written.
    assert counters["stats"]["unique_graphs"] == len(regions(step.model))
    check_budget(compiled, plain, exact, what="losses", band_dtype=torch.bfloat16)


def test_compiled_regions_read_the_working_weights(working_weights):
    """As on a GPU: copies in bf16 stand in their place, and gradients of theirs come back."""
    exact, _ = losses_of_other_lengths("precision.default=fp32")
    plain, _ = losses_of_other_lengths()
    torch._dynamo.reset()
    counters.clear()
    compiled, step = losses_of_other_lengths('train.compile="aot_eager"')
    assert step.working is not None
    weight = step.model.get_submodule("heads.trunk.0.projections.0").weight
    assert weight.grad.dtype == torch.bfloat16
    assert weight in step.working.copies
    assert counters["stats"]["unique_graphs"] == len(regions(step.model))
    check_budget(compiled, plain, exact, what="losses", band_dtype=torch.bfloat16)


@pytest.mark.gpu
def test_compiled_regions_learn_on_a_gpu_what_plain_ones_learn():
    exact, _ = losses_of_other_lengths("precision.default=fp32", device="cuda")
    plain, _ = losses_of_other_lengths(device="cuda")
    torch._dynamo.reset()
    counters.clear()
    compiled, step = losses_of_other_lengths("train.compile=inductor", device="cuda")
    assert step.working is not None
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == len(regions(step.model))
    check_budget(compiled, plain, exact, what="losses", band_dtype=torch.bfloat16)
