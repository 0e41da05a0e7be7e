"""Sums over pairs of a candidate and an event of its user. Part of `gem.data.statistics`."""

from collections.abc import Mapping

import numpy as np

from gem.data.sources import Sources
from gem.data.statistics.histories import Histories
from gem.data.statistics.keyed_sums import FIXED_POINT, PairSums, Reading, to_fixed
from gem.data.statistics.rates import Block, Rate
from gem.data.statistics.spec import EventStatistic, PairStatistic


class Pairs:
    """Pair sums of the open block's candidates with their own events.

    Attributes:
        histories: the events of the block's rows.
        reading: sums and counts of each event with its row's candidate, as the row may know them.

    Args:
        sources: of the data set and the recipe.
        histories: shared with other statistics; its owner opens it first.
        base: rate of the label that the pairs learn.
        spec: says how many pairs are kept.
    """

    def __init__(
        self,
        sources: Sources,
        histories: Histories,
        base: Rate,
        spec: PairStatistic | EventStatistic,
    ) -> None:
        self.histories = histories
        self._labels = sources.example_column(base.spec.label)
        self._sums = PairSums(base.counter.space.size, spec.max_pairs)
        self.reading = Reading(np.empty(0, np.int64), np.empty(0, np.int64))

    def open(self, block: Block, *, add: bool) -> None:
        """Read the pairs of a block, and add what its rows learn.

        Args:
            block: rows in time order.
            add: whether the rows add.
        """
        histories = self.histories
        owners = histories.owners
        labels = self._labels[block.rows].astype(np.float64)
        adds = block.learns & ~np.isnan(labels) & add
        surprise = np.where(adds, labels - histories.rate, 0.0)
        self.reading = self._sums.read_and_add(
            self._sums.rows(histories.item[owners], histories.items),
            histories.groups,
            to_fixed(surprise[owners] * histories.residual),
            adds[owners] & histories.known,
        )

    def saved(self) -> dict[str, np.ndarray]:
        """Sums so far; for `restore`."""
        return self._sums.saved()

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Stand where other pairs stood.

        Args:
            arrays: of `saved`.

        Raises:
            DataError: they are of another number of pairs.
        """
        self._sums.restore(arrays)

    def affinity(self, prior: float) -> np.ndarray:
        """S / (C + prior) of each event with its row's candidate.

        Args:
            prior: pseudo-count, in events.

        Returns:
            float64, one an event.
        """
        return self.reading.sums / FIXED_POINT / (self.reading.counts + prior)
