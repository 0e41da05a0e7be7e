"""Sizes on which ``adam_update`` is tested and timed; imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdamCase:
    """Weights of a model.

    Attributes:
        name: what they stand for.
        shapes: of the weights.
        half: gradients come in bf16, and a bf16 copy of the weights is written.
        device: ``"cpu"`` for a case that a small machine runs in milliseconds, else ``"cuda"``.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    half: bool = False
    device: str = "cuda"


# The MLP of a factorisation block beside the small weights of a layer: a third of the dense weights
# of the large recipe.
_LAYERS = ((3840, 4096), (4096, 4096), (4096, 4096), (4096, 24_576), (1536, 512), (96, 128)) * 2
CASES: tuple[AdamCase, ...] = (
    AdamCase("experts", _LAYERS),
    AdamCase("experts_half", _LAYERS, half=True),
    AdamCase("small", ((40, 8), (7,), (), (33, 3)), device="cpu"),
    AdamCase("small_half", ((40, 8), (7,), (33, 3)), half=True, device="cpu"),
)
