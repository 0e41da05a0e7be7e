"""Meta's published GDPA call, argument for argument, on ``generalized_attention``.

Replace the import of ``generalized_dot_product_attention`` by one from here. The arguments that are
built have the names and the meaning that they have there, also where it differs from the rest of
this package:

- ``qk_scale`` multiplies the weights *after* the activation, f(q·k) · qk_scale; its default is 1;
- ``window_size`` counts from the first query and the first key of a sequence, not from the last;
- ``activation`` has Meta's names, and is ``"raw"`` (none) by default.

Differences: every weight is computed in float32, also ``fast_gelu_bf16``; the slope of relu at 0 is
0; rows behind the last offset get 0; nothing is truncated at ``max_seq_len_q``.

Left out: every other argument of that call, refused by name.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gem_attention.contract import GdpaActivation
from gem_attention.flash_compat import (
    generalized_attention_varlen_func,
    pooled_attention_varlen_func,
)
from gem_opkit.errors import DtypeError, ShapeError, UnsupportedError, refusal

_NAME = "generalized_dot_product_attention"
# Meta's names in the order of their numbers, which ``ensemble_activation_list`` holds.
_ACTIVATIONS: dict[str, GdpaActivation] = {
    "raw": "identity",
    "gelu": "gelu",
    "gelu_approx": "fast_gelu",
    "fast_gelu": "fast_gelu",
    "leaky_relu": "leaky_relu",
    "relu": "relu",
    "fast_gelu_bf16": "fast_gelu",
    "silu": "silu",
    "fast_silu": "silu",
    "hardswish": "hard_swish",
    "relu_square": "relu_squared",
    "fast_gelu_taylor_approx": "taylor_gelu",
}
_BY_NUMBER: tuple[GdpaActivation, ...] = tuple(_ACTIVATIONS.values())


def generalized_dot_product_attention(  # noqa: PLR0913 - Meta's own signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offset: Tensor,
    key_offset: Tensor,
    max_seq_len_q: int,
    max_seq_len_kv: int,
    *,
    qk_scale: float | None = None,
    output_offset: Tensor | None = None,
    window_size: int | None = None,
    broadcast_q: bool = False,
    activation: str = "raw",
    ensemble_activation_list: Sequence[int] | None = None,
    **unbuilt: Any,
) -> Tensor:
    """Attend within each sequence with an activation in place of softmax.

    Args:
        query: (T, H, D), float32, bfloat16 or float16; with ``broadcast_q`` the P queries (P, H, D)
            of every sequence.
        key: (S, G, D), where G divides H.
        value: (S, G, V).
        query_offset: first query of each sequence and their number, int32 or int64, (B+1); with
            ``broadcast_q`` (0, P), not read.
        key_offset: first key of each sequence, likewise (B+1).
        max_seq_len_q: not read; at least the longest sequence of queries.
        max_seq_len_kv: likewise, of keys.
        qk_scale: factor of the weights, after the activation; None for 1.
        output_offset: row of the output at which each sequence begins, (B+1); None for
            ``query_offset``, or with ``broadcast_q`` for (0, P, 2P, ...). Another tensor costs one
            more pass over the output.
        window_size: a query sees the keys at most so many places before and after its own, both
            counted from the beginning; None for all keys. Only where query and key offsets are the
            same tensor.
        broadcast_q: the same queries for every sequence.
        activation: raw, gelu, gelu_approx, fast_gelu, leaky_relu, relu, fast_gelu_bf16, silu,
            fast_silu, hardswish, relu_square or fast_gelu_taylor_approx.
        ensemble_activation_list: numbers of activations, in that order from 0, for the first
            query heads; the others have ``activation``.
        **unbuilt: every other argument of the published call.

    Returns:
        (T, H, V), with ``broadcast_q`` (B·P, H, V), in the dtype of ``query``.

    Raises:
        UnsupportedError: an argument that is not built, an unknown activation, a window over sides
            of different lengths, or operands that the kernels do not take.
        ShapeError, DtypeError, DeviceError: operands that do not fit together.

    Numerics: as ``generalized_attention``; a ``qk_scale`` other than 1 multiplies the rounded
        output, which costs one more rounding unless it is a power of two.
    Cost: as ``generalized_attention``.
    Source: Meta's published GDPA kernels for names and meaning.
    """
    for name in unbuilt:
        raise UnsupportedError(
            refusal(_NAME, name, must="be left out", got="a value", fix="see what the call takes")
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise DtypeError(
                refusal(
                    _NAME,
                    name,
                    must="be a tensor",
                    got=type(tensor).__name__,
                    fix="pass the parts of a fused projection as slices",
                )
            )
    names = _names(activation, ensemble_activation_list, query.shape[1])
    if broadcast_q:
        out = _pool(query, key, value, key_offset, names, max_seq_len_kv, window_size)
    else:
        if window_size is not None and query_offset is not key_offset:
            raise UnsupportedError(
                refusal(
                    _NAME,
                    "window_size",
                    must="come with one tensor for query_offset and key_offset",
                    got="two",
                    fix="pass the same tensor where the lengths are the same; a window over "
                    "unequal sides is in gem_attention.ops.generalized_attention",
                )
            )
        out = generalized_attention_varlen_func(
            query,
            key,
            value,
            cu_seqlens_q=query_offset,
            cu_seqlens_k=key_offset,
            max_seqlen_q=max_seq_len_q,
            max_seqlen_k=max_seq_len_kv,
            activation=names,
            scale=1.0,
            window_size=(window_size, window_size),
        )
    if qk_scale is not None and qk_scale != 1.0:
        out = out * qk_scale
    if output_offset is None or output_offset is query_offset:
        return out
    begins = query_offset
    if broadcast_q:
        begins = torch.arange(key_offset.shape[0], device=query.device) * query.shape[0]
    return _moved(out, begins, output_offset)


def _names(
    activation: str, numbers: Sequence[int] | None, heads: int
) -> GdpaActivation | tuple[GdpaActivation, ...]:
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(
            refusal(
                _NAME,
                "activation",
                must=f"be one of {', '.join(_ACTIVATIONS)}",
                got=repr(activation),
                fix="softmax is gem_attention.flash_compat.flash_attn_varlen_func",
            )
        )
    if numbers is None or len(numbers) == 0:
        return _ACTIVATIONS[activation]
    for number in numbers:
        if not isinstance(number, int) or not 0 <= number < len(_BY_NUMBER):
            raise UnsupportedError(
                refusal(
                    _NAME,
                    "ensemble_activation_list",
                    must=f"hold numbers from 0 to {len(_BY_NUMBER) - 1}",
                    got=repr(number),
                    fix=f"they count {', '.join(_ACTIVATIONS)}",
                )
            )
    named: tuple[GdpaActivation, ...] = tuple(_BY_NUMBER[number] for number in numbers[:heads])
    return named + (_ACTIVATIONS[activation],) * (heads - len(named))


def _pool(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_offset: Tensor,
    names: GdpaActivation | tuple[GdpaActivation, ...],
    max_seq_len_kv: int,
    window_size: int | None,
) -> Tensor:
    if window_size is not None:
        raise UnsupportedError(
            refusal(
                _NAME,
                "window_size",
                must="be None with broadcast_q",
                got=window_size,
                fix="queries that all sequences share have no place among the keys",
            )
        )
    out_BPHV = pooled_attention_varlen_func(
        query,
        key,
        value,
        cu_seqlens_k=key_offset,
        max_seqlen_k=max_seq_len_kv,
        activation=names,
        softmax_scale=1.0,
    )
    return out_BPHV.flatten(0, 1)


def _moved(out: Tensor, begins: Tensor, output_offset: Tensor) -> Tensor:
    """Move each sequence of the output to its row of ``output_offset``; other rows are 0."""
    if output_offset.shape != begins.shape:
        raise ShapeError(
            refusal(
                _NAME,
                "output_offset",
                must=f"have {begins.shape[0]} offsets",
                got=tuple(output_offset.shape),
                fix="give the first row of each sequence and the end",
            )
        )
    rows = torch.arange(out.shape[0], device=out.device)
    begins, output_offset = begins.to(torch.int64), output_offset.to(torch.int64)
    sequence = torch.searchsorted(begins, rows, right=True) - 1
    # Rows behind the last sequence go to one more row, which is cut off.
    sequence_or_last = sequence.clamp(0, begins.shape[0] - 2)
    target = output_offset[sequence_or_last] + rows - begins[sequence_or_last]
    target = torch.where(sequence < begins.shape[0] - 1, target, out.shape[0])
    moved = out.new_zeros((out.shape[0] + 1, *out.shape[1:]))
    return moved.index_copy(0, target, out)[:-1]
