"""What a training step holds in memory: weights, optimizers, and what it keeps meanwhile."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from gem.bench.kept import kept_for_backward
from gem.bench.schema import StepMemory
from gem.data.batch import ExampleBatch
from gem.train.local_tensors import local_part
from gem.train.step import TrainStep


def step_memory(step: TrainStep, batch: ExampleBatch, peak_bytes: int | None) -> StepMemory:
    """Count the memory of a step. Trains it once more, where it runs on one rank.

    Args:
        step: that has been taken before, so that its optimizers hold what they need.
        batch: of this rank.
        peak_bytes: the most that was held at a time; None where nobody counts that.

    Returns:
        parameters, optimizers, what the backward pass finds, and the peak beside them.
    """
    parameters = _bytes([*step.dense.values(), *step.table_parameters, *_copies(step)])
    if step.engine is not None:
        engine: Any = step.engine  # a module, whose methods no checker sees
        parameters += engine.resident_bytes()
    state = [
        value
        for optimizer in step.optimizers.values()
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, Tensor)
    ]
    optimizer_bytes = _bytes([*state, *step.ema.values()])
    kept_bytes, ratio = None, None
    if step.world.size == 1:
        kept_bytes = _kept(step, batch.to(step.world.device))
        if peak_bytes is not None:
            ratio = peak_bytes / (parameters + optimizer_bytes + kept_bytes)
    return StepMemory(
        parameter_bytes=parameters,
        optimizer_bytes=optimizer_bytes,
        kept_bytes=kept_bytes,
        peak_bytes=peak_bytes,
        peak_ratio=ratio,
    )


def _kept(step: TrainStep, batch: ExampleBatch) -> int:
    """Of the largest part of a batch, as the next part begins without it."""
    given = [*step.model.parameters(), *step.model.buffers(), *_copies(step)]
    given += _tensors(batch)
    largest = 0
    with kept_for_backward(given) as kept:

        def begin(module: nn.Module, inputs: Any) -> None:
            nonlocal largest
            largest = max(largest, kept.bytes)
            kept.sizes.clear()

        handle = step.wrapped.register_forward_pre_hook(begin)
        try:
            step(batch, 0)
        finally:
            handle.remove()
        return max(largest, kept.bytes)


def _copies(step: TrainStep) -> list[Tensor]:
    """Weights in half precision that the passes read, beside those that the optimizer moves."""
    return [] if step.working is None else list(step.working.copies.values())


def _bytes(tensors: Iterable[Tensor]) -> int:
    own = [local_part(tensor) for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in own)


def _tensors(batch: ExampleBatch) -> list[Tensor]:
    found = [value for value in _fields(batch) if isinstance(value, Tensor)]
    for stream in batch.streams.values():
        fields = [*stream.ids.values(), stream.numbers, stream.gap_seconds]
        found += [own.values for own in fields] + [stream.numbers.offsets_O]
    for ids in batch.ids.values():
        found += [ids.values, ids.offsets_O]
    return found


def _fields(batch: ExampleBatch) -> list[Any]:
    return [getattr(batch, name) for name in ExampleBatch.__slots__]
