"""Expert parallelism by activations: each rank of the expert axis keeps some of the experts.

Every example visits every expert, so nothing is routed. Of n experts, rank e of an axis of r
ranks keeps the n / r experts from e n / r on, and runs them on the examples of all ranks:

    send to each rank what its experts read    ->  (r B, n_e, D) for each own expert
    run the own experts, sum their outputs     ->  (r B, n', D), a part of the sum over experts
    reduce-scatter over the axis               ->  (B, n', D), the whole sum for the own examples

The backward pass mirrors it: output gradients are gathered, input gradients sent back. With one
expert a rank that reads all tokens, the first step moves as much as the all-gather that is
published for it; where experts read parts of the tokens, it leaves out what nobody there reads.

An expert's parameter thus gets the gradient of the ranks of its axis summed, on one of them.

Source: GEM's training article for the collectives; every expert's share of tokens, and so the
exchange in place of an all-gather, is this project's.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gem_opkit.errors import ConfigError, ShapeError, refusal
from gem_parallel.collectives import all_gather_single, reduce_scatter_single
from gem_parallel.contract import ParallelPlan


class _Mixture(Protocol):
    """What a module of experts offers."""

    experts: nn.ModuleList
    run: Callable[[nn.ModuleList, list[Tensor]], Tensor]


class Elsewhere(nn.Module):
    """Stands in the place of an expert that another rank keeps, so that names do not change."""

    def forward(self, *_: object) -> Tensor:
        """Refuse: the expert is not here."""
        raise ConfigError(
            "Elsewhere: an expert must be run by the rank that keeps it; got a call on another; "
            "call the whole mixture"
        )


class BatchSizes:
    """How many examples each rank of the expert axis has, asked once in a forward pass.

    The numbers are needed on the host, to cut buffers. They travel between hosts, not devices, so
    no device is waited for.

    Args:
        group: ranks of the axis that this rank is one of; any backend.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks, self._rank = group.size(), group.rank()
        # Nothing comes back from the ranks of a dry run: they are taken to be like this one.
        self._dry = dist.get_backend(group) == "fake"
        self._group = group
        if dist.get_backend(group) == "nccl":  # takes tensors of devices alone
            members = dist.get_process_group_ranks(group)
            self._group = cast(
                dist.ProcessGroup,
                dist.new_group(members, backend="gloo", use_local_synchronization=True),
            )
        self._within, self._sizes = False, None

    def enter(self, *_: object) -> None:
        """Begin a forward pass of the whole model, in which all mixtures see the same examples."""
        self._within, self._sizes = True, None

    def leave(self, *_: object) -> None:
        """End it."""
        self._within, self._sizes = False, None

    def __call__(self, examples: int) -> list[int]:
        """Exchange numbers of examples.

        Args:
            examples: of this rank.

        Returns:
            those of every rank of the axis, in order.
        """
        if self._dry:
            return [examples] * self._ranks
        if self._sizes is None:
            own = torch.tensor([examples], dtype=torch.int64)
            sizes = own.new_empty(self._ranks)
            all_gather_single(sizes, own, group=self._group)
            self._sizes = cast(list[int], sizes.tolist())
        sizes = self._sizes
        if sizes[self._rank] != examples:
            raise ShapeError(
                refusal(
                    "experts",
                    "parts",
                    must=f"have the {sizes[self._rank]} examples of the forward "
                    "pass's first mixture",
                    got=examples,
                    fix="give all mixtures of a model the same examples",
                )
            )
        if not self._within:
            self._sizes = None
        return sizes


class ExpertExchange:
    """Replaces a mixture's ``run`` where each rank keeps some of the experts.

    Args:
        group: ranks of the expert axis.
        count: experts of the mixture, a multiple of the ranks.
        sizes: shared by the mixtures of a model.
    """

    def __init__(self, group: dist.ProcessGroup, count: int, sizes: BatchSizes) -> None:
        self._group, self._sizes = group, sizes
        self._ranks, self._rank = group.size(), group.rank()
        self._each = count // self._ranks

    def kept_by(self, rank: int) -> range:
        """Tell which experts a rank of the axis keeps.

        Args:
            rank: of the axis.

        Returns:
            their places in the list.
        """
        return range(rank * self._each, (rank + 1) * self._each)

    def __call__(self, experts: nn.ModuleList, parts: list[Tensor]) -> Tensor:
        """Run the experts of all ranks on the examples of all ranks.

        Args:
            experts: own ones, and `Elsewhere` in the places of the others.
            parts: what each expert reads of this rank's examples, (B, n, D) each. B may differ from
                rank to rank, and be 0; n and D may not.

        Returns:
            this rank's share of the sum over experts (B, n', D).

        Cost: forward, a rank gives B D Σ n elements over all experts to the exchange (those of own
            experts stay) and r B' n' D to the reduce-scatter, where B' is the largest B of the
            axis; backward B' n' D to the gather and the Σ n of own experts r times to the exchange.
        """
        sizes = self._sizes(parts[0].shape[0])
        own = self.kept_by(self._rank)
        # In the order of the experts, which is that of the ranks that keep them.
        sent = torch.cat([part.flatten() for part in parts])
        counts = [part.numel() for part in parts]
        width = sum(parts[expert].shape[1:].numel() for expert in own)
        flat = _Exchange.apply(
            sent,
            [examples * width for examples in sizes],
            [sum(counts[i] for i in self.kept_by(rank)) for rank in range(self._ranks)],
            self._group,
        )
        read = _by_expert(flat, sizes, [parts[expert].shape[1:] for expert in own])
        outputs = [experts[e](part) for e, part in zip(own, read, strict=True)]
        partial = outputs[0]
        for output in outputs[1:]:
            partial = partial + output
        return cast(Tensor, _ReduceScatter.apply(partial, sizes, self._group))


def _by_expert(flat: Tensor, sizes: Sequence[int], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Cut what came from all ranks into what each own expert reads: (sum of sizes, n, D) each."""
    if len(shapes) == 1:
        return [flat.view(sum(sizes), *shapes[0])]
    pieces = flat.split([examples * shape.numel() for examples in sizes for shape in shapes])
    return [
        torch.cat(
            [
                piece.view(examples, *shape)
                for piece, examples in zip(pieces[place :: len(shapes)], sizes, strict=True)
            ]
        )
        for place, shape in enumerate(shapes)
    ]


def check_experts(module: nn.Module, names: Sequence[str], plan: ParallelPlan) -> None:
    """Refuse experts that a plan cannot deal out evenly.

    Args:
        module: the model.
        names: qualified names of its mixtures.
        plan: the plan.

    Raises:
        ConfigError: no experts to deal out, or a number of them that the axis does not divide.
    """
    if plan.expert == 1:
        return
    factors = f"replicate={plan.replicate} * shard={plan.shard} * expert={plan.expert}"
    if not names:
        raise ConfigError(
            refusal(
                "parallelise",
                "expert",
                must="be 1 for a model without experts",
                got=factors,
                fix="give the ranks to shard or replicate",
            )
        )
    for name in names:
        count = len(cast(_Mixture, module.get_submodule(name)).experts)
        if count % plan.expert:
            raise ConfigError(
                refusal(
                    "parallelise",
                    "expert",
                    must=f"divide the {count} experts of {name}",
                    got=factors,
                    fix="change the plan's expert axis or the number of experts",
                )
            )


def spread_experts(module: nn.Module, names: Sequence[str], group: dist.ProcessGroup) -> None:
    """Deal the experts of a model out over an axis, in place.

    Args:
        module: the model, built alike on every rank; `check_experts` has let it pass.
        names: qualified names of its mixtures.
        group: ranks of the expert axis.
    """
    sizes = BatchSizes(group)
    for name in names:
        mixture = cast(_Mixture, module.get_submodule(name))
        exchange = ExpertExchange(group, len(mixture.experts), sizes)
        own = exchange.kept_by(group.rank())
        for place in range(len(mixture.experts)):
            if place not in own:
                mixture.experts[place] = Elsewhere()
        mixture.run = exchange
    module.register_forward_pre_hook(sizes.enter)
    module.register_forward_hook(sizes.leave, always_call=True)


class _Exchange(torch.autograd.Function):
    """Send a part of a flat tensor to each rank; gradients travel back the same way."""

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _exchange(flat, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], ctx.sent, ctx.received, ctx.group), None, None, None


def _exchange(
    flat: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Tensor:
    out = flat.new_empty(sum(received))
    dist.all_to_all_single(out, flat.contiguous(), received, sent, group=group)
    return out


class _ReduceScatter(torch.autograd.Function):
    """Sum over ranks the rows of each; the gradient is the rows of all ranks side by side."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        own = sizes[group.rank()]
        out = rows.new_empty(max(sizes), *rows.shape[1:])
        if max(sizes) > 0:
            reduce_scatter_single(out, _level(rows, sizes), group=group)
        return out[:own]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sizes, grad = ctx.sizes, grads[0]
        longest = max(sizes)
        out = grad.new_empty(longest * len(sizes), *grad.shape[1:])
        if longest > 0:
            all_gather_single(out, _level(grad, [len(grad)], longest), group=ctx.group)
        if min(sizes) == longest:
            return out, None, None
        kept = [part[:n] for part, n in zip(out.split(longest), sizes, strict=True)]
        return torch.cat(kept), None, None


def _level(rows: Tensor, sizes: list[int], longest: int | None = None) -> Tensor:
    """Fill the blocks of rows up to the longest with zeros: the collective takes equal parts."""
    longest = max(sizes) if longest is None else longest
    if min(sizes) == longest:
        return rows.contiguous()
    out = rows.new_zeros(longest * len(sizes), *rows.shape[1:])
    ends = [0]
    for n in sizes:
        ends.append(ends[-1] + n)
    for place, (low, high) in enumerate(pairwise(ends)):
        out[place * longest : place * longest + high - low] = rows[low:high]
    return out
