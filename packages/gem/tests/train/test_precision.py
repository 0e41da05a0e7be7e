"""A run whose linear layers multiply in 8 bits: it trains, says so, and refuses odd patterns."""

import sys
from pathlib import Path

import pytest
import torch

from gem.data.prepare import default_folder, prepare
from gem.data.reader import open_reader
from gem.model.build import build_model, example_layers, late_layers
from gem.train.clock import StepClock
from gem.train.step import TrainStep
from gem_opkit.errors import ConfigError
from gem_parallel.launch import World
from gem_precision.contract import PrecisionRecipe
from gem_precision.guard import guard_recipe
from gem_precision.layers import Projection

SMALL = ("model.dropout=0.0", "data.max_rows=64", 'model.layers=["interaction", "interaction"]')


def steps_of(config, data_root, *, count=3):
    """Losses of steps, and the step."""
    folder = default_folder(config.data, data_root)
    prepare("synthetic", folder, options=config.data.synthetic)
    reader = open_reader(folder, config.data, batch_size=16)
    torch.manual_seed(config.seed)
    model = build_model(config.model, reader.schema)
    clock = StepClock(torch.device("cpu"))
    step = TrainStep(config, model, reader.schema, World(), total_steps=9, clock=clock)
    batches = iter(reader.batches("train"))
    return [float(step(next(batches), n).loss) for n in range(count)], step


def test_linear_layers_but_heads_and_the_last_layer_multiply_in_8_bits(tiny, data_root):
    settings = ('precision.recipe="mxfp8_rceil"',)
    plain, _ = steps_of(tiny(*SMALL, 'precision.default="bf16_autocast"'), data_root)
    losses, step = steps_of(tiny(*SMALL, *settings), data_root)
    done = step.low_precision
    assert done.formats
    assert late_layers(step.model) == ["heads", "layers.1"]
    for name, layer in step.model.named_modules():
        if isinstance(layer, Projection):
            late = name.startswith(("heads.", "layers.1."))
            assert (layer.formats is None) == late, name
            assert (name in done.kept) == late, name
    assert losses[0] == pytest.approx(plain[0], rel=0.02)
    assert losses != plain
    # The same run again is the same to the bit.
    assert steps_of(tiny(*SMALL, *settings), data_root)[0] == losses


def test_attention_multiplies_in_8_bits_where_a_recipe_says_so(tiny, data_root):
    """MXFP8 in attention alone, the rest in bf16; layers on the escape list stay."""
    layers = 'model.layers=["transformer", "interaction", "transformer", "interaction"]'
    small = (*SMALL[:2], layers)
    plain, _ = steps_of(tiny(*small, 'precision.default="bf16_autocast"'), data_root)
    losses, step = steps_of(tiny(*small, 'precision.attention="mxfp8_rceil"'), data_root)
    done = step.low_attention
    assert not step.low_precision.formats
    assert done.formats
    assert set(done.formats.values()) == {"mxfp8_rceil"}
    assert all(name.endswith(".attention") for name in done.formats)
    assert "pooled by seeds" in done.kept.values()
    assert "attention layers in mxfp8_rceil; reference here" in done.told()
    assert losses != plain
    assert losses == pytest.approx(plain, rel=0.02)
    escaped = (*small, 'precision.attention="mxfp8_floor"', 'precision.bf16_escapes=["layers.0"]')
    _, step = steps_of(tiny(*escaped), data_root, count=0)
    assert all(name.startswith("layers.2.") for name in step.low_attention.formats)
    assert "on the escape list" in step.low_attention.kept.values()


def test_a_run_rounds_gradients_by_chance_the_same_way_each_time(tiny, data_root):
    nearest = (*SMALL, 'precision.recipe="mxfp8_rceil"')
    by_chance = (*nearest, "precision.stochastic_rounding=true")
    plain, _ = steps_of(tiny(*nearest), data_root)
    losses, step = steps_of(tiny(*by_chance), data_root)
    # Only gradients are rounded otherwise: the first loss is that of the same weights.
    assert losses[0] == plain[0]
    assert losses[1:] != plain[1:]
    assert losses == pytest.approx(plain, rel=0.02)
    assert steps_of(tiny(*by_chance), data_root)[0] == losses
    for name in step.low_precision.formats:
        assert step.model.get_submodule(name).rounding.stochastic


def test_block_fp8_leaves_small_layers_in_bf16(tiny, data_root):
    plain, _ = steps_of(tiny(*SMALL, 'precision.default="bf16_autocast"'), data_root)
    losses, step = steps_of(tiny(*SMALL, 'precision.recipe="fp8_block"'), data_root)
    assert not step.low_precision.formats
    assert losses == plain


def test_layers_of_examples_have_a_row_an_example(tiny, data_root):
    """What block FP8 goes by in the experts' MLPs, whose rows a batch bounds."""
    kinds = 'model.experts.kinds=["wukong", "cross", "dot", "mlp"]'
    experts = ("model.experts.count=4", kinds, 'model.experts.partition="all"')
    config = tiny(*SMALL, 'model.experts.projection="attentive"', *experts)
    _, step = steps_of(config, data_root, count=0)
    named = example_layers(step.model)
    parts = ("0.factorise.mlp", "0.factorise.make_y.mlp", "1.cross", "2.mlp", "3.mlp")
    assert {f"layers.0.experts.experts.{part}" for part in parts} < set(named)
    seen = {}

    def note(name):
        return lambda layer, inputs, _: seen.setdefault(name, []).append(inputs[0][..., 0].numel())

    for name, layer in step.model.named_modules():
        if isinstance(layer, Projection) and name.startswith(tuple(f"{n}." for n in named)):
            layer.register_forward_hook(note(name))
    folder = default_folder(config.data, data_root)
    batch = next(iter(open_reader(folder, config.data, batch_size=16).batches("train")))
    step.model(batch)
    assert len(seen) >= 8
    assert {rows for each in seen.values() for rows in each} == {16}


def test_a_rule_that_fits_nothing_names_the_nearest_modules(tiny, data_root):
    rule = 'precision.rules=[{modules="layer.0.*", forward="mxfp8_rceil"}]'
    with pytest.raises(
        ConfigError, match=r"rules must fit a linear layer .*nearest names: .*layers"
    ):
        steps_of(tiny(*SMALL, rule), data_root, count=0)


def test_a_recipe_of_8_bits_cannot_have_its_rest_in_fp32(tiny):
    with pytest.raises(ConfigError, match='default must be "bf16_autocast"'):
        tiny('precision.recipe="fp8_block"', 'precision.default="fp32"')


def test_a_planted_outlier_in_a_recipes_model_is_found(tiny, data_root):
    """As `precision_guard.py --plant` plants it: one channel x 1,000, its weights as much less."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from precision_guard import plant

    _, step = steps_of(tiny(*SMALL, 'precision.default="bf16_autocast"'), data_root, count=0)
    folder = default_folder(tiny(*SMALL).data, data_root)
    reader = open_reader(folder, tiny(*SMALL).data, batch_size=16)
    batch = next(iter(reader.batches("train")))
    name = "layers.0.streams.stream_clicks.pool.pool.kv"
    with torch.no_grad():
        before = step.model(batch)
        plant(step.model, name)
        torch.testing.assert_close(step.model(batch), before, rtol=1e-4, atol=1e-5)

    def judged(*left_out):
        return guard_recipe(
            step.model,
            PrecisionRecipe(
                recipe="fp8_block", least_width=0, bf16_escapes=("heads", "layers.1", *left_out)
            ),
            [batch],
            score=lambda model, b: (model(b)[:, 0], b.labels_BA[:, 0], b.weights_B),
            device=torch.device("cpu"),
        )

    found = judged()
    assert name in found.take_out()
    faults = {layer.name: layer.faults for layer in found.layers}
    assert faults[name][0].startswith("one channel of its input is ")
    assert name not in judged(name).take_out()
