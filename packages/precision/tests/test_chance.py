"""Rounding to MXFP8 by chance, and the random Hadamard transform: seeded, and right on average."""

import pytest
import torch

from gem_opkit.errors import ConfigError, ShapeError
from gem_precision.hadamard import random_hadamard
from gem_precision.ops import mx_dequantize, mx_quantize, mx_quantize_both

both_elements = pytest.mark.parametrize("element", ["e4m3", "e5m2"])


def some(rows=70, width=200, seed=0):
    draw = torch.Generator().manual_seed(seed)
    powers = torch.randint(-12, 12, (rows, width), generator=draw)
    x_TD = torch.ldexp(torch.randn(rows, width, generator=draw), powers)
    x_TD[0, :32] = 0.0
    x_TD[1, 3], x_TD[2, 40] = float("nan"), float("-inf")
    x_TD[3, :32] = 1e-42
    return x_TD


def all_ways(x_TD, element, seed, impl="auto"):
    square = mx_quantize(x_TD, element=element, block="32x32", seed=seed, impl=impl)
    alone = mx_quantize(x_TD, element=element, along="columns", seed=seed, impl=impl)
    both = mx_quantize_both(x_TD, element=element, seed=seed, impl=impl)
    return [t.cpu() for m in (*both, alone, square) for t in (m.elements_TD, m.scales)]


@pytest.mark.interpreter
@both_elements
def test_the_kernel_draws_the_bytes_of_the_reference(element):
    x_TD, seed = some(), -(2**62) + 12345
    kernel = all_ways(x_TD, element, seed, "triton")
    for got, expected in zip(kernel, all_ways(x_TD, element, seed, "reference"), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.gpu
def test_the_kernel_draws_the_bytes_of_the_reference_on_gpu():
    x_TD = some(515, 1_010).bfloat16()
    kernel = all_ways(x_TD.cuda(), "e4m3", 7, "triton")
    for got, expected in zip(kernel, all_ways(x_TD, "e4m3", 7, "reference"), strict=True):
        assert torch.equal(got, expected)


@both_elements
def test_an_element_becomes_one_of_its_two_neighbours(element):
    x_TD = some()
    nearest = mx_quantize(x_TD, element=element)
    by_chance = mx_quantize(x_TD, element=element, seed=5)
    assert torch.equal(by_chance.scales, nearest.scales)
    assert not torch.equal(by_chance.elements_TD, nearest.elements_TD)
    # Codes of one sign count upwards with the magnitude: neighbours differ by one.
    near, far = (m.elements_TD.int() & 0x7F for m in (nearest, by_chance))
    assert int((near - far).abs().max()) == 1
    assert torch.equal(nearest.elements_TD >> 7, by_chance.elements_TD >> 7)
    lower = mx_dequantize(nearest).abs()
    kept = mx_dequantize(by_chance).abs()
    # What the nearest element overshoots, chance may only move down, and the reverse.
    size = x_TD.abs()
    assert bool((kept <= lower)[(lower > size)].all())
    assert bool((kept >= lower)[(lower < size)].all())


def test_what_is_exact_stays():
    x_TD = torch.randint(-8, 9, (40, 64), generator=torch.Generator().manual_seed(0)).float()
    for seed in (0, 1):
        assert torch.equal(mx_dequantize(mx_quantize(x_TD, seed=seed)), x_TD)


@both_elements
def test_the_mean_over_draws_is_the_number(element):
    """Rows are draws of one row: each differs from the number by chance alone."""
    draws = 20_000
    row = torch.cat([torch.tensor([448.0]), torch.logspace(-5, 2.4, 31)])
    x_TD = row.expand(draws, 32).contiguous()
    y_TD = mx_dequantize(mx_quantize(x_TD, element=element, seed=3)).double()
    mean, spread = y_TD.mean(0), y_TD.std(0)
    # Five standard errors; and some for elements that only a few draws round up.
    gap = y_TD.amax(0) - y_TD.amin(0)
    allowed = 5 * spread / draws**0.5 + 5 * gap / draws
    assert bool(((mean - row).abs() <= allowed + 1e-12).all())
    nearest = mx_dequantize(mx_quantize(row[None], element=element))[0].double()
    assert bool(((nearest - row).abs() > allowed).any())


def test_a_seed_gives_its_bytes_again_and_another_gives_others():
    x_TD = torch.randn(40, 64)
    one, again, other = (mx_quantize(x_TD, seed=s).elements_TD for s in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    # A word belongs to its element's place: rows added behind change nothing before them.
    longer = mx_quantize(torch.cat([x_TD, x_TD]), seed=1).elements_TD
    assert torch.equal(longer[:40], one)
    assert not torch.equal(longer[40:], one)
    with pytest.raises(ConfigError, match="seed must be an integer of 64 bits"):
        mx_quantize(x_TD, seed=2**63)


def test_the_transform_is_the_matrix_of_its_definition():
    x = torch.randn(5, 16, dtype=torch.float64)
    y = random_hadamard(x, seed=9, block=8)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(3):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = random_hadamard(torch.eye(16, dtype=torch.float64), seed=9, block=1).diagonal()
    assert set(signs.tolist()) == {-1.0, 1.0}
    whole = torch.block_diag(matrix, matrix) / 8**0.5
    torch.testing.assert_close(y, (x * signs) @ whole)
    torch.testing.assert_close(random_hadamard(y, seed=9, block=8, inverse=True), x)
    assert not torch.equal(y, random_hadamard(x, seed=10, block=8))


def test_a_product_of_transformed_matrices_is_what_it_was():
    x, w = torch.randn(7, 64, requires_grad=True), torch.randn(5, 64)
    turned = random_hadamard(x, seed=1) @ random_hadamard(w, seed=1).T
    torch.testing.assert_close(turned, x @ w.T, rtol=1e-4, atol=1e-4)
    (grad,) = torch.autograd.grad(turned.sum(), x)
    torch.testing.assert_close(grad, w.sum(0).expand(7, 64), rtol=1e-4, atol=1e-4)


def test_the_transform_spreads_an_outlier_over_its_block():
    """Nothing vanishes beside it any more."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    x[:, 3] = 1e6
    turned = random_hadamard(x, seed=0)
    assert float(turned[:, :32].abs().amax()) == pytest.approx(1e6 / 32**0.5, rel=1e-4)
    torch.testing.assert_close(turned[:, 32:].square().sum(1), x[:, 32:].square().sum(1))
    plain, spread = (mx_dequantize(mx_quantize(t)) for t in (x, turned))
    assert float((plain[:, :32] == 0).float().mean()) > 0.5
    assert not bool((spread == 0).any())


def test_the_transform_refuses_what_it_cannot_cut():
    with pytest.raises(ShapeError, match="x must end in a multiple of 32"):
        random_hadamard(torch.randn(3, 40), seed=0)
    with pytest.raises(ConfigError, match="block must be a power of two"):
        random_hadamard(torch.randn(3, 40), seed=0, block=10)
