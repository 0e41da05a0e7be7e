"""The rules that operands of attention obey, each with its message; private to ``gem_attention``.

Every function takes the name of the operator, so that the message names what the user called.
Nothing here reads a device tensor, and ``torch.compile(fullgraph=True)`` traces all of it.
"""

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from gem_attention.activations import ACTIVATION_NAMES
from gem_jagged.batch import Jagged, Layout
from gem_opkit.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    ShapeError,
    UnsupportedError,
    refusal,
)

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_dtypes(op: str, **tensors: Tensor) -> None:
    """Refuse operands that are not tensors of floats of one dtype, or not on one device."""
    names = list(tensors)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise DtypeError(
                refusal(
                    op,
                    name,
                    must="be a tensor",
                    got=type(tensor).__name__,
                    fix="convert it with torch.as_tensor",
                )
            )
    first = tensors[names[0]]
    if first.dtype not in FLOATS:
        raise DtypeError(
            refusal(
                op,
                names[0],
                must="be float32, float64, bfloat16 or float16",
                got=first.dtype,
                fix="convert it",
            )
        )
    for name in names[1:]:
        tensor = tensors[name]
        if tensor.dtype != first.dtype:
            raise DtypeError(
                refusal(
                    op,
                    name,
                    must=f"be {first.dtype} like {names[0]}",
                    got=tensor.dtype,
                    fix="use one dtype for all operands",
                )
            )
        if tensor.device != first.device:
            raise DeviceError(
                refusal(
                    op,
                    name,
                    must=f"be on {first.device} like {names[0]}",
                    got=tensor.device,
                    fix="move it",
                )
            )


def check_heads(op: str, sizes: dict[str, int]) -> None:
    """Refuse head counts that do not divide, and widths of 0."""
    for letter, fix in (
        ("H", "pass at least one query head"),
        ("G", "pass at least one key/value head"),
        ("K", "queries and keys need a width"),
        ("V", "values need a width"),
    ):
        if sizes.get(letter, 1) == 0:
            raise ShapeError(refusal(op, letter, must="be above 0", got=0, fix=fix))
    if sizes["H"] % sizes["G"]:
        raise ShapeError(
            refusal(
                op,
                "G",
                must=f"divide the {sizes['H']} query heads",
                got=f"{sizes['G']} key/value heads",
                fix="use a divisor, or as many as query heads",
            )
        )


def check_layout(op: str, tensor: Tensor, layout: Layout, *, name: str, layout_name: str) -> None:
    """Refuse a layout of more tokens than there are, or on another device.

    Fewer are allowed: rows behind the last sequence get 0 and no gradient, as tokens that pad a
    captured graph to a fixed size need.
    """
    if not isinstance(layout, (Layout, Jagged)):
        raise DtypeError(
            refusal(
                op,
                layout_name,
                must="be a Layout",
                got=type(layout).__name__,
                fix="build one with Layout.from_lengths or Layout.from_offsets",
            )
        )
    if layout.total_tokens > tensor.shape[0]:
        raise ShapeError(
            refusal(
                op,
                f"{layout_name}.lengths",
                must=f"sum to at most the {tensor.shape[0]} tokens of {name}",
                got=layout.total_tokens,
                fix="pass the layout of these tokens",
            )
        )
    offsets_O = layout.offsets_O
    if offsets_O.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            refusal(
                op,
                f"{layout_name}.offsets_O",
                must="be int32 or int64",
                got=offsets_O.dtype,
                fix="build the layout with Layout.from_lengths",
            )
        )
    # The reference follows the lengths and the kernels the offsets.
    if tuple(offsets_O.shape) != (layout.batch + 1,):
        raise ShapeError(
            refusal(
                op,
                f"{layout_name}.offsets_O",
                must=f"have the shape ({layout.batch + 1},) of {layout.batch} sequences",
                got=tuple(offsets_O.shape),
                fix="build the layout with Layout.from_lengths",
            )
        )
    if offsets_O.device != tensor.device:
        raise DeviceError(
            refusal(
                op,
                f"{layout_name}.offsets_O",
                must=f"be on {tensor.device} like {name}",
                got=offsets_O.device,
                fix="move the layout with Layout.to",
            )
        )


def check_batches(op: str, q_layout: Layout, k_layout: Layout) -> None:
    """Refuse queries and keys of different numbers of sequences."""
    if q_layout.batch != k_layout.batch:
        raise ShapeError(
            refusal(
                op,
                "k_layout",
                must=f"have the {q_layout.batch} sequences of q_layout",
                got=k_layout.batch,
                fix="a sequence without keys has length 0",
            )
        )


def check_window(
    op: str,
    window: tuple[int | None, int | None],
    *,
    causal: bool = False,
    name: str = "window",
    everything: int | None = None,
) -> tuple[int | None, int | None]:
    """Refuse what is no window; return it with ``causal`` worked in, None for ``everything``."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ShapeError(
            refusal(
                op,
                name,
                must="be a pair (left, right)",
                got=window,
                fix="(None, None) shows everything",
            )
        )
    left, right = (None if side == everything else side for side in window)
    for side, tokens in (("left", left), ("right", right)):
        if tokens is not None and (
            isinstance(tokens, bool) or not isinstance(tokens, (int, torch.SymInt))
        ):
            raise DtypeError(
                refusal(
                    op,
                    name,
                    must="have sides that are whole numbers of tokens, or None for all",
                    got=f"{side} {tokens!r}",
                    fix="convert it with int()",
                )
            )
        if tokens is not None and tokens < 0:
            raise ShapeError(
                refusal(
                    op,
                    name,
                    must="have sides of at least 0 tokens, or None for all",
                    got=f"{side} {tokens}",
                    fix="None is what other libraries write as -1"
                    if everything is None
                    else f"{everything} or None shows everything on that side",
                )
            )
    if not causal:
        return left, right
    if right:
        raise ShapeError(
            refusal(
                op,
                name,
                must="have no right side when causal=True",
                got=f"right {right}",
                fix="leave it None, or give causal=False",
            )
        )
    return left, 0


def check_scale(op: str, scale: float | None, head_width: int, *, name: str = "scale") -> float:
    """Refuse a scale that is no finite number; return it, or 1/sqrt(K) for None."""
    if scale is None:
        return head_width**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat)):
        raise DtypeError(
            refusal(
                op,
                name,
                must="be a number",
                got=type(scale).__name__,
                fix="multiply the queries by a scale that is learned",
            )
        )
    if not -math.inf < scale < math.inf:
        raise ConfigError(refusal(op, name, must="be finite", got=scale, fix="None is 1/sqrt(K)"))
    return float(scale)


def refuse_second_derivative(op: str) -> Callable[..., NoReturn]:
    """Return what the autograd of an operator's backward calls: it is not differentiable."""

    def refuse(_ctx: Any, *_gradients: Tensor | None) -> NoReturn:
        raise UnsupportedError(
            refusal(
                op,
                "its gradient",
                must="be differentiated no further",
                got="a second backward",
                fix="take it of torch's scaled_dot_product_attention with the math backend",
            )
        )

    return refuse


def check_can_count(op: str) -> None:
    """Refuse to count visible pairs while a graph is traced: that would read lengths."""
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            refusal(
                op,
                "visible_pairs",
                must="be given inside torch.compile",
                got=None,
                fix="count them once a batch with gem_attention.patterns and pass the number",
            )
        )


def check_activation(op: str, activation: str | tuple[str, ...], heads: int) -> str:
    """Refuse unknown activations; return the name, or one name a head joined by commas."""
    names = (activation,) if isinstance(activation, str) else tuple(activation)
    if not isinstance(activation, str) and len(names) != heads:
        raise ShapeError(
            refusal(
                op,
                "activation",
                must=f"name one activation for each of {heads} heads",
                got=f"{len(names)} names",
                fix="give one name for all heads, or as many as heads",
            )
        )
    for name in names:
        if name not in ACTIVATION_NAMES:
            raise UnsupportedError(
                refusal(
                    op,
                    "activation",
                    must=f"be one of {', '.join(ACTIVATION_NAMES)}",
                    got=repr(name),
                    fix="softmax is jagged_flash_attention",
                )
            )
    return ",".join(names)
