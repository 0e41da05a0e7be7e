"""From raw 64-bit ids to rows, the same on every machine, device and library.

The mix is the finaliser of splitmix64: a bijection of 64-bit words in which every input bit moves
about half of the output bits. It is written in int64 arithmetic, which wraps as unsigned
arithmetic does, because torch has few operators on uint64.

Left out: tables that remember which id owns a row. Here two ids may share a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_opkit.errors import ConfigError, DtypeError, refusal


def _signed(word: int) -> int:
    """Read 64 bits as a signed number."""
    word &= 2**64 - 1
    return word - 2**64 if word >= 2**63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _xor_shifted(word: Tensor, bits: int) -> Tensor:
    # An arithmetic shift copies the sign into the upper bits; the mask makes it a logical one.
    return (word >> bits).bitwise_and_((1 << (64 - bits)) - 1).bitwise_xor_(word)


def mix64(ids: Tensor, *, seed: int = 0) -> Tensor:
    """Mix the bits of ids.

    Args:
        ids: any int64 numbers, negative ones too; other integer dtypes are widened first.
        seed: 0 <= seed < 2^63; another seed gives an unrelated mix.

    Returns:
        int64, one for each id; different ids give different results.

    Raises:
        DtypeError: ids that are not integers.
        ConfigError: a seed out of range.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators" (splitmix64);
        the constants are those of its widely used variant 13.
    """
    _check(ids, seed)
    return _finalised(ids.to(torch.int64) + _start(seed))


def _start(seed: int) -> int:
    return _signed(_GOLDEN * (seed + 1))


def _finalised(word: Tensor) -> Tensor:
    word = _xor_shifted(word, 30).mul_(_FIRST)
    word = _xor_shifted(word, 27).mul_(_SECOND)
    return _xor_shifted(word, 31)


def hash_to_rows(ids: Tensor, num_embeddings: int, *, seed: int = 0) -> Tensor:
    """Hash ids to the rows of a table.

        row = (mix64(id) as an unsigned word, without its lowest bit) mod num_embeddings

    Args:
        ids: any int64 numbers, negative ones too; other integer dtypes are widened first.
        num_embeddings: rows of the table, at least 1.
        seed: as in ``mix64``.

    Returns:
        rows, int64, in [0, num_embeddings), of the shape of ``ids``.

    Raises:
        DtypeError: ids that are not integers.
        ConfigError: a seed or a number of rows out of range.
    """
    if num_embeddings < 1:
        raise ConfigError(
            refusal(
                "hash_to_rows",
                "num_embeddings",
                must="be at least 1",
                got=num_embeddings,
                fix="a table has rows",
            )
        )
    return _positive(mix64(ids, seed=seed)).remainder_(num_embeddings)


def hash_parts_to_rows(
    ids_I: Tensor, sizes: Sequence[int], rows: Sequence[int], seeds: Sequence[int]
) -> Tensor:
    """Hash the ids of several features at once, each as ``hash_to_rows`` does.

    Args:
        ids_I: int64, feature after feature; overwritten.
        sizes: ids of each feature.
        rows: of the table of each feature.
        seeds: of the table of each feature.

    Returns:
        rows, int64, feature after feature.

    Cost: on a GPU as many launches as for one feature, and a few.
    """
    torch._foreach_add_(ids_I.split(list(sizes)), [_start(seed) for seed in seeds])
    rows_I = torch.zeros_like(ids_I)
    torch._foreach_add_(rows_I.split(list(sizes)), list(rows))
    return _positive(_finalised(ids_I)).remainder_(rows_I)


def _positive(word: Tensor) -> Tensor:
    """Take 63 bits, so that the remainder of a signed division is that of the unsigned one."""
    return (word >> 1).bitwise_and_(2**63 - 1)


def _check(ids: Tensor, seed: int) -> None:
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise DtypeError(
            refusal("mix64", "ids", must="be integers", got=ids.dtype, fix="pass int64 ids")
        )
    if not 0 <= seed < 2**63:
        raise ConfigError(
            refusal("mix64", "seed", must="be in [0, 2^63)", got=seed, fix="use a small number")
        )
