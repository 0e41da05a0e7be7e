"""The guard says which layer a format does not hold, and what the predictions lose."""

import math

import pytest
import torch
from torch import nn

from gem_opkit.errors import ConfigError
from gem_precision.contract import PrecisionRecipe
from gem_precision.guard import factor_figures, guard_recipe
from gem_precision.kernels.quantized_linear.op import formats_named
from gem_precision.layers import Projection
from gem_precision.rounding import NEAREST

WIDTH = 256
CPU = torch.device("cpu")
RECIPE = PrecisionRecipe(recipe="fp8_block", least_width=1)


class Deep(nn.Module):
    """Four layers and a head; ``scale`` stands between the second and the third."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Projection(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.head = Projection(WIDTH, 1)

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x * self.scale if index == 2 else x)
            x = torch.tanh(x)
        return self.head(x).float()


def model():
    torch.manual_seed(0)
    return Deep()


def batches(count=3, rows=64):
    draw = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        labels = (torch.rand(rows, 1, generator=draw) < 0.3).float()
        made.append((torch.randn(rows, WIDTH, generator=draw), labels, torch.ones(rows, 1)))
    return made


def score(net, batch):
    x, labels, weights = batch
    return net(x), labels, weights


def guarded(net, recipe=RECIPE, given=None, escapes=("head",)):
    return guard_recipe(net, recipe, given or batches(), score=score, device=CPU, escapes=escapes)


def test_a_healthy_model_has_no_layer_to_take_out():
    report = guarded(model())
    assert report.take_out() == ()
    assert sorted(layer.name for layer in report.layers) == [f"layers.{i}" for i in range(4)]
    assert report.kept == {"head": "on the escape list"}
    for layer in report.layers:
        assert 0.02 < layer.error_frac < 0.06
        for factor in (layer.input, layer.weight, layer.gradient):
            assert 0.02 < factor.error_frac < 0.04
            assert factor.underflow_frac < 0.01
            assert factor.amax > 0
    assert "no layer to take out" in report.told()


def test_a_planted_outlier_channel_is_found():
    net = model()
    net.scale[7] = 1_000.0
    report = guarded(net)
    # The channel passes the gradient on as much enlarged, to the layer before it.
    assert sorted(report.take_out()) == ["layers.1", "layers.2"]
    assert "take out layers.2: one channel of its input is" in report.told()
    assert "take out layers.1: one channel of its gradient is" in report.told()
    found = {layer.name: layer for layer in report.layers}
    assert found["layers.2"].input.outlier_ratio > 300
    assert found["layers.1"].gradient.outlier_ratio > 300
    assert all(not layer.faults for layer in report.layers[2:])


def test_a_planted_outlier_that_changes_nothing_else_is_found():
    """The weights that read the channel are as much smaller: every gradient is as it was."""
    net, same = model(), model()
    net.scale[7] = 1_000.0
    with torch.no_grad():
        net.layers[2].weight[:, 7] /= 1_000.0
    x = batches(1)[0][0]
    torch.testing.assert_close(net(x), same(x))
    report = guarded(net)
    assert report.take_out() == ("layers.2",)
    assert report.layers[0].faults[0].startswith("one channel of its input is ")
    kept = PrecisionRecipe(
        recipe="fp8_block", least_width=1, bf16_escapes=("head", *report.take_out())
    )
    assert guarded(net, recipe=kept).take_out() == ()


def test_a_factor_that_does_not_fit_is_told_by_its_errors():
    net = model()
    net.scale[7] = 1e6
    worst = guarded(net).layers[0]
    assert worst.name == "layers.2"
    assert any("becomes 0" in fault for fault in worst.faults)
    net.scale[7] = math.nan
    assert "its output is not finite" in guarded(net).layers[0].faults


def test_ne_is_that_of_both_on_the_same_batches():
    """Computed here again, from two runs of the model and the definition of NE."""
    given, net = batches(), model()
    report = guarded(net, given=given)
    losses = {}
    for kind in ("bf16", "fp8_block"):
        for layer in net.layers:
            layer.formats = None if kind == "bf16" else formats_named(kind)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            logits = torch.cat([net(x) for x, _, _ in given]).double()
        labels = torch.cat([label for _, label, _ in given]).double()
        p = logits.sigmoid()
        losses[kind] = -(labels * p.log() + (1 - labels) * (1 - p).log())
    rate = float(labels.mean())
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    low, bf16 = (float(losses[k].mean()) for k in ("fp8_block", "bf16"))
    assert report.ne == pytest.approx(low / entropy, rel=1e-9)
    assert report.ne_bf16 == pytest.approx(bf16 / entropy, rel=1e-9)
    assert report.ne_difference_frac == pytest.approx(low / bf16 - 1, rel=1e-6, abs=1e-12)
    spread = float((losses["fp8_block"] - losses["bf16"]).std())
    assert report.ne_interval_frac == pytest.approx(1.96 * spread / len(labels) ** 0.5 / bf16)
    assert report.examples == len(labels)
    assert report.ne != report.ne_bf16


def test_unknown_labels_do_not_count():
    (x, labels, weights), *_ = batches(1)
    labels[:10], weights[:10] = math.nan, 0.0
    report = guarded(model(), given=[(x, labels, weights)])
    assert report.examples == 54
    assert math.isfinite(report.ne)
    assert report.take_out() == ()
    with pytest.raises(ConfigError, match="batches must hold a label that counts"):
        guarded(model(), given=[(x, labels, weights * 0)])


def test_the_model_is_as_before():
    net = model().train()
    net.layers[1].formats = formats_named("mxfp8_rceil")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    guarded(net)
    assert net.training
    assert [layer.formats for layer in net.layers] == [
        None,
        formats_named("mxfp8_rceil"),
        None,
        None,
    ]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert not any(layer._forward_hooks for layer in net.layers)


def test_rounding_by_chance_draws_nothing_and_a_rotation_is_judged_as_it_is():
    net = model()
    keys = {"recipe": "mxfp8_rceil", "least_width": 1}
    before = torch.get_rng_state()
    by_chance = guarded(net, PrecisionRecipe(**keys, stochastic_rounding=True))
    assert torch.equal(torch.get_rng_state(), before)
    plain = guarded(net, PrecisionRecipe(**keys))
    assert by_chance == plain
    turned = guarded(net, PrecisionRecipe(**keys, random_hadamard=True))
    assert all(layer.rounding == NEAREST for layer in net.modules() if hasattr(layer, "rounding"))
    # A rotation makes no layer of a healthy model worse, and changes what is looked at.
    assert turned.take_out() == ()
    for one, other in zip(
        sorted(turned.layers, key=lambda layer: layer.name),
        sorted(plain.layers, key=lambda layer: layer.name),
        strict=True,
    ):
        assert one.input.amax != other.input.amax
        assert one.error_frac == pytest.approx(other.error_frac, rel=0.2)
        assert one.gradient.error_frac < 0.04


def test_a_recipe_that_changes_nothing_is_refused():
    with pytest.raises(ConfigError, match="recipe must change a layer; got none of 5"):
        guarded(model(), recipe=PrecisionRecipe(recipe="fp8_block"))


def test_figures_of_a_factor():
    x = torch.full((2, 128), 1.0)
    x[0, 0], x[0, 1], x[1, 0] = 2.0**20, 0.0, math.inf
    figures = factor_figures(x, "fp8_block", "1x128")
    assert figures.amax == 2.0**20
    assert figures.outlier_ratio == 2.0**20
    # 126 of the 254 finite numbers that are not 0, beside the large one of their row.
    assert figures.underflow_frac == pytest.approx(126 / 254)
    # The row with the infinity is NaN throughout.
    assert figures.overflow_frac == pytest.approx(0.5)
    cut = torch.full((1, 32), 1.95)
    assert factor_figures(cut, "mxfp8_floor", "1x128").overflow_frac == 1.0
    assert factor_figures(cut, "mxfp8_rceil", "1x128").overflow_frac == 0.0
    assert factor_figures(x[:0], "bf16", "1x128").amax == 0.0
