"""All metrics together: equal digits however the examples are cut, null with a reason, bounded."""

import math
import re
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from gem.train import metrics
from gem.train.auc import NO_EXAMPLES, NO_GROUP, ONE_CLASS, AucState, GroupedAuc
from gem.train.metrics import KEYS, TOO_MANY_ROWS, MetricBlock, MetricStream
from gem.train.normalized_entropy import CLIP, NO_POSITIVES

NAMES = (["click", "conversion"], ["feed", "story", "search"])


def make_rows(seed, rows, *, users=12):
    rng = np.random.default_rng(seed)
    p = rng.beta(0.5, 0.7, (rows, 2)).astype(np.float32)
    p[rng.uniform(size=p.shape) < 0.3] = np.float32(0.25)  # ties
    labels = (rng.uniform(size=(rows, 2)) < p).astype(np.float32)
    mask = np.stack([rng.uniform(size=rows) < 0.9, labels[:, 0] > 0], axis=1)
    domains = rng.integers(0, 2, rows)  # the third one stays empty
    return p, np.where(mask, labels, 0.0), mask, domains, rng.integers(0, users, rows)


def block_of(rows, at=slice(None), names=NAMES):
    block = MetricBlock(*names)
    block.update(*(column[at] for column in rows))
    return block


def moved(block, names=NAMES):
    return MetricBlock.from_bytes(block.to_bytes(), *names)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 300),
    ranks=st.integers(1, 4),
    batches=st.integers(1, 5),
    data=st.data(),
)
def test_ranks_merge_to_equal_digits_in_any_grouping_and_order(seed, rows, ranks, batches, data):
    whole = make_rows(seed, rows)
    order = np.random.default_rng(seed).permutation(rows)
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), min_size=ranks - 1, max_size=ranks - 1)))
    blocks = []
    for low, high in pairwise([0, *cuts, rows]):
        block = MetricBlock(*NAMES)
        for part in np.array_split(order[low:high], batches):
            block.update(*(column[part] for column in whole))
        blocks.append(moved(block))
    while len(blocks) > 1:  # any tree, either side
        pair = data.draw(st.permutations(range(len(blocks))))[:2]
        left, right = (blocks[i] for i in pair)
        blocks = [b for i, b in enumerate(blocks) if i not in pair]
        left.merge(right)
        blocks.append(left)
    assert blocks[0].report() == block_of(whole).report()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), parts=st.integers(1, 4), bins=st.sampled_from([2, 7, 64]))
def test_a_coarse_auc_merges_to_equal_digits_and_keeps_its_bound(seed, parts, bins):
    rng = np.random.default_rng(seed)
    score = rng.uniform(-1, 1, 200).astype(np.float32)
    positive = rng.uniform(size=200) < 0.5
    states = []
    for part in [np.arange(200), *np.array_split(rng.permutation(200), parts)]:
        state = AucState(max_bins=bins)
        for batch in np.array_split(part, 3):
            state.update(score[batch], positive[batch])
        states.append(state)
    whole, first, *others = states
    for other in others:
        first.merge(other)
    assert first.value() == whole.value()
    exact = pairs(score, positive)
    value = whole.value()
    assert whole.keys.size <= bins
    assert abs(Fraction(value.auc) - exact) <= Fraction(value.error_bound)


def pairs(score, positive):
    """The definition in whole numbers: every pair of a positive and a negative, ties as half."""
    up, down = score[positive], score[~positive]
    wins = sum(2 * int((a > down).sum()) + int((a == down).sum()) for a in up)
    return Fraction(wins, 2 * len(up) * len(down))


def test_the_bound_is_reached_where_all_that_was_tied_went_one_way():
    # All scores differ only in bits that 2 bins cannot keep, and the positives are above.
    score = np.nextafter(np.float32(0.5), np.float32(1)) + np.arange(8, dtype=np.float32) * 2**-23
    state = AucState(max_bins=2)
    state.update(score.astype(np.float32), np.arange(8) >= 4)
    value = state.value()
    assert pairs(score, np.arange(8) >= 4) == 1
    assert 0.0 <= value.error_bound - (1.0 - value.auc) <= 2.0**-52


def test_every_metric_equals_its_definition():
    rows = make_rows(7, 400)
    p, labels, mask, domains, user = rows
    report = block_of(rows).report()
    for a, task in enumerate(NAMES[0]):
        for domain in (None, 0, 1):
            here = mask[:, a] & (domains == domain if domain is not None else True)
            found = report[task]
            if domain is not None:
                found = found["domains"][NAMES[1][domain]]
            check_definitions(found, p[here, a], labels[here, a], user[here])


def check_definitions(found, p, y, user):
    exact_p = [Fraction(float(x)) for x in p]
    exact_y = [Fraction(float(x)) for x in y]
    assert found["calibration"] == float(sum(exact_p) / sum(exact_y))
    assert found["auc"] == float(pairs(p, y > 0))
    clipped = [min(max(float(x), CLIP), 1 - CLIP) for x in p]
    losses = [-math.log(q) if t > 0 else -math.log1p(-q) for q, t in zip(clipped, y, strict=True)]
    loss, rate = math.fsum(losses) / len(p), float(sum(exact_y) / len(p))
    assert found["logloss"] == pytest.approx(loss, rel=1e-15)
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
    assert found["ne"] == pytest.approx(loss / entropy, rel=1e-14)
    total = weight = Fraction(0)
    for u in np.unique(user):
        mine = user == u
        if 0 < y[mine].sum() < mine.sum():
            total += int(mine.sum()) * pairs(p[mine], y[mine] > 0)
            weight += int(mine.sum())
    assert found["gauc"] == pytest.approx(float(total / weight), rel=1e-14)
    assert (found["examples"], found["positives"]) == (len(p), int(y.sum()))
    # And an implementation by other people.
    assert found["auc"] == pytest.approx(roc_auc_score(y, p), abs=1e-12)
    assert found["logloss"] == pytest.approx(log_loss(y, np.array(clipped)), rel=1e-12)


@pytest.mark.parametrize(
    ("labels", "reasons"),
    [
        ([], dict.fromkeys(("ne", "auc", "gauc", "logloss", "calibration"), NO_EXAMPLES)),
        (
            [0, 0, 0],
            {"ne": ONE_CLASS, "auc": ONE_CLASS, "gauc": NO_GROUP, "calibration": NO_POSITIVES},
        ),
        ([1, 1, 1], {"ne": ONE_CLASS, "auc": ONE_CLASS, "gauc": NO_GROUP}),
    ],
)
def test_one_class_and_no_samples_are_null_with_a_reason(labels, reasons):
    n = len(labels)
    block = MetricBlock(["click"], ["all"])
    p = np.linspace(0.2, 0.8, n, dtype=np.float32).reshape(n, 1)
    y = np.array(labels, np.float32).reshape(n, 1)
    block.update(p, y, np.ones((n, 1), bool), np.zeros(n, np.int64), np.arange(n) % 2)
    for found in (block.report()["click"], block.report()["click"]["domains"]["all"]):
        assert found["null_reasons"] == reasons
        assert {key for key in KEYS if found[key] is None} == set(reasons)


def test_lifetime_and_window_are_of_their_own_examples():
    rows = make_rows(3, 500)
    stream = MetricStream(*NAMES, window_blocks=2)
    for n, part in enumerate(np.array_split(np.arange(500), 5), start=1):
        stream.current.update(*(column[part] for column in rows))
        stream.close(stream.current)
        seen = np.arange(part[-1] + 1)
        assert stream.lifetime.report() == block_of(rows, seen).report()
        assert stream.window().report() == block_of(rows, seen[-min(n, 2) * 100 :]).report()
    again = MetricStream(*NAMES, window_blocks=2)
    again.load_state(stream.state(stream.current), keep_current=True)
    assert again.lifetime.report() == stream.lifetime.report()
    assert again.window().report() == stream.window().report()


def test_gauc_of_a_log_row_has_a_limit_and_a_reason(monkeypatch):
    rows = make_rows(5, 300)
    block = block_of(rows)
    assert block.report(gauc=False) == block.report()
    monkeypatch.setattr(metrics, "GAUC_LOG_ROWS", 200)
    found = block.report(gauc=False)
    # 0.9 of the rows have a label of the first task, fewer than half one of the second.
    assert (found["click"]["gauc"], found["click"]["null_reasons"]["gauc"]) == (None, TOO_MANY_ROWS)
    assert found["click"]["domains"]["feed"]["null_reasons"]["gauc"] == TOO_MANY_ROWS
    assert found["conversion"] == block.report()["conversion"]
    assert found["click"]["auc"] == block.report()["click"]["auc"]


def test_an_approximate_auc_says_how_near_it_is():
    rng = np.random.default_rng(2)
    n = 300_000  # more distinct scores than there are bins
    p = rng.uniform(size=n).astype(np.float32)
    y = (rng.uniform(size=n) < p).astype(np.float32)
    block = MetricBlock(["click"], ["all"])
    block.update(p[:, None], y[:, None], np.ones((n, 1), bool), np.zeros(n, int), np.arange(n))
    found = block.report(gauc=False)["click"]
    bound = float(re.fullmatch(r"within (\S+): close scores.*", found["notes"]["auc"])[1])
    assert 0 < abs(found["auc"] - roc_auc_score(y, p)) <= bound < 1e-4
    assert found["gauc"] is None


def test_what_is_kept_is_bounded_by_construction():
    """Whatever comes, in however large a call: the bins, the rows that wait, the rows of GAUC."""
    rng = np.random.default_rng(4)
    state, grouped = AucState(max_bins=1000), GroupedAuc(max_rows=2000)
    for rows in (1, 999, 1000, 50_000, 3):
        score = rng.uniform(size=rows).astype(np.float32)
        positive = rng.uniform(size=rows) < 0.5
        state.update(score, positive)
        assert state.keys.size <= 1000
        assert state._waiting_rows < 1000
        assert sum(k.size for k, _ in state._waiting) == state._waiting_rows
        # Everybody who is not signed in is user 0.
        user = np.where(rng.uniform(size=rows) < 0.5, 0, rng.integers(1, 5000, rows))
        grouped.update(user, score, positive, np.zeros(rows, int))
        assert grouped.rows == grouped.to_arrays()["user"].size <= 2000
    # User 0 alone does not fit, and leaves the others in.
    assert grouped.rows > 200
    assert not (grouped.to_arrays()["user"] == 0).any()
    assert 0.0 < grouped.user_fraction < 1.0


def test_metrics_do_little_work_a_step(monkeypatch):
    """Under 1 % of a step is a matter of how much is sorted: at most 3 rows for each that comes."""
    sorted_rows = []
    argsort = np.argsort

    def counted(values, *args, **kwargs):
        sorted_rows.append(len(values))
        return argsort(values, *args, **kwargs)

    monkeypatch.setattr(np, "argsort", counted)
    monkeypatch.setattr(np, "lexsort", None)  # nothing of a step or a log row may need it
    rng = np.random.default_rng(6)
    state, batch = AucState(max_bins=4096), 128
    for step in range(1, 1025):
        before = len(sorted_rows)
        score = rng.uniform(size=batch).astype(np.float32)
        state.update(score, score > 0.5)
        assert (len(sorted_rows) > before) == (step % (4096 // batch) == 0)
    assert 0 < sum(sorted_rows) <= 3 * 1024 * batch
    block = MetricBlock(["click"], ["all"])
    sorted_rows.clear()
    for _ in range(100):
        p = rng.uniform(size=(batch, 1)).astype(np.float32)
        ones, zeros = np.ones((batch, 1), bool), np.zeros(batch, int)
        block.update(p, (p > 0.5).astype(np.float32), ones, zeros, zeros)
    assert sorted_rows == []
    block.report(gauc=False)  # one task, one domain: each row once
    assert sum(sorted_rows) == 100 * batch
