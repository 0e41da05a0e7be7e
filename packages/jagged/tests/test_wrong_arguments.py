"""What is no tensor, no layout or no count is refused by every operator, under its own name."""

import pytest
import torch

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
    last_layout,
    padded_to_jagged,
)
from gem_opkit.errors import DtypeError, ShapeError
from gem_opkit.testing import check_refuses

X = torch.ones(5, 4)
LAYOUT = Layout.from_lengths([3, 0, 2])
NONE = Layout.from_lengths([0, 0, 0])
CALLS = {
    "jagged_broadcast_add": lambda x, layout: jagged_broadcast_add(x, layout, torch.ones(3, 4)),
    "jagged_concat": lambda x, layout: jagged_concat(x, layout, X, LAYOUT),
    "jagged_dense_bmm": lambda x, layout: jagged_dense_bmm(x, layout, torch.ones(3, 4, 2)),
    "jagged_index_select": lambda x, layout: jagged_index_select(x, layout, torch.tensor([0])),
    "jagged_mean": jagged_mean,
    "jagged_split": lambda x, layout: jagged_split(x, layout, NONE),
    "jagged_sum": jagged_sum,
    "jagged_take_last": lambda x, layout: jagged_take_last(x, layout, 1),
    "jagged_to_padded": jagged_to_padded,
    "padded_to_jagged": lambda x, layout: padded_to_jagged(
        torch.ones(3, 3, 4) if x is X else x, layout
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_operands_are_tensors_and_layouts(name):
    call = CALLS[name]
    call(X, LAYOUT)
    check_refuses(
        [
            (lambda: call(X.tolist(), LAYOUT), DtypeError, f"^{name}: .* must be a tensor; got li"),
            (lambda: call(X, LAYOUT.offsets_O), DtypeError, "layout must be a Layout; got Tensor"),
        ]
    )


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda n: jagged_take_last(X, LAYOUT, n), "count"),
        (lambda n: last_layout(LAYOUT, n), "count"),
        (lambda n: jagged_to_padded(X, LAYOUT, length=n), "length"),
    ],
)
def test_counts_are_whole_numbers(call, name):
    call(2)
    check_refuses(
        [
            (lambda: call(1.5), DtypeError, f"{name} must be a whole number; got 1.5"),
            (lambda: call(True), DtypeError, f"{name} must be a whole number; got True"),
            (lambda: call(-1), ShapeError, f"{name} must be at least 0; got -1"),
            (lambda: call(2**63), ShapeError, f"{name} must be below 2.63; got 9"),
        ]
    )


def test_offsets_are_a_tensor():
    check_refuses(
        [(lambda: Layout.from_offsets([0, 1]), DtypeError, "offsets_O must be a tensor; got list")]
    )
