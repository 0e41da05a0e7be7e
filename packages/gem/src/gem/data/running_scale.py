"""Continuous inputs brought to mean 0 and spread 1 by what was seen before. No look ahead.

A row is scaled by mean and variance over the training rows strictly earlier in time, shrunken
towards 0 and 1 by a prior. Sums are taken row by row in the order of the log, from its first row,
so they are the same to the last bit wherever blocks begin and from wherever a run is resumed.
"""

from collections.abc import Mapping

import numpy as np

from gem.data.features import RunningScale
from gem.data.statistics.rates import Block
from gem_opkit.errors import DataError, refusal


class RunningScaler:
    """Mean and variance of columns so far, and the map that they make."""

    def __init__(self, spec: RunningScale, columns: int) -> None:
        self._spec = spec
        # Row count, then sums of the values, then sums of their squares.
        self._known = np.zeros(1 + 2 * columns)
        self._announced = self._known

    def scale(self, block: Block, numbers: np.ndarray) -> np.ndarray:
        """Scale the rows of a block, and announce what they add.

        Args:
            block: the rows.
            numbers: float32 (n, C), finite.

        Returns:
            float32 (n, C): clip((x - mean) / spread, -limit, limit), as of each row's time, with
            mean = Σx / (n + prior) and spread² = (Σx² + prior) / (n + prior) - mean².
        """
        values = numbers.astype(np.float64)
        added = np.concatenate([np.ones((len(values), 1)), values, values * values], axis=1)
        added[~block.learns] = 0.0
        # A running sum that starts from what is known, not a sum that is added to it: rounding
        # then does not depend on where the block begins.
        sums = np.cumsum(np.concatenate([self._announced[None], added]), axis=0)
        first_of_group = np.searchsorted(block.groups, block.groups)
        seen = sums[first_of_group]
        # The first group reads what is known: rows of its time may have been announced already.
        seen[block.groups == 0] = self._known
        self._announced = sums[-1]
        prior, columns = self._spec.prior_rows, numbers.shape[1]
        rows = seen[:, :1] + prior
        mean = seen[:, 1 : 1 + columns] / rows
        variance = (seen[:, 1 + columns :] + prior) / rows - mean * mean
        # By Cauchy and Schwarz the variance is at least prior / rows; rounding may take it lower.
        spread = np.sqrt(np.maximum(variance, prior / rows))
        limit = self._spec.limit
        return np.clip((values - mean) / spread, -limit, limit).astype(np.float32)

    def saved(self) -> dict[str, np.ndarray]:
        """Sums so far; for `restore`."""
        return {"known": self._known}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Stand where another scaler stood.

        Args:
            arrays: of `saved`.

        Raises:
            DataError: they are of another number of columns.
        """
        if arrays["known"].shape != self._known.shape:
            raise DataError(
                refusal(
                    "statistics",
                    "saved sums of the running scale",
                    must=f"be {len(self._known)} numbers",
                    got=len(arrays["known"]),
                    fix="save them again with these inputs",
                )
            )
        self._known = self._announced = arrays["known"]

    def close(self, *, add: bool) -> None:
        """Leave the block.

        Args:
            add: whether what was announced counts from now on.
        """
        if add:
            self._known = self._announced
