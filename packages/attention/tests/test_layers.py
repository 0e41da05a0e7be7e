import pytest
import torch

from gem_attention.contract import AttentionSpec
from gem_attention.layers import (
    CrossAttention,
    GdpaPffn,
    HierarchicalSeedPooling,
    PooledAttention,
    SelfAttention,
    SumKronLinear,
)
from gem_attention.patterns import visible_pairs
from gem_jagged.batch import Layout
from gem_opkit.errors import ConfigError, ShapeError, UnsupportedError
from gem_opkit.testing import (
    check_alone_equals_in_batch,
    check_compiles_whole,
    check_equal_up_to_rounding,
    check_refuses,
    take_sequences,
)

D, C = 16, 6
BASE = {"heads": 4, "head_dim": 4}
SELF_SPECS = {
    "full": AttentionSpec(**BASE),
    "causal": AttentionSpec(**BASE, kv_heads=2, pattern="causal", rotary="position"),
    "window": AttentionSpec(**BASE, pattern="window", window_tokens=2, rotary="rote"),
    "block": AttentionSpec(**BASE, pattern="block", block_tokens=3, rotary="rote"),
    "no_qk_norm": AttentionSpec(**BASE, qk_norm=False),
    "gdpa": AttentionSpec(
        **BASE,
        pattern="window",
        window_tokens=3,
        activation=("gelu", "relu", "silu", "identity"),
        scale="inverse_max_tokens",
        max_tokens=40,
    ),
}
GDPA = AttentionSpec(**BASE, activation="gelu")
PLAIN = AttentionSpec(**BASE)


class Call:
    """A layer with a function that makes its arguments from picked sequences."""

    def __init__(self, layer, make, *, per="tokens"):
        self.layer, self.make, self.per = layer, make, per


def tokens(lengths):
    return torch.randn(sum(lengths), D, requires_grad=True)


def self_attention(lengths, name):
    x, gap = tokens(lengths), torch.rand(sum(lengths)) * 1e5

    def make(picked):
        cut = (take_sequences(t, lengths, picked) for t in (x, gap))
        x_TD, gap_seconds_T = cut
        return x_TD, Layout.from_lengths([lengths[i] for i in picked]), gap_seconds_T

    return Call(SelfAttention(D, SELF_SPECS[name]), make), [x]


def gdpa_pffn(lengths):
    x, context = tokens(lengths), torch.randn(len(lengths), 7, C, requires_grad=True)

    def make(picked):
        layout = Layout.from_lengths([lengths[i] for i in picked])
        return take_sequences(x, lengths, picked), layout, context[list(picked)]

    return Call(GdpaPffn(D, GDPA, C), make), [x, context]


def cross_attention(lengths):
    others = [(n * 2 + i) % 7 for i, n in enumerate(lengths)]
    x, context = tokens(lengths), torch.randn(sum(others), C, requires_grad=True)

    def make(picked):
        layouts = [Layout.from_lengths([ls[i] for i in picked]) for ls in (lengths, others)]
        return (
            take_sequences(x, lengths, picked),
            layouts[0],
            take_sequences(context, others, picked),
            layouts[1],
        )

    return Call(CrossAttention(D, PLAIN, C), make), [x, context]


def pooled(lengths, layer):
    x = tokens(lengths)

    def make(picked):
        layout = Layout.from_lengths([lengths[i] for i in picked])
        return take_sequences(x, lengths, picked), layout

    return Call(layer, make, per="sequences"), [x]


class WithQueries(torch.nn.Module):
    """Pooling by queries of the example, with the queries as a positional argument."""

    def __init__(self, spec=PLAIN):
        super().__init__()
        self.layer = PooledAttention(D, spec, 0)

    def forward(self, x, layout, query):
        return self.layer(x, layout, query_BPD=query)


def target_aware(lengths):
    x, query = tokens(lengths), torch.randn(len(lengths), 2, D, requires_grad=True)

    def make(picked):
        layout = Layout.from_lengths([lengths[i] for i in picked])
        return take_sequences(x, lengths, picked), layout, query[list(picked)]

    return Call(WithQueries(), make, per="sequences"), [x, query]


LAYERS = {
    **{f"self_{name}": lambda ls, name=name: self_attention(ls, name) for name in SELF_SPECS},
    "gdpa_pffn": gdpa_pffn,
    "cross": cross_attention,
    "seeds": lambda ls: pooled(ls, PooledAttention(D, PLAIN, 3)),
    "seeds_without_softmax": lambda ls: pooled(ls, PooledAttention(D, GDPA, 3)),
    "target_aware": target_aware,
    "hierarchical": lambda ls: pooled(ls, HierarchicalSeedPooling(D, PLAIN, 6, 2, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_reach_every_parameter_and_input(name):
    call, leaves = LAYERS[name]((5, 0, 3, 8))
    out = call.layer(*call.make(range(4)))
    (out * torch.randn_like(out)).sum().backward()
    assert torch.isfinite(out).all()
    for x in [*leaves, *call.layer.parameters()]:
        assert torch.isfinite(x.grad).all()
        assert x.grad.abs().max() > 0


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("lengths", [(0, 4), (4, 0), (0, 0, 0), (), (1,)], ids=str)
def test_empty_things_are_fine(name, lengths):
    call, leaves = LAYERS[name](lengths)
    out = call.layer(*call.make(range(len(lengths))))
    out.sum().backward()
    assert out.shape[0] == (sum(lengths) if call.per == "tokens" else len(lengths))
    assert torch.isfinite(out).all()
    for x in [*leaves, *call.layer.parameters()]:
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("name", LAYERS)
def test_a_sequence_alone_equals_itself_in_a_batch(name):
    lengths = (5, 0, 23, 1)
    call, leaves = LAYERS[name](lengths)
    check_alone_equals_in_batch(call.layer, call.make, lengths, leaves=leaves, split=call.per)


# Grouped heads with positions, a window with time gaps, and another operator.
@pytest.mark.parametrize("name", ["causal", "window", "gdpa"])
def test_self_attention_compiles_whole(name):
    spec = SELF_SPECS[name]

    class Counted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = SelfAttention(D, spec)

        def forward(self, x, layout, gap, pairs):
            return self.layer(x, layout, gap, visible_pairs=pairs)

    def inputs(lengths):
        layout = Layout.from_lengths(lengths)
        pairs = visible_pairs(layout.lengths, layout.lengths, *spec.window)
        return tokens(lengths), layout, torch.rand(sum(lengths)), pairs

    check_compiles_whole(Counted(), [inputs(ls) for ls in ((3, 0, 5), (2, 7, 2), (9, 4, 2, 3))])


@pytest.mark.parametrize("name", ["gdpa_pffn", "target_aware", "hierarchical"])
def test_layers_of_constant_context_compile_without_counted_pairs(name):
    sets = ((3, 4, 5), (2, 7, 2), (9, 4, 2, 3))
    calls = [LAYERS[name](lengths)[0] for lengths in sets]
    args = [call.make(range(len(ls))) for call, ls in zip(calls, sets, strict=True)]
    leaves = [
        tuple(x.detach().requires_grad_() if torch.is_tensor(x) else x for x in each)
        for each in args
    ]
    check_compiles_whole(calls[0].layer, leaves)


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_computes_in_bf16(name):
    call, _ = LAYERS[name]((5, 0, 3))
    args = call.make(range(3))
    exact = call.layer(*args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call.layer(*args)
    assert torch.isfinite(out).all()
    assert (out.float() - exact).abs().max() < 0.1 * (1 + exact.abs().max())
    out.float().sum().backward()


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_no_biases_and_the_same_seed_gives_the_same_parameters(name):
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        states.append(LAYERS[name]((3,))[0].layer.state_dict())
    assert not any("bias" in key for key in states[0])
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_self_attention_is_its_formula():
    torch.manual_seed(0)
    layer = SelfAttention(D, AttentionSpec(heads=2, kv_heads=1, head_dim=4, pattern="causal"))
    x = torch.randn(5, D)
    q0, q1, k, v = (x @ layer.qkv.weight.T).split(4, dim=1)
    future = torch.ones(5, 5).triu(1).bool()

    def unit(t):
        return t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    heads = [
        (unit(q) @ unit(k).T / 2).masked_fill(future, -torch.inf).softmax(-1) @ v for q in (q0, q1)
    ]
    expected = torch.cat(heads, dim=1) @ layer.out.weight.T
    check_equal_up_to_rounding(layer(x, Layout.from_lengths([5])).detach(), expected.detach())


def test_gdpa_pffn_is_its_formula():
    torch.manual_seed(0)
    layer = GdpaPffn(D, GDPA, C)
    x, context = torch.randn(5, D), torch.randn(1, 3, C)
    kv = context[0] @ layer.kv.weight.T
    q1 = torch.nn.functional.layer_norm(x, (D,), eps=1e-6)
    heads = []
    for h in range(4):
        q, k = q1[:, 4 * h : 4 * h + 4], kv[:, 4 * h : 4 * h + 4]
        k = k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        v = kv[:, D + 4 * h : D + 4 * h + 4]
        heads.append(torch.nn.functional.gelu(q @ k.T / 2) @ v)
    a = torch.cat(heads, dim=1) + q1
    expected = a / (a.square().mean(-1, keepdim=True) + 1e-6).sqrt() + x
    out = layer(x, Layout.from_lengths([5]), context)
    check_equal_up_to_rounding(out.detach(), expected.detach())


def test_sum_kron_is_its_formula():
    layer = SumKronLinear(5, 2, D, 3)
    h = torch.randn(4, 5, D)
    z, w = layer.z.view(3, 2, 5), layer.w.view(3, D, D)
    expected = sum(z[i] @ h @ w[i] for i in range(3))
    check_equal_up_to_rounding(layer(h).detach(), expected.detach(), noise_scale=4.0)
    assert layer(h[:0]).shape == (0, 2, D)


def test_sum_kron_without_copies_is_the_same_map():
    layer = SumKronLinear(5, 2, D, 3).double()
    h = torch.randn(4, 5, D, dtype=torch.float64, requires_grad=True)
    leaves = (h, layer.z, layer.w)
    upstream = torch.randn(4, 2, D, dtype=torch.float64)
    outputs = [layer(h), layer.without_copies(h)]
    torch.testing.assert_close(outputs[1], outputs[0])
    plain, own = (torch.autograd.grad(y, leaves, upstream) for y in outputs)
    torch.testing.assert_close(own, plain)


def test_pooling_of_an_empty_sequence_is_zero():
    layout = Layout.from_lengths([0, 4])
    x = torch.randn(4, D)
    for layer in (PooledAttention(D, PLAIN, 3), HierarchicalSeedPooling(D, PLAIN, 6, 2, 3)):
        out = layer(x, layout)
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert out[1].abs().max() > 0


def test_time_gaps_change_rote_and_positions_change_rotary():
    x, layout = torch.randn(6, D), Layout.from_lengths([6])
    layer = SelfAttention(D, AttentionSpec(**BASE, rotary="rote"))
    near, far = (layer(x, layout, torch.linspace(0, s, 6)) for s in (1.0, 1e6))
    assert (near - far).abs().max() > 1e-3
    order = torch.arange(5, -1, -1)
    for rotary, same in (("none", True), ("position", False)):
        layer = SelfAttention(D, AttentionSpec(**BASE, rotary=rotary))
        difference = (layer(x[order], layout)[order] - layer(x, layout)).abs().max()
        assert (difference < 1e-5) == same


def test_refuses():
    x, layout = torch.randn(5, D), Layout.from_lengths([2, 3])
    rote = SelfAttention(D, AttentionSpec(**BASE, rotary="rote"))
    pffn = GdpaPffn(D, GDPA, C)
    learned, given = PooledAttention(D, PLAIN, 3), PooledAttention(D, PLAIN, 0)
    query = torch.randn(2, 1, D)
    block = AttentionSpec(**BASE, pattern="block")
    check_refuses(
        [
            (lambda: rote(x, layout), ConfigError, "gap_seconds_T must be given .* got None"),
            (
                lambda: rote(x, layout, torch.zeros(4)),
                ShapeError,
                "gap_seconds_T has T=4 but x_TD has T=5",
            ),
            (
                lambda: SelfAttention(D, AttentionSpec(**BASE, pattern="block", activation="gelu")),
                UnsupportedError,
                "activation must be softmax with pattern block; got gelu",
            ),
            (lambda: GdpaPffn(D, PLAIN, C), ConfigError, "activation must .* got softmax"),
            (
                lambda: GdpaPffn(20, GDPA, C),
                ConfigError,
                "model_width must be heads times head_dim, 16; got 20",
            ),
            (
                lambda: GdpaPffn(D, AttentionSpec(**BASE, activation="gelu", pattern="causal"), C),
                ConfigError,
                "pattern must be full; got causal",
            ),
            (
                lambda: pffn(x, layout, torch.randn(3, 2, C)),
                ShapeError,
                "context_BND must have one row for each of the 2 sequences; got 3",
            ),
            (
                lambda: CrossAttention(D, block, C),
                ConfigError,
                "CrossAttention: pattern must be full or causal or window; got block",
            ),
            (
                lambda: PooledAttention(D, AttentionSpec(**BASE, rotary="position"), 1),
                ConfigError,
                "rotary must be none; got position",
            ),
            (lambda: PooledAttention(D, PLAIN, -1), ConfigError, "seeds must be at least 0"),
            (
                lambda: learned(x, layout, query_BPD=query),
                ConfigError,
                "query_BPD must be given if .* got queries with 3 seeds",
            ),
            (lambda: given(x, layout), ConfigError, "query_BPD must be .* got none with 0 seeds"),
            (
                lambda: given(x, layout, query_BPD=query[:1]),
                ShapeError,
                "query_BPD must have one row",
            ),
            (
                lambda: HierarchicalSeedPooling(D, PLAIN, 6, 0, 3),
                ConfigError,
                "SumKronLinear: tokens_out must be above 0; got 0",
            ),
        ]
    )
