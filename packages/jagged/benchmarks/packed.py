"""What the benchmarks of this folder share: the command line, inputs, and the gate."""

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gem_jagged.batch import Layout
from gem_opkit.bench import BenchCase, run_bench


def main(name: str, make_cases: Callable[[str], list[BenchCase]]) -> None:
    """Parse the command line and run a benchmark."""
    parser = argparse.ArgumentParser(description=f"Time {name} and its peers.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--case", default="", help="only cases whose name has this in it")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    cases = [case for case in make_cases(given.device) if given.case in case.name]
    run_bench(name, cases, device=given.device, out=given.out, calls=given.calls)


def dtype_for(device: str) -> torch.dtype:
    """Return the dtype that is trained in: bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


def tokens(lengths: Sequence[int], width: int, device: str) -> tuple[Tensor, Layout]:
    """Draw packed tokens that require a gradient, and their layout."""
    layout = Layout.from_lengths(list(lengths), device=device)
    values = torch.randn(layout.total_tokens, width, device=device, dtype=dtype_for(device))
    return values.requires_grad_(), layout


def equals(run: Callable[[], Any], oracle: Callable[[], Any]) -> Callable[[], None]:
    """Make the gate of an operator that moves values: every bit as the peer has it."""

    def check() -> None:
        got, expected = run(), oracle()
        pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
        for index, (a, b) in enumerate(pairs):
            if not torch.equal(a, b):
                raise ValueError(f"result {index} differs from that of the peer")

    return check
