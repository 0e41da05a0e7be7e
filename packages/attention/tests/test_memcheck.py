"""Every kernel on small odd sizes, quick enough to be repeated under compute-sanitizer."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gem_attention
from gem_attention import ops
from gem_jagged.batch import Layout
from gem_opkit.budget import check_budget
from gem_opkit.launched import kernels_of, launched_kernels
from gem_opkit.testing import check_run_budget, fresh, poisoned_empty, run_with_gradients

# No length is a multiple of a tile; empty on either side and on both; one token.
LENGTHS = ((150, 0, 33, 1, 0), (70, 3, 129, 1, 0))
FEW_QUERIES = ((31, 1, 0, 5), (70, 3, 129, 0))
FEW_KEYS = ((150, 0, 33, 1, 0), (70, 3, 0, 1, 128))
# Hopper's forward has three consumers from a mean of 768 on.
LONG = ((1501, 37), (901, 641))
# So many sequences that Hopper's kernels take seeds that are the same for all.
MANY = ((1,) * 280, (33, 0, 70, 1) * 70)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Small:
    """A call: what is not said is an option of the operator."""

    operator: str
    width: int
    dtype: torch.dtype = BF16
    lengths: tuple[tuple[int, ...], tuple[int, ...]] = LENGTHS
    kv_heads: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    seeds: int = 9


FLASH, GENERAL, POOLED = "jagged_flash_attention", "generalized_attention", "pooled_attention"
BLOCK, NORMED, ROTARY = "block_attention", "normed_attention", "rotary_heads"
MX = "mx_attention"
CASES = [
    # Hopper's own, then the plain ones: other widths, determinism, float32, few queries.
    Small(FLASH, 128),
    Small(FLASH, 128, kv_heads=1, options={"window": (40, 9)}),
    Small(FLASH, 64, FP16, options={"causal": True}),
    Small(FLASH, 128, options={"deterministic": True}),
    Small(FLASH, 24, kv_heads=1, options={"window": (40, 9)}),
    Small(FLASH, 16, FP32),
    Small(FLASH, 64, lengths=FEW_QUERIES),
    Small(GENERAL, 128, options={"activation": "gelu"}),
    Small(GENERAL, 128, lengths=LONG, kv_heads=1, options={"activation": ("silu", "relu")}),
    Small(GENERAL, 64, kv_heads=1, options={"activation": "silu", "window": (40, 9)}),
    Small(GENERAL, 24, options={"activation": ("relu", "fast_gelu")}),
    Small(GENERAL, 16, FP32, options={"activation": "silu"}),
    *(
        Small(POOLED, width, dtype, lengths, kv_heads, {"activation": activation})
        for width, dtype, lengths, kv_heads, activation in (
            (128, BF16, FEW_QUERIES, 2, "softmax"),
            (24, FP16, LENGTHS, 1, "gelu"),
            (16, FP32, FEW_QUERIES, 2, "softmax"),
            # One sequence of many keys is shared by several programs.
            (64, BF16, ((3,), (5000,)), 2, "softmax"),
        )
    ),
    Small(POOLED, 128, lengths=MANY, options={"activation": "softmax"}, seeds=256),
    Small(BLOCK, 128, options={"rotary": "position"}),
    Small(BLOCK, 64, kv_heads=1, options={"block_tokens": 128}),
    Small(BLOCK, 128, options={"block_tokens": 128, "rotary": "position"}),
    Small(BLOCK, 24, FP16, options={"block_tokens": 5, "rotary": "position"}),
    Small(BLOCK, 200, options={"block_tokens": 32}),
    Small(BLOCK, 16, FP32),
    # One head, and two. Queries are normalised and rounded inside, which turns the sign of a score
    # next to 0: no activation here whose slope jumps there.
    Small(NORMED, 128, lengths=FEW_KEYS, kv_heads=1),
    Small(NORMED, 128, FP16, lengths=FEW_KEYS, options={"activation": "silu"}),
    Small(NORMED, 64, lengths=FEW_KEYS, kv_heads=1),
    Small(NORMED, 24, FP16, lengths=FEW_KEYS, kv_heads=1, options={"activation": "silu"}),
    Small(NORMED, 64, lengths=FEW_KEYS),
    Small(NORMED, 24, FP16, lengths=FEW_KEYS, options={"activation": ("silu", "gelu")}),
    Small(MX, 64, options={"window": (40, 9)}),
    Small(MX, 40, FP16, kv_heads=1, options={"scaling": "mxfp8_floor"}),
    Small(ROTARY, 128, options={"heads": 2, "key_heads": 2}),
    Small(ROTARY, 14, FP32, kv_heads=1, options={"heads": 3, "key_heads": 1, "normed": False}),
]

# What has a kernel of its own where no gradients are asked for.
ALONE = [case for case in CASES if case.operator == NORMED and case.kv_heads == 1]


def operands(case, *, device):
    torch.manual_seed(0)
    if case.operator == ROTARY:
        heads = case.options["heads"] + 2 * case.kv_heads
        layout = Layout.from_lengths(list(case.lengths[0]), device=device)
        qkv = torch.randn(layout.total_tokens, heads, case.width)
        return qkv.to(device, case.dtype).requires_grad_(), layout
    q_lengths, k_lengths = case.lengths
    if case.operator == BLOCK:
        k_lengths = q_lengths
    rows = case.seeds if case.operator == POOLED else sum(q_lengths)
    q = torch.randn(rows, 2, case.width)
    k, v = (torch.randn(sum(k_lengths), case.kv_heads, case.width) for _ in range(2))
    if case.operator != FLASH:
        q, k = q / case.width**0.25, k / case.width**0.25
    layouts = [Layout.from_lengths(list(lengths), device=device) for lengths in case.lengths]
    tensors = [x.to(device, case.dtype).requires_grad_() for x in (q, k, v)]
    if case.operator == NORMED:
        x = tensors[0][:, : case.kv_heads].flatten(1)
        return (x, *(t[:, : case.kv_heads] for t in tensors[1:]), *layouts)
    taken = {POOLED: layouts[1:], BLOCK: layouts[:1]}
    return (*tensors, *taken.get(case.operator, layouts))


def call(case, *, impl):
    return partial(getattr(ops, case.operator), impl=impl, **case.options)


def run_kernel(case):
    with poisoned_empty("all"):
        return run_with_gradients(call(case, impl="triton"), operands(case, device="cuda"))


def run_alone(case):
    with poisoned_empty("all"), torch.no_grad():
        return call(case, impl="triton")(*operands(case, device="cuda"))


def test_every_operator_with_a_kernel_is_called():
    folder = Path(gem_attention.__file__).parent / "kernels"
    have_kernels = {file.parent.name for file in folder.glob("*/kernel.py")}
    assert have_kernels <= {case.operator for case in CASES}


# What is right is computed on the CPU: under the sanitizer every kernel of torch is slow too.
@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.operator}-{case.width}")
def test_right_on_odd_sizes(case):
    kernel = run_kernel(case)
    for tensors in (kernel.outputs, kernel.gradients):
        tensors[:] = [x.cpu() for x in tensors]
    inputs = operands(case, device="cpu")
    exact = case
    if case.operator == MX:  # which takes no float64: what it rounds is attention
        window = case.options.get("window", (None, None))
        exact = replace(case, operator=FLASH, options={"window": window})
    low, exact = (
        run_with_gradients(call(which, impl="reference"), fresh(inputs, dtype=dtype))
        for which, dtype in ((case, case.dtype), (exact, torch.float64))
    )
    check_run_budget(kernel, low, exact)


@pytest.mark.gpu
@pytest.mark.memcheck
@pytest.mark.parametrize("case", ALONE, ids=lambda case: f"{case.operator}-{case.width}")
def test_right_without_gradients(case):
    inputs = operands(case, device="cpu")
    low, exact = (
        call(case, impl="reference")(*fresh(inputs, dtype=dtype))
        for dtype in (case.dtype, torch.float64)
    )
    check_budget(run_alone(case).cpu(), low.detach(), exact.detach())


@pytest.mark.gpu
def test_no_kernel_is_left_out():
    with launched_kernels() as started:
        for case in CASES:
            run_kernel(case)
        for case in ALONE:
            run_alone(case)
    assert kernels_of("gem_attention") <= started
