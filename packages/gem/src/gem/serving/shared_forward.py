"""A model's forward pass over requests, with what candidates have in common computed once.

The formulas are those of the model's own ``forward``, whose modules do the work. What differs is
how many rows they see: the events of a request are looked up, made into tokens and run through
layers once, up to the first module that reads something of the candidate; from there on each
candidate has a copy of the history. Pooling that asks with learned queries runs once as well, and
pooling that asks with the candidate reads keys and values that were made once.

    shared history   T tokens a request          queries   candidates x target tokens a request
    own histories    T x candidates tokens       as in training
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from gem.data.batch import ExampleBatch, StreamBatch
from gem.model.din import DinModel, TargetAttention
from gem.model.gem import GemLayer, GemModel, StreamState, join_summaries
from gem.model.joins import join
from gem.model.sequence import (
    StreamBoth,
    StreamInteraction,
    StreamTransformer,
    spread_over_events,
)
from gem.model.stream_pooling import latest_tokens
from gem.model.structure import context_is_of_user, module_key
from gem.model.tables import batch_ids
from gem.model.tokenize import latest_events
from gem.model.user_model import UserHeads, ages_of_events, since_latest
from gem.serving.request_reader import ServedBatch
from gem_jagged.batch import Jagged, Layout

# Event tokens that lie side by side once candidates have histories of their own: a few hundred
# bytes each, in several copies at a time.
MOST_TOKENS = 1 << 17


@dataclass(frozen=True, slots=True)
class _Requests:
    """Which candidates belong together.

    Attributes:
        owners_N: request of each candidate.
        first_R: first candidate of each request.
        counts: candidates of each request.
        places_N: place of each candidate within its request.
    """

    owners_N: Tensor
    first_R: Tensor
    counts: tuple[int, ...]
    places_N: Tensor

    @classmethod
    def of(cls, served: ServedBatch) -> "_Requests":
        counts = torch.tensor(served.counts)
        first_R = (counts.cumsum(0) - counts).to(served.owners_N.device)
        place = torch.arange(len(served.owners_N), device=served.owners_N.device)
        return cls(served.owners_N, first_R, served.counts, place - first_R[served.owners_N])

    def packed(self, x_ND: Tensor) -> Tensor:
        """Rows of candidates as (R, most candidates, D); 0 where a request has fewer."""
        if len(self.counts) == 1:
            return x_ND.unsqueeze(0)
        out = x_ND.new_zeros(len(self.counts), max(self.counts), *x_ND.shape[1:])
        out[self.owners_N, self.places_N] = x_ND
        return out

    def unpacked(self, x_RCD: Tensor) -> Tensor:
        """Undo `packed`."""
        return x_RCD.squeeze(0) if len(self.counts) == 1 else x_RCD[self.owners_N, self.places_N]


@dataclass(frozen=True, slots=True)
class _Own:
    """A stream between two layers, and whether each candidate has it for itself by now."""

    state: StreamState
    is_shared: bool


def shared_logits(model: nn.Module, served: ServedBatch) -> Tensor:
    """Score candidates.

    Args:
        model: in evaluation mode.
        served: at least one candidate a request.

    Returns:
        logits_NA, fp32: to rounding what ``model(batch)`` gives where each candidate has a copy of
        its request's history.
    """
    if isinstance(model, DinModel):
        return _din(model, served)
    if context_is_of_user(cast(GemModel, model).spec):
        return _of_users(cast(GemModel, model), served)
    return _Pass(cast(GemModel, model), served).logits()


class _Pass:
    """One forward pass of the hybrid model."""

    def __init__(self, model: GemModel, served: ServedBatch) -> None:
        self.model, self.batch = model, served.batch
        self.requests = _Requests.of(served)
        self.shared = served.shared

    def logits(self) -> Tensor:
        """As `shared_logits`."""
        model, batch = self.model, self.batch
        streams = self.streams()
        embedded = model.tables(batch_ids(model.schema, batch, streams))
        numbers_ND = model.numbers(batch.numbers_BD)
        x_NMD = model.features(embedded, numbers_ND, batch.vectors_BV)
        candidate_ND = None if model.candidate is None else x_NMD[:, model.candidate]
        own = {name: self.tokens(name, events, embedded) for name, events in streams.items()}
        last_ND = self.layers(x_NMD, own, candidate_ND, numbers_ND)
        logits_NA = model.heads(last_ND, batch.domains_B)
        if model.shortcut is not None:
            logits_NA = logits_NA + model.shortcut(numbers_ND)
        return logits_NA

    def layers(
        self,
        x_NMD: Tensor,
        own: Mapping[str, _Own],
        candidate_ND: Tensor | None,
        numbers_ND: Tensor,
    ) -> Tensor:
        """What the heads read."""
        for layer in self.model.layers:
            x_NMD, own = self._layer(cast(GemLayer, layer), x_NMD, own, candidate_ND)
        last = [x_NMD.flatten(1), self._summaries(x_NMD, own).flatten(1)]
        if self.model.spec.numbers.trunk:
            last.append(numbers_ND)
        return join(last, dim=1)

    def streams(self) -> dict[str, StreamBatch]:
        """The events that the model reads, in one history a request or a candidate."""
        found = {}
        for name in (stream.name for stream in self.model.read):
            events = self.shared[name] if name in self.shared else self.batch.streams[name]
            found[name] = latest_events(events, self.model.spec.stream_spec(name).max_events)
        return found

    def tokens(self, name: str, events: StreamBatch, embedded: Mapping[str, Tensor]) -> _Own:
        """Event tokens of a stream, before the first layer."""
        gap_seconds_T = events.gap_seconds.values
        x_TD = self.model.events[module_key(name)](embedded, events.numbers.values, gap_seconds_T)
        state = StreamState(x_TD, events.numbers.layout, gap_seconds_T, visible_pairs={})
        return _Own(state, name in self.shared)

    def _summaries(self, x_NMD: Tensor, own: Mapping[str, _Own]) -> Tensor:
        return join_summaries(x_NMD, {name: one.state for name, one in own.items()})

    def _layer(
        self,
        layer: GemLayer,
        x_NMD: Tensor,
        own: Mapping[str, _Own],
        candidate_ND: Tensor | None,
    ) -> tuple[Tensor, dict[str, _Own]]:
        context = x_NMD if layer.summary is None else layer.summary(x_NMD)
        after = dict(own)
        for name, one in own.items():
            key = module_key(name)
            if key not in layer.streams:
                continue
            module = layer.streams[key]
            if isinstance(module, StreamBoth):
                one = self._transform(module.transformer, one, context)
                module = module.interaction
            if isinstance(module, StreamTransformer):
                after[name] = self._transform(module, one, context)
            else:
                interaction = cast(StreamInteraction, module)
                after[name] = self._interact(interaction, one, context, candidate_ND)
        return layer.experts(x_NMD, self._summaries(x_NMD, after)), after

    def _transform(self, module: StreamTransformer, own: _Own, context: Tensor) -> _Own:
        state = own.state
        if module.gate is None or not own.is_shared:
            # Without a gate nothing is read of the context, which is that of the candidates.
            x_TD = module(state.x_TD, state.layout, context, state.gap_seconds_T)
            return replace(own, state=replace(state, x_TD=x_TD))
        # Attention is the request's, the gate behind it each candidate's.
        normed_TD, x_TD = module.norm.beside(state.x_TD)
        out_TD = module.attention(normed_TD, state.layout, state.gap_seconds_T)
        gate_ND = 2.0 * torch.sigmoid(module.gate(context.flatten(1)))
        layout, index = self._spread(state.layout)
        gated_TD = out_TD.index_select(0, index) * spread_over_events(gate_ND, layout)
        x_TD = module.fed(x_TD.index_select(0, index) + gated_TD)
        gaps_T = state.gap_seconds_T.index_select(0, index)
        return _Own(StreamState(x_TD, layout, gaps_T, {}, state.summary_BPD), is_shared=False)

    def _interact(
        self,
        module: StreamInteraction,
        own: _Own,
        context: Tensor,
        candidate_ND: Tensor | None,
    ) -> _Own:
        if module.ffn is not None:
            own = self._apart(own)
            x_TD = module.ffn(own.state.x_TD, own.state.layout, context)
            own = replace(own, state=replace(own.state, x_TD=x_TD))
        state, owners_N = own.state, self.requests.owners_N
        parts = []
        if module.pool is not None:
            parts.append(module.pool(state.x_TD, state.layout))
        if module.recent:
            parts.append(latest_tokens(state.x_TD, state.layout, module.recent))
        if own.is_shared:
            parts = [part.index_select(0, owners_N) for part in parts]
        if module.target_pool is not None:
            parts.append(self._asked(module, own, cast(Tensor, candidate_ND)))
        summary = module.norm(module.lift(torch.cat(parts, dim=1)))
        return replace(own, state=replace(state, summary_BPD=summary))

    def _asked(self, module: StreamInteraction, own: _Own, candidate_ND: Tensor) -> Tensor:
        """Target tokens: (N, queries, width)."""
        make_query, pool = cast(nn.Module, module.make_query), cast(nn.Module, module.target_pool)
        query = make_query(candidate_ND)
        if isinstance(pool, TargetAttention):
            state = self._apart(own).state
            return pool(state.x_TD, state.layout, query).unsqueeze(1)
        query_NPD = query.unflatten(1, (module.queries, -1))
        if not own.is_shared:
            return pool(own.state.x_TD, own.state.layout, query_BPD=query_NPD)
        query_RCD = self.requests.packed(query_NPD).flatten(1, 2)
        read = pool(own.state.x_TD, own.state.layout, query_BPD=query_RCD)
        return self.requests.unpacked(read.unflatten(1, (-1, module.queries)))

    def _apart(self, own: _Own) -> _Own:
        """Give each candidate a copy of the history."""
        if not own.is_shared:
            return own
        state = own.state
        layout, index = self._spread(state.layout)
        return _Own(
            StreamState(
                state.x_TD.index_select(0, index),
                layout,
                state.gap_seconds_T.index_select(0, index),
                {},
                state.summary_BPD,
            ),
            is_shared=False,
        )

    def _spread(self, layout: Layout) -> tuple[Layout, Tensor]:
        return spread_histories(layout, self.requests.owners_N)


def spread_histories(layout: Layout, owners_N: Tensor) -> tuple[Layout, Tensor]:
    """Lay out a copy of its history for each candidate.

    Args:
        layout: of the histories, one a request.
        owners_N: request of each candidate, int64.

    Returns:
        the layout of the copies, and for each token of theirs the token that it copies.
    """
    owners = owners_N.cpu()
    lengths = layout.lengths.index_select(0, owners)
    starts = (layout.lengths.cumsum(0) - layout.lengths).index_select(0, owners)
    shift = starts - (lengths.cumsum(0) - lengths)
    index = torch.arange(int(lengths.sum())) + torch.repeat_interleave(shift, lengths)
    device = layout.offsets_O.device
    spread = Layout.from_lengths(lengths, device=device, dtype=layout.offsets_O.dtype)
    return spread, index.to(device)


def _of_users(model: GemModel, served: ServedBatch) -> Tensor:
    """A model of users runs all of its layers once a request; its heads alone see candidates."""
    batch, requests = served.batch, _Requests.of(served)
    if batch.streams:  # a number of their events is about the candidate
        return cast(Tensor, model(spread_batch(served)))
    passing = _Pass(model, served)
    streams = passing.streams()
    embedded = model.tables(batch_ids(model.schema, batch, streams))
    latest_R = since_latest(streams, len(served.counts), batch.numbers_BD)
    of_user = {
        name: embedded[name].index_select(0, requests.first_R) for name in model.features.names
    }
    numbers_RD = model.numbers(batch.numbers_BD).index_select(0, requests.first_R)
    x_RMD = model.features(embedded | of_user, numbers_RD)
    own = {}
    for name, events in streams.items():
        gaps = events.gap_seconds
        ages_T = ages_of_events(gaps.values, gaps.layout, latest_R)
        aged = replace(events, gap_seconds=gaps.with_values(ages_T))
        own[name] = replace(passing.tokens(name, aged, embedded), is_shared=False)
    last_RD = passing.layers(x_RMD, own, None, numbers_RD)
    last_ND = last_RD.index_select(0, served.owners_N)
    candidate_NE = join([embedded[name] for name in model.candidate_names], dim=1)
    return cast(UserHeads, model.heads)(last_ND, candidate_NE, batch.domains_B)[0]


def _din(model: DinModel, served: ServedBatch) -> Tensor:
    """DIN weighs every event by an MLP of it and the candidate: tokens are all that is shared."""
    batch = served.batch
    names = [stream.name for stream in model.schema.streams]
    streams = {n: served.shared[n] if n in served.shared else batch.streams[n] for n in names}
    embedded = model.tables(batch_ids(model.schema, batch, streams))
    numbers_ND = model.numbers(batch.numbers_BD)
    parts = [embedded[name] for name in model.names] + [numbers_ND]
    if model.candidate is not None:
        candidate_ND = model.candidate(embedded[model.schema.item])
        for name in names:
            key, events = module_key(name), streams[name]
            x_TD = model.events[key](embedded, events.numbers.values, events.gap_seconds.values)
            layout = events.numbers.layout
            if name in served.shared:
                layout, index = spread_histories(layout, served.owners_N)
                x_TD = x_TD.index_select(0, index)
            parts.append(model.attention[key](x_TD, layout, candidate_ND))
    logits_NA = model.heads(torch.cat(parts, dim=1), batch.domains_B)
    if model.shortcut is not None:
        logits_NA = logits_NA + model.shortcut(numbers_ND)
    return logits_NA


def spread_batch(served: ServedBatch) -> ExampleBatch:
    """The batch that training would have seen: each candidate with a history of its own.

    Args:
        served: candidates of requests.

    Returns:
        one example a candidate, with all streams.
    """
    streams = dict(served.batch.streams)
    for name, stream in served.shared.items():
        layout, index = spread_histories(stream.numbers.layout, served.owners_N)
        streams[name] = _taken(stream, layout, index)
    return replace(served.batch, streams=streams)


def _taken(stream: StreamBatch, layout: Layout, index: Tensor) -> StreamBatch:
    def take(field: Jagged) -> Jagged:
        return Jagged.from_layout(field.values.index_select(0, index), layout)

    return StreamBatch(
        ids={name: take(field) for name, field in stream.ids.items()},
        numbers=take(stream.numbers),
        gap_seconds=take(stream.gap_seconds),
    )
