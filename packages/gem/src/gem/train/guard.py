"""Steps that must not move the weights: no finite loss or gradients, or a jump of the loss.

Where the host decides before the weights move, a fault leaves no trace in them. That is so on CPUs,
and on GPUs with ``skip`` or with spikes looked for, where it makes the host wait for the device in
every step. On GPUs that only stop, nobody waits: the fault is noticed when the log is next written
or a checkpoint is due, before it is written, and the run goes on from the one before.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gem.data.batch import ExampleBatch
from gem.train.local_tensors import local_parts
from gem.train.loop_state import LoopState
from gem.train.spec import GuardSpec
from gem.train.whole_file import partial_of
from gem_parallel.collectives import all_reduce_sum
from gem_parallel.launch import World

FAULTY_FOLDER = "faulty-batches"
# Files of one rank; a run that skips more has told enough.
MOST_FILES = 20
# Optimizers keep squares: that of a larger gradient, or their sum over a row, would be infinite in
# float32 and stand still for good what it belongs to.
_LARGEST = 2.0**60
# The mean loss that a spike is measured by is of about so many steps.
_MEAN_STEPS = 100


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a step was not taken.

    Attributes:
        name: what is wrong with it: ``loss`` or ``gradients``.
        must: what it should be.
        got: what it was.
        stops: whether the run ends, rather than going on without the step.
        way_on: setting with which a run that it ended goes on without the step.
    """

    name: str
    must: str
    got: str
    stops: bool
    way_on: str = "train.guard.nonfinite=skip"


class Guard:
    """Judges steps by the policy of a recipe.

    Args:
        spec: the policy.
        world: the ranks, which all judge alike.
        state: what it knows of earlier steps; updated.

    Attributes:
        decides: whether each step is judged before the weights move.
    """

    def __init__(self, spec: GuardSpec, world: World, state: LoopState) -> None:
        self.spec, self.state = spec, state
        self._world = world
        waits = spec.nonfinite == "skip" or spec.spike_factor is not None
        self.decides = waits or world.device.type == "cpu"

    def judge(self, loss: Tensor, finite: Tensor) -> Fault | None:
        """Judge a step. Every rank has to call this; it waits for the device.

        Args:
            loss: this rank's share of the loss, a scalar.
            finite: whether loss and gradients of this rank are finite, a bool scalar.

        Returns:
            What is wrong with it, or None; the same on every rank.
        """
        sums = torch.stack([loss.double(), (~finite).double()])
        total, wrong = all_reduce_sum(sums, self._world).tolist()
        if not math.isfinite(total):
            return self._count(nonfinite_loss(total, stops=self.spec.nonfinite == "stop"))
        if wrong:
            stops = self.spec.nonfinite == "stop"
            return self._count(nonfinite_gradients(total, stops=stops))
        fault = self._spike(total)
        if fault is not None:
            return self._count(fault)
        self.state.skipped_in_a_row = 0
        return None

    def _spike(self, loss: float) -> Fault | None:
        spec, state = self.spec, self.state
        if spec.spike_factor is None:
            return None
        highest = spec.spike_factor * state.loss_mean
        if state.loss_steps >= spec.spike_after_steps and loss > highest:
            return Fault(
                "loss",
                f"be at most {spec.spike_factor:g} times the mean of the newest steps, "
                f"{highest:.6g}",
                f"{loss:.6g}",
                spec.spike == "stop",
                "train.guard.spike=skip",
            )
        if loss > 0:  # 0 where no label of the batch is known
            state.loss_steps += 1
            state.loss_mean += (loss - state.loss_mean) / min(state.loss_steps, _MEAN_STEPS)
        return None

    def _count(self, fault: Fault) -> Fault:
        if fault.stops:
            return fault
        most = self.spec.most_skipped_in_a_row
        if self.state.skipped_in_a_row < most:
            self.state.skipped_in_a_row += 1
            self.state.skipped_steps += 1
            return fault
        got = f"{fault.got}, after {most} skipped steps in a row"
        way_on = f"train.guard.most_skipped_in_a_row={2 * most}"
        return Fault(fault.name, fault.must, got, stops=True, way_on=way_on)


def nonfinite_loss(loss: float, *, stops: bool) -> Fault:
    """A loss that is no number.

    Args:
        loss: it.
        stops: whether the run ends.
    """
    return Fault("loss", "be finite", str(loss), stops)


def nonfinite_gradients(loss: float, *, stops: bool) -> Fault:
    """Gradients that no optimizer can take.

    Args:
        loss: of the step; finite.
        stops: whether the run ends.
    """
    got = f"NaN, infinity or more than {_LARGEST:.0e} at a loss of {loss:.6g}"
    return Fault("gradients", "be finite, as well as their squares", got, stops)


def is_finite(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Whether a loss, all gradients and their squares are finite. Waits for no device.

    Args:
        loss: a scalar.
        parameters: with their gradients, dense or sparse over rows, or None. Of sharded ones it
            looks at the part of this rank.

    Returns:
        A bool scalar on the device of the loss.

    Numerics: looks at the largest absolute value of each gradient, which cannot overflow.
    Cost: reads every gradient once.
    """
    gradients = local_parts(p.grad for p in parameters if p.grad is not None)
    values = [g._values() if g.is_sparse else g for g in gradients]
    return all_finite([loss, *values], largest=_LARGEST)


def norms_are_finite(norms: Sequence[Tensor]) -> Tensor:
    """Whether gradients and their squares are finite, by their L2 norms. Waits for no device.

    Args:
        norms: fp32 scalars on one device, at least one. No element of a gradient is above its norm.

    Returns:
        A bool scalar.
    """
    found = torch.stack(list(norms))
    return (torch.isfinite(found) & (found <= _LARGEST)).all()


def all_finite(tensors: Sequence[Tensor], *, largest: float = math.inf) -> Tensor:
    """Whether every element of some tensors is finite. Waits for no device.

    Args:
        tensors: dense, of floating point, on one device; at least one has elements.
        largest: absolute value that none may exceed.

    Returns:
        A bool scalar.
    """
    # The largest absolute value of each; NaN where one is NaN.
    norms = torch._foreach_norm([t.detach() for t in tensors if t.numel()], float("inf"))
    found = torch.stack([x.float() for x in norms])
    return (torch.isfinite(found) & (found <= largest)).all()


def write_batch(
    folder: Path, batch: ExampleBatch, *, step: int, rank: int, fault: Fault
) -> Path | None:
    """Write a batch for somebody to look at; `torch.load` reads it.

    Args:
        folder: of the run.
        batch: this rank's slice, on any device.
        step: 1-based step that it was for.
        rank: this rank.
        fault: what was wrong.

    Returns:
        The file: a table of tensors by the names of `ExampleBatch`, with ``step`` and ``fault``.
        None where so many are there already that no more are written.

    Raises:
        OSError, RuntimeError: the disk refuses; torch's writer raises the second.
    """
    place = folder / FAULTY_FOLDER
    path = place / f"step-{step}-rank-{rank}.pt"
    place.mkdir(exist_ok=True)
    if not path.exists() and len(list(place.glob(f"*-rank-{rank}.pt"))) >= MOST_FILES:
        return None
    content: dict[str, Any] = {
        "step": step,
        "fault": f"{fault.name} must {fault.must}; got {fault.got}",
    }
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            content[field.name] = value.cpu().clone()
    content["ids"] = {n: _plain(ids.values, ids.lengths) for n, ids in batch.ids.items()}
    content["streams"] = {
        name: {
            "lengths": stream.numbers.lengths.clone(),
            "numbers": stream.numbers.values.cpu().clone(),
            "gap_seconds": stream.gap_seconds.values.cpu().clone(),
            "ids": {n: ids.values.cpu().clone() for n, ids in stream.ids.items()},
        }
        for name, stream in batch.streams.items()
    }
    partial = partial_of(path)
    try:
        torch.save(content, partial)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _plain(values: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    return {"values": values.cpu().clone(), "lengths": lengths.clone()}
