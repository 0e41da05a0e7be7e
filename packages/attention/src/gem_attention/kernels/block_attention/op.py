"""The operator ``block_attention``: schema, fakes, autograd, FLOP formulas, function."""

import logging
from types import ModuleType
from typing import Any, get_args

import torch
from torch import Tensor

from gem_attention.checks import (
    check_can_count,
    check_dtypes,
    check_heads,
    check_layout,
    check_scale,
    refuse_second_derivative,
)
from gem_attention.choosing import choose_implementation, readable_rows
from gem_attention.contract import Rotary
from gem_attention.kernels.block_attention.cost import (
    block_attention_backward_cost,
    block_attention_cost,
)
from gem_attention.kernels.block_attention.reference import (
    block_angles,
    block_attention_backward_reference,
    block_attention_reference,
)
from gem_attention.patterns import visible_pairs_block
from gem_attention.rotary import check_gaps, turn_rates
from gem_attention.tiling.sizes import block_columns
from gem_jagged.batch import Layout
from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.errors import ConfigError, ShapeError, UnsupportedError, refusal
from gem_opkit.impl import Impl, resolve_impl

_NAME = "block_attention"
# Most tokens of a block that a program of the kernels holds.
_MOST_TOKENS = 128
_log = logging.getLogger(__name__)
_announced: set[tuple[Any, ...]] = set()


def _choose(impl: str, q_THK: Tensor, v_TGV: Tensor, block_tokens: int) -> str:
    """Resolve ``impl``; what the kernels do not take is refused, or goes to the reference."""
    # Asked before anything is resolved, because the log says what is resolved.
    wanted = impl == "triton" or (impl == "auto" and q_THK.is_cuda)
    if not wanted or _takes(q_THK, v_TGV, block_tokens):
        return choose_implementation(_NAME, impl, q_THK, v_TGV)
    if impl == "triton":
        raise UnsupportedError(
            refusal(
                _NAME,
                'impl="triton"',
                must=f"have blocks of at most {_MOST_TOKENS} tokens, and values as wide as keys "
                "where these are wider than a tile",
                got=f"blocks of {block_tokens}, K={q_THK.shape[2]}, V={v_TGV.shape[2]}",
                fix='use impl="reference"',
            )
        )
    return resolve_impl(impl, q_THK.device, _NAME, has_triton=False)


def _takes(q_THK: Tensor, v_TGV: Tensor, block_tokens: int) -> bool:
    """Say whether the kernels hold such a block."""
    if block_tokens > _MOST_TOKENS:
        return False
    single = q_THK.dtype == torch.float32
    widths = q_THK.shape[2], v_TGV.shape[2]
    return block_columns(*widths, block_tokens, single=single) is not None


def _kernels(q_THK: Tensor, *others: Tensor, block_tokens: int) -> ModuleType:
    """Return the module whose launchers run, and say once which it is."""
    from gem_attention.kernels.block_attention import kernel

    chosen = kernel
    if q_THK.is_cuda:
        from gem_attention.kernels.block_attention import kernel_sm90

        if kernel_sm90.supports(q_THK, *others, block_tokens=block_tokens):
            chosen = kernel_sm90
    key = (chosen.__name__, len(others), q_THK.dtype, q_THK.shape[2], block_tokens)
    if key not in _announced:
        _announced.add(key)
        direction = "backward" if len(others) > 2 else "forward"
        name = chosen.__name__.rpartition(".")[2]
        _log.info("%s: %s runs %s for %s, K=%d, blocks of %d", _NAME, name, direction, *key[2:])
    return chosen


# Lengths are a CPU tensor whatever the device of the others, for the reference; the kernels follow
# the offsets alone.
# rates: turn of each pair by place in the block and by log gap (2, K/2); None for no rotation.
@torch.library.custom_op("gem_attention::block_attention", mutates_args=())
def _forward(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    offsets_O: Tensor,
    lengths_B: Tensor,
    rates: Tensor | None,
    log_gap_T: Tensor | None,
    block_tokens: int,
    scale: float,
    visible_pairs: int,
    impl: str,
) -> Tensor:
    if _choose(impl, q_THK, v_TGV, block_tokens) == "triton":
        operands = [readable_rows(x) for x in (q_THK, k_TGK, v_TGV)]
        return _kernels(*operands, block_tokens=block_tokens).launch_forward(
            *operands,
            offsets_O.contiguous(),
            rates,
            log_gap_T,
            block_tokens=block_tokens,
            scale=scale,
        )
    angles = _angles(rates, log_gap_T, offsets_O, q_THK, block_tokens)
    return block_attention_reference(q_THK, k_TGK, v_TGV, lengths_B, block_tokens, scale, angles)


def _angles(
    rates: Tensor | None,
    log_gap_T: Tensor | None,
    offsets_O: Tensor,
    q_THK: Tensor,
    block_tokens: int,
) -> tuple[Tensor, Tensor] | None:
    if rates is None:
        return None
    return block_angles(rates, log_gap_T, offsets_O, q_THK.shape[0], block_tokens)


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
    rates: Tensor | None,
    log_gap_T: Tensor | None,
    block_tokens: int,
    scale: float,
    visible_pairs: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if _choose(impl, q_THK, v_TGV, block_tokens) == "triton":
        operands = [readable_rows(x) for x in (q_THK, k_TGK, v_TGV, grad_out_THV)]
        q_THK, k_TGK, v_TGV, grad_out_THV = operands
        return _kernels(*operands, block_tokens=block_tokens).launch_backward(
            grad_out_THV,
            q_THK,
            k_TGK,
            v_TGV,
            offsets_O.contiguous(),
            rates,
            log_gap_T,
            block_tokens=block_tokens,
            scale=scale,
        )
    angles = _angles(rates, log_gap_T, offsets_O, q_THK, block_tokens)
    return block_attention_backward_reference(
        grad_out_THV, q_THK, k_TGK, v_TGV, out_THV, lengths_B, block_tokens, scale, angles
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
    ctx.save_for_backward(*inputs[:3], output, *inputs[3:7])
    ctx.rest = inputs[7:]


def _differentiate(ctx: Any, grad_out_THV: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.gem_attention.block_attention_backward(
        grad_out_THV, *ctx.saved_tensors, *ctx.rest
    )
    return (*gradients, *([None] * 8))


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
    rotary: Rotary = "none",
    gap_seconds_T: Tensor | None = None,
    rote_time_scale_s: float = 60.0,
    visible_pairs: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Attend within blocks of fixed length of each sequence.

        out[t] = Σ_s softmax_s(scale · q'[t]·k'[s]) v[s],   s in the same block of the same sequence

    Blocks are counted from the first token of a sequence; the last one may be shorter. q' and k'
    are q and k, or their rotations by ``rotary_angles`` or ``rote_angles``. Scores depend on
    differences of angles alone, so the place in the block stands for the place in the sequence.

    Args:
        q_THK: queries, float32, float64, bfloat16 or float16, any strides.
        k_TGK: keys, same dtype; query head h reads key head h // (H / G), and G divides H.
        v_TGV: values, same dtype.
        layout: where each sequence begins. Rows behind its last sequence get 0.
        block_tokens: length of a block, above 0.
        scale: factor of the scores; None for 1/sqrt(K).
        rotary: turn q and k inside: "none", by "position", or by position and log gap ("rote"); K
            is then even.
        gap_seconds_T: seconds from each event to the request, at least 0; for "rote", and only
            then. No gradient goes there.
        rote_time_scale_s: gaps well below it hardly turn, above 0.
        visible_pairs: pairs of tokens that share a block, for the FLOP count; None counts them
            from host lengths. Inside ``torch.compile`` it must be given.
        impl: who computes it; see ``gem_opkit.impl``. The kernels take blocks of up to 128
            tokens, float32, bfloat16 and float16 and widths up to 256, above 128 (float32: 64; with
            blocks above 64 tokens 16) values as wide as keys; ``auto`` gives the rest to the
            reference.

    Returns:
        out_THV in the dtype of q.

    Raises:
        ShapeError: shapes, heads, a layout or a block length that do not fit together.
        DtypeError, DeviceError: operands of different or unknown dtypes, or devices; a scale or a
            layout of another type.
        ConfigError: a scale that is not finite; gaps without "rote", or "rote" without gaps; an
            unknown rotation.
        UnsupportedError: an ``impl`` that cannot run here, uncounted pairs in a graph, and what
            ``jagged_flash_attention`` refuses of differentiation.

    Numerics: scores, softmax, rotations and sums in float32 (float64 for float64). The kernels
        round rotated queries and keys, probabilities and their gradients to the dtype of q before
        a product, float32 not at all (no TF32), and gradients after they are turned back; the
        reference rounds once, at the end. Bits are the same in every run, of the reference on a
        CPU with the same number of threads. What is not finite spoils its own block alone.
    Cost: 2·H·pairs·(K + V) FLOPs forward and 2·H·pairs·(3K + 2V) backward, with at most
        ``block_tokens`` pairs a token. Bytes bound the kernels: q, k, v and the output; backward q,
        k, v, the gradient of the output and three gradients. No logsumexp and no angles are kept.
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
    rates, log_gap_T = _turns(q_THK, rotary, gap_seconds_T, rote_time_scale_s)
    if visible_pairs is None:
        check_can_count(_NAME)
        visible_pairs = visible_pairs_block(layout.lengths, block_tokens)
    return torch.ops.gem_attention.block_attention(
        q_THK,
        k_TGK,
        v_TGV,
        layout.offsets_O,
        layout.lengths,
        rates,
        log_gap_T,
        block_tokens,
        check_scale(_NAME, scale, q_THK.shape[2]),
        visible_pairs,
        _choose(impl, q_THK, v_TGV, block_tokens),
    )


def _turns(
    q_THK: Tensor, rotary: str, gap_seconds_T: Tensor | None, time_scale_s: float
) -> tuple[Tensor | None, Tensor | None]:
    """Check the rotation; return turn rates and log gaps, None where they have no part."""
    if rotary not in get_args(Rotary):
        raise ConfigError(
            refusal(
                _NAME,
                "rotary",
                must=f"be one of {', '.join(get_args(Rotary))}",
                got=repr(rotary),
                fix='use "position" if in doubt',
            )
        )
    if (rotary == "rote") != (gap_seconds_T is not None):
        raise ConfigError(
            refusal(
                _NAME,
                "gap_seconds_T",
                must='be given with rotary="rote", and only then',
                got=f"{'None' if gap_seconds_T is None else 'gaps'} with {rotary!r}",
                fix="change one of the two",
            )
        )
    if rotary == "none":
        return None, None
    wide = torch.float64 if q_THK.dtype == torch.float64 else torch.float32
    rates = turn_rates(_NAME, q_THK.shape[2], device=q_THK.device, dtype=wide)
    if gap_seconds_T is None:
        return rates, None
    check_shapes(_NAME, q_THK=q_THK, gap_seconds_T=gap_seconds_T)
    check_gaps(_NAME, gap_seconds_T, time_scale_s, like="q_THK", device=q_THK.device)
    return rates, torch.log1p(gap_seconds_T.to(wide) / time_scale_s)
