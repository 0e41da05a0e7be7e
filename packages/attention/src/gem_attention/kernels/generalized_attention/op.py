"""The operator ``generalized_attention``: schema, fakes, autograd, FLOP formulas, function."""

from typing import Any

import torch
from torch import Tensor

from gem_attention.checks import (
    check_activation,
    check_autograd,
    check_batches,
    check_can_count,
    check_dtypes,
    check_heads,
    check_layout,
    check_scale,
    check_window,
    refuse_second_derivative,
)
from gem_attention.contract import GdpaActivation
from gem_attention.kernels.generalized_attention.cost import (
    generalized_attention_backward_cost,
    generalized_attention_cost,
)
from gem_attention.kernels.generalized_attention.reference import (
    generalized_attention_backward_reference,
    generalized_attention_reference,
)
from gem_attention.patterns import visible_pairs as count_visible_pairs
from gem_jagged.batch import Layout
from gem_opkit.cost import Cost, register_flops
from gem_opkit.dims import check_shapes
from gem_opkit.impl import Impl, resolve_impl

_NAME = "generalized_attention"
_HAS_TRITON = False


# Lengths are CPU tensors whatever the device of the others: grids and plans come from them.
# activations: one name for all heads, or one a head, joined by commas.
@torch.library.custom_op("gem_attention::generalized_attention", mutates_args=())
def _forward(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    q_lengths_B: Tensor,
    k_lengths_B: Tensor,
    activations: str,
    left_tokens: int | None,
    right_tokens: int | None,
    scale: float,
    visible_pairs: int,
    impl: str,
) -> Tensor:
    resolve_impl(impl, q_THK.device, _NAME, has_triton=_HAS_TRITON)
    return generalized_attention_reference(
        q_THK,
        k_SGK,
        v_SGV,
        q_lengths_B,
        k_lengths_B,
        tuple(activations.split(",")),
        (left_tokens, right_tokens),
        scale,
    )


@_forward.register_fake
def _(q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *_: Any) -> Tensor:
    return q_THK.new_empty((q_THK.shape[0], q_THK.shape[1], v_SGV.shape[2]))


@torch.library.custom_op("gem_attention::generalized_attention_backward", mutates_args=())
def _backward(
    grad_out_THV: Tensor,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    q_lengths_B: Tensor,
    k_lengths_B: Tensor,
    activations: str,
    left_tokens: int | None,
    right_tokens: int | None,
    scale: float,
    visible_pairs: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    resolve_impl(impl, q_THK.device, _NAME, has_triton=_HAS_TRITON)
    return generalized_attention_backward_reference(
        grad_out_THV,
        q_THK,
        k_SGK,
        v_SGV,
        q_lengths_B,
        k_lengths_B,
        tuple(activations.split(",")),
        (left_tokens, right_tokens),
        scale,
    )


@_backward.register_fake
def _(
    grad_out_THV: Tensor, q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q_THK.new_empty(q_THK.shape),
        k_SGK.new_empty(k_SGK.shape),
        v_SGV.new_empty(v_SGV.shape),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.rest = inputs[7:]


def _differentiate(ctx: Any, grad_out_THV: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.gem_attention.generalized_attention_backward(
        grad_out_THV, *ctx.saved_tensors, *ctx.rest
    )
    return (*gradients, *([None] * 10))


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(refuse_second_derivative(_NAME))


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
    return generalized_attention_cost(**_sizes(q_THK, k_SGK, v_SGV, visible_pairs=rest[-2]))


def _backward_cost(
    _grad_out: Tensor, q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *rest: Any
) -> Cost:
    sizes = _sizes(q_THK, k_SGK, v_SGV, visible_pairs=rest[-2])
    return generalized_attention_backward_cost(**sizes)


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def generalized_attention(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_layout: Layout,
    k_layout: Layout,
    *,
    activation: GdpaActivation | tuple[GdpaActivation, ...] = "gelu",
    scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    visible_pairs: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Attend within each sequence with an elementwise activation in place of softmax (GDPA).

        out[t] = Σ_s f(scale · q[t]·k[s]) v[s],   s in the same sequence and in the window

    Args:
        q_THK: queries, float32, float64, bfloat16 or float16, any strides.
        k_SGK: keys, same dtype; query head h reads key head h // (H / G), and G divides H.
        v_SGV: values, same dtype.
        q_layout: where each sequence's queries begin. Rows behind its last sequence get 0.
        k_layout: where its keys begin; for self-attention the same as ``q_layout``.
        activation: gelu, fast_gelu (its tanh form), taylor_gelu, relu, relu_squared, leaky_relu,
            silu, hard_swish or identity; or a tuple with one name for each query head.
            taylor_gelu is valid only for scaled scores in [-1.25, 1.25].
        scale: factor of the scores; None for 1/sqrt(K).
        window: keys visible left and right of the query's place, at least 0; None for all. Query
            i of Lq stands at key i + Lk - Lq, so the last query stands at the last key.
        visible_pairs: pairs of query and key that see each other, for the FLOP count; None counts
            them from host lengths. Inside ``torch.compile`` it must be given.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        out_THV in the dtype of q; a query that sees no key gets 0.

    Raises:
        ShapeError: shapes, heads, layouts, a window or a tuple that do not fit together.
        DtypeError, DeviceError: operands of different or unknown dtypes, or devices; a scale or a
            layout of another type.
        ConfigError: a scale that is not finite.
        UnsupportedError: an unknown activation, an ``impl`` that cannot run here, uncounted pairs
            in a graph, and what ``jagged_flash_attention`` refuses of differentiation.

    Numerics: computes and sums in float32 (float64 for float64), rounds once. The reference on a
        CPU gives the same bits in every run with the same number of threads. What is not finite
        in a key or value spoils its own sequence, hidden by the window or not, and no other.
    Cost: 2·H·pairs·(K + V) FLOPs forward and 2·H·pairs·(3K + 2V) backward; no T×S matrix in
        memory.
    Source: Meta's GEM kernels article and its open GDPA kernels for definition and activations.
    """
    sizes = check_shapes(_NAME, q_THK=q_THK, k_SGK=k_SGK, v_SGV=v_SGV)
    check_heads(_NAME, sizes)
    check_dtypes(_NAME, q_THK=q_THK, k_SGK=k_SGK, v_SGV=v_SGV)
    check_autograd(_NAME, q_THK=q_THK, k_SGK=k_SGK, v_SGV=v_SGV)
    check_layout(_NAME, q_THK, q_layout, name="q_THK", layout_name="q_layout")
    check_layout(_NAME, k_SGK, k_layout, name="k_SGK", layout_name="k_layout")
    check_batches(_NAME, q_layout, k_layout)
    activations = check_activation(_NAME, activation, q_THK.shape[1])
    left_tokens, right_tokens = check_window(_NAME, window)
    if visible_pairs is None:
        check_can_count(_NAME)
        visible_pairs = count_visible_pairs(
            q_layout.lengths, k_layout.lengths, left_tokens, right_tokens
        )
    return torch.ops.gem_attention.generalized_attention(
        q_THK,
        k_SGK,
        v_SGV,
        q_layout.offsets_O,
        k_layout.offsets_O,
        q_layout.lengths,
        k_layout.lengths,
        activations,
        left_tokens,
        right_tokens,
        check_scale(_NAME, scale, q_THK.shape[2]),
        visible_pairs,
        resolve_impl(impl, q_THK.device, _NAME, has_triton=_HAS_TRITON),
    )
