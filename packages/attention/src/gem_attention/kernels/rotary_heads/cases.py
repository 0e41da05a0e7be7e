"""Shapes on which ``rotary_heads`` is tested and timed; imports no torch."""

from dataclasses import dataclass

from gem_attention.contract import Rotary


@dataclass(frozen=True, slots=True)
class HeadsCase:
    """Sequences of one length, and the heads of their projection.

    Attributes:
        name: what it stands for.
        sequences: how many.
        length: tokens of each.
        heads: query heads.
        key_heads: key and value heads.
        width: of a head.
        rotary: what turns a head.
        device: ``"cpu"`` for a case that a small machine runs in milliseconds, else ``"cuda"``.
    """

    name: str
    sequences: int
    length: int
    heads: int
    key_heads: int
    width: int
    rotary: Rotary = "position"
    device: str = "cuda"


# A million events as the hybrid model has them, and grouped heads.
CASES: tuple[HeadsCase, ...] = (
    HeadsCase("events_1m", 1024, 1024, 4, 4, 128),
    HeadsCase("events_1m_rote", 1024, 1024, 4, 4, 128, rotary="rote"),
    HeadsCase("events_1m_grouped_64", 1024, 1024, 8, 2, 64),
    HeadsCase("small", 8, 32, 2, 2, 16, device="cpu"),
)
