"""Shapes of real attention calls, from which every operator's ``cases.py`` is made; no torch.

They come from three places: the published GDPA benchmark (batch 1152, 4 heads of 128, a mean fill
of one half), the published block-attention benchmark, and histories of a small public log, as the
MovieLens recipe reads them on a CPU.
"""

from dataclasses import dataclass, replace

from gem_jagged.workloads import uniform_lengths


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A named attention call.

    Attributes:
        name: what it stands for.
        q_lengths: queries of each sequence.
        k_lengths: keys of each sequence; None for self-attention.
        heads: query heads.
        kv_heads: key/value heads.
        head_width: width of queries, keys and values.
        window: keys visible left and right; None for all.
        device: ``"cpu"`` for a case that a small machine runs in a fraction of a second,
            ``"cuda"`` for one that only a GPU should.
    """

    name: str
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...] | None = None
    heads: int = 4
    kv_heads: int = 4
    head_width: int = 128
    window: tuple[int | None, int | None] = (None, None)
    device: str = "cuda"

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        return self.q_lengths if self.k_lengths is None else self.k_lengths


# What a small machine computes in a fraction of a second.
_SMALL = AttentionCase("", (), heads=2, kv_heads=2, head_width=8, device="cpu")
# Histories of a small public log, at the size of the MovieLens recipe's attention.
_HISTORY = AttentionCase(
    "", uniform_lengths(256, 200, fill=0.5, seed=1), head_width=16, device="cpu"
)

# Small enough for tests, and what breaks kernels.
SELF_EDGES: tuple[AttentionCase, ...] = (
    replace(_SMALL, name="nothing_empty", q_lengths=(3, 5, 2)),
    replace(_SMALL, name="zero_and_one_token", q_lengths=(1, 0, 1), head_width=32),
    replace(
        _SMALL,
        name="fewer_tokens_than_sequences",
        q_lengths=(1, 0, 0, 0, 1, 0, 0, 0),
        heads=4,
        kv_heads=2,
    ),
    replace(_SMALL, name="all_empty", q_lengths=(0, 0, 0)),
    replace(_SMALL, name="batch_of_0", q_lengths=()),
    replace(_SMALL, name="giant_among_dwarfs", q_lengths=(1, 2, 131, 0, 1), head_width=24),
    replace(_SMALL, name="width_above_length", q_lengths=(40,), head_width=128),
    replace(_SMALL, name="width_96", q_lengths=(7, 31, 13), head_width=96),
)
CROSS_EDGES: tuple[AttentionCase, ...] = (
    replace(_SMALL, name="more_keys", q_lengths=(3, 1, 4), k_lengths=(7, 5, 4)),
    replace(_SMALL, name="more_queries", q_lengths=(7, 5, 4), k_lengths=(3, 1, 4)),
    replace(_SMALL, name="no_keys_or_no_queries", q_lengths=(3, 0, 2, 0), k_lengths=(0, 4, 2, 0)),
    replace(_SMALL, name="grouped_heads", q_lengths=(5, 2), k_lengths=(3, 9), heads=6, kv_heads=2),
)
SELF_WORK: tuple[AttentionCase, ...] = (
    replace(_HISTORY, name="history_200"),
    AttentionCase("self_512_fill_1", uniform_lengths(1152, 512, fill=1.0)),
    AttentionCase("self_512_fill_.5", uniform_lengths(1152, 512, fill=0.5)),
    AttentionCase("self_2048_fill_.5", uniform_lengths(1152, 2048, fill=0.5)),
    AttentionCase("self_2048_fill_1", uniform_lengths(512, 2048, fill=1.0)),
)
WINDOW_WORK: tuple[AttentionCase, ...] = (
    replace(_HISTORY, name="history_200_window_32", window=(32, 32)),
    replace(
        _SMALL,
        name="history_2048_window_64",
        q_lengths=uniform_lengths(8, 2048, fill=0.5),
        window=(64, 64),
        head_width=16,
    ),
    AttentionCase("self_8192_window_128", uniform_lengths(64, 8192, fill=0.5), window=(128, 128)),
)
CROSS_WORK: tuple[AttentionCase, ...] = (
    replace(_HISTORY, name="history_200_keys_16", k_lengths=(16,) * 256),
    AttentionCase(
        "cross_2048_keys_256",
        uniform_lengths(1152, 2048, fill=0.5),
        uniform_lengths(1152, 256, fill=1.0),
    ),
    AttentionCase(
        "cross_1024_keys_64",
        uniform_lengths(1152, 1024, fill=0.5),
        uniform_lengths(1152, 64, fill=1.0),
    ),
)
POOLED_WORK: tuple[AttentionCase, ...] = (
    replace(
        _HISTORY,
        name="seeds_8_history_200",
        q_lengths=(8,) * 256,
        k_lengths=uniform_lengths(256, 200, fill=0.5),
    ),
    AttentionCase("seeds_32_keys_2048", (32,) * 1152, uniform_lengths(1152, 2048, fill=0.5)),
    AttentionCase("seeds_64_keys_8192", (64,) * 128, uniform_lengths(128, 8192, fill=0.5)),
)
_PUBLISHED = uniform_lengths(1249, 2000, fill=0.7)
BLOCK_WORK: tuple[AttentionCase, ...] = (
    replace(_HISTORY, name="history_200_blocks_64"),
    AttentionCase("blocks_2000_fill_.7", uniform_lengths(1152, 2000, fill=0.7)),
    AttentionCase("blocks_8000_fill_.7", uniform_lengths(768, 8000, fill=0.7)),
    # The published comparison of rotations names its tokens, heads and width, not its lengths.
    AttentionCase(
        "blocks_1735537_tokens", (*_PUBLISHED, 1_735_537 - sum(_PUBLISHED)), heads=3, kv_heads=3
    ),
    AttentionCase("blocks_2048_fill_.5", uniform_lengths(1024, 2048, fill=0.5)),
    # As many columns in narrower heads: twice the exponentials for the same bytes.
    AttentionCase(
        "blocks_2048_fill_.5_width_64",
        uniform_lengths(1024, 2048, fill=0.5),
        heads=8,
        kv_heads=8,
        head_width=64,
    ),
)
