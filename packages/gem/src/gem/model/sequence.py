"""The sequence side of a layer, for one stream: what its events learn, and what they tell.

An interaction layer lets the events attend, without softmax, to the non-sequence summary, and
pools them afresh; a transformer layer lets them attend to each other and leaves the pooled
summary as it was (computation skip: either kind pays for half of the work). A layer of the kind
"both" does the one after the other.

Source: Kunlun (arXiv:2602.10016) for both kinds, InterFormer (arXiv:2411.09852) for the gate,
LLaTTE (arXiv:2601.20083) and DIN (arXiv:1706.06978) for queries made from the candidate.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gem.model.din import TargetAttention
from gem.model.spec import MlpActivation
from gem.model.stream_pooling import MeanPooling, MultiHeadPooling, latest_tokens
from gem.model.stream_spec import StreamSpec
from gem_attention.contract import AttentionSpec
from gem_attention.layers import (
    GdpaPffn,
    HierarchicalSeedPooling,
    PooledAttention,
    SelfAttention,
)
from gem_attention.patterns import visible_pairs, visible_pairs_block
from gem_jagged.batch import Layout
from gem_jagged.offsets import sequence_ids
from gem_jagged.ops import jagged_sum
from gem_precision.layers import Mlp, Projection, RmsNorm
from gem_precision.ops import gated_residual


class StreamInteraction(nn.Module):
    """GDPA-PFFN, then fresh summary tokens of one stream.

    Args:
        spec: the stream; it says which of these parts there are.
        width: width of non-sequence tokens and of the summary.
        max_events: longest history that the data gives, which scales GDPA's scores.
        activation: of MLPs.
    """

    def __init__(
        self,
        spec: StreamSpec,
        width: int,
        max_events: int,
        *,
        activation: MlpActivation = "relu",
    ) -> None:
        super().__init__()
        self.ffn = (
            GdpaPffn(
                spec.width, gdpa_spec(spec, max_events), context_width=width, impl=spec.gdpa_impl
            )
            if spec.ffn == "gdpa"
            else None
        )
        self.pool = _pooling(spec, activation) if spec.summary_tokens else None
        self.recent = spec.recent_tokens
        self.queries = spec.target_tokens
        self.make_query = Projection(width, self.queries * spec.width) if self.queries else None
        self.target_pool = _target_pooling(spec, activation) if self.queries else None
        self.lift = nn.Identity() if spec.width == width else Projection(spec.width, width)
        self.norm = RmsNorm(width)

    def forward(
        self, x_TD: Tensor, layout: Layout, context_BND: Tensor, candidate_BD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            x_TD: event tokens.
            layout: where each history begins.
            context_BND: the non-sequence summary; unused without GDPA-PFFN.
            candidate_BD: the candidate's token; needed if the stream has target tokens.

        Returns:
            event tokens x_TD, and summary_BPD with the width of non-sequence tokens: those of the
            pooling, the latest events, target tokens; all 0 for an empty history.
        """
        if self.ffn is not None:
            x_TD = self.ffn(x_TD, layout, context_BND)
        parts = []
        if isinstance(self.pool, HierarchicalSeedPooling):
            # The next layer gives a gradient of its own back.
            summary_BPD, x_TD = self.pool.beside(x_TD, layout)
            parts.append(summary_BPD)
        elif self.pool is not None:
            parts.append(self.pool(x_TD, layout))
        if self.recent:
            parts.append(latest_tokens(x_TD, layout, self.recent))
        if self.target_pool is not None and self.make_query is not None:
            query = self.make_query(candidate_BD)
            if isinstance(self.target_pool, TargetAttention):
                parts.append(self.target_pool(x_TD, layout, query).unsqueeze(1))
            else:
                query_BPD = query.unflatten(1, (self.queries, -1))
                parts.append(self.target_pool(x_TD, layout, query_BPD=query_BPD))
        pooled_BPD = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return x_TD, self.norm(self.lift(pooled_BPD))


def _pooling(spec: StreamSpec, activation: MlpActivation) -> nn.Module:
    """From events to summary tokens, as the stream says."""
    if spec.pooling == "mean":
        return MeanPooling(spec.width, spec.summary_tokens)
    attention = pooling_spec(spec)
    if spec.pooling == "pma":
        return MultiHeadPooling(spec.width, attention, spec.summary_tokens, activation=activation)
    return HierarchicalSeedPooling(
        spec.width,
        attention,
        seeds=spec.seeds,
        tokens=spec.summary_tokens,
        kron_rank=spec.kron_rank,
    )


def _target_pooling(spec: StreamSpec, activation: MlpActivation) -> nn.Module:
    """From events and a candidate to its tokens, as the stream says."""
    if spec.target_attention == "din":
        return TargetAttention(spec.width, (spec.target_hidden,), activation=activation, mean=False)
    return PooledAttention(spec.width, pooling_spec(spec), seeds=0)


class StreamTransformer(nn.Module):
    """Self-attention among the events of one stream, gated by the non-sequence summary.

        x + 2 σ(gate(summary)) * SelfAttention(RmsNorm(x))

    The gate starts near 1 and is the way by which the rest of the model reaches the events in a
    layer that has no GDPA.

    Args:
        spec: the stream.
        width: width of non-sequence tokens.
        summary_tokens: tokens of the non-sequence summary.
        gated: whether there is a gate.
        activation: of the MLP behind self-attention, where the stream has one.
    """

    def __init__(
        self,
        spec: StreamSpec,
        width: int,
        *,
        summary_tokens: int,
        gated: bool,
        activation: MlpActivation = "relu",
    ) -> None:
        super().__init__()
        self.pattern = spec.pattern
        self.norm = RmsNorm(spec.width)
        self.attention = SelfAttention(spec.width, self_attention_spec(spec))
        self.gate = Projection(summary_tokens * width, spec.width) if gated else None
        self.dropout = nn.Dropout(spec.dropout)
        self.ffn = (
            Mlp((spec.width, spec.ffn_hidden, spec.width), activation=activation)
            if spec.ffn_hidden
            else None
        )
        self.ffn_norm = RmsNorm(spec.width) if spec.ffn_hidden else None

    def forward(
        self,
        x_TD: Tensor,
        layout: Layout,
        context_BND: Tensor,
        gap_seconds_T: Tensor,
        *,
        visible_pairs: int | None = None,
    ) -> Tensor:
        """Run the layer.

        Args:
            x_TD: event tokens.
            layout: where each history begins.
            context_BND: the non-sequence summary.
            gap_seconds_T: seconds from each event to the example.
            visible_pairs: (query, key) pairs of the pattern, counted once a batch.

        Returns:
            event tokens x_TD.
        """
        normed_TD, x_TD = self.norm.beside(x_TD)
        out_TD = self.attention(normed_TD, layout, gap_seconds_T, visible_pairs=visible_pairs)
        if self.gate is not None:
            gate_BD = 2.0 * torch.sigmoid(self.gate(context_BND.flatten(1)))
            if x_TD.is_cuda and self.dropout.p == 0.0:
                return self.fed(gated_residual(x_TD, out_TD, gate_BD, layout.offsets_O))
            out_TD = out_TD * spread_over_events(gate_BD, layout)
        return self.fed(x_TD + self.dropout(out_TD))

    def fed(self, x_TD: Tensor) -> Tensor:
        """Run the MLP that follows self-attention, if there is one.

        Args:
            x_TD: events behind self-attention.
        """
        if self.ffn is None or self.ffn_norm is None:
            return x_TD
        normed_TD, x_TD = self.ffn_norm.beside(x_TD)
        return x_TD + self.dropout(self.ffn(normed_TD))


class StreamBoth(nn.Module):
    """Self-attention, then GDPA-PFFN and a fresh summary: a layer without computation skip.

    Args:
        spec: the stream.
        width: width of non-sequence tokens and of the summary.
        max_events: longest history that the data gives.
        activation: of MLPs.
    """

    def __init__(
        self, spec: StreamSpec, width: int, max_events: int, *, activation: MlpActivation
    ) -> None:
        super().__init__()
        # GDPA brings the summary to the events, so that no gate has to.
        self.transformer = StreamTransformer(
            spec, width, summary_tokens=0, gated=False, activation=activation
        )
        self.interaction = StreamInteraction(spec, width, max_events, activation=activation)

    def forward(
        self,
        x_TD: Tensor,
        layout: Layout,
        context_BND: Tensor,
        candidate_BD: Tensor | None,
        gap_seconds_T: Tensor,
        *,
        visible_pairs: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Args:
            x_TD: event tokens.
            layout: where each history begins.
            context_BND: the non-sequence summary.
            candidate_BD: the candidate's token.
            gap_seconds_T: seconds from each event to the example.
            visible_pairs: (query, key) pairs of the pattern, counted once a batch.

        Returns:
            as `StreamInteraction`.
        """
        x_TD = self.transformer(
            x_TD, layout, context_BND, gap_seconds_T, visible_pairs=visible_pairs
        )
        return self.interaction(x_TD, layout, context_BND, candidate_BD)


class _SpreadOverEvents(torch.autograd.Function):
    """Rows of sequences, one for each event; the gradient is summed by sequence, not scattered."""

    @staticmethod
    def forward(ctx: Any, rows_BD: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return rows_BD.index_select(0, sequence_ids(layout.offsets_O, layout.total_tokens))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's own type
        ctx: Any, grad_TD: Tensor
    ) -> tuple[Tensor, None]:
        return jagged_sum(grad_TD, ctx.layout), None


def spread_over_events(rows_BD: Tensor, layout: Layout) -> Tensor:
    """Give each event the row of its history.

    Args:
        rows_BD: one row a history.
        layout: where each history begins.

    Returns:
        rows_TD. On a GPU the gradient is summed by an operator that reads it once, where that of
        ``index_select`` would add each event's by atomics.
    """
    if rows_BD.is_cuda and not torch.compiler.is_compiling():
        return _SpreadOverEvents.apply(rows_BD, layout)
    return rows_BD.index_select(0, sequence_ids(layout.offsets_O, layout.total_tokens))


def self_attention_spec(spec: StreamSpec) -> AttentionSpec:
    """Describe a stream's self-attention.

    Args:
        spec: the stream.

    Returns:
        softmax attention in the stream's pattern, rotated, no biases.
    """
    return AttentionSpec(
        pattern=spec.pattern,
        window_tokens=spec.window_tokens if spec.pattern == "window" else None,
        block_tokens=spec.block_tokens,
        activation="softmax",
        heads=spec.heads,
        head_dim=spec.width // spec.heads,
        qk_norm=spec.qk_norm,
        rotary=spec.rotary,
        rote_time_scale_s=spec.rote_time_scale_s,
    )


def pooling_spec(spec: StreamSpec) -> AttentionSpec:
    """Describe the attention of a stream's pooled queries.

    Args:
        spec: the stream.

    Returns:
        softmax attention over the whole history.
    """
    return AttentionSpec(
        pattern="full",
        activation="softmax",
        heads=spec.heads,
        head_dim=spec.width // spec.heads,
        qk_norm=spec.qk_norm,
    )


def gdpa_spec(spec: StreamSpec, max_events: int) -> AttentionSpec:
    """Describe a stream's GDPA-PFFN.

    Args:
        spec: the stream.
        max_events: longest history, which divides the scores under inverse_max_tokens.

    Returns:
        attention without softmax from the events to the summary.
    """
    by_length = spec.gdpa_scale == "inverse_max_tokens"
    return AttentionSpec(
        pattern="full",
        activation=spec.gdpa_activation,
        heads=spec.heads,
        head_dim=spec.width // spec.heads,
        qk_norm=spec.qk_norm,
        scale=spec.gdpa_scale,
        max_tokens=min(max_events, spec.max_events or max_events) if by_length else None,
    )


def visible_pairs_of(spec: StreamSpec, layout: Layout) -> int:
    """Count the pairs of events that self-attention lets see each other, from host lengths.

    Args:
        spec: the stream.
        layout: histories.

    Returns:
        pairs.
    """
    if spec.pattern == "block":
        return visible_pairs_block(layout.lengths, spec.block_tokens)
    reach = spec.window_tokens if spec.pattern == "window" else None
    return visible_pairs(layout.lengths, layout.lengths, reach, reach)
