"""Run a region again, but for the operators whose results were kept.

Torch's selective checkpointing does the same with what it keeps as it is; here what is kept may be
packed as well, and every entry says what it was called with, so that another order of operators in
the second run is an error and never a wrong result.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

from gem_opkit.errors import UnsupportedError, refusal
from gem_parallel.recompute.packing import PackedView, unpack

# Checkpointing detaches another number of times in the second run.
IGNORED = frozenset({torch.ops.aten.detach.default})

Kept = tuple[Any, tuple[Any, ...]]
# Operator -> its name: torch puts it together anew each time, and every operator is asked.
_NAMES: dict[Any, str] = {}


class Keep(TorchDispatchMode):
    """The first run: keeps results.

    Args:
        wanted: name and place of operators.
        pack: what a kept tensor is put away as.
    """

    def __init__(
        self, wanted: Collection[tuple[str, int]], pack: Callable[[Tensor], Tensor | PackedView]
    ) -> None:
        super().__init__()
        self._wanted, self._pack = wanted, pack
        self._names = {name for name, _ in wanted}
        self.kept: dict[tuple[str, int], Kept] = {}
        self._places: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and keep what it gives where that is wanted."""
        out = func(*args, **(kwargs or {}))
        name = _name(func)
        if name in self._names:
            key = name, self._places[name]
            self._places[name] += 1
            if key in self._wanted:
                # Detached: autograd makes the tensor itself a part of the graph that keeps this.
                put = (
                    self._pack(out.detach())
                    if isinstance(out, Tensor)
                    else tree_map_only(Tensor, lambda t: self._pack(t.detach()), out)
                )
                self.kept[key] = put, _signature(args)
        return out


class Replay(TorchDispatchMode):
    """The second run: gives what was kept, each once.

    Args:
        first: the first run.
    """

    def __init__(self, first: Keep) -> None:
        super().__init__()
        self._first = first
        self._places: Counter[str] = Counter()

    def __enter__(self) -> "Replay":
        """Begin from the region's first operator."""
        self._places.clear()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Give what was kept of an operator, or run it."""
        name = _name(func)
        if name not in self._first._names:
            return func(*args, **(kwargs or {}))
        key = name, self._places[name]
        self._places[name] += 1
        if key not in self._first._wanted:
            return func(*args, **(kwargs or {}))
        found = self._first.kept.pop(key, None)
        if found is None or found[1] != _signature(args):
            raise UnsupportedError(
                refusal(
                    "recompute",
                    name,
                    must="be called in the second run of a region as in the first",
                    got="other arguments" if found else "a second backward pass, or another order",
                    fix="take one backward pass for each forward pass, and no global state",
                )
            )
        put = found[0]
        if isinstance(put, Tensor | PackedView):
            return unpack(put)
        return tree_map(lambda x: unpack(x) if isinstance(x, Tensor | PackedView) else x, put)


def _name(func: Any) -> str:
    found = _NAMES.get(func)
    if found is None:
        found = _NAMES[func] = str(func)
    return found


def _signature(args: Sequence[Any]) -> tuple[Any, ...]:
    """Shape and dtype of every tensor; lists are looked into only where there are some."""
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append((arg.shape, arg.dtype))
        elif isinstance(arg, list | tuple):
            found += [(x.shape, x.dtype) for x in tree_iter(arg) if isinstance(x, Tensor)]
    return tuple(found)
