"""Log loss, normalised entropy and calibration from five exact sums.

    NE = mean log loss / entropy of the base rate,   calibration = sum of p / sum of y

NE below 1 beats predicting the base rate. Every known label counts once: training weights do not
enter, so that a metric is that of the log and not of a recipe.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from gem.train.auc import NO_EXAMPLES, ONE_CLASS
from gem_opkit.errors import DataError, refusal

# A prediction is clipped to [CLIP, 1 - CLIP] before its logarithm, so one row costs at most 16.1.
CLIP = 1e-7

NO_POSITIVES = "no positive labels"


# One unit of the exact sums is 2^-88. A log loss is at least 1e-7, so its last bit lies above that
# and nothing is lost; of a probability only what lies below 2^-88 is.
_LIMB_BITS = 31
_FIRST_BITS = 26  # a log loss is below 2^5, so the first limb has 31 bits as well
_LIMBS = 3
_UNIT_BITS = _FIRST_BITS + (_LIMBS - 1) * _LIMB_BITS
_ROWS_A_CALL = 1 << 20
_STORED_BYTES = 32


@dataclass(slots=True)
class EntropySums:
    """Exact sums over labelled examples; two of them add up to those of both parts.

    The three real sums are kept as whole numbers of 2^-88. So the totals, and the last digit of
    every metric, depend on the examples alone: not on their order, nor on how ranks, batches and
    windows cut them.

    Attributes:
        examples: number of known labels.
        fractional: number of labels that are neither 0 nor 1.
        positive_units: sum of the labels, in units of 2^-88.
        prediction_units: sum of the predicted probabilities, likewise.
        log_loss_units: sum of the log losses in nats, likewise.
    """

    examples: int = 0
    fractional: int = 0
    positive_units: int = 0
    prediction_units: int = 0
    log_loss_units: int = 0

    @property
    def positives(self) -> float:
        """Sum of the labels, rounded once."""
        return self.positive_units / (1 << _UNIT_BITS)

    @property
    def predictions(self) -> float:
        """Sum of the predicted probabilities, rounded once."""
        return self.prediction_units / (1 << _UNIT_BITS)

    @property
    def log_loss(self) -> float:
        """Sum of the log losses in nats, rounded once."""
        return self.log_loss_units / (1 << _UNIT_BITS)

    def update(self, p_B: NDArray[np.float32], label_B: NDArray[np.float32]) -> None:
        """Add examples.

        Args:
            p_B: predicted probabilities, in [0, 1].
            label_B: labels in [0, 1].

        Raises:
            DataError: a prediction or a label is outside [0, 1] or not a number.

        Numerics: the log loss of a row is computed in float64; the sums over rows are exact.
        """
        for start in range(0, p_B.size, _ROWS_A_CALL):
            rows = slice(start, start + _ROWS_A_CALL)
            self._update(p_B[rows].astype(np.float64), label_B[rows].astype(np.float64))

    def _update(self, p: NDArray[np.float64], y: NDArray[np.float64]) -> None:
        _check_unit_interval("predictions", p)
        _check_unit_interval("labels", y)
        clipped = np.clip(p, CLIP, 1.0 - CLIP)
        loss = -(y * np.log(clipped) + (1.0 - y) * np.log1p(-clipped))
        positives, predictions, losses = _exact_sums(np.stack([y, p, loss]))
        self.examples += int(p.size)
        self.fractional += int(np.count_nonzero((y != 0.0) & (y != 1.0)))
        self.positive_units += positives
        self.prediction_units += predictions
        self.log_loss_units += losses

    def merge(self, other: "EntropySums") -> None:
        """Add the examples of another part.

        Args:
            other: sums over other examples; left as they are.
        """
        self.examples += other.examples
        self.fractional += other.fractional
        self.positive_units += other.positive_units
        self.prediction_units += other.prediction_units
        self.log_loss_units += other.log_loss_units

    def values(self) -> tuple[dict[str, float | None], dict[str, str]]:
        """The metrics, and why a missing one is missing.

        Returns:
            ``{ne, logloss, calibration}``, each a float or None, and key -> reason for every None.
        """
        found: dict[str, float | None] = {"ne": None, "logloss": None, "calibration": None}
        if self.examples == 0:
            return found, dict.fromkeys(found, NO_EXAMPLES)
        reasons: dict[str, str] = {}
        # A quotient of two integers is rounded once.
        found["logloss"] = self.log_loss_units / (self.examples << _UNIT_BITS)
        entropy = binary_entropy(self.positive_units / (self.examples << _UNIT_BITS))
        if entropy > 0.0:
            found["ne"] = found["logloss"] / entropy
        else:
            reasons["ne"] = ONE_CLASS
        if self.positive_units > 0:
            found["calibration"] = self.prediction_units / self.positive_units
        else:
            reasons["calibration"] = NO_POSITIVES
        return found, reasons

    def to_array(self) -> NDArray[np.uint8]:
        """The five sums as bytes, (5, 32)."""
        sums = (getattr(self, name) for name in self.__slots__)
        stored = b"".join(total.to_bytes(_STORED_BYTES, "little") for total in sums)
        return np.frombuffer(stored, np.uint8).reshape(-1, _STORED_BYTES)

    @classmethod
    def from_array(cls, sums: NDArray) -> "EntropySums":
        """The sums that ``to_array`` wrote.

        Args:
            sums: its bytes; or the five float64 sums in a checkpoint of version 0.1.0.
        """
        if sums.dtype == np.float64:
            examples, positives, predictions, log_loss, fractional = map(Fraction, sums.tolist())
            units = (int(x * (1 << _UNIT_BITS)) for x in (positives, predictions, log_loss))
            return cls(int(examples), int(fractional), *units)
        return cls(*(int.from_bytes(row.tobytes(), "little") for row in sums))


def _exact_sums(values_AB: NDArray[np.float64]) -> list[int]:
    """The sum of each row of numbers in [0, 32), in units of 2^-88.

    Every number is cut into limbs of 31 bits; limbs are summed as int64, which holds the sum of
    2^32 of them. Only what a number has below 2^-88 is dropped, so the order does not matter.
    """
    totals = [0] * len(values_AB)
    rest_AB = np.ldexp(values_AB, _FIRST_BITS)
    for _ in range(_LIMBS):
        limb_AB = np.floor(rest_AB)
        sums = limb_AB.astype(np.int64).sum(axis=1).tolist()
        totals = [(total << _LIMB_BITS) + part for total, part in zip(totals, sums, strict=True)]
        rest_AB = np.ldexp(rest_AB - limb_AB, _LIMB_BITS)
    return totals


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
