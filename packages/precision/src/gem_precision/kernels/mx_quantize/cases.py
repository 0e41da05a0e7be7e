"""Shapes on which ``mx_quantize`` is tested and timed; imports no torch."""

from dataclasses import dataclass
from typing import Literal

from gem_precision.contract import MxElement


@dataclass(frozen=True, slots=True)
class MxCase:
    """A matrix and its blocks.

    Attributes:
        name: what it stands for.
        rows: of the matrix.
        width: elements of a row.
        along: what is asked for: ``"rows"``, ``"columns"``, ``"both"``, or ``"square"``.
        element: format of an element.
        device: ``"cpu"`` for a case that a small machine runs in milliseconds, else ``"cuda"``.
    """

    name: str
    rows: int
    width: int
    along: Literal["rows", "columns", "both", "square"] = "rows"
    element: MxElement = "e4m3"
    device: str = "cuda"


# Activations of a step at the widths of an MLP, for the forward pass alone and for both passes;
# weights; gradients; and ragged edges.
CASES: tuple[MxCase, ...] = (
    MxCase("activations_2048", 65_536, 2_048),
    MxCase("activations_2048_columns", 65_536, 2_048, along="columns"),
    MxCase("activations_2048_both", 65_536, 2_048, along="both"),
    MxCase("activations_2048_square", 65_536, 2_048, along="square"),
    MxCase("activations_4096_both", 262_144, 4_096, along="both"),
    MxCase("gradients_2048_both", 65_536, 2_048, along="both", element="e5m2"),
    MxCase("weights_4096_square", 4_096, 4_096, along="square"),
    MxCase("small", 65, 100, along="both", device="cpu"),
    MxCase("small_square", 65, 100, along="square", device="cpu"),
)
