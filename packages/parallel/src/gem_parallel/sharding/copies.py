"""Gradients of parameters that every rank of some groups holds a copy of.

Small parameters are not worth a gather: they stay whole, and their gradients are summed over ranks
in a few flat buckets while the backward pass still runs. (DistributedDataParallel does that for
whole models; it knows no second set of ranks, which the copies of an expert need, it cannot share a
module with sharded parameters, and it takes gradients from parameters alone.)

A forward pass may read a stand-in of a parameter, such as its copy in bf16. The gradient then comes
in the format of that one, is widened on its way into the bucket, and becomes the parameter's. Where
there is nobody to sum it with, it stays in that format.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gem_opkit.errors import ConfigError, refusal

# As DistributedDataParallel's: large enough for the links, small enough to begin early.
BUCKET_BYTES = 25 * 2**20
# Name -> parameter, of those that stay whole on a rank; to the leaf that is read in place of some.
StandIns = Callable[[Mapping[str, nn.Parameter]], Mapping[nn.Parameter, Tensor]]


class CopiedGradients:
    """Sums the gradients of copies over ranks at the end of each backward pass.

    Args:
        copies: name -> parameter, with the ranks over which their gradients are summed; None for
            this rank alone.
        divisor: of every sum.
        stand_ins: parameter -> leaf tensor of its shape that forward passes read in its place.
        narrow: sum gradients in bf16.

    Numerics: gradients are summed in the dtype of the parameters, unless ``narrow``. NCCL divides
        while it sums.
    """

    def __init__(
        self,
        copies: Sequence[tuple[Mapping[str, nn.Parameter], dist.ProcessGroup | None]],
        *,
        divisor: int,
        stand_ins: Mapping[nn.Parameter, Tensor] | None = None,
        narrow: bool = False,
    ) -> None:
        self.enabled = True
        self._buckets = [
            _Bucket(members, group, stand_ins or {}, divisor, narrow=narrow)
            for named, group in copies
            for members in _cut(named, stand_ins or {})
        ]
        self._waiting: list[int] = []
        self._next, self._begun = 0, False
        for index, bucket in enumerate(self._buckets):
            for leaf in bucket.leaves:
                leaf.register_post_accumulate_grad_hook(self._counter(index))

    def _counter(self, index: int) -> Callable[[Tensor], None]:
        # A parameter holds its hooks where no garbage collector looks: through them and the buckets
        # it would hold itself, and all memory of a model, for ever.
        owner = weakref.ref(self)

        def arrived(parameter: Tensor) -> None:
            merging = owner()
            if merging is None:
                raise ConfigError(
                    refusal(
                        "parallelise",
                        "its result",
                        must="be kept as long as the model is trained",
                        got="gradients after it was dropped, which nobody would sum over ranks",
                        fix="hold it beside the model",
                    )
                )
            merging._arrived(index)

        return arrived

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
        self._buckets[index].note_stream()
        # In one order on every rank, whatever order the gradients come in.
        while self._next < len(self._buckets) and self._waiting[self._next] == 0:
            self._buckets[self._next].send()
            self._next += 1

    def _finish(self) -> None:
        self._begun = False
        missing = [
            name
            for bucket in self._buckets[self._next :]
            for name, leaf in zip(bucket.names, bucket.leaves, strict=True)
            if leaf.grad is None
        ]
        # Other ranks may have these gradients and wait for ours.
        for bucket in self._buckets[self._next :]:
            bucket.send()
        for bucket in self._buckets:
            bucket.receive()
        for rest in {bucket.rest for bucket in self._buckets} - {1.0}:
            of_them = [bucket for bucket in self._buckets if bucket.rest == rest]
            found = [grad for each in of_them for grad in each.gradients()]
            if found:  # else all of them are missing, which is said below
                torch._foreach_div_(found, rest)
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
    """Parameters whose gradients travel together: all of them with stand-ins, or none."""

    def __init__(
        self,
        members: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup | None,
        stand_ins: Mapping[nn.Parameter, Tensor],
        divisor: int,
        *,
        narrow: bool,
    ) -> None:
        self.names, self.parameters = list(members), list(members.values())
        self.leaves = [stand_ins.get(p, p) for p in self.parameters]
        self._stood_in = self.leaves[0] is not self.parameters[0]
        self._group = group
        averages = group is not None and dist.get_backend(group) == "nccl" and group.size() > 1
        self._op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        # What the sum is still to be divided by.
        self.rest = divisor / group.size() if averages and group is not None else float(divisor)
        # Of the sum.
        self._dtype = torch.bfloat16 if narrow else self.parameters[0].dtype
        if self._stood_in:
            # What becomes of stand-ins' gradients is handed over as it is.
            for p, leaf in zip(self.parameters, self.leaves, strict=True):
                p.grad, p.grad_dtype = None, leaf.dtype if group is None else self._dtype
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None
        # That gradients came on: parts of a model may run beside each other.
        self._streams: set[torch.cuda.Stream] = set()

    def note_stream(self) -> None:
        """Remember the stream that a gradient has come on."""
        if self._group is not None and self.parameters[0].is_cuda:
            self._streams.add(torch.cuda.current_stream(self.parameters[0].device))

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    @torch.no_grad()
    def send(self) -> None:
        if self._group is None:
            return
        self._meet_streams()
        first = self.leaves[0].grad
        alone = len(self.leaves) == 1 and first is not None and first.is_contiguous()
        if first is not None and alone and first.dtype == self._dtype:
            self._flat = first.view(-1)  # a large one: no second memory
        else:
            self._flat = self._joined()
        if self._stood_in:
            for leaf in self.leaves:
                leaf.grad = None  # its memory is free for the layers before
        self._work = dist.all_reduce(self._flat, op=self._op, group=self._group, async_op=True)

    def _meet_streams(self) -> None:
        """Let the current stream wait for the others that gradients came on."""
        streams, self._streams = self._streams, set()
        if not streams:
            return
        current = torch.cuda.current_stream(self.parameters[0].device)
        for stream in streams - {current}:
            current.wait_stream(stream)
            for leaf in self.leaves:
                # Read here, and given back where it was made.
                if leaf.grad is not None:
                    leaf.grad.record_stream(current)

    def _joined(self) -> Tensor:
        """Put gradients behind each other, in the dtype of the sum; zeros for one that is not."""
        flat = self.parameters[0].new_empty(
            sum(p.numel() for p in self.parameters), dtype=self._dtype
        )
        parts: list[Tensor] = []
        found: list[Tensor] = []
        for part, leaf in zip(self._parts(flat), self.leaves, strict=True):
            if leaf.grad is None:
                part.zero_()
            else:
                parts.append(part.view_as(leaf))
                found.append(leaf.grad)
        if parts:
            torch._foreach_copy_(parts, found)
        return flat

    def _parts(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat.split([p.numel() for p in self.parameters])

    @torch.no_grad()
    def receive(self) -> None:
        if self._stood_in:
            self._demand_stand_ins()
        if self._work is None or self._flat is None:
            if self._stood_in:
                for p, leaf in zip(self.parameters, self.leaves, strict=True):
                    p.grad, leaf.grad = leaf.grad, None
            return
        self._work.wait()
        flat, self._flat, self._work = self._flat, None, None
        for p, part in zip(self.parameters, self._parts(flat), strict=True):
            if self._stood_in:
                p.grad = part.view_as(p)
            elif p.grad is not None:
                p.grad = part.view_as(p).to(p.dtype)

    def _demand_stand_ins(self) -> None:
        own = [n for n, p in zip(self.names, self.parameters, strict=True) if p.grad is not None]
        if own:
            raise ConfigError(
                refusal(
                    "parallelise",
                    "stand_ins",
                    must="be read in the place of their parameters",
                    got=f"a gradient of {own[0]} itself",
                    fix="read the stand-in alone, and drop gradients between steps",
                )
            )


def _cut(
    named: Mapping[str, nn.Parameter], stand_ins: Mapping[nn.Parameter, Tensor]
) -> list[dict[str, nn.Parameter]]:
    """Cut trained parameters into buckets, last ones first: their gradients come first.

    One that fills a bucket has it alone.
    """
    buckets: list[dict[str, nn.Parameter]] = []
    kind, filled = None, BUCKET_BYTES
    for name, parameter in reversed(list(named.items())):
        own_bytes = parameter.numel() * parameter.element_size()
        if not parameter.requires_grad:
            continue
        own_kind = parameter.dtype, parameter in stand_ins
        if own_kind != kind or filled + own_bytes > BUCKET_BYTES:
            buckets.append({})
            kind, filled = own_kind, 0
        buckets[-1][name] = parameter
        filled += own_bytes
    return buckets
