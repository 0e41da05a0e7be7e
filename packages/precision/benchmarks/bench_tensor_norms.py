"""Time ``tensor_norms``, the L2 norm of each gradient of a step, against torch's list of norms.

Run ``python packages/precision/benchmarks/bench_tensor_norms.py`` in the repository's root.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from gem_opkit.bench import BenchCase
from gem_opkit.bench_scripts import Group, run_script
from gem_precision.costs import tensor_norms_cost
from gem_precision.kernels.tensor_norms.cases import CASES, NormsCase
from gem_precision.ops import tensor_norms


def draw(case: NormsCase, device: str, *, most: int = 0) -> list[Tensor]:
    """Draw all; with ``most`` no dim is longer than that."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if case.half else torch.float32
    shapes = [tuple(min(s, most) if most else s for s in shape) for shape in case.shapes]
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def theirs(given: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(given, 2.0, dtype=torch.float32))


def check(case: NormsCase, device: str) -> None:
    """Hold norms of small sizes to torch's."""
    given = draw(case, device, most=300)
    torch.testing.assert_close(tensor_norms(given), theirs(given), rtol=1e-5, atol=0.0)


def rows_of(case: NormsCase, device: str) -> list[BenchCase]:
    given = draw(case, device)
    elements = sum(t.numel() for t in given)
    return [
        BenchCase(
            name=case.name,
            run=partial(tensor_norms, given),
            check=partial(check, case, device),
            cost=tensor_norms_cost(elements=elements, element_bytes=2 if case.half else 4),
            shapes={"elements": elements, "tensors": len(given), "half": case.half},
            dtype="bf16" if case.half else "fp32",
            peers={"list of norms": partial(theirs, given)},
        )
    ]


def groups_of(device: str) -> Iterable[Group]:
    for case in (case for case in CASES if device.startswith(case.device)):
        yield case.name, partial(rows_of, case, device)


if __name__ == "__main__":
    run_script("tensor_norms", groups_of)
