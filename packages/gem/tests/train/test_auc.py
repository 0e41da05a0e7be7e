"""AUC and GAUC against counting every pair, scikit-learn, and their own bounds."""

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from gem.train.auc import FRACTIONAL, NO_EXAMPLES, NO_GROUP, ONE_CLASS, AucState, GroupedAuc
from gem.train.metrics import MetricBlock
from gem_opkit.errors import DataError


def auc_of(score, positive, **kwargs):
    state = AucState(**kwargs)
    state.update(np.asarray(score, np.float32), np.asarray(positive, bool))
    return state


def pairs(score, positive):
    """The definition: every pair of a positive and a negative, ties as half, in integers."""
    up = [s for s, y in zip(score, positive, strict=True) if y]
    down = [s for s, y in zip(score, positive, strict=True) if not y]
    wins = sum(2 * (a > b) + (a == b) for a in up for b in down)
    return Fraction(wins, 2 * len(up) * len(down))


def test_equals_counting_every_pair(rng):
    score = rng.integers(0, 12, 80).astype(np.float32) / 16 - 0.25  # negative ones and many ties
    positive = rng.uniform(size=80) < 0.4
    value = auc_of(score, positive).value()
    assert value.auc == float(pairs(score, positive))
    assert value.error_bound == 0.0


@pytest.mark.parametrize("ties", [None, 50])
def test_equals_scikit_learn(rng, ties):
    score = rng.uniform(size=20_000).astype(np.float32)
    if ties:
        score = np.round(score * ties) / np.float32(ties)
    positive = rng.uniform(size=20_000) < score
    expected = roc_auc_score(positive, score)
    assert auc_of(score, positive).value().auc == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("score", "positive", "expected"),
    [
        ([0.1, 0.2, 0.8, 0.9], [0, 0, 1, 1], 1.0),
        ([0.1, 0.2, 0.8, 0.9], [1, 1, 0, 0], 0.0),
        ([0.5, 0.5, 0.5, 0.5], [0, 1, 0, 1], 0.5),
        ([0.5, 0.5, 0.9], [0, 1, 1], 0.75),
        ([-0.0, 0.0], [0, 1], 0.5),
    ],
)
def test_perfect_inverted_constant_and_tied(score, positive, expected):
    assert auc_of(score, positive).value().auc == expected


def test_one_class_and_no_examples_have_no_auc():
    assert auc_of([0.1, 0.9], [1, 1]).value().reason == ONE_CLASS
    assert auc_of([0.1, 0.9], [0, 0]).value().reason == ONE_CLASS
    empty = auc_of([], []).value()
    assert (empty.auc, empty.reason) == (None, NO_EXAMPLES)


def test_more_pairs_than_an_int64_holds():
    # Doubling a state 33 times: 4e10 examples, 4e20 pairs, and the same value as at the start.
    state = auc_of([0.2, 0.4, 0.4, 0.6, 0.8], [0, 1, 0, 0, 1])
    expected = state.value().auc
    for _ in range(33):
        state.merge(AucState.from_arrays(state.to_arrays()))
    assert int(state.positives.sum()) * int(state.negatives.sum()) > 2**63
    # By hand: 0.4 beats one of three and ties with one, 0.8 beats three. No digit is lost.
    assert state.value().auc == expected == 0.75


def test_the_error_bound_holds_and_is_small(rng):
    score = rng.uniform(size=30_000).astype(np.float32)
    positive = rng.uniform(size=30_000) < score
    coarse = auc_of(score, positive, max_bins=256).value()
    exact = auc_of(score, positive).value()
    assert exact.error_bound == 0.0
    assert 0.0 < abs(coarse.auc - exact.auc) <= coarse.error_bound < 0.01


def test_order_and_parts_do_not_matter(rng):
    score = rng.uniform(size=5000).astype(np.float32)
    positive = rng.uniform(size=5000) < 0.2
    whole = auc_of(score, positive, max_bins=300)
    order = rng.permutation(5000)
    merged = AucState(max_bins=300)
    for part in np.array_split(order, [3, 3, 100, 4000]):
        merged.merge(auc_of(score[part], positive[part], max_bins=300))
    assert merged.dropped_bits == whole.to_arrays()["dropped_bits"][0] > 0
    assert merged.value() == whole.value()


def test_memory_stays_bounded(rng):
    # 4M examples, all distinct; what stays is at most 2^14 bins, what is used at most a few MB.
    state = AucState(max_bins=1 << 14)
    tracemalloc.start()
    for _ in range(16):
        score = rng.uniform(size=250_000).astype(np.float32)
        for part in np.array_split(score, 25):
            state.update(part, part > 0.5)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert state.keys.size <= 1 << 14
    assert int(state.positives.sum() + state.negatives.sum()) == 4_000_000
    assert peak_bytes < 12e6
    assert state.value().auc == pytest.approx(1.0, abs=state.value().error_bound)


def test_a_score_that_is_not_finite_is_refused():
    with pytest.raises(DataError, match="scores must be finite; got 1"):
        auc_of([0.1, np.nan], [0, 1])


def gauc_by_hand(user, score, positive):
    total = weight = 0.0
    for u in np.unique(user):
        here = user == u
        if 0 < positive[here].sum() < here.sum():
            total += here.sum() * roc_auc_score(positive[here], score[here])
            weight += here.sum()
    return total / weight


def test_gauc_equals_users_one_by_one(rng):
    user = rng.integers(-5, 60, 3000)
    score = np.round(rng.uniform(size=3000), 1).astype(np.float32)
    positive = rng.uniform(size=3000) < 0.1 + 0.5 * score
    positive[user == 7] = True  # a user of one class does not count
    domain = rng.integers(0, 2, 3000)
    state = GroupedAuc()
    for part in np.array_split(np.arange(3000), 7):
        state.update(user[part], score[part], positive[part], domain[part])
    assert state.value().auc == pytest.approx(gauc_by_hand(user, score, positive), abs=1e-12)
    one = domain == 1
    expected = gauc_by_hand(user[one], score[one], positive[one])
    assert state.value(1).auc == pytest.approx(expected, abs=1e-12)


def test_gauc_without_a_mixed_user_is_null():
    state = GroupedAuc()
    assert state.value().reason == NO_EXAMPLES
    state.update(
        np.array([1, 1, 2]), np.ones(3, np.float32), np.array([True, True, False]), np.zeros(3, int)
    )
    assert (state.value().auc, state.value().reason) == (None, NO_GROUP)


def test_gauc_samples_whole_users_when_rows_do_not_fit(rng):
    user = np.repeat(np.arange(400), 50)
    score = rng.uniform(size=user.size).astype(np.float32)
    positive = rng.uniform(size=user.size) < score
    zeros = np.zeros(user.size, int)
    bounded, parts = GroupedAuc(max_rows=6000), GroupedAuc(max_rows=6000)
    bounded.update(user, score, positive, zeros)
    for part in np.array_split(rng.permutation(user.size), 5):
        other = GroupedAuc(max_rows=6000)
        other.update(user[part], score[part], positive[part], zeros[part])
        parts.merge(other)
    kept = bounded.to_arrays()["user"]
    assert 0 < kept.size <= 6000
    assert set(np.bincount(kept)[np.unique(kept)]) == {50}  # a user is whole or absent
    assert bounded.user_fraction == 0.25
    exact = GroupedAuc()
    exact.update(user, score, positive, zeros)
    assert bounded.value().auc == pytest.approx(exact.value().auc, abs=0.02)
    assert parts.value().auc == bounded.value().auc


def make_rows(rng, rows):
    p = rng.uniform(0.01, 0.99, (rows, 2)).astype(np.float32)
    labels = (rng.uniform(size=(rows, 2)) < p).astype(np.float32)
    mask = np.stack([np.ones(rows, bool), labels[:, 0] > 0], axis=1)  # the second only on a click
    domains = rng.integers(0, 3, rows)
    return p, np.where(mask, labels, 0.0), mask, domains, rng.integers(0, 40, rows)


def test_block_reports_every_task_and_domain(rng):
    rows = make_rows(rng, 2000)
    block = MetricBlock(["click", "conversion"], ["feed", "story", "empty", "rare"])
    block.update(*rows)
    report = block.report()
    p, labels, mask, domains, _ = rows
    assert list(report) == ["click", "conversion"]
    keys = ["ne", "auc", "gauc", "logloss", "calibration", "examples", "positives"]
    assert list(report["click"]) == [*keys, "null_reasons", "domains"]
    assert list(report["click"]["domains"]) == ["feed", "story", "empty", "rare"]
    assert report["conversion"]["examples"] == int(mask[:, 1].sum())
    here = (domains == 1) & mask[:, 1]
    expected = roc_auc_score(labels[here, 1], p[here, 1])
    story = report["conversion"]["domains"]["story"]
    assert story["auc"] == pytest.approx(expected, abs=1e-12)
    assert story["positives"] == int(labels[here, 1].sum())
    rare = report["click"]["domains"]["rare"]
    assert rare["examples"] == 0
    assert set(rare["null_reasons"]) == {"ne", "auc", "gauc", "logloss", "calibration"}
    assert all(rare[key] is None for key in rare["null_reasons"])
    assert "notes" not in report["click"]


def test_blocks_of_ranks_merge_to_the_block_of_all(rng):
    rows = make_rows(rng, 1500)
    names = (["click", "conversion"], ["a", "b", "c"])
    whole, merged = MetricBlock(*names), MetricBlock(*names)
    whole.update(*rows)
    for part in np.array_split(np.arange(1500), [0, 400, 1490]):
        block = MetricBlock(*names)
        block.update(*(column[part] for column in rows))
        merged.merge(MetricBlock.from_bytes(block.to_bytes(), *names))
    expected, got = whole.report(), merged.report()
    for task in names[0]:
        assert got[task] == expected[task]


def test_fractional_labels_have_ne_but_no_auc():
    block = MetricBlock(["watch"], ["all"])
    half = np.full((4, 1), 0.5, np.float32)
    block.update(half, half / 2, np.ones((4, 1), bool), np.zeros(4, int), np.arange(4))
    report = block.report()["watch"]
    assert report["ne"] is not None
    assert report["auc"] is None
    assert report["null_reasons"]["auc"] == FRACTIONAL
