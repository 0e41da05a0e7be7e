"""flash_compat's call for attention without softmax, against an fp64 oracle of its own words."""

import inspect

import pytest
import torch

from gem_attention.flash_compat import flash_attn_varlen_func, generalized_attention_varlen_func
from gem_jagged.batch import Layout
from gem_opkit.errors import ConfigError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import check_budget, check_equal_up_to_rounding, check_refuses

IMPLS = ["reference", pytest.param("triton", marks=pytest.mark.interpreter)]
CASES = [
    # zero-length rows on either side, Lq != Lk, windows at both ends, grouped heads
    ((1, 0, 1), (1, 0, 1), 2, 2, 32, (-1, -1)),
    ((1, 0, 0, 0, 1, 0, 0, 0), (1, 0, 0, 0, 1, 0, 0, 0), 4, 2, 16, (-1, 0)),
    ((5, 0, 33, 7), (9, 4, 0, 7), 4, 2, 24, (None, None)),
    ((5, 40, 7), (37, 9, 7), 2, 2, 16, (3, 5)),
    ((5, 40, 7), (37, 9, 7), 2, 1, 16, (0, -1)),
]


def offsets(lengths, *, dtype=torch.int32, device="cpu"):
    return Layout.from_lengths(list(lengths), dtype=dtype, device=device).offsets_O


def oracle(q, k, v, q_lengths, k_lengths, *, window, scale):
    """silu in every head, with the mask written from flash-attention's own words."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    outs = [q[:0, :, :1].expand(-1, -1, v.shape[2])]
    for q_i, k_i, v_i in zip(
        q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True
    ):
        i = torch.arange(len(q_i), device=q.device)[:, None] + len(k_i) - len(q_i)
        j = torch.arange(len(k_i), device=q.device)[None, :]
        shown = torch.ones(len(q_i), len(k_i), dtype=torch.bool, device=q.device)
        if window[0] not in (-1, None):
            shown &= j >= i - window[0]
        if window[1] not in (-1, None):
            shown &= j <= i + window[1]
        score = torch.einsum("ihk,jhk->hij", q_i, k_i) * scale
        outs.append(torch.einsum("hij,jhv->ihv", score * score.sigmoid() * shown, v_i))
    return torch.cat(outs)


def test_arguments_are_those_of_the_call_beside_it():
    given = set(inspect.signature(generalized_attention_varlen_func).parameters)
    theirs = set(inspect.signature(flash_attn_varlen_func).parameters)
    assert given - theirs == {"activation", "scale"}


def check_against_oracle(case, *, impl, dtype, device):
    q_lengths, k_lengths, heads, kv_heads, width, window = case
    # Keys and values are slices of one fused tensor, queries have their heads outside.
    q = torch.randn(heads, sum(q_lengths), width, dtype=dtype, device=device)
    fused = torch.randn(sum(k_lengths), 2, kv_heads, width, dtype=dtype, device=device)
    upstream = None
    runs = []
    for wide in (None, dtype, torch.float64):
        leaves = [x.to(wide or dtype).requires_grad_() for x in (q.clone(), fused.clone())]
        views = (leaves[0].transpose(0, 1), *leaves[1].unbind(1))
        if wide is None:
            out = generalized_attention_varlen_func(
                *views,
                cu_seqlens_q=offsets(q_lengths, device=device),
                cu_seqlens_k=offsets(k_lengths, device=device, dtype=torch.int64),
                max_seqlen_q=max(q_lengths),
                max_seqlen_k=max(k_lengths),
                activation="silu",
                scale=0.7,
                window_size=window,
                impl=impl,
            )
        else:
            out = oracle(*views, q_lengths, k_lengths, window=window, scale=0.7)
        if upstream is None:
            upstream = torch.randn_like(out)
        runs.append((out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))))
    for name, kernel, low, exact in zip(("out", "grad q", "grad kv"), *runs, strict=True):
        check_budget(kernel, low, exact, what=name, noise_scale=4.0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", CASES)
def test_equals_an_fp64_oracle(case, impl):
    check_against_oracle(case, impl=impl, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("impl", IMPLS)
def test_compiles_whole_over_changing_lengths(impl):
    torch._dynamo.reset()
    graphs = []

    def counting(module, example_inputs):
        graphs.append(module)
        return module.forward

    def attend(q, k, v, cu, *, impl=impl):
        return generalized_attention_varlen_func(
            *(q, k, v), cu_seqlens_q=cu, cu_seqlens_k=cu, activation=("gelu", "relu"), impl=impl
        )

    whole = torch.compile(attend, fullgraph=True, backend=counting)
    for lengths in ((3, 5), (9, 2), (4, 4), (20, 7)):
        q, k, v = (torch.randn(sum(lengths), 2, 16) for _ in range(3))
        cu = offsets(lengths)
        check_equal_up_to_rounding(whole(q, k, v, cu), attend(q, k, v, cu, impl="reference"))
    assert len(graphs) <= 2


def test_refuses():
    q, k, v = (torch.randn(12, 2, 16) for _ in range(3))
    cu = offsets((5, 7))

    def call(q=q, k=k, v=v, **options):
        given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu} | options
        return lambda: generalized_attention_varlen_func(q, k, v, **given)

    name = "generalized_attention_varlen_func: "
    check_refuses(
        [
            (call(activation="softmax"), UnsupportedError, name + "activation must be one of"),
            (call(activation=("silu",)), ShapeError, name + "activation must name one"),
            (call(window_size=(-2, 0)), ShapeError, name + "window_size must .* got left -2; -1"),
            (call(scale=float("nan")), ConfigError, name + "scale must be finite"),
            (call(q=q[:9]), ShapeError, name + ".*sum to at most the 9"),
            (call(k=k.double()), DtypeError, name + "k must be torch.float32 like q"),
            (call(cu_seqlens_k=cu[:2]), ShapeError, name + "cu_seqlens_k must have the 2"),
            (call(cu_seqlens_q=[0, 5, 12]), DtypeError, name + "cu_seqlens_q must be a tensor"),
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

    def step(cu):
        out = generalized_attention_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
        torch.autograd.grad(out, (q, k, v), upstream)

    step(offsets((500, 0, 400), device="cuda"))
    fresh = offsets((300, 200, 400), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(fresh)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
def test_a_captured_graph_is_right_for_other_lengths(dtype, window):
    q, k, v = (
        torch.randn(1500, 4, 128, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)
    )
    upstream = torch.randn_like(q)
    cu = offsets((500, 0, 900, 7), device="cuda")

    def step():
        out = generalized_attention_varlen_func(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, activation="silu", window_size=window
        )
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


@pytest.mark.gpu
def test_compiles_whole_on_gpu():
    torch._dynamo.reset()
    graphs = []

    def counting(module, example_inputs):
        graphs.append(module)
        return module.forward

    def attend(q, k, v, cu):
        return generalized_attention_varlen_func(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, activation="silu"
        )

    whole = torch.compile(attend, fullgraph=True, backend=counting)
    for lengths in ((300, 5), (9, 200), (140, 140), (20, 700)):
        q, k, v = (
            torch.randn(sum(lengths), 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        cu = offsets(lengths, device="cuda")
        assert torch.equal(whole(q, k, v, cu), attend(q, k, v, cu))
    assert len(graphs) <= 2
