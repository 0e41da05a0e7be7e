"""Examples with known rates, and the comparison of runs on them (packages/gem/benchmarks)."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gem.config import load_recipe
from gem.planning.schema import declared_schema

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
EXAMPLES = 20_000


@pytest.fixture(scope="module")
def world():
    sys.path.insert(0, str(BENCHMARKS))
    import known_rates

    longer = ["data.synthetic.max_backlog_events=12", "data.streams.impressions.max_events=12"]
    config = load_recipe(str(BENCHMARKS / "known_rates.toml"), longer)
    cpu = torch.device("cpu")
    return known_rates.KnownRates(
        config.data.synthetic, declared_schema(config), seed=3, device=cpu
    )


@pytest.fixture(scope="module")
def drawn(world):
    return world.batch(7, EXAMPLES)


def test_labels_come_at_their_rates(drawn):
    labels, known, rates = drawn.batch.labels_BA, drawn.batch.label_mask_BA, drawn.rates_BA
    assert rates[:, 0].mean() == pytest.approx(0.3, abs=0.01)
    assert torch.equal(known[:, 1], labels[:, 0] > 0)
    for task, wanted in ((0, 0.3), (1, 0.2)):
        own, rate = labels[known[:, task], task].double(), rates[known[:, task], task]
        assert rate.mean() == pytest.approx(wanted, abs=0.02)
        # Also where rates are low, and where they are high.
        for part in rate.argsort().chunk(4):
            noise = float((rate[part] * (1 - rate[part])).sum().sqrt()) / len(part)
            assert abs(float(own[part].mean() - rate[part].mean())) < 4 * noise


def test_the_history_tells_what_a_user_prefers(drawn):
    """Of events alone: clicks on the candidate's category raise the rate of the candidate."""
    stream, batch = drawn.batch.streams["impressions"], drawn.batch
    lengths = stream.numbers.lengths
    assert int(lengths.min()) == 1
    assert int(lengths.max()) == 12
    who = torch.repeat_interleave(torch.arange(EXAMPLES), lengths)
    same = stream.ids["category"].values == batch.ids["category"].values[who]
    clicked, skipped = (
        torch.zeros(EXAMPLES).index_add_(
            0, who, (same & (stream.ids["feedback"].values == kind)).float()
        )
        for kind in (2, 1)
    )
    liked = (clicked > 0) & (skipped == 0)
    passed = (skipped > 0) & (clicked == 0)
    rate = drawn.rates_BA[:, 0]
    assert float(rate[liked].mean()) > float(rate[passed].mean()) + 0.05
    gaps = stream.gap_seconds.values
    within = who[1:] == who[:-1]
    assert (gaps[:-1] >= gaps[1:])[within].all()  # oldest first


def test_a_batch_is_that_of_its_number(world, drawn):
    again, other = world.batch(7, EXAMPLES), world.batch(8, EXAMPLES)
    assert torch.equal(again.rates_BA, drawn.rates_BA)
    assert torch.equal(again.batch.labels_BA, drawn.batch.labels_BA)
    items = [one.batch.streams["impressions"].ids["item_id"].values for one in (again, drawn)]
    assert torch.equal(*items)
    assert not torch.equal(other.rates_BA, drawn.rates_BA)


@pytest.fixture
def base(world):
    import known_rates_run

    losses = 100 * (1 + 0.1 * np.random.default_rng(0).random((64, 1, 4)))
    return known_rates_run.Run(losses, losses, (128,) * 64, ("click",), 1, "", 1.0, "cpu")


def test_runs_on_the_same_batches_are_compared(base):
    from known_rates_compare import compare

    rng, losses = np.random.default_rng(1), base.progressive
    more = replace(base, progressive=losses * (1 + 1e-3 * rng.standard_normal((64, 1, 1))))
    same = compare([base], [base], 0, "progressive", 2)
    blocks = same["blocks_low_95_frac"], same["blocks_high_95_frac"]
    assert (same["difference_frac"], *blocks) == (0, 0, 0)
    # One seed says nothing of the next.
    assert same["low_95_frac"] is same["between_seeds_frac"] is None
    # An independent interval, of the normal law, for the mean over 64 batches.
    found = compare([more], [base], 0, "progressive", 2)
    own, other = more.progressive[:, 0, 2], losses[:, 0, 2]
    middle, half = own.sum() / other.sum() - 1, 1.96 * (own / other).std() / 8
    assert found["difference_frac"] == pytest.approx(middle, rel=1e-9)
    assert found["blocks_high_95_frac"] - middle == pytest.approx(half, rel=0.25)
    assert middle - found["blocks_low_95_frac"] == pytest.approx(half, rel=0.25)
    half = compare([more], [base], 0, "second_half", 2)
    assert half["difference_frac"] == pytest.approx(own[32:].sum() / other[32:].sum() - 1)
    assert compare([replace(more, held_out=losses[:0])], [base], 0, "held_out", 2) is None


def test_the_interval_over_seeds_holds_the_chance_that_seeds_draw(base):
    """Two trainings part by chance: the interval of 4 seeds holds 0 in 19 of 20 cases."""
    from known_rates_compare import compare, over_seeds

    # By a table of Student's distribution: 3.182 standard errors for 3 degrees of freedom.
    found = over_seeds([1.0, 2.0, 3.0, 6.0])
    assert found["high_95_frac"] == pytest.approx(3.0 + 3.18245 * np.sqrt(14 / 3) / 2, rel=1e-5)
    rng, held = np.random.default_rng(2), []
    for _ in range(400):
        off = 1e-3 * rng.standard_normal(4)
        runs = [replace(base, seed=n, progressive=base.progressive * (1 + x))
                for n, x in enumerate(off)]  # fmt: skip
        one = over_seeds([float(x) for x in off])
        held.append(one["low_95_frac"] < 0 < one["high_95_frac"])
    assert 0.91 < np.mean(held) < 0.98
    last = compare(runs, [base] * 4, 0, "progressive", 2)
    assert last["difference_frac"] == pytest.approx(one["difference_frac"], abs=1e-12)
    assert last["low_95_frac"] == pytest.approx(one["low_95_frac"], abs=1e-12)


def test_a_row_holds_the_seeds_that_both_sides_have(base):
    from known_rates_compare import row, told
    from known_rates_run import Asked

    asked = Asked(("bf16", "fp8_block"), 3, "recipe", (), (128,) * 64, 0, "cpu", 0.0)
    off = {n: replace(base, seed=n, progressive=base.progressive * (1 + n * 1e-3)) for n in (1, 2)}
    whole = dict.fromkeys((1, 2, 3), base)
    made = row("fp8_block", 0, {"bf16": whole, "fp8_block": off}, asked)
    assert made["seeds"] == [1, 2]
    assert made["progressive"]["of_rates"]["by_seed_frac"] == pytest.approx([1e-3, 2e-3])
    assert "2 seeds" in told(made)
    assert row("fp8_block", 0, {"bf16": whole}, asked) is None
    # Where a seed ended early, the row holds no held-out examples, and says how many it has seen.
    short = replace(base, batches=(128,) * 9, progressive=base.progressive[:9],
                    held_out=base.held_out[:0])  # fmt: skip
    early = row("fp8_block", 0, {"bf16": {1: base, 2: short}, "fp8_block": {1: base, 2: short}},
                asked)  # fmt: skip
    assert early["held_out"] is None
    assert early["examples"] == 9 * 128


def test_half_of_the_examples_and_not_of_the_batches_is_the_second_half(base):
    from bench_known_rates import batches_of

    sizes = batches_of(10_000, 1_000, 100, 1_000)
    assert sizes == (100,) * 10 + (1_000,) * 9
    assert batches_of(999, 10_000, 100, 1_000) == (100,) * 9
    one = replace(base, batches=sizes, progressive=base.progressive[:19])
    assert len(one.of("second_half")) == 5  # those that end beyond 5,000


def test_a_spare_seed_gives_way_where_the_time_will_not_suffice(world):
    import time

    from known_rates_run import Asked, _late

    def late(seconds_left, learned):
        asked = Asked(("bf16",), 1, "", (), (10,) * 10, 0, "cpu", time.time() + seconds_left)
        return _late(asked, (time.time() - 8.0, 20), learned)  # 20 learned 8 seconds ago

    assert not late(9.0, 60)  # 40 in 8 seconds: 40 more take as long
    assert late(7.0, 60)
    assert not late(0.1, 20)
