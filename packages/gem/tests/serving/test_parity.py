"""A ranker gives the scores of training's own forward pass, whatever it computes only once."""

import re
import shutil

import numpy as np
import pytest
import torch
from served_runs import SHORT, Served, many_events

from gem.data.prepare import default_folder, provide
from gem.serving.ranker import Ranker
from gem.serving.request import ScoreRequest

_FEEDBACK = (
    'feedback = { stream = "impressions", field = "feedback", positive = [2], negative = [1] }'
)
_STATISTICS = f"""data.statistics=[
    {{ kind = "rate", name = "item_rate", keys = ["item_id"], label = "click", towards = 0.3 }},
    {{ kind = "rate", name = "tag_rate", keys = ["tags"], label = "click", towards = 0.3 }},
    {{ kind = "count", name = "user_count", keys = ["user_id"], label = "click" }},
    {{ kind = "history_count", name = "seen", stream = "impressions" }},
    {{ kind = "history_gap", name = "since", stream = "clicks" }},
    {{ kind = "history", name = "near", base = "item_rate", {_FEEDBACK},
       weights = [{{ kind = "same", field = "category" }}] }},
    {{ kind = "pair", name = "votes", base = "item_rate", {_FEEDBACK} }},
    {{ kind = "event", name = "surprise", base = "item_rate", value = "residual", {_FEEDBACK} }},
    OF_THE_CANDIDATE
]"""
_WITH_CANDIDATE = _STATISTICS.replace(
    "OF_THE_CANDIDATE",
    f"""{{ kind = "event", name = "pair", base = "item_rate", value = "pair", {_FEEDBACK} }}""",
)
_DIN = """model={ kind = "din", width = 8, attention_widths = [8],
    heads = { trunk_widths = [8] }, embeddings = { embedding_dim = 4 } }"""
_ALONE = ('model.stream.ffn="none"', "model.transformer_gate=false")
_CASES = {
    "gate and gdpa": (),
    "no candidate in the events": _ALONE,
    "several queries of the candidate": (*_ALONE, "model.stream.target_tokens=3"),
    "din queries": (*_ALONE, 'model.stream.target_attention="din"'),
    "recent events, pma": (
        *_ALONE,
        "model.stream.recent_tokens=2",
        'model.stream.pooling="pma"',
    ),
    "gdpa first": ('model.layers=["interaction", "both", "transformer", "interaction"]',),
    "an mlp behind attention": ("model.stream.ffn_hidden=8",),
    "no history": ("model.stream.layers=[]",),
    "statistics": (_STATISTICS.replace("OF_THE_CANDIDATE", ""),),
    "statistics of event and candidate": (_WITH_CANDIDATE,),
    "running scale": ("data.running_scale={ prior_rows = 50 }",),
    "hashed ids": ("data.synthetic.hashed_ids=true",),
    "derived inputs": (
        'data.derived=[{ kind = "hour_of_day", name = "hour" }, '
        '{ kind = "elapsed_days", name = "age" }, '
        '{ kind = "bucket", name = "dear", field = "price", boundaries = [1, 2, 3] }]',
    ),
    "fewer events than are read": ("model.stream.max_events=3",),
    "din": (_DIN,),
}


@pytest.mark.parametrize("overrides", _CASES.values(), ids=_CASES)
def test_scores_are_those_of_gem_predict(serve_of, overrides):
    one = serve_of(*(re.sub(r"\s+", " ", each) for each in overrides))
    for share in (True, False):
        ranker = Ranker.load(one.artefact, share=share)
        for place in range(0, len(one.rows), 5):
            rows = one.maker.at_one_time(int(one.rows[place]))
            rows = [row for row in rows if row <= one.rows[-1]]
            want = one.p_BA[place : place + len(rows)]
            # Sums over fewer rows are taken in another order.
            np.testing.assert_allclose(one.scores(ranker, rows), want, atol=5e-7, rtol=0)


def test_candidates_do_not_know_of_one_another(served, rng):
    ranker = Ranker.load(served.artefact)
    request = served.maker.request([int(served.rows[0])])
    items = rng.integers(0, 31, 20).tolist()
    asked = request.model_copy(update={"candidates": {"item_id": items}})
    together = ranker.score(asked).scores
    for place, item in enumerate(items):
        alone = ranker.score(asked.model_copy(update={"candidates": {"item_id": [item]}})).scores
        for task, scores in alone.items():
            assert together[task][place] == pytest.approx(scores[0], abs=5e-7)
    assert len({round(p, 6) for p in together["click"]}) > 5


@pytest.mark.parametrize("overrides", [(), _ALONE], ids=["told apart", "shared"])
def test_requests_that_are_scored_together_do_not_know_of_one_another(serve_of, overrides, rng):
    one = serve_of(*overrides)
    ranker = Ranker.load(one.artefact)
    requests = [
        ScoreRequest.model_validate(
            {
                "user": user,
                "time_ms": 1_800_000_000_000,
                "candidates": {"item_id": rng.integers(0, 31, count).tolist()},
                "history": {"impressions": many_events(rng, events)} if events else {},
            }
        )
        for user, count, events in [(1, 3, 5), (2, 1, 0), (3, 7, 12), (4, 2, 40), (5, 0, 3)]
    ]
    for request, answer in zip(requests, ranker.score_many(requests), strict=True):
        alone = ranker.score(request)
        for task, scores in alone.scores.items():
            np.testing.assert_allclose(answer.scores[task], scores, atol=5e-7, rtol=0)
        assert len(answer.scores["click"]) == len(request.candidates["item_id"])


def test_a_request_too_wide_for_one_pass_is_scored_in_several(served, rng, monkeypatch):
    request = {
        "user": 3,
        "time_ms": 1_800_000_000_000,
        "candidates": {"item_id": rng.integers(0, 31, 50).tolist()},
        "history": {"impressions": many_events(rng, 8)},
    }
    ranker = Ranker.load(served.artefact)
    whole = ranker.score(request).scores
    passes = []
    run = ranker._logits
    monkeypatch.setattr("gem.serving.ranker.MOST_TOKENS", 100)
    monkeypatch.setattr(ranker, "_logits", lambda part: passes.append(part) or run(part))
    for task, scores in ranker.score(request).scores.items():
        np.testing.assert_allclose(scores, whole[task], atol=5e-7, rtol=0)
    assert len(passes) > 3


def test_bf16_errs_no_more_where_work_is_shared(serve_of, rng):
    one = serve_of(*_ALONE)
    exact = Ranker.load(one.artefact, precision="fp32")
    halves = [Ranker.load(one.artefact, precision="bf16", share=share) for share in (True, False)]
    request = {
        "user": 3,
        "time_ms": 1_800_000_000_000,
        "candidates": {"item_id": list(range(31)) * 8},
        "history": {"impressions": many_events(rng, 8)},
    }
    want = np.asarray(exact.score(request).scores["click"])
    shared, apart = (np.asarray(r.score(request).scores["click"]) - want for r in halves)
    assert 0 < np.abs(shared).max() <= 2 * np.abs(apart).max() + 2**-9
    assert np.abs(apart).max() < 0.02


def test_labels_that_were_not_known_yet_are_known_to_later_requests_in_any_order(
    tiny, tmp_path, data_root
):
    provide(tiny().data, data_root)
    copy = tmp_path / "data"
    shutil.copytree(default_folder(tiny().data, data_root), copy)
    spec = (copy / "dataset.toml").read_text()
    late = spec.replace('name = "click"', 'name = "click"\nvisible_after_ms = 20000', 1)
    assert late != spec
    (copy / "dataset.toml").write_text(late)
    one = Served(tiny(f'data.folder="{copy}"', *SHORT), tmp_path, data_root)
    ranker = Ranker.load(one.artefact)
    # Backwards in time: nothing that a later request was told may reach an earlier one.
    for place in reversed(range(len(one.rows))):
        want = one.p_BA[place : place + 1]
        found = one.scores(ranker, [one.rows[place]])
        np.testing.assert_allclose(found, want, atol=5e-7, rtol=0)


def test_threads_and_torch_are_as_they_were(served):
    threads = torch.get_num_threads()
    Ranker.load(served.artefact)
    assert torch.get_num_threads() == threads
    Ranker.load(served.artefact, threads=2)
    assert torch.get_num_threads() == 2
