"""Where features stand, as kernels read it: a small tensor, made once for a layout. Private.

Features whose rows are equally wide, up to the next power of two, form a class; a kernel is
launched once for each class, so that narrow rows do not pay for wide ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gem_embeddings.table_layout import POOLINGS, SLOT
from gem_opkit.errors import UnsupportedError, refusal

WIDEST = 8192
_NARROWEST = 4  # four columns share the random words of one counter
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class WidthClass:
    """Features of one class.

    Attributes:
        number: of the class.
        columns: elements of a block: the next power of two of the widest row.
        width: elements of a row where all rows of the class are equally wide, else 0.
        pooled: its features that are pooled, on the device; int64.
        pooled_count: how many.
        single: its features without pooling, on the device; int64.
        singles: the same, on the host.
    """

    number: int
    columns: int
    width: int
    pooled: Tensor
    pooled_count: int
    single: Tensor
    singles: tuple[int, ...]


@dataclass(frozen=True)
class Places:
    """A layout as kernels read it.

    Attributes:
        table: int64 (7, F) on the device: offset, row_offset, rows, width, pooling, class, and the
            elements of an example in the pooled features before; a feature a column.
        features: number of features.
        rows: values that a buffer of one value a row needs.
        mixed: some feature has no pooling, so places in the output depend on the batch.
        averaged: some feature is averaged.
        classes: of widths.
        widths: elements of a row of each feature.
        align: elements by which every row's begin and width can be divided, a power of two.
    """

    table: Tensor
    features: int
    rows: int
    mixed: bool
    averaged: bool
    classes: tuple[WidthClass, ...]
    widths: tuple[int, ...]
    align: int


def places_of(op: str, slots: Sequence[int], device: torch.device) -> Places:
    """Return the places of a layout.

    Args:
        op: who asks, for the message.
        slots: of the layout.
        device: where kernels read them.

    Returns:
        the places; the same object for equal slots.

    Raises:
        UnsupportedError: a row wider than a kernel takes.

    Cost: the first call for a layout copies some numbers to the device, which the host does not
        wait for: vectors that have just arrived have another layout in every step.
    """
    widest = max(slots[3::SLOT], default=0)
    if widest > WIDEST:
        raise UnsupportedError(
            refusal(
                op,
                "width",
                must=f"be at most {WIDEST} for a Triton kernel",
                got=widest,
                fix='cut the table by columns, or use impl="reference"',
            )
        )
    return _places(tuple(slots), device)


@lru_cache(maxsize=64)
def _places(slots: tuple[int, ...], device: torch.device) -> Places:
    columns = [list(slots[index::SLOT]) for index in range(SLOT)]
    offsets, row_offsets, rows, widths, poolings = columns
    blocks = [max(_NARROWEST, 1 << (width - 1).bit_length()) for width in widths]
    sizes = sorted(set(blocks))
    none = POOLINGS.index("none")
    before, examples = 0, []
    for width, pooling in zip(widths, poolings, strict=True):
        examples.append(before)
        before += 0 if pooling == none else width

    def numbers(of: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        # Read before this returns: a few numbers go through a buffer of the driver.
        return torch.tensor(of, dtype=torch.int64).to(device, non_blocking=True)

    classes = []
    for number, size in enumerate(sizes):
        mine = [index for index, block in enumerate(blocks) if block == size]
        pooled = [index for index in mine if poolings[index] != none]
        singles = [index for index in mine if poolings[index] == none]
        equal = {widths[index] for index in mine}
        classes.append(
            WidthClass(
                number=number,
                columns=size,
                width=equal.pop() if len(equal) == 1 else 0,
                pooled=numbers(pooled),
                pooled_count=len(pooled),
                single=numbers(singles),
                singles=tuple(singles),
            )
        )
    align = _VECTOR_BYTES
    while any(number % align for number in (*offsets, *widths)):
        align //= 2
    table = [offsets, row_offsets, rows, widths, poolings, [sizes.index(b) for b in blocks]]
    return Places(
        table=numbers([*table, examples]),
        features=len(widths),
        rows=max((a + b for a, b in zip(row_offsets, rows, strict=True)), default=0),
        mixed=none in poolings,
        averaged=POOLINGS.index("mean") in poolings,
        classes=tuple(classes),
        widths=tuple(widths),
        align=align,
    )
