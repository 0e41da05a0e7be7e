"""Lengths of real batches, from which every operator's ``cases.py`` is made; imports no torch.

Real lengths come from two places: histories of a small public log, as the MovieLens recipe reads
them, and the event sequences of a large ranking model, uniform with a mean fill of one half.
"""

import random
from dataclasses import dataclass

from gem_opkit.errors import ConfigError, refusal


@dataclass(frozen=True, slots=True)
class PackedCase:
    """A named packed batch.

    Attributes:
        name: what it stands for.
        lengths: tokens of each sequence.
        width: elements of a token.
        device: ``"cpu"`` for a case that a small machine runs in milliseconds, ``"cuda"`` for one
            that only a GPU should.
    """

    name: str
    lengths: tuple[int, ...]
    width: int
    device: str = "cpu"

    @property
    def total_tokens(self) -> int:
        """Number of tokens of all sequences together."""
        return sum(self.lengths)


def uniform_lengths(batch: int, max_length: int, *, fill: float, seed: int = 0) -> tuple[int, ...]:
    """Draw lengths uniformly so that their mean is a given share of the longest.

    Args:
        batch: number of sequences.
        max_length: longest length in tokens.
        fill: wanted mean over ``max_length``, in (0, 1].
        seed: of the draw.

    Returns:
        lengths; in [(2·fill−1)·max, max] for a fill of at least one half, else [0, 2·fill·max].

    Raises:
        ConfigError: a fill outside (0, 1].
    """
    if not 0 < fill <= 1:
        raise ConfigError(
            refusal("uniform_lengths", "fill", must="be in (0, 1]", got=fill, fix="pass a share")
        )
    low, high = max(0.0, 2 * fill - 1), min(1.0, 2 * fill)
    draw = random.Random(seed)
    return tuple(
        draw.randint(round(low * max_length), round(high * max_length)) for _ in range(batch)
    )


def zipf_lengths(
    batch: int, max_length: int, *, alpha: float = 1.2, seed: int = 0
) -> tuple[int, ...]:
    """Draw lengths by Zipf's law: many short sequences, a few very long ones.

    Args:
        batch: number of sequences.
        max_length: longest length in tokens.
        alpha: exponent; a length n is drawn with a chance proportional to n^-alpha.
        seed: of the draw.

    Returns:
        lengths in [1, max_length].
    """
    weights = [n**-alpha for n in range(1, max_length + 1)]
    return tuple(random.Random(seed).choices(range(1, max_length + 1), weights, k=batch))


# Small enough for tests, and what breaks kernels: empty sequences, one token, a giant among
# dwarfs, widths that are not powers of two.
EDGES: tuple[PackedCase, ...] = (
    PackedCase("odd_width", (3, 5, 2), 7),
    PackedCase("first_empty", (0, 4, 3), 4),
    PackedCase("last_empty", (4, 3, 0), 4),
    PackedCase("all_empty", (0, 0, 0), 4),
    PackedCase("batch_of_0", (), 4),
    PackedCase("one_token", (1,), 1),
    PackedCase("giant_among_dwarfs", (1, 2, 67, 0, 1), 24),
)

HISTORIES: tuple[PackedCase, ...] = (
    PackedCase("history_100", uniform_lengths(128, 100, fill=0.7), 32),
    PackedCase("history_100_wide", uniform_lengths(512, 100, fill=0.7), 64),
    PackedCase("events_2048", uniform_lengths(1152, 2048, fill=0.5), 256, "cuda"),
    PackedCase("events_512", uniform_lengths(1152, 512, fill=0.5), 512, "cuda"),
)

# One history among thousands of short ones, in widths from an id to a wide token.
ZIPF: tuple[PackedCase, ...] = (
    PackedCase("zipf_1", zipf_lengths(131072, 4096), 1, "cuda"),
    PackedCase("zipf_64", zipf_lengths(8192, 4096), 64, "cuda"),
    PackedCase("zipf_128", zipf_lengths(4096, 4096), 128, "cuda"),
    PackedCase("zipf_512", zipf_lengths(1024, 4096), 512, "cuda"),
)
