"""`gem bench step` as a benchmark script: one row a run, and the longest kernels on request.

    python packages/gem/benchmarks/bench_step.py --recipe h200
    torchrun --nproc-per-node 2 packages/gem/benchmarks/bench_step.py --plan replicate=2

What is measured, and how, is said in `gem.bench.measure`. A row goes to
``results/<device>/step.jsonl``.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from gem.bench.command import asked_for
from gem.bench.measure import measure
from gem.bench.rows import row_of, write_row
from gem.data.batch import ExampleBatch
from gem.train.step import TrainStep
from gem_parallel.launch import process_group

RESULTS = Path(__file__).resolve().parents[3] / "results"
BEGAN = time.perf_counter()


def main() -> None:
    """Measure, print, write."""
    given = _arguments()
    asked = asked_for(
        given.recipe,
        settings=given.set,
        plan=given.plan,
        examples=given.examples,
        steps=given.steps,
        warmup=given.warmup,
        profiled=given.profile,
        impl=given.impl,
    )

    def look(step: TrainStep, batches: Sequence[ExampleBatch]) -> None:
        if given.kernels and step.world.size == 1:
            _show_kernels(step, batches, given.kernels)

    with process_group(given.device) as world:
        report = measure(asked, world, told=_stage, look=look)
        if world.is_first:
            for key, value in row_of(report).items():
                if key != "profile":
                    _say(f"{key}: {value}")
            if not given.dry:
                write_row(given.out, report)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="h200")
    parser.add_argument("--set", action="append", default=[], help="a.b=value, as in gem train")
    parser.add_argument("--plan", nargs="*", default=[], help="axis=size, such as shard=2")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--examples", type=int, default=None, help="examples of a rank; default the recipe's batch"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--profile", type=int, default=0, help="steps to profile, for the row")
    parser.add_argument("--impl", default="auto", help="auto, or reference")
    parser.add_argument("--kernels", type=int, default=0, help="longest kernels to print")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--dry", action="store_true", help="write no row")
    return parser.parse_args()


def _show_kernels(step: TrainStep, batches: Sequence[ExampleBatch], most: int) -> None:
    """Print what takes longest on the device in one step."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        step(batches[0], 0)
        torch.cuda.synchronize()
    kernels = [e for e in trace.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    whole_ms = sum(e.self_device_time_total for e in kernels) / 1e3
    _say(f"kernels of one step: {whole_ms:.1f} ms in {sum(e.count for e in kernels)} launches")
    for event in kernels[:most]:
        ms = event.self_device_time_total / 1e3
        _say(f"{ms:9.2f} ms {1e2 * ms / whole_ms:5.1f} % {event.count:5d} x {event.key[:110]}")


def _stage(name: str) -> None:
    _say(f"{time.perf_counter() - BEGAN:7.1f} s  {name}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
