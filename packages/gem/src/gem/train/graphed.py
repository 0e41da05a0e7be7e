"""CUDA graphs of the parts of a model whose shapes do not follow the lengths of histories.

Experts, summaries and heads are many short kernels. A graph launches those of a part at once, the
forward pass by one call of the driver and the backward pass by another, so that a host that is late
is late no more. The regions are those of `gem.train.compiled`.

    first batch of a size    as written
    second                   captured, then replayed
    later                    replayed; other sizes, and evaluations, run as written

Each graph has memory of its own, in which it leaves the gradients of the weights: they are valid
until the next backward pass. What a region reads is copied there first, once in each direction.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gem.config import RunConfig
from gem.train.compiled import regions
from gem_opkit.errors import UnsupportedError, refusal
from gem_parallel.launch import World

# Runs before a capture, in which libraries make what they keep.
_WARM_UPS = 2


def refuse_graphs(config: RunConfig, world: World) -> None:
    """Refuse what does not go with graphs.

    Args:
        config: the run.
        world: the ranks.

    Raises:
        UnsupportedError: names the key.
    """
    train, memory = config.train, config.memory
    packs = memory.budget_gib is not None or memory.kept != "as_is"
    low, rules = config.precision.recipe, config.precision.rules
    wrong = [
        (world.device.type != "cuda", "on a GPU", f"on {world.device.type}"),
        (world.grouped, "on one rank: collectives run between kernels", f"{world.size} ranks"),
        (train.compile != "off", 'with train.compile = "off"', f'"{train.compile}"'),
        (
            train.accumulation_parts > 1,
            "with train.accumulation_parts = 1: a graph writes its gradients to one place",
            train.accumulation_parts,
        ),
        (
            low not in (None, "bf16") or bool(rules),
            "without products in 8 bits, which look at their inputs",
            f'precision.recipe = "{low}" and {len(rules)} rules',
        ),
        (packs, "without [memory]: what is computed again is not in a graph", "a [memory]"),
    ]
    for fits_not, must, got in wrong:
        if fits_not:
            raise UnsupportedError(
                refusal(
                    "gem train",
                    "train.cuda_graphs",
                    must=f"be used {must}",
                    got=got,
                    fix="leave one of the two out",
                )
            )


def graph_regions(model: nn.Module) -> None:
    """Let the regions of a model be captured when they are used.

    Args:
        model: on a GPU, whole.

    Raises:
        UnsupportedError: a region with dropout, whose draws a graph would repeat out of order.
    """
    for name in regions(model):
        region = model.get_submodule(name)
        for inner, part in region.named_modules():
            if isinstance(part, nn.Dropout) and part.p > 0:
                raise UnsupportedError(
                    refusal(
                        "gem train",
                        "train.cuda_graphs",
                        must="be used without dropout in summaries, experts and heads",
                        got=f"{name}.{inner} with {part.p}",
                        fix="set it to 0, or leave graphs out",
                    )
                )
        region.forward = GraphedRegion(region)


class GraphedRegion:
    """The forward function of a region, with a graph for one set of shapes.

    Args:
        region: takes tensors and returns one.

    Attributes:
        captures: graphs that were made so far.
    """

    def __init__(self, region: nn.Module) -> None:
        self._region, self._plain = region, region.forward
        self._seen: Any = None
        self._graph: _Graph | None = None
        self.captures = 0

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run the region; see `nn.Module.forward`."""
        weights = list(self._region.parameters())
        if not (self._region.training and torch.is_grad_enabled() and _can_be_copied(inputs)):
            return self._plain(*inputs)
        key = _key_of(inputs, weights)
        if self._graph is None and key == self._seen:
            self._graph = _Graph(self._plain, inputs, weights)
            self.captures += 1
        self._seen = key if self._graph is None else self._seen
        if self._graph is None or key != self._seen:
            return self._plain(*inputs)
        return _Replay.apply(self._graph, *inputs, *weights)


def _can_be_copied(inputs: Sequence[Tensor]) -> bool:
    return all(type(tensor) is Tensor and tensor.is_cuda for tensor in inputs)


def _key_of(inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Any:
    """What a graph is made for: shapes of the inputs, and places of the weights."""
    shapes = [(x.shape, x.dtype, x.requires_grad) for x in inputs]
    places = [(w.data_ptr(), w.dtype) for w in weights]
    return shapes, places, torch.is_autocast_enabled("cuda")


class _Graph:
    """Both passes of a function, captured.

    Args:
        function: of the inputs; reads the weights.
        inputs: examples of them.
        weights: that learn.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
    ) -> None:
        self.inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        self._wanted = [x for x in (*self.inputs, *weights) if x.requires_grad]
        self.places = [x.requires_grad for x in (*self.inputs, *weights)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                output = self._run(function)
                torch.autograd.grad(
                    output, self._wanted, torch.ones_like(output), allow_unused=True
                )
                del output
        torch.cuda.current_stream().wait_stream(stream)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # The thread that reads ahead may use the driver meanwhile.
        with torch.cuda.graph(self._forward, stream=stream, capture_error_mode="thread_local"):
            output = self._run(function)
        self.grad = torch.empty_like(output)
        pool = self._forward.pool()
        with torch.cuda.graph(
            self._backward, pool=pool, stream=stream, capture_error_mode="thread_local"
        ):
            found = torch.autograd.grad(output, self._wanted, self.grad, allow_unused=True)
        self.output, self.grads = output.detach(), list(found)

    def _run(self, function: Callable[..., Tensor]) -> Tensor:
        # A cast that autocast remembers from before would be no part of the graph.
        kind, dtype = "cuda", torch.get_autocast_dtype("cuda")
        on = torch.is_autocast_enabled(kind)
        with torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=False):
            return function(*self.inputs)

    def replay_forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Run the forward pass of other inputs of the same shapes."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own.detach().copy_(given)
        self._forward.replay()
        return self.output.detach()

    def replay_backward(self, grad: Tensor) -> list[Tensor | None]:
        """Run the backward pass: a gradient for each input and each weight."""
        self.grad.copy_(grad)
        self._backward.replay()
        found = iter(self.grads)
        return [
            None if not wanted or (own := next(found)) is None else own.detach()
            for wanted in self.places
        ]


class _Replay(torch.autograd.Function):
    """A graph as an operator of its inputs and weights."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, *given: Tensor) -> Tensor:
        ctx.graph = graph
        return graph.replay_forward(given[: len(graph.inputs)])

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's own type
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        return None, *ctx.graph.replay_backward(grad)
