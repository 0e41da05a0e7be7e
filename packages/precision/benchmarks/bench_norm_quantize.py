"""Time ``norm_quantize`` against a copy, against a norm and quantising one by one, and compiled.

What bounds it is memory: the copy is one of as many bytes, half read and half written, so that its
time over the own one is the share of the bandwidth of a copy that is reached.

Run ``python packages/precision/benchmarks/bench_norm_quantize.py`` in the repository's root.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_opkit.bench import BenchCase
from gem_opkit.bench_scripts import Group, run_script
from gem_opkit.budget import CheckFailure
from gem_precision.costs import norm_quantize_cost
from gem_precision.kernels.norm_quantize.cases import CASES, NormQuantizeCase
from gem_precision.ops import (
    BlockMatrix,
    MxMatrix,
    block_quantize,
    layer_norm,
    mx_quantize,
    mx_quantize_both,
    norm_block_quantize,
    norm_quantize,
    norm_quantize_both,
    rms_norm,
)

Call = Callable[..., Any]
Made = MxMatrix | BlockMatrix | tuple[MxMatrix, MxMatrix]
EPS = 1e-6
# It takes long to compile.
COMPILED = ("tokens_512", "rows_2048_both")


def inputs_of(case: NormQuantizeCase, device: str, rows: int) -> tuple[Tensor, Tensor | None]:
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    x_TD = torch.randn(rows, case.width, device=device, dtype=dtype)
    return x_TD, torch.randn_like(x_TD) if case.before else None


def ours(case: NormQuantizeCase, x_TD: Tensor, before_TD: Tensor | None) -> Made:
    given: dict[str, Any] = {"kind": case.kind, "before_TD": before_TD, "eps": EPS}
    if case.along == "block":
        return norm_block_quantize(x_TD, **given)
    if case.along == "both":
        return norm_quantize_both(x_TD, **given)
    if case.along == "square":
        return norm_quantize(x_TD, block="32x32", **given)
    return norm_quantize(x_TD, along=case.along, **given)


def chain(case: NormQuantizeCase, x_TD: Tensor, before_TD: Tensor | None) -> Made:
    """Do the same with two kernels: the norm is written, and read again."""
    norm = rms_norm if case.kind == "rms" else layer_norm
    y_TD = norm(x_TD, before=before_TD, eps=EPS)
    if case.along == "block":
        return block_quantize(y_TD)
    if case.along == "both":
        return mx_quantize_both(y_TD)
    if case.along == "square":
        return mx_quantize(y_TD, block="32x32")
    return mx_quantize(y_TD, along=case.along)


def plain(case: NormQuantizeCase, x_TD: Tensor, before_TD: Tensor | None) -> list[Tensor]:
    """Do the same in plain torch; at the ends of the range a scale may differ."""
    a = x_TD if before_TD is None else x_TD + before_TD
    y_TD = F.rms_norm(a, (case.width,), None, EPS)
    blocks = [(1, 32), (32, 1)] if case.along == "both" else [(1, 32)]
    made = []
    for rows, columns in blocks:
        tiles = y_TD.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        quotient = (tiles.abs().amax(dim=(1, 3), keepdim=True) / 448.0).view(torch.int32)
        code = (quotient + 0x7F_FFFF) >> 23
        scaled = tiles * ((254 - code) << 23).view(torch.float32)
        made += [scaled.to(torch.float8_e4m3fn).reshape(x_TD.shape), code.to(torch.uint8)]
    return made


def check(case: NormQuantizeCase, device: str) -> None:
    """Hold the bytes of some rows to those of the two kernels one after the other."""
    inputs = inputs_of(case, device, 1000)
    for got, expected in zip(
        _tensors(ours(case, *inputs)), _tensors(chain(case, *inputs)), strict=True
    ):
        if not torch.equal(got, expected):
            raise CheckFailure(f"{case.name}: not the bytes of a norm and of quantising it")


def _tensors(made: Made) -> list[Tensor]:
    matrices = made if isinstance(made, tuple) else (made,)
    return [t for m in matrices for t in (m.elements_TD, m.scales)]


def rows_of(case: NormQuantizeCase, device: str) -> list[BenchCase]:
    inputs = inputs_of(case, device, case.rows)
    cost = norm_quantize_cost(
        rows=case.rows,
        width=case.width,
        element_bytes=inputs[0].element_size(),
        along=case.along,
        read=1 + case.before,
    )
    # As many bytes as the case has, half of them read.
    copied = torch.zeros(cost.bytes // 2, dtype=torch.uint8, device=device)
    peers: dict[str, Call] = {"copy": copied.clone, "chain": partial(chain, case, *inputs)}
    if device.startswith("cuda") and case.name in COMPILED:
        peers["compiled"] = partial(torch.compile(partial(plain, case), dynamic=False), *inputs)
    return [
        BenchCase(
            name=case.name,
            run=partial(ours, case, *inputs),
            check=partial(check, case, device),
            cost=cost,
            shapes={
                "rows": case.rows,
                "width": case.width,
                "kind": case.kind,
                "along": case.along,
                "before": case.before,
            },
            dtype="bf16" if device.startswith("cuda") else "fp32",
            peers=peers,
        )
    ]


def groups_of(device: str) -> Iterable[Group]:
    for case in (case for case in CASES if device.startswith(case.device)):
        yield case.name, partial(rows_of, case, device)


if __name__ == "__main__":
    run_script("norm_quantize", groups_of)
