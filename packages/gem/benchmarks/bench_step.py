"""`gem bench step` as a benchmark script: one row a run, and the longest kernels on request.

    python packages/gem/benchmarks/bench_step.py --recipe h200
    torchrun --nproc-per-node 2 packages/gem/benchmarks/bench_step.py --plan replicate=2
    torchrun --nproc-per-node 2 packages/gem/benchmarks/bench_step.py --alone \
        --each "expert=2 table_shard=2" "replicate=2 table_shard=2"
    python packages/gem/benchmarks/bench_step.py --profile 3 --svg runs/step.svg \
        --also "h200 train.compile=inductor" h200-long

``--each`` measures several plans in one process, a row each. With ``--alone`` every rank also takes
the steps of one GPU on its own card, all at the same time, behind the first plan of a recipe, when
cards are warm: what several GPUs lose is then told from what these very cards lose to their power
and heat, section by section (``alone_step_ms``, ``alone_mfu``, ``alone_sections_ms`` of each row,
rank after rank).
``--also`` measures other recipes, or the same with other settings, in the same process, a row each.
What is measured, and how, is said in `gem.bench.measure`. A row goes to
``results/<device>/step.jsonl``.
"""

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gem.bench.asked import Asked
from gem.bench.command import asked_for
from gem.bench.measure import measure
from gem.bench.picture import picture
from gem.bench.rows import row_of, write_row
from gem.data.batch import ExampleBatch
from gem.train.clock import SECTIONS
from gem.train.step import TrainStep
from gem_parallel.collectives import all_gather_rows, barrier
from gem_parallel.launch import World, process_group

RESULTS = Path(__file__).resolve().parents[3] / "results"
BEGAN = time.perf_counter()


def main() -> None:
    """Measure, print, write."""
    given = arguments()
    with process_group(given.device) as world:
        run(given, world)


def run(given: argparse.Namespace, world: World) -> None:
    """Measure all that was asked for, a row each.

    Args:
        given: from `arguments`.
        world: the ranks; all have to call this.
    """

    def look(step: TrainStep, batches: Sequence[ExampleBatch]) -> None:
        if given.kernels and step.world.size == 1:
            _show_kernels(step, batches, given.kernels)

    # Recipe and settings -> what one GPU takes.
    singles: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}
    for place, asked in enumerate(_all_asked(given)):
        report = measure(asked, world, told=_stage, look=look)
        of_recipe = asked.recipe, asked.settings
        if given.alone and of_recipe not in singles:
            _let_go(world)
            singles[of_recipe] = _alone(asked, world)
        beside = singles.get(of_recipe, {})
        if world.is_first:
            for key, value in {**row_of(report), **beside}.items():
                if key != "profile":
                    _say(f"{key}: {value}")
            if place == 0 and given.svg is not None:
                given.svg.write_text(picture(report), encoding="utf-8")
            if place == 0 and given.json is not None:
                given.json.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
            if not given.dry:
                write_row(given.out, report, beside=beside)
        del report
        _let_go(world)


def _all_asked(given: argparse.Namespace) -> Iterator[Asked]:
    """Everything that is measured, in order."""
    for plan in [text.split() for text in given.each] or [given.plan]:
        yield _asked(given, plan)
    for text in given.also:
        recipe, *settings = text.split()
        yield _asked(given, given.plan, recipe=recipe, settings=(*given.set, *settings))


def _asked(
    given: argparse.Namespace,
    plan: Sequence[str],
    *,
    recipe: str | None = None,
    settings: Sequence[str] | None = None,
) -> Asked:
    return asked_for(
        recipe or given.recipe,
        settings=given.set if settings is None else settings,
        plan=plan,
        examples=given.examples,
        steps=given.steps,
        warmup=given.warmup,
        profiled=given.profile,
        impl=given.impl,
    )


def _alone(asked: Asked, world: World) -> dict[str, Any]:
    """Median step, MFU and sections of each rank's card, without the other ranks."""
    # The profile of a row is that of its plan.
    one = replace(asked, plan=(), profiled=0)
    report = measure(one, World(device=world.device))
    sections = [report.sections_ms.get(name, 0.0) for name in SECTIONS]
    figures = [report.step_ms, report.efficiency.e2e_mfu or 0.0, *sections]
    own = torch.tensor(figures, dtype=torch.float64)
    step_R, mfu_R, *sections_SR = all_gather_rows(own[None].to(world.device), world).T.tolist()
    del report
    _let_go(world)
    return {
        "alone_step_ms": step_R,
        "alone_mfu": mfu_R,
        "alone_sections_ms": {
            name: ms_R for name, ms_R in zip(SECTIONS, sections_SR, strict=True) if any(ms_R)
        },
    }


def _let_go(world: World) -> None:
    """Give memory back before the next model is built."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    barrier(world)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Args:
        words: to read in its place; None for that of the process.

    Returns:
        what was given.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="h200")
    parser.add_argument("--set", action="append", default=[], help="a.b=value, as in gem train")
    parser.add_argument("--plan", nargs="*", default=[], help="axis=size, such as shard=2")
    parser.add_argument(
        "--each", nargs="*", default=[], metavar="PLAN", help="several plans, in place of --plan"
    )
    parser.add_argument(
        "--alone", action="store_true", help="time one GPU on every rank's card, too"
    )
    parser.add_argument(
        "--also", nargs="*", default=[], metavar="WORDS", help="more recipes, each with settings"
    )
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
    parser.add_argument("--json", type=Path, default=None, help="document of the first to write")
    parser.add_argument("--svg", type=Path, default=None, help="picture of the first to write")
    return parser.parse_args(words)


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
