"""Inputs become tokens: one for each non-sequence feature, one for each event.

All id features go through one batched projection and all parts of an event through one linear
map; there is no loop over features but the one that lists them. Left out: the table lookups
(`gem.model.tables`), and everything that mixes tokens.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from gem.data.batch import StreamBatch
from gem.data.schema import BatchSchema, StreamInput
from gem.model.joins import join
from gem.model.spec import GemSpec, MlpActivation
from gem.model.structure import feature_tokens
from gem.model.tables import event_feature
from gem_jagged.batch import Jagged, Layout
from gem_opkit.errors import ConfigError, DataError, refusal
from gem_precision.layers import Mlp, Projection, RmsNorm

# A year and a minute, seconds: the range of the time gaps that an event's embedding tells apart.
_LONGEST_GAP_S = 365.0 * 86_400.0
_GAP_SCALE_S = 60.0


def hat_basis(x: Tensor, *, low: float, high: float, knots: int) -> Tensor:
    """Express values in hat functions on evenly spaced knots.

    A linear map of the result is a piecewise linear function of the value: a bucketised
    embedding without jumps at the edges.

    Args:
        x: values, fp32, any shape; clamped to [low, high].
        low: value of the first knot.
        high: value of the last knot, above `low`.
        knots: number of knots, at least 2.

    Returns:
        weights, one dim more than `x`; non-negative, at most two are not 0, they add up to 1.
    """
    place = ((x - low) / (high - low)).clamp(0.0, 1.0) * (knots - 1)
    knot = torch.arange(knots, dtype=x.dtype, device=x.device)
    return (1.0 - (place.unsqueeze(-1) - knot).abs()).clamp_min(0.0)


def gap_basis(gap_seconds_T: Tensor, knots: int) -> Tensor:
    """Express time gaps on a logarithmic scale from a minute to a year.

    Args:
        gap_seconds_T: seconds, fp32, >= 0.
        knots: number of knots, at least 2.

    Returns:
        (T, knots), as `hat_basis`.
    """
    high = float(torch.log1p(torch.tensor(_LONGEST_GAP_S / _GAP_SCALE_S)))
    return hat_basis(torch.log1p(gap_seconds_T / _GAP_SCALE_S), low=0.0, high=high, knots=knots)


class Columns(nn.Module):
    """Keep the columns of a dense input that the model reads.

    Args:
        names: all columns, in order.
        kept: those that stay, in order.
    """

    def __init__(self, names: tuple[str, ...], kept: tuple[str, ...]) -> None:
        super().__init__()
        index = torch.tensor([names.index(name) for name in kept], dtype=torch.int64)
        self.index: Tensor | None
        self.register_buffer("index", None if names == kept else index, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Select the columns.

        Args:
            x: any shape that ends in all columns.

        Returns:
            the same shape with those that stay; `x` itself where that is all of them.
        """
        return x if self.index is None else x.index_select(-1, self.index)


class FeatureTokens(nn.Module):
    """Turn the non-sequence inputs of an example into tokens.

    In order: one token for each id feature, those of all numbers together, one for each number if
    numbers are bucketised, and one for each cached embedding. An embedding that is not there has a
    learned token of its own.

    Args:
        spec: the model.
        schema: names of the inputs.

    Raises:
        ConfigError: the schema and the spec give no token at all.
    """

    def __init__(self, spec: GemSpec, schema: BatchSchema) -> None:
        super().__init__()
        self.names = tuple(source.name for source in schema.ids)
        self.width = spec.width
        count, numbers = len(self.names), len(schema.numbers)
        self.number_tokens = spec.numbers.tokens if numbers else 0
        self.buckets = spec.numbers.buckets if numbers else 0
        self.bucket_low, self.bucket_high = spec.numbers.bucket_low, spec.numbers.bucket_high
        self.tokens = feature_tokens(spec, schema)
        if self.tokens == 0:
            raise ConfigError(
                refusal(
                    "FeatureTokens",
                    "schema",
                    must="have id features, or numbers that become tokens",
                    got=f"{numbers} numbers and none of the rest",
                    fix="declare features, or set model.numbers.tokens",
                )
            )
        width_in = spec.embeddings.embedding_dim
        # Tables as wide as the tokens need no projection.
        self.projection = (
            nn.Parameter(_normal(count, width_in, spec.width, inputs=width_in))
            if count and width_in != spec.width
            else None
        )
        self.linear = (
            Projection(numbers, self.number_tokens * spec.width) if self.number_tokens else None
        )
        self.bucketed = (
            nn.Parameter(_normal(numbers, self.buckets, spec.width, inputs=self.buckets))
            if self.buckets
            else None
        )
        self.vectors = nn.ModuleList(
            VectorToken(vector.width, spec.width) for vector in schema.vectors
        )
        self.norm = RmsNorm(spec.width) if spec.token_norm else nn.Identity()
        self.dropout = nn.Dropout(spec.dropout)
        # One value for a whole token, so that the model learns to do without the feature.
        self.token_dropout = nn.Dropout(spec.token_dropout)

    def forward(
        self,
        embedded: Mapping[str, Tensor],
        numbers_BD: Tensor,
        vectors_BV: Tensor | None = None,
    ) -> Tensor:
        """Make the tokens.

        Args:
            embedded: feature name -> embedding (B, E).
            numbers_BD: continuous inputs, fp32.
            vectors_BV: cached embeddings, as `ExampleBatch` has them; None where there are none.

        Returns:
            x_BND, N = `self.tokens`.

        Raises:
            DataError: the batch lacks the cached embeddings.
        """
        batch = numbers_BD.shape[0]
        parts = []
        if self.names:
            id_BNE = torch.stack([embedded[name] for name in self.names], dim=1)
            id_BND = (
                id_BNE
                if self.projection is None
                else torch.einsum("bne,ned->bnd", id_BNE, self.projection)
            )
            if self.training and self.token_dropout.p:
                kept = id_BND.new_ones(batch, len(self.names), 1)
                id_BND = id_BND * self.token_dropout(kept)
            parts.append(id_BND)
        if self.linear is not None:
            parts.append(self.linear(numbers_BD).view(batch, self.number_tokens, self.width))
        if self.bucketed is not None:
            basis = hat_basis(
                numbers_BD, low=self.bucket_low, high=self.bucket_high, knots=self.buckets
            )
            parts.append(torch.einsum("bnk,nkd->bnd", basis, self.bucketed))
        parts += self._vector_tokens(vectors_BV)
        x_BND = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if isinstance(self.norm, RmsNorm):  # on a GPU one pass does both
            return self.norm(x_BND, dropout=self.dropout.p if self.training else 0.0)
        return self.dropout(x_BND)

    def _vector_tokens(self, vectors_BV: Tensor | None) -> list[Tensor]:
        widths = [cast(VectorToken, vector).width + 1 for vector in self.vectors]
        found = 0 if vectors_BV is None else vectors_BV.shape[1]
        if found != sum(widths):
            raise DataError(
                refusal(
                    "forward",
                    "batch.vectors_BV",
                    must=f"have {sum(widths)} columns: every cached embedding, each with its flag",
                    got=found,
                    fix="read them: data.user_embeddings",
                )
            )
        if vectors_BV is None:
            return []
        parts = vectors_BV.split(widths, dim=1)
        return [token(part) for token, part in zip(self.vectors, parts, strict=True)]


class VectorToken(nn.Module):
    """A cached embedding as a token; where there is none, a learned one stands for it.

    Args:
        width: numbers of the embedding.
        token_width: width of the token.
    """

    def __init__(self, width: int, token_width: int) -> None:
        super().__init__()
        self.width = width
        self.linear = Projection(width, token_width)
        self.missing = nn.Parameter(torch.zeros(token_width))

    def forward(self, x_BV: Tensor) -> Tensor:
        """Make the token.

        Args:
            x_BV: the numbers, 0 where unknown, and 1 where they are known.

        Returns:
            x_BND with N = 1.
        """
        known_B1 = x_BV[:, -1:]
        return (self.linear(x_BV[:, :-1]) + (1.0 - known_B1) * self.missing).unsqueeze(1)


class EventTokens(nn.Module):
    """Turn each event of a stream into a token, from its ids, its numbers and its time gap.

    Args:
        stream: the stream's inputs.
        width: width of a token.
        columns: all numbers of the data set's events, of which the stream names those to read.
        embedding_dim: width of the tables.
        gap_buckets: knots of the embedding of the log time gap; 0 for none.
        hidden: hidden width of an MLP; 0 for one linear map.
        activation: of the MLP.
        dropout: share of values set to 0 in training.

    Raises:
        ConfigError: an event without any part.
    """

    def __init__(
        self,
        stream: StreamInput,
        width: int,
        *,
        columns: tuple[str, ...],
        embedding_dim: int,
        gap_buckets: int,
        hidden: int = 0,
        activation: MlpActivation = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.features = tuple(event_feature(stream.name, source.name) for source in stream.ids)
        self.columns = Columns(columns, stream.numbers)
        self.numbers = len(stream.numbers)
        self.gap_buckets = gap_buckets
        self.inputs = len(self.features) * embedding_dim + self.numbers + gap_buckets
        if self.inputs == 0:
            raise ConfigError(
                refusal(
                    "EventTokens",
                    f"stream {stream.name}",
                    must="have an id field, a number or a bucketised time gap",
                    got="none of them",
                    fix="declare a field, or set gap_buckets",
                )
            )
        widths = (self.inputs, hidden, width) if hidden else (self.inputs, width)
        self.mix = Mlp(widths, activation=activation) if hidden else Projection(self.inputs, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, embedded: Mapping[str, Tensor], numbers_TD: Tensor, gap_seconds_T: Tensor
    ) -> Tensor:
        """Make the tokens.

        Args:
            embedded: feature name -> embeddings (T, E) of the events.
            numbers_TD: continuous fields, fp32.
            gap_seconds_T: seconds from the event to the example, fp32, >= 0.

        Returns:
            x_TD.
        """
        parts = [embedded[name] for name in self.features]
        if self.numbers:
            parts.append(self.columns(numbers_TD))
        if self.gap_buckets:
            parts.append(gap_basis(gap_seconds_T, self.gap_buckets))
        # In the format of the product: fewer bytes to join, and gradients of rows are widened once
        # they have been taken apart.
        return self.dropout(self.mix(join(parts, dim=-1)))


def latest_events(stream: StreamBatch, max_events: int | None) -> StreamBatch:
    """Keep the last events of every history.

    Args:
        stream: events, oldest first.
        max_events: most events to keep; None for all.

    Returns:
        the stream itself where nothing is cut, else a shorter one.
    """
    layout = stream.numbers.layout
    if max_events is None or layout.max_length <= max_events:
        return stream
    kept = layout.lengths.clamp_max(max_events)
    # Old index of each kept token, from host lengths: the end of its history, minus how far it
    # is from that end, which is the same before and after.
    shift = (layout.lengths - kept).cumsum(0)
    index = torch.arange(int(kept.sum())) + torch.repeat_interleave(shift, kept)
    device = stream.numbers.values.device
    index = index.to(device, non_blocking=True)
    shorter = Layout.from_lengths(kept, device=device, dtype=layout.offsets_O.dtype)

    def cut(jagged: Jagged) -> Jagged:
        return Jagged.from_layout(jagged.values.index_select(0, index), shorter)

    return StreamBatch(
        ids={name: cut(field) for name, field in stream.ids.items()},
        numbers=cut(stream.numbers),
        gap_seconds=cut(stream.gap_seconds),
    )


def _normal(*shape: int, inputs: int) -> Tensor:
    return torch.randn(*shape) * inputs**-0.5
