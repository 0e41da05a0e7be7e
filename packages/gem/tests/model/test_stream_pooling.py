"""Pooling of histories: against plain torch, history by history."""

import copy

import pytest
import torch

from gem.model.sequence import StreamBoth, StreamInteraction, StreamTransformer, pooling_spec
from gem.model.stream_pooling import MeanPooling, MultiHeadPooling, latest_tokens
from gem.model.stream_spec import StreamSpec
from gem_jagged.batch import Layout

LENGTHS = (3, 0, 5, 1)
WIDTH = 8


@pytest.fixture
def events():
    layout = Layout.from_lengths(LENGTHS)
    return torch.randn(layout.total_tokens, WIDTH, requires_grad=True), layout


def histories(x_TD):
    return torch.split(x_TD, list(LENGTHS))


def test_mean_pooling_is_a_map_of_the_mean(events):
    x_TD, layout = events
    alone, several = MeanPooling(WIDTH, 1), MeanPooling(WIDTH, 3)
    mean = torch.stack([h.mean(0) if len(h) else h.new_zeros(WIDTH) for h in histories(x_TD)])
    torch.testing.assert_close(alone(x_TD, layout), mean.unsqueeze(1))
    want = (mean @ several.spread.weight.t()).view(len(LENGTHS), 3, WIDTH)
    torch.testing.assert_close(several(x_TD, layout), want)
    assert not list(alone.parameters())


def test_pma_is_attention_of_each_query_over_one_history_and_an_mlp(events):
    x_TD, layout = events
    spec = StreamSpec(width=WIDTH, heads=2)
    layer = MultiHeadPooling(WIDTH, pooling_spec(spec), 2, activation="gelu")
    out = layer(x_TD, layout)
    assert torch.equal(out[1], torch.zeros(2, WIDTH))  # an empty history says nothing
    own = layer.pool

    def heads(x):
        return x.view(len(x), 2, WIDTH // 2).transpose(0, 1)

    def normed(x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    q = normed(heads(normed(own.seeds_PD) @ own.q.weight.t()))
    for place, history in enumerate(histories(x_TD)):
        if not len(history):
            continue
        k, v = (heads(part) for part in (history @ own.kv.weight.t()).chunk(2, dim=-1))
        read = torch.softmax(q @ normed(k).transpose(1, 2) * (WIDTH // 2) ** -0.5, -1) @ v
        pooled = read.transpose(0, 1).reshape(2, WIDTH) @ own.out.weight.t()
        first, second = (p.weight for p in layer.mlp.projections)
        want = pooled + torch.nn.functional.gelu(normed(pooled) @ first.t()) @ second.t()
        torch.testing.assert_close(out[place], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_latest_events_come_last_and_missing_ones_are_zero(events, count):
    x_TD, layout = events
    out = latest_tokens(x_TD, layout, count)
    for place, history in enumerate(histories(x_TD)):
        taken = history[-count:]
        want = torch.cat([history.new_zeros(count - len(taken), WIDTH), taken])
        assert torch.equal(out[place], want)
    out.sum().backward()
    read = torch.cat([(torch.arange(n, 0, -1) <= count).float() for n in LENGTHS])
    assert torch.equal(x_TD.grad, read.unsqueeze(1).expand(-1, WIDTH))


def test_no_event_at_all_gives_zeros():
    layout = Layout.from_lengths([0, 0])
    x_TD = torch.zeros(0, WIDTH)
    assert torch.equal(latest_tokens(x_TD, layout, 2), torch.zeros(2, 2, WIDTH))
    assert torch.equal(MeanPooling(WIDTH, 2)(x_TD, layout), torch.zeros(2, 2, WIDTH))


def test_summary_tokens_lie_in_their_order(events):
    # Pooled ones, the latest events, those of the candidate; each part found by leaving it out.
    x_TD, layout = events
    spec = StreamSpec(width=WIDTH, heads=2, ffn="none", pooling="mean", summary_tokens=1)
    spec = spec.model_copy(update={"recent_tokens": 2, "target_attention": "din"})
    layer = StreamInteraction(spec, WIDTH, 20)
    candidate_BD = torch.randn(len(LENGTHS), WIDTH)
    after, summary = layer(x_TD, layout, torch.empty(0), candidate_BD)
    assert after is x_TD
    parts = [layer.pool(x_TD, layout), latest_tokens(x_TD, layout, 2)]
    query = layer.make_query(candidate_BD)
    parts.append(layer.target_pool(x_TD, layout, query).unsqueeze(1))
    want = torch.cat(parts, dim=1)
    want = want * torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(summary, want)


def test_both_is_self_attention_without_a_gate_then_an_interaction(events):
    x_TD, layout = events
    spec = StreamSpec(width=WIDTH, heads=2, window_tokens=1, ffn_hidden=5)
    both = StreamBoth(spec, WIDTH, 20, activation="relu")
    first = StreamTransformer(spec, WIDTH, summary_tokens=2, gated=False)
    second = StreamInteraction(spec, WIDTH, 20)
    first.load_state_dict(both.transformer.state_dict())
    second.load_state_dict(both.interaction.state_dict())
    context_BND, candidate_BD = torch.randn(4, 2, WIDTH), torch.randn(4, WIDTH)
    gaps = torch.rand(layout.total_tokens) * 1e4
    got = both(x_TD, layout, context_BND, candidate_BD, gaps)
    middle = first(x_TD, layout, context_BND, gaps)
    for one, other in zip(got, second(middle, layout, context_BND, candidate_BD), strict=True):
        assert torch.equal(one, other)


def test_an_mlp_follows_self_attention_event_by_event(events):
    x_TD, layout = events
    spec = StreamSpec(width=WIDTH, heads=2, ffn_hidden=5)
    layer = StreamTransformer(spec, WIDTH, summary_tokens=2, gated=False)
    gaps, context = torch.rand(layout.total_tokens), torch.empty(0)
    whole = layer(x_TD, layout, context, gaps)
    mlp, layer.ffn = layer.ffn, None
    plain = layer(x_TD, layout, context, gaps)
    normed = plain * torch.rsqrt(plain.square().mean(-1, keepdim=True) + 1e-6)
    first, second = (p.weight for p in mlp.projections)
    want = plain + torch.relu(normed @ first.t()) @ second.t()
    torch.testing.assert_close(whole, want, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        {"pooling": "pma", "ffn": "none", "recent_tokens": 2, "target_attention": "din"},
        {"pooling": "mean", "ffn_hidden": 8},
    ],
    ids=str,
)
def test_a_layer_of_both_kinds_on_a_gpu_equals_the_cpu(changes):
    torch.manual_seed(0)
    spec = StreamSpec(width=64, heads=2, pattern="full", **changes)
    layer = StreamBoth(spec, 32, 20, activation="gelu")
    layout = Layout.from_lengths(LENGTHS)
    x, context, candidate = torch.randn(9, 64), torch.randn(4, 3, 32), torch.randn(4, 32)
    gaps = torch.rand(9) * 1e5
    runs = []
    for device in ("cpu", "cuda"):
        own = copy.deepcopy(layer).to(device)
        given = [t.clone().to(device).requires_grad_() for t in (x, context, candidate)]
        outs = own(
            given[0], layout.to(device), given[1], given[2], gaps.to(device), visible_pairs=35
        )
        sum(out.square().sum() for out in outs).backward()
        leaves = [leaf.grad for leaf in (*given, *own.parameters()) if leaf.grad is not None]
        runs.append([*outs, *leaves])
    assert len(runs[0]) == len(runs[1]) > 8
    for on_cpu, on_gpu in zip(*runs, strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=2e-3, atol=2e-3)
