from itertools import pairwise

import pytest
import torch

from gem_opkit.compile_checks import KernelVariant, compile_kernels
from gem_opkit.errors import DtypeError, ShapeError, UnsupportedError
from gem_opkit.testing import (
    LENGTH_CASES,
    check_alone_equals_in_batch,
    check_compiles_whole,
    check_interpreted_kernel,
    check_kernel_on_gpu,
    check_reference_gradients,
    check_refuses,
    check_registration,
    check_run_budget,
    fresh,
    length_case_id,
    poisoned_empty,
    run_with_gradients,
)
from gem_precision.costs import gated_residual_backward_cost, gated_residual_cost
from gem_precision.kernels.gated_residual.cases import CASES
from gem_precision.ops import gated_residual

LENGTHS = (3, 0, 6, 1)


def inputs(lengths=LENGTHS, width=6, *, dtype=torch.float32):
    """Tokens, what is added, gates, and offsets."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.tensor(lengths, dtype=torch.int64)

    def tensor(rows):
        return torch.randn(rows, width, generator=draw).to(dtype).requires_grad_()

    tokens = int(lengths.sum())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return tensor(tokens), tensor(tokens), tensor(len(lengths)), offsets


def formula(x, out, gate, offsets, impl="auto"):
    """Sequence by sequence."""
    bounds = offsets.tolist()
    parts = [
        x[low:high] + gate[b] * out[low:high] for b, (low, high) in enumerate(pairwise(bounds))
    ]
    return torch.cat(parts) if parts else x


def test_reference_gradients():
    check_reference_gradients(gated_residual, inputs(), reference=formula)


def test_registration():
    x, out, gate, offsets = inputs()
    size = {"batch": 4, "total_tokens": 10, "width": 6, "element_bytes": 4}
    check_registration(
        torch.ops.gem_precision.gated_residual,
        (x, out, gate, offsets, "reference"),
        cost=gated_residual_cost(**size),
        backward_cost=gated_residual_backward_cost(**size),
    )
    check_registration(
        torch.ops.gem_precision.gated_residual_backward,
        (torch.randn(10, 6), out.detach(), gate.detach(), offsets, "reference"),
        cost=gated_residual_backward_cost(**size),
    )


def test_compiles_whole():
    check_compiles_whole(gated_residual, [inputs(n) for n in (LENGTHS, (5, 4), (2, 0, 7))])


@pytest.mark.interpreter
def test_interpreted_kernel(monkeypatch):
    import gem_precision.kernels.gated_residual.kernel as kernel

    # Columns in several blocks, rows in several tiles, parts without rows.
    monkeypatch.setattr(kernel, "_WIDEST_BLOCK", 16)
    monkeypatch.setattr(kernel, "_TILE_ELEMENTS", 64)
    monkeypatch.setattr(kernel, "_PARTS", 3)
    check_interpreted_kernel(gated_residual, formula, inputs((40, 0, 1, 2), 24))


@pytest.mark.gpu
def test_kernel_on_gpu():
    given = inputs((300, 0, 1, 2000, 17), 130)
    check_kernel_on_gpu(gated_residual, formula, given)
    check_kernel_on_gpu(
        gated_residual, formula, inputs((5, 700), 512), dtypes=(torch.bfloat16, torch.float16)
    )
    check_kernel_on_gpu(gated_residual, formula, inputs((5, 70), 1500), dtypes=(torch.bfloat16,))


@pytest.mark.parametrize("lengths", LENGTH_CASES, ids=length_case_id)
def test_ragged_edges(lengths):
    x, out, gate, offsets = inputs(lengths.lengths, 3)
    y = gated_residual(x, out, gate, offsets)
    torch.testing.assert_close(y, formula(x, out, gate, offsets))
    y.sum().backward()
    assert gate.grad.shape == gate.shape
    assert bool(gate.grad.isfinite().all())


def test_alone_equals_in_batch():
    x, out, gate, offsets = inputs()
    bounds = offsets.tolist()

    def make(picked):
        rows = [t for b in picked for t in range(bounds[b], bounds[b + 1])]
        lengths = torch.tensor([bounds[b + 1] - bounds[b] for b in picked])
        own = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return x[rows], out[rows], gate[picked], own

    check_alone_equals_in_batch(gated_residual, make, LENGTHS, leaves=[x, out, gate], bitwise=True)


def test_refuses():
    x, out, gate, offsets = inputs()
    check_refuses(
        [
            (lambda: gated_residual(x, out[:3], gate, offsets), ShapeError, "out_TD"),
            (lambda: gated_residual(x, out, gate[:2], offsets), ShapeError, "offsets_O"),
            (lambda: gated_residual(x.long(), out, gate, offsets), DtypeError, "x_TD must be fl"),
            (
                lambda: gated_residual(x, out, gate, offsets.float()),
                DtypeError,
                "offsets_O must be int32 or int64",
            ),
            (
                lambda: gated_residual(x, out, gate, offsets, impl="fast"),
                UnsupportedError,
                "impl must be one of",
            ),
        ]
    )


@pytest.mark.parametrize("case", [c for c in CASES if c.device == "cpu"], ids=lambda c: c.name)
def test_half_precision_is_within_the_error_budget(case):
    lengths = tuple(range(1, case.longest, case.longest // case.batch))
    halves = inputs(lengths, case.width, dtype=torch.bfloat16)
    exact = run_with_gradients(formula, fresh(halves, dtype=torch.float64))
    low = run_with_gradients(formula, fresh(halves))
    check_run_budget(run_with_gradients(gated_residual, fresh(halves)), low, exact)


@pytest.mark.interpreter
def test_kernels_compile_without_spills():
    shared = {"DOUBLE": False, "PARTS": 16, "R": 4, "BLOCK_D": 512}
    forward = ("x", "out", "gate", "y")
    backward = ("grad", "out", "gate", "grad_out")
    variants = [
        KernelVariant(
            name,
            {**{f"{p}_ptr": "*bf16" for p in pointers}, "offsets_ptr": "*i64", **numbers},
            shared,
            aligned=[*(f"{p}_ptr" for p in pointers), *(n for n in numbers)],
        )
        for name, pointers, numbers in (
            ("_forward_kernel", forward, dict.fromkeys(("width", "x_stride", "out_stride"), "i32")),
            (
                "_backward_kernel",
                backward,
                {
                    "parts_ptr": "*fp32",
                    **dict.fromkeys(("width", "grad_stride", "out_stride"), "i32"),
                },
            ),
        )
    ]
    for done in compile_kernels("gem_precision.kernels.gated_residual.kernel", variants):
        assert done.stack_bytes == 0
        assert "ld.global.v4" in done.ptx


@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("width", [7, 130])
def test_right_on_odd_sizes(width):
    # Expected values come from the CPU: under the sanitizer every kernel of torch is slow too.
    given = inputs((3, 0, 70, 1), width)
    with poisoned_empty("all"):
        kernel = run_with_gradients(
            lambda *x: gated_residual(*x, impl="triton"), fresh(given, device="cuda")
        )
    for tensors in (kernel.outputs, kernel.gradients):
        tensors[:] = [t.cpu() for t in tensors]
    low, exact = (run_with_gradients(formula, fresh(given, dtype=d)) for d in (None, torch.float64))
    check_run_budget(kernel, low, exact)
