"""Attention layers: projections around the operators, as the published models use them.

No biases, norms without gains, queries and keys normalised by head unless the spec says
otherwise. A layer adds no residual and no outer norm except ``GdpaPffn``, whose fused dataflow
has both. Batches are packed; every layer takes empty sequences and empty batches.
"""

import torch
from torch import Tensor, nn

from gem_attention.contract import AttentionSpec
from gem_attention.ops import (
    block_attention,
    generalized_attention,
    jagged_flash_attention,
    pooled_attention,
)
from gem_attention.rotary import apply_rotary, rotary_angles, rote_angles
from gem_jagged.batch import Layout
from gem_jagged.offsets import positions
from gem_opkit.dims import check_shapes
from gem_opkit.errors import ConfigError, ShapeError, UnsupportedError, refusal
from gem_precision.layers import LayerNorm, Projection, RmsNorm
from gem_precision.norms import rms_normalize


class SelfAttention(nn.Module):
    """Self-attention over packed sequences, in any pattern of the spec.

    Queries, keys and values are one projection; queries and keys are normalised by head and
    rotated; heads are joined by an output projection. No residual, no norm of the input.

    Args:
        model_width: width D of the tokens, above 0.
        spec: pattern, activation, heads, positions.

    Raises:
        UnsupportedError: pattern block with an activation in place of softmax.
    """

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
        # Queries and keys share the work of norm and rotation.
        if spec.qk_norm:
            qk = rms_normalize(qk)
        qk = self._rotated(qk, layout, gap_seconds_T)
        q_THK, k_TGK = qk.split((spec.heads, spec.key_heads), dim=1)
        out_THV = _attend(spec, q_THK, k_TGK, v_TGV, layout, layout, visible_pairs)
        return self.out(out_THV.reshape(tokens, spec.heads * spec.head_dim))

    def _rotated(self, qk: Tensor, layout: Layout, gap_seconds_T: Tensor | None) -> Tensor:
        spec = self.spec
        if spec.rotary == "none":
            return qk
        position_T = positions(layout.offsets_O, qk.shape[0])
        if spec.rotary == "position":
            cos, sin = rotary_angles(position_T, spec.head_dim)
        elif gap_seconds_T is None:
            raise ConfigError(
                refusal(
                    "SelfAttention",
                    "gap_seconds_T",
                    must='be given with rotary="rote"',
                    got=None,
                    fix='pass the time gaps, or use rotary="position"',
                )
            )
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

    Raises:
        ConfigError: heads that do not fill the model width, softmax, a pattern or a rotation.

    Source: Meta's article on norm fusion for the dataflow; the Kunlun article for keys and values
        made from the summary.
    """

    def __init__(self, model_width: int, spec: AttentionSpec, context_width: int) -> None:
        super().__init__()
        _check_full("GdpaPffn", spec)
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
        _check_batch("GdpaPffn", "context_BND", context_BND.shape[0], layout)
        spec, tokens = self.spec, x_TD.shape[0]
        batch, count, _ = context_BND.shape
        kv = self.kv(context_BND).view(batch * count, 2 * spec.key_heads, spec.head_dim)
        k_SGK, v_SGV = kv.split((spec.key_heads, spec.key_heads), dim=1)
        if spec.qk_norm:
            k_SGK = rms_normalize(k_SGK)
        q1_TD = self.norm(x_TD)
        # Under autocast the keys come in its dtype, the tokens in theirs.
        q_THK = q1_TD.to(k_SGK.dtype).view(tokens, spec.heads, spec.head_dim)
        k_layout = _constant_layout(batch, count, layout)
        pairs = count * layout.total_tokens
        out_THV = _attend(spec, q_THK, k_SGK, v_SGV, layout, k_layout, pairs)
        a_TD = out_THV.reshape(tokens, spec.heads * spec.head_dim) + q1_TD
        return self.out_norm(a_TD) + x_TD


class CrossAttention(nn.Module):
    """Tokens attend to another packed batch of the same sequences.

    Args:
        model_width: width D of the tokens, above 0.
        spec: any pattern but block; no rotation, because the two sides have no common positions.
        context_width: width of the context tokens, above 0.

    Raises:
        ConfigError: pattern block, or a rotation.
    """

    def __init__(self, model_width: int, spec: AttentionSpec, context_width: int) -> None:
        super().__init__()
        _check_full("CrossAttention", spec, allowed=("full", "causal", "window"))
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
        k_SGK, v_SGV = _keys_and_values(spec, self.kv, context_SD)
        if spec.qk_norm:
            q_THK = rms_normalize(q_THK)
        out_THV = _attend(spec, q_THK, k_SGK, v_SGV, layout, context_layout, visible_pairs)
        return self.out(out_THV.reshape(tokens, spec.heads * spec.head_dim))


class PooledAttention(nn.Module):
    """A few queries pool each sequence: learned seeds, or queries that come with the example.

    Args:
        model_width: width D of the tokens and of the result, above 0.
        spec: pattern full, no rotation.
        seeds: learned queries, shared by the batch; 0 if the queries come with each call.

    Raises:
        ConfigError: another pattern, a rotation, or a negative number of seeds.

    Source: Lee et al. 2019 (arXiv:1810.00825).
    """

    def __init__(self, model_width: int, spec: AttentionSpec, seeds: int) -> None:
        super().__init__()
        _check_full("PooledAttention", spec)
        if seeds < 0:
            raise ConfigError(
                refusal("PooledAttention", "seeds", must="be at least 0", got=seeds, fix="count")
            )
        self.spec = spec
        self.seeds_PD = nn.Parameter(torch.randn(seeds, model_width)) if seeds else None
        self.norm = RmsNorm(model_width)
        self.q = Projection(model_width, spec.heads * spec.head_dim)
        self.kv = Projection(model_width, 2 * spec.key_heads * spec.head_dim)
        self.out = Projection(spec.heads * spec.head_dim, model_width)

    def forward(self, x_TD: Tensor, layout: Layout, *, query_BPD: Tensor | None = None) -> Tensor:
        """Pool each sequence.

        Args:
            x_TD: tokens.
            layout: where each sequence begins.
            query_BPD: queries of each sequence's example (target-aware pooling); None for the
                learned seeds. Normalised like them.

        Returns:
            pooled_BPD; 0 for an empty sequence.

        Raises:
            ShapeError: tokens or queries that do not fit the layout or the layer.
            ConfigError: queries for a layer that has seeds, or none for one that has not.
        """
        check_shapes("PooledAttention", x_TD=x_TD, query_BPD=query_BPD)
        spec = self.spec
        k_SGK, v_SGV = _keys_and_values(spec, self.kv, x_TD)
        source = self.seeds_PD if query_BPD is None else query_BPD
        if source is None or (query_BPD is not None and self.seeds_PD is not None):
            raise ConfigError(
                refusal(
                    "PooledAttention",
                    "query_BPD",
                    must="be given if the layer has no seeds, and only then",
                    got=f"{'none' if query_BPD is None else 'queries'} with "
                    f"{0 if self.seeds_PD is None else self.seeds_PD.shape[0]} seeds",
                    fix="build the layer with seeds=0 to bring queries",
                )
            )
        q = self.q(self.norm(source))
        # Spelled out: -1 cannot be told where an empty batch leaves no elements.
        q = q.view(q.numel() // self.q.out_features, spec.heads, spec.head_dim)
        if spec.qk_norm:
            q = rms_normalize(q)
        if query_BPD is None:
            out_BPHV = pooled_attention(
                q, k_SGK, v_SGV, layout, activation=spec.activation, scale=spec.score_scale
            )
        else:
            batch, count, _ = query_BPD.shape
            _check_batch("PooledAttention", "query_BPD", batch, layout)
            q_layout = _constant_layout(batch, count, layout)
            pairs = count * layout.total_tokens
            out_THV = _attend(spec, q, k_SGK, v_SGV, q_layout, layout, pairs)
            out_BPHV = out_THV.view(batch, count, spec.heads, spec.head_dim)
        return self.out(out_BPHV.flatten(2))


class SumKronLinear(nn.Module):
    """A sum of Kronecker products: mixes tokens and columns with few parameters.

        Y_b = Σ_i Z_iᵀ H_b W_i,   Z_i (tokens_in, tokens_out), W_i (D, D), i = 1 … rank

    Args:
        tokens_in: tokens of each example, above 0.
        tokens_out: tokens of the result, above 0.
        width: width D, above 0.
        rank: number of products, above 0.

    Source: the Kunlun article.
    """

    def __init__(self, tokens_in: int, tokens_out: int, width: int, rank: int) -> None:
        super().__init__()
        for name, value in (
            ("tokens_in", tokens_in),
            ("tokens_out", tokens_out),
            ("width", width),
            ("rank", rank),
        ):
            if value <= 0:
                raise ConfigError(
                    refusal("SumKronLinear", name, must="be above 0", got=value, fix="raise it")
                )
        self.tokens_out, self.rank = tokens_out, rank
        # Rows of Z are all (i, output token), rows of W all (i, input column); with this spread
        # the result has the variance of the input.
        self.z = nn.Parameter(torch.randn(rank * tokens_out, tokens_in) * tokens_in**-0.5)
        self.w = nn.Parameter(torch.randn(rank * width, width) * (rank * width) ** -0.5)

    def forward(self, h_BPD: Tensor) -> Tensor:
        """Mix tokens and columns.

        Args:
            h_BPD: tokens_in tokens of each example.

        Returns:
            y_BPD with tokens_out tokens.

        Raises:
            ShapeError: h_BPD has another number of dims.
        """
        check_shapes("SumKronLinear", h_BPD=h_BPD)
        batch, _, width = h_BPD.shape
        mixed = torch.matmul(self.z, h_BPD).view(batch, self.rank, self.tokens_out, width)
        rows = mixed.transpose(1, 2).reshape(batch, self.tokens_out, self.rank * width)
        return torch.matmul(rows, self.w)


class HierarchicalSeedPooling(nn.Module):
    """Pools each sequence with many seeds, then compresses them into a few tokens.

        H = MHA(RmsNorm(E), S, S)      Y = SumKronLinear(H)

    Args:
        model_width: width D of the tokens and of the result, above 0.
        spec: pattern full, no rotation.
        seeds: learned queries E, shared by the batch, above 0; more than ``tokens`` is usual.
        tokens: tokens of the result, above 0.
        kron_rank: number of Kronecker products, above 0.

    Raises:
        ConfigError: a number that is not above 0, another pattern or a rotation.

    Source: the Kunlun article.
    """

    def __init__(
        self, model_width: int, spec: AttentionSpec, seeds: int, tokens: int, kron_rank: int
    ) -> None:
        super().__init__()
        self.pool = PooledAttention(model_width, spec, seeds)
        self.compress = SumKronLinear(seeds, tokens, model_width, kron_rank)

    def forward(self, x_TD: Tensor, layout: Layout) -> Tensor:
        """Summarise each sequence.

        Args:
            x_TD: tokens.
            layout: where each sequence begins.

        Returns:
            tokens_BPD; 0 for an empty sequence.

        Raises:
            ShapeError: tokens that do not fit the layout or the layer.
        """
        return self.compress(self.pool(x_TD, layout))


def _attend(
    spec: AttentionSpec,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_layout: Layout,
    k_layout: Layout,
    visible_pairs: int | None,
) -> Tensor:
    """Call the operator that the spec asks for."""
    if spec.pattern == "block":
        return block_attention(
            q_THK,
            k_SGK,
            v_SGV,
            q_layout,
            block_tokens=spec.block_tokens,
            scale=spec.score_scale,
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


def _keys_and_values(spec: AttentionSpec, kv: Projection, x_SD: Tensor) -> tuple[Tensor, Tensor]:
    both = kv(x_SD).view(x_SD.shape[0], 2 * spec.key_heads, spec.head_dim)
    k_SGK, v_SGV = both.split((spec.key_heads, spec.key_heads), dim=1)
    return (rms_normalize(k_SGK) if spec.qk_norm else k_SGK), v_SGV


def _constant_layout(batch: int, count: int, like: Layout) -> Layout:
    offsets_O = like.offsets_O
    return Layout.constant(batch, count, device=offsets_O.device, dtype=offsets_O.dtype)


def _check_full(op: str, spec: AttentionSpec, *, allowed: tuple[str, ...] = ("full",)) -> None:
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


def _check_batch(op: str, name: str, batch: int, layout: Layout) -> None:
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
