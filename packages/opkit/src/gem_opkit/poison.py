"""Filling fresh memory with NaN, so that a result that was never written cannot look right.

``torch.empty`` often returns zeros or an old, right result. During tests the tensors that our
packages allocate with it hold NaN (integers: the smallest value, unsigned ones the largest), and
an output that a kernel forgot to write fails the comparison.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

_OURS = re.compile(r"gem(_\w+)?(\.|$)")
_LIBRARIES = re.compile(r"(torch|triton|numpy)(\.|$)")
_TARGETS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


def _called_by_us(module: str) -> bool:
    return _OURS.match(module) is not None


def _called_by_any(module: str) -> bool:
    # torch allocates for itself and knows what it leaves unwritten.
    return _LIBRARIES.match(module) is None


_is_poisoned: Callable[[str], bool] | None = None


def fill_with_poison(tensor: Tensor) -> Tensor:
    """Overwrite a tensor with values that no right result has.

    Args:
        tensor: any dtype; changed in place.

    Returns:
        the same tensor.
    """
    with torch.no_grad():
        if tensor.dtype.is_floating_point and tensor.element_size() == 1:
            # All bits set is NaN in e4m3fn, e5m2 and e8m0; the fnuz formats have it at 0x80.
            fnuz = "fnuz" in str(tensor.dtype)
            tensor.view(torch.uint8).fill_(0x80 if fnuz else 0xFF)
        elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        elif tensor.dtype.is_signed:
            tensor.fill_(torch.iinfo(tensor.dtype).min)
        elif tensor.dtype is not torch.bool:
            tensor.view(torch.uint8).fill_(0xFF)
        else:
            tensor.fill_(True)  # noqa: FBT003 - torch's own signature
    return tensor


def _wrap(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        out = original(*args, **kwargs)
        # While Dynamo traces, the branch is a constant and vanishes: a graph has no callers.
        if torch.compiler.is_compiling():
            return out
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if _is_poisoned is None or not _is_poisoned(caller):
            return out
        # Fake, functional and meta tensors have no memory that could be left unwritten.
        if type(out) is Tensor and out.device.type != "meta":
            fill_with_poison(out)
        return out

    return poisoned


# A ``with torch.device(...)`` block knows the functions that make tensors by a set that torch makes
# once. Made while ours stand in their place, it would know those alone, and what they call would
# land on the CPU.
_device_constructors()

# Made once: Dynamo guards on the identity of a function, so new ones would mean recompilations.
_POISONED = {name: _wrap(getattr(owner, name)) for owner, name in _TARGETS}


@contextmanager
def poisoned_empty(callers: Literal["gem", "all"] = "gem") -> Iterator[None]:
    """Poison what ``torch.empty`` and its kin return inside the block.

    Covers ``empty``, ``empty_like``, ``empty_strided``, ``new_empty`` and ``new_empty_strided``
    called as attributes of torch or of a tensor. Code that is being traced is left alone.

    Args:
        callers: ``"gem"``: calls from modules of our packages; ``"all"``: from every module but
            those of torch, triton and numpy.

    Yields:
        nothing.
    """
    global _is_poisoned
    before = _is_poisoned
    patched: list[tuple[Any, str, Any]] = []
    try:
        _is_poisoned = _called_by_any if callers == "all" else _called_by_us
        for owner, name in _TARGETS:
            if getattr(owner, name) is not _POISONED[name]:
                patched.append((owner, name, vars(owner).get(name)))
                setattr(owner, name, _POISONED[name])
        yield
    finally:
        _is_poisoned = before
        for owner, name, original in patched:
            if original is None:  # was inherited
                delattr(owner, name)
            else:
                setattr(owner, name, original)
