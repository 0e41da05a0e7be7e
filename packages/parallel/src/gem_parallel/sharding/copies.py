"""Gradients of parameters that every rank of some groups holds a copy of.

Small parameters are not worth a gather: they stay whole, and their gradients are summed over ranks
in a few flat buckets while the backward pass still runs. (DistributedDataParallel does that for
whole models; it knows no second set of ranks, which the copies of an expert need, and it cannot
share a module with sharded parameters.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gem_opkit.errors import ConfigError, refusal

# As DistributedDataParallel's: large enough for the links, small enough to begin early.
BUCKET_BYTES = 25 * 2**20


class CopiedGradients:
    """Sums the gradients of copies over ranks at the end of each backward pass.

    Args:
        copies: name -> parameter, with the ranks over which their gradients are summed; None for
            this rank alone.
        divisor: of every sum.
    """

    def __init__(
        self,
        copies: Sequence[tuple[Mapping[str, nn.Parameter], dist.ProcessGroup | None]],
        *,
        divisor: int,
    ) -> None:
        self.enabled = True
        self._buckets = [
            _Bucket(members, group) for named, group in copies for members in _cut(named)
        ]
        self._divisor = divisor
        self._waiting: list[int] = []
        self._next, self._begun = 0, False
        for index, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._counter(index))

    def _counter(self, index: int) -> Any:
        return lambda parameter: self._arrived(index)

    def forget(self, *_: object) -> None:
        """Begin anew, should the last backward pass have ended in an error."""
        self._begun = False

    def _arrived(self, index: int) -> None:
        if not self.enabled:
            return
        if not self._begun:
            self._begun = True
            self._waiting = [len(bucket.parameters) for bucket in self._buckets]
            self._next = 0
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._waiting[index] -= 1
        # In one order on every rank, whatever order the gradients come in.
        while self._next < len(self._buckets) and self._waiting[self._next] == 0:
            self._buckets[self._next].send()
            self._next += 1

    def _finish(self) -> None:
        self._begun = False
        missing = [
            name
            for bucket in self._buckets
            for name, p in zip(bucket.names, bucket.parameters, strict=True)
            if p.grad is None
        ]
        # Other ranks may have these gradients and wait for ours.
        for bucket in self._buckets[self._next :]:
            bucket.send()
        for bucket in self._buckets:
            bucket.receive()
        gradients = [grad for bucket in self._buckets for grad in bucket.gradients()]
        torch._foreach_div_(gradients, self._divisor)
        if missing:
            raise ConfigError(
                refusal(
                    "parallelise",
                    "parameters",
                    must="all take part in every backward pass that merges ranks",
                    got=f"no gradient of {missing[0]}"
                    + f" and {len(missing) - 1} more" * (len(missing) > 1),
                    fix="let the loss depend on it, also without examples, or set requires_grad to "
                    "False",
                )
            )


class _Bucket:
    """Parameters whose gradients travel together."""

    def __init__(
        self, members: Mapping[str, nn.Parameter], group: dist.ProcessGroup | None
    ) -> None:
        self.names, self.parameters = list(members), list(members.values())
        self._group = group
        self._flat: Tensor | None = None
        self._in_place = False
        self._work: dist.Work | None = None

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    @torch.no_grad()
    def send(self) -> None:
        if self._group is None:
            return
        first = self.parameters[0].grad
        self._in_place = len(self.parameters) == 1 and first is not None and first.is_contiguous()
        if first is not None and self._in_place:
            self._flat = first  # a large one: no second memory
        else:
            self._flat = torch.cat(
                [
                    (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
                    for p in self.parameters
                ]
            )
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    @torch.no_grad()
    def receive(self) -> None:
        if self._work is None or self._flat is None:
            return
        self._work.wait()
        flat, self._flat, self._work = self._flat, None, None
        if self._in_place:
            return
        parts = flat.split([p.numel() for p in self.parameters])
        pairs = [
            (p.grad, part.view_as(p))
            for p, part in zip(self.parameters, parts, strict=True)
            if p.grad is not None
        ]
        torch._foreach_copy_([grad for grad, _ in pairs], [part for _, part in pairs])


def _cut(named: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Cut trained parameters into buckets, last ones first: their gradients come first.

    One that fills a bucket has it alone.
    """
    buckets: list[dict[str, nn.Parameter]] = []
    kind, filled = None, BUCKET_BYTES
    for name, parameter in reversed(list(named.items())):
        own_bytes = parameter.numel() * parameter.element_size()
        if not parameter.requires_grad:
            continue
        if parameter.dtype != kind or filled + own_bytes > BUCKET_BYTES:
            buckets.append({})
            kind, filled = parameter.dtype, 0
        buckets[-1][name] = parameter
        filled += own_bytes
    return buckets
