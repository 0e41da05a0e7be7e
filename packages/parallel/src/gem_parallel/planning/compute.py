"""How long a rank computes: its operators on the roofline, copies of weights, the optimizer."""

import math
from collections.abc import Sequence

from gem_parallel.contract import Accelerator, ParallelPlan
from gem_parallel.planning.memory import (
    copied_elements,
    held_elements,
    held_or_gathered,
    narrow_gradients,
    whole_elements,
)
from gem_parallel.planning.rates import Rates
from gem_parallel.planning.traffic import (
    gathered_bytes,
    is_sharded,
    own_experts,
    reduced_bytes,
)
from gem_parallel.planning.work import Operator, Unit, Work


def operator_ms(operators: Sequence[Operator], device: Accelerator, rates: Rates) -> list[float]:
    """Time of forward and of backward of some operators.

    Args:
        operators: of one rank's batch.
        device: rates of the roofline.
        rates: shares of it.

    Returns:
        two times in milliseconds.
    """
    total = [0.0, 0.0]
    for op in operators:
        share = rates.share(op.kind)
        for index, (cost, reached) in enumerate(
            ((op.forward, share.forward), (op.backward, share.backward))
        ):
            roof = cost.roofline_ms(device.matmul_tflops * 1e12, device.memory_gbytes_per_s * 1e9)
            total[index] += roof / reached
    return total


def _own_operators(unit: Unit, plan: ParallelPlan) -> list[Operator]:
    """Work of one rank: its own experts see the examples of all ranks of the axis."""
    found = list(unit.operators)
    for expert in own_experts(unit, plan):
        found += [
            Operator(op.kind, op.forward * plan.expert, op.backward * plan.expert)
            for op in expert.operators
        ]
    return found


def compute_ms(
    work: Work, plan: ParallelPlan, device: Accelerator, rates: Rates
) -> dict[str, list[float]]:
    """Time of each unit's operators on a rank of mean work.

    Args:
        work: of one rank.
        plan: says which experts the rank runs, on the examples of how many.
        device: rates of the roofline.
        rates: shares of it.

    Returns:
        unit -> milliseconds forward and backward.
    """
    return {
        unit.name: operator_ms(_own_operators(unit, plan), device, rates) for unit in work.units
    }


def kinds_ms(work: Work, plan: ParallelPlan, device: Accelerator, rates: Rates) -> dict[str, float]:
    """The same time by kind of work, forward and backward together.

    Args:
        work: of one rank.
        plan: as in `compute_ms`.
        device: as there.
        rates: as there.

    Returns:
        kind -> milliseconds, by name.
    """
    found: dict[str, float] = {}
    for unit in work.units:
        for op in _own_operators(unit, plan):
            found[op.kind] = found.get(op.kind, 0.0) + sum(operator_ms([op], device, rates))
    return dict(sorted(found.items()))


def slowest(work: Work, ranks: int) -> float:
    """Work of the heaviest rank over the mean.

    Args:
        work: says how examples differ, or what balancing leaves of that.
        ranks: number of ranks.

    Returns:
        at least 1; 1 for one rank, which has it all.
    """
    if work.slowest is not None and ranks > 1:
        return work.slowest(ranks)
    return 1.0 + work.spread * math.sqrt(2.0 * math.log(ranks))


def weights_ms(unit: Unit, work: Work, plan: ParallelPlan, device: Accelerator) -> list[float]:
    """Time of moving a unit's weights and their gradients between formats and buffers.

    What is cut is copied out of what was gathered, and its gradient into what is reduced. What
    products read in another format than it is there is cast, and its gradient cast back. Where the
    optimizer has written the other format, only gradients are cast that are merged with those of
    other ranks.

    Args:
        unit: the unit.
        work: formats of weights, at rest and in products.
        plan: says what is cut, and in what format it is gathered.
        device: its bandwidth.

    Returns:
        milliseconds forward and backward.
    """
    size, gathered, whole = work.parameter_bytes, gathered_bytes(work, plan), 0
    cast, copied = held_or_gathered(unit, plan), copied_elements(unit, work, plan)
    if is_sharded(plan):
        whole = whole_elements(unit, plan)
        if gathered <= work.compute_bytes:
            cast -= whole
    if work.compute_bytes >= size:
        cast = copied = 0
    merged = copied - narrow_gradients(unit, work, plan)
    casts, copies = (cast - copied) * (size + work.compute_bytes), whole * 2 * gathered
    forward = casts + copies
    backward = casts + merged * (size + work.compute_bytes)
    backward += (0 if plan.keep_gathered else copies) + whole * (
        gathered + reduced_bytes(work, plan)
    )
    return [moved / (device.memory_gbytes_per_s * 1e6) for moved in (forward, backward)]


def optimizer_ms(
    work: Work, plan: ParallelPlan, device: Accelerator, rates: Rates
) -> tuple[float, float]:
    """Time of what looks at all gradients, and of the dense optimizer behind it.

    Args:
        work: the model.
        plan: says what a rank holds.
        device: its bandwidth.
        rates: passes of the optimizer, and the share of the bandwidth that it reaches.

    Returns:
        milliseconds of the norms, which also tell whether all is finite, and of the optimizer.
    """
    size = work.parameter_bytes
    read = held_elements(work, plan) * size
    moved = read * rates.optimizer_passes
    for unit in work.units:
        # It writes the copies. Narrow gradients are read for the norm and by the optimizer.
        saved = (size - work.compute_bytes) * narrow_gradients(unit, work, plan)
        read -= saved
        moved += work.compute_bytes * copied_elements(unit, work, plan) - saved
    rate = device.memory_gbytes_per_s * 1e6 * rates.optimizer_share
    return read / rate, moved / rate
