import pytest
import torch

from gem_jagged.batch import Layout
from gem_jagged.kernels.padded_to_jagged.cases import CASES
from gem_jagged.kernels.padded_to_jagged.cost import (
    padded_to_jagged_backward_cost,
    padded_to_jagged_cost,
)
from gem_jagged.kernels.padded_to_jagged.reference import (
    padded_to_jagged_reference,
    token_rows,
)
from gem_jagged.ops import padded_to_jagged
from gem_opkit.errors import DeviceError, ShapeError, UnsupportedError
from gem_opkit.testing import (
    check_alone_equals_in_batch,
    check_compiles_whole,
    check_interpreted_kernel,
    check_kernel_on_gpu,
    check_ragged_edges,
    check_reference_gradients,
    check_refuses,
    check_registration,
)

SMALL = [case for case in CASES if case.device == "cpu" and case.total_tokens < 100]


def inputs(lengths, *, width=3, spare=0, offsets=torch.int64):
    layout = Layout.from_lengths(lengths, dtype=offsets)
    padded = torch.randn(len(lengths), layout.max_length + spare, width, requires_grad=True)
    return padded, layout


def oracle(padded_BND, layout, *, align="left"):
    """One sequence after the other, in plain torch."""
    parts = [padded_BND.reshape(-1, padded_BND.shape[2])[:0]]
    for row, length in enumerate(layout.lengths.tolist()):
        begin = 0 if align == "left" else padded_BND.shape[1] - length
        parts.append(padded_BND[row, begin : begin + length])
    return torch.cat(parts)


def variant(fn, align):
    return lambda padded_BND, layout, **more: fn(padded_BND, layout, align=align, **more)


@pytest.mark.parametrize("align", ["left", "right"])
def test_reference_gradients(align):
    check_reference_gradients(
        variant(padded_to_jagged, align),
        inputs((3, 0, 6, 1), spare=2),
        reference=variant(oracle, align),
    )


def test_registration():
    padded, layout = inputs((3, 0, 6))
    cost = padded_to_jagged_cost(total_tokens=9, width=3, element_bytes=4)
    backward_cost = padded_to_jagged_backward_cost(
        batch=3, total_tokens=9, length=6, width=3, element_bytes=4
    )
    check_registration(
        torch.ops.gem_jagged.padded_to_jagged,
        (padded, layout.offsets_O, 9, "left", "reference"),
        cost=cost,
        backward_cost=backward_cost,
    )
    check_registration(
        torch.ops.gem_jagged.padded_to_jagged_backward,
        (torch.randn(9, 3), layout.offsets_O, 6, "left", "reference"),
        cost=backward_cost,
    )


@pytest.mark.parametrize("align", ["left", "right"])
def test_compiles_whole(align):
    check_compiles_whole(
        variant(padded_to_jagged, align),
        [inputs((3, 0, 5)), inputs((2, 7, 2), spare=1), inputs((9, 4, 1, 1))],
    )


@pytest.mark.interpreter
def test_interpreted_kernel():
    for align in ("left", "right"):
        check_interpreted_kernel(
            variant(padded_to_jagged, align),
            variant(oracle, align),
            inputs((3, 0, 67, 1), width=24, spare=2),
        )


@pytest.mark.gpu
def test_kernel_on_gpu():
    for align in ("left", "right"):
        check_kernel_on_gpu(
            variant(padded_to_jagged, align),
            variant(oracle, align),
            inputs((3, 0, 670, 1, 130), width=96, spare=2),
        )


@pytest.mark.parametrize("align", ["left", "right"])
def test_ragged_edges(align):
    check_ragged_edges(
        variant(padded_to_jagged, align),
        variant(oracle, align),
        lambda case: inputs(case.lengths, spare=1, offsets=torch.int32),
    )


def test_alone_equals_in_batch():
    lengths = (3, 0, 6, 1)
    padded, _ = inputs(lengths)

    def make(picked):
        return padded[list(picked)], Layout.from_lengths([lengths[i] for i in picked])

    check_alone_equals_in_batch(padded_to_jagged, make, lengths, leaves=[padded], bitwise=True)


def test_refuses():
    padded, layout = inputs((3, 0, 6))
    check_refuses(
        [
            (
                lambda: padded_to_jagged(padded[:, :5], layout),
                ShapeError,
                "padded_BND must have N of at least 6, .* got 5",
            ),
            (lambda: padded_to_jagged(padded[:2], layout), ShapeError, "B=3 .* B=2"),
            (lambda: padded_to_jagged(torch.zeros(3), layout), ShapeError, "padded_BND must have"),
            (
                lambda: padded_to_jagged(padded, layout.to("meta")),
                DeviceError,
                "offsets_O must be on cpu",
            ),
            (
                lambda: padded_to_jagged(padded, layout, align="top"),
                UnsupportedError,
                "align must .* 'top'",
            ),
            (
                lambda: padded_to_jagged(padded, layout, impl="fast"),
                UnsupportedError,
                "impl must be one of",
            ),
        ]
    )


@pytest.mark.parametrize("wrong", [7, 10])
def test_wrong_total_raises(wrong):
    padded, layout = inputs((3, 0, 6))
    lie = Layout(layout.offsets_O, layout.lengths, layout.max_length, wrong)
    with pytest.raises(ShapeError, match=f"total_tokens must be the sum .*, 9; got {wrong}"):
        lie.checked("shapes")
    # Whoever gets past the check still gets no rows of other sequences.
    with pytest.raises(IndexError if wrong > 9 else RuntimeError, match="out of bounds"):
        padded_to_jagged(padded, lie)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_moves_any_dtype_unchanged(case, dtype):
    layout = Layout.from_lengths(case.lengths)
    padded = torch.randint(0, 2, (layout.batch, layout.max_length + 1, case.width)).to(dtype)
    if dtype == torch.int64:
        padded = padded * (2**62 + 1) - 3
    for align in ("left", "right"):
        values = padded_to_jagged(padded, layout, align=align)
        assert values.dtype == dtype
        assert torch.equal(values, oracle(padded, layout, align=align))


def test_takes_two_and_four_dims_and_any_strides():
    layout = Layout.from_lengths([2, 0, 3])
    ids = torch.arange(9).reshape(3, 3)
    assert padded_to_jagged(ids, layout).tolist() == [0, 1, 6, 7, 8]
    assert padded_to_jagged(ids.T, layout).tolist() == [0, 3, 2, 5, 8]
    heads = torch.randn(4, 3, 5, 2).permute(1, 2, 3, 0)[:, ::2]
    values = padded_to_jagged(heads, layout)
    assert values.shape == (5, 2, 4)
    assert torch.equal(values[2:], heads[2])


def test_row_numbers_pass_int32():
    offsets = torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    left = token_rows(offsets, 6, 2**30, "left").tolist()
    assert left == [0, 2**30, 2**30 + 1, 2**31, 2**31 + 1, 2**31 + 2]
    assert token_rows(offsets, 6, 2**30, "right")[-1] == 3 * 2**30 - 1


def test_reads_a_batch_with_more_slots_than_int32():
    # One expanded number per batch takes 4 bytes and has 3 × 2^30 slots.
    padded = torch.full((1, 1, 1), 7.0).expand(3, 2**30, 1)
    values = padded_to_jagged(padded, Layout.from_lengths([1, 2, 3], dtype=torch.int32))
    assert values.tolist() == [[7.0]] * 6


def test_reference_is_what_the_operator_runs():
    padded, layout = inputs((3, 0, 6))
    direct = padded_to_jagged_reference(padded, layout.offsets_O, 9, "left")
    assert torch.equal(direct, padded_to_jagged(padded, layout, impl="reference"))


@pytest.mark.gpu
def test_waits_for_no_gpu():
    padded, layout = inputs((3, 0, 6))
    padded, layout = padded.detach().cuda().requires_grad_(), layout.to("cuda")
    upstream = torch.ones(9, 3, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        padded_to_jagged(padded, layout).backward(upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert padded.grad.sum(dim=(1, 2)).tolist() == [9, 0, 18]
