"""The modules that time and FLOPs are told for, and the ranges that name them in a trace."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gem.bench.trace import MODULE_RANGE
from gem.config import RunConfig
from gem.data.batch import ExampleBatch
from gem.data.schema import BatchSchema
from gem.model.flops import PassFlops, training_flops
from gem.model.spec import GemSpec
from gem.model.structure import module_key, reduce_schema, streams_read, takes_part
from gem.planning.operators import Sizes, pooling_attention, self_attention

# FLOPs do not depend on the width of an element.
_ANY_BYTES = 2


@dataclass(frozen=True, slots=True)
class RegionFlops:
    """FLOPs of a module on a batch.

    Attributes:
        attention: of scores, and of what they weigh.
        products: of all other products.
    """

    attention: PassFlops
    products: PassFlops

    @property
    def total(self) -> int:
        """All of them."""
        return self.attention.total + self.products.total


def region_flops(
    config: RunConfig, schema: BatchSchema, batch: ExampleBatch
) -> dict[str, RegionFlops]:
    """Count the FLOPs of a training step by module, those of attention apart.

    Args:
        config: the run.
        schema: of the batch.
        batch: only its lengths in host memory are read.

    Returns:
        qualified name of a module -> its FLOPs; together those of `gem.model.flops`.
    """
    lengths = {name: stream.numbers.lengths.tolist() for name, stream in batch.streams.items()}
    whole = training_flops(config.model, schema, examples=batch.examples, lengths=lengths)
    attention = _attention(config, schema, batch.examples, lengths)
    return {
        name: RegionFlops(own := attention.get(name, PassFlops()), _less(flops, own))
        for name, flops in whole.items()
    }


def _less(whole: PassFlops, part: PassFlops) -> PassFlops:
    return PassFlops(whole.forward - part.forward, whole.backward - part.backward)


def _attention(
    config: RunConfig, schema: BatchSchema, examples: int, lengths: Mapping[str, list[int]]
) -> dict[str, PassFlops]:
    spec = config.model
    if not isinstance(spec, GemSpec):
        return {}  # the comparison model weighs events by an MLP
    found: dict[str, PassFlops] = {}
    for stream in streams_read(spec, reduce_schema(schema, spec.leave_out)):
        most = spec.stream_spec(stream.name).max_events
        kept = [n if most is None else min(n, most) for n in lengths[stream.name]]
        sizes = Sizes(examples, kept, _ANY_BYTES)
        for index, kind in enumerate(spec.layers):
            if not takes_part(spec, stream.name, index):
                continue
            own = spec.layer_stream_spec(stream.name, index)
            operators = [] if kind == "interaction" else [self_attention(own, sizes)]
            operators += [] if kind == "transformer" else pooling_attention(spec, own, sizes)
            found[f"layers.{index}.streams.{module_key(stream.name)}"] = PassFlops(
                sum(op.forward.flops for op in operators),
                sum(op.backward.flops for op in operators),
            )
    return found


class ModuleRanges:
    """Ranges around modules, for a profiler; nothing is named until ``on`` is set.

    To be made before the first step, so that nothing that is compiled meets other hooks later on.
    What lies inside a graph is not named.

    Args:
        model: whose modules they are.
        names: qualified names; those that the model does not have are left out.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.on = False
        known = dict(model.named_modules())
        self._open: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        for name in names:
            module = known.get(name)
            if module is None:
                continue
            before, after = self._hooks(name)
            # Around what others hooked on: gathering of sharded weights belongs to the module.
            # Also called when an exception ends the module, as a checkpoint does that has
            # computed enough.
            for handle in (
                module.register_forward_pre_hook(before, prepend=True),
                module.register_forward_hook(after, always_call=True),
            ):
                self._undo.append(handle.remove)

    def _hooks(self, name: str) -> tuple[Any, Any]:
        # A graph asks whether it is compiled first, or it would be traced anew once all is on.
        def before(module: nn.Module, inputs: Any) -> None:
            if not torch.compiler.is_compiling() and self.on:
                opened = torch.profiler.record_function(f"{MODULE_RANGE}{name}")
                opened.__enter__()
                self._open.append(opened)

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            if not torch.compiler.is_compiling() and self._open:
                self._open.pop().__exit__(None, None, None)

        return before, after

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Name the modules within a block."""
        self.on = True
        try:
            yield
        finally:
            self.on = False
            self._open.clear()

    def remove(self) -> None:
        """Leave the model as it was."""
        while self._undo:
            self._undo.pop()()
