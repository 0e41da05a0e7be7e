"""Shapes on which ``quantized_linear`` is tested and timed; imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearCase:
    """A linear map.

    Attributes:
        name: what it stands for.
        rows: of x.
        width: of a row of x.
        columns: of a row of y.
        device: ``"cpu"`` for a case that a small machine runs in milliseconds, else ``"cuda"``.
    """

    name: str
    rows: int
    width: int
    columns: int
    device: str = "cuda"


# Square maps around the size from which 8 bits pay, the two shapes of a wide MLP, and a ragged one.
CASES: tuple[LinearCase, ...] = (
    LinearCase("512", 65_536, 512, 512),
    LinearCase("1024", 65_536, 1_024, 1_024),
    LinearCase("2048", 65_536, 2_048, 2_048),
    LinearCase("4096", 65_536, 4_096, 4_096),
    LinearCase("1024_to_4096", 65_536, 1_024, 4_096),
    LinearCase("4096_to_1024", 65_536, 4_096, 1_024),
    LinearCase("2048_long", 262_144, 2_048, 2_048),
    LinearCase("small", 65, 200, 130, device="cpu"),
)
