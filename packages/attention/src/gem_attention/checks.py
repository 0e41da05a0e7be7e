"""The rules that operands of attention obey, each with its message; private to ``gem_attention``.

Every function takes the name of the operator, so that the message names what the user called.
Nothing here reads a device tensor, and ``torch.compile(fullgraph=True)`` traces all of it.
"""

import torch
from torch import Tensor

from gem_attention.activations import ACTIVATION_NAMES
from gem_jagged.batch import Layout
from gem_opkit.errors import DeviceError, DtypeError, ShapeError, UnsupportedError, refusal

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_dtypes(op: str, **tensors: Tensor) -> None:
    """Refuse operands that are not floats of one dtype, or not on one device."""
    names = list(tensors)
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
    for letter, meaning in (("H", "query heads"), ("G", "key/value heads"), ("K", "head width")):
        if sizes.get(letter, 1) == 0:
            raise ShapeError(
                refusal(op, letter, must="be above 0", got=0, fix=f"pass at least one of {meaning}")
            )
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
    op: str, window: tuple[int | None, int | None], *, causal: bool = False
) -> tuple[int | None, int | None]:
    """Refuse a negative window; return it with ``causal`` worked in."""
    left, right = window
    for side, tokens in (("left", left), ("right", right)):
        if tokens is not None and tokens < 0:
            raise ShapeError(
                refusal(
                    op,
                    "window",
                    must="have sides of at least 0 tokens, or None for all",
                    got=f"{side} {tokens}",
                    fix="None is what other libraries write as -1",
                )
            )
    if not causal:
        return left, right
    if right:
        raise ShapeError(
            refusal(
                op,
                "window",
                must="have no right side when causal=True",
                got=f"right {right}",
                fix="leave it None, or give causal=False",
            )
        )
    return left, 0


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
