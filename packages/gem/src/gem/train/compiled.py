"""torch.compile over the parts of a model whose shapes do not follow the lengths of histories.

One graph for each region: the summary and the experts of a layer, and the heads. Event streams stay
as they are: their operators have kernels of their own, which take in what stands around them. A
region is compiled where it learns; evaluations run it as written, so that no second graph is made
for them and none is traced over weights that have working copies.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config

from gem.model.gem import GemModel
from gem_opkit.errors import UnsupportedError, refusal
from gem_parallel.contract import ParallelPlan

# Of a region: its first number of examples, any number, one and none; and as many to spare.
_GRAPHS_OF_A_REGION = 8


def regions(model: nn.Module) -> list[str]:
    """Name the submodules that are compiled, each as one graph.

    Args:
        model: from `gem.model.build.build_model`.

    Returns:
        qualified names, in the order in which the model runs them.
    """
    found = []
    if isinstance(model, GemModel):
        for place, layer in enumerate(model.layers):
            found += [
                f"layers.{place}.{name}"
                for name in ("summary", "experts")
                if getattr(layer, name) is not None
            ]
    return [*found, "heads"]


class CompiledRegion:
    """The forward function of a region: compiled where it learns, else as written.

    Args:
        region: takes tensors and returns one.
        backend: of ``torch.compile``.
        most_graphs: of all regions of one class: torch counts them by the code that they share, and
            would end the run at the ninth.
    """

    def __init__(
        self, region: nn.Module, backend: str, *, most_graphs: int = _GRAPHS_OF_A_REGION
    ) -> None:
        self._region, self._plain = region, region.forward
        self._most_graphs = most_graphs
        self._compiled: Callable[..., Any] = torch.compile(
            region.forward, fullgraph=True, backend=backend
        )

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run the region; see `nn.Module.forward`."""
        if not (self._region.training and torch.is_grad_enabled()):
            return self._plain(*inputs)
        with dynamo_config.patch(recompile_limit=self._most_graphs):
            return self._compiled(*inputs)


def compile_regions(model: nn.Module, plan: ParallelPlan, backend: str) -> None:
    """Compile the regions of a model in place; each is traced when it first learns.

    A batch of another size makes a graph anew once, for any size from then on; one example makes
    one, and so does none.

    Args:
        model: before it is spread over ranks.
        plan: of the ranks.
        backend: of ``torch.compile``.

    Raises:
        UnsupportedError: a plan that gathers parameters or spreads experts, whose collectives run
            between the modules of a region.
    """
    if plan.shard > 1 or plan.expert > 1:
        raise UnsupportedError(
            refusal(
                "gem train",
                "train.compile",
                must='be "off" where a plan cuts parameters or spreads experts',
                got=f"{backend!r} with parallel.shard={plan.shard}, parallel.expert={plan.expert}",
                fix="leave it out, or give the ranks to parallel.replicate",
            )
        )
    names = regions(model)
    for name in names:
        region = model.get_submodule(name)
        most = _GRAPHS_OF_A_REGION * len(names)
        region.forward = CompiledRegion(region, backend, most_graphs=most)
