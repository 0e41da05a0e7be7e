"""A ranker on a GPU scores as one on the CPU does, shared or not, in fp32, bf16 and 8 bits."""

import numpy as np
import pytest
from served_runs import many_events

from gem.serving.ranker import Ranker
from gem_precision.contract import PrecisionRecipe

_ALONE = ('model.stream.ffn="none"', "model.transformer_gate=false")


@pytest.mark.gpu
@pytest.mark.parametrize("overrides", [(), _ALONE], ids=["told apart", "shared"])
def test_scores_on_a_gpu_are_those_of_the_cpu(serve_of, rng, overrides):
    one = serve_of(*overrides)
    requests = [
        {
            "user": user,
            "time_ms": 1_800_000_000_000,
            "candidates": {"item_id": rng.integers(0, 31, count).tolist()},
            "history": {"impressions": many_events(rng, events)},
        }
        for user, count, events in [(1, 31, 8), (2, 5, 0), (3, 64, 40)]
    ]
    cpu = Ranker.load(one.artefact, precision="fp32")
    asked = [cpu.parse(request) for request in requests]
    want = [answer.scores["click"] for answer in cpu.score_many(asked)]
    # Products of fp32 may be rounded to TF32, those of bf16 to 2^-9 each.
    for precision, budget in (("fp32", 2.0**-10), ("bf16", 0.02)):
        for share in (True, False):
            gpu = Ranker.load(one.artefact, precision=precision, device="cuda", share=share)
            for answer, scores in zip(gpu.score_many(asked), want, strict=True):
                np.testing.assert_allclose(answer.scores["click"], scores, atol=budget, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mxfp8_rceil", "fp8_block"])
def test_eight_bits_on_a_gpu_are_those_of_the_cpu(serve_of, rng, kind):
    # Whole blocks of 128, and wide enough for a product in 8 bits to be one.
    wide = ("model.width=128", "model.stream.width=128", "model.embeddings.embedding_dim=128")
    one = serve_of(*_ALONE, *wide)
    recipe = PrecisionRecipe(default="bf16_autocast", recipe=kind, least_width=0)
    request = {
        "user": 3,
        "time_ms": 1_800_000_000_000,
        "candidates": {"item_id": list(range(31)) * 4},
        "history": {"impressions": many_events(rng, 12)},
    }

    def scores(**how):
        return np.asarray(Ranker.load(one.artefact, **how).score(request).scores["click"])

    exact, cpu = scores(precision="fp32"), scores(precision=recipe)
    cost = np.abs(cpu - exact).max()
    assert cost > 0
    for share in (True, False):
        gpu = scores(precision=recipe, device="cuda", share=share)
        # Both round to the same format; a number between two of it may fall to either.
        assert 0 < np.abs(gpu - exact).max() <= 2 * cost
        assert np.abs(gpu - cpu).max() <= cost
