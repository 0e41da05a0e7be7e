"""The layers of a stream: fast paths of a GPU against plain torch."""

import copy

import pytest
import torch

from gem.model.sequence import (
    StreamInteraction,
    StreamTransformer,
    _SpreadOverEvents,
    spread_over_events,
    visible_pairs_of,
)
from gem.model.spec import StreamSpec
from gem_jagged.batch import Layout
from gem_opkit.errors import UnsupportedError

LENGTHS = (3, 0, 40, 1)


def test_each_event_gets_the_row_of_its_history_and_gives_its_gradient_back():
    layout = Layout.from_lengths(LENGTHS)
    rows = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(layout.total_tokens, 6, dtype=torch.float64)
    runs = [spread_over_events(rows, layout), _SpreadOverEvents.apply(rows, layout)]
    assert torch.equal(*runs)
    plain, summed = (torch.autograd.grad(run, rows, upstream)[0] for run in runs)
    torch.testing.assert_close(summed, plain)
    assert torch.equal(summed[1], torch.zeros(6, dtype=torch.float64))


@pytest.mark.parametrize("impl", ["triton", "reference", "auto"])
def test_a_stream_says_who_computes_its_gdpa(impl, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    layer = StreamInteraction(StreamSpec(width=8, heads=2, gdpa_impl=impl), 8, 40)
    context = torch.randn(4, 3, 8)
    layout = Layout.from_lengths(LENGTHS)
    if impl == "triton":
        with pytest.raises(UnsupportedError, match="GdpaPffn"):
            layer(torch.randn(44, 8), layout, context, torch.randn(4, 8))
        return
    x, summary = layer(torch.randn(44, 8), layout, context, torch.randn(4, 8))
    assert x.shape == (44, 8)
    assert torch.isfinite(summary).all()


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rotary", ["position", "rote"])
def test_a_transformer_layer_on_a_gpu_equals_the_cpu(gated, rotary):
    torch.manual_seed(0)
    spec = StreamSpec(width=64, heads=2, rotary=rotary, pattern="full")
    layer = StreamTransformer(spec, 32, summary_tokens=3, gated=gated)
    layout = Layout.from_lengths(LENGTHS)
    x, context = torch.randn(44, 64), torch.randn(4, 3, 32)
    gaps = torch.rand(44) * 1e5
    runs = []
    for device in ("cpu", "cuda"):
        own = copy.deepcopy(layer).to(device)
        # Leaves of their own: a copy to another device would not be one.
        given = [t.clone().to(device).requires_grad_() for t in (x, context)]
        place = layout.to(device)
        y = own(
            given[0], place, given[1], gaps.to(device), visible_pairs=visible_pairs_of(spec, layout)
        )
        y.square().sum().backward()
        leaves = [*given, *own.parameters()]
        # The context reaches the events through the gate alone.
        runs.append([y, *(leaf.grad for leaf in (leaves if gated else [given[0], *leaves[2:]]))])
    for on_cpu, on_gpu in zip(*runs, strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=2e-3, atol=2e-3)
