"""Time ``block_quantize`` against a copy of its input, and against plain torch, compiled.

What bounds it is memory: its row tells which share of the bandwidth of a copy it reaches.

Run ``python packages/precision/benchmarks/bench_block_quantize.py`` in the repository's root.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gem_opkit.bench import BenchCase
from gem_opkit.bench_scripts import Group, run_script
from gem_opkit.budget import CheckFailure
from gem_precision.costs import block_quantize_cost
from gem_precision.elements import WIDE_BLOCK
from gem_precision.kernels.block_quantize.cases import CASES, BlockCase
from gem_precision.ops import BlockMatrix, block_quantize, block_quantize_both

Call = Callable[..., Any]


def matrix_of(case: BlockCase, device: str, rows: int) -> Tensor:
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    return torch.randn(rows, case.width, device=device, dtype=dtype)


def ours(case: BlockCase, x_TD: Tensor) -> tuple[BlockMatrix, ...]:
    if case.copies == 2:
        return block_quantize_both(x_TD)
    return (block_quantize(x_TD, block=case.block),)


def theirs(case: BlockCase, x_TD: Tensor) -> list[Tensor]:
    """Do the same with torch's own casts, on a matrix of whole blocks."""
    rows = 1 if case.block == "1x128" else WIDE_BLOCK
    tiles = x_TD.float().unflatten(1, (-1, WIDE_BLOCK)).unflatten(0, (-1, rows))
    quotient = (tiles.abs().amax(dim=(1, 3), keepdim=True) / 448.0).view(torch.int32)
    code = (quotient + 0x7F_FFFF) >> 23
    scaled = tiles * ((254 - code) << 23).view(torch.float32)
    elements_TD = scaled.to(torch.float8_e4m3fn).reshape(x_TD.shape)
    made = [elements_TD, (code << 23).view(torch.float32)]
    return [*made, elements_TD.T.contiguous()] if case.copies == 2 else made


def check(case: BlockCase, device: str) -> None:
    """Hold the bytes of some rows to those of the reference on a CPU."""
    x_TD = matrix_of(case, device, 1000)
    for made, expected in zip(ours(case, x_TD), ours(case, x_TD.cpu()), strict=True):
        for name in ("elements_TD", "scales"):
            if not torch.equal(getattr(made, name).cpu(), getattr(expected, name)):
                raise CheckFailure(f"{case.name}: {name} are not the bytes of the reference")


def rows_of(case: BlockCase, device: str) -> list[BenchCase]:
    x_TD = matrix_of(case, device, case.rows)
    peers: dict[str, Call] = {"copy": x_TD.clone}
    if device.startswith("cuda") and case.name == "activations_2048":  # it takes long to compile
        peers["compiled"] = partial(torch.compile(partial(theirs, case), dynamic=False), x_TD)
    return [
        BenchCase(
            name=case.name,
            run=partial(ours, case, x_TD),
            check=partial(check, case, device),
            cost=block_quantize_cost(
                rows=case.rows,
                width=case.width,
                element_bytes=x_TD.element_size(),
                block=case.block,
                copies=case.copies,
            ),
            shapes={
                "rows": case.rows,
                "width": case.width,
                "block": case.block,
                "copies": case.copies,
            },
            dtype="bf16" if device.startswith("cuda") else "fp32",
            peers=peers,
        )
    ]


def groups_of(device: str) -> Iterable[Group]:
    for case in (case for case in CASES if device.startswith(case.device)):
        yield case.name, partial(rows_of, case, device)


if __name__ == "__main__":
    run_script("block_quantize", groups_of)
