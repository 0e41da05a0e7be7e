"""The recipe's balance of ranks: what an example costs the model, and how a reader deals by it."""

import numpy as np

from gem.config import RunConfig
from gem.data.dealing import Balance
from gem.data.schema import BatchSchema
from gem.model.flops import total_flops, training_flops
from gem.model.spec import DinSpec, GemSpec
from gem.train.parallel_spec import ParallelSpec
from gem_parallel.balance.step import Dealing
from gem_parallel.balance.work import WorkModel

# Lengths whose FLOPs are counted; between them the count is drawn straight. Up to here all are.
_COUNTED = 257


def step_balance(
    config: RunConfig, plan: ParallelSpec, schema: BatchSchema, ranks: int
) -> Balance | None:
    """How the ranks of a run share out the rows of a step.

    Args:
        config: the run.
        plan: on the ranks that there are.
        schema: of its batches.
        ranks: that there are.

    Returns:
        what its reader deals by; None where each rank takes the rows that follow one another.
    """
    if plan.balance == "off":
        return None
    dealing = Dealing(
        plan.balance,
        plan.base_batch,
        parts=config.train.accumulation_parts,
        group_ranks=plan.balance_group,
    )
    return Balance(dealing, work_model(config.model, schema))


def work_model(spec: GemSpec | DinSpec, schema: BatchSchema) -> WorkModel:
    """What an example costs in a training step, by the lengths of its histories.

    Args:
        spec: the model.
        schema: all inputs of the data set.

    Returns:
        model FLOPs, forward and backward: a constant, and a table for each stream, linear in the
        length for windows and blocks and with a square for full attention.

    Numerics: exact for histories of up to 256 events; for longer ones every length whose FLOPs
        are counted is, and those between lie on a straight line, far within a thousandth.
    """
    none = {stream.name: [0] for stream in schema.streams}

    def flops(lengths: dict[str, list[int]]) -> int:
        return total_flops(training_flops(spec, schema, examples=1, lengths=lengths).values()).total

    fixed = flops(none)
    tables: dict[str, list[int]] = {}
    for stream in schema.streams:
        longest = stream.max_events
        known = np.unique(np.linspace(0, longest, min(longest + 1, _COUNTED)).round().astype(int))
        counts = [flops({**none, stream.name: [int(length)]}) - fixed for length in known]
        tables[stream.name] = _between(known.tolist(), counts)
    return WorkModel.from_counts(fixed, tables)


def _between(lengths: list[int], counts: list[int]) -> list[int]:
    """Counts of all lengths, in whole numbers so that they are the same everywhere."""
    found = [counts[0]]
    for place in range(1, len(lengths)):
        low, high = lengths[place - 1], lengths[place]
        step, rise = high - low, counts[place] - counts[place - 1]
        found += [counts[place - 1] + rise * part // step for part in range(1, step + 1)]
    return found
