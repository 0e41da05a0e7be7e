"""The Hopper backward under a narrow window: two kernels, and no sum in memory."""

import sys
from pathlib import Path

import pytest
import torch

from gem_opkit.checks import run_fresh

sys.path.insert(0, str(Path(__file__).parent))

from test_sm90 import LENGTHS, check_right, launched, packed


def soil():
    """Leave NaN in the memory that torch hands out next."""
    junk = torch.full((2**26,), torch.nan, device="cuda")
    del junk


def test_only_a_window_that_is_small_on_both_sides_is_narrow():
    code = """
from gem_attention.hopper.windowed.kernel_sm90 import is_narrow
windows = ((128, 128), (0, 0), (512, 0), (512, 1), (None, 0), (0, None), (None, None))
print(*(is_narrow(window) for window in windows))
"""
    assert run_fresh(code).split() == ["True"] * 3 + ["False"] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ["self", "empty_sides", "more_keys", "fewer_keys"])
@pytest.mark.parametrize(
    ("width", "group", "window"),
    [(128, 1, (0, 0)), (128, 4, (63, 64)), (64, 2, (1, 511)), (128, 2, (512, 0))],
)
def test_right_at_the_edges_of_tiles(width, group, window, lengths):
    operands = packed(LENGTHS[lengths], width=width, group=group)
    soil()
    check_right(operands, LENGTHS[lengths], window)


@pytest.mark.gpu
def test_the_same_bits_in_every_run():
    operands = packed(LENGTHS["self"])
    first = launched(operands, (128, 128), 0.1)
    for _ in range(10):
        soil()
        for a, b in zip(first, launched(operands, (128, 128), 0.1), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_takes_no_memory_but_the_results():
    from gem_attention.hopper.windowed.kernel_sm90 import launch_narrow_backward

    tokens = 2**16
    q, k, v, out, grad_out = (
        torch.randn(tokens, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(5)
    )
    lse = torch.randn(tokens, 4, device="cuda") + 8
    offsets = torch.arange(0, tokens + 1, 2**12, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sides = (offsets, offsets)
    results = launch_narrow_backward(
        grad_out, None, q, k, v, out, lse, *sides, window=(128, 128), scale=0.1
    )
    taken = torch.cuda.max_memory_allocated() - before
    assert taken <= 1.05 * sum(x.nbytes for x in results)


@pytest.mark.gpu
def test_a_replayed_graph_follows_other_lengths():
    from gem_attention.hopper.windowed.kernel_sm90 import launch_narrow_backward

    generator = torch.Generator().manual_seed(0)
    tokens = 6000
    q, k, v, out, grad_out = (
        torch.randn(tokens, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(5)
    )
    lse = torch.randn(tokens, 4, device="cuda") + 8

    def drawn(most):
        ends = torch.randint(0, most, (19,), generator=generator).sort().values.tolist()
        return torch.tensor([0, *ends, tokens], dtype=torch.int32, device="cuda")

    def gradients(offsets):
        sides = (offsets, offsets)
        return launch_narrow_backward(
            grad_out, None, q, k, v, out, lse, *sides, window=(128, 128), scale=0.1
        )

    offsets = drawn(tokens)
    gradients(offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = gradients(offsets)
    for most in (tokens, 900, tokens):
        offsets.copy_(drawn(most))
        graph.replay()
        for a, b in zip(replayed, gradients(offsets.clone()), strict=True):
            assert torch.equal(a, b)
