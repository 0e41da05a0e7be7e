import pytest
import torch

from gem_jagged.batch import Jagged, Layout
from gem_jagged.kernels.jagged_to_padded.cases import CASES
from gem_jagged.kernels.jagged_to_padded.cost import (
    jagged_to_padded_backward_cost,
    jagged_to_padded_cost,
)
from gem_jagged.kernels.jagged_to_padded.reference import jagged_to_padded_reference, padded_rows
from gem_jagged.ops import jagged_to_padded, padded_to_jagged
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

SMALL = [case for case in CASES if case.device == "cpu" and case.total_tokens < 100]


def inputs(lengths, *, width=3, dtype=torch.float32, offsets=torch.int64):
    values = torch.randn(sum(lengths), width, dtype=dtype, requires_grad=dtype.is_floating_point)
    return values, Layout.from_lengths(lengths, dtype=offsets)


def oracle(values_TD, layout, *, length=None, fill=0.0, align="left"):
    """One sequence after the other, in plain torch."""
    length = layout.max_length if length is None else length
    rows = []
    for tokens in values_TD.split(layout.lengths.tolist()):
        kept = tokens[:length] if align == "left" else tokens[max(0, len(tokens) - length) :]
        padding = tokens.new_full((length - kept.shape[0], tokens.shape[1]), fill)
        rows.append(torch.cat([kept, padding] if align == "left" else [padding, kept]))
    if not rows:
        return values_TD.new_empty((0, length, values_TD.shape[1])) + values_TD.sum() * 0
    return torch.stack(rows)


def variant(fn, **options):
    return lambda values_TD, layout, **more: fn(values_TD, layout, **options, **more)


VARIANTS = [
    {},
    {"align": "right"},
    {"length": 4, "fill": -2.0},
    {"length": 4, "align": "right"},
    {"length": 0},
]


@pytest.mark.parametrize("options", VARIANTS)
def test_reference_gradients(options):
    check_reference_gradients(
        variant(jagged_to_padded, **options),
        inputs((3, 0, 6, 1)),
        reference=variant(oracle, **options),
    )


def test_registration():
    values, layout = inputs((3, 0, 6))
    size = {"batch": 3, "total_tokens": 9, "length": 4, "width": 3, "element_bytes": 4}
    check_registration(
        torch.ops.gem_jagged.jagged_to_padded,
        (values, layout.offsets_O, 4, 6, 0.0, "left", "reference"),
        cost=jagged_to_padded_cost(**size),
        backward_cost=jagged_to_padded_backward_cost(**size),
    )
    check_registration(
        torch.ops.gem_jagged.jagged_to_padded_backward,
        (torch.randn(3, 4, 3), layout.offsets_O, 9, 6, "left", "reference"),
        cost=jagged_to_padded_backward_cost(**size),
    )


@pytest.mark.parametrize("options", [{}, {"align": "right", "length": 4}])
def test_compiles_whole(options):
    check_compiles_whole(
        variant(jagged_to_padded, **options),
        [inputs((3, 0, 5)), inputs((2, 7, 2)), inputs((9, 4, 1, 1))],
    )


@pytest.mark.interpreter
def test_interpreted_kernel():
    for options in VARIANTS[:4]:
        check_interpreted_kernel(
            variant(jagged_to_padded, **options),
            variant(oracle, **options),
            inputs((3, 0, 67, 1), width=24),
        )


@pytest.mark.gpu
def test_kernel_on_gpu():
    for options in VARIANTS[:4]:
        check_kernel_on_gpu(
            variant(jagged_to_padded, **options),
            variant(oracle, **options),
            inputs((3, 0, 670, 1, 130), width=96),
        )


@pytest.mark.parametrize("options", VARIANTS[:4])
def test_ragged_edges(options):
    check_ragged_edges(
        variant(jagged_to_padded, **options),
        variant(oracle, **options),
        lambda case: inputs(case.lengths, offsets=torch.int32),
    )


def test_alone_equals_in_batch():
    lengths = (3, 0, 6, 1)
    values, _ = inputs(lengths)

    def make(picked):
        return (
            take_sequences(values, lengths, picked),
            Layout.from_lengths([lengths[i] for i in picked]),
        )

    check_alone_equals_in_batch(
        variant(jagged_to_padded, length=4),
        make,
        lengths,
        leaves=[values],
        split="sequences",
        bitwise=True,
    )


def test_refuses():
    values, layout = inputs((3, 0, 6))
    meta = layout.to("meta")
    whole = torch.zeros(9, 3, dtype=torch.int64)
    check_refuses(
        [
            (lambda: jagged_to_padded(values[:8], layout), ShapeError, "8 tokens .* sum to 9"),
            (
                lambda: jagged_to_padded(torch.zeros(10, 3), layout),
                ShapeError,
                "10 tokens .* sum to 9",
            ),
            (lambda: jagged_to_padded(values, layout, length=-1), ShapeError, "length must .* -1"),
            (lambda: jagged_to_padded(torch.tensor(1.0), layout), ShapeError, "values_TD must"),
            (lambda: jagged_to_padded(values, meta), DeviceError, "offsets_O must be on cpu"),
            (lambda: jagged_to_padded(whole, layout, fill=0.5), DtypeError, "fill must .* 0.5"),
            (
                lambda: jagged_to_padded(whole.to(torch.uint8), layout, fill=-1),
                DtypeError,
                "fill must .*uint8",
            ),
            (
                lambda: jagged_to_padded(values.detach().half(), layout, fill=1e10),
                DtypeError,
                "fill must be in .* for torch.float16; got 1",
            ),
            (lambda: jagged_to_padded(values, layout, fill=-1e39), DtypeError, "fill must be in"),
            (
                lambda: jagged_to_padded(torch.ones(9).to(torch.float8_e8m0fnu), layout),
                DtypeError,
                "fill must be in .*e8m0fnu; got 0",
            ),
            (
                lambda: jagged_to_padded(values, layout, align="top"),
                UnsupportedError,
                "align must .* 'top'",
            ),
            (
                lambda: jagged_to_padded(values, layout, impl="fast"),
                UnsupportedError,
                "impl must be one of",
            ),
            (
                lambda: torch.ops.gem_jagged.jagged_to_padded(
                    values, layout.offsets_O, 4, 6, 0.0, "left", "fast"
                ),
                UnsupportedError,
                "impl must be one of",
            ),
        ]
    )


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.bfloat16])
def test_moves_any_dtype_unchanged(case, dtype):
    values = torch.randint(0, 2, (case.total_tokens, case.width)).to(dtype)
    if dtype == torch.int64:
        values = values * (2**62 + 1) - 3  # loses bits in any float
    layout = Layout.from_lengths(case.lengths)
    for options in ({}, {"length": 3, "align": "right"}):
        padded = jagged_to_padded(values, layout, **options)
        assert padded.dtype == dtype
        assert torch.equal(padded, oracle(values, layout, **options))


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_moves_dtypes_that_index_kernels_lack(dtype):
    layout = Layout.from_lengths([2, 0, 3])
    values = torch.arange(1, 11).view(2, 5).to(dtype).t()  # strided
    padded = jagged_to_padded(values, layout, length=2, fill=7.0, align="right")
    assert padded.dtype == dtype
    assert padded[..., 0].double().tolist() == [[1, 2], [7, 7], [4, 5]]
    assert padded_to_jagged(jagged_to_padded(values, layout), layout).dtype == dtype


@pytest.mark.parametrize("fill", [float("inf"), float("-inf"), float("nan")])
def test_fills_with_what_is_not_a_number(fill):
    padded = jagged_to_padded(torch.zeros(1, 2), Layout.from_lengths([1, 0]), fill=fill)
    assert torch.equal(padded[1, 0].isnan(), torch.tensor([fill, fill]).isnan())
    assert padded[1].isfinite().sum() == 0
    assert padded[0].tolist() == [[0.0, 0.0]]


def test_takes_one_and_three_dims_and_any_strides():
    layout = Layout.from_lengths([2, 0, 3])
    ids = torch.arange(5)
    assert jagged_to_padded(ids, layout, fill=-1).tolist() == [[0, 1, -1], [-1] * 3, [2, 3, 4]]
    heads = torch.randn(5, 2, 4)
    padded = jagged_to_padded(heads, layout)
    assert padded.shape == (3, 3, 2, 4)
    strided = torch.randn(2, 4, 10).permute(2, 0, 1)[::2]
    expected = jagged_to_padded(strided.contiguous(), layout)
    assert torch.equal(jagged_to_padded(strided, layout), expected)
    assert torch.equal(padded[2], heads[2:])


def test_padding_that_was_never_a_token_sends_no_gradient():
    # Upstream NaN in padding must not reach the tokens.
    values, layout = inputs((1, 3))
    padded = jagged_to_padded(values, layout, length=5)
    upstream = torch.full_like(padded, float("nan"))
    upstream[0, :1], upstream[1, :3] = 1.0, 2.0
    padded.backward(upstream)
    assert values.grad[:, 0].tolist() == [1.0, 2.0, 2.0, 2.0]


def test_cut_tokens_get_no_gradient_even_beside_nan():
    values, layout = inputs((1, 3))
    padded = jagged_to_padded(values, layout, length=2)
    upstream = torch.full_like(padded, float("nan"))
    padded.backward(upstream)
    assert values.grad[3].tolist() == [0.0, 0.0, 0.0]
    assert values.grad[0].isnan().all()


def test_row_numbers_pass_int32():
    # The rows of a batch of 3 × 2^30 slots, without the batch: int32 offsets, int64 rows.
    offsets = torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    rows, holds = padded_rows(offsets, 6, 2**30, "left")
    assert rows.tolist() == [0, 2**30, 2**30 + 1, 2**31, 2**31 + 1, 2**31 + 2]
    rows, _ = padded_rows(offsets, 6, 2**30, "right")
    assert rows[-1] == 3 * 2**30 - 1
    assert holds.all()


def test_gradient_of_a_batch_with_more_slots_than_int32():
    # A gradient that is one expanded number per sequence takes 24 bytes and has 3 × 2^30 slots.
    from gem_jagged.kernels.jagged_to_padded.reference import (
        jagged_to_padded_backward_reference,
    )

    offsets = torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    grad = torch.zeros(1, 1, 1).expand(3, 2**30, 1)
    assert jagged_to_padded_backward_reference(grad, offsets, 6, 3, "left").tolist() == [[0.0]] * 6


def test_reference_is_what_the_operator_runs():
    values, layout = inputs((3, 0, 6))
    direct = jagged_to_padded_reference(values, layout.offsets_O, 6, 6, 0.0, "left")
    assert torch.equal(direct, jagged_to_padded(values, layout, impl="reference"))


@pytest.mark.gpu
@pytest.mark.large
def test_more_words_than_int32_on_gpu():
    # 2 × 2^24 × 97 bf16 elements, each a word of its own because rows are of an odd number of them:
    # beyond 2^31, so an int32 index would wrap.
    length, width = 2**24, 97
    values = torch.ones(length, width, dtype=torch.bfloat16, device="cuda")
    values[-1] = 3
    batch = Jagged.from_layout(values, Layout.from_lengths([0, length], device="cuda"))
    padded = jagged_to_padded(batch.values, batch.layout)
    assert padded.shape == (2, length, width)
    assert padded[1, -1].eq(3).all()
    assert padded[0].eq(0).all()
    assert padded[1, :-1].eq(1).all()


@pytest.mark.gpu
def test_waits_for_no_gpu():
    values, layout = inputs((3, 0, 6))
    values, layout = values.detach().cuda().requires_grad_(), layout.to("cuda")
    upstream = torch.ones(3, 4, 3, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        jagged_to_padded(values, layout, length=4, align="right").backward(upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert values.grad[:, 0].tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 1]
