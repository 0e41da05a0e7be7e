"""Initial weights as a function of seed, table, row and column alone.

A generator would tie them to the order in which tables, shards and ranks draw. Here every element
is computed from its own place, so any plan on any number of ranks starts with the same table, and
a rank draws only the rows that it holds.

Left out: ``EmbeddingTables``, which draws from torch's generator.
"""

import hashlib
import math

import torch
from torch import Tensor

from gem_embeddings.contract import TableSpec
from gem_embeddings.hashing import mix64
from gem_opkit.errors import ConfigError, refusal

# Elements drawn at a time: the numbers pass through words of 8 bytes, several times their size. On
# an accelerator a small part would take less time than its two dozen launches.
_CHUNK, _CHUNK_ON_DEVICE = 1 << 20, 1 << 24


@torch.no_grad()
def fill_initial(
    out_RE: Tensor, spec: TableSpec, *, seed: int, row_start: int = 0, column_start: int = 0
) -> None:
    """Overwrite a part of a table by its initial weights.

    Uniform within ±sqrt(1 / num_embeddings), or normal with the table's ``init_std``.

    Args:
        out_RE: (rows, columns) of the part, any floating dtype, any device.
        spec: the table.
        seed: 0 <= seed < 2^63.
        row_start: first row of the part.
        column_start: first column of the part.

    Raises:
        ConfigError: a seed out of range.

    Numerics: uniform numbers have 24 bits and are exact, so they are the same on every device.
        Normal ones (Box and Muller) are computed in fp64 and rounded once; a device whose
        logarithm or cosine differs in the last bit of fp64 changes about one in 10^8 of them.
    """
    if not 0 <= seed < 2**63:
        raise ConfigError(
            refusal(
                "fill_initial", "seed", must="be in [0, 2^63)", got=seed, fix="pass another seed"
            )
        )
    rows, columns = out_RE.shape
    if rows == 0 or columns == 0:
        return
    digest = hashlib.blake2b(f"{seed}/{spec.name}".encode(), digest_size=8).digest()
    table_seed = int.from_bytes(digest, "little") >> 1
    device = out_RE.device
    # Two words an element, whether it needs one or two: 2 * column and 2 * column + 1.
    places_E = 2 * torch.arange(column_start, column_start + columns, device=device)
    step = max(1, (_CHUNK if device.type == "cpu" else _CHUNK_ON_DEVICE) // columns)
    for begin in range(0, rows, step):
        end = min(rows, begin + step)
        rows_I = torch.arange(row_start + begin, row_start + end, device=device)
        keys_I1 = mix64(rows_I, seed=table_seed)[:, None]
        # Added to a mixed word, then mixed again: rows do not run into each other's columns.
        first_IE = mix64(keys_I1 + places_E)
        if spec.init_std is None:
            bound = spec.num_embeddings**-0.5
            drawn_IE = _unit(first_IE, bits=24).mul_(2).sub_(1).mul_(bound)
        else:
            second_IE = mix64(keys_I1 + places_E + 1)
            # 1 - u is in (0, 1], so that its logarithm is finite.
            radius_IE = _unit(first_IE, bits=53).neg_().add_(1).log_().mul_(-2).sqrt_()
            angle_IE = _unit(second_IE, bits=53).mul_(2 * math.pi)
            drawn_IE = radius_IE.mul_(angle_IE.cos_()).mul_(spec.init_std)
        # Rounded to fp32 first, so that a row of any dtype is the rounded fp32 row.
        out_RE[begin:end].copy_(drawn_IE.to(torch.float32))


def _unit(words: Tensor, *, bits: int) -> Tensor:
    """The upper bits of words as fp64 in [0, 1)."""
    upper = (words >> (64 - bits)).bitwise_and_((1 << bits) - 1)
    return upper.to(torch.float64).mul_(2.0**-bits)
