"""Attention layers: projections around the operators, as the published models use them.

No biases, norms without gains, queries and keys normalised by head unless the spec says
otherwise. A layer adds no residual and no outer norm except ``GdpaPffn``, whose fused dataflow
has both. Batches are packed; every layer takes empty sequences and empty batches.
"""

import torch
from torch import Tensor, nn

from gem_attention.contract import AttentionSpec
from gem_attention.kernels.normed_attention.op import normed_attention, normed_attention_takes
from gem_attention.kernels.rotary_heads.op import rotary_heads
from gem_attention.pooling import HierarchicalSeedPooling, PooledAttention, SumKronLinear
from gem_attention.projected import (
    attend,
    check_batch,
    check_full,
    constant_layout,
    keys_and_values,
)
from gem_attention.rotary import apply_rotary, rotary_angles, rote_angles
from gem_jagged.batch import Layout
from gem_jagged.offsets import positions
from gem_opkit.dims import check_shapes
from gem_opkit.errors import ConfigError, UnsupportedError, refusal
from gem_opkit.impl import Impl, resolve_impl
from gem_precision.contract import MxScaling
from gem_precision.layers import LayerNorm, Projection, RmsNorm
from gem_precision.norms import has_kernel, rms_normalize
from gem_precision.rounding import NEAREST, Rounding

__all__ = [
    "CrossAttention",
    "GdpaPffn",
    "HierarchicalSeedPooling",
    "PooledAttention",
    "SelfAttention",
    "SumKronLinear",
]


class SelfAttention(nn.Module):
    """Self-attention over packed sequences, in any pattern of the spec.

    Queries, keys and values are one projection; queries and keys are normalised by head and
    rotated; heads are joined by an output projection. No residual, no norm of the input.

    Args:
        model_width: width D of the tokens, above 0.
        spec: pattern, activation, heads, positions.

    Attributes:
        product_format: of the products of softmax attention, where one is set
            (``gem_attention.recipes``); None computes in the dtype of the tokens, or autocast's.
        rounding: of factors in MXFP8, where that is the format.

    Raises:
        UnsupportedError: pattern block with an activation in place of softmax.
    """

    product_format: MxScaling | None = None
    rounding: Rounding = NEAREST

    @property
    def draws_random(self) -> bool:
        """Whether a forward pass that learns draws from torch's generator."""
        return self.rounding.stochastic

    def __init__(self, model_width: int, spec: AttentionSpec) -> None:
        super().__init__()
        if spec.pattern == "block" and spec.activation != "softmax":
            raise UnsupportedError(
                refusal(
                    "SelfAttention",
                    "activation",
                    must="be softmax with pattern block",
                    got=spec.activation,
                    fix="use pattern window, or softmax",
                )
            )
        self.spec = spec
        self.qkv = Projection(model_width, (spec.heads + 2 * spec.key_heads) * spec.head_dim)
        self.out = Projection(spec.heads * spec.head_dim, model_width)

    def forward(
        self,
        x_TD: Tensor,
        layout: Layout,
        gap_seconds_T: Tensor | None = None,
        *,
        visible_pairs: int | None = None,
    ) -> Tensor:
        """Let the tokens of each sequence attend to each other.

        Args:
            x_TD: tokens.
            layout: where each sequence begins.
            gap_seconds_T: seconds from each event to the request; needed with rotary rote.
            visible_pairs: as in the operators; must be given inside ``torch.compile``.

        Returns:
            out_TD.

        Raises:
            ShapeError: tokens that do not fit the layout or the layer.
            ConfigError: rotary rote without time gaps.
        """
        check_shapes("SelfAttention", x_TD=x_TD, gap_seconds_T=gap_seconds_T)
        spec = self.spec
        both = spec.heads + spec.key_heads
        tokens = x_TD.shape[0]
        qkv = self.qkv(x_TD).view(tokens, both + spec.key_heads, spec.head_dim)
        qk, v_TGV = qkv.split((both, spec.key_heads), dim=1)
        if spec.rotary == "rote" and gap_seconds_T is None:
            raise ConfigError(
                refusal(
                    "SelfAttention",
                    "gap_seconds_T",
                    must='be given with rotary="rote"',
                    got=None,
                    fix='pass the time gaps, or use rotary="position"',
                )
            )
        if self._turns_in_one_pass(qkv):
            q_THK, k_TGK, v_TGV = rotary_heads(
                qkv,
                layout,
                heads=spec.heads,
                key_heads=spec.key_heads,
                normed=spec.qk_norm,
                rotary=spec.rotary,
                gap_seconds_T=gap_seconds_T if spec.rotary == "rote" else None,
                rote_time_scale_s=spec.rote_time_scale_s,
                copies_values=False,
            )
        else:
            # Queries and keys share the work of norm and rotation.
            if spec.qk_norm:
                qk = rms_normalize(qk)
            if spec.pattern != "block":  # block attention turns them itself
                qk = self._rotated(qk, layout, gap_seconds_T)
            q_THK, k_TGK = qk.split((spec.heads, spec.key_heads), dim=1)
        out_THV = attend(
            spec,
            q_THK,
            k_TGK,
            v_TGV,
            layout,
            layout,
            visible_pairs,
            gap_seconds_T=gap_seconds_T,
            product_format=self.product_format,
            rounding=self.rounding,
        )
        return self.out(out_THV.reshape(tokens, spec.heads * spec.head_dim))

    def _turns_in_one_pass(self, qkv: Tensor) -> bool:
        """Tell whether a kernel norms and turns the heads; on a CPU results keep their bits."""
        return (
            self.spec.pattern != "block"
            and (self.spec.qk_norm or self.spec.rotary != "none")
            and qkv.dtype != torch.float64
            and has_kernel(qkv)
        )

    def _rotated(self, qk: Tensor, layout: Layout, gap_seconds_T: Tensor | None) -> Tensor:
        spec = self.spec
        if spec.rotary == "none":
            return qk
        position_T = positions(layout.offsets_O, qk.shape[0])
        if spec.rotary == "position" or gap_seconds_T is None:
            cos, sin = rotary_angles(position_T, spec.head_dim)
        else:
            cos, sin = rote_angles(
                position_T, gap_seconds_T, spec.head_dim, time_scale_s=spec.rote_time_scale_s
            )
        return apply_rotary(qk, cos, sin)


class GdpaPffn(nn.Module):
    """Sequence tokens read a few context tokens without softmax, normalised and with residuals.

        q1 = LayerNorm(x)      a = f(scale · q1 Kᵀ) V + q1      out = RmsNorm(a) + x

    with K and V projections of the context. It takes the place of a feed-forward layer whose
    weights are made from the context. Queries are the tokens themselves, cut into heads, so the
    heads fill the model width; the norms run over the whole width, and the spec's qk_norm
    concerns the keys alone.

    Args:
        model_width: width D of the tokens; heads times head_dim.
        spec: an activation other than softmax, pattern full.
        context_width: width of the context tokens, above 0.
        impl: ``triton`` for norms, attention and residuals as one operator, ``normed_attention``,
            which refuses what its kernels do not take; ``reference`` for one operator after the
            other; ``auto`` for the first where a GPU's kernels take it. The choice is logged.

    Raises:
        ConfigError: heads that do not fill the model width, softmax, a pattern or a rotation.

    Source: Meta's article on norm fusion for the dataflow; the Kunlun article for keys and values
        made from the summary.
    """

    def __init__(
        self,
        model_width: int,
        spec: AttentionSpec,
        context_width: int,
        *,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        check_full("GdpaPffn", spec)
        if spec.activation == "softmax":
            raise ConfigError(
                refusal(
                    "GdpaPffn",
                    "activation",
                    must="be one of generalized attention",
                    got="softmax",
                    fix='use "gelu", or the layer CrossAttention',
                )
            )
        if spec.heads * spec.head_dim != model_width:
            raise ConfigError(
                refusal(
                    "GdpaPffn",
                    "model_width",
                    must=f"be heads times head_dim, {spec.heads * spec.head_dim}",
                    got=model_width,
                    fix="the tokens themselves are the queries",
                )
            )
        self.spec = spec
        self.impl = impl
        self.norm = LayerNorm(model_width)
        self.kv = Projection(context_width, 2 * spec.key_heads * spec.head_dim)
        self.out_norm = RmsNorm(model_width)

    def forward(self, x_TD: Tensor, layout: Layout, context_BND: Tensor) -> Tensor:
        """Read the context of each sequence's example.

        Args:
            x_TD: tokens.
            layout: where each sequence begins.
            context_BND: the same number of context tokens for each sequence, of context_width.

        Returns:
            out_TD.

        Raises:
            ShapeError: tokens or context that do not fit the layout or the layer.
        """
        check_shapes("GdpaPffn", x_TD=x_TD)
        check_shapes("GdpaPffn", context_BND=context_BND)
        check_batch("GdpaPffn", "context_BND", context_BND.shape[0], layout)
        spec, tokens = self.spec, x_TD.shape[0]
        batch, count, _ = context_BND.shape
        kv = self.kv(context_BND).view(batch * count, 2 * spec.key_heads, spec.head_dim)
        k_SGK, v_SGK = kv.split((spec.key_heads, spec.key_heads), dim=1)
        if spec.qk_norm:
            k_SGK = rms_normalize(k_SGK)
        k_layout = constant_layout(batch, count, layout)
        pairs = count * layout.total_tokens
        if spec.activation != "softmax" and self._is_one_operator(x_TD, k_SGK):
            return normed_attention(
                x_TD,
                k_SGK,
                v_SGK,
                layout,
                k_layout,
                activation=spec.activation,
                scale=spec.score_scale,
                eps=self.norm.eps,
                out_eps=self.out_norm.eps,
                visible_pairs=pairs,
                impl="triton",
            )
        q1_TD = self.norm(x_TD)
        # Under autocast the keys come in its dtype, the tokens in theirs.
        q_THK = q1_TD.to(k_SGK.dtype).view(tokens, spec.heads, spec.head_dim)
        out_THV = attend(spec, q_THK, k_SGK, v_SGK, layout, k_layout, pairs)
        read_TD = out_THV.reshape(tokens, spec.heads * spec.head_dim)
        return self.out_norm(read_TD, before=q1_TD, after=x_TD)

    def _is_one_operator(self, x_TD: Tensor, k_SGK: Tensor) -> bool:
        """Tell whether the layer is one operator; what is spread over devices is not."""
        takes = has_kernel(x_TD) and normed_attention_takes(x_TD, k_SGK)
        has_triton = self.impl == "triton" or takes
        chosen = resolve_impl(self.impl, x_TD.device, "GdpaPffn", has_triton=has_triton)
        return chosen == "triton"


class CrossAttention(nn.Module):
    """Tokens attend to another packed batch of the same sequences.

    Args:
        model_width: width D of the tokens, above 0.
        spec: any pattern but block; no rotation, because the two sides have no common positions.
        context_width: width of the context tokens, above 0.

    Attributes:
        product_format, rounding: as those of ``SelfAttention``.

    Raises:
        ConfigError: pattern block, or a rotation.
    """

    product_format: MxScaling | None = None
    rounding: Rounding = NEAREST

    @property
    def draws_random(self) -> bool:
        """Whether a forward pass that learns draws from torch's generator."""
        return self.rounding.stochastic

    def __init__(self, model_width: int, spec: AttentionSpec, context_width: int) -> None:
        super().__init__()
        check_full("CrossAttention", spec, allowed=("full", "causal", "window"))
        self.spec = spec
        self.q = Projection(model_width, spec.heads * spec.head_dim)
        self.kv = Projection(context_width, 2 * spec.key_heads * spec.head_dim)
        self.out = Projection(spec.heads * spec.head_dim, model_width)

    def forward(
        self,
        x_TD: Tensor,
        layout: Layout,
        context_SD: Tensor,
        context_layout: Layout,
        *,
        visible_pairs: int | None = None,
    ) -> Tensor:
        """Let tokens attend to the context of their own sequence.

        Args:
            x_TD: tokens.
            layout: where each sequence begins.
            context_SD: context tokens, of context_width.
            context_layout: where each sequence's context begins; may be empty.
            visible_pairs: as in the operators; must be given inside ``torch.compile``.

        Returns:
            out_TD; 0 for tokens without context.

        Raises:
            ShapeError: tokens or context that do not fit their layouts or the layer.
        """
        check_shapes("CrossAttention", x_TD=x_TD)
        check_shapes("CrossAttention", context_SD=context_SD)
        spec, tokens = self.spec, x_TD.shape[0]
        q_THK = self.q(x_TD).view(tokens, spec.heads, spec.head_dim)
        k_SGK, v_SGV = keys_and_values(spec, self.kv, context_SD, context_layout)
        if spec.qk_norm:
            q_THK = rms_normalize(q_THK)
        out_THV = attend(
            spec,
            q_THK,
            k_SGK,
            v_SGV,
            layout,
            context_layout,
            visible_pairs,
            product_format=self.product_format,
            rounding=self.rounding,
        )
        return self.out(out_THV.reshape(tokens, spec.heads * spec.head_dim))
