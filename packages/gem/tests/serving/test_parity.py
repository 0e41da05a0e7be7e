"""A ranker gives the scores of training's own forward pass, whatever it computes only once."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from served_runs import ROUNDING, SHORT, Served, many_events

from gem.data.dataset import read_spec
from gem.data.prepare import default_folder, prepare, provide
from gem.data.toml_text import toml_text
from gem.serving.ranker import Ranker
from gem.serving.request import RequestError, ScoreRequest
from gem.stages.embed import Refresh, embed_users
from gem.train import loop
from gem.train.loop import train
from gem_parallel.testing import run_ranks

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
_OF_USERS = ("data.statistics=[]", "model.user_model={ width = 4 }", "model.stream.target_tokens=0")
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
    "no streams": ("data.streams={}",),
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
    "a model of users": _OF_USERS,
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
            np.testing.assert_allclose(one.scores(ranker, rows), want, atol=ROUNDING, rtol=0)


def test_candidates_do_not_know_of_one_another(served, rng):
    ranker = Ranker.load(served.artefact)
    request = served.maker.request([int(served.rows[0])])
    items = rng.integers(0, 31, 20).tolist()
    asked = request.model_copy(update={"candidates": {"item_id": items}})
    together = ranker.score(asked).scores
    for place, item in enumerate(items):
        alone = ranker.score(asked.model_copy(update={"candidates": {"item_id": [item]}})).scores
        for task, scores in alone.items():
            assert together[task][place] == pytest.approx(scores[0], abs=ROUNDING)
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
            np.testing.assert_allclose(answer.scores[task], scores, atol=ROUNDING, rtol=0)
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
        np.testing.assert_allclose(scores, whole[task], atol=ROUNDING, rtol=0)
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
        np.testing.assert_allclose(found, want, atol=ROUNDING, rtol=0)


def trained_on_rank(world, config, folder, data_root) -> None:
    """A run of this rank and its peers."""

    @contextmanager
    def these_ranks(_):
        yield world

    loop.process_group = these_ranks
    train(config, folder, data_root=data_root)


def on_two_ranks(config, folder, *, data_root) -> None:
    run_ranks(trained_on_rank, 2, config, folder, data_root)


def test_a_run_whose_weights_and_tables_were_sharded_is_exported_whole(tiny, tmp_path, data_root):
    sharded = (
        *("model.embeddings.initial_rows=by_place", "parallel.shard=2", "parallel.table_shard=2"),
        *("parallel.replicate_below=40", "parallel.table_sharding.item=['row_wise']"),
        *("model.embeddings.out_of_range=clamp", "model.dropout=0.0"),
    )
    provide(tiny().data, data_root)
    one = Served(tiny(*SHORT, *sharded), tmp_path, data_root, on_two_ranks)
    ranker = Ranker.load(one.artefact)
    for place in range(0, len(one.rows), 5):
        want = one.p_BA[place : place + 1]
        found = one.scores(ranker, [one.rows[place]])
        np.testing.assert_allclose(found, want, atol=ROUNDING, rtol=0)


def test_a_union_of_streams_is_made_of_what_each_of_them_holds(tiny, tmp_path, data_root):
    provide(tiny().data, data_root)
    copy = tmp_path / "data"
    shutil.copytree(default_folder(tiny().data, data_root), copy)
    spec = read_spec(copy / "dataset.toml").model_dump(mode="json", exclude_defaults=True)
    clicks = next(stream for stream in spec["streams"] if stream["name"] == "clicks")
    del clicks["numbers"]
    # Seen a minute after they happened, as their feedback is.
    clicks["also"] = {"stream": "impressions", "field": "feedback", "values": [2]}
    (copy / "dataset.toml").write_text(toml_text({"format": 1} | spec))
    one = Served(tiny(*SHORT, f'data.folder="{copy}"'), tmp_path, data_root)
    ranker = Ranker.load(one.artefact)
    for place in range(0, len(one.rows), 3):
        want = one.p_BA[place : place + 1]
        found = one.scores(ranker, [one.rows[place]])
        np.testing.assert_allclose(found, want, atol=ROUNDING, rtol=0)
    # Clicked impressions alone fill the stream of clicks, and they count.
    request = one.maker.request([int(one.rows[-1])])
    clicked = {"time_ms": [request.time_ms - 90_000], "item_id": [3], "feedback": [2]}
    skipped = clicked | {"feedback": [1]}
    scores = [
        ranker.score(request.model_copy(update={"history": {"impressions": history}})).scores
        for history in (clicked, skipped)
    ]
    assert scores[0] != scores[1]


_DECLARATION = """
name = "shop"
[examples]
file = "shown.csv"
user = "user"
item = "product"
time = "time"
time_format = "s"
categories = ["device"]
[[examples.labels]]
name = "click"
column = "clicked"
[[streams]]
name = "impressions"
labels = ["click"]
[entities.item]
file = "products.csv"
key = "product"
categories = ["kind"]
[splits]
valid_frac = 0.1
test_frac = 0.1
"""


@pytest.mark.parametrize("hashed", [False, True], ids=["vocabulary", "hashed"])
def test_ids_of_a_log_of_texts_are_its_texts(tiny, tmp_path, rng, hashed):
    shop = tmp_path / "shop"
    shop.mkdir()
    rows = ["time,user,product,device,clicked"]
    for row in range(200):
        user, item = rng.integers(0, 9), rng.integers(0, 12)
        device, clicked = rng.choice(["phone", "desk"]), rng.integers(0, 2)
        rows.append(f"{1_700_000_000 + row},u{user},sku-{item:03},{device},{clicked}")
    (shop / "shown.csv").write_text("\n".join(rows))
    kinds = [f"sku-{item:03},{'ab'[item % 2]}" for item in range(12)]
    (shop / "products.csv").write_text("\n".join(["product,kind", *kinds]))
    hashes = "hash_rows = { item = 50, user = 50 }\n" if hashed else ""
    (shop / "shop.toml").write_text(hashes + _DECLARATION)
    prepare(str(shop / "shop.toml"), tmp_path / "data")
    data = f'data={{ dataset = "shop", folder = "{tmp_path / "data"}" }}'
    one = Served(tiny(*SHORT, data), tmp_path, tmp_path)
    ranker = Ranker.load(one.artefact)
    place = len(one.rows) - 1
    by_number = one.maker.request([int(one.rows[place])])
    history = [line.split(",") for line in rows[1:]]
    seconds, user, item, device, _ = history[int(one.rows[place])]
    time_ms, history = int(seconds) * 1000, history[: int(one.rows[place])]
    own = [row for row in history if row[1] == user]
    answer = ranker.score(
        {
            "user": user,
            "time_ms": time_ms,
            "features": {"device": device},
            "candidates": {"item_id": [item, "sku-999"]},
            "history": {
                "impressions": {
                    "time_ms": [int(row[0]) * 1000 for row in own],
                    "item_id": [row[2] for row in own],
                    "past_click": ["yes" if row[4] == "1" else "no" for row in own],
                }
            },
        }
    )
    assert by_number.time_ms == time_ms
    np.testing.assert_allclose(answer.scores["click"][0], one.p_BA[place][0], atol=ROUNDING)
    assert answer.unknown == ({} if hashed else {"candidates.item_id": 1})


def test_cached_embeddings_come_with_the_request(tiny, tmp_path, data_root):
    upstream = tiny(*SHORT, *_OF_USERS)
    train(upstream, tmp_path / "upstream", data_root=data_root)
    refresh = Refresh(every_hours=0.01)
    embedded = embed_users(tmp_path / "upstream", tmp_path / "users", refresh, data_root=data_root)
    cached = f'data.user_embeddings.cached.folder="{tmp_path / "users"}"'
    one = Served(tiny(*SHORT, cached), tmp_path, data_root)
    assert str(tmp_path) not in (one.artefact / "artefact.json").read_text()
    ranker = Ranker.load(one.artefact)
    known = 0
    for place in range(0, len(one.rows), 3):
        request = one.maker.request([int(one.rows[place])])
        known += len(request.vectors)
        answer = ranker.score(request)
        found = [scores[0] for scores in answer.scores.values()]
        np.testing.assert_allclose(found, one.p_BA[place], atol=ROUNDING, rtol=0)
        assert ("vectors.cached" in answer.missing) == (not request.vectors)
    assert known > 5
    # One of another model is refused, one of the future is not read, one of another width neither.
    vector = {"vector": [0.5] * 4, "fingerprint": embedded.fingerprint, "valid_from_ms": 0}
    asked = request.model_dump() | {"vectors": {"cached": vector}}
    assert ranker.score(asked).missing == ()
    late = {**vector, "valid_from_ms": request.time_ms}
    assert ranker.score(asked | {"vectors": {"cached": late}}).missing == ("vectors.cached",)
    for changes, status, said in (
        ({"fingerprint": "0" * 64}, 409, f"must be {embedded.fingerprint}"),
        ({"vector": [0.5] * 3}, 422, "must have 4 numbers; got 3"),
        ({"vector": [0.5, 1e39, 0.5, 0.5]}, 422, r"vector\[1\] must be finite in float32; got 1e"),
    ):
        with pytest.raises(RequestError, match=said) as fault:
            ranker.score(asked | {"vectors": {"cached": {**vector, **changes}}})
        assert fault.value.status == status


def test_threads_may_share_a_ranker(served):
    ranker = Ranker.load(served.artefact)
    requests = [served.maker.request([int(row)]) for row in served.rows[:40:2]]
    want = [ranker.score(request) for request in requests]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ranker.score, requests * 3)) == want * 3


def test_threads_and_torch_are_as_they_were(served):
    threads = torch.get_num_threads()
    Ranker.load(served.artefact)
    assert torch.get_num_threads() == threads
    Ranker.load(served.artefact, threads=2)
    assert torch.get_num_threads() == 2
