"""Floating-point tensors without memory, integers as they are.

A step of a large model then runs anywhere in seconds: weights, activations, gradients and rows of
tables are names with shapes, while ids, lengths and offsets are real, so that what depends on them
(how many rows differ, how many go to which rank) is what it would be.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from gem_parallel.dry_run.groups import NamedGroup
from gem_parallel.dry_run.memory import MemoryCount

# By name: what a group is called has a type of its own in some versions of torch.
_distributed: Any = import_module("torch.distributed.distributed_c10d")
_PARTS = ("_indices", "_values", "indices", "values")
_FUNCTIONAL = "_c10d_functional"
# Collectives as torch's own tensors over meshes call them: name -> name in the ledger.
_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


class FloatsInName(FakeTensorMode):
    """While it is entered, new floating-point tensors have no memory.

    Operators whose tensors are all real run; one that gets a tensor without memory gives such
    tensors. To ask one for its value is an error.

    Args:
        memory: told of every tensor that an operator makes; None: nobody is.
    """

    def __init__(self, memory: MemoryCount | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._memory = memory
        # Sparse tensor without memory -> its indices, which are real, and its values.
        self._parts: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, or give what it would give."""
        kwargs = kwargs or {}
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        if func.namespace == _FUNCTIONAL:
            _book(func, args, given)
        name = func._schema.name.partition("::")[2]
        if name in _PARTS and given[0] in self._parts:
            return self._parts[given[0]][
                _PARTS.index(name) % 2
            ].detach()  # autograd wants a new one
        if any(isinstance(x, FakeTensor) for x in given):
            real = _makes_integers_like(name, given, kwargs)
            if real:  # what it is like gives a shape and nothing else
                args = (torch.empty(1).expand(given[0].shape), *args[1:])
        else:
            real = bool(given) or _makes_integers(func, args, kwargs)
        found = (
            func(*args, **kwargs) if real else super().__torch_dispatch__(func, types, args, kwargs)
        )
        if isinstance(found, FakeTensor) and found.layout == torch.sparse_coo:
            self._keep_parts(found, name, given)
        if self._memory is not None:
            for made in tree_iter(found):
                if isinstance(made, Tensor):
                    self._memory.see(made)
        return found

    def _keep_parts(self, found: Tensor, name: str, given: Sequence[Tensor]) -> None:
        """Remember what a new sparse tensor is made of, or what the one that it comes from is."""
        parts = [self._parts[x] for x in given if x in self._parts]
        if "sparse_coo_tensor" in name:
            self._parts[found] = given[0], given[1]
        elif name in ("_coalesce", "coalesce") and parts:
            rows, values = parts[0]
            rows = torch.unique(rows, dim=1)
            self._parts[found] = rows, values.new_empty((rows.shape[1], *values.shape[1:]))
        elif name in ("add", "add_") and len(parts) == 2:
            joined = (torch.cat([one[k] for one in parts], dim=1 - k) for k in (0, 1))
            self._parts[found] = tuple(joined)
            found._coalesced_(False)  # noqa: FBT003 - torch takes it by position
        elif len(given) == 1 and parts:
            self._parts[found] = parts[0]

    def without_memory(self, values: Any) -> Any:
        """Replace floating-point tensors by ones without memory.

        Args:
            values: a tensor, or tensors in lists, tuples and dicts.

        Returns:
            the same, integers as they are.
        """
        return tree_map_only(Tensor, self._one, values)

    def _one(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or isinstance(tensor, FakeTensor):
            return tensor
        named = self.from_tensor(tensor)
        if self._memory is not None:
            self._memory.see(named)
        return named


def _makes_integers(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether an operator that is given no tensor makes one of integers or truth values."""
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return not (dtype.is_floating_point or dtype.is_complex)
    name = func._schema.name
    if name in ("aten::randint", "aten::randperm"):
        return True
    return name == "aten::arange" and all(isinstance(x, int) for x in args)


def _makes_integers_like(name: str, given: Sequence[Tensor], kwargs: Any) -> bool:
    """Whether an operator makes integers from the shape of a tensor alone."""
    dtype = kwargs.get("dtype")
    makes = name.startswith("new_") or name.endswith("_like")
    return makes and len(given) == 1 and dtype is not None and not dtype.is_floating_point


def _book(func: Any, args: Sequence[Any], given: list[Tensor]) -> None:
    name = func._schema.name.partition("::")[2]
    name = name.removesuffix("_coalesced").removesuffix("_coalesced_")
    if name not in _COLLECTIVES:
        return  # waiting for one
    names = [x for x in args if isinstance(x, str)]
    group = _distributed._resolve_process_group(names[-1])
    if isinstance(group, NamedGroup):
        group.book(_COLLECTIVES[name], *given)
