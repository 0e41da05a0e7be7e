"""The rules that offsets and lengths obey, each with its message; private to ``gem_jagged``.

Every function takes the name of the caller, so that the message names what the user called.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gem_opkit.errors import DeviceError, DtypeError, ShapeError, UnsupportedError, refusal

if TYPE_CHECKING:
    from gem_jagged.batch import Layout

_INT32_MAX = 2**31 - 1


def host_lengths(op: str, lengths: object) -> Tensor:
    """Return lengths given in any host form as an int64 tensor of its own."""
    if isinstance(lengths, Tensor):
        tensor = lengths
        if tensor.device.type != "cpu":
            raise DeviceError(
                refusal(
                    op,
                    "lengths",
                    must="be in host memory",
                    got=tensor.device,
                    fix="keep the lengths on the host, or use Layout.from_offsets, which waits",
                )
            )
    else:
        try:
            tensor = torch.as_tensor(lengths)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DtypeError(
                refusal(
                    op,
                    "lengths",
                    must="be a list, an array or a tensor of integers",
                    got=f"{type(lengths).__name__} ({error})",
                    fix="count the tokens of each sequence",
                )
            ) from error
        if tensor.numel() == 0 and not hasattr(lengths, "dtype"):
            tensor = tensor.to(torch.int64)  # an empty list has no dtype of its own
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise DtypeError(
            refusal(op, "lengths", must="be integers", got=tensor.dtype, fix="count tokens")
        )
    # Always a copy: a layout must not change with the caller's array.
    tensor = tensor.detach().to(torch.int64, copy=True)
    check_host_lengths(op, tensor)
    return tensor


def check_host_lengths(op: str, lengths: Tensor) -> None:
    """Refuse lengths that are not one dim of int64 >= 0 on the CPU."""
    if lengths.device.type != "cpu" or lengths.dtype != torch.int64:
        raise DtypeError(
            refusal(
                op,
                "lengths",
                must="be int64 on the CPU",
                got=f"{lengths.dtype} on {lengths.device}",
                fix="build the layout with Layout.from_lengths",
            )
        )
    if lengths.ndim != 1:
        raise ShapeError(
            refusal(
                op,
                "lengths",
                must="have one dim",
                got=f"shape {tuple(lengths.shape)}",
                fix="pass one length a sequence",
            )
        )
    if lengths.shape[0] and int(lengths.min()) < 0:
        row = int((lengths < 0).nonzero()[0])
        raise ShapeError(
            refusal(
                op,
                f"lengths[{row}]",
                must="be at least 0",
                got=int(lengths[row]),
                fix="an empty sequence has length 0",
            )
        )


def check_offset_dtype(op: str, dtype: torch.dtype) -> None:
    """Refuse a dtype that offsets cannot have."""
    if dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            refusal(op, "offsets_O", must="be int32 or int64", got=dtype, fix="convert the offsets")
        )


def sum_of_lengths(op: str, lengths: Tensor) -> int:
    """Return the sum of host lengths; refuse lengths whose sum int64 would wrap."""
    # A float sum cannot wrap, and is near enough to tell 2^63 from any total that exists.
    if float(lengths.sum(dtype=torch.float64)) >= 2.0**63:
        raise ShapeError(
            refusal(
                op,
                "lengths",
                must="sum to less than 2^63 tokens",
                got=f"{float(lengths.sum(dtype=torch.float64)):.3g}",
                fix="count tokens, not bytes or addresses",
            )
        )
    return int(lengths.sum())


def check_total_fits(op: str, total: int, dtype: torch.dtype) -> None:
    """Refuse a total that int32 offsets cannot hold."""
    if dtype == torch.int32 and total > _INT32_MAX:
        raise ShapeError(
            refusal(
                op,
                "offsets_O",
                must=f"hold the total of {total} tokens",
                got=f"int32, which ends at {_INT32_MAX}",
                fix="use dtype=torch.int64",
            )
        )


def check_offsets_shape(op: str, offsets_O: Tensor) -> None:
    """Refuse offsets of a wrong dtype or shape; reads no value."""
    check_is_tensor(op, offsets_O, name="offsets_O")
    check_offset_dtype(op, offsets_O.dtype)
    if offsets_O.ndim != 1 or offsets_O.shape[0] == 0:
        raise ShapeError(
            refusal(
                op,
                "offsets_O",
                must="have one dim of B+1 elements",
                got=f"shape {tuple(offsets_O.shape)}",
                fix="offsets of an empty batch are [0]",
            )
        )


def check_offset_values(
    op: str, offsets: Tensor, lengths: Tensor, expected: Tensor | None = None
) -> None:
    """Check offsets that have been read to the host; name the first bad row."""
    if int(offsets[0]) != 0:
        raise ShapeError(
            refusal(
                op,
                "offsets_O[0]",
                must="be 0",
                got=int(offsets[0]),
                fix="start at the first token",
            )
        )
    bad = (lengths < 0) if expected is None else (lengths < 0) | (lengths != expected)
    if not bool(bad.any()):
        return
    row = int(bad.nonzero()[0])
    begin, end = int(offsets[row]), int(offsets[row + 1])
    if end < begin:
        raise ShapeError(
            refusal(
                op,
                f"offsets_O[{row + 1}]",
                must=f"be at least {begin}, the offset before it",
                got=f"{end} (row {row})",
                fix="offsets are the running sum of the lengths",
            )
        )
    assigned = int(lengths[row]) if expected is None else int(expected[row])
    raise ShapeError(
        refusal(
            op,
            f"offsets_O[{row + 1}]",
            must=f"be {begin + assigned}, as lengths[{row}] is {assigned}",
            got=f"{end} (row {row})",
            fix="build offsets and lengths together with Layout.from_lengths",
        )
    )


def check_layout(op: str, tensor: Tensor, layout: "Layout", *, name: str, layout_name: str) -> None:
    """Refuse a layout whose total or device is not that of the tokens; reads no value."""
    if tensor.shape[0] != layout.total_tokens:
        raise ShapeError(
            f"{op}: {name} has {tensor.shape[0]} tokens but the lengths of {layout_name} sum to "
            f"{layout.total_tokens}; pass the tokens of exactly these sequences"
        )
    check_device(op, tensor, layout, name=name, layout_name=layout_name)


def check_device(op: str, tensor: Tensor, layout: "Layout", *, name: str, layout_name: str) -> None:
    """Refuse offsets on another device than the tensor, or of a dtype that is not an offset's."""
    check_is_layout(op, layout, name=layout_name)
    check_offset_dtype(op, layout.offsets_O.dtype)
    if tensor.device != layout.offsets_O.device:
        raise DeviceError(
            refusal(
                op,
                f"{layout_name}.offsets_O",
                must=f"be on {tensor.device} like {name}",
                got=layout.offsets_O.device,
                fix="move the layout with Layout.to",
            )
        )


def check_is_layout(op: str, layout: object, *, name: str) -> None:
    """Refuse what says nothing of where sequences begin; a ``Jagged`` does."""
    if not hasattr(layout, "offsets_O"):
        raise DtypeError(
            refusal(
                op,
                name,
                must="be a Layout",
                got=type(layout).__name__,
                fix="build one with Layout.from_lengths or Layout.from_offsets",
            )
        )


def check_is_tensor(op: str, tensor: object, *, name: str) -> None:
    """Refuse lists and arrays, which have no device."""
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


def check_tokens(op: str, tokens: object, *, name: str) -> None:
    """Refuse what is no count of tokens: a fraction, a negative number, one beyond int64."""
    if isinstance(tokens, bool) or not isinstance(tokens, (int, torch.SymInt)):
        raise DtypeError(
            refusal(op, name, must="be a whole number", got=repr(tokens), fix="use int()")
        )
    if tokens < 0 or (isinstance(tokens, int) and tokens >= 2**63):
        raise ShapeError(
            refusal(
                op,
                name,
                must="be at least 0" if tokens < 0 else "be below 2^63",
                got=tokens,
                fix="pass a token count",
            )
        )


def check_align(op: str, align: str) -> None:
    """Refuse a side of the row that does not exist."""
    if align not in ("left", "right"):
        raise UnsupportedError(
            refusal(
                op,
                "align",
                must='be "left" or "right"',
                got=repr(align),
                fix='use "left" for tokens at the front of the row',
            )
        )


def check_floating(op: str, tensor: Tensor, *, name: str) -> None:
    """Refuse a dtype that is not floating point."""
    if not tensor.dtype.is_floating_point:
        raise DtypeError(
            refusal(
                op,
                name,
                must="be floating point",
                got=tensor.dtype,
                fix="convert the values first",
            )
        )


def check_same_dtype(op: str, tensor: Tensor, like: Tensor, *, name: str, like_name: str) -> None:
    """Refuse another dtype than that of a second tensor."""
    if tensor.dtype != like.dtype:
        raise DtypeError(
            refusal(
                op,
                name,
                must=f"be {like.dtype} like {like_name}",
                got=tensor.dtype,
                fix="convert one of them",
            )
        )


def check_same_device(op: str, tensor: Tensor, like: Tensor, *, name: str, like_name: str) -> None:
    """Refuse another device than that of a second tensor."""
    if tensor.device != like.device:
        raise DeviceError(
            refusal(
                op,
                name,
                must=f"be on {like.device} like {like_name}",
                got=tensor.device,
                fix="move it",
            )
        )


def fill_for(op: str, fill: float, dtype: torch.dtype) -> float:
    """Return ``fill`` as the float that an operator's schema takes; refuse what would change."""
    if dtype.is_floating_point or dtype.is_complex:
        bounds = torch.finfo(dtype)
        # Comparisons alone: math.isfinite would break a graph. Infinity and NaN pass.
        if -math.inf < fill < math.inf and not bounds.min <= fill <= bounds.max:
            raise DtypeError(
                refusal(
                    op,
                    "fill",
                    must=f"be in [{bounds.min:.6g}, {bounds.max:.6g}] for {dtype}",
                    got=fill,
                    fix="pad with another value, or convert the values first",
                )
            )
    else:
        exact = float(fill).is_integer() and int(float(fill)) == fill
        if dtype == torch.bool:
            exact = exact and fill in (0, 1)
        elif exact:
            bounds = torch.iinfo(dtype)
            exact = bounds.min <= fill <= bounds.max
        if not exact:
            raise DtypeError(
                refusal(
                    op,
                    "fill",
                    must=f"be a number that {dtype} holds",
                    got=fill,
                    fix="pad with another value, or convert the values first",
                )
            )
    return float(fill)


def merge_trailing(op: str, tensor: Tensor, *, name: str, leading: int) -> Tensor:
    """View the dims after the first ``leading`` ones as one, of size 1 where there is none."""
    check_is_tensor(op, tensor, name=name)
    if not leading <= tensor.ndim <= leading + 2:
        raise ShapeError(
            refusal(
                op,
                name,
                must=f"have {leading} to {leading + 2} dims",
                got=f"shape {tuple(tensor.shape)}",
                fix="merge the dims of a token",
            )
        )
    if tensor.ndim == leading + 1:
        return tensor
    # The size is spelled out: -1 cannot be told from a tensor without elements.
    return tensor.reshape((*tensor.shape[:leading], math.prod(tensor.shape[leading:])))


def split_trailing(merged: Tensor, like: Tensor, *, leading: int) -> Tensor:
    """Undo ``merge_trailing``: give the last dim of ``merged`` the trailing dims of ``like``."""
    if like.ndim == leading + 1:
        return merged
    return merged.reshape((*merged.shape[:-1], *like.shape[leading:]))
