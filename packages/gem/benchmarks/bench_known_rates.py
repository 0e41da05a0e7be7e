"""What 8-bit products do to what a model learns, on many examples whose rates are known.

    python packages/gem/benchmarks/bench_known_rates.py [--precisions A B] [--seeds 1] [--set K=V]

Trains the model of ``known_rates.toml`` by the trainer's own step once for each precision: the same
initial weights, the same batches, which `known_rates` draws on the device. Every batch is scored
before it is learned from (progressive), and a million further examples afterwards (held out). A
process trains one precision; several share the device.

A loss is taken twice: of the labels, and as its expectation under the rates that the labels were
drawn from, which leaves out the chance of the labels. A row compares one precision with another:
the difference of NE as a share of it, and a 95 % interval by a bootstrap over blocks of batches,
both runs on the same ones. Rows go to ``results/<device>/known_rates.jsonl``; rows of the same case
replace older ones.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from known_rates import Drawn, KnownRates
from rich.console import Console
from torch import Tensor

from gem.config import load_recipe
from gem.data.synthetic_spec import SyntheticSpec
from gem.dry_run.build import build_step
from gem.planning.schema import declared_schema
from gem.train.clock import StepClock
from gem.train.normalized_entropy import CLIP, binary_entropy
from gem.train.step import TrainStep, probabilities
from gem_opkit.bench import device_folder, provenance, write_rows
from gem_opkit.ceilings import device_name
from gem_parallel.launch import World, process_group

RECIPE = Path(__file__).with_name("known_rates.toml")
RESULTS = Path(__file__).resolve().parents[3] / "results"
BASE = "bf16"
# Block FP8 by itself leaves alone what does not pay; here every layer takes part that has a block.
BLOCK = "precision.least_width=128"
PRECISIONS: dict[str, tuple[str, ...]] = {
    BASE: ("precision.recipe=bf16",),
    "fp32": ("precision.default=fp32",),
    "fp8_block": ("precision.recipe=fp8_block", BLOCK),
    "mxfp8_rceil": ("precision.recipe=mxfp8_rceil",),
    "mxfp8_floor": ("precision.recipe=mxfp8_floor",),
    # Heads and last layer too, and layers narrower than a block.
    "naive": ("precision.recipe=fp8_block", "precision.least_width=0", "precision.bf16_escapes=[]"),
    # No other precision, but other initial weights: what chance alone makes.
    "bf16_other_start": ("precision.recipe=bf16",),
}
# Pairs that make a row: the second is what the first is compared with.
PAIRS = {name: "fp32" if name == BASE else BASE for name in PRECISIONS if name != "fp32"}
HELD_OUT_FROM = 1 << 24  # numbers of batches that no training reaches
BLOCKS, RESAMPLES = 32, 10_000
SPLITS = ("progressive", "second_half", "held_out")
_OTHER = 1_000  # added to the seed of the initial weights
_PACE = 16  # steps between two looks at the clock, as the host runs ahead of a GPU


@dataclass(frozen=True, slots=True)
class Asked:
    """One run."""

    precision: str
    seed: int
    recipe: str
    settings: tuple[str, ...]
    examples: int
    held_out: int
    device: str
    ends_at: float  # of the host's clock


@dataclass(frozen=True, slots=True)
class Run:
    """What one run leaves: sums of each batch, (batches, tasks, 4), float64.

    The four are the known labels, the positive ones, the log loss, and its expectation.
    """

    progressive: np.ndarray
    held_out: np.ndarray
    batches: int
    tasks: tuple[str, ...]
    seed: int
    batch_examples: int
    layers: str
    seconds: float
    first_step_s: float
    peak_gb: float
    device: str

    def of(self, split: str) -> np.ndarray:
        """Sums of the batches of a split; ``second_half`` is of the progressive ones."""
        if split == "second_half":
            return self.progressive[self.batches // 2 :]
        return getattr(self, split)


def run(asked: Asked) -> Run:
    """Train on the drawn batches and score them, each before it is learned from."""
    began = time.time()
    torch.set_num_threads(1)
    settings = [*asked.settings, *PRECISIONS[asked.precision]]
    other = _OTHER if asked.precision == "bf16_other_start" else 0
    config = load_recipe(asked.recipe, settings, seed=asked.seed + other)
    schema = declared_schema(config)
    examples = config.train.batch_examples
    batches, held_out = asked.examples // examples, asked.held_out // examples
    with process_group(asked.device) as world:
        options = config.data.synthetic or SyntheticSpec()
        drawn = KnownRates(options, schema, seed=asked.seed, device=world.device)
        clock = StepClock(world.device)
        step = build_step(config, schema, world, total_steps=batches, clock=clock)
        _wait(world)
        first_step_s = 0.0
        sums: list[Tensor] = []
        for number in range(batches):
            if number % _PACE == 0:
                _wait(world)
                if time.time() > asked.ends_at:
                    break
            one = drawn.batch(number, examples)
            sums.append(_sums(step(one.batch, number).p_BA, one))
            if number == 0:
                _wait(world)
                first_step_s = time.time() - began
        # A run that was cut off is compared on the batches that it saw, not by what it learned.
        whole = len(sums) == batches
        later = (drawn.batch(HELD_OUT_FROM + n, examples) for n in range(held_out * whole))
        held = [_sums(scored(step, one), one) for one in later]
        return Run(
            progressive=torch.stack(sums).cpu().numpy(),
            held_out=torch.stack(held).cpu().numpy() if held else np.zeros((0, *sums[0].shape)),
            tasks=schema.labels,
            batches=batches,
            seed=asked.seed,
            batch_examples=examples,
            layers=step.low_precision.told(),
            seconds=time.time() - began,
            first_step_s=first_step_s,
            peak_gb=torch.cuda.max_memory_allocated() / 1e9 if _on_gpu(world) else 0.0,
            device=device_name(world.device),
        )


def scored(step: TrainStep, one: Drawn) -> Tensor:
    """Probabilities of a batch that nothing is learned from."""
    step.model.eval()
    try:
        with torch.no_grad(), step.precision():
            return probabilities(step.model(one.batch))
    finally:
        step.model.train()


def _sums(p_BA: Tensor, one: Drawn) -> Tensor:
    """Labels, positive ones, log loss and expected log loss, of the rows whose label is known."""
    p = p_BA.double().clamp(CLIP, 1.0 - CLIP)
    known, labels = one.batch.label_mask_BA.double(), one.batch.labels_BA.double()
    yes, no = -p.log(), -torch.log1p(-p)
    losses = [rate * yes + (1.0 - rate) * no for rate in (labels, one.rates_BA)]
    parts = torch.stack([torch.ones_like(labels), labels, *losses])
    return (parts * known).sum(1).T


def _on_gpu(world: World) -> bool:
    return world.device.type == "cuda"


def _wait(world: World) -> None:
    if _on_gpu(world):
        torch.cuda.synchronize()


def compare(
    first: list[Run], second: list[Run], task: int, split: str, column: int
) -> dict[str, Any] | None:
    """The difference of NE as a share of it, and its interval, over all seeds.

    Runs of one seed are on the same batches, and the entropy of the labels cancels. None where a
    run has none.
    """
    if not all(len(run.of(split)) for run in (*first, *second)):
        return None
    gaps, bases, each = [], [], []
    for a, b in zip(first, second, strict=True):
        own, other = a.of(split), b.of(split)
        batches = min(len(own), len(other))
        own, other = own[:batches, task, column], other[:batches, task, column]
        gap, base = own - other, other
        each.append(float(gap.sum() / base.sum()))
        for blocks, values in ((gaps, gap), (bases, base)):
            blocks += [part.sum() for part in np.array_split(values, min(BLOCKS, batches))]
    gap, base = np.array(gaps), np.array(bases)
    draw = np.random.default_rng(1)
    picked = draw.integers(0, len(gap), (RESAMPLES, len(gap)))
    found = gap[picked].sum(1) / base[picked].sum(1)
    low, high = np.quantile(found, [0.025, 0.975])
    return {
        "difference_frac": float(gap.sum() / base.sum()),
        "low_95_frac": float(low),
        "high_95_frac": float(high),
        "by_seed_frac": each,
    }


def row(name: str, task: int, runs: Mapping[str, list[Run]], asked: Asked) -> dict[str, Any]:
    """Everything about one precision beside another."""
    first, second = (sorted(runs[each], key=lambda run: run.seed) for each in (name, PAIRS[name]))
    one = first[0]
    totals = {
        split: np.sum([r.of(split)[:, task].sum(0) for r in first], axis=0) for split in SPLITS
    }
    batches = min(len(r.progressive) for r in (*first, *second))
    found: dict[str, Any] = {}
    for split, (count, positive, loss, _) in totals.items():
        if not count:
            found[split] = None
            continue
        found[split] = {
            "labels": int(count),
            "ne": float(loss / count / binary_entropy(positive / count)),
            "of_labels": compare(first, second, task, split, 2),
            "of_rates": compare(first, second, task, split, 3),
        }
    return {
        "bench": "known_rates",
        "case": f"{one.tasks[task]}: {name} against {PAIRS[name]}",
        "precision": name,
        "task": one.tasks[task],
        "seeds": [run.seed for run in first],
        "examples": batches * one.batch_examples,
        "batches": batches,
        "batch_examples": one.batch_examples,
        "blocks": BLOCKS,
        **found,
        "layers": one.layers,
        "settings": [*asked.settings, *PRECISIONS[name]],
        "examples_per_s": [len(r.progressive) * r.batch_examples / r.seconds for r in first],
        "first_step_s": [r.first_step_s for r in first],
        "device": one.device,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default=str(RECIPE))
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--examples", type=int, default=None, help="default data.synthetic.rows")
    parser.add_argument("--held-out", type=int, default=1 << 20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--processes", type=int, default=8, help="runs at once")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds; then runs end early")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--curves", type=Path, default=None, help="folder for sums of each batch")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    unknown = set(chosen.precisions) - set(PRECISIONS)
    if unknown:
        parser.error(f"--precisions: unknown {sorted(unknown)}; known: {', '.join(PRECISIONS)}")
    return chosen


def main() -> None:
    """Train, compare, write."""
    chosen = _arguments()
    console = Console(width=160)
    config = load_recipe(chosen.recipe, chosen.settings)
    examples = chosen.examples or (config.data.synthetic or SyntheticSpec()).rows
    ends_at = time.time() + chosen.limit
    every = [
        Asked(
            precision=precision,
            seed=seed,
            recipe=chosen.recipe,
            settings=tuple(chosen.settings),
            examples=examples,
            held_out=chosen.held_out,
            device=chosen.device,
            ends_at=ends_at,
        )
        for seed in chosen.seeds
        for precision in chosen.precisions
    ]
    # Forked processes could not use the GPU.
    context = multiprocessing.get_context("spawn")
    runs: dict[str, list[Run]] = {}
    failed: list[str] = []
    written: set[str] = set()
    with ProcessPoolExecutor(chosen.processes, mp_context=context) as pool:
        futures = {pool.submit(run, asked): asked for asked in every}
        for future in as_completed(futures):
            asked, fault = futures[future], future.exception()
            if fault is not None:  # one precision of several: the others go on
                console.print(f"{asked.precision}, seed {asked.seed}: FAILED, {fault!r}")
                failed.append(asked.precision)
                continue
            done = future.result()
            runs.setdefault(asked.precision, []).append(done)
            console.print(_told(asked, done, examples))
            if chosen.curves is not None:
                chosen.curves.mkdir(parents=True, exist_ok=True)
                path = chosen.curves / f"{asked.precision}-{asked.seed}.npz"
                np.savez(path, progressive=done.progressive, held_out=done.held_out)
            # Written as soon as both sides are there: what comes later may be cut off.
            ready = [
                name
                for name, against in PAIRS.items()
                if name not in written
                and all(len(runs.get(each, ())) == len(chosen.seeds) for each in (name, against))
            ]
            written.update(ready)
            rows = [
                row(name, task, runs, asked) for name in ready for task in range(len(done.tasks))
            ]
            for each in rows:
                console.print(_compared(each), highlight=False)
            rows = [{**each, **provenance()} for each in rows]
            json.dumps(rows, allow_nan=False)  # refuse to write what is not a number
            if rows:
                path = chosen.out / device_folder(done.device) / "known_rates.jsonl"
                write_rows(path, rows)
                console.print(f"{len(rows)} rows in {path}")
    if failed:
        raise SystemExit(f"bench_known_rates: failed: {', '.join(sorted(failed))}")


def _told(asked: Asked, done: Run, examples: int) -> str:
    batches = len(done.progressive)
    cut_off = "" if batches == examples // done.batch_examples else ", CUT OFF"
    return (
        f"{asked.precision}, seed {asked.seed}: {batches:,} batches of {done.batch_examples:,} in "
        f"{done.seconds:.0f} s, the first step after {done.first_step_s:.0f} s, "
        f"{done.peak_gb:.1f} GB{cut_off}; {done.layers}"
    )


def _compared(each: dict[str, Any]) -> str:
    told = [each["case"]]
    for split in SPLITS:
        if each[split] is None:
            continue
        told.append(f"{split} NE {each[split]['ne']:.4f}")
        for kind in ("of_labels", "of_rates"):
            part = each[split][kind]
            if part is not None:
                numbers = (part[k] for k in ("difference_frac", "low_95_frac", "high_95_frac"))
                told.append(kind + " {:+.4%} [{:+.4%}, {:+.4%}]".format(*numbers))
    return "; ".join(told)


if __name__ == "__main__":
    main()
