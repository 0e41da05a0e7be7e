"""The line that is fitted to a ladder, and its bands."""

import math

import numpy as np
import pytest

from gem.scaling.law import fit_law, student_quantile
from gem_opkit.errors import DataError

FLOPS = [1e6, 3e6, 1e7, 3e7]


def test_a_line_is_found_again():
    ne = [0.9 - 0.02 * math.log(c / 1e6) for c in FLOPS]
    law = fit_law(FLOPS, ne)
    assert law.ne_0 == pytest.approx(0.9, abs=1e-12)
    assert law.eta == pytest.approx(0.02, abs=1e-12)
    assert law.at(1e9) == pytest.approx(0.9 - 0.02 * math.log(1e3))
    assert law.predicted(1e9) == pytest.approx((law.at(1e9),) * 2, abs=1e-9)


def test_it_is_the_least_squares_line():
    ne = [0.91, 0.87, 0.86, 0.81]
    slope, intercept = np.polyfit(np.log(np.array(FLOPS) / FLOPS[0]), ne, 1)
    law = fit_law(FLOPS, ne)
    assert law.eta == pytest.approx(-slope)
    assert law.ne_0 == pytest.approx(intercept)


# Tables of Student's distribution, two-sided.
@pytest.mark.parametrize(
    ("confidence", "freedom", "quantile"),
    [
        *((0.95, 1, 12.7062), (0.95, 2, 4.30265), (0.95, 3, 3.18245), (0.95, 4, 2.77645)),
        *((0.90, 5, 2.01505), (0.99, 6, 3.70743), (0.95, 30, 2.04227)),
    ],
)
def test_quantiles_are_those_of_the_tables(confidence, freedom, quantile):
    assert student_quantile(confidence, freedom) == pytest.approx(quantile, rel=1e-5)


def test_bands_hold_as_often_as_they_say():
    """Lines with noise of a known size, drawn a thousand times."""
    draw = np.random.default_rng(0)
    logs = np.log(np.array(FLOPS) / FLOPS[0])
    held = {"line": 0, "rung": 0, "eta": 0}
    for _ in range(1000):
        noise = draw.normal(0, 0.01, 5)
        law = fit_law(FLOPS, list(0.9 - 0.03 * logs + noise[:4]), confidence=0.9)
        low, high = law.band(1e8)
        truth = 0.9 - 0.03 * math.log(100)
        held["line"] += low <= truth <= high
        low, high = law.predicted(1e8)
        held["rung"] += low <= truth + noise[4] <= high
        low, high = law.eta_interval
        held["eta"] += low <= 0.03 <= high
    # Four standard errors of a share of 0.9 in a thousand draws.
    assert all(862 <= count <= 938 for count in held.values()), held


@pytest.mark.parametrize(
    ("flops", "ne"), [([1.0, 2.0], [0.9, 0.8]), ([1.0] * 4, [0.9] * 4), ([1.0, 2.0, 3.0], [0.9])]
)
def test_too_little_is_refused(flops, ne):
    with pytest.raises(DataError, match="gem scaling: law must be fitted to"):
        fit_law(flops, ne)
