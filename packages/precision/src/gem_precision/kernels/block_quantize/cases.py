"""Shapes on which ``block_quantize`` is tested and timed; imports no torch."""

from dataclasses import dataclass

from gem_precision.contract import Fp8Block


@dataclass(frozen=True, slots=True)
class BlockCase:
    """A matrix and its blocks.

    Attributes:
        name: what it stands for.
        rows: of the matrix.
        width: elements of a row.
        block: what shares a scale.
        copies: 2 with the transposed elements.
        device: ``"cpu"`` for a case that a small machine runs in milliseconds, else ``"cuda"``.
    """

    name: str
    rows: int
    width: int
    block: Fp8Block = "1x128"
    copies: int = 1
    device: str = "cuda"


# Activations of a step, weights with and without their transposed copy, and ragged edges.
CASES: tuple[BlockCase, ...] = (
    BlockCase("activations_2048", 65_536, 2_048),
    BlockCase("activations_4096", 262_144, 4_096),
    BlockCase("weights_4096", 4_096, 4_096, block="128x128"),
    BlockCase("weights_4096_both", 4_096, 4_096, block="128x128", copies=2),
    BlockCase("small", 65, 200, device="cpu"),
    BlockCase("small_square", 130, 200, block="128x128", copies=2, device="cpu"),
)
