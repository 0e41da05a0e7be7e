"""The operator ``jagged_flash_attention``: schema, fakes, autograd, FLOP formulas, function."""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from gem_attention.checks import (
    check_batches,
    check_can_count,
    check_dtypes,
    check_heads,
    check_layout,
    check_window,
)
from gem_attention.kernels.jagged_flash_attention.cost import (
    jagged_flash_attention_backward_cost,
    jagged_flash_attention_cost,
)
from gem_attention.kernels.jagged_flash_attention.reference import (
    jagged_flash_attention_backward_reference,
    jagged_flash_attention_reference,
)
from gem_attention.patterns import visible_pairs as count_visible_pairs
from gem_jagged.batch import Layout
from gem_opkit.cost import Cost, register_flops
from gem_opkit.dims import check_shapes
from gem_opkit.impl import Impl, resolve_impl

_NAME = "jagged_flash_attention"
_HAS_TRITON = False


# Lengths are CPU tensors whatever the device of the others: grids and plans come from them.
@torch.library.custom_op("gem_attention::jagged_flash_attention", mutates_args=())
def _forward(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    q_lengths_B: Tensor,
    k_lengths_B: Tensor,
    left_tokens: int | None,
    right_tokens: int | None,
    scale: float,
    return_lse: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    visible_pairs: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    resolve_impl(impl, q_THK.device, _NAME, has_triton=_HAS_TRITON)
    return jagged_flash_attention_reference(
        q_THK,
        k_SGK,
        v_SGV,
        q_lengths_B,
        k_lengths_B,
        (left_tokens, right_tokens),
        scale,
        with_lse=return_lse,
    )


@_forward.register_fake
def _(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    q_lengths_B: Tensor,
    k_lengths_B: Tensor,
    left_tokens: int | None,
    right_tokens: int | None,
    scale: float,
    return_lse: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    visible_pairs: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q_THK.shape
    wide = torch.float64 if q_THK.dtype == torch.float64 else torch.float32
    return (
        q_THK.new_empty((tokens, heads, v_SGV.shape[2])),
        q_THK.new_empty((tokens if return_lse else 0, heads), dtype=wide),
    )


@torch.library.custom_op("gem_attention::jagged_flash_attention_backward", mutates_args=())
def _backward(
    grad_out_THV: Tensor,
    grad_lse_TH: Tensor | None,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    q_lengths_B: Tensor,
    k_lengths_B: Tensor,
    left_tokens: int | None,
    right_tokens: int | None,
    scale: float,
    visible_pairs: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    resolve_impl(impl, q_THK.device, _NAME, has_triton=_HAS_TRITON)
    return jagged_flash_attention_backward_reference(
        grad_out_THV,
        grad_lse_TH,
        q_THK,
        k_SGK,
        v_SGV,
        out_THV,
        q_lengths_B,
        k_lengths_B,
        (left_tokens, right_tokens),
        scale,
    )


@_backward.register_fake
def _(
    grad_out_THV: Tensor,
    grad_lse_TH: Tensor | None,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q_THK.new_empty(q_THK.shape),
        k_SGK.new_empty(k_SGK.shape),
        v_SGV.new_empty(v_SGV.shape),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    # An unused logsumexp then sends None, and the backward skips its part.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:7])
    left_tokens, right_tokens, scale, ctx.has_lse, visible_pairs, impl = inputs[7:]
    ctx.rest = (left_tokens, right_tokens, scale, visible_pairs, impl)


def _differentiate(
    ctx: Any, grad_out_THV: Tensor | None, grad_lse_TH: Tensor | None
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if grad_out_THV is None:
        grad_out_THV = torch.zeros_like(saved[3])
    if not ctx.has_lse:  # it has no rows then
        grad_lse_TH = None
    gradients = torch.ops.gem_attention.jagged_flash_attention_backward(
        grad_out_THV, grad_lse_TH, *saved, *ctx.rest
    )
    return (*gradients, *([None] * 10))


_forward.register_autograd(_differentiate, setup_context=_save)


def _sizes(q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *, visible_pairs: int) -> dict[str, int]:
    return {
        "visible_pairs": visible_pairs,
        "q_tokens": q_THK.shape[0],
        "k_tokens": k_SGK.shape[0],
        "heads": q_THK.shape[1],
        "kv_heads": k_SGK.shape[1],
        "head_width": q_THK.shape[2],
        "value_width": v_SGV.shape[2],
        "element_bytes": q_THK.element_size(),
    }


def _forward_cost(q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *rest: Any) -> Cost:
    return jagged_flash_attention_cost(**_sizes(q_THK, k_SGK, v_SGV, visible_pairs=rest[-2]))


def _backward_cost(
    _grad_out: Tensor, _grad_lse: Any, q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *rest: Any
) -> Cost:
    sizes = _sizes(q_THK, k_SGK, v_SGV, visible_pairs=rest[-2])
    return jagged_flash_attention_backward_cost(**sizes)


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


@overload
def jagged_flash_attention(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_layout: Layout,
    k_layout: Layout | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    return_lse: Literal[False] = False,
    visible_pairs: int | None = None,
    impl: Impl = "auto",
) -> Tensor: ...


@overload
def jagged_flash_attention(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_layout: Layout,
    k_layout: Layout | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    return_lse: Literal[True],
    visible_pairs: int | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]: ...


def jagged_flash_attention(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_layout: Layout,
    k_layout: Layout | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    return_lse: bool = False,
    visible_pairs: int | None = None,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend within each sequence of a packed batch.

        out[t] = Σ_s softmax_s(scale · q[t]·k[s]) v[s],   s in the same sequence and in the window

    Args:
        q_THK: queries, float32, float64, bfloat16 or float16, any strides.
        k_SGK: keys, same dtype; query head h reads key head h // (H / G), and G divides H.
        v_SGV: values, same dtype.
        q_layout: where each sequence's queries begin. Rows behind its last sequence get 0.
        k_layout: where its keys begin; None for self-attention.
        causal: a query sees nothing after its own place; the same as a window of (None, 0).
        window: keys visible left and right of the query's place, at least 0; None for all. Query
            i of Lq stands at key i + Lk - Lq, so the last query stands at the last key.
        scale: factor of the scores; None for 1/sqrt(K).
        return_lse: also return the logsumexp of each row's scaled scores.
        visible_pairs: pairs of query and key that see each other, for the FLOP count; None counts
            them from host lengths. Inside ``torch.compile`` it must be given.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        out_THV in the dtype of q, and with ``return_lse`` lse_TH in float32 (float64 for
        float64), differentiable too. A query that sees no key gets 0 and -inf.

    Raises:
        ShapeError: shapes, heads, layouts or a window that do not fit together.
        DtypeError, DeviceError: operands of different or unknown dtypes, or devices.
        UnsupportedError: an ``impl`` that cannot run here, or uncounted pairs in a graph.

    Numerics: computes and sums in float32 (float64 for float64), rounds once. The reference on a
        CPU gives the same bits in every run with the same number of threads. What is not finite
        in a key or value spoils its own sequence, hidden by the window or not, and no other.
    Cost: 2·H·pairs·(K + V) FLOPs forward and 2·H·pairs·(3K + 2V) backward; no T×S matrix in
        memory.
    Source: Dao 2023 (arXiv:2307.08691) for keeping only the logsumexp; Meta's GEM training
        article for jagged batches.
    """
    if k_layout is None:
        k_layout = q_layout
    sizes = check_shapes(_NAME, q_THK=q_THK, k_SGK=k_SGK, v_SGV=v_SGV)
    check_heads(_NAME, sizes)
    check_dtypes(_NAME, q_THK=q_THK, k_SGK=k_SGK, v_SGV=v_SGV)
    check_layout(_NAME, q_THK, q_layout, name="q_THK", layout_name="q_layout")
    check_layout(_NAME, k_SGK, k_layout, name="k_SGK", layout_name="k_layout")
    check_batches(_NAME, q_layout, k_layout)
    left_tokens, right_tokens = check_window(_NAME, window, causal=causal)
    if visible_pairs is None:
        check_can_count(_NAME)
        visible_pairs = count_visible_pairs(
            q_layout.lengths, k_layout.lengths, left_tokens, right_tokens
        )
    out_THV, lse_TH = torch.ops.gem_attention.jagged_flash_attention(
        q_THK,
        k_SGK,
        v_SGV,
        q_layout.offsets_O,
        k_layout.offsets_O,
        q_layout.lengths,
        k_layout.lengths,
        left_tokens,
        right_tokens,
        q_THK.shape[2] ** -0.5 if scale is None else float(scale),
        return_lse,
        visible_pairs,
        resolve_impl(impl, q_THK.device, _NAME, has_triton=_HAS_TRITON),
    )
    return (out_THV, lse_TH) if return_lse else out_THV
