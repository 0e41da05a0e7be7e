"""What ``pooled_attention`` must hold on a GPU beyond the eight tests of its own file."""

import sys
from pathlib import Path

import pytest
import torch

from gem_attention.ops import pooled_attention
from gem_jagged.batch import Layout
from gem_opkit.testing import (
    check_equal_up_to_rounding,
    check_kernel_on_gpu,
    fresh,
    run_with_gradients,
)

sys.path.insert(0, str(Path(__file__).parent))

from support_matrix import POOLED_WIDTHS
from test_pooled_attention import (
    check_low_scores,
    gpu_inputs,
    inputs,
    low_scores,
    variant,
    with_impl,
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", POOLED_WIDTHS, ids=lambda case: case.id)
def test_every_head_width_on_gpu(case):
    check_kernel_on_gpu(
        with_impl(),
        variant(impl="reference"),
        gpu_inputs((130, 0, 67, 300), 20, (case.width, case.value_width)),
        dtypes=[getattr(torch, name) for name in case.dtypes],
    )


@pytest.mark.gpu
def test_giant_among_dwarfs_on_gpu():
    lengths = (*([5, 0, 17, 64, 33] * 20), 30_000, *([90, 1, 2] * 20))
    for activation in ("softmax", "fast_gelu"):
        for seeds in (16, 256):
            check_kernel_on_gpu(
                with_impl(activation=activation),
                variant(activation=activation, impl="reference"),
                gpu_inputs(lengths, seeds, (64, 64)),
                dtypes=(torch.bfloat16,),
            )


@pytest.mark.gpu
@pytest.mark.parametrize(("seeds", "width"), [(130, 128), (192, 64)])
def test_many_seeds_and_sequences_on_gpu(seeds, width):
    # Enough of both for the Hopper kernels, which read the same seeds for every sequence.
    lengths = tuple((37 * i) % 200 for i in range(400))
    for activation in ("softmax", "fast_gelu"):
        check_kernel_on_gpu(
            with_impl(activation=activation),
            variant(activation=activation, impl="reference"),
            gpu_inputs(lengths, seeds, (width, width), heads=4),
            dtypes=(torch.bfloat16,),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("level", [-12.0, -50.0, -100.0])
def test_low_scores_on_gpu(level):
    for dtype in (torch.float32, torch.bfloat16):
        args = fresh(low_scores((1333, 5, 129, 65), level, width=64), dtype=dtype, device="cuda")
        check_low_scores(args, "triton")


def on_gpu(lengths, seeds, *, heads=4, width=128, tail=0):
    args = inputs(lengths, seeds=seeds, heads=heads, kv_heads=heads, width=width, tail=tail)
    return fresh(args, dtype=torch.bfloat16, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("seeds", [16, 64, 256])
def test_same_bits_in_ten_runs_on_gpu(seeds):
    args = on_gpu((900, 7, 20_000, 0, 31), seeds)
    for activation in ("softmax", "fast_gelu"):
        attend = variant(activation=activation, deterministic=True, impl="triton")
        first = run_with_gradients(attend, fresh(args))
        for _ in range(10):
            again = run_with_gradients(attend, fresh(args))
            for a, b in zip(
                first.outputs + first.gradients, again.outputs + again.gradients, strict=True
            ):
                assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("seeds", [32, 256])
def test_poison_and_tails_on_gpu(seeds):
    # NaN in one sequence and in the rows behind the last.
    q, k, v, _ = on_gpu((800,), seeds)
    layout = Layout.from_lengths([129, 300, 0, 301], device="cuda")
    with torch.no_grad():
        for x in (k, v):
            x[129:429] = torch.nan
            x[730:] = torch.nan
    for activation in ("softmax", "fast_gelu"):
        out = pooled_attention(q, k, v, layout, activation=activation, impl="triton")
        _, *gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        assert torch.isfinite(out[[0, 2, 3]]).all()
        assert not out[2].any()
        for x in gradients:
            assert torch.isfinite(x[:129]).all()
            assert torch.isfinite(x[429:]).all()
            assert not x[730:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("seeds", [32, 256])
def test_nothing_waits_for_the_device(seeds):
    args = on_gpu((700, 0, 300, 9), seeds)
    for activation in ("softmax", "fast_gelu"):
        attend = variant(activation=activation, impl="triton")
        upstream = torch.randn(4, seeds, 4, 128, device="cuda", dtype=torch.bfloat16)
        torch.autograd.grad(attend(*args), args[:3], upstream)
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.autograd.grad(attend(*args), args[:3], upstream)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("seeds", [32, 256])
def test_a_captured_graph_is_right_for_other_lengths(seeds):
    q, k, v, layout = on_gpu((700, 1, 300, 23), seeds)
    for activation in ("softmax", "fast_gelu"):
        attend = variant(activation=activation, impl="triton")
        upstream = torch.randn(4, seeds, 4, 128, device="cuda", dtype=torch.bfloat16)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.autograd.grad(attend(q, k, v, layout), (q, k, v), upstream)
        torch.cuda.current_stream().wait_stream(side)
        offsets_O = layout.offsets_O.clone()
        captured = Layout(offsets_O, layout.lengths, layout.max_length, layout.total_tokens)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend(q, k, v, captured)
            gradients = torch.autograd.grad(out, (q, k, v), upstream)
        for lengths in ([0, 1024, 0, 0], [5, 6, 7, 1000], [256] * 4):
            other = Layout.from_lengths(lengths, device="cuda")
            offsets_O.copy_(other.offsets_O)
            graph.replay()
            expected = attend(q, k, v, other)
            wanted = torch.autograd.grad(expected, (q, k, v), upstream)
            for a, b in zip((out, *gradients), (expected, *wanted), strict=True):
                check_equal_up_to_rounding(a.detach(), b.detach(), noise_scale=4.0)


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_to_the_31_elements():
    q, k, v, layout = on_gpu([1000] * 2, 16, heads=8)
    k, v = (torch.randn(2_200_000, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert k.numel() > 2**31
    layout = Layout.from_lengths([1000] * 2200, device="cuda")
    leaves = [q.detach(), k, v]
    out = pooled_attention(*(x.requires_grad_() for x in leaves), layout, impl="triton")
    upstream = torch.randn_like(out)
    _, *gradients = torch.autograd.grad(out, leaves, upstream)
    last = Layout.from_lengths([1000], device="cuda")
    alone = [leaves[0], *(x[-1000:].detach().clone().requires_grad_() for x in leaves[1:])]
    expected = pooled_attention(*alone, last, impl="triton")
    _, *wanted = torch.autograd.grad(expected, alone, upstream[-1:])
    check_equal_up_to_rounding(out[-1:].detach(), expected.detach(), noise_scale=4.0)
    for a, b in zip(gradients, wanted, strict=True):
        check_equal_up_to_rounding(a[-1000:], b, noise_scale=4.0)


@pytest.mark.gpu
def test_memory_is_that_of_inputs_and_results():
    layout = Layout.from_lengths([(37 * i) % 1024 for i in range(256)], device="cuda")
    k, v = (
        torch.randn(layout.total_tokens, 4, 128, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    seeds = torch.randn(32, 4, 128, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn(256, 32, 4, 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    leaves = [x.detach().requires_grad_() for x in (seeds, k, v)]
    torch.autograd.grad(pooled_attention(*leaves, layout), leaves, upstream)
    given = sum(x.nbytes for x in (seeds, k, v, upstream))
    peak = torch.cuda.max_memory_allocated() - before + given
    # Operands and their gradients, out and the gradient of out; the logsumexp.
    needed = 2 * given + 4 * 256 * 32 * 4
    assert peak <= 1.1 * needed, f"{peak / needed:.3f}"
