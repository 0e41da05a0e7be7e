"""NE, log loss and calibration against exact arithmetic and scikit-learn."""

import math
from fractions import Fraction

import numpy as np
import pytest
from sklearn.metrics import log_loss

from gem.train.normalized_entropy import CLIP, EntropySums, binary_entropy
from gem_opkit.errors import DataError


def sums_of(p, y):
    sums = EntropySums()
    sums.update(np.asarray(p, np.float32), np.asarray(y, np.float32))
    return sums


def test_values_by_hand():
    # 4 labels, one positive: entropy of 1/4, log losses of .5 and three of .25.
    values, reasons = sums_of([0.5, 0.25, 0.25, 0.25], [1, 0, 0, 0]).values()
    logloss = (math.log(2) + 3 * -math.log(0.75)) / 4
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert values["logloss"] == pytest.approx(logloss, rel=1e-12)
    assert values["ne"] == pytest.approx(logloss / entropy, rel=1e-12)
    assert values["calibration"] == pytest.approx(1.25, rel=1e-12)
    assert reasons == {}


def test_predicting_the_base_rate_has_ne_one():
    y = np.zeros(1000)
    y[:125] = 1  # 0.125 is a float32, so that the prediction is the base rate exactly
    values, _ = sums_of(np.full(1000, 0.125), y).values()
    assert values["ne"] == pytest.approx(1.0, abs=1e-12)
    assert values["calibration"] == pytest.approx(1.0, abs=1e-12)


def test_log_loss_equals_scikit_learn(rng):
    p = rng.uniform(0.01, 0.99, 5000).astype(np.float32)
    y = (rng.uniform(size=5000) < p).astype(np.float32)
    values, _ = sums_of(p, y).values()
    expected = log_loss(y, p.astype(np.float64))
    assert values["logloss"] == pytest.approx(expected, rel=1e-12)


def test_sums_of_a_long_stream_are_exact(rng):
    """Against rational arithmetic: not a bit is lost, of tiny and of large numbers together."""
    sums, exact_p, exact_y, losses = EntropySums(), Fraction(0), Fraction(0), []
    for _ in range(40):
        p = (rng.uniform(size=50) ** 8).astype(np.float32)
        y = (p < 0.5).astype(np.float32)
        sums.update(p, y)
        exact_p += sum((Fraction(float(x)) for x in p), Fraction(0))
        exact_y += sum((Fraction(float(x)) for x in y), Fraction(0))
        clipped = np.clip(p.astype(np.float64), CLIP, 1 - CLIP)
        losses += (-(y * np.log(clipped) + (1.0 - y) * np.log1p(-clipped))).tolist()
    # Only what a probability has below 2^-88 is dropped.
    assert 0 <= exact_p - Fraction(sums.prediction_units, 1 << 88) <= Fraction(2000, 1 << 88)
    assert Fraction(sums.positive_units, 1 << 88) == exact_y
    assert Fraction(sums.log_loss_units, 1 << 88) == sum(map(Fraction, losses))
    assert sums.log_loss == math.fsum(losses)


def test_more_examples_than_a_float_counts():
    sums = sums_of([0.5, 0.25, 0.0], [1, 0, 0])
    expected = sums.values()
    for _ in range(60):
        sums.merge(EntropySums.from_array(sums.to_array()))
    assert sums.examples == 3 * 2**60
    assert sums.values() == expected


def test_sums_of_version_0_1_0_can_be_continued():
    old = np.array([4, 1.0, 1.25, 1.5561, 0], dtype=np.float64)
    sums = EntropySums.from_array(old)
    assert (sums.examples, sums.fractional) == (4, 0)
    assert (sums.positives, sums.predictions, sums.log_loss) == (1.0, 1.25, 1.5561)


def test_certain_and_wrong_costs_the_clip():
    values, _ = sums_of([0.0, 1.0], [1, 0]).values()
    assert values["logloss"] == pytest.approx(-math.log(CLIP), rel=1e-6)


def test_fractional_labels():
    sums = sums_of([0.5, 0.5], [0.25, 0.75])
    values, _ = sums.values()
    assert sums.fractional == 2
    assert values["ne"] == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize(
    ("p", "y", "null"),
    [
        ([], [], {"ne", "logloss", "calibration"}),
        ([0.5, 0.1], [0, 0], {"ne", "calibration"}),
        ([0.5, 0.1], [1, 1], {"ne"}),
    ],
)
def test_undefined_values_are_null_with_a_reason(p, y, null):
    values, reasons = sums_of(p, y).values()
    assert {key for key, value in values.items() if value is None} == null
    assert set(reasons) == null
    assert all(reasons.values())


def test_parts_merge_to_the_whole(rng):
    p = rng.uniform(size=300).astype(np.float32)
    y = (rng.uniform(size=300) < 0.3).astype(np.float32)
    whole, merged = sums_of(p, y), EntropySums()
    for part in np.array_split(np.arange(300), [0, 7, 200, 200]):
        merged.merge(EntropySums.from_array(sums_of(p[part], y[part]).to_array()))
    assert merged == whole


@pytest.mark.parametrize("bad", [math.nan, -0.01, 1.01, math.inf])
def test_a_prediction_outside_the_unit_interval_is_refused(bad):
    with pytest.raises(DataError, match=r"predictions must lie in \[0, 1\]"):
        sums_of([0.5, bad], [0, 1])
    with pytest.raises(DataError, match=r"labels must lie in \[0, 1\]"):
        sums_of([0.5, 0.5], [0, bad])


def test_entropy_of_a_coin():
    assert binary_entropy(0.5) == pytest.approx(math.log(2))
    assert binary_entropy(0.0) == binary_entropy(1.0) == 0.0
