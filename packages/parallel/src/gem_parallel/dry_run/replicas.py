"""DistributedDataParallel for tensors without memory: its own part in C++ reads theirs.

Gradients lie in buffers that stay from step to step, as its buckets do, and each is summed over all
ranks once it is complete. The bytes are the same, in one call a parameter in place of one a bucket.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gem_parallel.launch import World


class NamedReplicas(DistributedDataParallel):
    """A module whose gradients are merged over ranks in name.

    Args:
        module: the model.
        ignored: parameters whose gradients the caller merges.
    """

    def __init__(self, module: nn.Module, ignored: Collection[nn.Parameter]) -> None:
        # Not that of DistributedDataParallel, which is what this stands in for.
        nn.Module.__init__(self)
        self.module = module
        self.merges = True
        skipped = set(ignored)
        self._buckets = {p: torch.zeros_like(p) for p in module.parameters() if p not in skipped}
        for parameter in self._buckets:
            parameter.register_post_accumulate_grad_hook(self._merge)

    def _merge(self, parameter: torch.Tensor) -> None:
        bucket = self._buckets[parameter]  # type: ignore[index] - a parameter, as it was given
        if parameter.grad is not bucket and parameter.grad is not None:
            bucket.copy_(parameter.grad)
            parameter.grad = bucket
        if self.merges:
            dist.all_reduce(bucket)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the module.

        Returns:
            what the module returns.
        """
        return self.module(*inputs, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Merge nothing in backward passes within.

        Yields:
            nothing.
        """
        self.merges = False
        try:
            yield
        finally:
            self.merges = True


@contextmanager
def replicas_in_name() -> Iterator[None]:
    """Let `gem_parallel.dense.parallelise` copy modules so, for the length of a ``with`` block.

    Yields:
        nothing; torch's own wrapper is put back behind the block.
    """
    dense: Any = import_module("gem_parallel.dense")
    before = dense.replicate

    def replicate(
        module: nn.Module, world: World, *, ignored: Collection[nn.Parameter] = ()
    ) -> NamedReplicas:
        return NamedReplicas(module, ignored)

    dense.replicate = replicate
    try:
        yield
    finally:
        dense.replicate = before
