"""Shapes on which ``norm_quantize`` is tested and timed; imports no torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class NormQuantizeCase:
    """A matrix whose rows are normalised and quantised in one pass.

    Attributes:
        name: what it stands for.
        rows: of the matrix.
        width: elements of a row.
        kind: what a row is divided by.
        along: ``"rows"``, ``"columns"``, ``"both"`` or ``"square"`` of MXFP8, or ``"block"`` for
            block FP8.
        before: another tensor is added before the norm.
        device: ``"cpu"`` for a case that a small machine runs in milliseconds, else ``"cuda"``.
    """

    name: str
    rows: int
    width: int
    kind: Literal["rms", "layer"] = "rms"
    along: Literal["rows", "columns", "both", "square", "block"] = "rows"
    before: bool = False
    device: str = "cuda"


# Tokens of event streams and the inputs of wide MLPs, for a forward pass alone and for both
# passes; a residual that is added first; and ragged edges.
CASES: tuple[NormQuantizeCase, ...] = (
    NormQuantizeCase("tokens_512", 262_144, 512),
    NormQuantizeCase("tokens_512_both", 262_144, 512, along="both"),
    NormQuantizeCase("tokens_512_block", 262_144, 512, along="block"),
    NormQuantizeCase("rows_2048", 65_536, 2_048),
    NormQuantizeCase("rows_2048_both", 65_536, 2_048, along="both"),
    NormQuantizeCase("rows_2048_square", 65_536, 2_048, along="square"),
    NormQuantizeCase("rows_2048_block_layer", 65_536, 2_048, kind="layer", along="block"),
    NormQuantizeCase("rows_2048_both_residual", 65_536, 2_048, along="both", before=True),
    NormQuantizeCase("small", 65, 100, along="both", device="cpu"),
    NormQuantizeCase("small_block", 65, 200, kind="layer", along="block", device="cpu"),
)
