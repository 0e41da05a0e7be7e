"""Shapes on which ``row_norm`` is tested and timed; imports no torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class NormCase:
    """Rows of one width, and what is fused with their norm.

    Attributes:
        name: what it stands for.
        rows: how many.
        width: elements of a row.
        kind: what a row is divided by.
        before: another tensor is added first.
        after: another tensor is added last.
        affine: each column has a gain.
        swish: the norm is the gate of the row itself.
        device: ``"cpu"`` for a case that a small machine runs in milliseconds, else ``"cuda"``.
    """

    name: str
    rows: int
    width: int
    kind: Literal["rms", "layer"] = "rms"
    before: bool = False
    after: bool = False
    affine: bool = False
    swish: bool = False
    device: str = "cuda"


# Tokens of event streams at two model widths, heads of queries and keys, flattened pairs of a
# factorisation block; and the block of attention whose residuals stand around its norm.
CASES: tuple[NormCase, ...] = (
    NormCase("tokens_512", 262_144, 512),
    NormCase("tokens_512_layer", 262_144, 512, kind="layer"),
    NormCase("tokens_512_affine", 262_144, 512, affine=True),
    NormCase("heads_128", 4_194_304, 128),
    NormCase("pairs_3072_layer", 32_768, 3_072, kind="layer"),
    NormCase("residuals_512", 262_144, 512, before=True, after=True),
    NormCase("swish_512", 262_144, 512, swish=True),
    NormCase("small", 256, 64, device="cpu"),
    NormCase("small_residuals", 256, 64, before=True, after=True, affine=True, device="cpu"),
)
