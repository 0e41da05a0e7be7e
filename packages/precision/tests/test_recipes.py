"""A recipe gives each linear layer the formats of its products, or says why not."""

import logging

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from gem_opkit.errors import ConfigError, UnsupportedError
from gem_precision.contract import LayerRule, LinearFormats, PrecisionRecipe
from gem_precision.kernels.quantized_linear.op import formats_named
from gem_precision.layers import Mlp, Projection, RmsNorm, apply_recipe
from gem_precision.recipes import convert_layers
from gem_precision.rounding import NEAREST, Rounding

CPU = torch.device("cpu")


class Model(nn.Module):
    """Two layers and a head, as models here are named."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": RmsNorm(width), "mlp": Mlp((width, 128, width))})
            for _ in range(2)
        )
        self.heads = Projection(width, 1)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["mlp"](layer["norm"](x))
        return self.heads(x)


FIRST = ["layers.0.mlp.projections.0", "layers.0.mlp.projections.1"]
SECOND = ["layers.1.mlp.projections.0", "layers.1.mlp.projections.1"]


def converted(recipe, *, model=None, escapes=("heads",)):
    return convert_layers(model or Model(), recipe, device=CPU, escapes=escapes)


def test_a_recipe_of_8_bits_has_the_rest_in_bf16():
    assert PrecisionRecipe(recipe="fp8_block").default == "bf16_autocast"
    assert PrecisionRecipe(rules=[{"modules": "*"}]).default == "bf16_autocast"
    assert PrecisionRecipe(bf16_escapes=()).default == "fp32"
    with pytest.raises(ValidationError, match='default must be "bf16_autocast"'):
        PrecisionRecipe(recipe="fp8_block", default="fp32")


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8_rceil", "mxfp8_floor"])
def test_a_name_reaches_all_layers_but_those_on_the_escape_list(name):
    model = Model()
    done = converted(PrecisionRecipe(recipe=name, least_width=1), model=model)
    assert list(done.formats) == FIRST + SECOND
    assert set(done.formats.values()) == {formats_named(name)}
    assert dict(done.kept) == {"heads": "on the escape list"}
    assert model.heads.formats is None
    assert done.told() == f"4 of 5 linear layers in {name}; 1 in bf16: on the escape list"


def test_the_last_rule_that_fits_decides_product_by_product():
    recipe = PrecisionRecipe(
        recipe="mxfp8_rceil",
        rules=(
            LayerRule(modules="layers.*", forward="fp8_block"),
            LayerRule(modules="layers.1"),
            LayerRule(modules="layers.0.*.1", input_gradient="mxfp8_floor"),
        ),
        least_width=1,
    )
    done = converted(recipe, escapes=())
    assert dict(done.formats) == {
        FIRST[0]: LinearFormats(forward="fp8_block"),
        FIRST[1]: LinearFormats(input_gradient="mxfp8_floor"),
        "heads": formats_named("mxfp8_rceil"),
    }


def test_below_the_break_even_a_layer_stays_in_bf16_and_a_line_says_so(caplog):
    with caplog.at_level(logging.INFO, logger="gem_precision"):
        done = converted(PrecisionRecipe(recipe="fp8_block"), escapes=())
    assert not done.formats
    narrow = "too small for 8 bits to pay"
    assert dict(done.kept) == {
        **dict.fromkeys(FIRST + SECOND, narrow),
        "heads": "not whole blocks of 128",
    }
    assert f"none of 5 linear layers below bf16; 4 in bf16: {narrow}" in caplog.text
    wide = Mlp((2_048, 2_048, 1_920, 1_024, 4_096))
    done = converted(PrecisionRecipe(recipe="fp8_block"), model=wide)
    assert list(done.formats) == ["projections.0", "projections.3"]
    assert done.least_rows == {"projections.0": 65_536, "projections.3": 65_536}
    assert "calls with fewer than 65,536 rows stay in bf16" in done.told()
    done = converted(PrecisionRecipe(recipe="fp8_block", least_width=1_500), model=wide)
    assert not done.least_rows
    assert list(done.formats) == ["projections.0", "projections.1"]
    assert set(done.kept.values()) == {"narrower than 1500"}
    # MXFP8 is asked for its numbers: no width is too small for those.
    assert len(converted(PrecisionRecipe(recipe="mxfp8_rceil")).formats) == 4


def test_layers_that_never_see_enough_rows_stay_in_bf16_altogether():
    """4,096 to 4,096 pays from 16,384 rows on, a quarter of those of 2,048 to 2,048."""
    with torch.device("meta"):
        model = Mlp((4_096, 4_096, 4_096))
    recipe = PrecisionRecipe(recipe="fp8_block")
    for most, kept in ((16_383, True), (16_384, False)):
        given = {"projections.0": most, "projections": 1 << 30}
        done = convert_layers(model, recipe, device=CPU, most_rows=given)
        assert (dict(done.kept) == {"projections.0": "too few rows for 8 bits to pay"}) == kept
        assert (model.projections[0].formats is None) == kept
        assert done.least_rows["projections.1"] == 16_384
    # Who names a width has decided.
    recipe = PrecisionRecipe(recipe="fp8_block", least_width=1_024)
    done = convert_layers(model, recipe, device=CPU, most_rows={"projections": 1})
    assert len(done.formats) == 2


def test_a_pattern_that_fits_nothing_names_the_nearest_modules():
    rule = PrecisionRecipe(rules=[{"modules": "layer.0.mlp", "forward": "mxfp8_rceil"}])
    with pytest.raises(ConfigError, match=r"rules must fit .* got 'layer.0.mlp'; nearest names: "):
        converted(rule)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp"):
        converted(rule)
    with pytest.raises(ConfigError, match=r"bf16_escapes must fit .* heads"):
        converted(PrecisionRecipe(recipe="fp8_block", bf16_escapes=("head",)))


def test_a_format_that_the_gpu_lacks_is_refused_with_the_alternative(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    recipe = PrecisionRecipe(recipe="fp8_block", least_width=1)
    with pytest.raises(UnsupportedError, match=r'fp8_block needs .* got 8\.0; take "bf16"'):
        convert_layers(Model(), recipe, device=torch.device("cuda"))


def test_a_recipe_without_products_takes_them_back():
    model = Model()
    converted(PrecisionRecipe(recipe="fp8_block", least_width=1), model=model)
    before = model.state_dict().keys()
    done = converted(PrecisionRecipe(), model=model)
    assert not done.formats
    assert not done.kept
    assert all(m.formats is None for m in model.modules() if isinstance(m, Projection))
    assert model.state_dict().keys() == before


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8_rceil"])
def test_a_converted_model_trains(name):
    torch.manual_seed(0)
    model, recipe = Model(), PrecisionRecipe(recipe=name, least_width=1)
    x, target = torch.randn(64, 256), torch.randn(64, 1)
    frame = apply_recipe(recipe, "cpu")
    losses = {}
    for kind in ("bf16", name):
        torch.manual_seed(0)
        model = Model()
        if kind == name:
            converted(recipe, model=model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        losses[kind] = []
        for _ in range(15):
            with frame():
                y = model(x)
            assert y.dtype == torch.bfloat16
            loss = (y.float() - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[kind].append(float(loss.detach()))
    assert losses[name][-1] < 0.5 * losses[name][0]
    assert losses[name] != losses["bf16"]
    assert losses[name][0] == pytest.approx(losses["bf16"][0], rel=0.05)


def test_few_rows_stay_as_they_were():
    layer, x = Projection(256, 128), torch.randn(2, 3, 256)
    plain = layer(x)
    layer.formats, layer.least_rows = formats_named("fp8_block"), 7
    assert torch.equal(layer(x), plain)
    layer.least_rows = 6
    assert not torch.equal(layer(x), plain)


def test_a_layer_keeps_the_shape_and_dtype_of_its_input():
    layer = Projection(256, 128)
    layer.formats = formats_named("fp8_block")
    x = torch.randn(2, 3, 256, requires_grad=True)
    y = layer(x)
    assert (y.shape, y.dtype) == ((2, 3, 128), torch.float32)
    y.sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert x.grad.shape == x.shape
    assert layer.weight.grad.dtype == torch.float32


def test_rounding_by_chance_and_rotation_reach_layers_in_mxfp8_alone():
    rules = [{"modules": SECOND[0], "forward": "fp8_block", "input_gradient": "fp8_block"}]
    recipe = PrecisionRecipe(
        recipe="mxfp8_rceil", rules=rules, stochastic_rounding=True, random_hadamard=True
    )
    model = Model()
    converted(recipe, model=model)
    rounding = {n: model.get_submodule(n).rounding for n in (*FIRST, *SECOND, "heads")}
    assert [n for n, r in rounding.items() if r.stochastic] == [*FIRST, SECOND[1]]
    seeds = {n: r.hadamard_seed for n, r in rounding.items() if r.hadamard_seed is not None}
    assert list(seeds) == [*FIRST, SECOND[1]]
    assert len(set(seeds.values())) == 3
    again = Model()
    converted(recipe, model=again)
    assert {n: again.get_submodule(n).rounding.hadamard_seed for n in seeds} == seeds
    converted(PrecisionRecipe(recipe="mxfp8_rceil"), model=model)
    assert model.get_submodule(FIRST[0]).rounding == NEAREST


def test_a_training_step_draws_anew_and_an_evaluation_draws_nothing():
    torch.manual_seed(0)
    layer, x = Projection(64, 32), torch.randn(9, 64)
    layer.formats, layer.rounding = formats_named("mxfp8_rceil"), Rounding(stochastic=True)

    def gradient():
        return torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]

    torch.manual_seed(1)
    first, second = gradient(), gradient()
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(gradient(), first)
    before = torch.get_rng_state()
    with torch.no_grad():
        layer(x)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("key", ["stochastic_rounding", "random_hadamard"])
def test_a_rounding_that_nothing_has_is_refused(key):
    for given in ({"recipe": "fp8_block"}, {}, {"rules": [{"modules": "*"}]}):
        with pytest.raises(ValidationError, match=f"{key} must stand beside .* in MXFP8"):
            PrecisionRecipe(**given, **{key: True})
    PrecisionRecipe(attention="mxfp8_floor", **{key: True})
    only_forward = [{"modules": "*", "forward": "mxfp8_rceil"}]
    if key == "random_hadamard":
        PrecisionRecipe(rules=only_forward, random_hadamard=True)
    else:
        with pytest.raises(ValidationError, match="stochastic_rounding must stand"):
            PrecisionRecipe(rules=only_forward, stochastic_rounding=True)
