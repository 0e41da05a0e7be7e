"""One training on drawn examples by the trainer's step, each batch scored before it is learned.

What a run leaves is small: sums over each batch, of which `known_rates_compare` makes differences.
"""

import time
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
from gem.train.step import TrainStep, probabilities
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
            return self.progressive[len(self.progressive) // 2 :]
        return getattr(self, split)


def run(asked: Asked) -> Run | None:
    """Train on the drawn batches and score them; None where the time did not suffice."""
    began = time.time()
    if began > asked.ends_at:
        return None
    torch.set_num_threads(1)
    settings = [*asked.settings, *PRECISIONS[asked.precision]]
    other = _OTHER if asked.precision == _OTHER_START else 0
    config = load_recipe(asked.recipe, settings, seed=asked.seed + other)
    schema = declared_schema(config)
    examples = config.train.batch_examples
    batches, held_out = asked.examples // examples, asked.held_out // examples
    with process_group(asked.device) as world:
        options = config.data.synthetic or SyntheticSpec()
        drawn = KnownRates(options, schema, seed=asked.seed, device=world.device)
        clock = StepClock(world.device)
        step = build_step(config, schema, world, total_steps=batches, clock=clock)
        if asked.precision == AGAIN:
            _nudge(step)
        _wait(world)
        first_step_s = 0.0
        sums: list[Tensor] = []
        for number in range(batches):
            if number % _PACE == 0:
                _wait(world)
                if time.time() > asked.ends_at:
                    return None
            one = drawn.batch(number, examples)
            sums.append(_sums(step(one.batch, number).p_BA, one))
            if number == 0:
                _wait(world)
                first_step_s = time.time() - began
        later = (drawn.batch(HELD_OUT_FROM + n, examples) for n in range(held_out))
        held = [_sums(scored(step, one), one) for one in later]
        return Run(
            progressive=torch.stack(sums).cpu().numpy(),
            held_out=torch.stack(held).cpu().numpy() if held else np.zeros((0, *sums[0].shape)),
            tasks=schema.labels,
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


def _on_gpu(world: World) -> bool:
    return world.device.type == "cuda"


def _wait(world: World) -> None:
    if _on_gpu(world):
        torch.cuda.synchronize()
