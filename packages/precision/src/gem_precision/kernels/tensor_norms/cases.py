"""Sizes on which ``tensor_norms`` is tested and timed; imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NormsCase:
    """Gradients of a model.

    Attributes:
        name: what they stand for.
        shapes: of the tensors.
        half: they come in bf16, else in fp32.
        device: ``"cpu"`` for a case that a small machine runs in milliseconds, else ``"cuda"``.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    half: bool = True
    device: str = "cuda"


# The MLP of a factorisation block beside the small weights of a layer, twice: a third of the dense
# weights of the large recipe.
_LAYERS = ((3840, 4096), (4096, 4096), (4096, 4096), (4096, 24_576), (1536, 512), (96, 128)) * 2
CASES: tuple[NormsCase, ...] = (
    NormsCase("experts", _LAYERS),
    NormsCase("experts_fp32", _LAYERS, half=False),
    NormsCase("small", ((40, 8), (7,), (), (33, 3)), device="cpu"),
    NormsCase("small_fp32", ((40, 8), (0, 4), (33, 3)), half=False, device="cpu"),
)
