"""Run the dense part of a model under a plan: copies, shards, experts, in one call.

The three axes of a plan and what each does to parameters and gradients:

    replicate   copies of every shard; gradients all-reduced
    shard       parameters cut over ranks, gathered before use; gradients reduce-scattered
    expert      experts dealt out over ranks; activations travel (`gem_parallel.sharding.experts`)

Whatever the mesh, after a backward pass each parameter holds the mean over all ranks of the world
of the ranks' gradients, as with DistributedDataParallel. A plan that neither shards nor spreads
experts is DistributedDataParallel, unless gradients are summed in bf16, or forward passes read
something else in the place of parameters, of which that knows nothing.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gem_opkit.errors import ConfigError, refusal
from gem_parallel.collectives import broadcast_tensors
from gem_parallel.contract import ParallelPlan
from gem_parallel.launch import World
from gem_parallel.sharding.copies import CopiedGradients, StandIns
from gem_parallel.sharding.experts import check_experts
from gem_parallel.sharding.parameters import Sharding, shard
from gem_parallel.sharding.replicate import data_parallel as data_parallel
from gem_parallel.sharding.replicate import loss_scale as loss_scale
from gem_parallel.sharding.replicate import own_names, replicate


class DenseParallel:
    """A model whose dense parameters are trained on many ranks. Made by `parallelise`.

    Attributes:
        module: to be called in place of the model.
        parameters: name in the single-process model -> what this rank trains of it, the ignored
            ones left out.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        sharding: Sharding | None = None,
        copies: CopiedGradients | None = None,
    ) -> None:
        self.module, self.parameters, self._sharding = module, parameters, sharding
        self._copies = copies if sharding is None else sharding.copies

    @property
    def whole(self) -> bool:
        """Whether every rank holds all gradients whole, so that their norms are the model's."""
        return self._sharding is None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes within add up on each rank; the first one after it merges ranks.

        What is sharded then keeps whole gradients until that one.

        Yields:
            nothing; gradients are merged again behind the block.
        """
        if isinstance(self.module, DistributedDataParallel):
            with self.module.no_sync():
                yield
            return
        self._merge(merge=False)
        try:
            yield
        finally:
            self._merge(merge=True)

    def _merge(self, *, merge: bool) -> None:
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(merge)
        if self._copies is not None:
            self._copies.enabled = merge

    @torch.no_grad()
    def norms(self, by: Callable[[Sequence[Tensor]], Tensor] | None = None) -> list[Tensor]:
        """The L2 norm of each gradient that this rank holds, for `grad_norm` and other readers.

        Args:
            by: computes the norms of contiguous tensors, as one tensor; None for torch's own.

        Returns:
            scalars in the order of `local_gradients`, which are read once; fp32, or as wide as the
            gradient.
        """
        gradients = self.local_gradients()
        if by is not None and gradients:
            return list(by([gradient.contiguous() for gradient in gradients]).unbind())
        found: dict[int, Tensor] = {}
        # A list of one dtype is few launches.
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            places = [i for i, gradient in enumerate(gradients) if gradient.dtype == dtype]
            kind = torch.promote_types(dtype, torch.float32)  # bf16 would round the norm to 8 bits
            norms = torch._foreach_norm([gradients[i] for i in places], 2.0, dtype=kind)
            found |= dict(zip(places, norms, strict=True))
        return [found[place] for place in range(len(gradients))]

    @torch.no_grad()
    def grad_norm(self, norms: Sequence[Tensor] | None = None) -> Tensor:
        """The L2 norm of all dense gradients together, as one process would see it.

        Every rank has to call it.

        Args:
            norms: from `norms`, of the same gradients; None reads them again.

        Returns:
            scalar of the parameters' dtype on the world's device, the same on every rank; no host
            waits for it.

        Numerics: squares of the norms of single tensors are added in float64 where parameters are
            cut, else in the dtype of the norms.
        """
        norms = self.norms() if norms is None else norms
        if self._sharding is None:
            if norms:
                return torch.linalg.vector_norm(torch.stack(list(norms)))
            return nn.utils.get_total_norm([])
        # Each gradient is counted by one rank of a replica: copies by its first rank, copies of an
        # expert by the first that keeps them.
        first = self._sharding.meshes
        counted: list[int] = []
        place = 0
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            copy = not isinstance(parameter, DTensor)
            keeper = first.shard_rank if name in self._sharding.of_experts else first.inner.rank()
            if not copy or keeper == 0:
                counted.append(place)
            place += 1
        any_of_them = next(iter(self.parameters.values()))
        squares = torch.zeros((), dtype=torch.float64, device=any_of_them.device)
        if counted:
            squares = torch.stack([norms[i] for i in counted]).double().square().sum()
        dist.all_reduce(squares, group=first.inner)
        return squares.sqrt().to(any_of_them.dtype)

    @torch.no_grad()
    def clip_(self, max_norm: float) -> Tensor:
        """Scale all dense gradients so that their norm is at most ``max_norm``.

        Every rank has to call it.

        Args:
            max_norm: above 0.

        Returns:
            The norm before, as `grad_norm` gives it.
        """
        norm = self.grad_norm()
        if self._sharding is None:
            nn.utils.clip_grads_with_norm_(list(self.parameters.values()), max_norm, norm)
        elif gradients := self.local_gradients():
            # As torch does it for whole gradients.
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor)
        return norm

    def local_gradients(self) -> list[Tensor]:
        """The gradients that this rank holds, as plain tensors: shards of what is sharded.

        Returns:
            one for each parameter that has one, in the order of ``parameters``; they share the
            gradients' memory.
        """
        with torch.no_grad():
            return [_local(p.grad) for p in self.parameters.values() if p.grad is not None]

    def foreach_groups(self, parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Sort parameters into groups that an optimizer may treat in one foreach call.

        Args:
            parameters: some of this model's.

        Returns:
            plain ones together, and those that are cut over one mesh together; no group is empty.
            The order within a group is that of ``parameters``.
        """
        groups: dict[object, list[nn.Parameter]] = {}
        for parameter in parameters:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
        return list(groups.values())

    def state(self) -> dict[str, Tensor]:
        """What this rank holds, for ``torch.distributed.checkpoint``: saved and loaded in place.

        Returns:
            name in the single-process model -> tensor or DTensor that shares the parameter's
            memory. An expert is there on the ranks that keep it.
        """
        return {name: p.detach() for name, p in self.parameters.items()}

    @torch.no_grad()
    def full_state(self) -> dict[str, Tensor]:
        """All dense parameters whole, on every rank, experts of other ranks too.

        Every rank has to call it; it holds the whole model in memory.

        Returns:
            name in the single-process model -> tensor of its own memory, in that model's order.
        """
        if self._sharding is None:
            return {name: p.detach().clone() for name, p in self.parameters.items()}
        absent, group = self._sharding.absent, self._sharding.meshes.expert_group
        device = next(iter(self.parameters.values())).device
        found: dict[str, Tensor] = {}
        for name in self._sharding.order:
            if name in absent:
                shape, dtype, _ = absent[name]
                found[name] = torch.empty(shape, dtype=dtype, device=device)
            else:
                own = self.parameters[name].detach()
                found[name] = own.full_tensor() if isinstance(own, DTensor) else own.clone()
        if group is not None:
            owners = {name: owner for name, (_, _, owner) in absent.items()}
            for name in self._sharding.order:
                if name in absent or name in self._sharding.of_experts:
                    dist.broadcast(
                        found[name], group=group, group_src=owners.get(name, group.rank())
                    )
        return found


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def parallelise(
    module: nn.Module,
    plan: ParallelPlan,
    world: World,
    *,
    units: Sequence[str],
    experts: Sequence[str] = (),
    ignored: Collection[nn.Parameter] = (),
    stand_ins: StandIns | None = None,
) -> DenseParallel:
    """Spread the dense part of a model over the ranks of a plan.

    All parameters, the ignored ones too, are first overwritten with those of rank 0.

    Args:
        module: the model, on the world's device, built alike on every rank. It is changed in
            place where the plan shards.
        plan: of ``world.size`` ranks; its table axes are not looked at.
        world: the ranks.
        units: qualified names of the submodules whose parameters are gathered together, in the
            order in which they run.
        experts: qualified names of the modules that hold a list ``experts`` and a replaceable
            ``run(experts, parts)``, the sum over experts of each expert's output.
        ignored: parameters whose gradients the caller merges (embedding tables).
        stand_ins: called with the parameters that stay whole on this rank, by name; tells for some
            of them which leaf tensor the caller's forward passes read in their place. Gradients
            come from these. It is not called where there is no group of ranks.

    Returns:
        The model to train.

    Raises:
        ConfigError: the plan is for another number of ranks or does not divide the experts, or a
            name is not in the module.
    """
    plan.check_world(world.size)
    own_names(module, ignored)
    _check_names(module, units=units, experts=experts)
    check_experts(module, experts, plan)
    skipped = set(ignored)
    if plan.shard == plan.expert == 1 and world.way in (None, "replicate"):
        own = {n: p for n, p in module.named_parameters() if p not in skipped}
        if not world.grouped:
            return DenseParallel(module, own)
        read = {} if stand_ins is None else stand_ins(own)
        if not read and plan.reduce_dtype == "fp32":
            return DenseParallel(replicate(module, world, ignored=ignored), own)
        broadcast_tensors([*module.parameters(), *module.buffers()], world)
        copies = CopiedGradients(
            [(own, dist.group.WORLD)],
            divisor=world.size,
            stand_ins=read,
            narrow=plan.reduce_dtype == "bf16",
        )
        module.register_forward_pre_hook(copies.forget)
        return DenseParallel(module, own, copies=copies)
    broadcast_tensors([*module.parameters(), *module.buffers()], world)
    sharding = shard(
        module,
        plan,
        world,
        units=units,
        experts=experts,
        ignored=skipped,
        stand_ins=stand_ins,
    )
    return DenseParallel(module, sharding.parameters, sharding)


def _check_names(module: nn.Module, *, units: Sequence[str], experts: Sequence[str]) -> None:
    known = {name: part for name, part in module.named_modules() if name}
    for argument, names in (("units", units), ("experts", experts)):
        for name in names:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise ConfigError(
                    refusal(
                        "parallelise",
                        argument,
                        must="name submodules of the model",
                        got=repr(name) + (f"; did you mean {near[0]!r}?" if near else ""),
                        fix="correct or remove it",
                    )
                )
    for name in experts:
        if not isinstance(getattr(known[name], "experts", None), nn.ModuleList):
            raise ConfigError(
                refusal(
                    "parallelise",
                    "experts",
                    must="name modules that hold a ModuleList 'experts'",
                    got=f"{name!r}, a {type(known[name]).__name__}",
                    fix="name the module that sums over experts",
                )
            )
