"""A ranker on a GPU scores as one on the CPU does, shared or not, in fp32 and bf16."""

import numpy as np
import pytest
from served_runs import many_events

from gem.serving.ranker import Ranker

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
