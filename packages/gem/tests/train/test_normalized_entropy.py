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


def test_exact_sums_of_a_long_stream(rng):
    # Sums of float64 parts against exact rational arithmetic: relative error of a few ulp.
    sums, exact = EntropySums(), Fraction(0)
    for _ in range(200):
        p = rng.uniform(size=50).astype(np.float32)
        sums.update(p, (p < 0.5).astype(np.float32))
        exact += sum((Fraction(float(x)) for x in p), Fraction(0))
    assert abs(Fraction(sums.predictions) - exact) / exact < Fraction(1, 10**14)


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
    assert (merged.examples, merged.positives) == (whole.examples, whole.positives)
    assert merged.log_loss == pytest.approx(whole.log_loss, rel=1e-13)


@pytest.mark.parametrize("bad", [math.nan, -0.01, 1.01, math.inf])
def test_a_prediction_outside_the_unit_interval_is_refused(bad):
    with pytest.raises(DataError, match=r"predictions must lie in \[0, 1\]"):
        sums_of([0.5, bad], [0, 1])
    with pytest.raises(DataError, match=r"labels must lie in \[0, 1\]"):
        sums_of([0.5, 0.5], [0, bad])


def test_entropy_of_a_coin():
    assert binary_entropy(0.5) == pytest.approx(math.log(2))
    assert binary_entropy(0.0) == binary_entropy(1.0) == 0.0
