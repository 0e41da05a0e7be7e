"""Shapes on which ``grouped_linear`` is tested and timed; imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupedCase:
    """Rows of several experts.

    Attributes:
        name: what it stands for.
        rows_of: rows of each expert.
        width: of a row of x.
        columns: of a row of y.
        rest: rows behind the last expert's.
        device: ``"cpu"`` for a case that a small machine runs in milliseconds, else ``"cuda"``.
    """

    name: str
    rows_of: tuple[int, ...]
    width: int
    columns: int
    rest: int = 0
    device: str = "cuda"


# Two experts of one rank on equal rows, eight on unequal ones, one of them idle; and ragged edges.
CASES: tuple[GroupedCase, ...] = (
    GroupedCase("two_1024", (32_768, 32_768), 1_024, 1_024),
    GroupedCase("two_2048", (32_768, 32_768), 2_048, 2_048),
    GroupedCase("eight_uneven", (31, 0, 20_011, 9_000, 8_193, 12_345, 4_096, 11_860), 1_024, 2_048),
    GroupedCase("small", (0, 1, 31, 33), 40, 24, rest=3, device="cpu"),
)
