"""Memory of one rank at its fullest, part by part.

There are two full moments. Early in the dense backward pass most of what the forward pass has kept
is still there, beside the unit that is whole; later, gradients take its place. When rows of tables
are moved, all that is gone, and gathered rows and what travels are there instead.
"""

from dataclasses import dataclass

from gem_parallel.contract import ParallelPlan
from gem_parallel.planning.traffic import (
    gathered_bytes,
    is_sharded,
    own_experts,
    reduced_bytes,
    split_small,
)
from gem_parallel.planning.work import Parameter, TableStep, Unit, Work


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at its fullest.

    Attributes:
        parameters: dense ones that it holds between steps.
        gradients: theirs, as far as they are there yet.
        optimizer: state of the dense optimizer.
        gathered: whole parameters of the unit in use and of those gathered ahead, and the whole
            gradients of the unit in use.
        copies: weights in the format of the products: all that stay whole on the rank, and others
            from the forward to the backward pass.
        activations: what the forward pass keeps, the vectors of the tables among it.
        scratch: what the backward pass of the widest operator needs beside them.
        tables: weights and optimizer rows between steps.
        table_buffers: gathered copies, ids, vectors and gradients of rows.
        batch: inputs.
        all_gradients: gradients at the end of the backward pass.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    copies: int
    activations: int
    scratch: int
    tables: int
    table_buffers: int
    batch: int
    all_gradients: int

    @property
    def total(self) -> int:
        """Bytes at the fuller one of the two moments."""
        always = self.parameters + self.optimizer + self.tables + self.batch
        dense = self.gradients + self.gathered + self.copies + self.activations + self.scratch
        return always + max(dense, self.all_gradients + self.table_buffers)


def held_elements(work: Work, plan: ParallelPlan) -> int:
    """Elements of dense parameters that the fullest rank holds between steps.

    Args:
        work: the model.
        plan: sizes of the axes.

    Returns:
        those of shards with their padding, and of whole copies.
    """
    return sum(_unit_held(unit, plan) for unit in work.units)


def _unit_held(unit: Unit, plan: ParallelPlan) -> int:
    common, dealt = _parameters(unit, plan)
    return _held(common, plan, plan.shard * plan.expert) + _held(dealt, plan, plan.shard)


def _parameters(unit: Unit, plan: ParallelPlan) -> tuple[list[Parameter], list[Parameter]]:
    """Parameters that all ranks share, and those of own experts where they are dealt out."""
    experts = [p for expert in own_experts(unit, plan) for p in expert.parameters]
    if plan.expert > 1 and unit.experts:
        return list(unit.parameters), experts
    return [*unit.parameters, *experts], []


def _held(parameters: list[Parameter], plan: ParallelPlan, shard: int) -> int:
    if not is_sharded(plan):
        return sum(p.elements for p in parameters)
    small, large = split_small(parameters, plan)
    return sum(p.elements for p in small) + sum(p.shard_elements(shard) for p in large)


def whole_elements(unit: Unit, plan: ParallelPlan) -> int:
    """Count the elements of a unit that are whole on a rank only while it runs.

    Args:
        unit: with its experts.
        plan: sizes of the axes.

    Returns:
        0 where nothing of it is cut.
    """
    common, dealt = _parameters(unit, plan)
    total = 0
    if plan.shard * plan.expert > 1:
        total += sum(p.elements for p in split_small(common, plan)[1])
    if plan.shard > 1:
        total += sum(p.elements for p in split_small(dealt, plan)[1])
    return total


def held_or_gathered(unit: Unit, plan: ParallelPlan) -> int:
    """Count the elements of a unit that a rank's products read.

    Args:
        unit: with its experts.
        plan: sizes of the axes.

    Returns:
        those of all but the experts, and those of the rank's own experts.
    """
    return sum(p.elements for group in _parameters(unit, plan) for p in group)


def copied_elements(unit: Unit, work: Work, plan: ParallelPlan) -> int:
    """Count the elements of a unit that a rank has in the format of its products too.

    Args:
        unit: with its experts.
        work: formats, and parts that a batch is run in.
        plan: sizes of the axes.

    Returns:
        those that stay whole on the rank, where its products read a narrower format in a step that
        uses each weight once: its optimizer then writes the copies. Else 0.
    """
    if work.compute_bytes >= work.parameter_bytes or work.micro_batches > 1:
        return 0
    cut = whole_elements(unit, plan) if is_sharded(plan) else 0
    return held_or_gathered(unit, plan) - cut


def narrow_gradients(unit: Unit, work: Work, plan: ParallelPlan) -> int:
    """Count the elements of those whose gradients stay in that format.

    Args:
        unit: with its experts.
        work: as for `copied_elements`.
        plan: sizes of the axes.

    Returns:
        all of them on one rank, or where ranks sum in that format; else the rank's own experts,
        where no other rank has them.
    """
    copied = copied_elements(unit, work, plan)
    if plan.world_size == 1 or not copied or reduced_bytes(work, plan) <= work.compute_bytes:
        return copied
    if plan.expert == 1 or plan.replicate * plan.shard > 1:
        return 0
    return sum(p.elements for p in _parameters(unit, plan)[1])


def memory(work: Work, plan: ParallelPlan, tables: TableStep, *, prefetch: int = 1) -> Memory:
    """Say what one rank holds at its fullest.

    Args:
        work: what the step does.
        plan: sizes of the axes.
        tables: what they take.
        prefetch: units that are gathered ahead.

    Returns:
        bytes by part, at the fullest moment of the dense backward pass.
    """
    moments = [
        _moment(work, plan, index, work.table_copy_bytes // work.micro_batches, prefetch)
        for index in range(len(work.units))
    ]
    full = max(moments, key=lambda moment: sum(moment.values()), default=dict.fromkeys(_PARTS, 0))
    held = held_elements(work, plan)
    travelling = (tables.buffer_bytes + work.table_copy_bytes) // work.micro_batches
    return Memory(
        parameters=work.parameter_bytes * held,
        optimizer=work.state_bytes * held,
        scratch=work.scratch_bytes // work.micro_batches,
        all_gradients=sum(_gradient_bytes(unit, work, plan) for unit in work.units),
        tables=tables.held_bytes,
        table_buffers=tables.gathered_bytes + travelling,
        batch=work.input_bytes,
        **full,
    )


def _gradient_bytes(unit: Unit, work: Work, plan: ParallelPlan) -> int:
    saved = (work.parameter_bytes - work.compute_bytes) * narrow_gradients(unit, work, plan)
    return work.parameter_bytes * _unit_held(unit, plan) - saved


_PARTS = ("gradients", "gathered", "copies", "activations")


def _moment(
    work: Work, plan: ParallelPlan, index: int, vectors: int, prefetch: int
) -> dict[str, int]:
    """What there is while a unit runs backward: kept bytes of it and of all before it.

    Gradients are there of the units behind it; where copies are merged bucket by bucket, of all.
    """
    units, size = work.units, work.parameter_bytes
    buckets = not is_sharded(plan) and plan.world_size > 1
    with_gradients = units if buckets else units[index:]
    whole = [whole_elements(unit, plan) for unit in units]
    first = 0 if plan.keep_gathered else max(0, index - prefetch)
    ahead = sum(whole[first : index + 1])
    kept, copies = vectors, 0
    for unit in units[: index + 1]:
        own = own_experts(unit, plan)
        # With experts dealt out, a rank runs few of them on the examples of many.
        kept += (
            unit.kept_bytes + sum(plan.expert * expert.kept_bytes for expert in own)
        ) // work.micro_batches
        if work.compute_bytes < size:
            copies += held_or_gathered(unit, plan) - copied_elements(unit, work, plan)
            if gathered_bytes(work, plan) <= work.compute_bytes:
                copies -= whole_elements(unit, plan)  # products read them as they were gathered
    copies += sum(copied_elements(unit, work, plan) for unit in units)
    return {
        "gradients": sum(_gradient_bytes(unit, work, plan) for unit in with_gradients),
        # The unit in use has its gradients whole, too.
        "gathered": gathered_bytes(work, plan) * ahead + reduced_bytes(work, plan) * whole[index],
        "copies": work.compute_bytes * copies,
        "activations": kept,
    }
