"""Batches on their way to the device: the next one is copied while a step trains.

    reader ──► pinned ──► (thread) ──► copied ahead ──► step
               host       read_ahead   side stream

A copy from ordinary host memory makes the host wait for it. So the thread that reads ahead puts
batches into page-locked memory, and the loop starts the copy of the batch behind the one that it
trains, on a stream of its own. On a CPU batches pass as they are.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from gem.data.batch import ExampleBatch


@dataclass(frozen=True, slots=True)
class Arrived:
    """A batch that is to be trained now.

    Attributes:
        host: as it was read.
        there: the same on the device; may be used on the current stream.
        following: the batch behind it, on the device for the stream that copies; None where it is
            the last one, or nothing is copied ahead.
    """

    host: ExampleBatch
    there: ExampleBatch
    following: ExampleBatch | None = None


def pinned(batches: Iterator[ExampleBatch], device: torch.device) -> Iterator[ExampleBatch]:
    """Put batches into page-locked memory, from which a device copies without the host.

    Args:
        batches: on the host.
        device: that they go to; for a CPU they stay where they are.

    Returns:
        the same batches. Closing it closes what they are read from.
    """
    return batches if device.type == "cpu" else _pinned(batches)


def _pinned(batches: Iterator[ExampleBatch]) -> Iterator[ExampleBatch]:
    try:
        for batch in batches:
            yield batch.pinned()
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()


def copied_ahead(
    batches: Iterable[ExampleBatch], device: torch.device, stream: torch.cuda.Stream | None
) -> Iterator[Arrived]:
    """Copy batches to the device, each while the one before it is trained.

    An error in reading a batch is raised when that batch is due, so that those before it train.

    Args:
        batches: on the host, or on the device already.
        device: where to.
        stream: that copies run on; None copies each batch when it is due.

    Yields:
        the same batches, in their order.
    """
    reading = iter(batches)
    if stream is None:
        for batch in reading:
            yield Arrived(batch, _moved(batch, device))
        return
    coming, fault = _begin(reading, device, stream)
    while coming is not None:
        batch, there, done = coming
        coming, fault = _begin(reading, device, stream)
        if done is not None:
            _take_over(there, done)
        yield Arrived(batch, there, None if coming is None else coming[1])
    if fault is not None:
        raise fault


_Coming = tuple[ExampleBatch, ExampleBatch, torch.cuda.Event | None]


def _begin(
    reading: Iterator[ExampleBatch], device: torch.device, stream: torch.cuda.Stream
) -> tuple[_Coming | None, BaseException | None]:
    """Read a batch and start its copy: it, there, and when it is; or why there is none."""
    try:
        batch = next(reading, None)
    except Exception as fault:  # noqa: BLE001 - raised by copied_ahead when the batch is due
        return None, fault
    if batch is None:
        return None, None
    if batch.labels_BA.device == device:
        return (batch, batch, None), None
    with torch.cuda.stream(stream):
        there = _moved(batch, device)
        done = torch.cuda.Event()
        done.record(stream)
    return (batch, there, done), None


def _moved(batch: ExampleBatch, device: torch.device) -> ExampleBatch:
    # On a CPU it is there already, and every look at a tensor gives the thread that reads ahead
    # the chance to keep the interpreter for a while.
    same = batch.labels_BA.device == device
    return batch if same else batch.to(device, non_blocking=True)


def _take_over(batch: ExampleBatch, done: torch.cuda.Event) -> None:
    """Let the current stream use what another one has copied."""
    current = torch.cuda.current_stream(batch.labels_BA.device)
    current.wait_event(done)
    for tensor in device_tensors(batch):
        tensor.record_stream(current)


def device_tensors(batch: Any) -> Iterator[Tensor]:
    """Go through the tensors of a batch that lie on a device.

    Args:
        batch: or a part of one.

    Yields:
        each tensor; one that several members share comes several times.
    """
    if isinstance(batch, Tensor):
        if batch.is_cuda:
            yield batch
    elif isinstance(batch, dict):
        for part in batch.values():
            yield from device_tensors(part)
    elif is_dataclass(batch):
        for field in fields(batch):
            yield from device_tensors(getattr(batch, field.name))
