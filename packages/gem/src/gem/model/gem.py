"""The hybrid model: event streams and non-sequence tokens that inform each other.

    tokens     x ← one for each feature         s ← one for each event of every stream
    layer      interaction:  s ← GDPA-PFFN(s, summary of x)    h ← pooling of s
               transformer:  s ← s + self-attention(s)         h as it was
               both:         one after the other
               each:         x ← Σ experts(part of x ‖ h) + x
    heads      logits ← MLP(x ‖ h) + linear(numbers)

Single-device code: parallelism wraps it from outside. Left out: losses (`gem.model.heads`) and
FLOPs (`gem.model.flops`).

Source: Kunlun (arXiv:2602.10016), InterFormer (arXiv:2411.09852), Wukong (arXiv:2403.02545).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from gem.data.batch import ExampleBatch, StreamBatch
from gem.data.schema import BatchSchema, StreamInput
from gem.model.distillation import Distillation
from gem.model.heads import Shortcut, TaskHeads
from gem.model.interaction import ExpertMixture, Summary
from gem.model.joins import join
from gem.model.sequence import (
    StreamBoth,
    StreamInteraction,
    StreamTransformer,
    visible_pairs_of,
)
from gem.model.spec import GemSpec, StreamSpec
from gem.model.structure import (
    check_schema,
    head_width,
    module_key,
    pooled_tokens,
    reads_summary,
    reduce_schema,
    streams_read,
    takes_part,
    user_side,
)
from gem.model.tables import batch_ids, batch_streams, build_tables, table_specs
from gem.model.tokenize import Columns, EventTokens, FeatureTokens, latest_events
from gem.model.user_model import UserHeads, UserLosses, ages_of_events, since_latest
from gem_jagged.batch import Jagged, Layout
from gem_parallel.side_stream import SideStream


@dataclass(frozen=True, slots=True)
class StreamState:
    """One stream between two layers.

    Attributes:
        x_TD: event tokens.
        layout: where each history begins.
        gap_seconds_T: seconds from each event to the example.
        visible_pairs: pattern of self-attention -> (query, key) pairs, counted once a batch.
        summary_BPD: pooled tokens of the latest interaction layer; None before the first.
    """

    x_TD: Tensor
    layout: Layout
    gap_seconds_T: Tensor
    visible_pairs: Mapping[str, int]
    summary_BPD: Tensor | None = None


class GemLayer(nn.Module):
    """One layer of either kind, over all streams that take part in it.

    Args:
        spec: the model.
        index: which of the layers this is.
        streams: the streams that the model reads.
        tokens: non-sequence tokens that come in.
        summary_tokens: pooled tokens of all streams that have a summary by now.
    """

    def __init__(
        self,
        spec: GemSpec,
        index: int,
        streams: tuple[StreamInput, ...],
        *,
        tokens: int,
        summary_tokens: int,
    ) -> None:
        super().__init__()
        self.kind = spec.layers[index]
        # Where experts of a transformer layer run beside its streams; None: behind them.
        self.side: SideStream | None = None
        taking_part = [stream for stream in streams if takes_part(spec, stream.name, index)]
        self.summary = (
            Summary(
                tokens,
                spec.summary_tokens,
                width=spec.width,
                hidden=spec.summary_hidden,
                activation=spec.activation,
            )
            if reads_summary(spec, streams, index)
            else None
        )
        self.streams = nn.ModuleDict(
            {module_key(s.name): _stream_layer(spec, s, index) for s in taking_part}
        )
        self.experts = ExpertMixture(
            tokens,
            summary_tokens,
            width=spec.width,
            spec=spec.experts,
            activation=spec.activation,
            dropout=spec.dropout,
        )

    def forward(
        self, x_BND: Tensor, states: Mapping[str, StreamState], candidate_BD: Tensor | None
    ) -> tuple[Tensor, dict[str, StreamState]]:
        """Run the layer.

        Args:
            x_BND: non-sequence tokens.
            states: stream name -> its events and its summary.
            candidate_BD: the candidate's token.

        Returns:
            non-sequence tokens, and every stream after the layer.
        """
        beside = None
        if self.side is not None and self.kind == "transformer":
            beside = self.side.begin(x_BND, join_summaries(x_BND, states))
        context_BND = x_BND if self.summary is None else self.summary(x_BND)
        after = {}
        for name, state in states.items():
            key = module_key(name)
            if key not in self.streams:
                after[name] = state
            elif self.kind == "interaction":
                x_TD, summary_BPD = self.streams[key](
                    state.x_TD, state.layout, context_BND, candidate_BD
                )
                after[name] = replace(state, x_TD=x_TD, summary_BPD=summary_BPD)
            elif self.kind == "both":
                both = cast(StreamBoth, self.streams[key])
                x_TD, summary_BPD = both(
                    state.x_TD,
                    state.layout,
                    context_BND,
                    candidate_BD,
                    state.gap_seconds_T,
                    visible_pairs=state.visible_pairs[both.transformer.pattern],
                )
                after[name] = replace(state, x_TD=x_TD, summary_BPD=summary_BPD)
            else:
                stream = cast(StreamTransformer, self.streams[key])
                x_TD = stream(
                    state.x_TD,
                    state.layout,
                    context_BND,
                    state.gap_seconds_T,
                    visible_pairs=state.visible_pairs[stream.pattern],
                )
                after[name] = replace(state, x_TD=x_TD)
        if beside is not None:  # the summaries are those that came in
            return beside(self.experts), after
        return self.experts(x_BND, join_summaries(x_BND, after)), after


def _stream_layer(spec: GemSpec, stream: StreamInput, index: int) -> nn.Module:
    """What a stream runs in a layer."""
    own, kind = spec.layer_stream_spec(stream.name, index), spec.layers[index]
    if kind == "transformer":
        return StreamTransformer(
            own,
            spec.width,
            summary_tokens=spec.summary_tokens,
            gated=spec.transformer_gate,
            activation=spec.activation,
        )
    make = StreamInteraction if kind == "interaction" else StreamBoth
    return make(own, spec.width, stream.max_events, activation=spec.activation)


class GemModel(nn.Module):
    """The hybrid model.

    Args:
        spec: every choice.
        schema: inputs, tasks and domains.

    Raises:
        ConfigError: spec and schema contradict each other.
    """

    def __init__(self, spec: GemSpec, schema: BatchSchema) -> None:
        super().__init__()
        inputs = schema
        schema = reduce_schema(schema, spec.leave_out)
        check_schema(spec, schema)
        self.spec, self.schema = spec, schema
        self.read = streams_read(spec, schema)
        self.tables = build_tables(spec.embeddings, schema, self.read)
        self._lookups = table_specs(spec.embeddings, schema, self.read)[1]
        # What layers read: of a model of users, nothing of the candidate.
        own_inputs = schema if spec.user_model is None else user_side(schema)
        self.features = FeatureTokens(spec, own_inputs)
        self.numbers = Columns(inputs.numbers, own_inputs.numbers)
        self.events = nn.ModuleDict()
        columns = {stream.name: stream.numbers for stream in inputs.streams}
        for stream in self.read:
            own = spec.stream_spec(stream.name)
            self.events[module_key(stream.name)] = EventTokens(
                stream,
                own.width,
                columns=columns[stream.name],
                embedding_dim=spec.embeddings.embedding_dim,
                gap_buckets=own.gap_buckets,
                hidden=own.token_hidden,
                activation=spec.activation,
                dropout=own.dropout,
            )
        names = [source.name for source in own_inputs.ids]
        self.candidate = names.index(own_inputs.item) if own_inputs.item in names else None
        self.layers = nn.ModuleList()
        tokens = self.features.tokens
        for index in range(len(spec.layers)):
            pooled = pooled_tokens(spec, self.read, index)
            layer = GemLayer(spec, index, self.read, tokens=tokens, summary_tokens=pooled)
            tokens = layer.experts.tokens
            self.layers.append(layer)
        width = head_width(spec, own_inputs, self.read)
        self.shortcut = None
        self.distillation: Distillation | None = None
        self.losses: UserLosses | None = None
        if spec.user_model is not None:
            self.candidate_names = tuple(n for n in _names(schema) if n not in schema.of_user)
            self.item_names = tuple(n for n in self.candidate_names if n in schema.of_item)
            self.heads: TaskHeads | UserHeads = UserHeads(
                width,
                spec,
                schema,
                candidate_ids=len(self.candidate_names),
                item_ids=len(self.item_names),
            )
            self.losses = UserLosses(spec.user_model, schema)
            return
        self.heads = TaskHeads(width, spec.heads, schema, activation=spec.activation)
        if spec.distillation is not None:
            self.distillation = Distillation(width, spec, schema)
        if spec.numbers.shortcut and schema.numbers:
            gain = spec.numbers.shortcut_gain
            self.shortcut = Shortcut(len(schema.numbers), len(schema.labels), gain=gain)

    def forward(self, batch: ExampleBatch) -> Tensor | tuple[Tensor, Tensor]:
        """Predict.

        Args:
            batch: examples with their histories.

        Returns:
            logits_BA, fp32, tasks in the order of the schema's labels. In training, a model with
            losses of its own also gives their sums over the examples, sum_K, each to be divided by
            its `auxiliary_known`.

        Raises:
            DataError: the batch lacks a stream or an input of the schema.
        """
        streams = self._streams(batch)
        latest_B = None
        if self.losses is not None:
            latest_B, streams = _from_latest(streams, batch)
        embedded = self.tables(batch_ids(self.schema, batch, streams))
        last_BD, numbers_BD = self._layers(batch, streams, embedded)
        if isinstance(self.heads, UserHeads):
            candidate_BE = _side_by_side(embedded, self.candidate_names)
            logits_BA, user_BU = self.heads(last_BD, candidate_BE, batch.domains_B)
            if self.losses is None or latest_B is None or not self.training:
                return logits_BA
            item_BE = _side_by_side(embedded, self.item_names)
            return logits_BA, self.losses.sums(batch, self.heads, user_BU, item_BE, latest_B)
        logits_BA = self.heads(last_BD, batch.domains_B)
        if self.shortcut is not None:
            logits_BA = logits_BA + self.shortcut(numbers_BD)
        if self.distillation is not None and self.training:
            return logits_BA, self.distillation(last_BD, batch)
        return logits_BA

    def auxiliary_known(self, batch: ExampleBatch) -> Tensor | None:
        """Weights of the examples that the model's own losses are means over.

        Args:
            batch: examples, with all their streams.

        Returns:
            weight_K, fp32, to be summed over ranks; None for a model without such losses.
        """
        if self.losses is not None:
            latest_B, _ = _from_latest(self._streams(batch), batch)
            return self.losses.known(batch, latest_B)
        return None if self.distillation is None else self.distillation.known(batch)

    def user_vectors(self, batch: ExampleBatch) -> Tensor:
        """Embed users. For a model of users alone.

        Args:
            batch: users with their histories; candidates, labels and numbers of others are not
                read.

        Returns:
            vectors_BU, fp32; score items by their product with `item_vectors`.
        """
        heads = cast(UserHeads, self.heads)
        _, streams = _from_latest(self._streams(batch), batch)
        own = user_side(self.schema)
        ids = batch_ids(own, batch, streams)
        last_BD, _ = self._layers(batch, streams, self._look_up(ids))
        return heads.user(last_BD).float()

    def item_vectors(self, ids: Mapping[str, Jagged]) -> Tensor:
        """Embed items. For a model of users alone.

        Args:
            ids: input of the item (`item_names`) -> ids of R items.

        Returns:
            vectors_RU, fp32.
        """
        heads = cast(UserHeads, self.heads)
        embedded = self._look_up({name: ids[name] for name in self.item_names})
        return heads.item(_side_by_side(embedded, self.item_names)).float()

    def _look_up(self, ids: Mapping[str, Jagged]) -> dict[str, Tensor]:
        """Rows of some features; tables want to be asked for all of them."""
        nothing = torch.zeros(0, dtype=torch.int64, device=next(self.parameters()).device)
        none = Jagged.from_lengths(nothing, [])
        features = [lookup.feature_name for lookup in self._lookups]
        missing = {name: none for name in features if name not in ids}
        return self.tables({**ids, **missing})

    def _layers(
        self, batch: ExampleBatch, streams: Mapping[str, StreamBatch], embedded: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What the heads read, and the numbers of the example."""
        numbers_BD = self.numbers(batch.numbers_BD)
        x_BND = self.features(embedded, numbers_BD, batch.vectors_BV)
        candidate_BD = None if self.candidate is None else x_BND[:, self.candidate]
        states = {}
        for stream in self.read:
            events = streams[stream.name]
            layout, gap_seconds_T = events.numbers.layout, events.gap_seconds.values
            states[stream.name] = StreamState(
                x_TD=self.events[module_key(stream.name)](
                    embedded, events.numbers.values, gap_seconds_T
                ),
                layout=layout,
                gap_seconds_T=gap_seconds_T,
                visible_pairs={
                    each.pattern: visible_pairs_of(each, layout)
                    for each in self._patterns(stream.name)
                },
            )
        for layer in self.layers:
            x_BND, states = layer(x_BND, states, candidate_BD)
        last = [x_BND.flatten(1), join_summaries(x_BND, states).flatten(1)]
        if self.spec.numbers.trunk:
            last.append(numbers_BD)
        return join(last, dim=1), numbers_BD

    @property
    def only_multiplies_vectors(self) -> bool:
        """Whether each vector of a table is read once, and by a product alone."""
        return self.features.projection is not None or not self.features.names

    def table_ids(self, batch: ExampleBatch) -> dict[str, Jagged]:
        """Give the ids that ``forward`` looks up.

        Args:
            batch: as for ``forward``.

        Returns:
            feature name -> ids.
        """
        return batch_ids(self.schema, batch, self._streams(batch))

    def _streams(self, batch: ExampleBatch) -> dict[str, StreamBatch]:
        return {
            name: latest_events(events, self.spec.stream_spec(name).max_events)
            for name, events in batch_streams(batch, self.read).items()
        }

    def _patterns(self, stream: str) -> list[StreamSpec]:
        """Settings of a stream in its layers, one of each pattern; one where it has no layer."""
        spec = self.spec
        layers = [spec.layer_stream_spec(stream, i) for i, _ in enumerate(spec.layers)]
        return list({each.pattern: each for each in (spec.stream_spec(stream), *layers)}.values())


def join_summaries(x_BND: Tensor, states: Mapping[str, StreamState]) -> Tensor:
    """Put the pooled tokens of all streams side by side.

    Args:
        x_BND: non-sequence tokens, which give batch, width and dtype.
        states: the streams.

    Returns:
        summary_BPD; P is 0 where no stream has a summary yet.
    """
    parts = [s.summary_BPD for s in states.values() if s.summary_BPD is not None]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim=1) if parts else x_BND[:, :0]


def _names(schema: BatchSchema) -> tuple[str, ...]:
    return tuple(source.name for source in schema.ids)


def _side_by_side(embedded: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return join([embedded[name] for name in names], dim=1)


def _from_latest(
    streams: Mapping[str, StreamBatch], batch: ExampleBatch
) -> tuple[Tensor, dict[str, StreamBatch]]:
    """Seconds since each user's latest event, and the streams with ages counted from it."""
    latest_B = since_latest(streams, batch.examples, batch.numbers_BD)
    aged = {}
    for name, events in streams.items():
        gaps = events.gap_seconds
        ages_T = ages_of_events(gaps.values, gaps.layout, latest_B)
        aged[name] = replace(events, gap_seconds=gaps.with_values(ages_T))
    return latest_B, aged
