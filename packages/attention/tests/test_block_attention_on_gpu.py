"""What ``block_attention`` must hold on a GPU beyond the eight tests of its own file."""

import sys
from pathlib import Path

import pytest
import torch

from gem_attention.kernels.block_attention import op
from gem_attention.ops import block_attention
from gem_attention.patterns import visible_pairs_block
from gem_jagged.batch import Layout
from gem_opkit import impl
from gem_opkit.testing import (
    check_compiles_whole,
    check_equal_up_to_rounding,
    check_kernel_on_gpu,
    fresh,
    run_with_gradients,
)

sys.path.insert(0, str(Path(__file__).parent))

from support_matrix import BLOCK_WIDTHS
from test_block_attention import (
    check_low_scores,
    counted,
    gaps,
    gpu_inputs,
    inputs,
    low_scores,
    oracle,
    variant,
    with_impl,
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", BLOCK_WIDTHS, ids=lambda case: case.id)
def test_every_head_width_on_gpu(case):
    check_kernel_on_gpu(
        with_impl(rotary="rote"),
        variant(oracle, rotary="rote"),
        gpu_inputs((130, 0, 67, 300), 2, 2, (case.width, case.value_width)),
        dtypes=[getattr(torch, name) for name in case.dtypes],
    )


@pytest.mark.gpu
def test_wide_blocks_and_groups_of_wide_heads_on_gpu():
    # The largest tiles: the weights are computed again for each chunk of columns.
    for block_tokens, widths in ((128, (256, 256)), (64, (192, 192))):
        check_kernel_on_gpu(
            with_impl(block_tokens=block_tokens, rotary="position"),
            variant(oracle, block_tokens=block_tokens, rotary="position"),
            gpu_inputs((130, 0, 67, 300), 4, 2, widths),
            dtypes=(torch.bfloat16,),
        )


@pytest.mark.gpu
def test_giant_among_dwarfs_on_gpu():
    lengths = (*([5, 0, 17, 64, 33] * 20), 30_000, *([90, 1, 2] * 20))
    check_kernel_on_gpu(
        with_impl(rotary="rote"),
        variant(impl="reference", rotary="rote"),
        gpu_inputs(lengths, 2, 2, (64, 64)),
        dtypes=(torch.bfloat16,),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("level", [-12.0, -50.0, -100.0])
def test_low_scores_on_gpu(level):
    for dtype in (torch.float32, torch.bfloat16):
        args = fresh(low_scores((1333, 5, 129, 65), level, width=64), dtype=dtype, device="cuda")
        check_low_scores(args, "triton")


def on_gpu(lengths, *, heads=4, kv_heads=4, width=128, tail=0):
    args = inputs(lengths, heads=heads, kv_heads=kv_heads, width=width, tail=tail)
    return fresh(args, dtype=torch.bfloat16, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_same_bits_in_ten_runs_on_gpu(kv_heads):
    args = on_gpu((900, 7, 20_000, 0, 31), kv_heads=kv_heads)
    attend = variant(rotary="rote", impl="triton")
    first = run_with_gradients(attend, fresh(args))
    for _ in range(10):
        again = run_with_gradients(attend, fresh(args))
        for a, b in zip(
            first.outputs + first.gradients, again.outputs + again.gradients, strict=True
        ):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("block_tokens", [32, 64, 128])
def test_poison_and_tails_on_gpu(block_tokens):
    # NaN in one block and in the rows behind the last sequence.
    q, k, v, _ = on_gpu((800,))
    layout = Layout.from_lengths([129, 300, 0, 301], device="cuda")
    poisoned = slice(129 + block_tokens, 129 + 2 * block_tokens)
    with torch.no_grad():
        for x in (q, k, v):
            x[poisoned] = torch.nan
            x[730:] = torch.nan
    out = block_attention(
        q, k, v, layout, block_tokens=block_tokens, rotary="position", impl="triton"
    )
    upstream = torch.randn_like(out)
    upstream[730:] = torch.nan
    for x in (out, *torch.autograd.grad(out, (q, k, v), upstream)):
        assert torch.isfinite(x[: poisoned.start]).all()
        assert torch.isfinite(x[poisoned.stop :]).all()
        assert not x[730:].any()


@pytest.mark.gpu
def test_the_log_says_what_runs(caplog, monkeypatch):
    monkeypatch.setattr(impl, "_announced", set())
    monkeypatch.setattr(op, "_announced", set())
    q, k, v, layout = on_gpu((300, 1))
    with caplog.at_level("INFO"):
        for block_tokens in (200, 128, 128, 64):
            block_attention(q, k, v, layout, block_tokens=block_tokens)
    by_tokens = [r.message.removeprefix("block_attention: ") for r in caplog.records]
    assert by_tokens == [
        "impl='auto' on cuda runs reference",
        "impl='auto' on cuda runs triton",
        "kernel_sm90 runs forward for torch.bfloat16, K=128, blocks of 128",
        "kernel runs forward for torch.bfloat16, K=128, blocks of 64",
    ]


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    args = on_gpu((700, 0, 300, 9))
    gap = gaps(1009, "cuda")

    def attend():
        return block_attention(*args, rotary="rote", gap_seconds_T=gap, impl="triton")

    upstream = torch.randn(1009, 4, 128, device="cuda", dtype=torch.bfloat16)
    torch.autograd.grad(attend(), args[:3], upstream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(attend(), args[:3], upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_compiles_whole_on_gpu():
    made = []
    for lengths in ((300, 0, 90), (20, 70, 200), (9, 400, 2, 3)):
        args = on_gpu(lengths, heads=6, kv_heads=6)  # another number than of offsets
        pairs = visible_pairs_block(args[3].lengths, 64)
        made.append((*args, pairs, gaps(args[0].shape[0], "cuda")))
    check_compiles_whole(counted(rotary="rote", impl="triton"), made)


@pytest.mark.gpu
def test_a_captured_graph_is_right_for_other_lengths():
    q, k, v, layout = on_gpu((700, 1, 300, 23))
    attend = variant(rotary="position", impl="triton")
    upstream = torch.randn(1024, 4, 128, device="cuda", dtype=torch.bfloat16)
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
def test_reads_slices_of_a_fused_tensor_in_place():
    layout = Layout.from_lengths([700, 0, 300, 9], device="cuda")
    fused = torch.randn(1009, 12, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
    attend = variant(rotary="rote", impl="triton")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    parts = fused.split((4, 4, 4), dim=1)
    with torch.no_grad():
        attend(*parts, layout)
    # The output is a third of the fused tensor; a copy of a slice would be another.
    assert torch.cuda.max_memory_allocated() - before < 0.5 * fused.nbytes
    plain = [x.detach().contiguous().requires_grad_() for x in parts]
    out, expected = attend(*parts, layout), attend(*plain, layout)
    assert torch.equal(out, expected)
    upstream = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, fused, upstream)
    wanted = torch.cat(torch.autograd.grad(expected, plain, upstream), dim=1)
    assert torch.equal(got, wanted)


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_to_the_31_elements():
    layout = Layout.from_lengths([1000] * 2200, device="cuda")
    leaves = [
        torch.randn(2_200_000, 8, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]
    assert leaves[0].numel() > 2**31
    out = block_attention(*leaves, layout, rotary="position", impl="triton")
    upstream = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, upstream)
    last = Layout.from_lengths([1000], device="cuda")
    alone = [x[-1000:].detach().clone().requires_grad_() for x in leaves]
    expected = block_attention(*alone, last, rotary="position", impl="triton")
    assert torch.equal(out[-1000:], expected)
    wanted = torch.autograd.grad(expected, alone, upstream[-1000:])
    for a, b in zip(gradients, wanted, strict=True):
        assert torch.equal(a[-1000:], b)


@pytest.mark.gpu
def test_memory_is_that_of_inputs_and_results():
    layout = Layout.from_lengths([(37 * i) % 1024 for i in range(256)], device="cuda")
    q, k, v, upstream = (
        torch.randn(layout.total_tokens, 4, 128, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    )
    gap = gaps(layout.total_tokens, "cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = block_attention(*leaves, layout, rotary="rote", gap_seconds_T=gap)
    torch.autograd.grad(out, leaves, upstream)
    given = sum(x.nbytes for x in (q, k, v, upstream))
    peak = torch.cuda.max_memory_allocated() - before + given
    # Operands and their gradients, out and the gradient of out.
    assert peak <= 1.1 * 2 * given, f"{peak / (2 * given):.3f}"
