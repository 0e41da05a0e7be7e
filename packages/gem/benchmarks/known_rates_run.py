"""Trainings on drawn examples by the trainer's step, each batch scored before it is learned.

The precisions of a seed train in one process, a step each in turn: whenever it has to end, all have
learned the same. What they leave is small: sums over each batch, of which `known_rates_compare`
makes differences.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from known_rates import Drawn, KnownRates
from torch import Tensor

from gem.config import load_recipe
from gem.data.synthetic_spec import SyntheticSpec
from gem.dry_run.build import build_step
from gem.planning.schema import declared_schema
from gem.train.clock import StepClock
from gem.train.normalized_entropy import CLIP
from gem.train.step import TrainStep
from gem_opkit.ceilings import device_name
from gem_parallel.launch import World, process_group

BASE = "bf16"
# The same as bf16, from weights one unit in the last place larger: what chance alone makes.
AGAIN = "bf16_again"
_OTHER_START = "bf16_other_start"
# Block FP8 by itself leaves alone what does not pay; here every layer takes part that has a block.
_BLOCK = "precision.least_width=128"
_EXPERTS = '{modules = "layers.*.experts", forward = "fp8_block", input_gradient = "fp8_block"}'
PRECISIONS: dict[str, tuple[str, ...]] = {
    BASE: ("precision.recipe=bf16",),
    AGAIN: ("precision.recipe=bf16",),
    "fp8_block": ("precision.recipe=fp8_block", _BLOCK),
    "mxfp8_rceil": ("precision.recipe=mxfp8_rceil",),
    "mxfp8_floor": ("precision.recipe=mxfp8_floor",),
    # Attention and all linear layers in MXFP8, but the MLPs of experts, which are in block FP8.
    "mixed": (
        *("precision.recipe=mxfp8_rceil", "precision.attention=mxfp8_rceil", _BLOCK),
        f"precision.rules=[{_EXPERTS}]",
    ),
    # Products in bf16; what is kept for the backward pass in fewer bits, whatever its size.
    "kept_fp8": ("precision.recipe=bf16", "memory.kept=fp8", "memory.pack_above_bytes=1"),
    "kept_fp4": ("precision.recipe=bf16", "memory.kept=fp4", "memory.pack_above_bytes=1"),
    "fp32": ("precision.default=fp32",),
    # Heads and last layer too, and layers narrower than a block.
    "naive": ("precision.recipe=fp8_block", "precision.least_width=0", "precision.bf16_escapes=[]"),
    # Other initial weights.
    _OTHER_START: ("precision.recipe=bf16",),
}
HELD_OUT_FROM = 1 << 24  # numbers of batches that no training reaches
_OTHER = 1_000  # added to the seed of the initial weights
_PACE = 16  # steps between two looks at the clock, as the host runs ahead of a GPU


@dataclass(frozen=True, slots=True)
class Asked:
    """The trainings of one seed: a precision each, side by side.

    Attributes:
        precisions: names in `PRECISIONS`.
        seed: of the world, the batches and the initial weights.
        recipe: its file.
        settings: changes of it.
        batches: examples of each batch, in order.
        held_out: batches that are scored afterwards, as large as the last one.
        device: as in ``gem_parallel.launch``.
        ends_at: seconds of the host's clock; what is not learned by then is left out.
        gives_way: end as soon as the time will not suffice, so that others have the device.
    """

    precisions: tuple[str, ...]
    seed: int
    recipe: str
    settings: tuple[str, ...]
    batches: tuple[int, ...]
    held_out: int
    device: str
    ends_at: float
    gives_way: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """What one training leaves: sums of each batch, (batches, tasks, 4), float64.

    The four are the known labels, the positive ones, the log loss, and its expectation.
    ``held_out`` is empty where the time did not suffice; ``batches`` has the examples of each of
    the progressive ones. Seconds are those of all trainings of the seed together.
    """

    progressive: np.ndarray
    held_out: np.ndarray
    batches: tuple[int, ...]
    tasks: tuple[str, ...]
    seed: int
    layers: str
    seconds: float
    device: str

    def of(self, split: str) -> np.ndarray:
        """Sums of the batches of a split; ``second_half`` is of the examples learned last."""
        if split == "second_half":
            learned = np.cumsum(self.batches)
            return self.progressive[learned > learned[-1] / 2]
        return getattr(self, split)


def run(asked: Asked) -> dict[str, Run]:
    """Train every precision on the same batches in turn, and score them.

    Returns:
        precision -> what it leaves; empty where it gave way.
    """
    began = time.time()
    learned = 0
    pace: tuple[float, int] | None = None
    torch.set_num_threads(1)
    with process_group(asked.device) as world:
        steps = {name: _step(asked, name, world) for name in asked.precisions}
        config = load_recipe(asked.recipe, asked.settings)
        options, schema = config.data.synthetic or SyntheticSpec(), declared_schema(config)
        drawn = KnownRates(options, schema, seed=asked.seed, device=world.device)
        sums: dict[str, list[Tensor]] = {name: [] for name in steps}
        for number, examples in enumerate(asked.batches):
            if number % _PACE == 0:
                _wait(world)
                if time.time() > asked.ends_at:
                    break
                if asked.gives_way and _late(asked, pace, learned):
                    return {}
                # Large batches are of one speed; in the first of them something may be compiled.
                if pace is None and examples == asked.batches[-1] and number > _PACE:
                    pace = time.time(), learned
            one = drawn.batch(number, examples)
            for name, step in steps.items():
                sums[name].append(_sums(step(one.batch, number).p_BA, one))
            learned += examples
        seen = asked.batches[: len(sums[asked.precisions[0]])]
        held: dict[str, list[Tensor]] = {name: [] for name in steps}
        for number in range(asked.held_out if seen == asked.batches else 0):
            one = drawn.batch(HELD_OUT_FROM + number, asked.batches[-1])
            for name, step in steps.items():
                held[name].append(_sums(step.score(one.batch), one))
        return {
            name: Run(
                progressive=_joined(sums[name], schema.labels),
                held_out=_joined(held[name], schema.labels),
                batches=seen,
                tasks=schema.labels,
                seed=asked.seed,
                layers=step.low_precision.told(),
                seconds=time.time() - began,
                device=device_name(world.device),
            )
            for name, step in steps.items()
        }


def _late(asked: Asked, pace: tuple[float, int] | None, learned: int) -> bool:
    """Whether a seed that goes on as it did since ``pace``, time and examples, ends too late."""
    if pace is None or learned == pace[1]:
        return False
    an_example = (time.time() - pace[0]) / (learned - pace[1])
    return time.time() + an_example * (sum(asked.batches) - learned) > asked.ends_at


def _step(asked: Asked, precision: str, world: World) -> TrainStep:
    """The trainer's own step of one precision."""
    other = _OTHER if precision == _OTHER_START else 0
    settings = [*asked.settings, *PRECISIONS[precision]]
    config = load_recipe(asked.recipe, settings, seed=asked.seed + other)
    made = build_step(
        config,
        declared_schema(config),
        world,
        total_steps=len(asked.batches),
        clock=StepClock(world.device),
    )
    if precision == AGAIN:
        _nudge(made)
    return made


def _joined(sums: list[Tensor], tasks: Sequence[str]) -> np.ndarray:
    return torch.stack(sums).cpu().numpy() if sums else np.zeros((0, len(tasks), 4))


def _nudge(step: TrainStep) -> None:
    """Move every dense weight to the next larger number of its dtype."""
    with torch.no_grad():
        for weight in step.dense.values():
            weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))


def _sums(p_BA: Tensor, one: Drawn) -> Tensor:
    """Labels, positive ones, log loss and expected log loss, of the rows whose label is known."""
    p = p_BA.double().clamp(CLIP, 1.0 - CLIP)
    known, labels = one.batch.label_mask_BA.double(), one.batch.labels_BA.double()
    yes, no = -p.log(), -torch.log1p(-p)
    losses = [rate * yes + (1.0 - rate) * no for rate in (labels, one.rates_BA)]
    parts = torch.stack([torch.ones_like(labels), labels, *losses])
    return (parts * known).sum(1).T


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
