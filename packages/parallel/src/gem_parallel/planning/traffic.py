"""The collectives of the dense part in one step: what is given, over which axis, in which phase.

    replicas only         gradients all-reduced over the world, bucket by bucket
    shard or expert > 1   each unit's parameters gathered before its forward and, unless they are
                          kept, its backward pass,
                          gradients reduce-scattered, then all-reduced over the replicas
    experts               inputs exchanged and outputs reduce-scattered in the forward pass; the
                          mirror image in the backward pass
    small parameters      copies everywhere; gradients all-reduced over the world

Parameters of experts that are dealt out are cut over ``shard`` alone, all others over ``shard`` and
``expert`` together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gem_parallel.contract import ParallelPlan
from gem_parallel.planning.work import Collective, Expert, Parameter, Unit, Work

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class DenseTraffic:
    """One collective of a unit in a step.

    Attributes:
        unit: name of the unit.
        phase: pass in which it runs.
        axis: of the mesh; ``shard_expert`` is both of these together.
        collective: its name.
        given_bytes: what one rank gives in all its calls of a step.
        calls: number of calls.
        what: what travels.
        blocks: whether the unit's own compute waits for it, as it does for activations.
    """

    unit: str
    phase: Phase
    axis: str
    collective: Collective
    given_bytes: int
    calls: int
    what: str
    blocks: bool = False


def is_sharded(plan: ParallelPlan) -> bool:
    """Whether dense parameters are cut at all; else every rank holds a copy of everything.

    Args:
        plan: sizes of the axes.

    Returns:
        True where shard or expert is above 1.
    """
    return plan.shard > 1 or plan.expert > 1


def gathered_bytes(work: Work, plan: ParallelPlan) -> int:
    """Bytes of an element of a cut parameter while it is whole.

    Args:
        work: says how parameters are stored.
        plan: says in what format they are gathered.

    Returns:
        2 for bf16, else as they are stored.
    """
    return 2 if plan.gather_dtype == "bf16" else work.parameter_bytes


def reduced_bytes(work: Work, plan: ParallelPlan) -> int:
    """Bytes of an element of a gradient while it is summed over ranks.

    Args:
        work: says how parameters are stored.
        plan: says in what format gradients are summed.

    Returns:
        2 for bf16, else as parameters are stored.
    """
    return 2 if plan.reduce_dtype == "bf16" else work.parameter_bytes


def split_small(
    parameters: Iterable[Parameter], plan: ParallelPlan
) -> tuple[list[Parameter], list[Parameter]]:
    """Separate the parameters that stay whole from those that are cut.

    Args:
        parameters: any.
        plan: says below what size they stay whole.

    Returns:
        small ones, large ones.
    """
    small: list[Parameter] = []
    large: list[Parameter] = []
    for parameter in parameters:
        (small if parameter.elements < plan.replicate_below else large).append(parameter)
    return small, large


def own_experts(unit: Unit, plan: ParallelPlan) -> Sequence[Expert]:
    """The experts of the rank that has most to do.

    Args:
        unit: with its experts.
        plan: says over how many ranks they are dealt out.

    Returns:
        consecutive ones, as many as each rank keeps.
    """
    each = len(unit.experts) // plan.expert
    if plan.expert == 1 or not unit.experts:
        return unit.experts
    shares = [unit.experts[rank * each : (rank + 1) * each] for rank in range(plan.expert)]
    return max(
        shares, key=lambda own: sum(op.forward.flops for expert in own for op in expert.operators)
    )


def dense_traffic(work: Work, plan: ParallelPlan) -> list[DenseTraffic]:
    """List the collectives of a step.

    Args:
        work: what the step does.
        plan: sizes of the axes.

    Returns:
        the forward pass in the order of the units, then the backward pass in reverse.
    """
    forward: list[DenseTraffic] = []
    backward: list[DenseTraffic] = []
    for unit in work.units:
        ahead, back = _unit_traffic(unit, work, plan)
        forward += ahead
        backward = back + backward
    return forward + backward


def _unit_traffic(
    unit: Unit, work: Work, plan: ParallelPlan
) -> tuple[list[DenseTraffic], list[DenseTraffic]]:
    size = reduced_bytes(work, plan)
    dealt = plan.expert > 1 and bool(unit.experts)
    parameters = list(unit.parameters)
    if not dealt:
        parameters += [p for expert in unit.experts for p in expert.parameters]
    if not is_sharded(plan):
        if plan.replicate == 1:
            return [], []
        whole = size * sum(p.elements for p in parameters)
        reduced = _one(unit, "backward", "world", "all_reduce", whole, 1, "gradients")
        return [], [reduced] if whole else []
    small, large = split_small(parameters, plan)
    ahead, back = _sharded(unit, work, large, plan, "shard_expert", plan.shard * plan.expert)
    if dealt:
        own = own_experts(unit, plan)
        few, many = split_small([p for expert in own for p in expert.parameters], plan)
        more_ahead, more_back = _sharded(unit, work, many, plan, "shard", plan.shard)
        exchanged = _exchanges(unit, work, plan, own)
        ahead += more_ahead + exchanged[0]
        back += exchanged[1] + more_back
        copies = size * sum(p.elements for p in few)
        if copies and plan.replicate * plan.shard > 1:
            axis = "replicate" if plan.shard == 1 else "replicate_shard"
            back.append(_one(unit, "backward", axis, "all_reduce", copies, 1, "small experts"))
    copies = size * sum(p.elements for p in small)
    if copies:
        back.append(_one(unit, "backward", "world", "all_reduce", copies, 1, "small gradients"))
    return ahead, back


def _sharded(
    unit: Unit,
    work: Work,
    parameters: Sequence[Parameter],
    plan: ParallelPlan,
    axis: str,
    shard: int,
) -> tuple[list[DenseTraffic], list[DenseTraffic]]:
    """Gathers, reduce-scatter and all-reduce of parameters that are gathered together."""
    elements = sum(p.shard_elements(shard) for p in parameters)
    if not elements:
        return [], []
    part = reduced_bytes(work, plan) * elements
    ahead: list[DenseTraffic] = []
    back: list[DenseTraffic] = []
    times = work.micro_batches
    if shard > 1:
        gathered = gathered_bytes(work, plan) * elements * times
        ahead.append(_one(unit, "forward", axis, "all_gather", gathered, times, "parameters"))
        if not plan.keep_gathered:
            back.append(_one(unit, "backward", axis, "all_gather", gathered, times, "parameters"))
        back.append(_one(unit, "backward", axis, "reduce_scatter", part * shard, 1, "gradients"))
    if plan.replicate > 1:
        back.append(_one(unit, "backward", "replicate", "all_reduce", part, 1, "gradients"))
    return ahead, back


def _exchanges(
    unit: Unit, work: Work, plan: ParallelPlan, own: Sequence[Expert]
) -> tuple[list[DenseTraffic], list[DenseTraffic]]:
    """Activations between the ranks that keep a unit's experts."""
    times = work.micro_batches
    inputs = sum(expert.input_bytes for expert in unit.experts)
    received = plan.expert * sum(expert.input_bytes for expert in own)
    outputs = plan.expert * unit.output_bytes

    def one(phase: Phase, collective: Collective, given: int, what: str) -> DenseTraffic:
        return _one(unit, phase, "expert", collective, given, times, what, blocks=True)

    ahead = [
        one("forward", "all_to_all", inputs, "experts' inputs"),
        one("forward", "reduce_scatter", outputs, "experts' outputs"),
    ]
    back = [
        one("backward", "all_gather", unit.output_bytes, "gradients of experts' outputs"),
        one("backward", "all_to_all", received, "gradients of experts' inputs"),
    ]
    return ahead, back


def _one(
    unit: Unit,
    phase: Phase,
    axis: str,
    collective: Collective,
    given_bytes: int,
    calls: int,
    what: str,
    *,
    blocks: bool = False,
) -> DenseTraffic:
    return DenseTraffic(
        unit=unit.name,
        phase=phase,
        axis=axis,
        collective=collective,
        given_bytes=given_bytes,
        calls=calls,
        what=what,
        blocks=blocks,
    )
