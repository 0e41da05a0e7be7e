"""Time ``mx_attention``, forward and backward, against attention in bf16.

Only on GPUs whose tensor cores multiply MXFP8: elsewhere it is emulated, and its times say nothing
of the format. There the script refuses, and names what to time instead.

Run ``python packages/attention/benchmarks/bench_mx_attention.py`` in the root.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from gem_attention.kernels.mx_attention.cases import CASES
from gem_attention.kernels.mx_attention.cost import mx_attention_backward_cost, mx_attention_cost
from gem_attention.kernels.mx_attention.op import demand_native
from gem_attention.ops import jagged_flash_attention, mx_attention
from gem_attention.patterns import visible_pairs
from gem_attention.workloads import AttentionCase
from gem_jagged.batch import Layout
from gem_opkit.bench import BenchCase, backward_of
from gem_opkit.bench_scripts import Group, run_script
from gem_opkit.budget import CheckFailure


def drawn(case: AttentionCase, device: str) -> tuple[Any, ...]:
    layouts = [
        Layout.from_lengths(list(side), device=device) for side in (case.q_lengths, case.keys)
    ]
    shapes = (
        (layouts[0].total_tokens, case.heads),
        (layouts[1].total_tokens, case.kv_heads),
        (layouts[1].total_tokens, case.kv_heads),
    )
    operands = [
        torch.randn(*shape, case.head_width, device=device, dtype=torch.bfloat16).requires_grad_()
        for shape in shapes
    ]
    return *operands, *layouts


def check(case: AttentionCase, device: str) -> None:
    """Hold the output of the first sequences to attention in bf16: rounding to 8 bits is 5 %."""
    few = AttentionCase(
        case.name, case.q_lengths[:4], case.keys[:4], case.heads, case.kv_heads, case.head_width,
        case.window,
    )  # fmt: skip
    inputs = drawn(few, device)
    low = mx_attention(*inputs, window=case.window)
    right = jagged_flash_attention(*inputs, window=case.window)
    error = float((low - right).float().norm() / right.float().norm())
    if not 0.005 < error < 0.08:
        raise CheckFailure(f"{case.name}: off by {error:.3f} from bf16, where 8 bits explain 0.05")


def rows_of(case: AttentionCase, device: str) -> list[BenchCase]:
    inputs = drawn(case, device)
    pairs = visible_pairs(inputs[3].lengths, inputs[4].lengths, *case.window)
    size = {
        "visible_pairs": pairs, "q_tokens": inputs[0].shape[0], "k_tokens": inputs[1].shape[0],
        "heads": case.heads, "kv_heads": case.kv_heads, "head_width": case.head_width,
        "value_width": case.head_width, "element_bytes": 2,
    }  # fmt: skip
    given = {"window": case.window, "visible_pairs": pairs}
    ours, bf16 = partial(mx_attention, **given), partial(jagged_flash_attention, **given)
    rows = []
    for which, cost in (
        ("forward", mx_attention_cost(**size)),
        ("backward", mx_attention_backward_cost(**size)),
    ):
        calls = {
            who: backward_of(fn, inputs) if which == "backward" else partial(fn, *inputs)
            for who, fn in (("ours", ours), ("bf16", bf16))
        }
        rows.append(
            BenchCase(
                name=f"{case.name}_{which}",
                run=calls["ours"],
                check=partial(check, case, device),
                cost=cost,
                shapes={key: value for key, value in size.items() if key != "element_bytes"},
                dtype="bf16",
                peers={"bf16": calls["bf16"]},
                fp8_flops=cost.flops,
            )
        )
    return rows


def groups_of(device: str) -> Iterator[Group]:
    demand_native(device)
    for case in CASES:
        if case.device == "cuda":
            yield case.name, partial(rows_of, case, device)


if __name__ == "__main__":
    run_script("mx_attention", groups_of)
