"""What each direction of growth takes off NE, alone and together with the others. Torch-free."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True, slots=True)
class Gain:
    """From one rung of a ladder to another, means over seeds.

    Attributes:
        ladder: name.
        first: rung.
        last: rung.
        cost: factor of FLOPs of training an example.
        fall: of NE.
        error: standard error of the fall, from the differences of the seeds; None of one seed.
    """

    ladder: str
    first: str
    last: str
    cost: float
    fall: float
    error: float | None

    @property
    def eta(self) -> float | None:
        """Fall of NE when the cost grows e-fold; None where the cost does not grow."""
        return None if self.cost <= 1.0 else self.fall / math.log(self.cost)


@dataclass(frozen=True, slots=True)
class Synergy:
    """All directions grown at once against each of them alone, from the same rung.

    Attributes:
        alone: of every other ladder that begins at that rung, to its last rung.
        together: of the ladder of the law, from that rung to its last.
    """

    alone: tuple[Gain, ...]
    together: Gain

    @property
    def sum_of_falls(self) -> float:
        """Of the directions alone."""
        return math.fsum(gain.fall for gain in self.alone)


def gains(found: Mapping[str, Any], task: str) -> list[Gain]:
    """Compare the first rung of each ladder with its last.

    Args:
        found: content of ``scaling.json``.
        task: whose NE.

    Returns:
        one a ladder of at least two rungs, in the order of the file. A ladder that was cut off
        before any seed had both of them is left out.
    """
    own = {name: _rungs(found, name) for name in dict.fromkeys(r["ladder"] for r in found["rungs"])}
    every = [
        _gain(found, task, name, rungs[0], rungs[-1])
        for name, rungs in own.items()
        if len(rungs) > 1
    ]
    return [gain for gain in every if gain is not None]


def synergy(found: Mapping[str, Any], task: str) -> Synergy | None:
    """Compare growth in all directions with growth in each alone.

    Args:
        found: content of ``scaling.json``.
        task: whose NE.

    Returns:
        None where there is no law, or no other ladder begins at a rung of its ladder.
    """
    law = found["spec"]["law"]
    if law is None:
        return None
    begins = {
        rung["ladder"]: rung["same_as"]["rung"]
        for rung in found["rungs"]
        if rung.get("same_as", {}).get("ladder") == law
        and rung["rung"] == _rungs(found, rung["ladder"])[0]
    }
    starts = {*begins.values()}
    if len(starts) != 1:
        return None
    (start,) = starts
    alone = tuple(gain for gain in gains(found, task) if gain.ladder in begins)
    together = _gain(found, task, law, start, _rungs(found, law)[-1])
    return None if together is None else Synergy(alone, together)


def falling(rungs: Sequence[Mapping[str, Any]]) -> float | None:
    """How much NE still fell while a rung was trained, from the last part but one to the last.

    Args:
        rungs: the seeds of one rung.

    Returns:
        the mean over seeds; None where a rung has no NE of parts of its training.
    """
    parts = [rung.get("ne_while_training") or [] for rung in rungs]
    if any(len(own) < 2 or None in own[-2:] for own in parts):
        return None
    return fmean(own[-2] - own[-1] for own in parts)


def _rungs(found: Mapping[str, Any], ladder: str) -> list[str]:
    return list(dict.fromkeys(r["rung"] for r in found["rungs"] if r["ladder"] == ladder))


def _gain(found: Mapping[str, Any], task: str, ladder: str, first: str, last: str) -> Gain | None:
    low, high = (
        {r["seed"]: r for r in found["rungs"] if (r["ladder"], r["rung"]) == (ladder, name)}
        for name in (first, last)
    )
    both = [seed for seed in low if seed in high]
    if not both:  # cut off
        return None
    falls = [low[seed]["ne"][task] - high[seed]["ne"][task] for seed in both]
    cost = fmean(high[seed]["flops_per_example"] for seed in both) / fmean(
        low[seed]["flops_per_example"] for seed in both
    )
    mean = fmean(falls)
    error = None
    if len(falls) > 1:
        error = math.sqrt(math.fsum((x - mean) ** 2 for x in falls) / (len(falls) - 1) / len(falls))
    return Gain(ladder, first, last, cost, mean, error)
