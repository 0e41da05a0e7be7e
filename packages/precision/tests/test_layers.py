"""Layers and the application of a recipe."""

import copy
import subprocess
import sys

import pytest
import torch

from gem_opkit.errors import ConfigError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import check_budget, count_launches
from gem_precision.contract import PrecisionRecipe
from gem_precision.layers import LayerNorm, Mlp, Projection, RmsNorm, apply_recipe
from gem_precision.norms import norm_beside_input, rms_normalize


def plain_rms(x, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def test_rms_norm_gives_rows_of_unit_mean_square():
    x = torch.randn(7, 48) * 5
    assert torch.allclose(RmsNorm(48)(x).square().mean(-1), torch.ones(7), atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 8), (3, 2, 16), (4, 1), (0, 8), (0, 2, 3)])
def test_rms_norm_equals_the_formula_with_its_gradient(shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(shape, dtype=torch.float64)
    y, expected = rms_normalize(x), plain_rms(x)
    assert torch.allclose(y, expected, rtol=1e-12, atol=1e-12)
    (got,) = torch.autograd.grad(y, x, grad)
    (wanted,) = torch.autograd.grad(expected, x, grad)
    assert torch.allclose(got, wanted, rtol=1e-10, atol=1e-10)


def test_rms_norm_gradient_by_finite_differences():
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rms_normalize, (x,))


def test_rms_norm_of_a_zero_row_is_zero_with_a_finite_gradient():
    x = torch.zeros(2, 8, requires_grad=True)
    y = RmsNorm(8)(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 8))
    assert torch.isfinite(x.grad).all()


def test_rms_norm_takes_strided_rows():
    fused = torch.randn(6, 3, 4, 8)
    x = fused[:, 1].transpose(0, 1)
    assert torch.allclose(RmsNorm(8)(x), plain_rms(x.contiguous()), atol=1e-6)


def test_rms_norm_in_bf16_is_as_good_as_rounding_the_exact_result():
    x = torch.randn(64, 96, dtype=torch.bfloat16)
    y = RmsNorm(96)(x)
    exact = plain_rms(x.double())
    rounding = (exact.to(torch.bfloat16).double() - exact).abs().max()
    assert y.dtype == torch.bfloat16
    assert (y.double() - exact).abs().max() <= 2 * rounding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("upstream", ["random", "along the output"])
def test_rms_norm_gradient_in_half_precision_keeps_the_error_budget(dtype, upstream):
    # Along the output the two terms of the gradient cancel: rounding inside would be all of it.
    x = torch.randn(64, 96).to(dtype).requires_grad_()
    grad = (plain_rms(x.detach().double()) if upstream != "random" else torch.randn(64, 96)).to(
        dtype
    )
    (got,) = torch.autograd.grad(rms_normalize(x), x, grad)
    wide = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(plain_rms(wide), wide, grad.double())
    honest = x.detach().float().requires_grad_()
    (low,) = torch.autograd.grad(plain_rms(honest), honest, grad.float())
    check_budget(got, low.to(dtype), exact, what="gradient", noise_scale=float(grad.abs().max()))


def test_rms_norm_gradient_does_not_overflow_half_precision():
    x = torch.zeros(1, 4096, dtype=torch.float16)
    x[0, 0] = 8.0  # normalised: 64
    x.requires_grad_()
    (grad,) = torch.autograd.grad(rms_normalize(x), x, torch.full_like(x, 2000.0))
    assert grad.isfinite().all()  # 64 times 2000 passes the largest float16


def test_a_second_derivative_of_rms_norm_is_refused_not_wrong():
    x = torch.randn(2, 5, requires_grad=True)
    (grad,) = torch.autograd.grad(rms_normalize(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_layer_norm_equals_its_formula():
    x = torch.randn(9, 12, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6)
    assert torch.allclose(LayerNorm(12)(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", [RmsNorm, LayerNorm])
def test_norms_have_a_gain_only_when_asked_for(norm):
    assert list(norm(6).parameters()) == []
    module = norm(6, affine=True)
    x = torch.randn(4, 6)
    assert torch.equal(module(x), norm(6)(x))
    module(x).sum().backward()
    assert module.gain_D.grad.shape == (6,)


@pytest.mark.parametrize("norm", [RmsNorm, LayerNorm])
def test_norms_keep_the_dtype_under_autocast(norm):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm(6)(torch.randn(4, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16
        assert norm(6)(torch.randn(4, 6)).dtype == torch.float32


@pytest.mark.parametrize("norm", [RmsNorm, LayerNorm])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_norms_add_what_stands_around_them(norm, device):
    module = norm(24, affine=True).to(device).double()
    module.gain_D.data.uniform_(0.5, 2.0)
    x, before, after = (torch.randn(2, 5, 24, dtype=torch.float64, device=device) for _ in range(3))
    expected = module(x + before) + after
    torch.testing.assert_close(module(x, before=before, after=after), expected)
    narrow = module.float()(x.bfloat16(), before=before.float())
    assert narrow.dtype == torch.float32


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_swish_norm_gates_rows_by_their_norm(device):
    module = RmsNorm(24, affine=True, swish=True).to(device).double()
    module.gain_D.data.uniform_(0.5, 2.0)
    x, after = (torch.randn(5, 24, dtype=torch.float64, device=device) for _ in range(2))
    rows = torch.nn.functional.rms_norm(x, (24,), module.gain_D, 1e-6)
    torch.testing.assert_close(module(x, after=after), x / (1 + torch.exp(-rows)) + after)
    x.requires_grad_()
    for y, passed in (module.beside(x), (module(x), x)):
        assert passed is x or torch.equal(passed, x)
        torch.testing.assert_close(y, x * torch.sigmoid(rows))


@pytest.mark.parametrize("norm", [RmsNorm, LayerNorm])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_norms_drop_a_share_of_what_they_return(norm, device):
    module, x, after = norm(64).to(device), *torch.randn(2, 200, 64, device=device)
    x.requires_grad_()
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        y = module(x, after=after, dropout=0.25)
        (grad,) = torch.autograd.grad((y * x.detach()).sum(), x)
        drawn.append((y - after, grad))
    for a, b in zip(*drawn[:2], strict=True):
        assert torch.equal(a, b)
    y, grad = drawn[0]
    kept = y.abs() > 1e-5
    assert not torch.equal(kept, drawn[2][0].abs() > 1e-5)
    # 12,800 values: within five standard deviations.
    assert abs((~kept).float().mean() - 0.25) < 0.02
    plain = module(x)
    torch.testing.assert_close(y, plain * kept / 0.75, rtol=1e-4, atol=1e-5)
    (expected,) = torch.autograd.grad((plain * kept / 0.75 * x.detach()).sum(), x)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [RmsNorm, LayerNorm])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_norms_broadcast_nothing_that_is_added(norm, device):
    module, x = norm(24).to(device), torch.randn(2, 5, 24, device=device)
    for name in ("before", "after"):
        with pytest.raises(ShapeError, match=rf"{name} must have the shape \(2, 5, 24\)"):
            module(x, **{name: x[:1]})


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [RmsNorm, LayerNorm])
def test_norms_on_a_gpu_run_the_kernel_and_equal_the_cpu(norm):
    module = norm(130, affine=True)
    x = torch.randn(33, 7, 130)
    given = [x.clone().requires_grad_(), x.cuda().requires_grad_()]
    expected = module(given[0])
    with count_launches() as launches:
        got = copy.deepcopy(module).cuda()(given[1])
    assert launches.count == 1
    torch.testing.assert_close(got.cpu(), expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(given[1].grad.cpu(), given[0].grad, rtol=1e-4, atol=1e-5)


def test_norms_compile_whole():
    torch._dynamo.reset()
    step = torch.compile(
        lambda x: LayerNorm(8)(RmsNorm(8)(x)), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (3, 7):
        x = torch.randn(rows, 8, requires_grad=True)
        expected = LayerNorm(8)(RmsNorm(8)(x))
        (wanted,) = torch.autograd.grad(expected.square().sum(), x)
        got = step(x)
        (grad,) = torch.autograd.grad(got.square().sum(), x)
        assert torch.allclose(got, expected, atol=1e-6)
        assert torch.allclose(grad, wanted, atol=1e-5)


def test_projection_has_no_bias_and_keeps_the_variance():
    torch.manual_seed(0)
    layer = Projection(256, 128)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert 0.9 < layer(torch.randn(512, 256)).var().item() < 1.1


def test_mlp_is_its_projections_with_the_activation_between():
    torch.manual_seed(0)
    mlp = Mlp((5, 7, 3), activation="silu")
    x = torch.randn(4, 5)
    first, second = (p.weight for p in mlp.projections)
    expected = torch.nn.functional.silu(x @ first.T) @ second.T
    assert torch.allclose(mlp(x), expected, atol=1e-6)
    assert torch.equal(mlp(torch.zeros(2, 5)), torch.zeros(2, 3))


def test_mlp_drops_in_training_only():
    torch.manual_seed(0)
    mlp = Mlp((8, 64, 4), dropout=0.5)
    x = torch.randn(3, 8)
    assert not torch.equal(mlp(x), mlp(x))
    mlp.eval()
    assert torch.equal(mlp(x), mlp(x))


def test_same_seed_gives_the_same_parameters():
    first, second = ([torch.manual_seed(3), Mlp((4, 8, 2)).state_dict()][1] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("rows", [0, 5])
def test_mlp_of_any_number_of_rows_has_gradients(rows):
    mlp = Mlp((4, 8, 2), activation="gelu")
    mlp(torch.randn(rows, 4)).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in mlp.parameters())


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda: Mlp((4,)), "widths must hold"),
        (lambda: Mlp((4, 2), activation="tanh"), "activation must be one of"),
        (lambda: Mlp((4, 2), dropout=1.0), "dropout must be in"),
        (lambda: RmsNorm(4)(torch.ones(2, 4), dropout=1.0), "RmsNorm: dropout must be in"),
        (lambda: LayerNorm(4)(torch.ones(2, 4), dropout=-0.1), "LayerNorm: dropout must be in"),
        (lambda: RmsNorm(0), "RmsNorm: width must be above 0"),
        (lambda: RmsNorm(4, eps=0.0), "RmsNorm: eps must be above 0"),
        (lambda: LayerNorm(4, eps=-1.0), "LayerNorm: eps must be above 0"),
        (lambda: Projection(4, 0), "Projection: width must be above 0"),
    ],
)
def test_layers_refuse_and_name_the_argument(build, word):
    with pytest.raises(ConfigError, match=word):
        build()


@pytest.mark.parametrize(
    "layer",
    [RmsNorm(8), LayerNorm(8), Projection(8, 4), Mlp((8, 4))],
    ids=lambda m: type(m).__name__,
)
def test_layers_refuse_tokens_of_another_width(layer):
    with pytest.raises(ShapeError, match=r"x must end in a dim of 8, .* got shape \(3, 5\)"):
        layer(torch.randn(3, 5))


def test_rms_normalize_refuses_what_has_no_mean_square():
    with pytest.raises(DtypeError, match=r"x must be floating point; got torch.int64"):
        rms_normalize(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match="x must have a last dim"):
        rms_normalize(torch.tensor(1.0))


def test_fp32_recipe_changes_nothing():
    layer, x = Projection(4, 3), torch.randn(2, 4)
    with apply_recipe(PrecisionRecipe(), "cpu")():
        y = layer(x)
    assert torch.equal(y, layer(x))


def test_bf16_recipe_computes_products_in_bf16_and_can_be_entered_again():
    layer, x = Projection(4, 3), torch.randn(2, 4)
    precision = apply_recipe(PrecisionRecipe(default="bf16_autocast"), "cpu")
    for _ in range(2):
        with precision():
            assert layer(x).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32


def test_an_escape_list_is_accepted_where_nothing_is_below_bf16():
    recipe = PrecisionRecipe(default="bf16_autocast", bf16_escapes=("heads.trunk",))
    with apply_recipe(recipe, "cpu")():
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("wanted", ["mxfp8", "fp8_block", "mxfp4", "nvfp4"])
def test_formats_that_are_not_built_are_refused_by_name(wanted):
    with pytest.raises(UnsupportedError, match=f"got {wanted}; take"):
        apply_recipe(PrecisionRecipe(default=wanted), "cpu")
    with pytest.raises(UnsupportedError, match=f"got {wanted}; take"):
        apply_recipe(PrecisionRecipe(layer_formats={"mlp": wanted}), "cpu")


def test_mixed_formats_are_refused():
    recipe = PrecisionRecipe(default="fp32", layer_formats={"mlp": "bf16_autocast"})
    with pytest.raises(UnsupportedError, match="layer_formats must name the same format"):
        apply_recipe(recipe, "cpu")


def test_runs_where_triton_cannot_be_imported():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from gem_precision.layers import Mlp, RmsNorm\n"
        "y = RmsNorm(4)(Mlp((4, 8, 4))(torch.ones(2, 4))); sys.exit(not torch.isfinite(y).all())"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.interpreter
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("used", ["both", "norm", "input"])
def test_gradients_of_a_norm_and_of_its_input_add_up(centred, used):
    x = torch.randn(40, 24, requires_grad=True)
    upstream = torch.randn(2, 40, 24)
    shares = {"both": (1.0, 1.0), "norm": (1.0, 0.0), "input": (0.0, 1.0)}[used]
    around = x - x.mean(-1, keepdim=True) if centred else x
    expected = around / (around.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    y, passed = norm_beside_input(x, centred=centred, eps=1e-6)
    assert torch.equal(passed, x)
    torch.testing.assert_close(y, expected)

    def gradient(one, other):
        parts = zip((one, other), upstream, shares, strict=True)
        loss = sum((out * up).sum() for out, up, share in parts if share)
        return torch.autograd.grad(loss, x)[0]

    torch.testing.assert_close(gradient(y, passed), gradient(expected, x))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("norm", [RmsNorm(32), LayerNorm(32), RmsNorm(32, affine=True)])
def test_a_norm_beside_its_input(device, norm):
    norm = norm.to(device)
    x = torch.randn(50, 32, device=device, requires_grad=True)
    y, passed = norm.beside(x)
    assert torch.equal(y, norm(x))
    assert torch.equal(passed, x)
    (own,) = torch.autograd.grad((y.square() + passed).sum(), x)
    (expected,) = torch.autograd.grad((norm(x).square() + x).sum(), x)
    torch.testing.assert_close(own, expected)
