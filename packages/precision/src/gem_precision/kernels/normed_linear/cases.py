"""Shapes on which ``normed_linear`` is tested and timed; imports no torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class NormedLinearCase:
    """Tokens, the widths of a projection, and the norm before it.

    Attributes:
        name: what it stands for.
        tokens: rows T.
        width: elements D of a token.
        out_width: elements F of a result.
        kind: what a token is divided by.
        affine: each column has a gain.
        device: ``"cpu"`` for a case that a small machine runs in milliseconds, else ``"cuda"``.
    """

    name: str
    tokens: int
    width: int
    out_width: int
    kind: Literal["rms", "layer"] = "rms"
    affine: bool = False
    device: str = "cuda"


# Queries, keys and values of the events of a batch, at the published size of a product and at that
# of a step of the recipe for one GPU; one result for each column; the published 256 k rows.
CASES: tuple[NormedLinearCase, ...] = (
    NormedLinearCase("events_512_to_1536", 1_048_576, 512, 1_536),
    NormedLinearCase("events_512_to_1536_layer", 1_048_576, 512, 1_536, kind="layer", affine=True),
    NormedLinearCase("rows_512_to_512", 262_144, 512, 512),
    NormedLinearCase("small", 256, 64, 96, device="cpu"),
    NormedLinearCase("small_layer", 256, 64, 96, kind="layer", affine=True, device="cpu"),
)
