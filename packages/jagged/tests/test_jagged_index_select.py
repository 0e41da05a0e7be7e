import pytest
import torch

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_index_select.cost import (
    jagged_index_select_backward_cost,
    jagged_index_select_cost,
)
from gem_jagged.ops import jagged_index_select, select_layout
from gem_opkit.errors import DeviceError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import (
    check_alone_equals_in_batch,
    check_compiles_whole,
    check_interpreted_kernel,
    check_kernel_on_gpu,
    check_ragged_edges,
    check_reference_gradients,
    check_refuses,
    check_registration,
    take_sequences,
)


def inputs(lengths, indices=None, *, width=3, offsets=torch.int64):
    if indices is None:
        # Every second sequence, the first one three times, from the end on.
        indices = [*range(len(lengths) - 1, -1, -2), 0, 0, 0] if lengths else []
    values = torch.randn(sum(lengths), width, requires_grad=True)
    layout = Layout.from_lengths(lengths, dtype=offsets)
    chosen = torch.tensor(indices, dtype=torch.int64)
    return values, layout, chosen, select_layout(layout, chosen)


def select(values_TD, layout, indices_I, selected, **more):
    return jagged_index_select(values_TD, layout, indices_I, selected=selected, **more)[0]


def oracle(values_TD, layout, indices_I, selected):
    """One sequence after the other, in plain torch."""
    parts = values_TD.split(layout.lengths.tolist())
    return torch.cat([values_TD[:0], *(parts[index] for index in indices_I.tolist())])


def test_reference_gradients():
    check_reference_gradients(select, inputs((3, 0, 6, 1), [2, 1, 0, 2, 2, 0]), reference=oracle)


def test_registration():
    values, layout, chosen, selected = inputs((3, 0, 6), [2, 0, 2])
    cost = jagged_index_select_cost(selected_tokens=15, width=3, element_bytes=4)
    backward_cost = jagged_index_select_backward_cost(
        selected_tokens=15, total_tokens=9, width=3, element_bytes=4
    )
    check_registration(
        torch.ops.gem_jagged.jagged_index_select,
        (values, layout.offsets_O, chosen, selected.offsets_O, 15, "reference"),
        cost=cost,
        backward_cost=backward_cost,
    )
    check_registration(
        torch.ops.gem_jagged.jagged_index_select_backward,
        (torch.randn(15, 3), layout.offsets_O, chosen, selected.offsets_O, 9, "reference"),
        cost=backward_cost,
    )


def test_compiles_whole():
    check_compiles_whole(
        select,
        [
            inputs((3, 0, 5), [2, 2, 0]),
            inputs((2, 7, 2), [1, 0, 1, 2]),
            inputs((9, 4, 1, 1), [3, 0]),
        ],
    )


@pytest.mark.interpreter
def test_interpreted_kernel():
    check_interpreted_kernel(select, oracle, inputs((3, 0, 67, 1), [2, 1, 0, 2, 2], width=24))


@pytest.mark.gpu
def test_kernel_on_gpu():
    check_kernel_on_gpu(select, oracle, inputs((3, 0, 670, 1), [2, 1, 0, 2, 2], width=96))


def test_ragged_edges():
    check_ragged_edges(select, oracle, lambda case: inputs(case.lengths, offsets=torch.int32))


def test_alone_equals_in_batch():
    lengths = (3, 0, 6, 1)
    values, *_ = inputs(lengths)

    def make(picked):
        layout = Layout.from_lengths([lengths[i] for i in picked])
        chosen = torch.arange(len(picked))
        taken = take_sequences(values, lengths, picked)
        return taken, layout, chosen, select_layout(layout, chosen)

    check_alone_equals_in_batch(select, make, lengths, leaves=[values], bitwise=True)


def test_refuses():
    values, layout, chosen, selected = inputs((3, 0, 6), [2, 0])
    check_refuses(
        [
            (
                lambda: jagged_index_select(values[:8], layout, chosen),
                ShapeError,
                "8 tokens .* sum to 9",
            ),
            (
                lambda: jagged_index_select(values, layout, torch.tensor([0, 3])),
                ShapeError,
                r"indices_I\[1\] must be in \[0, 3\), .* got 3",
            ),
            (
                lambda: jagged_index_select(values, layout, chosen - 1, selected=selected),
                ShapeError,
                r"indices_I\[1\] must be in \[0, 3\), .* got -1",
            ),
            (
                lambda: jagged_index_select(values, layout, chosen.float()),
                DtypeError,
                "indices_I must be int32 or int64",
            ),
            (
                lambda: jagged_index_select(values, layout, chosen[:1], selected=selected),
                ShapeError,
                "selected has B=2 but indices_I has I=1",
            ),
            (
                lambda: jagged_index_select(values, layout, chosen.to("meta")),
                DeviceError,
                "indices_I must be in host memory; got meta",
            ),
            (
                lambda: jagged_index_select(values, layout, chosen, impl="fast"),
                UnsupportedError,
                "impl must be one of",
            ),
        ]
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint16])
def test_moves_any_dtype_and_says_the_new_layout(dtype):
    layout = Layout.from_lengths([2, 0, 1], dtype=torch.int32)
    chosen = torch.tensor([2, 0, 1, 2], dtype=torch.int32)
    values, selected = jagged_index_select(torch.arange(1, 4).to(dtype), layout, chosen)
    assert values.double().tolist() == [3, 1, 2, 3]
    selected.checked("values", 4)
    assert selected.lengths.tolist() == [1, 2, 0, 1]
    assert selected.offsets_O.dtype == torch.int32
