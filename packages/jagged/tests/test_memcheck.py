"""Every kernel on small odd sizes, quick enough to be repeated under compute-sanitizer."""

import sys
from pathlib import Path

import pytest
import torch

import gem_jagged
from gem_opkit.launched import kernels_of, launched_kernels
from gem_opkit.testing import check_run_budget, fresh, poisoned_empty, run_with_gradients

sys.path.insert(0, str(Path(__file__).parent))

from operator_calls import calls

# Longer than a piece of any sum, empty, and of one token; no count is a multiple of a tile.
LENGTHS = (3, 0, 300, 1, 0, 129)
CASES = [
    (1, torch.float32),
    (7, torch.bfloat16),
    (24, torch.float16),
    (96, torch.bfloat16),
    (130, torch.float32),
    (5, torch.float64),
]
OPERATORS = sorted({name for name, _, _ in calls((1,), 1)})


def run(operator, width, dtype, *, on_gpu):
    torch.manual_seed(0)
    device = "cuda" if on_gpu else "cpu"
    runs = []
    for name, call, tensors in calls(LENGTHS, width, dtype=dtype, device=device):
        if name != operator or (name == "jagged_dense_bmm" and dtype == torch.float64):
            continue  # the one operator whose kernel does not take it
        if on_gpu:
            with poisoned_empty("all"):
                runs.append(run_with_gradients(lambda *x, c=call: c(*x, impl="triton"), tensors))
        else:
            for precision in (dtype, torch.float64):
                inputs = fresh(tensors, dtype=precision)
                runs.append(run_with_gradients(lambda *x, c=call: c(*x, impl="reference"), inputs))
    return runs


def on_cpu(result):
    for tensors in (result.outputs, result.gradients):
        tensors[:] = [x if x is None else x.cpu() for x in tensors]
    return result


def test_every_operator_with_a_kernel_is_called():
    folder = Path(gem_jagged.__file__).parent / "kernels"
    assert set(OPERATORS) == {file.parent.name for file in folder.glob("*/kernel.py")}


# What is right is computed on the CPU: under the sanitizer every kernel of torch is slow too.
@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("operator", OPERATORS)
def test_right_on_odd_sizes(operator):
    for width, dtype in CASES:
        kernels = run(operator, width, dtype, on_gpu=True)
        references = run(operator, width, dtype, on_gpu=False)
        assert len(references) == 2 * len(kernels)
        assert kernels or dtype == torch.float64
        for kernel, low, exact in zip(kernels, references[::2], references[1::2], strict=True):
            check_run_budget(on_cpu(kernel), low, exact, what=f"{width}, {dtype}: ")


@pytest.mark.gpu
def test_no_kernel_is_left_out():
    with launched_kernels() as started:
        for operator in OPERATORS:
            for width, dtype in CASES:
                run(operator, width, dtype, on_gpu=True)
    assert kernels_of("gem_jagged") <= started
