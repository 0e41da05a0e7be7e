"""Judge a precision recipe on a run that is there: which layers do not hold it, and what NE says.

    python packages/gem/benchmarks/precision_guard.py RUN [--recipe fp8_block] [--task NAME]

Takes the newest checkpoint of RUN and some batches of its validation data, and runs them in bf16
and by the recipe, every layer in it whatever its width. Prints the difference of NE with its
interval, the layers to take out with the reasons, and the worst layers. ``--plant LAYER`` makes one
channel of a layer's input 1,000 times as large, which the guard has to find.
"""

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from gem.data.batch import ExampleBatch
from gem.model.build import late_layers
from gem.train.saved_run import saved_run
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
    """Multiply the first channel of a layer's input, in every call."""

    def larger(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        factor = torch.ones(inputs[0].shape[-1], device=inputs[0].device, dtype=inputs[0].dtype)
        factor[0] = PLANTED
        return (inputs[0] * factor, *inputs[1:])

    # In front of the guard's own look at the input.
    model.get_submodule(name).register_forward_pre_hook(larger, prepend=True)


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
    chosen = parser.parse_args()
    console = Console()
    recipe = PrecisionRecipe.model_validate({"recipe": chosen.recipe, "least_width": 0})
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

        batches = (b.to(device) for b in islice(reader.batches(chosen.split), chosen.batches))
        report = guard_recipe(
            step.model, recipe, batches, score=score, device=device,
            escapes=late_layers(step.model),
        )  # fmt: skip
    console.print(f"{chosen.recipe} on {chosen.run}, {labels[task]} of {chosen.split}")
    for line in (*report.told().splitlines(), *shown(report, chosen.most)):
        console.print(line, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
