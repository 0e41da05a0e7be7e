"""Shapes on which ``gated_residual`` is tested and timed; imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GateCase:
    """Sequences of one width.

    Attributes:
        name: what they stand for.
        batch: sequences; their lengths are drawn evenly from 1 to ``longest``.
        longest: tokens of the longest one that may come.
        width: columns.
        device: ``"cpu"`` for a case that a small machine runs in milliseconds, else ``"cuda"``.
    """

    name: str
    batch: int
    longest: int
    width: int
    device: str = "cuda"


# Histories of the large recipe, short ones, and few that are very long.
CASES: tuple[GateCase, ...] = (
    GateCase("histories_2048", 1024, 2048, 512),
    GateCase("histories_256", 1024, 256, 512),
    GateCase("giants_30000", 16, 30_000, 256),
    GateCase("small", 5, 40, 24, device="cpu"),
)
