import pytest
import torch

from gem_jagged.batch import Layout
from gem_jagged.kernels.jagged_concat import reference
from gem_jagged.kernels.jagged_concat.cases import CASES
from gem_jagged.kernels.jagged_concat.cost import jagged_concat_cost
from gem_jagged.ops import concat_layouts, jagged_concat
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

SMALL = [pair for pair in CASES if pair[0].device == "cpu" and pair[0].total_tokens < 100]


def inputs(left_lengths, right_lengths, *, width=3, offsets=torch.int64):
    left = torch.randn(sum(left_lengths), width, requires_grad=True)
    right = torch.randn(sum(right_lengths), width, requires_grad=True)
    left_layout = Layout.from_lengths(left_lengths, dtype=offsets)
    right_layout = Layout.from_lengths(right_lengths)
    return left, left_layout, right, right_layout, concat_layouts(left_layout, right_layout)


def concat(left_TD, left_layout, right_SD, right_layout, layout, **more):
    return jagged_concat(left_TD, left_layout, right_SD, right_layout, layout=layout, **more)[0]


def oracle(left_TD, left_layout, right_SD, right_layout, layout):
    """One sequence after the other, in plain torch."""
    left = left_TD.split(left_layout.lengths.tolist())
    right = right_SD.split(right_layout.lengths.tolist())
    nothing = torch.cat([left_TD, right_SD])[:0]
    return torch.cat([nothing, *(part for pair in zip(left, right, strict=True) for part in pair)])


def test_reference_gradients():
    check_reference_gradients(concat, inputs((3, 0, 2, 1), (1, 2, 0, 4)), reference=oracle)


def test_registration():
    left, left_layout, right, right_layout, _ = inputs((3, 0, 2), (1, 2, 0))
    cost = jagged_concat_cost(left_tokens=5, right_tokens=3, width=3, element_bytes=4)
    check_registration(
        torch.ops.gem_jagged.jagged_concat,
        (left, left_layout.offsets_O, right, right_layout.offsets_O, "reference"),
        cost=cost,
        backward_cost=cost,
    )
    check_registration(
        torch.ops.gem_jagged.jagged_concat_backward,
        (torch.randn(8, 3), left_layout.offsets_O, right_layout.offsets_O, 5, "reference"),
        cost=cost,
    )


def test_compiles_whole():
    check_compiles_whole(
        concat,
        [
            inputs((3, 0, 5), (2, 3, 0)),
            inputs((2, 7, 2), (1, 1, 4)),
            inputs((9, 4, 1, 1), (3, 3, 5, 6)),
        ],
    )


@pytest.mark.interpreter
def test_interpreted_kernel():
    check_interpreted_kernel(concat, oracle, inputs((3, 0, 67, 1), (1, 2, 0, 30), width=24))


@pytest.mark.gpu
def test_kernel_on_gpu():
    check_kernel_on_gpu(concat, oracle, inputs((3, 0, 670, 1), (130, 2, 0, 30), width=96))


@pytest.mark.parametrize("other", ["reversed", "none", "summary"])
def test_ragged_edges(other):
    def make(case):
        right = {
            "reversed": case.lengths[::-1],
            "none": (0,) * case.batch,
            "summary": (2,) * case.batch,
        }[other]
        return inputs(case.lengths, right, offsets=torch.int32)

    check_ragged_edges(concat, oracle, make)


def test_alone_equals_in_batch():
    left_lengths, right_lengths = (3, 0, 2, 1), (1, 2, 0, 4)
    left, _, right, _, _ = inputs(left_lengths, right_lengths)

    def make(picked):
        left_layout = Layout.from_lengths([left_lengths[i] for i in picked])
        right_layout = Layout.from_lengths([right_lengths[i] for i in picked])
        return (
            take_sequences(left, left_lengths, picked),
            left_layout,
            take_sequences(right, right_lengths, picked),
            right_layout,
            concat_layouts(left_layout, right_layout),
        )

    check_alone_equals_in_batch(concat, make, (4, 2, 2, 5), leaves=[left, right], bitwise=True)


def test_refuses():
    left, left_layout, right, right_layout, _ = inputs((3, 0, 2), (1, 2, 0))
    two = Layout.from_lengths([1, 2])
    check_refuses(
        [
            (
                lambda: jagged_concat(left, left_layout, right[:, :2], right_layout),
                ShapeError,
                "right_SD has D=2 but left_TD has D=3",
            ),
            (
                lambda: jagged_concat(
                    left.reshape(5, 3, 1), left_layout, right.reshape(3, 1, 3), right_layout
                ),
                ShapeError,
                r"right_SD has rows of shape \(1, 3\)",
            ),
            (lambda: jagged_concat(left, left_layout, right, two), ShapeError, "B=2 .* B=3"),
            (
                lambda: jagged_concat(left[:4], left_layout, right, right_layout),
                ShapeError,
                "left_TD has 4 tokens .* sum to 5",
            ),
            (
                lambda: jagged_concat(left, left_layout, torch.zeros(4, 3), right_layout),
                ShapeError,
                "right_SD has 4 tokens .* sum to 3",
            ),
            (
                lambda: jagged_concat(left, left_layout, right, right_layout, layout=left_layout),
                ShapeError,
                "the result has 8 tokens .* sum to 5",
            ),
            (
                lambda: jagged_concat(
                    left, left_layout, right, right_layout, layout=Layout.from_lengths([8, 0, 0])
                ),
                ShapeError,
                r"layout.lengths\[0\] must be 4, the tokens of both sides; got 8",
            ),
            (
                lambda: jagged_concat(
                    left, left_layout, right, right_layout, layout=Layout.from_lengths([4, 4])
                ),
                ShapeError,
                "layout has B=2 but left_layout has B=3",
            ),
            (
                lambda: jagged_concat(left, left_layout, right.double(), right_layout),
                DtypeError,
                "right_SD must be torch.float32",
            ),
            (
                lambda: jagged_concat(left, left_layout, right.to("meta"), right_layout.to("meta")),
                DeviceError,
                "right_layout.offsets_O must be on cpu",
            ),
            (
                lambda: jagged_concat(left, left_layout, right, right_layout, impl="fast"),
                UnsupportedError,
                "impl must be one of",
            ),
        ]
    )


@pytest.mark.parametrize("pair", SMALL, ids=lambda pair: pair[0].name)
def test_layout_of_the_result_is_sound(pair):
    left, right = (Layout.from_lengths(case.lengths) for case in pair)
    values = [torch.randn(case.total_tokens, case.width) for case in pair]
    result, layout = jagged_concat(values[0], left, values[1], right)
    layout.checked("values", result.shape[0])
    assert torch.equal(result, oracle(values[0], left, values[1], right, layout))


def test_moves_whole_numbers_unchanged():
    left, right = Layout.from_lengths([1, 2]), Layout.from_lengths([2, 0], dtype=torch.int32)
    ids = 2**62 + torch.arange(5)
    values, layout = jagged_concat(ids[:3], left, ids[3:], right)
    assert (values - 2**62).tolist() == [0, 3, 4, 1, 2]
    assert layout.offsets_O.dtype == torch.int64
    assert layout.lengths.tolist() == [3, 2]
    heads = torch.randn(4, 5, 2).permute(1, 2, 0)
    values, _ = jagged_concat(heads[:3], left, heads[3:], right)
    assert torch.equal(values, heads[[0, 3, 4, 1, 2]])


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn])
def test_moves_dtypes_that_index_kernels_lack(dtype):
    left, right = Layout.from_lengths([1, 2]), Layout.from_lengths([2, 0])
    ids = torch.arange(1, 6).to(dtype)
    values, _ = jagged_concat(ids[:3], left, ids[3:], right)
    assert values.double().tolist() == [1, 4, 5, 2, 3]


def test_row_numbers_pass_int32(monkeypatch):
    # Two sides whose int32 offsets each fit, and whose sum does not. Only the ids of the 2^31
    # tokens on the right are left out; the arithmetic is that of the operator.
    big = 2**31 - 1
    ids = {2: torch.tensor([0, 1]), 0: torch.tensor([], dtype=torch.int64)}
    monkeypatch.setattr(reference, "sequence_ids", lambda offsets_O, total: ids[total])
    left = torch.tensor([0, 1, 2], dtype=torch.int32)
    right = torch.tensor([0, big, big], dtype=torch.int32)
    rows, _ = reference.concat_rows(left, right, 2, 0)
    assert rows.tolist() == [0, big + 1]


@pytest.mark.gpu
def test_waits_for_no_gpu():
    left, left_layout, right, right_layout, layout = inputs((3, 0, 2), (1, 2, 0))
    left, right = (x.detach().cuda().requires_grad_() for x in (left, right))
    layouts = [x.to("cuda") for x in (left_layout, right_layout, layout)]
    upstream = torch.arange(8.0, device="cuda")[:, None].expand(8, 3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        concat(left, layouts[0], right, layouts[1], layouts[2]).backward(upstream)
        concat_layouts(layouts[0], layouts[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert right.grad[:, 0].tolist() == [3, 4, 5]
