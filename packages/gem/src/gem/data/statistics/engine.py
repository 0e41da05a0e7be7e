"""Streaming statistics: what a trainer knows about a row from labels of strictly earlier rows.

The engine walks over the log in time order, in blocks of rows. A row reads counts, rates and pair
sums as they stand before its own time: rows of equal time never see each other. Only labelled
rows of the training split add to them, each label from the time on at which it is known. What a
row gets depends on nothing but the log and the declarations: not on the batch size, the rank, the
number of ranks, the step from which a run is resumed, or where blocks begin
(`gem.data.statistics.keyed_sums` says why, to the last bit).

Every rank walks over all rows and computes all of their statistics; each takes its own rows.
Formulas: `gem.data.statistics.spec`.
"""

import threading
from dataclasses import dataclass

import numpy as np

from gem.data.sources import Sources
from gem.data.statistics.rates import Block
from gem.data.statistics.state import Outputs, StatisticState

BLOCK_ROWS = 512


@dataclass(frozen=True, slots=True)
class StatisticsBlock:
    """Statistics of consecutive rows.

    Attributes:
        numbers: one column a statistic, after its transform, float32 (n, C).
        events: per stream with event statistics, float32 (T, C): packed, for the events that the
            reader gives.
    """

    numbers: np.ndarray
    events: dict[str, np.ndarray]


class StatisticsEngine:
    """The declared statistics of a data set.

    Attributes:
        example_names: columns of `StatisticsBlock.numbers`, in order.
        last_learning: the block of the last training row.

    Args:
        sources: of the data set and the recipe.
        train: first and end row of the training split; only these rows add.
        plain: continuous inputs that come before the statistics, for a running scale.
        block_rows: about how many rows are computed together, > 0. Changes no value.

    Raises:
        ConfigError: a declaration names something that is not there or does not fit.
    """

    def __init__(
        self,
        sources: Sources,
        train: tuple[int, int],
        *,
        plain: tuple[str, ...] = (),
        block_rows: int = BLOCK_ROWS,
    ) -> None:
        self._sources, self._train, self._block_rows = sources, train, block_rows
        self._plain = plain
        state = StatisticState(sources, plain)
        # A block begins behind the last training row, so that later splits need no replay, and
        # one where the last training label is known.
        times = sources.times
        last = times[train[1] - 1] if train[1] > train[0] else 0
        self._behind = behind = int(np.searchsorted(times, last, side="right"))
        settled = int(np.searchsorted(times, last + max(state.delay_ms - 1, 0), side="right"))
        self._starts = _block_starts(times, block_rows, cuts=(behind, settled))
        # The first block where nothing is added or comes to be known any more.
        self._frozen = int(np.searchsorted(self._starts, max(train[1], settled)))
        self.last_learning = self.block_of(max(train[1] - 1, 0))
        self.example_names = state.example_names
        self._event_names = state.event_names
        self._idle: StatisticsCursor | None = StatisticsCursor(self, state)
        self._lock = threading.Lock()

    def event_names(self, stream: str) -> tuple[str, ...]:
        """Names of the statistics of a stream's events.

        Args:
            stream: its name.

        Returns:
            columns of `StatisticsBlock.events[stream]`, in order; empty where there are none.
        """
        return self._event_names.get(stream, ())

    def cursor(self, row: int) -> "StatisticsCursor":
        """Start reading at a row.

        Args:
            row: first row that will be asked for.

        Returns:
            a cursor of the caller's own, until it is released. It continues from the last one
            that was released where that is possible, and else walks over the log from its start.
        """
        with self._lock:
            cursor, self._idle = self._idle, None
        if cursor is None or not cursor.seek(row):
            cursor = StatisticsCursor(self, StatisticState(self._sources, self._plain))
            cursor.seek(row)
        return cursor

    def trained_state(self) -> StatisticState:
        """Walk over the training rows, and no further.

        Returns:
            a state of the caller's own, as the first row strictly later than the last training row
            finds it; labels that are not known by then wait.
        """
        state = StatisticState(self._sources, self._plain)
        for block in range(int(np.searchsorted(self._starts, self._behind))):
            self.compute(state, block, outputs=False)
        return state

    def forget(self) -> None:
        """Drop the state that lies ready; the next cursor makes one."""
        with self._lock:
            self._idle = None

    def release(self, cursor: "StatisticsCursor") -> None:
        """Give a cursor back, so that a later one may continue from it.

        Args:
            cursor: of `cursor`; not to be used after.
        """
        with self._lock:
            if self._idle is None or self._idle.blocks < cursor.blocks:
                self._idle = cursor

    def block_of(self, row: int) -> int:
        """The block that holds a row.

        Args:
            row: an example row, >= 0.

        Returns:
            number of the block; of the last one for a row past the end.
        """
        block = int(np.searchsorted(self._starts, row, side="right")) - 1
        return max(0, min(block, len(self._starts) - 2))

    @property
    def frozen(self) -> int:
        """The first block after which nothing is added any more."""
        return self._frozen

    def compute(self, state: StatisticState, block: int, *, outputs: bool) -> list[Outputs]:
        """Walk a state over a block.

        Args:
            state: stands before the block.
            block: its number.
            outputs: whether the statistics of its rows are wanted.

        Returns:
            the outputs, in pieces in row order; there may be none where they are not wanted.
        """
        first, end = int(self._starts[block]), int(self._starts[block + 1])
        outputs = outputs or state.learns_from_outputs
        if end - first <= self._block_rows:
            return state.walk(self._rows(first, end), outputs=outputs)
        # One time with more rows than a block. They do not see each other, so all of them read
        # before any adds, and the pairs add while the rates still stand.
        pieces = [
            self._rows(low, min(low + self._block_rows, end))
            for low in range(first, end, self._block_rows)
        ]
        results: list[Outputs] = []
        for piece in pieces:
            results += state.walk(piece, outputs=outputs, add_pairs=False, add_rates=False)
        for piece in pieces:
            state.walk(piece, outputs=False, add_pairs=True, add_rates=False)
        for piece in pieces:
            state.walk(piece, outputs=False, add_pairs=False, add_rates=True)
        return results

    def _rows(self, first: int, end: int) -> Block:
        rows = np.arange(first, end)
        times = self._sources.times[first:end]
        groups = np.cumsum(np.diff(times, prepend=times[:1]) != 0)
        return Block(rows, groups, (rows >= self._train[0]) & (rows < self._train[1]))


def _block_starts(times: np.ndarray, block_rows: int, *, cuts: tuple[int, ...]) -> np.ndarray:
    """Where blocks begin, and last the number of rows.

    Rows of one time are never parted, and a block begins at each of the rising `cuts`, where the
    time changes.
    """
    starts = [0]
    while starts[-1] < len(times):
        first = starts[-1]
        end = min(first + block_rows, len(times))
        end = next((cut for cut in cuts if first < cut < end), end)
        if end < len(times):
            change = int(np.searchsorted(times, times[end]))
            if change > first:
                end = change
            else:  # all from `first` on have one time: the block takes them whole
                end = int(np.searchsorted(times, times[end], side="right"))
        starts.append(end)
    return np.asarray(starts, np.int64)


class StatisticsCursor:
    """Reads the statistics of rows, forwards.

    Attributes:
        blocks: how many blocks the state has walked over.
    """

    def __init__(self, engine: StatisticsEngine, state: StatisticState) -> None:
        self._engine, self._state = engine, state
        self.blocks = 0
        self._ready: list[Outputs] = []  # of block `blocks - 1`, and before
        # Outputs from the last block with training rows to the last one that adds. A later split
        # begins there, where the time of its first rows is not after that of the last label.
        self._tail: list[Outputs] = []

    def seek(self, row: int) -> bool:
        """Go to a row, replaying what was added before it.

        Args:
            row: the next row that will be asked for.

        Returns:
            whether the cursor could: it cannot go back behind rows that have added since.
        """
        if _holds(self._ready, row):
            return True
        block, frozen = self._engine.block_of(row), self._engine.frozen
        if _holds(self._tail, row):
            self._ready, self.blocks = self._tail, min(self.blocks, frozen)
            return True
        if block < self.blocks and block < frozen:
            return False
        self._ready = []
        while self.blocks < min(block, frozen):
            self._engine.compute(self._state, self.blocks, outputs=False)
            self.blocks += 1
            self._tail = []  # it would have a gap
        self.blocks = block
        return True

    def rows(self, low: int, high: int) -> StatisticsBlock:
        """Statistics of rows low .. high-1.

        Args:
            low: first row, not before one that was asked for earlier.
            high: end of the rows, exclusive; may equal `low`.

        Returns:
            their statistics.
        """
        if low == high:
            return StatisticsBlock(*self._state.nothing().cut(0, 0))
        self._ready = [one for one in self._ready if one.end > low]
        while not self._ready or self._ready[-1].end < high:
            computed = self._engine.compute(self._state, self.blocks, outputs=True)
            if self._engine.last_learning <= self.blocks < self._engine.frozen:
                self._tail = self._tail + computed
            self.blocks += 1
            self._ready = self._ready + computed
            self._ready = [one for one in self._ready if one.end > low]
        pieces = [one.cut(low, high) for one in self._ready if one.first < high]
        return StatisticsBlock(
            np.concatenate([piece[0] for piece in pieces]),
            {
                stream: np.concatenate([piece[1][stream] for piece in pieces])
                for stream in pieces[0][1]
            },
        )


def _holds(pieces: list[Outputs], row: int) -> bool:
    return bool(pieces) and pieces[0].first <= row < pieces[-1].end
