"""What an example costs, from the lengths of its histories alone.

    work = fixed + Σ_streams table_stream[length]

A table is linear in the length for windows and blocks, quadratic for full attention, and anything
else for a mixture of layers: whoever knows the model fills it in. All numbers are whole, so sums
do not depend on their order and every rank comes to the same answer on any processor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gem_opkit.errors import ConfigError, refusal

Kind = Literal["linear", "quadratic"]
# Most work that an example may have: the sum over 2**38 examples still fits 64 bits.
_MOST = 1 << 24


@dataclass(frozen=True, slots=True)
class WorkModel:
    """Work of an example by the lengths of its histories.

    Attributes:
        fixed: of every example, whatever its lengths.
        by_length: stream -> work of histories of 0, 1, .. events, int64; longer ones count as the
            last.
        unit: what one of these numbers stands for, such as FLOPs.
    """

    fixed: int
    by_length: Mapping[str, np.ndarray]
    unit: float = 1.0

    @classmethod
    def from_counts(cls, fixed: int, by_length: Mapping[str, Sequence[int]]) -> "WorkModel":
        """Make it from whole numbers of any size.

        Args:
            fixed: work of an example without any event, at least 0.
            by_length: stream -> work that 0, 1, .. events add, each at least 0.

        Returns:
            the same work in units so large that sums over a step fit 64 bits.

        Raises:
            ConfigError: a count below 0, or a stream without a count.
        """
        for name, counts in by_length.items():
            if not len(counts):
                raise ConfigError(
                    refusal(
                        "WorkModel",
                        f"by_length[{name!r}]",
                        must="have the work of at least the length 0",
                        got="none",
                        fix="leave the stream out, or fill it in",
                    )
                )
        least = min([fixed, *(min(counts) for counts in by_length.values())])
        if least < 0:
            raise ConfigError(
                refusal(
                    "WorkModel", "counts", must="be at least 0", got=least, fix="correct the count"
                )
            )
        most = fixed + sum(max(counts) for counts in by_length.values())
        unit = max(1, -(-most // _MOST))
        tables = {
            name: np.asarray([count // unit for count in counts], np.int64)
            for name, counts in by_length.items()
        }
        return cls(fixed // unit, tables, float(unit))

    @classmethod
    def of_kind(cls, kind: Kind, longest: int, *, stream: str = "events") -> "WorkModel":
        """The work of one stream in its simplest form.

        Args:
            kind: ``linear``: the length; ``quadratic``: its square.
            longest: longest history, events, at least 0.
            stream: its name.
        """
        power = 1 if kind == "linear" else 2
        return cls.from_counts(0, {stream: [length**power for length in range(longest + 1)]})

    def of(self, lengths: Mapping[str, np.ndarray]) -> np.ndarray:
        """Work of examples.

        Args:
            lengths: stream -> events of each example, (B,), for all streams of the model.

        Returns:
            int64 (B,), in units of ``unit``.
        """
        total: np.ndarray | None = None
        for name, table in self.by_length.items():
            found = table[np.minimum(lengths[name], len(table) - 1)]
            total = found if total is None else total + found
        if total is None:
            count = len(next(iter(lengths.values()), ()))
            return np.full(count, self.fixed, np.int64)
        return total + self.fixed


def max_over_mean(loads: np.ndarray) -> float:
    """How much longer the heaviest of some loads takes than they would if all were even.

    Args:
        loads: at least 0 each; at least one.

    Returns:
        the greatest over the mean, at least 1; 1 where there is no work at all.
    """
    total = loads.sum()
    return float(loads.max() * len(loads) / total) if total else 1.0
