"""Base batches are dealt evenly, whole, in their step, and the same way everywhere."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_opkit.errors import ConfigError
from gem_parallel.balance.dealing import deal, deal_snake, deal_sorted, even_out, sums_of
from gem_parallel.balance.imbalance import imbalance, zipf_lengths
from gem_parallel.balance.step import BETWEEN_GROUPS, Dealing, arrange, part_loads, piece_edges
from gem_parallel.balance.work import WorkModel, max_over_mean

ZIPF = zipf_lengths(50_000, alpha=1.2, longest=2048)


def rows_of(found, rank):
    return [row for low, high in found.runs(rank) for row in range(low, high)]


@settings(max_examples=80, deadline=None)
@given(
    works=st.lists(st.integers(0, 10**6), max_size=120),
    ranks=st.integers(1, 9),
    base_batch=st.integers(1, 40),
    parts=st.integers(1, 3),
    group_ranks=st.integers(1, 4),
    variant=st.sampled_from(["off", "local", "within_group", "group", "global"]),
)
def test_every_row_is_dealt_once(works, ranks, base_batch, parts, group_ranks, variant):
    """Also with no rows, fewer rows than ranks, work of 0, and a last base batch that is short."""
    work_B = np.asarray(works, np.int64)
    dealing = Dealing(variant, base_batch, parts=parts, group_ranks=group_ranks)
    found = arrange(work_B, ranks, dealing)
    held = [rows_of(found, rank) for rank in range(ranks)]
    assert sorted(itertools.chain(*held)) == list(range(len(works)))
    # Ranks have equally many base batches, whose lengths differ by at most one.
    each = np.diff(found.edges_N1)
    assert each.max() <= base_batch
    assert each.max() - each.min() <= 1
    assert len({len(pieces) for pieces in found.pieces}) == 1
    assert found.after_W.tolist() == [int(work_B[rows].sum()) for rows in held]
    plain = [work_B[len(works) * r // ranks : len(works) * (r + 1) // ranks] for r in range(ranks)]
    assert found.before_W.tolist() == [int(rows.sum()) for rows in plain]
    if variant in ("off", "local"):
        assert [sorted(rows) for rows in held] == [
            list(range(len(works) * r // ranks, len(works) * (r + 1) // ranks))
            for r in range(ranks)
        ]
    for rank in range(ranks):
        loads = part_loads(work_B, found.runs(rank), parts)
        cut = [len(held[rank]) * part // parts for part in range(parts + 1)]
        assert loads.tolist() == [
            int(work_B[held[rank][a:b]].sum()) for a, b in itertools.pairwise(cut)
        ]


def best(work_N, holders):
    """The least that the heaviest holder can have, with equally many pieces each: all are tried."""
    each = len(work_N) // holders
    if holders == 1:
        return int(work_N.sum())
    least = None
    for own in itertools.combinations(range(len(work_N)), each):
        rest = np.delete(work_N, own)
        heaviest = max(int(work_N[list(own)].sum()), best(rest, holders - 1))
        least = heaviest if least is None else min(least, heaviest)
    return least


@pytest.mark.parametrize(("holders", "each"), [(2, 2), (2, 4), (3, 2)])
def test_dealing_is_near_the_best_there_is(holders, each, rng):
    ratios = []
    for _ in range(25):
        work_N = np.sort(rng.integers(1, 10_000, holders * each))
        rng.shuffle(work_N)
        wanted = best(work_N, holders)
        found = sums_of(work_N, deal(work_N, holders, until=0.0), holders).max()
        assert wanted <= found
        ratios.append(found / wanted)
    assert np.mean(ratios) < 1.01
    assert max(ratios) < 1.10


def test_ways_of_dealing_by_hand():
    work_N = np.array([10, 4, 3, 3, 3, 2])
    assert deal_snake(work_N, 2).tolist() == [0, 1, 1, 0, 0, 1]  # 10 | 4 3 | 3 3 | 2
    # The 3 of the last round goes to the one that has less.
    assert deal_sorted(work_N, 2).tolist() == [0, 1, 1, 0, 1, 0]
    uneven = np.array([0, 1, 0, 1, 0, 1])
    weights = np.array([9, 1, 8, 2, 7, 3])  # 24 against 6
    assert sums_of(weights, even_out(weights, uneven, 2, until=0.0), 2).tolist() == [16, 14]
    assert even_out(weights, uneven, 2, until=1.0).tolist() == uneven.tolist()


def test_swaps_never_make_it_worse_and_snake_is_the_least_even(rng):
    ratios = {"snake": [], "sorted": [], "swapped": []}
    for _ in range(20):
        work_N = (rng.pareto(1.5, 64) * 1000).astype(np.int64)
        snake, sorted_ = (way(work_N, 8) for way in (deal_snake, deal_sorted))
        swapped = even_out(work_N, sorted_, 8)
        for name, dealt in (("snake", snake), ("sorted", sorted_), ("swapped", swapped)):
            assert np.bincount(dealt).tolist() == [8] * 8
            ratios[name].append(max_over_mean(sums_of(work_N, dealt, 8)))
        assert ratios["swapped"][-1] <= ratios["sorted"][-1]
    means = {name: np.mean(values) for name, values in ratios.items()}
    assert means["swapped"] <= means["sorted"] < means["snake"]


@pytest.mark.parametrize(
    ("ranks", "kind", "limit"),
    [(2, "linear", 1.02), (2, "quadratic", 1.02), (8, "linear", 1.02), (8, "quadratic", 1.03)],
)
def test_zipf_lengths_come_out_even(ranks, kind, limit):
    assert imbalance(ranks, 128, ZIPF, kind) < limit
    assert imbalance(ranks, 128, ZIPF, kind, variant="off") > limit
    assert imbalance(ranks, 128, ZIPF, kind, variant="local") == imbalance(
        ranks, 128, ZIPF, kind, variant="off"
    )


def test_groups_exchange_little_and_still_come_near(rng):
    work_B = np.square(rng.choice(ZIPF, 16 * 1024)).astype(np.int64)
    found = arrange(work_B, 16, Dealing("group", 128, group_ranks=4))
    anywhere = arrange(work_B, 16, Dealing("global", 128))
    assert max_over_mean(found.after_W) <= 1.0 + BETWEEN_GROUPS < max_over_mean(found.before_W)
    assert 0 < found.moved_between_groups < 0.25 * anywhere.moved
    inside = arrange(work_B, 16, Dealing("within_group", 128, group_ranks=4))
    assert inside.moved_between_groups == 0
    for first in range(0, 16, 4):
        group = inside.after_W[first : first + 4]
        assert group.sum() == inside.before_W[first : first + 4].sum()
        assert max_over_mean(group) < 1.01
    alone = arrange(work_B, 16, Dealing("group", 128, group_ranks=16))
    assert alone.moved_between_groups == 0
    # A group at the end may be smaller.
    uneven = arrange(work_B, 16, Dealing("within_group", 128, group_ranks=6))
    assert uneven.after_W[12:].sum() == uneven.before_W[12:].sum()
    assert alone.after_W.tolist() == anywhere.after_W.tolist()


def test_one_huge_row_bounds_what_dealing_can_do():
    work_B = np.ones(64, np.int64)
    work_B[17] = 1000
    found = arrange(work_B, 4, Dealing("global", 4))
    mean = work_B.sum() / 4
    assert max_over_mean(found.after_W) == pytest.approx(1015 / mean)  # it, and 15 others
    assert max_over_mean(found.after_W) >= 1000 / mean


def test_no_work_and_no_rows_are_even():
    for rows in (0, 40):
        found = arrange(np.zeros(rows, np.int64), 4, Dealing("global", 4))
        assert max_over_mean(found.after_W) == 1.0
    assert arrange(np.zeros(0, np.int64), 4, Dealing("global", 4)).runs(2) == []


def test_edges_by_hand():
    assert piece_edges(10, 2, Dealing("global", 3)).tolist() == [0, 2, 5, 7, 10]
    assert piece_edges(3, 4, Dealing("global", 128)).tolist() == [0, 0, 1, 2, 3]
    assert np.diff(piece_edges(8192, 8, Dealing("global", 128))).tolist() == [128] * 64
    # Nothing to deal: one base batch a rank stays where it is.
    same = arrange(np.array([9, 9, 1, 1]), 2, Dealing("global", 2))
    assert [rows_of(same, rank) for rank in range(2)] == [[0, 1], [2, 3]]


def test_micro_batches_come_out_even():
    work_B = np.repeat([8, 8, 1, 1], 4)
    dealing = Dealing("local", 4, parts=2)
    found = arrange(work_B, 1, dealing)
    assert part_loads(work_B, [(0, 16)], 2).tolist() == [64, 8]
    assert part_loads(work_B, found.runs(0), 2).tolist() == [36, 36]
    assert found.runs(0) == [(0, 4), (8, 12), (4, 8), (12, 16)]


def test_work_model():
    model = WorkModel.from_counts(5, {"a": [0, 2, 4], "b": [0, 1, 4, 9]})
    lengths = {"a": np.array([0, 1, 9]), "b": np.array([3, 0, 2])}
    assert model.of(lengths).tolist() == [14, 7, 13]  # nine events count as two, the last
    assert model.unit == 1.0
    big = WorkModel.from_counts(2**60, {"a": [0, 2**61]})
    assert big.of({"a": np.array([0, 1])}).max() < 2**25
    exact = big.of({"a": np.array([0, 1])}) * big.unit
    assert exact.tolist() == pytest.approx([2**60, 2**60 + 2**61], rel=1e-6)
    assert WorkModel.from_counts(0, {}).of({"a": np.array([3, 4])}).tolist() == [0, 0]
    assert WorkModel.of_kind("quadratic", 3).of({"events": np.arange(4)}).tolist() == [0, 1, 4, 9]


def test_expected_imbalance_is_that_of_drawn_steps():
    """Two ranks with one row each of lengths 1 or 3: even half of the time, else 3 against 1."""
    found = imbalance(2, 1, [1, 3], "linear", examples=1)
    assert found == pytest.approx(0.5 * 1.0 + 0.5 * 1.5, abs=0.15)
    assert imbalance(8, 128, [7], "quadratic") == 1.0
    given = imbalance(8, 128, ZIPF, ZIPF.astype(float) ** 2)
    assert given == pytest.approx(imbalance(8, 128, ZIPF, "quadratic"), abs=1e-4)
    assert imbalance(8, 512, ZIPF, "linear") > imbalance(8, 128, ZIPF, "linear")


def test_zipf_lengths_follow_their_law():
    assert (ZIPF.min(), ZIPF.max()) == (1, 2048)
    weights = np.arange(1, 2049) ** -1.2
    assert (ZIPF == 1).mean() == pytest.approx(weights[0] / weights.sum(), rel=1e-3)
    assert ZIPF.mean() == pytest.approx(
        (weights * np.arange(1, 2049)).sum() / weights.sum(), rel=0.01
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Dealing("global", 0), "Dealing: base_batch must be > 0; got 0; raise it"),
        (lambda: WorkModel.from_counts(-1, {}), "WorkModel: counts must be at least 0; got -1"),
        (lambda: WorkModel.from_counts(0, {"a": []}), "must have the work of at least"),
        (lambda: imbalance(2, 4, [], "linear"), "must be above 0; got 2, 1024 and 0 lengths"),
        (
            lambda: imbalance(2, 4, [1, 2], np.array([1.0])),
            "one number of at least 0 for each of 2",
        ),
        (lambda: imbalance(2, 4, [1], WorkModel.from_counts(0, {})), "a model of one stream"),
    ],
)
def test_refusals(call, text):
    with pytest.raises(ConfigError, match=text):
        call()
