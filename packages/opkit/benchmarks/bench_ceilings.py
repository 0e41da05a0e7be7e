"""Measure copy bandwidth and matmul rate of this machine: the ceilings of every other benchmark.

Run ``python packages/opkit/benchmarks/bench_ceilings.py --device cuda`` in the repository's root;
the row goes to ``results/<device>/ceilings.jsonl``.
"""

import argparse
import logging
from pathlib import Path

import torch

from gem_opkit.bench import BenchCase, run_bench
from gem_opkit.budget import check_budget
from gem_opkit.ceilings import measure_ceilings
from gem_opkit.cost import Cost


def copy_case(device: str, copied_bytes: int) -> BenchCase:
    source = torch.arange(copied_bytes, device=device).to(torch.uint8)
    target = torch.zeros_like(source)

    def check() -> None:
        if not torch.equal(target.copy_(source), source):
            raise ValueError("copy: target differs from source")

    return BenchCase(
        name=f"copy_{copied_bytes // 2**20}_mib",
        run=lambda: target.copy_(source),
        check=check,
        cost=Cost(flops=0, bytes=2 * copied_bytes),
        shapes={"copied_bytes": copied_bytes},
        dtype="uint8",
    )


def matmul_case(device: str, side: int, dtype: torch.dtype) -> BenchCase:
    # Random factors: with many zeros a GPU draws less power and would beat its own ceiling.
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.zeros_like(left)

    def check() -> None:
        rows, factor = left[:64].double(), right.double()
        low = (left[:64].float() @ right.float()).to(dtype)
        check_budget(torch.mm(left, right)[:64], low, rows @ factor)

    width = product.element_size()
    return BenchCase(
        name=f"matmul_{side}",
        run=lambda: torch.mm(left, right, out=product),
        check=check,
        cost=Cost(flops=2 * side**3, bytes=3 * width * side**2),
        shapes={"side": side},
        dtype=str(dtype).removeprefix("torch."),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--calls", type=int, default=20)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    on_gpu = given.device.startswith("cuda")
    cases = [
        copy_case(given.device, 2**30 if on_gpu else 2**27),
        matmul_case(
            given.device,
            8192 if on_gpu else 1024,
            torch.bfloat16 if on_gpu else torch.float32,
        ),
    ]
    ceilings = measure_ceilings(given.device)
    logging.info(
        "%s: copy %.4g GB/s, %s matmul %.4g TFLOP/s",
        ceilings.device,
        ceilings.copy_bytes_per_s / 1e9,
        ceilings.matmul_dtype,
        ceilings.matmul_flops_per_s / 1e12,
    )
    run_bench("ceilings", cases, device=given.device, out=given.out, calls=given.calls)


if __name__ == "__main__":
    main()
