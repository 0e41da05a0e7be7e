"""The Hopper backward by its parts: what stands around the fused kernel, and how dq is written.

The launchers are imported where a GPU is: Gluon has no interpreter.
"""

import sys
from pathlib import Path

import pytest
import torch

from gem_attention.activations import activate
from gem_attention.hopper.gradients.kernel import finish_kernel, gather_kernel, prepare_kernel
from gem_attention.patterns import window_mask
from gem_attention.tiles import key_tiles, query_tiles
from gem_jagged.batch import Layout
from gem_opkit.budget import check_budget
from gem_opkit.checks import run_fresh
from gem_opkit.compile_checks import KernelVariant, compile_kernels

sys.path.insert(0, str(Path(__file__).parent))

from support_matrix import FULL
from test_sm90 import check_right, launched, packed

# Queries and keys: no keys, keys of one tile, of two and of more, and tails of both.
LENGTHS = ([300, 1, 64, 70, 200, 129, 500, 90], [300, 128, 0, 65, 129, 500, 64, 1])
TAIL = 3


def part(x_RC):
    """Order 64 rows and 64 columns as the registers of a warpgroup hold them."""
    return x_RC.view(4, 2, 8, 8, 4, 2).permute(0, 3, 2, 4, 1, 5).reshape(-1)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("width", "group", "window", "split"),
    [(128, 1, FULL, True), (64, 2, FULL, True), (128, 1, (5, None), True), (64, 1, FULL, False)],
)
def test_sums_are_cleared_cut_between_sequences_and_converted(width, group, window, split):
    rows = {64: 128, 128: 64}[width]
    offsets = [Layout.from_lengths(list(side)).offsets_O for side in LENGTHS]
    tokens, keys = (sum(side) + TAIL for side in LENGTHS)
    batch, heads = len(LENGTHS[0]), 2 * group
    padded = (-(-tokens // rows) + batch + 1) * rows
    sizes = {"q_tokens": tokens, "k_tokens": keys, "window": window}
    queries = query_tiles(*offsets, block_tokens=128, **sizes)
    listed = key_tiles(*offsets, block_tokens=128, **sizes)
    out, grad_out = torch.randn(2, tokens, heads, width)
    lse, grad_lse = torch.randn(2, tokens, heads)
    lse[5] = -torch.inf
    delta_HP, lse_HP = torch.full((2, heads, padded), torch.nan)
    grad_q = torch.full((tokens, heads, width), torch.nan)
    # A launch does one of the two key heads.
    sums = torch.full((padded // 64, group, width // 64, 64 * 64), torch.nan)
    bounds = torch.full((3,), -7, dtype=torch.int32)
    shape = {"WIDTH": width, "ROWS": rows, "KEYS": 128, "WINDOWED": window != FULL, "KV_HEADS": 1}
    prepare_kernel[(queries.capacity * heads,)](
        *(out, grad_out, lse, grad_lse, delta_HP, lse_HP, grad_q, sums, bounds),
        *(queries.entries, queries.count, listed.entries, listed.count, *offsets),
        *(batch, tokens, keys, padded, 2, *grad_out.stride()[:2]),
        **shape,
        HEADS=heads,
        SUM_HEADS=group,
        SOFTMAX=True,
        HAS_GRAD_LSE=True,
        SPLIT=split,
        DESCENDING=window != FULL,
        SHARED=False,
    )
    entries = listed.entries[: int(listed.count)].tolist()
    begin, cut, end = bounds.tolist()
    assert (begin, end) == (0, len(entries))
    assert 0 < cut < end if split else cut == end
    parts = [{sequence for sequence, _ in entries[:cut]}, {s for s, _ in entries[cut:]}]
    assert not parts[0] & parts[1]

    expected = torch.full((2, tokens, heads, width), torch.nan)
    delta = (out * grad_out).sum(2) - grad_lse
    row = zeroed = 0
    for sequence, (length, k_length) in enumerate(zip(*LENGTHS, strict=True)):
        mine = slice(row, row + length)
        place = (row // rows + sequence) * rows
        stop = place + -(-length // rows) * rows
        row += length
        seen = lse[mine].T.isfinite()
        wanted = torch.where(seen, delta[mine].T, 0.0)
        torch.testing.assert_close(delta_HP[:, place : place + length], wanted)
        wanted = torch.where(seen, lse[mine].T / torch.log(torch.tensor(2.0)), torch.inf)
        torch.testing.assert_close(lse_HP[:, place : place + length], wanted)
        assert not delta_HP[:, place + length : stop].any()
        assert (lse_HP[:, place + length : stop] == torch.inf).all()
        assert not grad_q[mine].any() if k_length == 0 else grad_q[mine].isnan().all()
        buffer = sums[place // 64 : stop // 64]
        if k_length <= (128 if window == FULL else 0):
            assert buffer.isnan().all()  # not touched: dq has no sum there
            continue
        assert not buffer.any()
        value = torch.randn(stop - place, group, width)
        for block, tile in enumerate(value.split(64)):
            for head in range(group):
                for side, columns in enumerate(tile[:, head].split(64, dim=1)):
                    buffer[block, head, side] = part(columns)
        expected[int(sequence in parts[1]), mine, group:] = value[:length] * 0.5
        zeroed += -(-length // 64) * 64 * group * width if sequence in parts[1] else 0
    assert not grad_q[row:].any()

    for number in range(2 if split else 1):
        converted = torch.full_like(grad_q, torch.nan)
        finish_kernel[(listed.capacity,)](
            *(sums, converted, bounds, listed.entries, *offsets),
            *(number, 1, number, batch, tokens, keys, 0.5),
            **shape,
            GROUP=group,
            ALL_HEADS=heads,
        )
        torch.testing.assert_close(converted, expected[number], equal_nan=True, rtol=0, atol=0)
        # Zeros where another launch is to add, and only there.
        assert (sums == 0).sum() == (zeroed if number else 0)


@pytest.mark.interpreter
@pytest.mark.parametrize(("width", "rows"), [(128, 64), (64, 128)])
def test_copies_of_shared_queries_are_added(width, rows):
    queries, heads, copies = 100, 2, 3
    padded = -(-queries // rows) * rows
    value = torch.randn(copies, padded, heads, width)
    sums = torch.stack(
        [
            part(columns)
            for copy in value
            for block in copy.split(64)
            for head in block.unbind(1)
            for columns in head.split(64, dim=1)
        ]
    )
    grad_q = torch.full((queries, heads, width), torch.nan)
    parts = len(sums) // copies
    gather_kernel[(parts * 4,)](sums, grad_q, queries, parts, copies, 0.5, HEADS=heads, WIDTH=width)
    torch.testing.assert_close(grad_q, value.sum(0)[:queries] * 0.5)


def test_what_stands_around_the_kernel_compiles_for_hopper():
    integers = "batch q_tokens k_tokens padded_tokens programs stride_gt stride_gh"
    tiles = ("bounds", "q_tiles", "q_count", "k_tiles", "k_count", "q_offsets", "k_offsets")
    pointers = dict.fromkeys(("out", "grad_out", "grad_q"), "*bf16")
    pointers |= dict.fromkeys(("lse", "grad_lse", "delta_HP", "lse_HP", "sums"), "*fp32")
    pointers |= dict.fromkeys(tiles, "*i32")
    shape = {"KV_HEADS": 1, "WIDTH": 128, "ROWS": 64, "KEYS": 128}
    whole = shape | {"HEADS": 4, "SUM_HEADS": 2, "SOFTMAX": True, "HAS_GRAD_LSE": True}
    prepare = [
        KernelVariant(
            "prepare_kernel",
            pointers | dict.fromkeys(integers.split(), "i32"),
            whole
            | {"WINDOWED": windowed, "SPLIT": not windowed, "DESCENDING": windowed}
            | {"SHARED": not windowed},
        )
        for windowed in (False, True)
    ]
    integers = "part head_begin zeros batch q_tokens k_tokens"
    names = ("sums", "grad_q", "bounds", "k_tiles", "q_offsets", "k_offsets")
    finish = KernelVariant(
        "finish_kernel",
        {name: pointers[name] for name in names}
        | dict.fromkeys(integers.split(), "i32")
        | {"scale": "fp32"},
        shape | {"GROUP": 2, "ALL_HEADS": 4, "WINDOWED": False},
    )
    gather = KernelVariant(
        "gather_kernel",
        {name: pointers[name] for name in ("sums", "grad_q")}
        | dict.fromkeys(("queries", "parts", "copies"), "i32")
        | {"scale": "fp32"},
        {"HEADS": 4, "WIDTH": 128},
    )
    module = "gem_attention.hopper.gradients.kernel"
    for report in compile_kernels(module, [*prepare, finish, gather], capabilities=[90]):
        assert report.stack_bytes == 0, report.variant


def test_a_launch_does_a_quarter_of_the_key_heads_where_that_divides_them():
    code = """
from gem_attention.hopper.backward.kernel_sm90 import heads_of_launch
print(*(heads_of_launch(heads) for heads in (1, 2, 3, 4, 7, 8, 10, 12, 16)))
"""
    assert run_fresh(code).split() == ["1", "1", "1", "1", "1", "2", "2", "3", "4"]


@pytest.fixture(params=["whole", "heads", "halves"])
def launches(request, monkeypatch):
    """Sum dQ of all heads at once, or head by head as of large batches, or half of these."""
    from gem_attention.hopper.backward import kernel_sm90

    monkeypatch.setattr(kernel_sm90, "_UNSPLIT_BYTES", 2**40 if request.param == "whole" else 0)
    monkeypatch.setattr(kernel_sm90, "_HALVED_FROM", 0 if request.param == "halves" else 2**40)


def soil():
    """Leave NaN in the memory that torch hands out next."""
    junk = torch.full((2**26,), torch.nan, device="cuda")
    del junk


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "group", "window"),
    [(128, 1, FULL), (128, 2, FULL), (64, 4, FULL), (64, 1, (400, 200)), (128, 2, (None, 5))],
)
@pytest.mark.usefixtures("launches")
def test_dq_written_at_once_and_summed_dq_lie_side_by_side(width, group, window):
    operands = packed(LENGTHS, width=width, group=group)
    soil()
    check_right(operands, LENGTHS, window)


def activated_gradients(operands, window, scale, name, dtype):
    """Differentiate generalized attention, a sequence at a time."""
    q, k, v, grad_out = operands[:4]
    leaves = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    total = sum(x[:0].sum() for x in leaves)
    q_begin = k_begin = 0
    for q_length, k_length in zip(*LENGTHS, strict=True):
        rows, keys = slice(q_begin, q_begin + q_length), slice(k_begin, k_begin + k_length)
        q_begin, k_begin = rows.stop, keys.stop
        k_i, v_i = (x[keys].transpose(0, 1).repeat_interleave(group, 0) for x in leaves[1:])
        weight = activate(name, leaves[0][rows].transpose(0, 1) @ k_i.transpose(1, 2) * scale)
        weight = weight * window_mask(q_length, k_length, *window).cuda()
        total = total + ((weight @ v_i) * grad_out[rows].to(dtype).transpose(0, 1)).sum()
    return torch.autograd.grad(total, leaves)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "width", "group", "window"),
    [("silu", 128, 1, FULL), ("relu", 64, 2, FULL), ("gelu", 128, 2, (70, 9))],
)
@pytest.mark.usefixtures("launches")
def test_gradients_of_activations_are_right(name, width, group, window):
    from gem_attention.hopper.backward.kernel_sm90 import launch_backward

    q, k, v, grad_out, _, *offsets = packed(LENGTHS, width=width, group=group)
    soil()
    options = {"window": window, "scale": 0.07}
    gradients = launch_backward(
        grad_out, None, q, k, v, None, None, *offsets, **options, activations=name
    )
    operands = (q, k, v, grad_out)
    low = activated_gradients(operands, **options, name=name, dtype=q.dtype)
    exact = activated_gradients(operands, **options, name=name, dtype=torch.float64)
    sides = [sum(LENGTHS[0])] + [sum(LENGTHS[1])] * 2
    for what, tokens, *trio in zip("qkv", sides, gradients, low, exact, strict=True):
        check_budget(*(x[:tokens] for x in trio), what=f"grad_{what} of {name}")
        assert not trio[0][tokens:].any(), what


@pytest.mark.gpu
@pytest.mark.usefixtures("launches")
def test_dq_of_few_keys_has_the_same_bits_in_every_run():
    lengths = ([300, 1, 64, 0, 700, 90], [128, 128, 0, 65, 1, 64])
    operands = packed(lengths)
    first = launched(operands, FULL, 0.1)
    for _ in range(10):
        for a, b in zip(first, launched(operands, FULL, 0.1), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.usefixtures("launches")
def test_a_replayed_graph_follows_other_lengths():
    from gem_attention.hopper.backward.kernel_sm90 import launch_backward

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
        return launch_backward(grad_out, None, q, k, v, out, lse, *sides, window=FULL, scale=0.1)

    offsets = drawn(tokens)
    gradients(offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = gradients(offsets)
    for most in (tokens, 900, tokens):
        offsets.copy_(drawn(most))
        graph.replay()
        for a, b in zip(replayed, gradients(offsets.clone()), strict=True):
            torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-3)
