"""Log loss, normalised entropy and calibration from five sums.

    NE = mean log loss / entropy of the base rate,   calibration = sum of p / sum of y

NE below 1 beats predicting the base rate. Every known label counts once: training weights do not
enter, so that a metric is that of the log and not of a recipe.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem_opkit.errors import DataError, refusal

# A prediction is clipped to [CLIP, 1 - CLIP] before its logarithm, so one row costs at most 16.1.
CLIP = 1e-7

NO_EXAMPLES = "no labelled examples"
ONE_CLASS = "all labels are equal"
NO_POSITIVES = "no positive labels"


@dataclass(slots=True)
class EntropySums:
    """Sums over labelled examples; two of them add up to those of both parts.

    Attributes:
        examples: number of known labels.
        positives: sum of the labels.
        predictions: sum of the predicted probabilities.
        log_loss: sum of the log losses, in nats.
        fractional: number of labels that are neither 0 nor 1.
    """

    examples: int = 0
    positives: float = 0.0
    predictions: float = 0.0
    log_loss: float = 0.0
    fractional: int = 0

    def update(self, p_B: NDArray[np.float32], label_B: NDArray[np.float32]) -> None:
        """Add examples.

        Args:
            p_B: predicted probabilities, in [0, 1].
            label_B: labels in [0, 1].

        Raises:
            DataError: a prediction or a label is outside [0, 1] or not a number.

        Numerics: float64 sums of each call's rows, added to the totals in call order.
        """
        if p_B.size == 0:
            return
        p = p_B.astype(np.float64)
        y = label_B.astype(np.float64)
        _check_unit_interval("predictions", p)
        _check_unit_interval("labels", y)
        clipped = np.clip(p, CLIP, 1.0 - CLIP)
        loss = -(y * np.log(clipped) + (1.0 - y) * np.log1p(-clipped))
        self.examples += int(p.size)
        self.positives += float(y.sum())
        self.predictions += float(p.sum())
        self.log_loss += float(loss.sum())
        self.fractional += int(np.count_nonzero((y != 0.0) & (y != 1.0)))

    def merge(self, other: "EntropySums") -> None:
        """Add the examples of another part.

        Args:
            other: sums over other examples; left as they are.
        """
        self.examples += other.examples
        self.positives += other.positives
        self.predictions += other.predictions
        self.log_loss += other.log_loss
        self.fractional += other.fractional

    def values(self) -> tuple[dict[str, float | None], dict[str, str]]:
        """The metrics, and why a missing one is missing.

        Returns:
            ``{ne, logloss, calibration}``, each a float or None, and key -> reason for every None.
        """
        found: dict[str, float | None] = {"ne": None, "logloss": None, "calibration": None}
        if self.examples == 0:
            return found, dict.fromkeys(found, NO_EXAMPLES)
        reasons: dict[str, str] = {}
        found["logloss"] = self.log_loss / self.examples
        entropy = binary_entropy(self.positives / self.examples)
        if entropy > 0.0:
            found["ne"] = found["logloss"] / entropy
        else:
            reasons["ne"] = ONE_CLASS
        if self.positives > 0.0:
            found["calibration"] = self.predictions / self.positives
        else:
            reasons["calibration"] = NO_POSITIVES
        return found, reasons

    def to_array(self) -> NDArray[np.float64]:
        """The five sums as one array; exact up to 2^53 examples."""
        sums = (self.examples, self.positives, self.predictions, self.log_loss, self.fractional)
        return np.array(sums, dtype=np.float64)

    @classmethod
    def from_array(cls, sums: NDArray[np.float64]) -> "EntropySums":
        """The sums that ``to_array`` wrote.

        Args:
            sums: five numbers.
        """
        examples, positives, predictions, log_loss, fractional = (float(x) for x in sums)
        return cls(int(examples), positives, predictions, log_loss, int(fractional))


def binary_entropy(rate: float) -> float:
    """Entropy of a coin, in nats.

    Args:
        rate: probability of one side, in [0, 1].

    Returns:
        -(q ln q + (1 - q) ln(1 - q)); 0 at both ends.
    """
    if rate <= 0.0 or rate >= 1.0:
        return 0.0
    return -(rate * math.log(rate) + (1.0 - rate) * math.log1p(-rate))


def _check_unit_interval(name: str, values: NDArray[np.float64]) -> None:
    low, high = float(values.min()), float(values.max())
    # A NaN makes both comparisons false, so it is refused as well.
    if not (low >= 0.0 and high <= 1.0):
        raise DataError(
            refusal(
                "metrics",
                name,
                must="lie in [0, 1]",
                got=f"values from {low} to {high}",
                fix="check the label columns, and whether the training loss is finite",
            )
        )
