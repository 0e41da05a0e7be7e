"""How NE falls with the cost of a model: a line over the logarithm of FLOPs, with its bands.

    NE(C) = NE_0 - η log(C / C_0)

C is FLOPs of training an example, C_0 that of the first rung. The line is fitted by least squares
to one NE a rung; its bands are Student's, with as many degrees of freedom as rungs less two, so
they speak of how far rungs lie off the line, whatever the reason. Imports no torch and no numpy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gem_opkit.errors import DataError, refusal


@dataclass(frozen=True, slots=True)
class Law:
    """A fitted line.

    Attributes:
        ne_0: NE at `flops_0`.
        eta: fall of NE when the cost grows e-fold.
        flops_0: FLOPs of the first rung, an example.
        mean_log: mean of log(C / C_0) over the rungs.
        spread: sum of squares of log(C / C_0) around their mean.
        deviation: of a rung from the line, the square root of the residual sum over the degrees
            of freedom.
        rungs: that it was fitted to.
        confidence: of its bands.
    """

    ne_0: float
    eta: float
    flops_0: float
    mean_log: float
    spread: float
    deviation: float
    rungs: int
    confidence: float

    @property
    def quantile(self) -> float:
        """Half-width of a band in standard errors."""
        return student_quantile(self.confidence, self.rungs - 2)

    @property
    def eta_interval(self) -> tuple[float, float]:
        """Interval of η."""
        half = self.quantile * self.deviation / math.sqrt(self.spread)
        return self.eta - half, self.eta + half

    def at(self, flops: float) -> float:
        """NE on the line.

        Args:
            flops: of an example.
        """
        return self.ne_0 - self.eta * math.log(flops / self.flops_0)

    def band(self, flops: float) -> tuple[float, float]:
        """Interval of the line itself.

        Args:
            flops: of an example.

        Returns:
            lower and upper end.
        """
        return self._around(flops, 0.0)

    def predicted(self, flops: float) -> tuple[float, float]:
        """Interval of another rung, which lies off the line as these do.

        Args:
            flops: of an example of it.

        Returns:
            lower and upper end.
        """
        return self._around(flops, 1.0)

    def _around(self, flops: float, own: float) -> tuple[float, float]:
        off = math.log(flops / self.flops_0) - self.mean_log
        half = (
            self.quantile
            * self.deviation
            * math.sqrt(own + 1.0 / self.rungs + off * off / self.spread)
        )
        return self.at(flops) - half, self.at(flops) + half


def fit_law(flops: Sequence[float], ne: Sequence[float], *, confidence: float = 0.95) -> Law:
    """Fit the line.

    Args:
        flops: of an example of each rung, above 0; the first is C_0.
        ne: of each rung.
        confidence: of the bands, in (0, 1).

    Returns:
        the line.

    Raises:
        DataError: fewer than three rungs, or all of one cost.
    """
    if len(flops) != len(ne) or len(flops) < 3:
        raise DataError(
            refusal(
                "gem scaling",
                "law",
                must="be fitted to at least 3 rungs, of one NE each",
                got=f"{len(flops)} costs and {len(ne)} NE",
                fix="add rungs to the ladder",
            )
        )
    logs = [math.log(each / flops[0]) for each in flops]
    mean_log, mean_ne = math.fsum(logs) / len(logs), math.fsum(ne) / len(ne)
    spread = math.fsum((x - mean_log) ** 2 for x in logs)
    if spread == 0.0:
        raise DataError(
            refusal(
                "gem scaling",
                "law",
                must="be fitted to rungs of different cost",
                got=f"{flops[0]:g} FLOPs an example for all",
                fix="let the rungs grow",
            )
        )
    pairs = list(zip(logs, ne, strict=True))
    slope = math.fsum((x - mean_log) * (y - mean_ne) for x, y in pairs) / spread
    ne_0 = mean_ne - slope * mean_log
    rest = math.fsum((y - ne_0 - slope * x) ** 2 for x, y in pairs)
    return Law(
        ne_0=ne_0,
        eta=-slope,
        flops_0=flops[0],
        mean_log=mean_log,
        spread=spread,
        deviation=math.sqrt(rest / (len(flops) - 2)),
        rungs=len(flops),
        confidence=confidence,
    )


def student_quantile(confidence: float, freedom: int) -> float:
    """How many standard errors hold a share of Student's distribution, on both sides together.

    Args:
        confidence: the share, in (0, 1).
        freedom: degrees of freedom, at least 1.

    Returns:
        the quantile, to about 1e-9 of itself.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4, inverted
        by halving.
    """
    low, high = 0.0, 1.0
    while _student_share(high, freedom) < confidence:
        high *= 2.0
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (
            (middle, high) if _student_share(middle, freedom) < confidence else (low, middle)
        )
    return (low + high) / 2.0


def _student_share(t: float, freedom: int) -> float:
    """The share within t standard errors of 0."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    if freedom == 1:
        return 2.0 * angle / math.pi
    term = total = cosine if odd else 1.0
    for step in range(2 if odd else 1, freedom - 2, 2):
        term *= step / (step + 1) * cosine * cosine
        total += term
    return 2.0 / math.pi * (angle + sine * total) if odd else sine * total
