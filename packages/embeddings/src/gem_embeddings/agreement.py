"""One number that all ranks know of each other: how ranks agree to go on, or to stop together."""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_parallel.launch import World

# Held for a while after their collective. A thread of gloo lets go of a tensor some time after the
# rank has gone on; if it is the last to do so it needs the interpreter, and a process that ends at
# that moment aborts. Python's own reference spares it that.
_held: deque[Tensor] = deque(maxlen=64)


def most_of(value: int, world: World, group: dist.ProcessGroup | None = None) -> int:
    """Return the largest of a number over all ranks. Every rank has to call this.

    Args:
        value: of this rank.
        world: the ranks.
        group: a gloo group over which they talk; None for the default one, whatever it is.

    Returns:
        the same on every rank. Waits for the device where ranks talk over NCCL.
    """
    if world.size == 1:
        return value
    device: Any = world.device if group is None else "cpu"
    number = torch.tensor([value], dtype=torch.int64, device=device)
    _held.append(number)
    dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
    return int(number)
