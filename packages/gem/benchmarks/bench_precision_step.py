"""A whole training step with 8-bit products beside the same step in bf16.

    python packages/gem/benchmarks/bench_precision_step.py [--recipe h200] [--set K=V]

Builds the trainer's step of one recipe several times from the same weights: in bf16, by
``fp8_block`` as it decides itself, and with every layer at least 1,024 wide in 8 bits. All train in
turn on the same batches, one step each, so that the clock of the card is the same for all. Then
the three products of each layer of the last are timed alone, in both formats. Tables have fewer
rows than the recipe's, so that one device holds all three. Rows go to
``results/<device>/precision_step.jsonl``.
"""

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from gem.bench.asked import recipe_of
from gem.bench.check import planted_batch
from gem.bench.command import asked_for
from gem.config import load_recipe
from gem.data.batch import ExampleBatch
from gem.dry_run.build import build_step
from gem.planning.schema import declared_schema
from gem.train.clock import StepClock
from gem.train.step import TrainStep
from gem_opkit.bench import device_folder, provenance, write_rows
from gem_opkit.ceilings import device_name
from gem_opkit.timing import time_in_turn
from gem_parallel.launch import World, process_group
from gem_precision.layers import Projection

RESULTS = Path(__file__).resolve().parents[3] / "results"
BASE = "bf16"
WAYS: dict[str, tuple[str, ...]] = {
    BASE: ("precision.recipe=bf16",),
    "fp8_block": ("precision.recipe=fp8_block",),
    "fp8_block, every layer 1,024 wide": (
        "precision.recipe=fp8_block",
        "precision.least_width=1024",
    ),
}
_BATCHES = 4
_SAY = Console(width=160)


def build(way: str, given: argparse.Namespace, world: World) -> TrainStep:
    """Build the step of one way; all have the same initial weights."""
    tables = load_recipe(given.recipe, given.settings).data.hash_rows
    few = [f"data.hash_rows.{name}={given.table_rows}" for name in tables]
    asked = asked_for(
        given.recipe, settings=[*few, *given.settings, *WAYS[way]], examples=given.examples
    )
    config = recipe_of(asked, world)
    schema = declared_schema(config, op="bench_precision_step")
    total = given.warmup + given.steps
    step = build_step(config, schema, world, total_steps=total, clock=StepClock(world.device))
    if not given.batches:
        made = (planted_batch(config, schema, n) for n in range(_BATCHES))
        given.batches.extend(batch.to(world.device) for batch in made)
    return step


def timed(step: TrainStep, batch: ExampleBatch, number: int, world: World) -> tuple[float, float]:
    """Milliseconds and loss of a step."""
    _wait(world)
    began = time.perf_counter()
    loss = step(batch, number).loss
    _wait(world)
    return 1e3 * (time.perf_counter() - began), float(loss)


def shapes_of(step: TrainStep, batch: ExampleBatch) -> Counter[tuple[int, int, int]]:
    """Rows, inputs and outputs of each product that a forward pass does in 8 bits."""
    found: Counter[tuple[int, int, int]] = Counter()
    hooks: list[Any] = []

    def seen(layer: Projection, inputs: Sequence[Any], output: object) -> None:
        rows = inputs[0].numel() // layer.in_features
        if rows >= layer.least_rows:
            found[rows, layer.in_features, layer.out_features] += 1

    for module in step.model.modules():
        if isinstance(module, Projection) and module.formats is not None:
            hooks.append(module.register_forward_hook(seen))
    with torch.no_grad(), step.precision():
        step.model(batch)
    for hook in hooks:
        hook.remove()
    return found


def _in_bf16(x_TD: Tensor, weight_FD: Tensor, grad_TF: Tensor) -> tuple[Tensor, ...]:
    return x_TD @ weight_FD.T, grad_TF @ weight_FD, grad_TF.T @ x_TD


def _in_8_bits(x_TD: Tensor, weight_FD: Tensor, grad_TF: Tensor) -> tuple[Tensor, ...]:
    ops, backward = torch.ops.gem_precision, ("fp8_block", "bf16")
    y_TF = ops.quantized_linear(x_TD, weight_FD, "fp8_block", *backward, "auto")
    needs = (True, True)
    grads = ops.quantized_linear_backward(grad_TF, x_TD, weight_FD, *backward, *needs, "auto")
    return (y_TF, *grads)


def layer_rows(
    shapes: Counter[tuple[int, int, int]], world: World, calls: int
) -> list[dict[str, Any]]:
    """Time the three products of each shape alone, in bf16 and in block FP8."""
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    found = []
    for (rows, width, columns), count in shapes.most_common():
        sizes = ((rows, width), (columns, width), (rows, columns))
        x_TD, weight_FD, grad_TF = (
            torch.randn(size, device=world.device, dtype=dtype) for size in sizes
        )
        # As in the step: the optimizer's weight is fp32, and bf16 has a copy of its own.
        eight = (x_TD, weight_FD.float(), grad_TF)
        both = {
            "bf16": partial(_in_bf16, x_TD, weight_FD, grad_TF),
            "fp8_block": partial(_in_8_bits, *eight),
        }
        took = time_in_turn(both, device=world.device, calls=calls)
        ms = {name: timing.ms for name, timing in took.items()}
        shape = {"rows": rows, "input": width, "output": columns, "layers": count}
        found.append(shape | {f"{name}_ms": value for name, value in ms.items()})
    return found


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="h200")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--examples", type=int, default=None)
    parser.add_argument("--table-rows", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--calls", type=int, default=20, help="of each layer alone; 0: none")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds; then fewer steps")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.ways = [BASE, *(way for way in given.ways if way != BASE)]
    given.batches = []
    return given


def main() -> None:
    """Build, train in turn, time layers, write."""
    began = time.perf_counter()
    given = _arguments()

    def told(text: str) -> None:
        _SAY.print(f"{time.perf_counter() - began:6.1f} s  {text}", highlight=False)

    with process_group(given.device) as world:
        steps = {}
        for way in given.ways:
            steps[way] = build(way, given, world)
            told(f"{way}: {steps[way].low_precision.told()}")
        ms: dict[str, list[float]] = {way: [] for way in steps}
        losses: dict[str, list[float]] = {way: [] for way in steps}
        for number in range(given.warmup + given.steps):
            for way, step in steps.items():
                took, loss = timed(step, given.batches[number % _BATCHES], number, world)
                losses[way].append(loss)
                if number >= given.warmup:
                    ms[way].append(took)
            if number < given.warmup or number % 10 == 0:
                seen = (f"{took[-1:]} {losses[way][-1]:.4f}" for way, took in ms.items())
                told(f"step {number}: {', '.join(seen)}")
            if time.perf_counter() - began > given.limit and ms[BASE]:
                told("out of time")
                break
        layers: list[dict[str, Any]] = []
        last = given.ways[-1]
        shapes = shapes_of(steps[last], given.batches[0])
        kept = {way: step.low_precision for way, step in steps.items()}
        steps.clear()
        gc.collect()
        if given.calls:
            layers = layer_rows(shapes, world, given.calls)
            for layer in layers:
                told(str(layer))
        rows = []
        for way in given.ways:
            ratios = [own / base for own, base in zip(ms[way], ms[BASE], strict=True)]
            rows.append(
                {
                    "bench": "precision_step",
                    "case": f"{given.recipe}{_with(given)}: {way}",
                    "way": way,
                    "steps": len(ms[way]),
                    "step_ms": median(ms[way]),
                    "over_bf16": median(ratios),
                    "losses": losses[way],
                    "layers_taken": kept[way].told(),
                    "layers_in_8_bits": sorted(kept[way].formats),
                    "products": layers if way == last else [],
                    "examples": given.batches[0].examples,
                    "table_rows": given.table_rows,
                    "settings": [*given.settings, *WAYS[way]],
                    "device": device_name(world.device),
                }
            )
            told(
                f"{way}: {median(ms[way]):.1f} ms a step, {median(ratios):.3f} of bf16, loss "
                f"{losses[way][0]:.5f} to {losses[way][-1]:.5f}"
            )
    rows = [{**row, **provenance()} for row in rows]
    json.dumps(rows, allow_nan=False)  # refuse to write what is not a number
    path = given.out / device_folder(rows[0]["device"]) / "precision_step.jsonl"
    write_rows(path, rows)
    told(f"{len(rows)} rows in {path}")


def _with(given: argparse.Namespace) -> str:
    return f" with {', '.join(given.settings)}" if given.settings else ""


if __name__ == "__main__":
    main()
