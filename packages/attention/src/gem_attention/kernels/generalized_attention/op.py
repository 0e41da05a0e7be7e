"""The operator ``generalized_attention``: schema, fakes, autograd, FLOP formulas, function."""

import logging
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gem_attention.checks import (
    check_activation,
    check_batches,
    check_can_count,
    check_dtypes,
    check_heads,
    check_layout,
    check_scale,
    check_window,
    refuse_second_derivative,
)
from gem_attention.choosing import (
    bounded_sides,
    choose_implementation,
    demand_lengths,
    readable_rows,
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
from gem_attention.tiles import Window
from gem_attention.tiling.sizes import short_rows
from gem_jagged.batch import Layout
from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.impl import Impl

_NAME = "generalized_attention"
_log = logging.getLogger(__name__)
_announced: set[tuple[Any, ...]] = set()


# Lengths are CPU tensors whatever the device of the others, for the reference; the kernels follow
# the offsets alone, and where only these are known the lengths are None.
# activations: one name for all heads, or one a head, joined by commas.
@torch.library.custom_op("gem_attention::generalized_attention", mutates_args=())
def _forward(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    q_lengths_B: Tensor | None,
    k_lengths_B: Tensor | None,
    activations: str,
    left_tokens: int | None,
    right_tokens: int | None,
    scale: float,
    deterministic: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    visible_pairs: int,
    impl: str,
) -> Tensor:
    window = (left_tokens, right_tokens)
    if choose_implementation(_NAME, impl, q_THK, v_SGV) == "triton":
        operands = tuple(map(readable_rows, (q_THK, k_SGK, v_SGV)))
        window = bounded_sides(window)
        batch = q_offsets_O.shape[0] - 1
        kernels = _kernels(
            *operands,
            batch=batch,
            window=window,
            deterministic=False,
            activations=activations,
            backward=False,
        )
        return kernels.launch_forward(
            *operands,
            q_offsets_O.contiguous(),
            k_offsets_O.contiguous(),
            window=window,
            scale=scale,
            activations=activations,
        )
    q_lengths_B, k_lengths_B = demand_lengths(_NAME, q_lengths_B, k_lengths_B)
    return generalized_attention_reference(
        q_THK,
        k_SGK,
        v_SGV,
        q_lengths_B,
        k_lengths_B,
        tuple(activations.split(",")),
        window,
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
    q_lengths_B: Tensor | None,
    k_lengths_B: Tensor | None,
    activations: str,
    left_tokens: int | None,
    right_tokens: int | None,
    scale: float,
    deterministic: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    visible_pairs: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    window = (left_tokens, right_tokens)
    if choose_implementation(_NAME, impl, q_THK, v_SGV) == "triton":
        operands = tuple(map(readable_rows, (q_THK, k_SGK, v_SGV)))
        window = bounded_sides(window)
        batch = q_offsets_O.shape[0] - 1
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        kernels = _kernels(
            *operands,
            batch=batch,
            window=window,
            deterministic=deterministic,
            activations=activations,
            backward=True,
        )
        return kernels.launch_backward(
            readable_rows(grad_out_THV),
            *operands,
            q_offsets_O.contiguous(),
            k_offsets_O.contiguous(),
            window=window,
            scale=scale,
            activations=activations,
            deterministic=deterministic,
        )
    q_lengths_B, k_lengths_B = demand_lengths(_NAME, q_lengths_B, k_lengths_B)
    return generalized_attention_backward_reference(
        grad_out_THV,
        q_THK,
        k_SGK,
        v_SGV,
        q_lengths_B,
        k_lengths_B,
        tuple(activations.split(",")),
        window,
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


def _kernels(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    *,
    batch: int,
    window: Window,
    deterministic: bool,
    activations: str,
    backward: bool,
) -> ModuleType:
    """Return the module whose launchers run, and say once which it is."""
    from gem_attention.kernels.generalized_attention import kernel

    chosen = kernel
    # Few queries over many keys are bound by memory, where the plain kernels lack nothing.
    width = max(q_THK.shape[2], v_SGV.shape[2])
    few = short_rows(q_THK.shape[0], batch, width=width) == 32
    if q_THK.is_cuda and not (few and window == (None, None)):
        from gem_attention.kernels.generalized_attention import kernel_sm90

        if kernel_sm90.supports(
            q_THK,
            k_SGK,
            v_SGV,
            window=window,
            deterministic=deterministic,
            activations=activations,
            batch=batch,
            backward=backward,
        ):
            chosen = kernel_sm90
    key = (chosen.__name__, q_THK.device.type, q_THK.dtype, q_THK.shape[2], v_SGV.shape[2])
    if key not in _announced:
        _announced.add(key)
        name = chosen.__name__.rpartition(".")[2]
        _log.info("%s: %s runs on %s for %s, K=%d, V=%d", _NAME, name, *key[1:])
    return chosen


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.rest = inputs[7:]


def _differentiate(ctx: Any, grad_out_THV: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.gem_attention.generalized_attention_backward(
        grad_out_THV, *ctx.saved_tensors, *ctx.rest
    )
    return (*gradients, *([None] * 11))


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
    deterministic: bool = False,
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
        deterministic: take a backward whose bits are the same in every run, also where a faster
            one exists; ``torch.use_deterministic_algorithms`` asks for the same.
        visible_pairs: pairs of query and key that see each other, for the FLOP count; None counts
            them from host lengths. Inside ``torch.compile`` it must be given.
        impl: who computes it; see ``gem_opkit.impl``. The kernels take float32, bfloat16 and
            float16 and widths up to 256; ``auto`` gives the rest to the reference.

    Returns:
        out_THV in the dtype of q; a query that sees no key gets 0.

    Raises:
        ShapeError: shapes, heads, layouts, a window or a tuple that do not fit together.
        DtypeError, DeviceError: operands of different or unknown dtypes, or devices; a scale or a
            layout of another type.
        ConfigError: a scale that is not finite.
        UnsupportedError: an unknown activation, an ``impl`` that cannot run here, uncounted pairs
            in a graph, and what ``jagged_flash_attention`` refuses of differentiation.

    Numerics: scores, weights and sums in float32 (float64 for float64). The kernels round weights
        and their gradients to the dtype of q before the second product, float32 not at all (no
        TF32); the reference rounds once, at the end. For bfloat16 and float16 on NVIDIA GPUs the
        weights of silu, gelu and fast_gelu are off by up to |x|·2⁻¹², where x is the scaled score,
        because the tanh in them is the hardware's. Forward bits are the same in every run, those
        of the backward with ``deterministic``; of the reference on a CPU always, with the same
        number of threads. What is not finite in a key or value may spoil its own sequence, hidden
        by the window or not, and no other.
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
    return generalized_attention_by_offsets(
        q_THK,
        k_SGK,
        v_SGV,
        (q_layout.offsets_O, k_layout.offsets_O),
        (q_layout.lengths, k_layout.lengths),
        activations=activations,
        window=(left_tokens, right_tokens),
        scale=check_scale(_NAME, scale, q_THK.shape[2]),
        deterministic=deterministic,
        visible_pairs=visible_pairs,
        impl=choose_implementation(_NAME, impl, q_THK, v_SGV),
    )


def generalized_attention_by_offsets(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    offsets: tuple[Tensor, Tensor],
    lengths: tuple[Tensor, Tensor] | None,
    *,
    activations: str,
    window: Window,
    scale: float,
    deterministic: bool,
    visible_pairs: int,
    impl: str,
) -> Tensor:
    """Call the operator with operands that were checked; ``flash_compat`` has no host lengths.

    Args:
        q_THK: as in ``generalized_attention``.
        k_SGK: as there.
        v_SGV: as there.
        offsets: of queries and keys.
        lengths: of queries and keys in host memory; None where only the offsets are known.
        activations: what ``check_activation`` returned.
        window: as there.
        scale: factor of the scores, a finite number.
        deterministic: as there.
        visible_pairs: as there.
        impl: what ``choose_implementation`` returned.

    Returns:
        out_THV.
    """
    return torch.ops.gem_attention.generalized_attention(
        q_THK,
        k_SGK,
        v_SGV,
        *offsets,
        *(lengths or (None, None)),
        activations,
        *window,
        scale,
        deterministic,
        visible_pairs,
        impl,
    )
