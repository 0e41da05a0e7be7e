"""Who computes an operator: the word that a caller gives, and what it resolves to.

An explicit request never falls back. The choice is logged once for each operator and device, so
that "which kernel ran?" has an answer in every log. Imports no torch.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, get_args

from gem_opkit.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

Impl = Literal["auto", "reference", "triton"]

_WORDS = get_args(Impl)
_log = logging.getLogger("gem_opkit.impl")
_announced: set[tuple[str, str, str]] = set()
# What "auto" stands for. Of the process: backward passes run on threads of their own.
_auto: list[Impl] = ["auto"]


@contextmanager
def auto_means(impl: Impl) -> Iterator[None]:
    """Have ``auto`` stand for another word within a block, to compare implementations.

    It holds for the whole process, all its threads, and for the backward passes that run within
    the block. What was compiled before keeps what it chose.

    Args:
        impl: the word, ``reference`` as a rule.

    Raises:
        UnsupportedError: an unknown word.
    """
    _check_word(impl, "auto_means")
    _auto.append(impl)
    try:
        yield
    finally:
        _auto.pop()


def resolve_impl(impl: str, device: "torch.device", op: str, *, has_triton: bool) -> str:
    """Decide which implementation of an operator runs.

    ``reference`` runs anywhere. ``triton`` runs on CUDA, and on a CPU only in Triton's
    interpreter (``TRITON_INTERPRET=1``). ``auto`` is triton on CUDA where the operator has a
    kernel, otherwise reference, unless ``auto_means`` says otherwise. On the meta device nothing is
    computed, so every word passes.

    Inside ``torch.compile`` the decision is taken while tracing and is a constant of the graph;
    a later change of ``TRITON_INTERPRET`` does not reach a compiled function.

    Args:
        impl: the caller's word, one of ``Impl``.
        device: where the operator's tensors are.
        op: name of the operator, for messages and the log.
        has_triton: whether the operator has a ``kernel.py``.

    Returns:
        ``"reference"`` or ``"triton"``.

    Raises:
        UnsupportedError: an unknown word, a kernel that does not exist, or triton on a device
            that cannot run it.
    """
    return _resolve(impl, device.type, op, has_triton)


def _resolve(impl: str, device_type: str, op: str, has_triton: bool) -> str:  # noqa: FBT001
    chosen = _choose(impl, device_type, op, has_triton=has_triton)
    key = (op, device_type, chosen)
    if key not in _announced:
        _announced.add(key)
        _log.info("%s: impl=%r on %s runs %s", op, impl, device_type, chosen)
    return chosen


# Dynamo calls a function with this mark while it traces and keeps the result as a constant.
# torch.compiler.assume_constant_result sets the same attribute, but would import torch here.
_resolve._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _check_word(impl: str, op: str) -> None:
    if impl not in _WORDS:
        raise UnsupportedError(
            f"{op}: impl must be one of {', '.join(_WORDS)}; got {impl!r}; "
            f'use impl="auto" unless you compare implementations'
        )


def _choose(impl: str, device_type: str, op: str, *, has_triton: bool) -> str:
    _check_word(impl, op)
    if impl == "auto":
        impl = _auto[-1]
    if impl == "reference":
        return "reference"
    if impl == "auto":
        return "triton" if has_triton and device_type == "cuda" else "reference"
    if not has_triton:
        raise UnsupportedError(
            f'{op}: impl="triton" needs a Triton kernel; {op} has none yet; use impl="reference"'
        )
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedError(
            f'{op}: impl="triton" on a CPU needs TRITON_INTERPRET=1; it is '
            f'{os.environ.get("TRITON_INTERPRET")!r}; use impl="reference"'
        )
    if device_type not in ("cpu", "cuda", "meta"):
        raise UnsupportedError(
            f'{op}: impl="triton" needs a CUDA device; the tensors are on {device_type!r}; '
            f'use impl="reference"'
        )
    return "triton"
