"""The operator ``block_attention``: schema, fakes, autograd, FLOP formulas, function."""

from typing import Any

import torch
from torch import Tensor

from gem_attention.checks import (
    check_autograd,
    check_can_count,
    check_dtypes,
    check_heads,
    check_layout,
    check_scale,
    refuse_second_derivative,
)
from gem_attention.kernels.block_attention.cost import (
    block_attention_backward_cost,
    block_attention_cost,
)
from gem_attention.kernels.block_attention.reference import (
    block_attention_backward_reference,
    block_attention_reference,
)
from gem_attention.patterns import visible_pairs_block
from gem_jagged.batch import Layout
from gem_opkit.cost import Cost, register_flops
from gem_opkit.dims import check_shapes
from gem_opkit.errors import ShapeError, refusal
from gem_opkit.impl import Impl, resolve_impl

_NAME = "block_attention"
_HAS_TRITON = False


# Lengths are a CPU tensor whatever the device of the others: grids and plans come from them.
@torch.library.custom_op("gem_attention::block_attention", mutates_args=())
def _forward(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    offsets_O: Tensor,
    lengths_B: Tensor,
    block_tokens: int,
    scale: float,
    visible_pairs: int,
    impl: str,
) -> Tensor:
    resolve_impl(impl, q_THK.device, _NAME, has_triton=_HAS_TRITON)
    return block_attention_reference(q_THK, k_TGK, v_TGV, lengths_B, block_tokens, scale)


@_forward.register_fake
def _(q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, *_: Any) -> Tensor:
    return q_THK.new_empty((q_THK.shape[0], q_THK.shape[1], v_TGV.shape[2]))


@torch.library.custom_op("gem_attention::block_attention_backward", mutates_args=())
def _backward(
    grad_out_THV: Tensor,
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    out_THV: Tensor,
    offsets_O: Tensor,
    lengths_B: Tensor,
    block_tokens: int,
    scale: float,
    visible_pairs: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    resolve_impl(impl, q_THK.device, _NAME, has_triton=_HAS_TRITON)
    return block_attention_backward_reference(
        grad_out_THV, q_THK, k_TGK, v_TGV, out_THV, lengths_B, block_tokens, scale
    )


@_backward.register_fake
def _(
    grad_out_THV: Tensor, q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q_THK.new_empty(q_THK.shape),
        k_TGK.new_empty(k_TGK.shape),
        v_TGV.new_empty(v_TGV.shape),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3], output, *inputs[3:5])
    ctx.rest = inputs[5:]


def _differentiate(ctx: Any, grad_out_THV: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.gem_attention.block_attention_backward(
        grad_out_THV, *ctx.saved_tensors, *ctx.rest
    )
    return (*gradients, *([None] * 6))


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(refuse_second_derivative(_NAME))


def _sizes(q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, *, visible_pairs: int) -> dict[str, int]:
    return {
        "visible_pairs": visible_pairs,
        "tokens": q_THK.shape[0],
        "heads": q_THK.shape[1],
        "kv_heads": k_TGK.shape[1],
        "head_width": q_THK.shape[2],
        "value_width": v_TGV.shape[2],
        "element_bytes": q_THK.element_size(),
    }


def _forward_cost(q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, *rest: Any) -> Cost:
    return block_attention_cost(**_sizes(q_THK, k_TGK, v_TGV, visible_pairs=rest[-2]))


def _backward_cost(
    _grad_out: Tensor, q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, *rest: Any
) -> Cost:
    return block_attention_backward_cost(**_sizes(q_THK, k_TGK, v_TGV, visible_pairs=rest[-2]))


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def block_attention(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    layout: Layout,
    *,
    block_tokens: int = 64,
    scale: float | None = None,
    visible_pairs: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Attend within blocks of fixed length of each sequence.

        out[t] = Σ_s softmax_s(scale · q[t]·k[s]) v[s],   s in the same block of the same sequence

    Blocks are counted from the first token of a sequence; the last one may be shorter.

    Args:
        q_THK: queries, float32, float64, bfloat16 or float16, any strides.
        k_TGK: keys, same dtype; query head h reads key head h // (H / G), and G divides H.
        v_TGV: values, same dtype.
        layout: where each sequence begins. Rows behind its last sequence get 0.
        block_tokens: length of a block, above 0.
        scale: factor of the scores; None for 1/sqrt(K).
        visible_pairs: pairs of tokens that share a block, for the FLOP count; None counts them
            from host lengths. Inside ``torch.compile`` it must be given.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        out_THV in the dtype of q.

    Raises:
        ShapeError: shapes, heads, a layout or a block length that do not fit together.
        DtypeError, DeviceError: operands of different or unknown dtypes, or devices; a scale or a
            layout of another type.
        ConfigError: a scale that is not finite.
        UnsupportedError: an ``impl`` that cannot run here, uncounted pairs in a graph, and what
            ``jagged_flash_attention`` refuses of differentiation.

    Numerics: computes and sums in float32 (float64 for float64), rounds once. The reference on a
        CPU gives the same bits in every run with the same number of threads.
    Cost: 2·H·pairs·(K + V) FLOPs forward and 2·H·pairs·(3K + 2V) backward, with at most
        ``block_tokens`` pairs a token.
    Source: Meta's GEM kernels article (block attention).
    """
    sizes = check_shapes(_NAME, q_THK=q_THK, k_TGK=k_TGK, v_TGV=v_TGV)
    check_heads(_NAME, sizes)
    check_dtypes(_NAME, q_THK=q_THK, k_TGK=k_TGK, v_TGV=v_TGV)
    check_autograd(_NAME, q_THK=q_THK, k_TGK=k_TGK, v_TGV=v_TGV)
    check_layout(_NAME, q_THK, layout, name="q_THK", layout_name="layout")
    if block_tokens <= 0:
        raise ShapeError(
            refusal(_NAME, "block_tokens", must="be above 0", got=block_tokens, fix="64 is usual")
        )
    if visible_pairs is None:
        check_can_count(_NAME)
        visible_pairs = visible_pairs_block(layout.lengths, block_tokens)
    return torch.ops.gem_attention.block_attention(
        q_THK,
        k_TGK,
        v_TGV,
        layout.offsets_O,
        layout.lengths,
        block_tokens,
        check_scale(_NAME, scale, q_THK.shape[2]),
        visible_pairs,
        resolve_impl(impl, q_THK.device, _NAME, has_triton=_HAS_TRITON),
    )
