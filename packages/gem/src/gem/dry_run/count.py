"""One step of one rank of a large job, in this process: bytes of collectives, peak of memory.

The trainer's step runs as it is, over process groups whose other ranks exist in name only. Ids,
lengths and offsets are real; weights, activations, gradients and rows of tables have shapes and no
memory. Stood in for: the ids of other ranks (each asks what this one asks), first rows (not
drawn), the data set (random batches) and the guard (no step is judged, as no loss has a value).
Left out: time, kernels' workspaces, and what an allocator keeps.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gem.config import RunConfig
from gem.data.batch import ExampleBatch, StreamBatch
from gem.data.schema import BatchSchema
from gem.dry_run.build import build_step
from gem.dry_run.inputs import random_batch
from gem.planning.lengths import LengthLaw
from gem.train.clock import StepClock
from gem.train.local_tensors import local_part
from gem.train.run_plan import plan_of
from gem.train.step import TrainStep
from gem_embeddings.contract import TableLoad
from gem_parallel.dry_run.fakes import FloatsInName
from gem_parallel.dry_run.groups import named_ranks
from gem_parallel.dry_run.ledger import Ledger, Sent, totals
from gem_parallel.dry_run.memory import MemoryCount
from gem_parallel.dry_run.replicas import replicas_in_name
from gem_parallel.launch import World
from gem_precision import norms

_STEPS = 2  # the first one makes the optimizer's state


@dataclass(frozen=True, slots=True)
class StepCount:
    """What one rank gives and needs in a step.

    Attributes:
        ranks: of the job.
        rank: which of them ran.
        sent: every call of a collective, in order.
        held_bytes: kind -> bytes between steps: parameters, optimizer, tables (rows with those of
            their optimizer).
        gradient_bytes: gradients of the dense parameters, once the backward pass has ended.
        peak_bytes: most memory in use at a time.
        peak_section: what ran then.
        section_peaks: section -> most memory in use while it ran.
        events: stream -> events of the rank's batch.
    """

    ranks: int
    rank: int
    sent: tuple[Sent, ...]
    held_bytes: Mapping[str, int]
    gradient_bytes: int
    peak_bytes: int
    peak_section: str
    section_peaks: Mapping[str, int]
    events: Mapping[str, int]

    def totals(self) -> dict[tuple[str, str], int]:
        """(axis, collective) -> bytes of the step, sorted.

        Returns:
            bytes that the rank gives.
        """
        return totals(list(self.sent))


class _Sections(StepClock):
    """Tells ledger and memory which section runs; measures nothing."""

    def __init__(self, world: World, ledger: Ledger, memory: MemoryCount) -> None:
        super().__init__(world.device)
        self._ledger, self._memory = ledger, memory

    def mark(self, section: str, *, step_ends: bool = False) -> None:
        """Begin a section.

        Args:
            section: its name.
            step_ends: not looked at.
        """
        self._ledger.section = section
        self._memory.enter(section)


def count_step(
    config: RunConfig,
    schema: BatchSchema,
    ranks: int,
    *,
    rank: int = 0,
    loads: Mapping[str, TableLoad] | None = None,
    laws: Mapping[str, LengthLaw] | None = None,
) -> StepCount:
    """Run a step of one rank.

    Args:
        config: the run, with a plan of as many ranks, or none.
        schema: of the batches.
        ranks: of the job.
        rank: which of them runs.
        loads: feature -> popularity of its ids; those left out are uniform.
        laws: stream -> how long its histories are; those left out are uniform on 1 to the longest.

    Returns:
        the counts.

    Raises:
        ConfigError: the plan is for another number of ranks, or a process group exists.
    """
    with _job(rank, ranks) as (world, ledger):
        return _count(
            config, schema, world, ledger, drawn_batch(config, schema, world, loads, laws or {})
        )


@contextmanager
def _job(rank: int, ranks: int) -> Iterator[tuple[World, Ledger]]:
    if ranks == 1:
        yield World(), Ledger()
        return
    with named_ranks(rank, ranks, op="gem plan") as named:
        yield named.world, named.ledger


def drawn_batch(
    config: RunConfig,
    schema: BatchSchema,
    world: World,
    loads: Mapping[str, TableLoad] | None,
    laws: Mapping[str, LengthLaw],
) -> ExampleBatch:
    """Draw one rank's batch, whose lengths stand for their law.

    Args:
        config: the run, whose batch is that of all ranks.
        schema: inputs.
        world: the ranks; the rank decides the order of the lengths, and the ids.
        loads: feature -> statistics of its ids; None for ids that are drawn alike.
        laws: stream -> how long its histories are; uniform up to the longest where it has none.

    Returns:
        a batch with all its numbers.
    """
    examples = config.train.batch_examples // world.size
    draw = torch.Generator().manual_seed(world.rank)
    lengths: dict[str, list[int]] = {}
    for stream in schema.streams:
        law = laws.get(stream.name, LengthLaw(1, stream.max_events))
        own = law.quantiles(examples, most=stream.max_events)
        order = torch.randperm(examples, generator=draw).tolist()
        lengths[stream.name] = [own[place] for place in order]
    return random_batch(schema, lengths, draw, loads)


def _count(
    config: RunConfig,
    schema: BatchSchema,
    world: World,
    ledger: Ledger,
    batch: ExampleBatch,
) -> StepCount:
    memory = MemoryCount()
    mode = FloatsInName(memory)
    clock = _Sections(world, ledger, memory)
    with memory.watching(), as_on_a_gpu(), mode:
        if plan_of(config, world).tables_are_local:
            config = drawn_in_order(config)
        step = build_step(config, schema, world, total_steps=_STEPS, clock=clock)
        named = batch_without_memory(batch, mode)
        gradients, held = 0, {}
        for number in range(_STEPS):
            ledger.take()
            memory.begin()
            step(named, number)
            gradients = sum(_bytes(p.grad) for p in step.dense.values() if p.grad is not None)
            held = _held(step, memory)
        peak = memory.peak
        return StepCount(
            ranks=world.size,
            rank=world.rank,
            sent=tuple(ledger.take()),
            held_bytes=held,
            gradient_bytes=gradients,
            peak_bytes=peak.total_bytes,
            peak_section=peak.section,
            section_peaks=memory.section_peaks,
            events={name: own.numbers.total_tokens for name, own in batch.streams.items()},
        )


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Replace what would need numbers, or would run in another way than on a GPU.

    First rows are not drawn: their numbers are computed from integers, which are real here. Norms
    take the operator that has a kernel, in place of a formula that keeps more.

    Yields:
        nothing; all is put back behind the block.
    """
    with (
        _replaced("gem_embeddings.sharded.storage", "fill_initial", lambda *_, **__: None),
        _replaced("gem_precision.norms", "has_kernel", _fits_kernel),
        _replaced("gem_precision.layers", "has_kernel", _fits_kernel),
        replicas_in_name(),
    ):
        yield


def _fits_kernel(x: Tensor) -> bool:
    return 0 < x.shape[-1] <= norms.WIDEST and not isinstance(x, DTensor)


@contextmanager
def _replaced(module: str, name: str, value: object) -> Iterator[None]:
    owner: Any = import_module(module)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def batch_without_memory(batch: ExampleBatch, mode: FloatsInName) -> ExampleBatch:
    """Give a batch floating-point values in name only, as the dry run has them.

    Args:
        batch: with all its numbers.
        mode: that the step will run in.

    Returns:
        the same lengths and ids; numbers without memory.
    """
    streams = {
        name: StreamBatch(
            ids=own.ids,
            numbers=own.numbers.with_values(mode.without_memory(own.numbers.values)),
            gap_seconds=own.gap_seconds.with_values(mode.without_memory(own.gap_seconds.values)),
        )
        for name, own in batch.streams.items()
    }
    flat = {
        field.name: mode.without_memory(getattr(batch, field.name))
        for field in fields(batch)
        if isinstance(getattr(batch, field.name), Tensor)
    }
    return replace(batch, streams=streams, **flat)


def _held(step: TrainStep, memory: MemoryCount) -> dict[str, int]:
    """What stays between steps, by kind; rows of tables with those of their optimizer."""
    moments = _state(step, "dense")
    found = {
        "parameters": memory.name("parameters", _tensors(step.dense.values())),
        "optimizer": memory.name("optimizer", moments),
    }
    if step.engine is not None:
        engine: Any = step.engine  # a module, of which a checker thinks that all it has is tensors
        found["tables"] = engine.resident_bytes()
    else:
        rows = [*_tensors(step.table_parameters), *_state(step, "tables")]
        found["tables"] = memory.name("tables", rows)
    return found


def _state(step: TrainStep, optimizer: str) -> Sequence[Tensor]:
    if optimizer not in step.optimizers:
        return []
    entries = step.optimizers[optimizer].state.values()
    return _tensors(value for entry in entries for value in entry.values())


def drawn_in_order(config: RunConfig) -> RunConfig:
    """The same recipe, but for how first rows are drawn, which decides no size.

    Returns:
        a config that builds without drawing rows one by one.
    """
    tables = config.model.embeddings
    plain = tables.model_copy(
        update={"initial_rows": type(tables).model_fields["initial_rows"].default}
    )
    return config.model_copy(
        update={"model": config.model.model_copy(update={"embeddings": plain})}
    )


def _tensors(values: Any) -> Sequence[Tensor]:
    return [local_part(v) for v in values if isinstance(v, Tensor | nn.Parameter)]


def _bytes(tensor: Tensor) -> int:
    own = local_part(tensor)
    return own.numel() * own.element_size()
