"""The activations on the device against the reference ones: value and slope, on a dense grid."""

import pytest
import torch
import triton
import triton.language as tl

from gem_attention.activations import ACTIVATION_NAMES, activate, activate_backward
from gem_attention.portable.activations import device
from gem_attention.portable.activations.device import (
    activated,
    activated_with_slope,
    fold,
    folded_value,
)

# Every 1/256 where the functions bend and saturate; subnormal, tiny, large and huge numbers.
GRID = torch.cat(
    [
        torch.arange(-14 * 256, 14 * 256 + 1) / 256,
        torch.tensor([1e-45, 1e-38, 1e-20, 88.0, 104.0, 1e4, 1e10, 1e18, 0.0]),
        -torch.tensor([1e-45, 1e-38, 1e-20, 88.0, 104.0, 1e4, 1e10, 1e18, 0.0]),
    ]
)


@triton.jit
def _activate(
    x_ptr, out_ptr, n, scale, head, NAMES: tl.constexpr, FAST: tl.constexpr, N: tl.constexpr
):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    alone = activated(x, scale, head, NAMES, FAST)
    value, slope = activated_with_slope(x, scale, head, NAMES, FAST)
    tl.store(out_ptr + i, alone, mask=i < n)
    tl.store(out_ptr + n + i, value, mask=i < n)
    tl.store(out_ptr + 2 * n + i, slope, mask=i < n)


@triton.jit
def _fold(x_ptr, out_ptr, n, scale, NAME: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    value = folded_value(x, scale, NAME, True) * fold(scale, NAME, True)
    tl.store(out_ptr + i, value, mask=i < n)


def on_device(names, x, *, scale=1.0, head=0, fast=False):
    """Return value, value beside the slope, and slope."""
    out = torch.full((3, x.numel()), torch.nan, device=x.device)
    block = 8192 if x.device.type == "cpu" else 1024
    grid = (triton.cdiv(x.numel(), block),)
    _activate[grid](x, out, x.numel(), scale, head, names, fast, block)
    return out


def exact(name, x, *, scale=1.0):
    """Return value, the same, and slope in fp64."""
    x = x.double() * scale
    value = activate(name, x.clone())
    return value, value, activate_backward(name, torch.ones_like(x), x)


def check_close(found, expected, *, relative, absolute):
    for mine, wanted in zip(found.double(), expected, strict=True):
        error = (mine - wanted).abs()
        assert (error <= relative * wanted.abs() + absolute).all(), float(error.max())


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ACTIVATION_NAMES)
def test_device_equals_the_reference_everywhere(name):
    x = GRID
    if name == "taylor_gelu":
        x = x[x.abs() <= 1.25]  # beyond it a sixth power of large numbers says nothing
    # What cancels in 1 - t² and 1 + erf is as large as 1, times x beside it.
    check_close(on_device(name, x), exact(name, x), relative=1e-5, absolute=3e-6)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ACTIVATION_NAMES)
def test_zero_gives_zero_and_nan_stays(name):
    nan, inf = float("nan"), float("inf")
    value, beside, slope = on_device(name, torch.tensor([0.0, -0.0, nan, inf, -inf]))
    assert torch.equal(value.nan_to_num(), beside.nan_to_num())
    assert value[:2].tolist() == [0.0, 0.0]
    assert value[2].isnan()
    assert value[3] == inf
    assert slope[:2].tolist() == [{"relu": 0.0, "relu_squared": 0.0}.get(name, slope[0])] * 2


@pytest.mark.interpreter
@pytest.mark.parametrize("scale", [0.25, -1.5, 0.0])
def test_each_head_has_its_activation_and_its_scale(scale):
    names = ("silu", "relu", "silu", "gelu", "hard_swish")
    x = GRID[: 28 * 256]  # a subnormal score would vanish in the product
    for head, name in enumerate(names):
        found = on_device(",".join(names), x, scale=scale, head=head)
        check_close(found, exact(name, x, scale=scale), relative=1e-5, absolute=3e-6)


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ACTIVATION_NAMES)
@pytest.mark.parametrize("scale", [1.0, 0.088])
def test_fast_forms_but_for_the_tanh(name, scale, monkeypatch):
    # The interpreter has no assembly: an exact tanh in its place shows what else is approximate.
    monkeypatch.setattr(device, "_unit_tanh", _tanh)
    x = GRID[: 28 * 256 + 1]
    if name == "taylor_gelu":
        x = x[(x * scale).abs() <= 1.25]
    of_fit, of_slope = (3.5e-4, 6.9e-4) if name == "gelu" else (3e-6, 3e-6)
    value, beside, slope = on_device(name, x, scale=scale, fast=True).double()
    wanted, _, wanted_slope = exact(name, x, scale=scale)
    folded = torch.full_like(x, torch.nan)
    _fold[(1,)](x, folded, x.numel(), scale, name, 8192)
    for mine in (value, beside, folded.double()):
        assert ((mine - wanted).abs() <= 1e-5 * wanted.abs() + of_fit).all()
    assert ((slope - wanted_slope).abs() <= 1e-5 + of_slope).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ACTIVATION_NAMES)
@pytest.mark.parametrize("scale", [1.0, 0.088, -0.5])
def test_fast_forms_are_within_the_tanh_of_the_unit(name, scale):
    x = GRID[(GRID == 0) | (GRID.abs() > 1e-30)].cuda()  # a subnormal product would be 0
    if name == "taylor_gelu":
        x = x[(x * scale).abs() <= 1.25]
    y = (x.double() * scale).abs()
    found, expected = on_device(name, x, scale=scale, fast=True), exact(name, x, scale=scale)
    # Measured: the tanh of the unit is off by 8e-6 of itself, half of which, times x, is in the
    # value. The fit of gelu is off by 3.4e-4, in its slope by 6.7e-4.
    of_tanh = 1e-5 if name in ("silu", "gelu", "fast_gelu") else 0.0
    of_fit, of_slope = (3.5e-4, 6.9e-4) if name == "gelu" else (1e-6, 1e-6)
    for mine, wanted in zip(found[:2].double(), expected[:2], strict=True):
        assert ((mine - wanted).abs() <= 1e-5 * wanted.abs() + of_tanh * y + of_fit).all()
    error = (found[2].double() - expected[2]).abs()
    assert (error <= 1e-5 * expected[2].abs() + 4 * of_tanh + of_slope).all(), float(error.max())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ACTIVATION_NAMES)
def test_folded_values_are_the_values(name):
    x = GRID[GRID.abs() < 20].cuda()
    out = torch.full_like(x, torch.nan)
    _fold[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), 0.3, name, 1024)
    check_close(
        out[None],
        on_device(name, x, scale=0.3, fast=True)[:1].double(),
        relative=1e-5,
        absolute=1e-6,
    )
