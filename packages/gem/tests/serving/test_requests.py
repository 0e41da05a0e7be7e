"""What is said of a request that makes no sense, and what an unknown one is worth."""

import json

import numpy as np
import pytest
from served_runs import ROUNDING, many_events

from gem.serving.ranker import Ranker
from gem.serving.request import RequestError, RequestLimits

NOW = 1_800_000_000_000
_HISTORY = {"time_ms": [NOW - 5_000, NOW - 1_000], "item_id": [1, 2], "feedback": ["click", "skip"]}
_GOOD = {
    "user": 3,
    "time_ms": NOW,
    "domain": "feed",
    "features": {"position": 2},
    "candidates": {"item_id": [1, 2, 3]},
    "history": {"impressions": _HISTORY, "clicks": {"time_ms": [NOW - 5_000], "item_id": [1]}},
}


@pytest.fixture(scope="module")
def ranker(served):
    limits = RequestLimits(max_candidates=50, max_events=40)
    return Ranker.load(served.artefact, limits=limits)


def _with(**changes):
    return {**_GOOD, **changes}


def test_a_whole_request_leaves_nothing_open(ranker):
    answer = ranker.score(
        _with(
            history={
                **_GOOD["history"],
                "clicks": {"time_ms": [NOW], "item_id": [1], "seconds_to_click": [3.5]},
            }
        )
    )
    assert (answer.unknown, answer.missing) == ({}, ())
    assert answer.fingerprint == ranker.manifest.fingerprint
    assert {task: len(p) for task, p in answer.scores.items()} == {"click": 3, "conversion": 3}
    assert all(0 < p < 1 for scores in answer.scores.values() for p in scores)


@pytest.mark.parametrize("user", [None, 10**6, -1, "nobody"])
def test_an_unknown_user_is_the_user_without_an_id(ranker, user):
    found, missing = (ranker.score(_with(user=one)) for one in (user, 0))
    assert found.scores == missing.scores
    assert found.unknown == ({} if user is None else {"user": 1})


def test_a_candidate_never_seen_is_the_item_without_an_id(ranker):
    found = ranker.score(_with(candidates={"item_id": [1, 9_999, None, 0]}))
    assert found.unknown == {"candidates.item_id": 1}
    for scores in found.scores.values():
        assert scores[1] == scores[2] == scores[3] != scores[0]


def test_a_candidate_never_seen_may_bring_its_features(ranker):
    plain = ranker.score(_with(candidates={"item_id": [9_999]})).scores
    dear = {"item_id": [9_999], "price": [3.9], "category": [2], "tags": [[1, 2]]}
    assert ranker.score(_with(candidates=dear)).scores != plain
    # Those of the artefact, given once more, change nothing; in place of them others do.
    stored = ranker.score(_with(candidates={"item_id": [1]})).scores
    assert ranker.score(_with(candidates={"item_id": [1], "tags": [[7]]})).scores != stored


def test_an_empty_history_is_normal(ranker):
    empty = {"impressions": {"time_ms": []}, "clicks": {"time_ms": [], "item_id": []}}
    found = ranker.score(_with(history=empty))
    assert found.missing == ()
    absent = ranker.score(_with(history={}))
    assert absent.missing == ("history.impressions", "history.clicks")
    assert found.scores == absent.scores != ranker.score(_GOOD).scores


def test_events_of_the_moment_and_after_are_not_seen(ranker):
    late = {
        "time_ms": [*_HISTORY["time_ms"], NOW, NOW + 5],
        "item_id": [1, 2, 5, 6],
        "feedback": ["click", "skip", "click", "click"],
    }
    clicks = _GOOD["history"]["clicks"]
    found = ranker.score(_with(history={"impressions": late, "clicks": clicks}))
    assert found.scores == ranker.score(_GOOD).scores


def test_the_order_of_events_does_not_matter(ranker):
    turned = {name: values[::-1] for name, values in _HISTORY.items()}
    clicks = _GOOD["history"]["clicks"]
    found = ranker.score(_with(history={"impressions": turned, "clicks": clicks}))
    assert found.scores == ranker.score(_GOOD).scores


def test_a_request_leaves_nothing_behind(ranker, rng):
    before = ranker.score(_GOOD)
    ranker.score(_with(candidates={"item_id": [4], "price": [1.0]}, features={"age_group": 2}))
    ranker.score(_with(user=7, history={"impressions": many_events(rng, 40, NOW)}))
    with pytest.raises(RequestError):
        ranker.score(_with(candidates={"item_id": [1], "price": [1.0]}, domain="nowhere"))
    assert ranker.score(_GOOD) == before


_WRONG = {
    "an unknown key": (_with(usr=1), "usr"),
    "no candidates": ({"user": 1}, "candidates"),
    "no item": (_with(candidates={"category": [1]}), "candidates must have the column 'item_id'"),
    "a misspelt input": (_with(features={"positon": 1}), "did you mean 'position'?"),
    "the user among the features": (_with(features={"user_id": 1}), "features.user_id must be"),
    "a label": (_with(candidates={"item_id": [1], "click": [1]}), "candidates.click must be"),
    "an input twice": (_with(features={"item_id": 1}), "features.item_id must not be"),
    "columns of two lengths": (
        _with(candidates={"item_id": [1, 2], "category": [1]}),
        "candidates must have columns of one length; got {'item_id': 2, 'category': 1}",
    ),
    "an unknown stream": (_with(history={"click": {}}), "did you mean 'clicks'?"),
    "an unknown field": (_with(history={"clicks": {"item": []}}), "history.clicks.item must be"),
    "events without a time": (_with(history={"clicks": {"item_id": [1]}}), "'time_ms'"),
    "a time that is none": (
        _with(history={"clicks": {"time_ms": [None]}}),
        "history.clicks.time_ms[0] must be whole milliseconds",
    ),
    "a time as text": (_with(time_ms="today"), "time_ms"),
    "a time as digits": (_with(time_ms="5"), "time_ms"),
    "a time that is true": (_with(time_ms=True), "time_ms"),
    "a user that is true": (_with(user=True), "user.int"),
    "a user that is a fraction": (_with(user=3.0), "user.int"),
    "an unknown domain": (_with(domain="fed"), "did you mean 'feed'?"),
    "an id that is a fraction": (_with(candidates={"item_id": [1.5]}), "item_id[0] must be an id"),
    "an id that is true": (_with(candidates={"item_id": [True]}), "item_id[0] must be an id"),
    "an id of 80 bits": (_with(candidates={"item_id": [2**79]}), "item_id[0] must fit in 64 bits"),
    "a list where one id is meant": (_with(candidates={"item_id": [[1]]}), "item_id[0] must be"),
    "one id where a list is meant": (
        _with(candidates={"item_id": [1], "tags": [1]}),
        "candidates.tags[0] must be a list of ids",
    ),
    "a number as text": (_with(features={"price": "dear"}), "features.price[0] must be a number"),
    "a number without end": (_with(features={"price": 1e300}), "features.price[0] must be finite"),
    "an embedding that nothing reads": (
        _with(vectors={"u": {"vector": [1.0], "fingerprint": "f", "valid_from_ms": 1}}),
        "vectors.u must be an embedding that the model reads",
    ),
}


@pytest.mark.parametrize(("request_", "said"), _WRONG.values(), ids=_WRONG)
def test_what_makes_no_sense_is_refused_by_name(ranker, request_, said):
    told = set()
    for asked in (request_, json.dumps(request_)):
        with pytest.raises(RequestError) as fault:
            ranker.score(asked)
        told.add(str(fault.value))
        assert said in str(fault.value)
        assert str(fault.value).startswith("request: ")
        assert "\n" not in str(fault.value)
        assert fault.value.status == 422
    assert len(told) == 1, "a mapping and its JSON are refused in the same words"


@pytest.mark.parametrize("body", [b"", b"{", b'{"user": 1,}', b"\xff\xfe", b"nan"])
def test_malformed_json_is_refused_as_such(ranker, body):
    with pytest.raises(RequestError, match="JSON") as fault:
        ranker.score(body)
    assert fault.value.status == 400


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none_are_refused(ranker, word):
    body = json.dumps(_with(features={"price": 1.0})).replace("1.0", word)
    with pytest.raises(RequestError, match=r"features.price\[0\] must be finite"):
        ranker.score(body)


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        (_with(features={"tags": [1] * 1_001}), "features.tags"),
        (_with(candidates={"item_id": [1, 2], "tags": [[], [1] * 1_001]}), "candidates.tags"),
        (_with(candidates={"item_id": [1] * 1_000_000}), "candidates.item_id"),
        (_with(history={"clicks": {"time_ms": [1] * 41}}), "history.clicks.time_ms"),
    ],
    ids=["a value for all", "a value", "a million candidates", "events"],
)
def test_what_is_too_large_is_refused_before_it_is_read(ranker, asked, what):
    with pytest.raises(RequestError, match=what) as fault:
        ranker.score(asked)
    assert fault.value.status == 413


def test_no_candidates_get_no_scores(ranker):
    answer = ranker.score(_with(candidates={"item_id": []}))
    assert answer.scores == {"click": [], "conversion": []}


def test_one_bad_request_does_not_spoil_its_neighbours(ranker):
    good = ranker.parse(_GOOD)
    bad = ranker.parse(_with(domain="nowhere"))
    found = ranker.score_many([good, bad, good])
    assert isinstance(found[1], RequestError)
    for place in (0, 2):
        np.testing.assert_allclose(
            found[place].scores["click"], ranker.score(good).scores["click"], atol=ROUNDING
        )


def test_a_fault_of_the_ranker_in_one_request_is_that_requests_alone(ranker, monkeypatch):
    good = [ranker.parse(_with(candidates={"item_id": [1] * count})) for count in (1, 2, 4)]
    want = [ranker.score(request) for request in good]
    run, read = ranker._run, ranker._reader.read

    def too_much(served):
        if 2 in served.counts:
            raise MemoryError("of a device")
        return run(served)

    def unreadable(request, now):
        if len(request.candidates["item_id"]) == 4:
            raise ValueError("a fault of ours")
        return read(request, now)

    monkeypatch.setattr(ranker, "_run", too_much)
    monkeypatch.setattr(ranker._reader, "read", unreadable)
    found = ranker.score_many(good)
    assert found[0] == want[0]
    assert [type(one) for one in found[1:]] == [MemoryError, ValueError]
    with pytest.raises(MemoryError):
        ranker.score(good[1])
