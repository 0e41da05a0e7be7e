import inspect

import pytest
import torch

from gem_attention.flash_compat import flash_attn_varlen_func
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


def check_against_oracle(case, *, impl, dtype, device):
    q_lengths, k_lengths, heads, kv_heads, width, window = case
    # Keys and values are slices of one fused tensor, queries have their heads outside.
    q = torch.randn(heads, sum(q_lengths), width, dtype=dtype, device=device)
    fused = torch.randn(sum(k_lengths), 2, kv_heads, width, dtype=dtype, device=device)
    leaves = [q.requires_grad_(), fused.requires_grad_()]
    upstream = None
    runs = []
    for wide in (None, dtype, torch.float64):
        q, fused = (x.detach().to(wide or dtype).requires_grad_() for x in leaves)  # fp64 last
        views = (q.transpose(0, 1), *fused.unbind(1))
        if wide is None:
            causal = {"causal": True} if window[1] == 0 else {}
            out, lse, dmask = flash_attn_varlen_func(
                *views,
                offsets(q_lengths, device=device),
                offsets(k_lengths, device=device),
                max(q_lengths),
                max(k_lengths),
                window_size=window,
                return_attn_probs=True,
                impl=impl,
                **causal,
            )
            assert dmask.numel() == 0
            assert lse.dtype == torch.float32
            lse = lse.T
        else:
            out, lse = oracle(*views, q_lengths, k_lengths, window=window, scale=width**-0.5)
        if upstream is None:
            upstream = torch.randn_like(out)
        gradients = torch.autograd.grad(out, (q, fused), upstream.to(out.dtype))
        runs.append((out.detach(), lse.detach(), *gradients))
    # What cancels in a gradient, dO · v of a pair and of the sum of its row, is as large as this.
    v = fused.detach()[:, 1].repeat_interleave(heads // kv_heads, 1)
    pairs = torch.einsum("thv,shv->hts", upstream.double(), v)
    cancels = float(pairs.abs().max()) if pairs.numel() else 0.0
    for name, kernel, low, exact in zip(("out", "lse", "grad q", "grad kv"), *runs, strict=True):
        low = low.to(kernel.dtype) if name == "lse" else low
        # On a CPU the usual allowance is enough; on a GPU products are summed in another order.
        noise_scale = cancels if name.startswith("grad") and device != "cpu" else 4.0
        check_budget(kernel, low, exact, what=name, noise_scale=noise_scale)


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
