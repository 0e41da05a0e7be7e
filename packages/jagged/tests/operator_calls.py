"""Every operator of gem-jagged once, for tests that run all of them; imported by test files."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gem_jagged.batch import Layout
from gem_jagged.ops import (
    jagged_broadcast_add,
    jagged_concat,
    jagged_dense_bmm,
    jagged_index_select,
    jagged_mean,
    jagged_split,
    jagged_sum,
    jagged_take_last,
    jagged_to_padded,
    padded_to_jagged,
    select_layout,
)

Call = tuple[str, Callable[..., Any], list[Tensor]]


def calls(
    lengths: Sequence[int], width: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Call]:
    """Make every operator's call on one batch.

    Args:
        lengths: tokens of each sequence.
        width: elements of a token.
        dtype: of the tensors.
        device: where they are.

    Returns:
        (name of the operator, function of (*tensors, impl), tensors), a name more than once where
        an option changes what is run.
    """
    layout = Layout.from_lengths(list(lengths), dtype=torch.int32, device=device)
    other = Layout.from_lengths(list(lengths)[::-1], device=device)
    batch, total = layout.batch, layout.total_tokens
    names = [*range(batch - 1, -1, -1), 0, 0] if batch else []
    selected = select_layout(layout, torch.tensor(names, dtype=torch.int64))
    chosen = torch.tensor(names, dtype=torch.int64, device=device)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype).requires_grad_()

    packed = leaf(total, width)
    return [
        (
            "jagged_to_padded",
            lambda x, impl: jagged_to_padded(x, layout, fill=-2.0, impl=impl),
            [packed],
        ),
        (
            "jagged_to_padded",
            lambda x, impl: jagged_to_padded(x, layout, length=3, align="right", impl=impl),
            [packed],
        ),
        (
            "padded_to_jagged",
            lambda x, impl: padded_to_jagged(x, layout, align="right", impl=impl),
            [leaf(batch, layout.max_length + 1, width)],
        ),
        (
            "jagged_concat",
            lambda x, y, impl: jagged_concat(x, layout, y, other, impl=impl)[0],
            [packed, leaf(total, width)],
        ),
        (
            "jagged_split",
            lambda x, impl: jagged_split(x, layout, other, impl=impl),
            [leaf(2 * total, width)],
        ),
        (
            "jagged_take_last",
            lambda x, impl: jagged_take_last(x, layout, 4, impl=impl)[0],
            [packed],
        ),
        (
            "jagged_index_select",
            lambda x, impl: jagged_index_select(x, layout, chosen, selected=selected, impl=impl)[0],
            [packed],
        ),
        ("jagged_mean", lambda x, impl: jagged_mean(x, layout, impl=impl), [packed]),
        ("jagged_sum", lambda x, impl: jagged_sum(x, layout, impl=impl), [packed]),
        (
            "jagged_broadcast_add",
            lambda x, y, impl: jagged_broadcast_add(x, layout, y, impl=impl),
            [packed, leaf(batch, width)],
        ),
        (
            "jagged_dense_bmm",
            lambda x, w, b, impl: jagged_dense_bmm(x, layout, w, bias_BF=b, impl=impl),
            [packed, leaf(batch, width, 3), leaf(batch, 3)],
        ),
    ]
