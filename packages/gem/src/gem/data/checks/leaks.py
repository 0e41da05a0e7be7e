"""Inputs that know the answer: how well each column alone predicts a label.

A column is turned into a few codes (quantile bins of a number, the ids themselves, missing apart),
and each row is scored with the label's rate among the rows of its code *in the other half* of the
sample. So an id that is new in every row predicts nothing, and a column that is null, constant or
odd by label shows as well as one that rises with it. Numbers are also ranked as they are.
"""

import math
from dataclasses import dataclass

import numpy as np

from gem.data.checks.report import Grade

SAMPLE_ROWS = 200_000
_BINS = 256
_FEWEST = 10  # of either class; with fewer, chance alone gives a perfect column
_PRIOR_ROWS = 1.0
_ERROR_ABOVE = 0.99
_WARN_ABOVE = 0.95


@dataclass(frozen=True, slots=True)
class Power:
    """How well one column alone tells the classes of a label apart.

    Attributes:
        auc: area under the ROC curve, 0.5 .. 1; the better of the two directions.
        low: its lower bound, two standard errors (Hanley and McNeil 1982) below.
        positives: rows of the sample with label 1.
        negatives: rows with label 0.
        how: in words, what gives the label away; ``{label}`` stands for its name.
    """

    auc: float
    low: float
    positives: int
    negatives: int
    how: str

    @property
    def grade(self) -> Grade | None:
        """What it is worth: error, warning or nothing."""
        if self.low >= _ERROR_ABOVE:
            return "error"
        return "warning" if self.low >= _WARN_ABOVE else None

    @property
    def sureness(self) -> str:
        """The figures, for a person."""
        return (
            f"alone it predicts the label with AUC {self.auc:.4f} (at least {self.low:.4f}) in "
            f"{self.positives + self.negatives:,} rows, {self.positives:,} of them positive"
        )


def sample_of(rows: int) -> np.ndarray:
    """Rows that the test looks at: evenly spread, at most `SAMPLE_ROWS`.

    Args:
        rows: how many there are.

    Returns:
        int64, rising.
    """
    if rows <= SAMPLE_ROWS:
        return np.arange(rows)
    return np.linspace(0, rows - 1, SAMPLE_ROWS).astype(np.int64)


def power(
    values: np.ndarray, filled: np.ndarray | None, label: np.ndarray, *, is_number: bool
) -> Power | None:
    """Test one column against one label.

    Args:
        values: float32 or int64, one a row of the sample.
        filled: which of them were missing; None where none was.
        label: float32 in [0, 1], NaN where unknown.
        is_number: ranked as well, and binned; otherwise every value is a code.

    Returns:
        the power; None where too few rows of a class are known.
    """
    known = ~np.isnan(label)
    positive = label[known] > 0.5
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if min(ones, zeros) < _FEWEST:
        return None
    values = values[known]
    filled = None if filled is None or not filled.any() else filled[known]
    codes = _codes(values, filled, is_number=is_number)
    found = auc(_rates_of_other_half(codes, positive), positive)
    if is_number:
        ranked = auc(values, positive)
        found = max(found, ranked, 1 - ranked)
    low = found - 2 * _standard_error(found, ones, zeros)
    how = _describe(values, filled, positive, label[known])
    return Power(found, max(low, 0.0), ones, zeros, how)


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Area under the ROC curve; a tie counts one half.

    Args:
        scores: one a row.
        positive: bool, one a row; both classes occur.
    """
    _, ranks, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    middle = (ends - counts + ends + 1) / 2  # mean rank of each value, from 1
    ones = int(positive.sum())
    total = middle[ranks][positive].sum() - ones * (ones + 1) / 2
    return float(total / (ones * (len(positive) - ones)))


def _codes(values: np.ndarray, filled: np.ndarray | None, *, is_number: bool) -> np.ndarray:
    """Small integers, equal where the test cannot tell two rows apart; 0 is missing."""
    distinct, codes = np.unique(values, return_inverse=True)
    if is_number and len(distinct) > _BINS:
        edges = np.unique(np.quantile(values, np.linspace(0, 1, _BINS + 1)[1:-1]))
        codes = np.searchsorted(edges, values, side="right")
    codes = codes + 1
    return codes if filled is None else np.where(filled, 0, codes)


def _rates_of_other_half(codes: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """For each row, the rate of its code among the rows of the other half."""
    scores = np.empty(len(codes))
    half = np.arange(len(codes)) % 2
    count = int(codes.max()) + 1
    for mine in (0, 1):
        other = half != mine
        rows = np.bincount(codes[other], minlength=count)
        ones = np.bincount(codes[other], weights=positive[other], minlength=count)
        mean = positive[other].mean()
        rates = (ones + _PRIOR_ROWS * mean) / (rows + _PRIOR_ROWS)
        scores[half == mine] = rates[codes[half == mine]]
    return scores


def _standard_error(area: float, ones: int, zeros: int) -> float:
    above, below = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (ones - 1) * (above - area**2) + (zeros - 1) * (below - area**2)
    return math.sqrt(max(spread, 0.0) / (ones * zeros))


def _describe(
    values: np.ndarray, filled: np.ndarray | None, positive: np.ndarray, label: np.ndarray
) -> str:
    if filled is not None:
        gone = [float(filled[positive == wanted].mean()) for wanted in (True, False)]
        if abs(gone[0] - gone[1]) > 0.9:
            return (
                f"is missing in {gone[0]:.1%} of the positives of {{label}} and {gone[1]:.1%} of "
                f"the others"
            )
    if np.array_equal(values, label):
        return "equals {label}"
    if np.array_equal(values, 1 - label):
        return "is 1 less {label}"
    for wanted, name in ((True, "positives"), (False, "negatives")):
        mine, rest = values[positive == wanted], values[positive != wanted]
        if (mine == mine[0]).all():
            share = float((rest == mine[0]).mean())
            if share < 0.5:
                return (
                    f"is {mine[0]:g} in all {name} of {{label}}, and in {share:.1%} of the others"
                )
    return "tells the positives of {label} from the others"
