"""How uneven the work of ranks is: histories differ in length, and batches may be balanced."""

import math
from collections.abc import Callable, Mapping
from functools import cache

from gem.config import RunConfig
from gem.data.schema import BatchSchema
from gem.model.flops import total_flops, training_flops
from gem.model.spec import GemSpec
from gem.model.structure import reduce_schema, streams_read
from gem.planning.lengths import LengthLaw

# Histories of each stream whose FLOPs are counted, and those that batches are drawn from.
_COUNTED, _DRAWN = 64, 4096


def spread_of(spec: GemSpec, schema: BatchSchema, laws: Mapping[str, LengthLaw]) -> float:
    """Standard deviation over mean of the FLOPs of an example, streams independent.

    Args:
        spec: the model.
        schema: inputs of its data set.
        laws: stream -> how long its histories are.

    Returns:
        a share; 0 for a model that reads no stream.
    """
    variance = mean = 0.0
    for _, flops in _by_length(spec, schema, laws).values():
        average = sum(flops) / len(flops)
        variance += sum((each - average) ** 2 for each in flops) / len(flops)
        mean = max(mean, average)
    return math.sqrt(variance) / mean if mean else 0.0


def slowest_of(
    config: RunConfig, schema: BatchSchema, laws: Mapping[str, LengthLaw], examples: int
) -> Callable[[int], float] | None:
    """What balancing leaves of the imbalance between ranks.

    Args:
        config: the recipe, whose ``[parallel]`` says how batches are dealt.
        schema: inputs of its data set.
        laws: stream -> how long its histories are.
        examples: examples of a rank.

    Returns:
        number of ranks -> expected work of the heaviest one over the mean; None where nothing
        moves between ranks, so that independent examples decide.
    """
    own = config.parallel
    if own is None or own.balance in ("off", "local") or not isinstance(config.model, GemSpec):
        return None
    counted = _by_length(config.model, schema, laws)
    if not counted:
        return None
    base, variant, group = own.base_batch, own.balance, own.balance_group

    @cache
    def slowest(ranks: int) -> float:
        # Here, so that plans of other recipes load no numpy.
        import numpy as np

        from gem_parallel.balance.imbalance import imbalance

        random = np.random.default_rng(0)
        work_L = np.zeros(_DRAWN)
        lengths = np.zeros(_DRAWN, np.int64)
        for drawn, flops in counted.values():
            places = (np.arange(_DRAWN) + 0.5) / _DRAWN * len(drawn) - 0.5
            own_L = np.interp(places, np.arange(len(drawn)), flops)
            # Streams are independent of each other: one of them keeps its order, others lose it.
            work_L += own_L if not lengths.any() else random.permutation(own_L)
            lengths += np.interp(places, np.arange(len(drawn)), drawn).astype(np.int64)
        return imbalance(
            ranks, base, lengths, work_L, examples=examples, variant=variant, group_ranks=group
        )

    return slowest


def _by_length(
    spec: GemSpec, schema: BatchSchema, laws: Mapping[str, LengthLaw]
) -> dict[str, tuple[list[int], list[float]]]:
    """Stream -> lengths that stand for its law, and FLOPs of an example of each of them.

    The example's other streams are of the middle length.
    """
    streams = streams_read(spec, reduce_schema(schema, spec.leave_out))
    longest = {
        s.name: min(s.max_events, spec.stream_spec(s.name).max_events or s.max_events)
        for s in streams
    }
    drawn = {s.name: laws[s.name].quantiles(_COUNTED, most=longest[s.name]) for s in streams}
    middle = {name: lengths[_COUNTED // 2] for name, lengths in drawn.items()}

    def flops(name: str, length: int) -> float:
        lengths = {n: [m] for n, m in {**middle, name: length}.items()}
        parts = training_flops(spec, schema, examples=1, lengths=lengths)
        return float(total_flops(parts.values()).total)

    return {
        name: (lengths, [flops(name, length) for length in lengths])
        for name, lengths in drawn.items()
    }
