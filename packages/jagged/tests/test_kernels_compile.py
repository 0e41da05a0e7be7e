"""Every kernel compiles for Hopper and Blackwell as the operators really launch it."""

from collections import defaultdict
from contextlib import contextmanager

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
    padded_to_jagged,
)
from gem_opkit.compile_checks import KernelVariant, compile_kernels
from gem_opkit.testing import run_with_gradients

# Counts that change with every batch: the kernels ask Triton not to look at their values.
COUNTS = {"rows", "slots", "length", "batch", "selected", "fill"}
TYPES = {
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


@contextmanager
def recorded_launches():
    """Collect the variants of all kernels that the interpreter is asked to run, by module."""
    from triton.runtime.interpreter import GridExecutor

    variants = defaultdict(dict)
    original = GridExecutor.__call__

    def record(self, *args, **kwargs):
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        arguments, constants, aligned = {}, {}, []
        warps = given.get("num_warps", 4)
        for name in self.arg_names:
            value = given[name]
            if isinstance(value, torch.Tensor):
                arguments[name] = TYPES[value.dtype]
                aligned.append(name)
            elif name.isupper() or (value == 1 and name not in COUNTS):
                constants[name] = value
            else:
                arguments[name] = "i32"
                if value % 16 == 0 and name not in COUNTS:
                    aligned.append(name)
        variant = KernelVariant(
            self.fn.__name__, arguments, constants, warps=warps, aligned=tuple(aligned)
        )
        variants[self.fn.__module__][str(variant)] = variant
        return original(self, *args, **kwargs)

    GridExecutor.__call__ = record
    try:
        yield variants
    finally:
        GridExecutor.__call__ = original


def launch_all(width, dtype, offsets):
    lengths = (3, 300, 0)
    layout = Layout.from_lengths(lengths, dtype=offsets)
    other = Layout.from_lengths(lengths[::-1], dtype=offsets)

    def leaf(*shape):
        return torch.randn(shape).to(dtype).requires_grad_()

    values, dense = leaf(303, width), leaf(3, width)
    last = {"left": 300, "right": 4}
    calls = [
        *(
            (
                lambda x, a=align: jagged_to_padded(
                    x, layout, length=last[a], align=a, impl="triton"
                ),
                [values],
            )
            for align in last
        ),
        (lambda x: padded_to_jagged(x, layout, impl="triton"), [leaf(3, 300, width)]),
        (lambda x, y: jagged_concat(x, layout, y, other, impl="triton")[0], [values, values]),
        (lambda x: jagged_split(x, layout, other, impl="triton"), [leaf(606, width)]),
        (lambda x: jagged_take_last(x, layout, 4, impl="triton")[0], [values]),
        (
            lambda x: jagged_index_select(x, layout, torch.tensor([1, 0, 1]), impl="triton")[0],
            [values],
        ),
        (lambda x: jagged_mean(x, layout, impl="triton"), [values]),
        (lambda x: jagged_sum(x, layout, impl="triton"), [values]),
        (lambda x, y: jagged_broadcast_add(x, layout, y, impl="triton"), [values, dense]),
        (
            lambda x, w, b: jagged_dense_bmm(x, layout, w, bias_BF=b, impl="triton"),
            [values, leaf(3, width, 64), leaf(3, 64)],
        ),
    ]
    for call, inputs in calls:
        run_with_gradients(call, inputs)


# The values of bf16 are wrong in the interpreter; here only the launches are looked at.
@pytest.mark.interpreter
def test_every_kernel_compiles_for_hopper_and_blackwell():
    with recorded_launches() as variants:
        launch_all(128, torch.bfloat16, torch.int64)
    names = {variant.kernel for found in variants.values() for variant in found.values()}
    assert len(names) == 12
    for module, found in variants.items():
        for done in compile_kernels(module, list(found.values())):
            assert done.stack_bytes == 0, f"{done.variant.kernel} spills on sm_{done.capability}"
            if module == "gem_jagged.moves.kernel":
                # Rows of 256 bytes move in words of 16.
                assert "v2.b64" in done.ptx, done.variant


@pytest.mark.interpreter
def test_means_of_float64_compile():
    # The interpreter does not see a branch that the compiler cannot type.
    layout = Layout.from_lengths((3, 300, 0))
    values = torch.randn(303, 5, dtype=torch.float64, requires_grad=True)
    with recorded_launches() as variants:
        run_with_gradients(lambda x: jagged_mean(x, layout, impl="triton"), [values])
    found = list(variants["gem_jagged.sums.kernel"].values())
    assert {v.kernel for v in found} == {
        *("_piece_sum_kernel", "_long_sum_kernel", "_spread_kernel"),
    }
    assert all(v.constants["WIDE"] for v in found)
    compile_kernels("gem_jagged.sums.kernel", found, capabilities=(90,))
