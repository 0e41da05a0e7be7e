"""A ranker in bf16 and in 8 bits: training's own forward pass, and errors that the format allows.

On a CPU products in 8 bits are emulated: the numbers are those of the format, the speed is not.
"""

import numpy as np
import pytest
import torch
from served_runs import many_events

from gem.serving.ranker import Ranker
from gem_opkit.errors import UnsupportedError
from gem_precision.contract import LayerRule, PrecisionRecipe

# Half a step of the last bit, as a share of a number: of bf16 (8 significant bits) and e4m3 (4).
_BF16, _E4M3 = 2.0**-8, 2.0**-4
_FORMATS = ("mxfp8_rceil", "mxfp8_floor", "fp8_block")
_ALONE = ('model.stream.ffn="none"', "model.transformer_gate=false")


def eight_bits(kind: str) -> PrecisionRecipe:
    """All linear layers but the late ones in a format, however narrow."""
    return PrecisionRecipe(default="bf16_autocast", recipe=kind, least_width=0)


def _in_few_bits(ranker: Ranker) -> list[str]:
    """Layers with a product below bf16."""
    return [n for n, m in ranker._model.named_modules() if getattr(m, "formats", None)]


def _request(rng):
    return {
        "user": 3,
        "time_ms": 1_800_000_000_000,
        "candidates": {"item_id": list(range(31)) * 4},
        "history": {"impressions": many_events(rng, 12)},
    }


@pytest.mark.parametrize("kind", ["bf16", *_FORMATS])
@pytest.mark.parametrize("overrides", [(), _ALONE], ids=["told apart", "shared"])
def test_a_run_in_few_bits_is_served_in_them(serve_of, kind, overrides):
    formats = 'precision.default="bf16_autocast"', "precision.least_width=0"
    words = formats[:1] if kind == "bf16" else (*formats, f'precision.recipe="{kind}"')
    one = serve_of(*overrides, *words)
    rows = range(0, len(one.rows), 9)
    want = one.p_BA[list(rows)]

    def errors(**how) -> float:
        ranker = Ranker.load(one.artefact, **how)
        found = np.concatenate([one.scores(ranker, [one.rows[place]]) for place in rows])
        return float(np.abs(found - want).max())

    # What the formats cost at all, by which it is judged what the serving pass may differ.
    cost = errors(precision="fp32")
    assert cost > 0
    for share in (True, False):
        assert errors(share=share) <= cost / 4, (errors(share=share), cost)


@pytest.mark.parametrize("kind", _FORMATS)
def test_eight_bits_err_by_what_their_format_rounds(serve_of, rng, kind):
    one = serve_of(*_ALONE)
    request = _request(rng)

    def scores(precision, *, share=True):
        ranker = Ranker.load(one.artefact, precision=precision, share=share)
        return np.asarray(ranker.score(request).scores["click"])

    exact, half = scores("fp32"), scores("bf16")
    # Twice: numbers far below the largest of their block have fewer significant bits.
    budget = 2 * _E4M3 / _BF16 * np.abs(half - exact).max()
    for share in (True, False):
        found = scores(eight_bits(kind), share=share)
        assert np.abs(half - exact).max() < np.abs(found - exact).max() <= budget


def test_single_layers_may_be_in_eight_bits(serve_of, rng):
    one = serve_of(*_ALONE)
    request = _request(rng)
    everywhere = Ranker.load(one.artefact, precision=eight_bits("mxfp8_rceil"))
    name = _in_few_bits(everywhere)[0]
    rule = LayerRule(modules=name, forward="mxfp8_rceil")
    single = PrecisionRecipe(default="bf16_autocast", rules=(rule,), least_width=0)
    ranker = Ranker.load(one.artefact, precision=single)
    assert _in_few_bits(ranker) == [name]
    half = Ranker.load(one.artefact, precision="bf16")
    found, without = (np.asarray(r.score(request).scores["click"]) for r in (ranker, half))
    assert 0 < np.abs(found - without).max() < 0.05


def test_a_gpu_without_eight_bits_refuses_them(served, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *_: self)  # no such GPU is here
    with pytest.raises(UnsupportedError, match=r"fp8_block needs compute capability 8.9.*got 8.0"):
        Ranker.load(served.artefact, precision=eight_bits("fp8_block"), device="cuda")
