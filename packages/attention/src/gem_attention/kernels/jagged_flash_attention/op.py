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
    check_scale,
    check_window,
    refuse_second_derivative,
)
from gem_attention.choosing import choose_implementation, demand_lengths
from gem_attention.kernels.jagged_flash_attention.cost import (
    jagged_flash_attention_backward_cost,
    jagged_flash_attention_cost,
)
from gem_attention.kernels.jagged_flash_attention.reference import (
    jagged_flash_attention_backward_reference,
    jagged_flash_attention_reference,
)
from gem_attention.patterns import visible_pairs as count_visible_pairs
from gem_attention.rooms import has_room, open_room
from gem_attention.softmax_dispatch import launch_backward, launch_forward, writes_into
from gem_attention.tiles import Window
from gem_jagged.batch import Layout
from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.impl import Impl

_NAME = "jagged_flash_attention"


# Lengths are CPU tensors whatever the device of the others, for the reference; the kernels follow
# the offsets alone, and where only these are known the lengths are None.
@torch.library.custom_op("gem_attention::jagged_flash_attention", mutates_args=())
def _forward(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    q_lengths_B: Tensor | None,
    k_lengths_B: Tensor | None,
    left_tokens: int | None,
    right_tokens: int | None,
    scale: float,
    return_lse: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    deterministic: bool,  # noqa: FBT001
    visible_pairs: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    window = (left_tokens, right_tokens)
    if choose_implementation(_NAME, impl, q_THK, v_SGV) == "triton":
        return launch_forward((q_THK, k_SGK, v_SGV), (q_offsets_O, k_offsets_O), window, scale)
    q_lengths_B, k_lengths_B = demand_lengths(_NAME, q_lengths_B, k_lengths_B)
    return jagged_flash_attention_reference(
        q_THK,
        k_SGK,
        v_SGV,
        q_lengths_B,
        k_lengths_B,
        window,
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
    q_lengths_B: Tensor | None,
    k_lengths_B: Tensor | None,
    left_tokens: int | None,
    right_tokens: int | None,
    scale: float,
    return_lse: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    deterministic: bool,  # noqa: FBT001
    visible_pairs: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q_THK.shape
    wide = torch.float64 if q_THK.dtype == torch.float64 else torch.float32
    # The backward of the kernels needs it, asked for or not; the reference computes it anew.
    has_lse = return_lse or choose_implementation(_NAME, impl, q_THK, v_SGV) == "triton"
    return (
        q_THK.new_empty((tokens, heads, v_SGV.shape[2])),
        q_THK.new_empty((tokens if has_lse else 0, heads), dtype=wide),
    )


def _gradients(
    grad_out_THV: Tensor,
    grad_lse_TH: Tensor | None,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    q_lengths_B: Tensor | None,
    k_lengths_B: Tensor | None,
    left_tokens: int | None,
    right_tokens: int | None,
    scale: float,
    deterministic: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    visible_pairs: int,
    impl: str,
    grad_v_SGV: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate; where ``grad_v_SGV`` is given, the kernels may write the gradient there."""
    window = (left_tokens, right_tokens)
    if choose_implementation(_NAME, impl, q_THK, v_SGV) == "triton":
        return launch_backward(
            (grad_out_THV, grad_lse_TH),
            (q_THK, k_SGK, v_SGV),
            (out_THV, lse_TH),
            (q_offsets_O, k_offsets_O),
            window,
            scale,
            deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
            grad_v_SGV=grad_v_SGV,
        )
    q_lengths_B, k_lengths_B = demand_lengths(_NAME, q_lengths_B, k_lengths_B)
    return jagged_flash_attention_backward_reference(
        grad_out_THV,
        grad_lse_TH,
        q_THK,
        k_SGK,
        v_SGV,
        out_THV,
        q_lengths_B,
        k_lengths_B,
        window,
        scale,
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
    q_lengths_B: Tensor | None,
    k_lengths_B: Tensor | None,
    left_tokens: int | None,
    right_tokens: int | None,
    scale: float,
    deterministic: bool,  # noqa: FBT001
    visible_pairs: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(
        *(grad_out_THV, grad_lse_TH, q_THK, k_SGK, v_SGV, out_THV, lse_TH),
        *(q_offsets_O, k_offsets_O, q_lengths_B, k_lengths_B, left_tokens, right_tokens),
        *(scale, deterministic, visible_pairs, impl),
    )


@torch.library.custom_op(
    "gem_attention::jagged_flash_attention_backward_into", mutates_args=("grad_v_SGV",)
)
def _backward_into(
    grad_v_SGV: Tensor,
    grad_out_THV: Tensor,
    grad_lse_TH: Tensor | None,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    q_lengths_B: Tensor | None,
    k_lengths_B: Tensor | None,
    left_tokens: int | None,
    right_tokens: int | None,
    scale: float,
    deterministic: bool,  # noqa: FBT001
    visible_pairs: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    grad_q_THK, grad_k_SGK, made_SGV = _gradients(
        *(grad_out_THV, grad_lse_TH, q_THK, k_SGK, v_SGV, out_THV, lse_TH),
        *(q_offsets_O, k_offsets_O, q_lengths_B, k_lengths_B, left_tokens, right_tokens),
        *(scale, deterministic, visible_pairs, impl),
        grad_v_SGV=grad_v_SGV,
    )
    if made_SGV is not grad_v_SGV:
        grad_v_SGV.copy_(made_SGV)
    return grad_q_THK, grad_k_SGK


@_backward_into.register_fake
def _(
    grad_v_SGV: Tensor,
    grad_out_THV: Tensor,
    grad_lse_TH: Tensor | None,
    q_THK: Tensor,
    k_SGK: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    return q_THK.new_empty(q_THK.shape), k_SGK.new_empty(k_SGK.shape)


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


def _writes_into(
    q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor, q_offsets_O: Tensor, *rest: Any
) -> bool:
    """Tell whether a room serves: copying into it here is slower than where it is found."""
    left_tokens, right_tokens, _, deterministic, _, impl = rest
    if choose_implementation(_NAME, impl, q_THK, v_SGV) != "triton":
        return True
    return writes_into(
        (q_THK, k_SGK, v_SGV),
        q_offsets_O.shape[0] - 1,
        (left_tokens, right_tokens),
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    # An unused logsumexp then sends None, and the backward skips its part.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:7])
    left_tokens, right_tokens, scale, ctx.has_lse, *others = inputs[7:]
    ctx.rest = (left_tokens, right_tokens, scale, *others)


def _differentiate(
    ctx: Any, grad_out_THV: Tensor | None, grad_lse_TH: Tensor | None
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if grad_out_THV is None:
        grad_out_THV = torch.zeros_like(saved[3])
    if not ctx.has_lse:  # then it is not the caller's
        grad_lse_TH = None
    given = (grad_out_THV, grad_lse_TH, *saved, *ctx.rest)
    wanted = has_room(saved[2]) and _writes_into(*saved[:3], saved[5], *ctx.rest)
    grad_v_SGV = open_room(saved[2]) if wanted else None
    if grad_v_SGV is None:
        gradients = torch.ops.gem_attention.jagged_flash_attention_backward(*given)
    else:
        into = torch.ops.gem_attention.jagged_flash_attention_backward_into
        gradients = (*into(grad_v_SGV, *given), grad_v_SGV)
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
    return jagged_flash_attention_cost(**_sizes(q_THK, k_SGK, v_SGV, visible_pairs=rest[-2]))


def _backward_cost(
    _grad_out: Tensor, _grad_lse: Any, q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *rest: Any
) -> Cost:
    sizes = _sizes(q_THK, k_SGK, v_SGV, visible_pairs=rest[-2])
    return jagged_flash_attention_backward_cost(**sizes)


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)
register_flops(_backward_into, lambda _grad_v, *rest: _backward_cost(*rest))


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
    deterministic: bool = False,
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
    deterministic: bool = False,
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
    deterministic: bool = False,
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
        deterministic: take a backward whose bits are the same in every run, also where a faster
            one exists; ``torch.use_deterministic_algorithms`` asks for the same.
        visible_pairs: pairs of query and key that see each other, for the FLOP count; None counts
            them from host lengths. Inside ``torch.compile`` it must be given.
        impl: who computes it; see ``gem_opkit.impl``. The kernels take float32, bfloat16 and
            float16 and widths up to 256; ``auto`` gives the rest to the reference.

    Returns:
        out_THV in the dtype of q, and with ``return_lse`` lse_TH in float32 (float64 for
        float64), differentiable too. A query that sees no key gets 0 and -inf.

    Raises:
        ShapeError: shapes, heads, layouts or a window that do not fit together.
        DtypeError, DeviceError: operands of different or unknown dtypes, or devices; a scale or a
            layout of another type.
        ConfigError: a scale that is not finite.
        UnsupportedError: an ``impl`` that cannot run here, uncounted pairs in a graph, a second
            backward, tangents of forward mode and the gradient transforms of ``torch.func``.

    Numerics: scores, softmax and sums in float32 (float64 for float64). The kernels round
        probabilities and their gradients to the dtype of q before the second product, float32
        not at all (no TF32); the reference rounds once, at the end. Forward bits are the same in
        every run, those of the backward with ``deterministic``; of the reference on a CPU always,
        with the same number of threads. What is not finite in a key or value may spoil its own
        sequence, hidden by the window or not, and no other.
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
    check_autograd(_NAME, q_THK=q_THK, k_SGK=k_SGK, v_SGV=v_SGV)
    check_layout(_NAME, q_THK, q_layout, name="q_THK", layout_name="q_layout")
    check_layout(_NAME, k_SGK, k_layout, name="k_SGK", layout_name="k_layout")
    check_batches(_NAME, q_layout, k_layout)
    left_tokens, right_tokens = check_window(_NAME, window, causal=causal)
    if visible_pairs is None:
        check_can_count(_NAME)
        visible_pairs = count_visible_pairs(
            q_layout.lengths, k_layout.lengths, left_tokens, right_tokens
        )
    out_THV, lse_TH = jagged_flash_attention_by_offsets(
        q_THK,
        k_SGK,
        v_SGV,
        (q_layout.offsets_O, k_layout.offsets_O),
        (q_layout.lengths, k_layout.lengths),
        window=(left_tokens, right_tokens),
        scale=check_scale(_NAME, scale, q_THK.shape[2]),
        return_lse=return_lse,
        deterministic=deterministic,
        visible_pairs=visible_pairs,
        impl=choose_implementation(_NAME, impl, q_THK, v_SGV),
    )
    return (out_THV, lse_TH) if return_lse else out_THV


def jagged_flash_attention_by_offsets(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    offsets: tuple[Tensor, Tensor],
    lengths: tuple[Tensor, Tensor] | None,
    *,
    window: Window,
    scale: float,
    return_lse: bool,
    deterministic: bool,
    visible_pairs: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Call the operator with operands that were checked; ``flash_compat`` has no host lengths.

    Args:
        q_THK: as in ``jagged_flash_attention``.
        k_SGK: as there.
        v_SGV: as there.
        offsets: of queries and keys.
        lengths: of queries and keys in host memory; None where only the offsets are known.
        window: as there, ``causal`` worked in.
        scale: factor of the scores, a finite number.
        return_lse: as there.
        deterministic: as there.
        visible_pairs: as there.
        impl: what ``choose_implementation`` returned.

    Returns:
        out_THV and lse_TH; the latter is the caller's only with ``return_lse``.
    """
    return torch.ops.gem_attention.jagged_flash_attention(
        q_THK,
        k_SGK,
        v_SGV,
        *offsets,
        *(lengths or (None, None)),
        *window,
        scale,
        return_lse,
        deterministic,
        visible_pairs,
        impl,
    )
