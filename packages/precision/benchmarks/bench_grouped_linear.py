"""Time ``grouped_linear`` against torch's grouped product, and against a product an expert.

Torch's grouped product and the loop leave rows of nobody as they are; the loop reads the numbers of
rows on the host.

Run ``python packages/precision/benchmarks/bench_grouped_linear.py`` in the repository's root.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_opkit.bench import BenchCase
from gem_opkit.bench_scripts import Group, run_script
from gem_opkit.budget import check_budget
from gem_precision.costs import grouped_linear_backward_cost, grouped_linear_cost
from gem_precision.kernels.grouped_linear.cases import CASES, GroupedCase
from gem_precision.kernels.grouped_linear.reference import grouped_linear_reference
from gem_precision.ops import grouped_linear


def tensors_of(case: GroupedCase, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    rows, experts = sum(case.rows_of) + case.rest, len(case.rows_of)
    x_TD = torch.randn(rows, case.width, device=device, dtype=dtype)
    weight = torch.randn(experts, case.columns, case.width, device=device, dtype=dtype)
    grad_TF = torch.randn(rows, case.columns, device=device, dtype=dtype)
    edges = [sum(case.rows_of[:i]) for i in range(experts + 1)]
    offsets_O = torch.tensor(edges, dtype=torch.int32, device=device)
    return x_TD, weight * case.width**-0.5, offsets_O, grad_TF


def backward(given: tuple[Tensor, ...]) -> Any:
    x_TD, weight, offsets_O, grad_TF = given
    ops = torch.ops.gem_precision
    return ops.grouped_linear_backward(grad_TF, x_TD, weight, offsets_O, "auto")


def by_torch(given: tuple[Tensor, ...], *, back: bool) -> Any:
    x_TD, weight, offsets_O, grad_TF = given
    ends = offsets_O[1:]
    if not back:
        return F.grouped_mm(x_TD, weight.transpose(1, 2), offs=ends)
    made = F.grouped_mm(grad_TF, weight, offs=ends)
    return made, F.grouped_mm(grad_TF.T, x_TD, offs=ends)


def by_loop(given: tuple[Tensor, ...], edges: list[int], *, back: bool) -> Any:
    x_TD, weight, _, grad_TF = given
    parts = zip(edges, edges[1:], weight, strict=False)
    if not back:
        return torch.cat([x_TD[a:b] @ w.T for a, b, w in parts])
    made = [(grad_TF[a:b] @ w, grad_TF[a:b].T @ x_TD[a:b]) for a, b, w in parts]
    return torch.cat([m for m, _ in made]), torch.stack([m for _, m in made])


def check(case: GroupedCase, device: str) -> None:
    x_TD, weight, offsets_O, _ = tensors_of(case, device)
    y_TF = grouped_linear(x_TD, weight, offsets_O)
    picked = torch.linspace(0, sum(case.rows_of) - 1, 500).long().to(device)
    low = grouped_linear_reference(x_TD, weight, offsets_O)[picked]
    expert = (picked[:, None] >= offsets_O[None, 1:]).sum(1)
    rows = [x_TD[t].double() @ weight[e].double().T for t, e in zip(picked, expert, strict=True)]
    check_budget(y_TF[picked], low, torch.stack(rows), what=case.name, noise_scale=case.width)


def rows_of(case: GroupedCase, device: str) -> list[BenchCase]:
    given = tensors_of(case, device)
    rows, experts = sum(case.rows_of), len(case.rows_of)
    size = {"rows": rows, "experts": experts, "width": case.width, "columns": case.columns}
    size["element_bytes"] = given[0].element_size()
    edges = given[2].tolist()
    made: list[BenchCase] = []
    for name, run, cost in (
        ("forward", partial(grouped_linear, *given[:3]), grouped_linear_cost(**size)),
        ("backward", partial(backward, given), grouped_linear_backward_cost(**size)),
    ):
        back = name == "backward"
        peers: dict[str, Callable[..., Any]] = {
            "a product an expert": partial(by_loop, given, edges, back=back)
        }
        if device.startswith("cuda"):
            peers["torch's grouped_mm"] = partial(by_torch, given, back=back)
        made.append(
            BenchCase(
                name=f"{case.name} {name}",
                run=run,
                check=partial(check, case, device),
                cost=cost,
                shapes={
                    "rows_of": list(case.rows_of),
                    "width": case.width,
                    "columns": case.columns,
                },
                dtype="bf16" if device.startswith("cuda") else "fp32",
                peers=peers,
            )
        )
    return made


def groups_of(device: str) -> Iterable[Group]:
    for case in (case for case in CASES if device.startswith(case.device)):
        yield case.name, partial(rows_of, case, device)


if __name__ == "__main__":
    run_script("grouped_linear", groups_of)
