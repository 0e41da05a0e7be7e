import inspect

import pytest
import torch

from gem_attention.flash_compat import flash_attn_varlen_func
from gem_attention.ops import jagged_flash_attention
from gem_attention.patterns import window_mask
from gem_jagged.batch import Layout
from gem_opkit.errors import DeviceError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import (
    check_budget,
    check_equal_up_to_rounding,
    check_refuses,
)

IMPLS = ["reference", pytest.param("triton", marks=pytest.mark.interpreter)]


def offsets(lengths, *, dtype=torch.int32, device="cpu"):
    return Layout.from_lengths(list(lengths), dtype=dtype, device=device).offsets_O


def oracle(q, k, v, q_lengths, k_lengths, *, window, scale):
    """fp64, with the mask written from flash-attention's own words."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    outs, lses = [q[:0, :, :1].expand(-1, -1, v.shape[2])], [q[:0, :, 0]]
    for q_i, k_i, v_i in zip(
        q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True
    ):
        rows, columns = len(q_i), len(k_i)
        i = torch.arange(rows, device=q.device)[:, None] + columns - rows
        j = torch.arange(columns, device=q.device)[None, :]
        hidden = torch.zeros(rows, columns, dtype=torch.bool, device=q.device)
        if window[0] not in (-1, None):
            hidden |= j < i - window[0]
        if window[1] not in (-1, None):
            hidden |= j > i + window[1]
        score = torch.einsum("ihk,jhk->hij", q_i, k_i) * scale
        score = score.masked_fill(hidden, -torch.inf)
        lse = score.logsumexp(-1) if columns else score.new_full(score.shape[:2], -torch.inf)
        p = (score - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
        outs.append(torch.einsum("hij,jhv->ihv", p, v_i))
        lses.append(lse.T)
    return torch.cat(outs), torch.cat(lses)


def test_signature_is_that_of_flash_attention():
    parameters = list(inspect.signature(flash_attn_varlen_func).parameters.values())
    given = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert given == [
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"),
        *("deterministic", "return_attn_probs", "block_table"),
    ]


CASES = [
    # zero-length rows on either side, Lq != Lk, windows at both ends, grouped heads
    ((1, 0, 1), (1, 0, 1), 2, 2, 32, (-1, -1)),
    ((1, 0, 0, 0, 1, 0, 0, 0), (1, 0, 0, 0, 1, 0, 0, 0), 4, 2, 16, (-1, 0)),
    ((5, 0, 33, 7), (9, 4, 0, 7), 4, 2, 24, (None, None)),
    ((5, 40, 7), (37, 9, 7), 2, 1, 16, (-1, 0)),
    ((5, 40, 7), (37, 9, 7), 2, 2, 16, (3, 5)),
    ((5, 40, 7), (37, 9, 7), 2, 2, 16, (0, -1)),
    ((5, 40, 7), (37, 9, 7), 2, 2, 16, (100, 0)),
]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", CASES)
def test_equals_an_fp64_oracle(case, impl):
    check_against_oracle(case, impl=impl, dtype=torch.float32, device="cpu")


def sizes_of_terms(q, fused, upstream, q_lengths, k_lengths, *, window):
    """Return how large the terms of each gradient are together, however they cancel.

    Sums of float32 are off by its eps times that, in whatever order a machine takes them; where a
    query sees one key the gradient is 0 and nothing else of it is left.
    """
    q, upstream = q.detach().double().transpose(0, 1), upstream.double()
    group = q.shape[1] // fused.shape[2]
    k, v = (x.double().repeat_interleave(group, 1) for x in fused.detach().unbind(1))
    scale = q.shape[2] ** -0.5
    largest = {"grad q": 0.0, "grad kv": 0.0}
    parts = (*(x.split(q_lengths) for x in (q, upstream)), *(x.split(k_lengths) for x in (k, v)))
    for q_i, g_i, k_i, v_i in zip(*parts, strict=True):
        if not len(q_i) or not len(k_i):
            continue
        eye = torch.eye(len(k_i), dtype=q.dtype, device=q.device)[:, None].expand(
            -1, q.shape[1], -1
        )
        p, _ = oracle(q_i, k_i, eye, [len(q_i)], [len(k_i)], window=window, scale=scale)
        p = p.transpose(0, 1)
        products = torch.einsum("thv,shv->hts", g_i.abs(), v_i.abs())
        weights = scale * p * (products + (p * products).sum(-1, keepdim=True))
        for name, terms in (
            ("grad q", torch.einsum("hts,shk->thk", weights, k_i.abs())),
            ("grad kv", torch.einsum("hts,thk->shk", weights, q_i.abs())),
            ("grad kv", torch.einsum("hts,thv->shv", p, g_i.abs())),
        ):
            largest[name] = max(largest[name], float(terms.max()))
    return largest


def check_against_oracle(case, *, impl, dtype, device):
    q_lengths, k_lengths, heads, kv_heads, width, window = case
    # Keys and values are slices of one fused tensor, queries have their heads outside.
    q = torch.randn(heads, sum(q_lengths), width, dtype=dtype, device=device)
    fused = torch.randn(sum(k_lengths), 2, kv_heads, width, dtype=dtype, device=device)
    layouts = [Layout.from_lengths(list(x), device=device) for x in (q_lengths, k_lengths)]

    def ours(*views):
        causal = {"causal": True} if window[1] == 0 else {}
        out, lse, dmask = flash_attn_varlen_func(
            *views,
            *(offsets(lengths, device=device) for lengths in (q_lengths, k_lengths)),
            max(q_lengths),
            max(k_lengths),
            window_size=window,
            return_attn_probs=True,
            impl=impl,
            **causal,
        )
        assert dmask.numel() == 0
        assert lse.dtype == torch.float32
        return out, lse.T

    def plain(*views):
        # On a GPU the honest reference takes the same steps: it too forms dP - rowsum(dO . out),
        # whose terms cancel, while the autograd of the oracle has a row of one key exact by luck.
        if device == "cpu":
            return right(*views)
        sides = tuple(None if side in (-1, None) else side for side in window)
        return jagged_flash_attention(
            *views, *layouts, window=sides, return_lse=True, impl="reference"
        )

    def right(*views):
        return oracle(*views, q_lengths, k_lengths, window=window, scale=width**-0.5)

    upstream = None
    runs = []
    for attend, precision in ((ours, dtype), (plain, dtype), (right, torch.float64)):
        leaves = [x.detach().to(precision).requires_grad_() for x in (q, fused)]
        out, lse = attend(leaves[0].transpose(0, 1), *leaves[1].unbind(1))
        if upstream is None:
            upstream = torch.randn_like(out)
        gradients = torch.autograd.grad(out, leaves, upstream.to(out.dtype))
        runs.append((out.detach(), lse.detach(), *gradients))
    sizes = {}
    if device != "cpu":  # there the usual allowance is enough
        sizes = sizes_of_terms(q, fused, upstream, q_lengths, k_lengths, window=window)
    for name, kernel, low, exact in zip(("out", "lse", "grad q", "grad kv"), *runs, strict=True):
        low = low.to(kernel.dtype) if name == "lse" else low
        check_budget(kernel, low, exact, what=name, noise_scale=sizes.get(name, 4.0))


@pytest.mark.parametrize("impl", IMPLS)
def test_causal_overrides_the_right_side(impl):
    q, k, v = (torch.randn(12, 2, 16) for _ in range(3))
    cu = offsets((5, 7))
    both = flash_attn_varlen_func(q, k, v, cu, cu, causal=True, window_size=(2, 9), impl=impl)
    one = flash_attn_varlen_func(q, k, v, cu, cu, window_size=(2, 0), impl=impl)
    assert torch.equal(both, one)
    eye = torch.eye(6)[:, None, :]
    seen = flash_attn_varlen_func(
        *(torch.randn(n, 1, 16) for n in (4, 6)),
        eye,
        *(offsets((n,)) for n in (4, 6)),
        causal=True,
        impl=impl,
    )
    assert torch.equal(seen[:, 0] > 0, window_mask(4, 6, None, 0))


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_behind_the_last_offset_get_nothing(impl):
    q, k, v = (torch.randn(10, 2, 16, requires_grad=True) for _ in range(3))
    cu = offsets((3, 4))
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu, cu, return_attn_probs=True, impl=impl)
    assert torch.equal(out[7:], torch.zeros(3, 2, 16))
    assert torch.equal(lse[:, 7:], torch.full((2, 3), -torch.inf))
    upstream = torch.randn_like(out)
    upstream[7:] = torch.nan
    for gradient in torch.autograd.grad(out, (q, k, v), upstream):
        assert torch.equal(gradient[7:], torch.zeros(3, 2, 16))
        assert torch.isfinite(gradient).all()


def test_scale_and_flop_count_are_passed_on():
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (torch.randn(12, 2, 16) for _ in range(3))
    cu = offsets((5, 7))
    for pairs, flops in ((None, 0), (74, 4 * 74 * 2 * 16)):
        with FlopCounterMode(display=False) as counter:
            out = flash_attn_varlen_func(q, k, v, cu, cu, softmax_scale=0.1, visible_pairs=pairs)
        assert counter.get_total_flops() == flops
    exact, _ = oracle(q, k, v, [5, 7], [5, 7], window=(-1, -1), scale=0.1)
    check_equal_up_to_rounding(out, exact)


@pytest.mark.parametrize("impl", IMPLS)
def test_compiles_whole_over_changing_lengths(impl):
    torch._dynamo.reset()
    graphs = []

    def counting(module, example_inputs):
        graphs.append(module)
        return module.forward

    whole = torch.compile(
        lambda q, k, v, cu: flash_attn_varlen_func(q, k, v, cu, cu, causal=True, impl=impl),
        fullgraph=True,
        backend=counting,
    )
    for lengths in ((3, 5), (9, 2), (4, 4), (20, 7)):
        q, k, v = (torch.randn(sum(lengths), 2, 16) for _ in range(3))
        cu = offsets(lengths)
        eager = flash_attn_varlen_func(q, k, v, cu, cu, causal=True, impl="reference")
        check_equal_up_to_rounding(whole(q, k, v, cu), eager)
    assert len(graphs) <= 2


def test_refuses():
    q, k, v = (torch.randn(12, 2, 16) for _ in range(3))
    cu = offsets((5, 7))

    def call(*args, **options):
        return lambda: flash_attn_varlen_func(*(args or (q, k, v, cu, cu)), **options)

    check_refuses(
        [
            (call(dropout_p=0.1), UnsupportedError, "dropout_p must be 0.0; got 0.1"),
            (call(softcap=30.0), UnsupportedError, "softcap must be 0.0; got 30.0"),
            (call(alibi_slopes=torch.ones(2)), UnsupportedError, "alibi_slopes must be None"),
            (call(block_table=torch.ones(2)), UnsupportedError, "block_table must be None"),
            (call(window_size=(-2, 0)), ShapeError, "window_size must .* got left -2; -1 or None"),
            (call(window_size=3), ShapeError, "window_size must be a pair"),
            (call(window_size=(0.5, 0)), DtypeError, "window_size must have .* got left 0.5"),
            (call(softmax_scale=torch.ones(())), DtypeError, "softmax_scale must be a number"),
            (call(q, k, v, [0, 5, 12], cu), DtypeError, "cu_seqlens_q must be a tensor"),
            (call(q[0], k, v, cu, cu), ShapeError, "q_THK must have 3 dims"),
            (call(q, k, v[:9], cu, cu), ShapeError, "v_SGV has S=9"),
            (call(q, k.double(), v, cu, cu), DtypeError, "k must be torch.float32 like q"),
            (call(q, k, v, cu.float(), cu), DtypeError, "cu_seqlens_q must be int32 or int64"),
            (call(q, k, v, cu[None], cu), ShapeError, "cu_seqlens_q must have one dim"),
            (call(q, k, v, cu, cu[:2]), ShapeError, "cu_seqlens_k must have the 2 sequences"),
            (call(q, k, v, cu, cu.to("meta")), DeviceError, "cu_seqlens_k must be on cpu"),
            (call(q[:9], k, v, cu, cu), ShapeError, "sum to at most the 9"),
        ]
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.float32, 64), (torch.bfloat16, 64), (torch.float16, 128), (torch.bfloat16, 80)],
)
def test_equals_an_fp64_oracle_on_gpu(dtype, width):
    for q_lengths, k_lengths, heads, kv_heads, _, window in CASES:
        case = (q_lengths, k_lengths, heads, kv_heads, width, window)
        check_against_oracle(case, impl="auto", dtype=dtype, device="cuda")
    longer = ((700, 0, 129, 64), (300, 5, 513, 64), 4, 2, width, (100, 7))
    check_against_oracle(longer, impl="auto", dtype=dtype, device="cuda")


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    q, k, v = (
        torch.randn(900, 4, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    upstream = torch.randn_like(q)
    warm = offsets((500, 0, 400), device="cuda")
    torch.autograd.grad(flash_attn_varlen_func(q, k, v, warm, warm), (q, k, v), upstream)
    fresh = offsets((300, 200, 400), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = flash_attn_varlen_func(q, k, v, fresh, fresh)
        torch.autograd.grad(out, (q, k, v), upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_graph_is_right_for_other_lengths(dtype):
    tokens, width = 1500, 128
    q, k, v = (
        torch.randn(tokens, 4, width, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    upstream = torch.randn_like(q)
    cu = offsets((500, 0, 900, 7), device="cuda")

    def step():
        out = flash_attn_varlen_func(q, k, v, cu, cu, causal=True)
        return out, *torch.autograd.grad(out, (q, k, v), upstream)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ((500, 0, 900, 7), (1, 1300, 20, 3), (0, 0, 0, 0), (1500, 0, 0, 0)):
        cu.copy_(offsets(lengths, device="cuda"))
        for x in captured:
            x.detach().fill_(torch.nan)
        graph.replay()
        for replayed, eager in zip(captured, step(), strict=True):
            check_equal_up_to_rounding(replayed.detach(), eager.detach(), noise_scale=4.0)
