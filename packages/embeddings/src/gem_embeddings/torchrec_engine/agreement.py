"""What all ranks have to know of a batch before any of its ids travels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gem_embeddings.torchrec_engine.placing import OP
from gem_opkit.errors import DataError, refusal
from gem_parallel.launch import World


@dataclass(frozen=True, slots=True)
class Agreement:
    """What holds on all ranks.

    Attributes:
        examples: to which every rank pads. At least one, since torchrec fails on none, and the
            same on all, since gloo scatters no unequal parts.
        weighted: for each collection whether its ids have weights on some rank; the others send
            weights of 1.
    """

    examples: int
    weighted: tuple[bool, ...]


def agree(
    world: World,
    group: dist.ProcessGroup | None,
    *,
    examples: int,
    weighted: Sequence[bool],
    fault: Exception | None,
) -> Agreement:
    """Tell all ranks whether one refuses its batch, and what their batches have in common.

    Args:
        world: the ranks.
        group: over which they talk, from host memory; None for the default one.
        examples: of this rank's batch.
        weighted: for each collection whether this rank's ids have weights.
        fault: why this rank refuses its batch; None where it does not.

    Returns:
        what holds on all ranks.

    Raises:
        Exception: ``fault`` itself.
        DataError: another rank refuses its batch.

    Cost: one all-reduce of a few numbers, for which the host waits.
    """
    told = [0 if fault is None else world.rank + 1, max(1, examples)]
    told += [int(fault is None and has) for has in weighted]
    if world.size > 1:
        message = torch.tensor(told, dtype=torch.int64)
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
        told = message.tolist()
    if fault is not None:
        raise fault
    if told[0]:
        raise DataError(
            refusal(
                OP,
                "ids",
                must="be good on every rank",
                got=f"a refusal by rank {told[0] - 1}",
                fix="read that rank's error",
            )
        )
    return Agreement(told[1], tuple(bool(some) for some in told[2:]))
