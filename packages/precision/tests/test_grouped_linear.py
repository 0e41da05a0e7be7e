"""Rows of several experts, each mapped by its own weight, against a loop over experts."""

import pytest
import torch

from gem_opkit.compile_checks import KernelVariant, compile_kernels
from gem_opkit.errors import DeviceError, DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import (
    check_alone_equals_in_batch,
    check_compiles_whole,
    check_interpreted_kernel,
    check_kernel_on_gpu,
    check_reference_gradients,
    check_refuses,
    check_registration,
    poisoned_empty,
)
from gem_precision.costs import grouped_linear_backward_cost, grouped_linear_cost
from gem_precision.ops import grouped_linear


def formula(x_TD, weight_XFD, offsets_O):
    """Every row by every weight, of which a mask keeps one: nothing is shared with the operator."""
    rows = torch.arange(x_TD.shape[0], device=x_TD.device)
    starts, ends = offsets_O[:-1, None], offsets_O[1:, None]
    is_of_XT = (rows >= starts) & (rows < ends)
    wide = torch.float32 if x_TD.element_size() < 4 else x_TD.dtype
    by_all_XTF = torch.einsum("td,xfd->xtf", x_TD.to(wide), weight_XFD.to(wide))
    return (by_all_XTF * is_of_XT[:, :, None]).sum(0).to(x_TD.dtype)


def inputs(counts, width, columns, *, rest=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    rows = sum(counts) + rest
    x_TD = torch.randn(rows, width, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(len(counts), columns, width, generator=draw).to(dtype).requires_grad_()
    edges = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return x_TD, weight, torch.tensor(edges, dtype=torch.int32)


def test_reference_gradients():
    check_reference_gradients(
        lambda *given: grouped_linear(*given, impl="reference"),
        inputs((2, 0, 3), 4, 5, rest=2),
        reference=formula,
    )


def test_registration():
    given = inputs((0, 3, 2), 6, 4, rest=1)
    size = {"rows": 6, "experts": 3, "width": 6, "columns": 4, "element_bytes": 4}
    check_registration(
        torch.ops.gem_precision.grouped_linear,
        (*given, "reference"),
        cost=grouped_linear_cost(**size),
        backward_cost=grouped_linear_backward_cost(**size),
    )
    check_registration(
        torch.ops.gem_precision.grouped_linear_backward,
        (torch.randn(6, 4), *(t.detach() for t in given), "reference"),
        cost=grouped_linear_backward_cost(**size),
    )


def test_compiles_whole():
    check_compiles_whole(grouped_linear, [inputs((n, 2, 0), 6, 4, rest=1) for n in (5, 9, 3)])


@pytest.mark.interpreter
def test_interpreted_kernel():
    check_interpreted_kernel(grouped_linear, formula, inputs((0, 1, 31, 33), 70, 140, rest=3))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("counts", "width", "columns"), [((0, 1, 31, 33), 40, 24), ((700, 0, 129, 1500), 200, 136)]
)
def test_kernel_on_gpu(counts, width, columns):
    given = inputs(counts, width, columns, rest=5)
    check_kernel_on_gpu(grouped_linear, formula, given)
    check_kernel_on_gpu(grouped_linear, formula, given, dtypes=(torch.float16,))


anywhere = pytest.mark.parametrize(
    ("impl", "device"),
    [
        ("reference", "cpu"),
        pytest.param("triton", "cpu", marks=pytest.mark.interpreter),
        pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    ],
)


@anywhere
@pytest.mark.parametrize("counts", [(), (0,), (0, 0), (1,), (0, 1, 31, 33)])
def test_ragged_edges(counts, impl, device):
    """What belongs to nobody is neither read nor left unwritten; idle experts have no gradient."""
    x_TD, weight, offsets_O = inputs(counts, 5, 3, rest=4)
    used = sum(counts)
    x_TD = x_TD.detach().index_fill(0, torch.arange(used, used + 4), float("nan")).to(device)
    x_TD, weight = x_TD.requires_grad_(), weight.detach().to(device).requires_grad_()
    upstream = torch.full((used + 4, 3), float("nan"))
    upstream[:used] = torch.randn(used, 3)
    with poisoned_empty("all"):
        y_TF = grouped_linear(x_TD, weight, offsets_O.to(device), impl=impl)
        grads = torch.autograd.grad(y_TF, (x_TD, weight), upstream.to(device))
    for tensor in (y_TF, *grads):
        assert bool(tensor.isfinite().all())
    assert torch.equal(y_TF[used:].cpu(), torch.zeros(4, 3))
    assert torch.equal(grads[0][used:].cpu(), torch.zeros(4, 5))
    for expert, count in enumerate(counts):
        assert bool(grads[1][expert].any()) == (count > 0)


def test_alone_equals_in_batch():
    counts = (4, 1, 7)
    x_TD, weight, offsets_O = inputs(counts, 6, 5)
    starts = offsets_O.tolist()

    def batch_of(picked):
        edges = [sum(counts[i] for i in picked[:n]) for n in range(len(picked) + 1)]
        rows = torch.cat([x_TD[starts[i] : starts[i + 1]] for i in picked])
        return rows, weight[list(picked)], torch.tensor(edges, dtype=torch.int32)

    check_alone_equals_in_batch(grouped_linear, batch_of, counts, leaves=[x_TD, weight])


def test_refuses():
    x_TD, weight, offsets_O = inputs((2, 3), 6, 4)
    check_refuses(
        [
            (lambda: grouped_linear(x_TD, weight[:, :, :5], offsets_O), ShapeError, "D=5"),
            (
                lambda: grouped_linear(x_TD, weight, offsets_O[:2]),
                ShapeError,
                "offsets_O must have 3 entries",
            ),
            (
                lambda: grouped_linear(x_TD, weight, offsets_O.long()),
                DtypeError,
                "offsets_O must be int32",
            ),
            *(
                (
                    lambda edges=edges: grouped_linear(
                        x_TD, weight, torch.tensor(edges, dtype=torch.int32)
                    ),
                    ShapeError,
                    "offsets_O must begin at 0, never fall, and end at 5 rows at most; got",
                )
                for edges in ([-3, 2, 5], [1, 2, 4], [0, 9, 5], [0, 4, 3], [0, 2, 6])
            ),
            (lambda: grouped_linear(x_TD.long(), weight, offsets_O), DtypeError, "x_TD must be"),
            (
                lambda: grouped_linear(x_TD, weight.half(), offsets_O),
                DtypeError,
                "weight_XFD must be torch.float32",
            ),
            (
                lambda: grouped_linear(x_TD, weight, offsets_O.to("meta")),
                DeviceError,
                "offsets_O must be on cpu",
            ),
            (
                lambda: grouped_linear(x_TD, weight, offsets_O, impl="fast"),
                UnsupportedError,
                "impl must be one of",
            ),
        ]
    )


@pytest.mark.gpu
def test_what_the_library_leaves_unwritten_is_cleared():
    """In bf16 and whole 16 bytes torch multiplies: memory that it does not write held ones."""
    counts = (0, 1, 31, 330, 0)
    given = [t.detach().cuda() for t in inputs(counts, 64, 200, rest=150, dtype=torch.bfloat16)]
    x_TD, weight, offsets_O = given
    used = sum(counts)
    x_TD[used:] = float("nan")
    for _ in range(3):  # memory that was just given back comes again
        ones = [torch.ones(used + 150, size, dtype=torch.bfloat16).cuda() for size in (64, 200)]
        del ones
        leaves = (x_TD.clone().requires_grad_(), weight.clone().requires_grad_())
        y_TF = grouped_linear(*leaves, offsets_O)
        upstream = torch.randn_like(y_TF)
        upstream[used:] = float("nan")
        grad_x_TD, grad_weight = torch.autograd.grad(y_TF, leaves, upstream)
        assert not bool(y_TF[used:].any())
        assert not bool(grad_x_TD[used:].any())
        assert bool(grad_weight.isfinite().all())
        assert [bool(grad.any()) for grad in grad_weight] == [count > 0 for count in counts]


@pytest.mark.interpreter
def test_kernels_compile():
    sizes = ["rows", "inner", "columns", "experts", "tiles_f", "stride_x"]
    pointers = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "offsets_ptr": "*i32", "y_ptr": "*bf16"}
    tile = {"TILE": 128, "INNER": 64, "PRECISION": "tf32"}
    strides = dict.fromkeys(["stride_t", "stride_f"], "i32")
    forward = KernelVariant(
        "_grouped_kernel",
        {**pointers, **dict.fromkeys(sizes, "i32"), **strides},
        {**tile, "GROUPS": 8, "stride_d": 1},
        warps=8,
    )
    backward = KernelVariant(
        "_grouped_weight_kernel",
        {
            **dict.fromkeys(["grad_ptr", "x_ptr", "grad_weight_ptr"], "*bf16"),
            "offsets_ptr": "*i32",
            **dict.fromkeys(["width", "columns", "tiles_f", "tiles_d"], "i32"),
            **dict.fromkeys(["stride_grad_t", "stride_x_t"], "i32"),
        },
        tile,
        warps=8,
    )
    module = "gem_precision.kernels.grouped_linear.kernel"
    for done in compile_kernels(module, [forward, backward], capabilities=[90]):
        assert done.stack_bytes == 0, done.variant
        assert "wgmma.mma_async" in done.ptx, done.variant


@pytest.mark.gpu
@pytest.mark.memcheck
def test_right_on_odd_sizes():
    x_TD, weight, offsets_O = (t.detach().cuda() for t in inputs((3, 0, 33), 17, 7, rest=2))
    y_TF = grouped_linear(x_TD.requires_grad_(), weight.requires_grad_(), offsets_O, impl="triton")
    y_TF.sum().backward()
    assert x_TD.grad is not None
    torch.testing.assert_close(y_TF, formula(x_TD, weight, offsets_O), rtol=1e-4, atol=1e-4)
