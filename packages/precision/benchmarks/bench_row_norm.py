"""Time ``rms_norm`` and ``layer_norm`` against torch's own norms, eager and compiled.

What is fused with a norm here, residuals before and after it or a gate, is written out for the
peers; ``torch.compile`` fuses it too. Of a tensor that is added before the norm a peer's forward
may keep the sum: it writes a tensor more, and its backward reads one less than ours, which forms
the sum again. Only a forward with its backward then moves the same bytes whoever computes it, so
such cases have a row of both (``_training``) in place of one of the backward.

Run ``python packages/precision/benchmarks/bench_row_norm.py`` in the repository's root.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_opkit.bench import BenchCase, backward_of
from gem_opkit.bench_scripts import Group, run_script
from gem_opkit.budget import check_run_budget, fresh, run_with_gradients
from gem_opkit.cost import Cost
from gem_precision.costs import row_norm_backward_cost, row_norm_cost
from gem_precision.kernels.row_norm.cases import CASES, NormCase
from gem_precision.ops import layer_norm, rms_norm

Call = Callable[..., Any]
EPS = 1e-6


def tensors_of(case: NormCase, device: str, rows: int) -> tuple[Tensor, ...]:
    """Draw what the operator is given: x, then ``before``, ``after`` and the gain if asked for."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    shapes = [
        (rows, case.width),
        *[(rows, case.width)] * (case.before + case.after),
        *[(case.width,)] * case.affine,
    ]
    return tuple(torch.randn(s, device=device, dtype=dtype).requires_grad_() for s in shapes)


def named(case: NormCase, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Name what stands behind x."""
    flags = {"before": case.before, "after": case.after, "gain_D": case.affine}
    return dict(zip((name for name, given in flags.items() if given), tensors, strict=True))


def ours(case: NormCase, x: Tensor, *others: Tensor) -> Tensor:
    norm = rms_norm if case.kind == "rms" else layer_norm
    return norm(x, **named(case, others), swish=case.swish, eps=EPS)


def theirs(case: NormCase, x: Tensor, *others: Tensor) -> Tensor:
    given = named(case, others)
    a = x + given["before"] if case.before else x
    gain, shape = given.get("gain_D"), (case.width,)
    if case.kind == "rms":
        n = F.rms_norm(a, shape, gain, EPS)
    else:
        n = F.layer_norm(a, shape, gain, None, EPS)
    y = a * n.sigmoid() if case.swish else n
    return y + given["after"] if case.after else y


def check(case: NormCase, device: str) -> None:
    """Hold some rows, forward and backward, to the error budget."""
    inputs = tensors_of(case, device, 1000)
    exact, low = (
        run_with_gradients(partial(theirs, case), fresh(inputs, dtype=dtype))
        for dtype in (torch.float64, None)
    )
    check_run_budget(run_with_gradients(partial(ours, case), fresh(inputs)), low, exact)


def rows_of(case: NormCase, device: str) -> list[BenchCase]:
    inputs = tensors_of(case, device, case.rows)
    sizes = {"rows": case.rows, "width": case.width, "element_bytes": inputs[0].element_size()}
    forward = row_norm_cost(**sizes, before=case.before, after=case.after, affine=case.affine)
    backward = row_norm_backward_cost(**sizes, before=case.before, affine=case.affine)
    costs: dict[str, Cost] = {"forward": forward}
    if case.before:
        costs["training"] = forward + backward
    else:
        costs["backward"] = backward
    everyone: dict[str, Call] = {"": partial(ours, case), "eager": partial(theirs, case)}
    if device.startswith("cuda"):
        # Cases share a function: behind eight of its graphs the compiler would run it as it is.
        torch.compiler.reset()
        everyone["compiled"] = torch.compile(partial(theirs, case), dynamic=False)
    rows = []
    for which, cost in costs.items():
        timed = {who: _MAKERS[which](call, inputs) for who, call in everyone.items()}
        rows.append(
            BenchCase(
                name=f"{case.name}_{which}",
                run=timed.pop(""),
                check=partial(check, case, device),
                cost=cost,
                shapes={
                    "rows": case.rows,
                    "width": case.width,
                    "kind": case.kind,
                    "before": case.before,
                    "after": case.after,
                    "affine": case.affine,
                    "swish": case.swish,
                },
                dtype="bf16" if device.startswith("cuda") else "fp32",
                peers=timed,
            )
        )
    return rows


def forward_of(fn: Call, inputs: tuple[Tensor, ...]) -> Call:
    """Return a call of the forward pass alone."""
    plain = [x.detach() for x in inputs]
    return lambda: fn(*plain)


def training_of(fn: Call, inputs: tuple[Tensor, ...]) -> Call:
    """Return a call of the forward pass and of its backward."""
    upstream = torch.randn_like(inputs[0])
    return lambda: torch.autograd.grad(fn(*inputs), inputs, upstream)


_MAKERS = {"forward": forward_of, "backward": backward_of, "training": training_of}


def groups_of(device: str) -> Iterable[Group]:
    for case in (case for case in CASES if device.startswith(case.device)):
        yield case.name, partial(rows_of, case, device)


if __name__ == "__main__":
    run_script("row_norm", groups_of)
