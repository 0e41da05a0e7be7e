"""Put a plan into a model: its regions keep, make again and pack as it says."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from gem_parallel.recompute.choose import RecomputePlan, RegionPlan
from gem_parallel.recompute.packing import (
    PACK_ABOVE_BYTES,
    PackedView,
    Packing,
    Packs,
    unpack,
)
from gem_parallel.recompute.record import check_regions
from gem_parallel.recompute.replay import Keep, Replay


class KeptBytes:
    """Counts what is kept for a backward pass, each storage once.

    Args:
        alive: tensors that are there anyway: parameters, buffers, the batch.
    """

    def __init__(self, alive: Iterable[Tensor]) -> None:
        self._alive = {_address(tensor) for tensor in alive}
        self._whole: dict[int, int] = {}
        self._packed: dict[int, int] = {}
        # No address may be taken twice while this counts.
        self._held: list[object] = []

    @property
    def total(self) -> int:
        """Bytes so far."""
        return sum(self._whole.values()) + sum(self._packed.values())

    def see(self, kept: Tensor | PackedView) -> None:
        """Something is kept.

        Args:
            kept: a tensor, or a view into a packed storage.
        """
        self._held.append(kept if isinstance(kept, PackedView) else kept.detach())
        if isinstance(kept, PackedView):
            self._packed[id(kept.packed)] = kept.packed.bytes
            return
        address = _address(kept)
        if address not in self._alive and kept.layout == torch.strided:
            own = kept.to_local() if isinstance(kept, DTensor) else kept
            self._whole[address] = own.untyped_storage().nbytes()


def _address(tensor: Tensor) -> int:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.untyped_storage()._cdata if own.layout == torch.strided else id(own)


class Recomputing:
    """A model under a plan. Made by `recompute_by`."""

    def __init__(self, packs: Packs | None) -> None:
        self._packs = packs
        self._count: KeptBytes | None = None
        self._undo: list[Callable[[], None]] = []

    @contextmanager
    def counting(self, alive: Iterable[Tensor]) -> Iterator[KeptBytes]:
        """Count what forward passes within keep, for the length of a ``with`` block.

        Args:
            alive: tensors that are there anyway.

        Yields:
            the count. It holds what it has seen: end the block before the backward pass.
        """
        count = self._count = KeptBytes(alive)

        def see(tensor: Tensor) -> Tensor:
            count.see(tensor)
            # An operator's own result would hold the operator, and the operator the result.
            return tensor.detach()

        try:
            with saved_tensors_hooks(see, lambda tensor: tensor):
                yield count
        finally:
            self._count = None

    def undo(self) -> None:
        """Give the model its own forward passes back."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _put_away(self, tensor: Tensor) -> Tensor | PackedView:
        kept = tensor if self._packs is None else self._packs.pack(tensor)
        if self._count is not None:
            self._count.see(kept)
        return kept

    def _hooks(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._packs is None else saved_tensors_hooks(self._put_away, unpack)

    def _wrap(self, part: nn.Module, plan: RegionPlan) -> None:
        own = part.forward
        forward = partial(_with_stand_ins, part, own)
        random = any(map(_draws, part.modules()))

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            if not plan.kept:  # nothing to look out for: operators need not pass through Python
                return nullcontext(), nullcontext()
            first = Keep(plan.kept, self._put_away)
            return first, Replay(first)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return own(*args, **kwargs)
            with self._hooks():
                if plan.kind == "keep":
                    return own(*args, **kwargs)
                return checkpoint(
                    forward(),
                    *args,
                    use_reentrant=False,
                    context_fn=contexts,
                    preserve_rng_state=random,
                    **kwargs,
                )

        part.forward = run
        self._undo.append(lambda: part.__dict__.pop("forward", None))


def _draws(module: nn.Module) -> bool:
    """Whether a forward pass draws from torch's generators: other modules than dropout say so."""
    if isinstance(module, nn.Dropout):
        return module.p > 0.0
    return bool(getattr(module, "draws_random", False))


def _with_stand_ins(part: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
    """Let a second run read the weights that the first one does.

    Somebody may have put others in the place of a part's weights for the length of a forward pass,
    as `torch.func.functional_call` does; by the backward pass they are gone.
    """
    stand_ins = [
        (module, name, tensor)
        for module in part.modules()
        for name, tensor in module._parameters.items()
        if tensor is not None and not isinstance(tensor, nn.Parameter)
    ]
    if not stand_ins:
        return own

    def run(*args: Any, **kwargs: Any) -> Any:
        before = [(module, name, module._parameters[name]) for module, name, _ in stand_ins]
        try:
            for module, name, tensor in stand_ins:
                module._parameters[name] = cast(nn.Parameter, tensor)
            return own(*args, **kwargs)
        finally:
            for module, name, tensor in before:
                module._parameters[name] = tensor

    return run


def recompute_by(
    module: nn.Module,
    plan: RecomputePlan,
    *,
    packing: Packing | None = None,
    pack_above_bytes: int = PACK_ABOVE_BYTES,
) -> Recomputing:
    """Let a model's regions keep and make again what a plan says.

    Losses and gradients are the same to the bit where nothing is packed and operators are
    deterministic; evaluation, without gradients, runs as before.

    Args:
        module: whose parts the plan names; sharded or not.
        plan: from `gem_parallel.recompute.choose`.
        packing: shortens what is kept; None keeps it as it is.
        pack_above_bytes: size of a storage from which it is packed.

    Returns:
        the model's handle, which counts and undoes.

    Raises:
        ConfigError: a region that the module does not have.
    """
    packs = None if packing is None else Packs(packing, pack_above_bytes)
    found = Recomputing(packs)
    parts = check_regions(module, [region.name for region in plan.regions])
    for region in plan.regions:
        if region.kind == "recompute" or packs is not None:
            found._wrap(parts[region.name], region)
    return found
