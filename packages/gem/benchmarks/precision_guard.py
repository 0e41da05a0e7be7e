"""Judge a precision recipe on a run that is there: which layers do not hold it, and what NE says.

    python packages/gem/benchmarks/precision_guard.py RUN [--recipe fp8_block] [--task NAME]

Takes the newest checkpoint of RUN and some batches of its validation data, and runs them in bf16
and by the recipe, every layer in it whatever its width. Prints the difference of NE with its
interval, the layers to take out with the reasons, and the worst layers. ``--plant LAYER`` makes one
channel of a layer's input 1,000 times as large and the weights that read it as much smaller, so
that in exact numbers nothing changes: the guard has to find the layer. ``--out`` writes rows to
``<out>/<device>/precision_guard.jsonl``: with every layer in 8 bits, and with those that the guard
names taken out.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import Tensor, nn

from gem.data.batch import ExampleBatch
from gem.model.build import late_layers
from gem.train.saved_run import saved_run
from gem_opkit.bench import device_folder, provenance, write_rows
from gem_opkit.ceilings import device_name
from gem_precision.contract import PrecisionRecipe
from gem_precision.guard import FactorFigures, GuardReport, guard_recipe

PLANTED = 1_000.0


def shown(report: GuardReport, most: int) -> list[str]:
    """A few lines for each of the layers with the largest errors."""
    lines: list[str] = []
    for layer in report.layers[:most]:
        lines.append(f"{layer.name}: error {layer.error_frac:.2%}")
        for what in ("input", "weight", "gradient"):
            f: FactorFigures = getattr(layer, what)
            lines.append(
                f"    {what:8} amax {f.amax:.3g}, a channel {f.outlier_ratio:.0f} times the middle "
                f"one, {f.underflow_frac:.3%} to 0, {f.overflow_frac:.3%} cut"
            )
    return lines


def plant(model: nn.Module, name: str) -> None:
    """Multiply the first channel of a layer's input in every call, and divide its weights."""

    def larger(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        factor = torch.ones(inputs[0].shape[-1], device=inputs[0].device, dtype=inputs[0].dtype)
        factor[0] = PLANTED
        return (inputs[0] * factor, *inputs[1:])

    layer = cast(nn.Linear, model.get_submodule(name))
    with torch.no_grad():
        layer.weight[:, 0] /= PLANTED
    # In front of the guard's own look at the input.
    layer.register_forward_pre_hook(larger, prepend=True)


def row_of(report: GuardReport, chosen: argparse.Namespace, left_out: Sequence[str]) -> dict:
    """What the guard found, for a file of results."""
    planted = f", planted x {PLANTED:,.0f}" if chosen.plant else ""
    reach = "heads and last layer too" if chosen.naive else "all but heads and last layer"
    return {
        "bench": "precision_guard",
        "case": f"{chosen.run.name}{planted}, {chosen.recipe}, {reach}"
        + (", named layers taken out" if left_out else ""),
        "recipe": chosen.recipe,
        "planted": chosen.plant,
        "naive": chosen.naive,
        "left_out": list(left_out),
        "ne": report.ne,
        "ne_bf16": report.ne_bf16,
        "ne_difference_frac": report.ne_difference_frac,
        "ne_interval_frac": report.ne_interval_frac,
        "labels": report.examples,
        "take_out": {layer.name: list(layer.faults) for layer in report.layers if layer.faults},
        "errors": {layer.name: layer.error_frac for layer in report.layers},
    }


def main() -> None:
    """Load, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run with a checkpoint")
    parser.add_argument("--recipe", default="fp8_block")
    parser.add_argument("--task", default=None, help="default: the first")
    parser.add_argument("--split", default="valid")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--most", type=int, default=8, help="layers to show")
    parser.add_argument("--plant", default=None, metavar="LAYER")
    parser.add_argument("--data-root", type=Path, default=Path("runs/data"))
    parser.add_argument("--out", type=Path, default=None, help="folder of results, for rows")
    parser.add_argument("--naive", action="store_true", help="heads and last layer in 8 bits, too")
    chosen = parser.parse_args()
    console = Console()
    rows: list[dict[str, Any]] = []
    given = {"command": "precision_guard", "display": None, "data_root": chosen.data_root}
    with saved_run(chosen.run, **given) as saved:
        step, reader, device = saved.run.step, saved.run.reader, saved.run.world.device
        labels = [str(name) for name in reader.schema.labels]
        task = labels.index(chosen.task) if chosen.task else 0
        if chosen.plant:
            plant(step.model, chosen.plant)

        def score(model: nn.Module, batch: ExampleBatch) -> tuple[Tensor, Tensor, Tensor]:
            weights = batch.label_mask_BA[:, task] * batch.weights_B
            return model(batch)[:, task], batch.labels_BA[:, task], weights

        late = () if chosen.naive else late_layers(step.model)

        def judged(taken_out: Sequence[str]) -> GuardReport:
            recipe = PrecisionRecipe(
                recipe=chosen.recipe, least_width=0, bf16_escapes=(*late, *taken_out)
            )
            given = islice(reader.batches(chosen.split), chosen.batches)
            batches = (batch.to(device) for batch in given)
            return guard_recipe(step.model, recipe, batches, score=score, device=device)

        report = judged(())
        console.print(f"{chosen.recipe} on {chosen.run}, {labels[task]} of {chosen.split}")
        for line in (*report.told().splitlines(), *shown(report, chosen.most)):
            console.print(line, highlight=False, soft_wrap=True)
        rows.append(row_of(report, chosen, ()))
        if report.take_out():
            without = judged(report.take_out())
            console.print("with these taken out:")
            for line in without.told().splitlines():
                console.print(line, highlight=False, soft_wrap=True)
            rows.append(row_of(without, chosen, report.take_out()))
        if chosen.out is not None:
            rows = [{**row, "device": device_name(device), **provenance()} for row in rows]
            json.dumps(rows, allow_nan=False)  # refuse to write what is not a number
            folder = device_folder(rows[0]["device"])
            write_rows(chosen.out / folder / "precision_guard.jsonl", rows)


if __name__ == "__main__":
    main()
