"""What the log and its statistics say of the rows of a step, each by itself."""

import numpy as np

from gem.data.assemble import Arrays, Assembler
from gem.data.dealing import Dealer, in_batch_order, joined
from gem.data.spans import Span
from gem.data.statistics.engine import StatisticsBlock, StatisticsCursor, StatisticsEngine


class ReaderParts:
    """The two parts of a reader's batches, for whoever puts them together.

    Args:
        assembler: joins rows.
        engine: of the statistics; None where the recipe has none.
        dealer: of the rows of a step; None where each rank takes those that follow one another.
    """

    def __init__(
        self, assembler: Assembler, engine: StatisticsEngine | None, dealer: Dealer | None
    ) -> None:
        self._assembler, self._engine, self._dealer = assembler, engine, dealer
        self._cursor: StatisticsCursor | None = None

    def arrays(self, span: Span) -> Arrays:
        """What the log says of the rows.

        Args:
            span: in any order.

        Returns:
            arrays by name.
        """
        if self._dealer is None or not span.dealt:
            return self._assembler.arrays(span.low, span.high)
        dealt = self._dealer.deal(span)
        found = joined(in_batch_order(dealt, self._assembler.arrays))
        return found | {"work": dealt.work.to_array()}

    def statistics(self, span: Span) -> StatisticsBlock | None:
        """The statistics of the rows.

        Args:
            span: behind the one before, unless it begins a reading.

        Returns:
            them; None where the recipe has none.
        """
        if self._engine is None:
            return None
        if span.begins or self._cursor is None:
            self.release()
            self._cursor = self._engine.cursor(span.first)
        if self._dealer is None or not span.dealt:
            return self._cursor.rows(span.low, span.high)
        blocks = in_batch_order(self._dealer.deal(span), self._cursor.rows)
        return StatisticsBlock(
            np.concatenate([block.numbers for block in blocks]),
            joined([block.events for block in blocks]),
        )

    def release(self) -> None:
        """End a reading; the next one may go on from where it was."""
        if self._engine is not None and self._cursor is not None:
            self._engine.release(self._cursor)
        self._cursor = None
