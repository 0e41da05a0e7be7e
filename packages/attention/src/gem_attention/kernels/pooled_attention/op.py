"""The operator ``pooled_attention``: schema, fakes, autograd, FLOP formulas, function."""

from typing import Any, Literal

import torch
from torch import Tensor

from gem_attention.checks import (
    check_activation,
    check_autograd,
    check_dtypes,
    check_heads,
    check_layout,
    check_scale,
    refuse_second_derivative,
)
from gem_attention.contract import GdpaActivation
from gem_attention.kernels.pooled_attention.cost import (
    pooled_attention_backward_cost,
    pooled_attention_cost,
)
from gem_attention.kernels.pooled_attention.reference import (
    pooled_attention_backward_reference,
    pooled_attention_reference,
)
from gem_jagged.batch import Layout
from gem_opkit.cost import Cost, register_flops
from gem_opkit.dims import check_shapes
from gem_opkit.impl import Impl, resolve_impl

_NAME = "pooled_attention"
_HAS_TRITON = False


def _per_head(activations: str) -> tuple[str, ...] | None:
    return None if activations == "softmax" else tuple(activations.split(","))


# Lengths are a CPU tensor whatever the device of the others: grids and plans come from them.
# activations: "softmax", or one name for all heads or one a head, joined by commas.
# k_tokens: keys of all sequences.
@torch.library.custom_op("gem_attention::pooled_attention", mutates_args=())
def _forward(
    seeds_PHK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    k_offsets_O: Tensor,
    k_lengths_B: Tensor,
    activations: str,
    scale: float,
    k_tokens: int,
    impl: str,
) -> Tensor:
    resolve_impl(impl, seeds_PHK.device, _NAME, has_triton=_HAS_TRITON)
    return pooled_attention_reference(
        seeds_PHK, k_SGK, v_SGV, k_lengths_B, _per_head(activations), scale
    )


@_forward.register_fake
def _(seeds_PHK: Tensor, k_SGK: Tensor, v_SGV: Tensor, k_offsets_O: Tensor, *_: Any) -> Tensor:
    seeds, heads, _width = seeds_PHK.shape
    return seeds_PHK.new_empty((k_offsets_O.shape[0] - 1, seeds, heads, v_SGV.shape[2]))


@torch.library.custom_op("gem_attention::pooled_attention_backward", mutates_args=())
def _backward(
    grad_out_BPHV: Tensor,
    seeds_PHK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_BPHV: Tensor,
    k_offsets_O: Tensor,
    k_lengths_B: Tensor,
    activations: str,
    scale: float,
    k_tokens: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    resolve_impl(impl, seeds_PHK.device, _NAME, has_triton=_HAS_TRITON)
    return pooled_attention_backward_reference(
        grad_out_BPHV,
        seeds_PHK,
        k_SGK,
        v_SGV,
        out_BPHV,
        k_lengths_B,
        _per_head(activations),
        scale,
    )


@_backward.register_fake
def _(
    grad_out_BPHV: Tensor, seeds_PHK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        seeds_PHK.new_empty(seeds_PHK.shape),
        k_SGK.new_empty(k_SGK.shape),
        v_SGV.new_empty(v_SGV.shape),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3], output, *inputs[3:5])
    ctx.rest = inputs[5:]


def _differentiate(ctx: Any, grad_out_BPHV: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.gem_attention.pooled_attention_backward(
        grad_out_BPHV, *ctx.saved_tensors, *ctx.rest
    )
    return (*gradients, *([None] * 6))


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(refuse_second_derivative(_NAME))


def _sizes(
    seeds_PHK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *, batch: int, k_tokens: int
) -> dict[str, int]:
    return {
        "batch": batch,
        "seeds": seeds_PHK.shape[0],
        "k_tokens": k_tokens,
        "heads": seeds_PHK.shape[1],
        "kv_heads": k_SGK.shape[1],
        "head_width": seeds_PHK.shape[2],
        "value_width": v_SGV.shape[2],
        "element_bytes": seeds_PHK.element_size(),
    }


def _forward_cost(seeds_PHK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *rest: Any) -> Cost:
    sizes = _sizes(seeds_PHK, k_SGK, v_SGV, batch=rest[1].shape[0], k_tokens=rest[-2])
    return pooled_attention_cost(**sizes)


def _backward_cost(
    grad_out_BPHV: Tensor, seeds_PHK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *rest: Any
) -> Cost:
    batch = grad_out_BPHV.shape[0]
    sizes = _sizes(seeds_PHK, k_SGK, v_SGV, batch=batch, k_tokens=rest[-2])
    return pooled_attention_backward_cost(**sizes)


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def pooled_attention(
    seeds_PHK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    k_layout: Layout,
    *,
    activation: Literal["softmax"] | GdpaActivation | tuple[GdpaActivation, ...] = "softmax",
    scale: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Pool each sequence with the same queries, the seeds.

        out[b, p] = Σ_s w_s v[s],   w = softmax_s(scale · seeds[p]·k[s]) or f of it,   s in b

    Args:
        seeds_PHK: queries of every sequence, float32, float64, bfloat16 or float16, any strides.
        k_SGK: keys, same dtype; query head h reads key head h // (H / G), and G divides H.
        v_SGV: values, same dtype.
        k_layout: where each sequence's keys begin. Rows behind its last sequence are not read.
        activation: softmax, or an activation of ``generalized_attention``, or a tuple of these
            with one name for each query head.
        scale: factor of the scores; None for 1/sqrt(K).
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        out_BPHV in the dtype of the seeds; 0 for an empty sequence. The gradient of the seeds is
        summed over the batch.

    Raises:
        ShapeError: shapes, heads, a layout or a tuple that do not fit together.
        DtypeError, DeviceError: operands of different or unknown dtypes, or devices; a scale or a
            layout of another type.
        ConfigError: a scale that is not finite.
        UnsupportedError: an unknown activation, an ``impl`` that cannot run here, and what
            ``jagged_flash_attention`` refuses of differentiation.

    Numerics: computes and sums in float32 (float64 for float64), rounds once. The reference on a
        CPU gives the same bits in every run with the same number of threads.
    Cost: 2·H·P·S·(K + V) FLOPs forward and 2·H·P·S·(3K + 2V) backward.
    Source: Lee et al. 2019 (arXiv:1810.00825); Meta's GEM training article for shared seeds.
    """
    sizes = check_shapes(_NAME, seeds_PHK=seeds_PHK, k_SGK=k_SGK, v_SGV=v_SGV)
    check_heads(_NAME, sizes)
    check_dtypes(_NAME, seeds_PHK=seeds_PHK, k_SGK=k_SGK, v_SGV=v_SGV)
    check_autograd(_NAME, seeds_PHK=seeds_PHK, k_SGK=k_SGK, v_SGV=v_SGV)
    check_layout(_NAME, k_SGK, k_layout, name="k_SGK", layout_name="k_layout")
    if activation == "softmax":
        activations = "softmax"
    else:
        activations = check_activation(_NAME, activation, seeds_PHK.shape[1])
    return torch.ops.gem_attention.pooled_attention(
        seeds_PHK,
        k_SGK,
        v_SGV,
        k_layout.offsets_O,
        k_layout.lengths,
        activations,
        check_scale(_NAME, scale, seeds_PHK.shape[2]),
        k_layout.total_tokens,
        resolve_impl(impl, seeds_PHK.device, _NAME, has_triton=_HAS_TRITON),
    )
