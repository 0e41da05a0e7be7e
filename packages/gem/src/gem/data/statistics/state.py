"""The state behind the declared statistics, and one step of it. Part of `gem.data.statistics`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from gem.data.features import StreamRead
from gem.data.join import packed_ranges
from gem.data.names import nearest
from gem.data.running_scale import RunningScaler
from gem.data.sources import Sources
from gem.data.statistics.histories import Histories, Weight
from gem.data.statistics.pairs import Pairs
from gem.data.statistics.rates import (
    Block,
    Counter,
    Rate,
    count_output,
    label_delay_ms,
    logit,
    sum_of_each,
)
from gem.data.statistics.spec import (
    CountStatistic,
    EventStatistic,
    FeedbackSpec,
    HistoryCount,
    HistoryGap,
    HistoryStatistic,
    PairStatistic,
    RateStatistic,
    StatisticSpec,
    WeightSpec,
)
from gem.data.transforms import apply_transforms, resolved_transforms
from gem_opkit.errors import ConfigError, DataError, UnsupportedError, refusal


@dataclass(frozen=True, slots=True)
class Outputs:
    """Statistics of consecutive rows, from `first` on.

    Attributes:
        first: the first row.
        numbers: float32 (n, C), after the transforms and the running scale.
        events: per stream, float32 (T, C) before transforms, and where each row's events begin,
            int64 (n+1,).
    """

    first: int
    numbers: np.ndarray
    events: dict[str, tuple[np.ndarray, np.ndarray]]

    @property
    def end(self) -> int:
        """The row after the last."""
        return self.first + len(self.numbers)

    def cut(self, low: int, high: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The part that lies in rows low .. high-1.

        Args:
            low: first row wanted.
            high: the row after the last one wanted.

        Returns:
            numbers, float32 (m, C), and per stream the events of those rows, float32 (T, C).
        """
        start = max(low - self.first, 0)
        stop = max(min(high - self.first, len(self.numbers)), start)
        return self.numbers[start:stop], {
            stream: values[offsets[start] : offsets[stop]]
            for stream, (values, offsets) in self.events.items()
        }


_RowColumn = Callable[[Block], np.ndarray]
_EventColumn = Callable[[], np.ndarray]


class StatisticState:
    """Counts, rates and pair sums of all rows walked over so far.

    Attributes:
        example_names: of the row columns, in the order of their declarations.
        event_names: of the event columns, per stream.

    Args:
        sources: of the data set and the recipe.
        plain: continuous inputs that come before the statistics, where a running scale has to
            see them too.

    Raises:
        ConfigError: a declaration names something that is not there or does not fit.
    """

    def __init__(self, sources: Sources, plain: tuple[str, ...] = ()) -> None:
        self._sources = sources
        self._counters: dict[tuple[tuple[str, ...], str, int], Counter] = {}
        self._rates: dict[str, Rate] = {}
        self._histories: dict[str, Histories] = {}
        self._pairs: dict[str, Pairs] = {}
        self._row_columns: dict[str, _RowColumn] = {}
        self._event_columns: dict[str, dict[str, tuple[Histories, _EventColumn]]] = {}
        for name in plain:
            self._row_columns[name] = _plain_column(sources, name)
        for spec in sources.data.statistics:
            self._declare(spec)
        self.example_names = tuple(self._row_columns)
        self._transforms = resolved_transforms(sources.dataset.spec, sources.data)
        scale = sources.data.running_scale
        self._scaler = None if scale is None else RunningScaler(scale, len(self.example_names))
        self.event_names = {stream: tuple(of) for stream, of in self._event_columns.items()}

    @property
    def delay_ms(self) -> int:
        """How long after its row the last label that is added is known."""
        labels = {label for _, label, _ in self._counters}
        return max((label_delay_ms(self._sources, label) for label in labels), default=0)

    def walk(
        self, block: Block, *, outputs: bool, add_pairs: bool = True, add_rates: bool = True
    ) -> list[Outputs]:
        """Take a step: what the block's rows read, then what they add.

        Args:
            block: rows in time order; none may have the time of a row that has added.
            outputs: whether the statistics of the rows are wanted.
            add_pairs: whether the rows add to the pair sums.
            add_rates: whether they add to counts and rates.

        Returns:
            one element with the statistics, or none.
        """
        reads = outputs or (add_pairs and bool(self._pairs))
        for counter in self._counters.values():
            counter.open(block, reads=reads)
        result: list[Outputs] = []
        if reads:
            for rate in self._rates.values():
                rate.open(len(block.rows))
            used = self._histories if outputs else {k: p.histories for k, p in self._pairs.items()}
            for histories in dict.fromkeys(used.values()):
                histories.open(block)
            for pairs in self._pairs.values():
                pairs.open(block, add=add_pairs)
        if outputs:
            result.append(self._outputs(block))
        for counter in self._counters.values():
            counter.close(add=add_rates)
        if self._scaler is not None:
            self._scaler.close(add=add_rates)
        return result

    def saved(self) -> dict[str, np.ndarray]:
        """Everything that was added so far, for `restore`.

        Returns:
            name -> array; of a table of sums only the rows that hold any.
        """
        parts: list[tuple[str, Counter | Pairs | RunningScaler]] = [
            *((f"counter{place}", one) for place, one in enumerate(self._counters.values())),
            *((f"pairs{place}", one) for place, one in enumerate(self._pairs.values())),
            *([] if self._scaler is None else [("scale", self._scaler)]),
        ]
        return {f"{n}.{key}": array for n, part in parts for key, array in part.saved().items()}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Stand where another state stood, and learn nothing from now on.

        Blocks of rows that are read afterwards may come in any order of time. Their groups have to
        be numbered from 1: what was waiting to be known belongs to group 0.

        Args:
            arrays: of `saved`, of a state of the same declarations.

        Raises:
            DataError: an array is missing, or has another size.
        """
        for place, counter in enumerate(self._counters.values()):
            counter.restore(_under(f"counter{place}.", arrays))
        for place, pairs in enumerate(self._pairs.values()):
            pairs.restore(_under(f"pairs{place}.", arrays))
        if self._scaler is not None:
            self._scaler.restore(_under("scale.", arrays))

    @property
    def learns_from_outputs(self) -> bool:
        """Whether a replay has to compute the outputs, too: a running scale is made of them."""
        return self._scaler is not None

    def nothing(self) -> Outputs:
        """Outputs of no rows."""
        zero = np.zeros(1, np.int64)
        return Outputs(
            0,
            np.empty((0, len(self.example_names)), np.float32),
            {
                stream: (np.empty((0, len(names)), np.float32), zero)
                for stream, names in self.event_names.items()
            },
        )

    def _outputs(self, block: Block) -> Outputs:
        numbers = np.empty((len(block.rows), len(self._row_columns)), np.float32)
        for place, column in enumerate(self._row_columns.values()):
            numbers[:, place] = column(block)
        apply_transforms(numbers, self.example_names, self._transforms)
        if self._scaler is not None:
            numbers = self._scaler.scale(block, numbers)
        events = {}
        for stream, columns in self._event_columns.items():
            pieces = []
            offsets = np.zeros(len(block.rows) + 1, np.int64)
            for histories, column in columns.values():
                # The reader may give fewer of the last events than the statistics look at.
                lengths = np.minimum(np.diff(histories.offsets), self._read(stream).max_events)
                np.cumsum(lengths, out=offsets[1:])
                last = packed_ranges(histories.offsets[1:] - lengths, offsets)
                pieces.append(column()[last].astype(np.float32))
            events[stream] = (np.stack(pieces, axis=1), offsets)
        return Outputs(int(block.rows[0]), numbers, events)

    # -- resolving declarations ----------------------------------------------------------------
    def _declare(self, spec: StatisticSpec) -> None:
        match spec:
            case RateStatistic():
                self._declare_rate(spec)
            case CountStatistic():
                counter = self._counter(spec.keys, spec.label, spec.max_keys)
                self._row_columns[spec.name] = lambda block: count_output(counter)
            case HistoryCount():
                self._row_columns[spec.name] = self._history_count(spec)
            case HistoryGap():
                self._row_columns[spec.name] = self._history_gap(spec)
            case HistoryStatistic():
                self._row_columns[spec.name] = self._history(spec)
            case PairStatistic():
                self._row_columns[spec.name] = self._pair(spec)
            case EventStatistic():
                stream = spec.feedback.stream
                self._check_event_statistic(spec)
                column = self._event(spec)
                self._event_columns.setdefault(stream, {})[spec.name] = column

    def _counter(self, keys: tuple[str, ...], label: str, max_keys: int) -> Counter:
        key = (keys, label, max_keys)
        if key not in self._counters:
            self._counters[key] = Counter(self._sources, keys, label, max_keys)
        return self._counters[key]

    def _declare_rate(self, spec: RateStatistic) -> None:
        towards = None
        if isinstance(spec.towards, str):
            towards = self._rate(spec.towards, f"towards of {spec.name!r}")
        rate = Rate(spec, self._counter(spec.keys, spec.label, spec.max_keys), towards)
        self._rates[spec.name] = rate
        if spec.output != "none":
            self._row_columns[spec.name] = lambda block: rate.output()

    def _rate(self, name: str, what: str) -> Rate:
        if name not in self._rates:
            raise ConfigError(
                refusal(
                    "statistics",
                    what,
                    must="be a rate that is declared before it",
                    got=repr(name) + nearest(name, self._rates),
                    fix="correct the name or the order",
                )
            )
        return self._rates[name]

    def _histories_of(self, feedback: FeedbackSpec, base: str, name: str) -> Histories:
        key = feedback.model_dump_json() + base
        if key not in self._histories:
            rate = self._rate(base, f"base of {name!r}")
            self._histories[key] = Histories(self._sources, feedback, rate)
        return self._histories[key]

    def _pairs_of(self, spec: PairStatistic | EventStatistic) -> Pairs:
        key = f"{spec.feedback.model_dump_json()}{spec.base} {spec.max_pairs}"
        if key not in self._pairs:
            self._check_pairs_learn_at_once(spec)
            histories = self._histories_of(spec.feedback, spec.base, spec.name)
            self._pairs[key] = Pairs(self._sources, histories, self._rates[spec.base], spec)
        return self._pairs[key]

    def _check_pairs_learn_at_once(self, spec: PairStatistic | EventStatistic) -> None:
        label = self._rate(spec.base, f"base of {spec.name!r}").spec.label
        delay_ms = label_delay_ms(self._sources, label)
        if delay_ms > 1:
            raise UnsupportedError(
                refusal(
                    "statistics",
                    repr(spec.name),
                    must="be made of a label that is known at once, as pairs are",
                    got=f"{label!r}, visible_after_ms = {delay_ms}",
                    fix="leave it out, or use a statistic of kind 'history'",
                )
            )

    def _read(self, stream: str) -> StreamRead:
        return (self._sources.data.streams or {}).get(stream, StreamRead())

    def _check_event_statistic(self, spec: EventStatistic) -> None:
        stream, reads = spec.feedback.stream, self._sources.data.streams
        if reads is not None and stream not in reads:
            rule, got = f"be about a stream that is read ({', '.join(reads)})", stream
        elif self._read(stream).max_events > spec.feedback.max_events:
            rule = f"cover the {self._read(stream).max_events} events that are read"
            got = f"feedback.max_events = {spec.feedback.max_events}"
        else:
            return
        raise ConfigError(
            refusal("statistics", repr(spec.name), must=rule, got=got, fix="change one of them")
        )

    # -- columns -------------------------------------------------------------------------------
    def _history_count(self, spec: HistoryCount) -> _RowColumn:
        stream = self._sources.stream(spec.stream)
        users, times = self._sources.users, self._sources.times

        def column(block: Block) -> np.ndarray:
            rows = block.rows
            history = stream.index.history(users[rows], times[rows], spec.max_events)
            return np.log1p(history.lengths)

        return column

    def _history_gap(self, spec: HistoryGap) -> _RowColumn:
        stream = self._sources.stream(spec.stream)
        users, times = self._sources.users, self._sources.times

        def column(block: Block) -> np.ndarray:
            rows, index = block.rows, stream.index
            history = index.history(users[rows], times[rows], spec.max_events)
            gaps = np.zeros(len(rows))
            filled = np.flatnonzero(history.lengths)
            place = history.offsets[:-1] if spec.event == "oldest" else history.offsets[1:] - 1
            event_times = index.times[history.events[place[filled]]]
            gaps[filled] = np.log1p((times[rows][filled] - event_times) / 1000.0)
            return gaps

        return column

    def _history(self, spec: HistoryStatistic) -> _RowColumn:
        histories = self._histories_of(spec.feedback, spec.base, spec.name)
        weights = self._weights(spec.weights, histories)

        def column(block: Block) -> np.ndarray:
            w = _product(histories, weights) * histories.known
            total = sum_of_each(w, histories.offsets)
            if spec.value == "weight":
                return np.log1p(total)
            if spec.value == "rate":
                liked = sum_of_each(w * histories.past, histories.offsets)
                return logit((liked + spec.prior * histories.rate) / (total + spec.prior))
            values = histories.residual
            if spec.value == "centred":
                values = histories.centred(spec.centre_prior)
            return sum_of_each(w * values, histories.offsets) / (total + spec.prior)

        return column

    def _pair(self, spec: PairStatistic) -> _RowColumn:
        pairs = self._pairs_of(spec)
        histories = pairs.histories

        def column(block: Block) -> np.ndarray:
            if spec.value == "votes":
                votes = pairs.affinity(spec.prior) * histories.centred(spec.centre_prior)
                return sum_of_each(votes, histories.offsets)
            counts = sum_of_each(pairs.reading.counts * histories.known, histories.offsets)
            return np.log1p(counts / np.maximum(histories.known_counts(), 1.0))

        return column

    def _event(self, spec: EventStatistic) -> tuple[Histories, _EventColumn]:
        if spec.value == "pair":
            pairs = self._pairs_of(spec)
            return pairs.histories, lambda: pairs.affinity(spec.prior)
        histories = self._histories_of(spec.feedback, spec.base, spec.name)
        weights = self._weights(spec.weights, histories)
        columns: dict[str, _EventColumn] = {
            "rate": lambda: histories.rate_logits,
            "residual": lambda: histories.residual,
            "centred": lambda: histories.centred(spec.centre_prior),
            "weight": lambda: _product(histories, weights),
        }
        return histories, columns[spec.value]

    def _weights(self, specs: tuple[WeightSpec, ...], histories: Histories) -> list[Weight]:
        return [Weight(self._sources, spec, histories.item_field) for spec in specs]


def _under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
    if not found:
        raise DataError(
            refusal(
                "statistics",
                f"state of {prefix.removesuffix('.')}",
                must="be among what was saved",
                got=", ".join(arrays) or "nothing",
                fix="save it again with these declarations",
            )
        )
    return found


def _plain_column(sources: Sources, name: str) -> _RowColumn:
    values = sources.numbers(name)
    return lambda block: values(block.rows)


def _product(histories: Histories, weights: list[Weight]) -> np.ndarray:
    product = np.ones(len(histories.owners))
    for weight in weights:
        product = product * histories.weigh(weight)
    return product
