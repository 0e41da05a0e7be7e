"""What the layers share: keys and values from tokens, the operator that a spec asks for, checks."""

import torch
from torch import Tensor

from gem_attention.contract import AttentionSpec
from gem_attention.kernels.block_attention.op import block_attention
from gem_attention.kernels.generalized_attention.op import generalized_attention
from gem_attention.kernels.jagged_flash_attention.op import jagged_flash_attention
from gem_attention.kernels.mx_attention.op import mx_attention
from gem_attention.kernels.rotary_heads.op import rotary_heads
from gem_jagged.batch import Layout
from gem_opkit.errors import ConfigError, ShapeError, refusal
from gem_precision.contract import MxScaling
from gem_precision.layers import Projection
from gem_precision.norms import has_kernel, rms_normalize
from gem_precision.rounding import NEAREST, Rounding


def attend(  # noqa: PLR0913 - what the operators take
    spec: AttentionSpec,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_layout: Layout,
    k_layout: Layout,
    visible_pairs: int | None,
    *,
    gap_seconds_T: Tensor | None = None,
    product_format: MxScaling | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """Call the operator that the spec asks for; block attention rotates queries and keys itself.

    ``product_format`` and ``rounding`` are those of softmax attention in MXFP8, which
    ``gem_attention.recipes`` gives a layer.
    """
    if spec.pattern == "block":
        return block_attention(
            q_THK,
            k_SGK,
            v_SGV,
            q_layout,
            block_tokens=spec.block_tokens,
            scale=spec.score_scale,
            rotary=spec.rotary,
            gap_seconds_T=gap_seconds_T if spec.rotary == "rote" else None,
            rote_time_scale_s=spec.rote_time_scale_s,
            visible_pairs=visible_pairs,
        )
    if spec.activation != "softmax":
        return generalized_attention(
            q_THK,
            k_SGK,
            v_SGV,
            q_layout,
            k_layout,
            activation=spec.activation,
            scale=spec.score_scale,
            window=spec.window,
            visible_pairs=visible_pairs,
        )
    if product_format is not None:
        return mx_attention(
            q_THK,
            k_SGK,
            v_SGV,
            q_layout,
            k_layout,
            window=spec.window,
            scale=spec.score_scale,
            scaling=product_format,
            seed=rounding.seed(),
            hadamard_seed=rounding.hadamard_seed,
            visible_pairs=visible_pairs,
        )
    return jagged_flash_attention(
        q_THK,
        k_SGK,
        v_SGV,
        q_layout,
        k_layout,
        window=spec.window,
        scale=spec.score_scale,
        visible_pairs=visible_pairs,
    )


def keys_and_values(
    spec: AttentionSpec, kv: Projection, x_SD: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Project keys and values, (S, G, K) each; keys are normalised where the spec says so."""
    return split_keys_and_values(spec, kv(x_SD), layout)


def split_keys_and_values(
    spec: AttentionSpec, kv_SF: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Take keys and values, (S, G, K) each, out of their projection, as `keys_and_values` does."""
    both = kv_SF.view(kv_SF.shape[0], 2 * spec.key_heads, spec.head_dim)
    even = spec.head_dim % 2 == 0
    if spec.qk_norm and even and has_kernel(both) and both.dtype != torch.float64:
        # One gradient for the projection, written once; values stay where they are.
        _, k_SGK, v_SGV = rotary_heads(
            both,
            layout,
            heads=0,
            key_heads=spec.key_heads,
            rotary="none",
            copies_values=False,
        )
        return k_SGK, v_SGV
    k_SGK, v_SGV = both.split((spec.key_heads, spec.key_heads), dim=1)
    return (rms_normalize(k_SGK) if spec.qk_norm else k_SGK), v_SGV


def constant_layout(batch: int, count: int, like: Layout) -> Layout:
    """Return the layout of ``count`` tokens for each sequence, beside the offsets of ``like``."""
    offsets_O = like.offsets_O
    return Layout.constant(batch, count, device=offsets_O.device, dtype=offsets_O.dtype)


def check_full(op: str, spec: AttentionSpec, *, allowed: tuple[str, ...] = ("full",)) -> None:
    """Refuse a pattern that is not allowed, and rotations."""
    for name, value, good in (
        ("pattern", spec.pattern, allowed),
        ("rotary", spec.rotary, ("none",)),
    ):
        if value not in good:
            raise ConfigError(
                refusal(
                    op, name, must=f"be {' or '.join(good)}", got=value, fix="give it its own spec"
                )
            )


def check_batch(op: str, name: str, batch: int, layout: Layout) -> None:
    """Refuse what has not one row for each sequence."""
    if batch != layout.batch:
        raise ShapeError(
            refusal(
                op,
                name,
                must=f"have one row for each of the {layout.batch} sequences",
                got=batch,
                fix="pass the rows of the same examples",
            )
        )
