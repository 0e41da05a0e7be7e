"""The histories of a block's rows, and weights over their events. Part of `gem.data.statistics`.

All arrays are packed: the events of the first row, then those of the second, ... oldest first.
"""

from collections.abc import Callable

import numpy as np

from gem.data.columns import Column
from gem.data.fields import EntitySpec
from gem.data.names import nearest
from gem.data.sources import Sources
from gem.data.statistics.rates import Block, Rate, logit, sum_of_each
from gem.data.statistics.spec import (
    CountWeight,
    FeedbackSpec,
    NumberWeight,
    OverlapWeight,
    RankWeight,
    RateWeight,
    SameWeight,
    TimeWeight,
    WeightSpec,
    WindowWeight,
)
from gem_opkit.errors import ConfigError, refusal


class Histories:
    """Histories with past labels, against a base rate.

    `open` fills the attributes for a block; `n` rows, `T` events.

    Attributes:
        offsets: where each row's events begin, int64 (n+1,).
        groups: of the row that reads, int64 (T,).
        items, item: key of each event's item (T,) and of the candidate (n,), int64.
        gap_s: seconds from the event to the example, float64 (T,).
        known: whether the past label is known, bool (T,).
        past: past label, 0 where unknown, float64 (T,).
        rates, counts: base rate (T,) and count (T,) of the event's item, float64.
        rate, count: the same of the candidate, (n,).
        residual: past - rates, 0 where unknown, float64 (T,).
    """

    def __init__(self, sources: Sources, feedback: FeedbackSpec, base: Rate) -> None:
        self._sources, self._feedback, self._base = sources, feedback, base
        self._source = sources.stream(feedback.stream)
        name = base.spec.keys[0] if len(base.spec.keys) == 1 else None
        info = base.counter.space.single
        own = {field.name: field.table for field in self._source.spec.ids}
        if name is None or info is None or own.get(name) != info.table:
            raise ConfigError(
                refusal(
                    "statistics",
                    "base",
                    must="be a rate with one single-valued key that is also an id field of the "
                    f"stream {feedback.stream!r} with the same table",
                    got=f"{base.spec.name!r} with keys {', '.join(base.spec.keys) or 'none'}; the "
                    f"stream has {', '.join(own) or 'no id field'}",
                    fix="name another base",
                )
            )
        if base.towards is not None and base.towards.spec.keys:
            raise ConfigError(
                refusal(
                    "statistics",
                    f"towards of {base.spec.name!r}",
                    must="be a number or a rate without keys, in a rate that is a base",
                    got=repr(base.towards.spec.name),
                    fix="declare a second rate for the base",
                )
            )
        if feedback.field not in own:
            raise ConfigError(
                refusal(
                    "statistics",
                    "feedback.field",
                    must=f"be an id field of the stream {feedback.stream!r}",
                    got=repr(feedback.field) + nearest(feedback.field, own),
                    fix="correct the name",
                )
            )
        self.item_field = name
        self._entity = next(
            (entity for entity in sources.dataset.spec.entities if entity.key == name), None
        )

    def open(self, block: Block) -> None:
        """Join the histories of a block's rows and read the base rate of every event's item.

        Args:
            block: rows whose counters and rates are open.
        """
        sources, feedback = self._sources, self._feedback
        self._times = times = sources.times[block.rows]
        history = self._source.index.history(sources.users[block.rows], times, feedback.max_events)
        self.offsets, lengths = history.offsets, history.lengths
        self.owners = np.repeat(np.arange(len(block.rows)), lengths)
        self.groups = block.groups[self.owners]
        gap_ms = times[self.owners] - self._source.index.times[history.events]
        self.gap_s = gap_ms / 1000.0
        self.event_ids = self._source.visible(self.item_field, history.events, gap_ms)
        self.item_ids = sources.ids(self.item_field)(block.rows).values
        shown = self._source.visible(feedback.field, history.events, gap_ms)
        positive = _among(shown, feedback.positive)
        self.known = positive | _among(shown, feedback.negative)
        self.past = positive.astype(np.float64)
        counter, towards = self._base.counter, self._base.row_towards
        self.items = counter.space.of_ids([self.event_ids], len(self.event_ids))
        self.item = counter.keys
        reading = counter.read(self.items, self.groups)
        self.rates = reading.means(self._base.spec.prior, towards[self.owners])
        self.counts = reading.counts
        self.rate, self.count = self._base.rate, counter.reading.counts
        self.residual = np.where(self.known, self.past - self.rates, 0.0)
        self._logits: np.ndarray | None = None
        self._entity_rows: tuple[np.ndarray, np.ndarray] | None = None
        self._weights: dict[str, np.ndarray] = {}

    @property
    def rate_logits(self) -> np.ndarray:
        """Logit of the base rate of each event's item."""
        if self._logits is None:
            self._logits = logit(self.rates)
        return self._logits

    def known_counts(self) -> np.ndarray:
        """Events with a known past label in each row's history, float64 (n,)."""
        return sum_of_each(self.known.astype(np.float64), self.offsets)

    def centred(self, centre_prior: float) -> np.ndarray:
        """Residuals minus the row's shrunken mean residual.

        Args:
            centre_prior: events of residual 0 that the mean counts beside the known ones, >= 0.

        Returns:
            float64 (T,); 0 where the past label is unknown.
        """
        counts = self.known_counts()
        total = sum_of_each(self.residual, self.offsets)
        # 0 / 0 cannot come: a row without known events has no centred residual either.
        centre = total / np.where(counts + centre_prior > 0, counts + centre_prior, 1.0)
        return np.where(self.known, self.residual - centre[self.owners], 0.0)

    def entity_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the item's entity: of each event's item, and of each row's candidate."""
        if self._entity_rows is None:
            table = self._sources.entity_table(self._item_entity())
            events = table.rows_of(self.event_ids, self._times[self.owners])
            self._entity_rows = events, table.rows_of(self.item_ids, self._times)
        return self._entity_rows

    def _item_entity(self) -> EntitySpec:
        if self._entity is None:
            raise ConfigError(f"statistics: no entity has the key {self.item_field!r}")
        return self._entity

    def weigh(self, weight: "Weight") -> np.ndarray:
        """A weight of every event, computed once a block.

        Args:
            weight: resolved against the same data set.

        Returns:
            float64 (T,), >= 0.
        """
        if weight.key not in self._weights:
            self._weights[weight.key] = weight.of(self)
        return self._weights[weight.key]


def _among(values: np.ndarray, ids: tuple[int, ...]) -> np.ndarray:
    found = np.zeros(len(values), bool)
    for wanted in ids:
        found |= values == wanted
    return found


class Weight:
    """A declared weight, resolved against the data set.

    Attributes:
        key: text that equal declarations share.
        of: histories of the open block -> float64 (T,).
    """

    def __init__(self, sources: Sources, spec: WeightSpec, item_field: str) -> None:
        self.key = spec.model_dump_json()
        self.of = _resolve(sources, spec, item_field)


def _resolve(
    sources: Sources, spec: WeightSpec, item_field: str
) -> Callable[[Histories], np.ndarray]:
    match spec:
        case RankWeight(scale=scale):
            return lambda h: np.exp(-_ranks(h) / scale)
        case TimeWeight(scale_s=scale):
            return lambda h: 1.0 / (1.0 + h.gap_s / scale)
        case WindowWeight(window_s=window):
            return lambda h: (h.gap_s < window).astype(np.float64)
        case RateWeight(scale=scale):
            return lambda h: np.exp(-0.5 * ((h.rate_logits - logit(h.rate)[h.owners]) / scale) ** 2)
        case CountWeight(scale=scale):
            return lambda h: np.exp(
                -np.abs(np.log1p(h.counts) - np.log1p(h.count)[h.owners]) / scale
            )
        case NumberWeight(field=field, scale=scale):
            _must_be_of_item(sources, field, item_field, "numbers")
            numbers = sources.entity_numbers(field).astype(np.float64)
            return lambda h: _number_near(h, numbers, scale)
        case SameWeight(field=field):
            if field == item_field:
                return lambda h: (h.event_ids == h.item_ids[h.owners]).astype(np.float64)
            _must_be_of_item(sources, field, item_field, "ids")
            column = sources.entity_ids(field)
            if column.offsets is not None:
                raise ConfigError(
                    refusal(
                        "statistics",
                        "weights.field",
                        must="be single-valued for kind = 'same'",
                        got=repr(field),
                        fix="use kind = 'overlap'",
                    )
                )
            return lambda h: _same(h, column.values)
        case OverlapWeight(field=field, power=power):
            _must_be_of_item(sources, field, item_field, "ids")
            info = sources.id_info(field)
            masks = _bit_masks(sources.entity_ids(field), info.rows, sources.fill_of(field))
            return lambda h: _overlap(h, masks) ** power


def _must_be_of_item(sources: Sources, field: str, item_field: str, kind: str) -> None:
    held = sources.entity_field(field)
    if held is None or held[0].key != item_field or held[1] != kind:
        known = [
            one.name
            for entity in sources.dataset.spec.entities
            if entity.key == item_field
            for one in (entity.numbers if kind == "numbers" else entity.ids)
        ]
        raise ConfigError(
            refusal(
                "statistics",
                "weights.field",
                must=f"be one of the {kind} of the entity with key {item_field!r}",
                got=repr(field) + nearest(field, known),
                fix="correct the name",
            )
        )


def _ranks(h: Histories) -> np.ndarray:
    """0 for the newest event of each history, 1 for the one before it, ..."""
    return h.offsets[1:][h.owners] - 1 - np.arange(len(h.owners))


def _number_near(h: Histories, numbers: np.ndarray, scale: float) -> np.ndarray:
    events, candidates = h.entity_rows()
    return np.exp(-np.abs(numbers[events] - numbers[candidates][h.owners]) / scale)


def _same(h: Histories, ids: np.ndarray) -> np.ndarray:
    events, candidates = h.entity_rows()
    return (ids[events] == ids[candidates][h.owners]).astype(np.float64)


def _overlap(h: Histories, masks: np.ndarray) -> np.ndarray:
    """Jaccard index of the id sets of each event's item and the candidate; 0 for two empty sets."""
    events, candidates = h.entity_rows()
    both = np.zeros(len(events))
    either = np.zeros(len(events))
    for word in masks:
        mine, theirs = word[candidates][h.owners], word[events]
        both += np.bitwise_count(mine & theirs)
        either += np.bitwise_count(mine | theirs)
    return both / np.maximum(either, 1.0)


def _bit_masks(column: Column, rows: int, fill: int) -> np.ndarray:
    """Id sets as bits, uint64 (words, entity rows); the fill is no member of any set."""
    offsets = np.arange(len(column.values) + 1) if column.offsets is None else column.offsets
    owners = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    kept = column.values != fill
    ids, owners = column.values[kept], owners[kept]
    masks = np.zeros((-(-rows // 64), len(offsets) - 1), np.uint64)
    np.bitwise_or.at(masks, (ids // 64, owners), np.uint64(1) << (ids % 64).astype(np.uint64))
    return masks
