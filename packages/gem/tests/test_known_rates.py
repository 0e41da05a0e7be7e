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

    config = load_recipe(str(BENCHMARKS / "known_rates.toml"))
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


def test_runs_on_the_same_batches_are_compared(world):
    import bench_known_rates as bench

    rng = np.random.default_rng(0)
    losses = 100 * (1 + 0.1 * rng.random((64, 1, 4)))
    base = bench.Run(losses, losses, 64, ("click",), 1, 128, "", 1.0, 0.0, 0.0, "cpu")
    more = replace(base, progressive=losses * (1 + 1e-3 * rng.standard_normal((64, 1, 1))))
    same = bench.compare([base], [base], 0, "progressive", 2)
    assert (same["difference_frac"], same["low_95_frac"], same["high_95_frac"]) == (0, 0, 0)
    # An independent interval, of the normal law, for the mean over 64 batches.
    found = bench.compare([more], [base], 0, "progressive", 2)
    own, other = more.progressive[:, 0, 2], losses[:, 0, 2]
    middle, half = own.sum() / other.sum() - 1, 1.96 * (own / other).std() / 8
    assert found["difference_frac"] == pytest.approx(middle, rel=1e-9)
    assert found["high_95_frac"] - middle == pytest.approx(half, rel=0.25)
    assert middle - found["low_95_frac"] == pytest.approx(half, rel=0.25)
    half = bench.compare([more], [base], 0, "second_half", 2)
    assert half["difference_frac"] == pytest.approx(own[32:].sum() / other[32:].sum() - 1)
    short = bench.compare([replace(more, progressive=more.progressive[:9])], [base], 0,
                          "progressive", 2)  # fmt: skip
    assert short["difference_frac"] == pytest.approx(own[:9].sum() / other[:9].sum() - 1)
