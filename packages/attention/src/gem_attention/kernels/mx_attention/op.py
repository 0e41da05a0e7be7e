"""The operator ``mx_attention``: schema, fakes, autograd, FLOP formulas, functions."""

from typing import Any, Literal, get_args

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
from gem_attention.choosing import (
    bounded_sides,
    choose_implementation,
    demand_lengths,
    readable_rows,
)
from gem_attention.kernels.mx_attention.cost import mx_attention_backward_cost, mx_attention_cost
from gem_attention.kernels.mx_attention.reference import (
    mx_attention_backward_reference,
    mx_attention_reference,
)
from gem_attention.patterns import visible_pairs as count_visible_pairs
from gem_jagged.batch import Layout
from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.errors import ConfigError, DtypeError, UnsupportedError, refusal
from gem_opkit.impl import Impl
from gem_precision.contract import MxScaling
from gem_precision.hadamard import random_hadamard

_NAME = "mx_attention"
_ROTATED = 32  # columns that a random Hadamard matrix mixes: those of a block
Way = Literal["native", "emulated", "reference"]


def _as_written(like: Tensor) -> torch.autocast:
    """Keep autocast, which reaches into operators, from products that are in fp32."""
    return torch.autocast(like.device.type, enabled=False)


@torch.library.custom_op("gem_attention::mx_attention", mutates_args=())
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
    scaling: str,
    seed: int | None,
    visible_pairs: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    window = (left_tokens, right_tokens)
    if choose_implementation(_NAME, impl, q_THK, v_SGV) == "triton":
        from gem_attention.kernels.mx_attention.kernel import launch_forward

        operands = (readable_rows(q_THK), readable_rows(k_SGK), readable_rows(v_SGV))
        offsets = (q_offsets_O.contiguous(), k_offsets_O.contiguous())
        return launch_forward(operands, offsets, bounded_sides(window), scale, scaling=scaling)
    lengths = demand_lengths(_NAME, q_lengths_B, k_lengths_B)
    with _as_written(q_THK):
        return mx_attention_reference(
            q_THK, k_SGK, v_SGV, lengths[0], lengths[1], window, scale, scaling=scaling
        )


@_forward.register_fake
def _(q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads = q_THK.shape[:2]
    return (
        q_THK.new_empty((tokens, heads, v_SGV.shape[2])),
        q_THK.new_empty((tokens, heads), dtype=torch.float32),
    )


@torch.library.custom_op("gem_attention::mx_attention_backward", mutates_args=())
def _backward(
    grad_out_THV: Tensor,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_THV: Tensor,
    lse2_TH: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    q_lengths_B: Tensor | None,
    k_lengths_B: Tensor | None,
    left_tokens: int | None,
    right_tokens: int | None,
    scale: float,
    scaling: str,
    seed: int | None,
    visible_pairs: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    window = (left_tokens, right_tokens)
    if choose_implementation(_NAME, impl, q_THK, v_SGV) == "triton":
        from gem_attention.kernels.mx_attention.kernel import launch_backward

        return launch_backward(
            readable_rows(grad_out_THV),
            (readable_rows(q_THK), readable_rows(k_SGK), readable_rows(v_SGV)),
            (out_THV, lse2_TH),
            (q_offsets_O.contiguous(), k_offsets_O.contiguous()),
            bounded_sides(window),
            scale,
            scaling=scaling,
            seed=seed,
        )
    lengths = demand_lengths(_NAME, q_lengths_B, k_lengths_B)
    with _as_written(q_THK):
        return mx_attention_backward_reference(
            grad_out_THV,
            q_THK,
            k_SGK,
            v_SGV,
            out_THV,
            lse2_TH,
            lengths[0],
            lengths[1],
            window,
            scale,
            scaling=scaling,
            seed=seed,
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


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:7])
    ctx.rest = inputs[7:]


def _differentiate(
    ctx: Any, grad_out_THV: Tensor | None, _grad_lse2: Tensor | None
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if grad_out_THV is None:
        grad_out_THV = torch.zeros_like(saved[3])
    gradients = torch.ops.gem_attention.mx_attention_backward(grad_out_THV, *saved, *ctx.rest)
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
    return mx_attention_cost(**_sizes(q_THK, k_SGK, v_SGV, visible_pairs=rest[-2]))


def _backward_cost(
    _grad_out: Tensor, q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *rest: Any
) -> Cost:
    return mx_attention_backward_cost(**_sizes(q_THK, k_SGK, v_SGV, visible_pairs=rest[-2]))


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def mx_attention(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_layout: Layout,
    k_layout: Layout | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    scaling: MxScaling = "mxfp8_rceil",
    seed: int | None = None,
    hadamard_seed: int | None = None,
    visible_pairs: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Attend within each sequence of a packed batch, all products in MXFP8.

        out[t] = Σ_s softmax_s(scale · Q(q[t])·Q(k[s])) Q(v[s]),   with Q on the softmax, too

    Args:
        q_THK: queries, fp32, bf16 or fp16, any strides.
        k_SGK: keys, same dtype; query head h reads key head h // (H / G), and G divides H.
        v_SGV: values, same dtype.
        q_layout: where each sequence's queries begin. Rows behind its last sequence get 0.
        k_layout: where its keys begin; None for self-attention.
        causal: a query sees nothing after its own place; the same as a window of (None, 0).
        window: keys visible left and right of the query's place, as in ``jagged_flash_attention``.
        scale: factor of the scores; None for 1/sqrt(K).
        scaling: ``"mxfp8_rceil"`` or ``"mxfp8_floor"``, as ``gem_precision.ops.mx_quantize``.
        seed: 63 bits from which the gradients of out and of the scores are rounded up or down by
            chance, so that each is right on average; None rounds to the nearest.
        hadamard_seed: rotate queries and keys, and values, by a random Hadamard matrix of 32
            columns before they are rounded, and the output back; None does not. It needs widths
            that are multiples of 32.
        visible_pairs: pairs of query and key that see each other, for the FLOP count; None counts
            them from host lengths. Inside ``torch.compile`` it must be given.
        impl: who computes it; see ``gem_opkit.impl``. ``mx_attention_way`` says whether a GPU
            computes natively or emulates.

    Returns:
        out_THV in the dtype of q. A query that sees no key gets 0.

    Raises:
        ShapeError, DtypeError, DeviceError: operands that do not fit together, or fp64, which would
            be rounded twice.
        ConfigError: a scale that is not finite, an unknown scaling, a seed out of range.
        UnsupportedError: an ``impl`` that cannot run here, uncounted pairs in a graph, a second
            backward, tangents of forward mode and the gradient transforms of ``torch.func``.

    Numerics: docs/numerics.md: blocks of 32 along the dim that each product sums over, E4M3, sums
        in fp32. A block with NaN or an infinity is NaN: loud in its own sequence, and in no other.
        The same bits in every run, forward and backward.
    Cost: as ``jagged_flash_attention``; each operand is read once more to be rounded. Where it is
        emulated it is slower than attention in bf16.
    Source: Meta's GEM training article for MXFP8 in attention, forward and backward; Mishra et al.
        2025 (arXiv:2506.08027) for E4M3 in gradients.
    """
    if k_layout is None:
        k_layout = q_layout
    sizes = check_shapes(_NAME, q_THK=q_THK, k_SGK=k_SGK, v_SGV=v_SGV)
    check_heads(_NAME, sizes)
    check_dtypes(_NAME, q_THK=q_THK, k_SGK=k_SGK, v_SGV=v_SGV)
    if q_THK.dtype == torch.float64:
        raise DtypeError(
            refusal(_NAME, "q_THK", must="be fp32, bf16 or fp16", got=q_THK.dtype,
                    fix="use jagged_flash_attention, which computes in fp64")
        )  # fmt: skip
    check_autograd(_NAME, q_THK=q_THK, k_SGK=k_SGK, v_SGV=v_SGV)
    check_layout(_NAME, q_THK, q_layout, name="q_THK", layout_name="q_layout")
    check_layout(_NAME, k_SGK, k_layout, name="k_SGK", layout_name="k_layout")
    check_batches(_NAME, q_layout, k_layout)
    left_tokens, right_tokens = check_window(_NAME, window, causal=causal)
    if scaling not in get_args(MxScaling):
        known = ", ".join(get_args(MxScaling))
        raise ConfigError(
            refusal(_NAME, "scaling", must=f"be one of {known}", got=scaling,
                    fix="take one of these")
        )  # fmt: skip
    for name, given in (("seed", seed), ("hadamard_seed", hadamard_seed)):
        if given is not None and not 0 <= given < 2**63:
            raise ConfigError(
                refusal(_NAME, name, must="be in [0, 2^63)", got=given, fix="draw it from there")
            )
    if visible_pairs is None:
        check_can_count(_NAME)
        visible_pairs = count_visible_pairs(
            q_layout.lengths, k_layout.lengths, left_tokens, right_tokens
        )
    score_scale = check_scale(_NAME, scale, q_THK.shape[2])
    if hadamard_seed is not None:
        q_THK, k_SGK, v_SGV = (
            random_hadamard(x, seed=hadamard_seed, block=_ROTATED) for x in (q_THK, k_SGK, v_SGV)
        )
    out_THV, _ = torch.ops.gem_attention.mx_attention(
        q_THK,
        k_SGK,
        v_SGV,
        q_layout.offsets_O,
        k_layout.offsets_O,
        q_layout.lengths,
        k_layout.lengths,
        left_tokens,
        right_tokens,
        score_scale,
        scaling,
        seed,
        visible_pairs,
        choose_implementation(_NAME, impl, q_THK, v_SGV),
    )
    if hadamard_seed is not None:
        out_THV = random_hadamard(out_THV, seed=hadamard_seed, block=_ROTATED, inverse=True)
    return out_THV


def mx_attention_way(device: torch.device | str) -> Way:
    """Say how a device computes attention in MXFP8 where nobody asks for an ``impl``.

    Args:
        device: a CPU or a GPU.

    Returns:
        ``"native"``: tensor cores multiply the bytes with their scales (compute capability 10.x);
        ``"emulated"``: kernels multiply the numbers that the bytes mean, in bf16, slower than
        attention in bf16; ``"reference"``: plain torch.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return "reference"
    from gem_attention.kernels.mx_attention.kernel import is_native

    return "native" if is_native(device) else "emulated"


def demand_native(device: torch.device | str) -> None:
    """Refuse a device on which attention in MXFP8 is emulated, so that its times say nothing.

    Args:
        device: where something is to be timed.

    Raises:
        UnsupportedError: tensor cores without MXFP8; the alternative is named.
    """
    way = mx_attention_way(device)
    if way != "native":
        raise UnsupportedError(
            refusal(
                _NAME,
                "device",
                must="multiply MXFP8 in its tensor cores (compute capability 10.x) to be timed",
                got=f"{device}, where it is {way}",
                fix="time jagged_flash_attention; the numbers of MXFP8 are right here",
            )
        )
