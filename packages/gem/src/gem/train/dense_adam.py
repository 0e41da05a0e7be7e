"""The dense part's optimizer, and the bf16 weights that its forward pass reads on a GPU.

Adam is bound by bytes. On a GPU each weight, gradient and moment is read and written once, with
the factor of clipping inside; and where products run in bf16, the same pass writes the bf16 copy of
a weight that the next forward pass multiplies with. That one need not cast the weight, and its
gradient stays in bf16, the format in which the product gave it: no value differs from autocast's.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from gem.data.names import nearest
from gem.train.local_tensors import local_part
from gem.train.spec import TrainSpec
from gem_opkit.errors import ConfigError, refusal
from gem_precision.layers import Projection
from gem_precision.ops import adam_update


class DenseAdam(torch.optim.Adam):
    """Adam with decoupled decay, one pass over all of its tensors; for fp32 weights on a GPU.

    Its state is that of ``torch.optim.Adam`` with ``fused=True``, so either goes on from the other.

    Args:
        groups: as of ``torch.optim.Adam``.
        settings: betas and eps, as of ``torch.optim.Adam``.

    Attributes:
        factor: scalar on the device that gradients are multiplied by in the next step, such as that
            of clipping; None for 1.
        copies: parameter -> bf16 tensor that each step sets to the parameter.
    """

    def __init__(self, groups: Any, **settings: Any) -> None:
        super().__init__(groups, decoupled_weight_decay=True, fused=True, **settings)
        self.factor: Tensor | None = None
        self.copies: Mapping[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - no closure
        """Move the parameters that have a gradient.

        Args:
            closure: none is taken.
        """
        taken = [
            (group, p) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        if not taken:
            return
        for _, parameter in taken:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        torch._foreach_add_([self.state[p]["step"] for _, p in taken], 1.0)
        for copied in (True, False):
            own = [each for each in taken if (each[1] in self.copies) == copied]
            if own:
                self._move(own)

    def _move(self, taken: list[tuple[dict[str, Any], nn.Parameter]]) -> None:
        parameters = [p for _, p in taken]
        states = [self.state[p] for p in parameters]
        group = taken[0][0]  # betas and eps are the same in all groups
        adam_update(
            [local_part(p.detach()) for p in parameters],
            [local_part(p.grad).contiguous() for p in parameters if p.grad is not None],
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [state["step"] for state in states],
            rates=[float(group["lr"]) for group, _ in taken],
            decays=[group["weight_decay"] for group, _ in taken],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            factor=self.factor,
            copies=[self.copies[p] for p in parameters if p in self.copies],
        )


class WorkingWeights:
    """bf16 copies of the weights of all projections, which a forward pass reads in their place.

    Projections with products below bf16 are left out, and weights that do not learn.

    Args:
        model: on this device. Its projections must run in bf16 under autocast.
        only: weights that may have a copy; None for all. Gradients of those that are named here
            reach the weights by somebody else, who merges ranks (`gem_parallel.dense.parallelise`).

    Attributes:
        copies: parameter -> its copy.
    """

    def __init__(self, model: nn.Module, *, only: Collection[nn.Parameter] | None = None) -> None:
        self._by_name: dict[str, tuple[nn.Parameter, Tensor, list[int]]] = {}
        self.copies: dict[nn.Parameter, Tensor] = {}
        for name, module in model.named_modules():
            if not isinstance(module, Projection) or module.formats is not None:
                continue
            weight = cast(nn.Parameter, module.weight)
            if weight.requires_grad and (only is None or weight in only):
                if only is None:
                    # So that a gradient in bf16 may stand beside the weight in fp32.
                    weight.grad, weight.grad_dtype = None, torch.bfloat16
                self._copy(f"{name}.weight" if name else "weight", weight)

    def _copy(self, name: str, weight: nn.Parameter) -> None:
        copy = weight.detach().bfloat16().requires_grad_()
        self.copies[weight] = copy
        self._by_name[name] = (weight, copy, [weight._version])

    def forward(self, model: nn.Module, *args: Any) -> Any:
        """Call the model with the copies in the place of its weights.

        Args:
            model: that of which they are.
            args: its arguments.

        Returns:
            what it returns.
        """
        for name, (weight, copy, seen) in list(self._by_name.items()):
            if weight.device != copy.device:  # the model was moved
                self._copy(name, weight)
            elif weight._version != seen[0]:  # somebody else wrote into it, such as a checkpoint
                with torch.no_grad():
                    copy.copy_(weight)
                seen[0] = weight._version
        return functional_call(model, {n: c for n, (_, c, _) in self._by_name.items()}, args)

    def hand_over(self) -> None:
        """Make the gradients of the copies those of the weights."""
        for weight, copy, _ in self._by_name.values():
            # A weight that was read itself as well has a gradient of its own.
            if copy.grad is not None and weight.grad is not None:
                weight.grad += copy.grad
            elif copy.grad is not None:
                weight.grad = copy.grad
            copy.grad = None

    def note_step(self) -> None:
        """Tell that the optimizer has just written weights and copies alike."""
        for weight, _, seen in self._by_name.values():
            if weight.grad is not None:  # the others have not been written
                seen[0] = weight._version


def dense_optimizer(
    spec: TrainSpec, parameters: Mapping[str, nn.Parameter], *, names: Iterable[str] = ()
) -> torch.optim.Adam:
    """Adam over the dense parameters, in groups of equal rate and decay.

    Args:
        spec: the recipe's section.
        parameters: qualified name -> parameter, of this rank.
        names: of those on all ranks, where that is more.

    Raises:
        ConfigError: a prefix of ``lr_factors`` that no parameter has.
    """
    used: set[str] = set()
    groups: dict[tuple[float, bool, object], list[nn.Parameter]] = {}
    known = {*parameters, *names}
    for name in known:
        used.update(_fitting(spec, name))
    for name, parameter in parameters.items():
        prefix = max(_fitting(spec, name), key=len, default=None)
        factor = 1.0 if prefix is None else spec.dense.lr_factors[prefix]
        # Sharded ones apart from plain ones: no operator takes both in one call.
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((factor, parameter.ndim >= 2, mesh), []).append(parameter)
    for prefix in spec.dense.lr_factors:
        if prefix not in used:
            heads = {".".join(n.split(".")[:d]) for n in known for d in (1, 2)}
            raise ConfigError(
                refusal(
                    "train",
                    "dense.lr_factors",
                    must="name the beginning of a dense parameter's name",
                    got=repr(prefix) + nearest(prefix, heads),
                    fix="correct or remove it",
                )
            )
    settings = {"betas": (spec.dense.beta1, spec.dense.beta2), "eps": spec.dense.eps}
    made = [
        {
            "params": members,
            "lr": spec.dense.lr * factor,
            "weight_decay": spec.dense.weight_decay if decays else 0.0,
        }
        for (factor, decays, _), members in groups.items()
    ]
    if any(p.is_cuda for p in parameters.values()):
        return DenseAdam(made, **settings)
    # On CPUs results keep the bits that they have had.
    return torch.optim.Adam(made, **settings, decoupled_weight_decay=True)


def _fitting(spec: TrainSpec, name: str) -> list[str]:
    return [p for p in spec.dense.lr_factors if name == p or name.startswith(f"{p}.")]
