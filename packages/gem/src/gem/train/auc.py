"""AUC and grouped AUC of a stream, in bounded memory, with ties counted as half.

AUC is the share of (positive, negative) pairs in which the positive has the higher score. It is
exact while there are at most ``max_bins`` distinct float32 scores. Beyond that, low bits of the
scores are dropped, one at a time, until they fit again; scores that became equal count as ties.
The greatest error that this can cause is known and returned: half the share of pairs that fell
into a shared bin.

What a state holds depends only on the examples that it has seen, not on their order nor on how
they were cut into parts. So ranks, windows and resumed runs merge to the same number.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem_opkit.errors import DataError, refusal

NO_EXAMPLES = "no labelled examples"
ONE_CLASS = "all labels are equal"
FRACTIONAL = "labels are not all 0 or 1"
NO_GROUP = "no user has both positive and negative labels"

# User, score, positive, domain.
_Columns = tuple[NDArray, ...]

MAX_BINS = 1 << 18
MAX_ROWS = 1 << 21


@dataclass(frozen=True, slots=True)
class AucValue:
    """An area under the curve, or why there is none.

    Attributes:
        auc: in [0, 1], or None.
        reason: why ``auc`` is None, otherwise None.
        error_bound: the true value is within this distance; 0 when exact.
    """

    auc: float | None
    reason: str | None = None
    error_bound: float = 0.0


class AucState:
    """Counts of positives and negatives by score.

    Args:
        max_bins: most distinct scores that are kept; 16 to 20 bytes each.

    Cost: memory of at most ``3 * max_bins`` scores and counts, however many examples come in one
    call; a sort of that many every ``max_bins`` examples.
    """

    def __init__(self, *, max_bins: int = MAX_BINS) -> None:
        self.max_bins = max_bins
        self.dropped_bits = 0
        self.keys = np.empty(0, dtype=np.uint32)
        self.positives = np.empty(0, dtype=np.int64)
        self.negatives = np.empty(0, dtype=np.int64)
        self._waiting: list[tuple[NDArray[np.uint32], NDArray[np.bool_]]] = []
        self._waiting_rows = 0

    def update(self, score_B: NDArray[np.float32], positive_B: NDArray[np.bool_]) -> None:
        """Add examples.

        Args:
            score_B: finite scores; higher means more likely positive.
            positive_B: which examples are positive.

        Raises:
            DataError: a score is not finite.
        """
        for start in range(0, score_B.size, self.max_bins):
            rows = slice(start, start + self.max_bins)
            self._waiting.append((_ordered_bits(score_B[rows]), positive_B[rows].astype(np.bool_)))
            self._waiting_rows += int(self._waiting[-1][0].size)
            if self._waiting_rows >= self.max_bins:
                self.compact()

    def merge(self, other: "AucState") -> None:
        """Add the examples of another part.

        Args:
            other: a state with the same ``max_bins``; only its waiting rows are compacted.
        """
        other.compact()
        self.compact()
        bits = max(self.dropped_bits, other.dropped_bits)
        mine, theirs = bits - self.dropped_bits, bits - other.dropped_bits
        self.dropped_bits = bits
        self._count(
            np.concatenate([self.keys >> np.uint32(mine), other.keys >> np.uint32(theirs)]),
            np.concatenate([self.positives, other.positives]),
            np.concatenate([self.negatives, other.negatives]),
        )

    def compact(self) -> None:
        """Count the rows that wait, so that the arrays hold every example."""
        if not self._waiting:
            return
        keys = np.concatenate([k for k, _ in self._waiting]) >> np.uint32(self.dropped_bits)
        positive = np.concatenate([p for _, p in self._waiting])
        self._waiting.clear()
        self._waiting_rows = 0
        self._count(
            np.concatenate([self.keys, keys]),
            np.concatenate([self.positives, positive.astype(np.int64)]),
            np.concatenate([self.negatives, (~positive).astype(np.int64)]),
        )

    def _count(
        self, keys: NDArray[np.uint32], positives: NDArray[np.int64], negatives: NDArray[np.int64]
    ) -> None:
        """Sort keys, add up the counts of equal ones, and drop bits until they fit."""
        order = np.argsort(keys, kind="stable")
        keys, positives, negatives = keys[order], positives[order], negatives[order]
        while True:
            first = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]]) if keys.size else None
            if first is None:
                break
            keys = keys[first]
            positives = np.add.reduceat(positives, first)
            negatives = np.add.reduceat(negatives, first)
            if keys.size <= self.max_bins:
                break
            # Dropping a bit keeps the order, so the arrays stay sorted.
            keys = keys >> np.uint32(1)
            self.dropped_bits += 1
        self.keys, self.positives, self.negatives = keys, positives, negatives

    def value(self) -> AucValue:
        """The AUC of everything added so far.

        Returns:
            The value with its error bound, or None with a reason where a class is missing.

        Numerics: pairs are counted in whole numbers of any size, and their quotient is rounded
            once. So the value is the float nearest to the true one of the scores that are kept.
        """
        self.compact()
        positives, negatives = int(self.positives.sum()), int(self.negatives.sum())
        if positives + negatives == 0:
            return AucValue(None, NO_EXAMPLES)
        if positives == 0 or negatives == 0:
            return AucValue(None, ONE_CLASS)
        below = np.cumsum(self.negatives) - self.negatives
        twice_the_pairs = 2 * positives * negatives
        auc = _exact_dot(self.positives, 2 * below + self.negatives) / twice_the_pairs
        if not self.dropped_bits:
            return AucValue(auc)
        tied = _exact_dot(self.positives, self.negatives)
        # The last term covers the rounding of the two quotients.
        return AucValue(auc, None, min(tied / twice_the_pairs + 2.0**-52, 1.0))

    def to_arrays(self) -> dict[str, NDArray]:
        """Everything that the state holds, as arrays."""
        self.compact()
        return {
            "dropped_bits": np.array([self.dropped_bits], dtype=np.int64),
            "keys": self.keys,
            "positives": self.positives,
            "negatives": self.negatives,
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray], *, max_bins: int = MAX_BINS) -> "AucState":
        """The state that ``to_arrays`` wrote.

        Args:
            arrays: what ``to_arrays`` returned.
            max_bins: as in the state that wrote them.
        """
        state = cls(max_bins=max_bins)
        state.dropped_bits = int(arrays["dropped_bits"][0])
        state.keys = arrays["keys"].astype(np.uint32)
        state.positives = arrays["positives"].astype(np.int64)
        state.negatives = arrays["negatives"].astype(np.int64)
        return state


class GroupedAuc:
    """AUC within each user, averaged over users by their number of examples (GAUC).

    Only users with both classes count. Rows are kept, so the value is exact while there are at
    most ``max_rows`` of them. Beyond that a user is kept if the low bits of a hash of its id are
    zero, with one bit more each time that the rows do not fit: an even sample of users, the same
    on every rank.

    Args:
        max_rows: most rows kept, 15 bytes each.
    """

    def __init__(self, *, max_rows: int = MAX_ROWS) -> None:
        self.max_rows = max_rows
        self.sample_bits = 0
        self._parts: list[_Columns] = []
        self._rows = 0

    @property
    def user_fraction(self) -> float:
        """Share of the users that the value is of; 1 when exact."""
        return 0.5**self.sample_bits

    @property
    def rows(self) -> int:
        """Rows that are kept."""
        return self._rows

    def update(
        self,
        user_B: NDArray[np.int64],
        score_B: NDArray[np.float32],
        positive_B: NDArray[np.bool_],
        domain_B: NDArray[np.int64],
    ) -> None:
        """Add examples.

        Args:
            user_B: any int64.
            score_B: finite scores.
            positive_B: which examples are positive.
            domain_B: domain indices, at most 32,767.
        """
        self._add(
            user_B.astype(np.int64),
            score_B.astype(np.float32),
            positive_B.astype(np.bool_),
            domain_B.astype(np.int16),
        )

    def merge(self, other: "GroupedAuc") -> None:
        """Add the examples of another part.

        Args:
            other: a state with the same ``max_rows``; left as it is.
        """
        if other.sample_bits > self.sample_bits:
            self.sample_bits = other.sample_bits
            self._resample()
        for part in other._parts:
            self._add(*part)

    def _add(self, user: NDArray, score: NDArray, positive: NDArray, domain: NDArray) -> None:
        part: _Columns = (user, score, positive, domain)
        if self.sample_bits:
            keep = _sampled(user, self.sample_bits)
            part = tuple(column[keep] for column in part)
        if part[0].size == 0:
            return
        self._parts.append(part)
        self._rows += int(part[0].size)
        while self._rows > self.max_rows and self.sample_bits < 63:
            self.sample_bits += 1
            self._resample()

    def _resample(self) -> None:
        columns = self._columns()
        keep = _sampled(columns[0], self.sample_bits)
        self._parts = [tuple(column[keep] for column in columns)]
        self._rows = int(np.count_nonzero(keep))

    def _columns(self) -> _Columns:
        if len(self._parts) != 1:
            types = (np.int64, np.float32, np.bool_, np.int16)
            self._parts = [
                tuple(
                    np.concatenate([np.empty(0, dtype), *(part[i] for part in self._parts)])
                    for i, dtype in enumerate(types)
                )
            ]
        return self._parts[0]

    def value(self, domain: int | None = None) -> AucValue:
        """The grouped AUC of everything added so far.

        Args:
            domain: only the examples of this domain; None for all.

        Returns:
            The value, or None with a reason; ``error_bound`` is 0 when all users are in it and
            NaN when they are a sample.
        """
        user, score, positive, domains = self._columns()
        if domain is not None:
            keep = domains == domain
            user, score, positive = user[keep], score[keep], positive[keep]
        if user.size == 0:
            return AucValue(None, NO_EXAMPLES)
        # User, score and label in one word: sorting words is many times as fast as sorting rows.
        words = _dense(user) << np.uint64(33)
        words |= _ordered_bits(score).astype(np.uint64) << np.uint64(1)
        words |= positive.astype(np.uint64)
        words.sort()
        positive_here = (words & np.uint64(1)).astype(np.int64)
        words >>= np.uint64(1)
        new_tie = np.flatnonzero(np.r_[True, words[1:] != words[:-1]])
        tie_user = words[new_tie] >> np.uint64(32)
        tie_positives = np.add.reduceat(positive_here, new_tie)
        tie_negatives = np.diff(np.r_[new_tie, words.size]) - tie_positives
        first_tie = np.flatnonzero(np.r_[True, tie_user[1:] != tie_user[:-1]])
        below = np.cumsum(tie_negatives) - tie_negatives
        ties_per_user = np.diff(np.r_[first_tie, new_tie.size])
        below = below - np.repeat(below[first_tie], ties_per_user)
        wins = np.add.reduceat(tie_positives * (below + 0.5 * tie_negatives), first_tie)
        positives = np.add.reduceat(tie_positives, first_tie)
        negatives = np.add.reduceat(tie_negatives, first_tie)
        both = (positives > 0) & (negatives > 0)
        if not both.any():
            return AucValue(None, NO_GROUP)
        aucs = wins[both] / (positives[both] * negatives[both])
        examples = (positives + negatives)[both]
        value = float(np.sum(aucs * (examples / examples.sum())))
        return AucValue(value, None, float("nan") if self.sample_bits else 0.0)

    def to_arrays(self) -> dict[str, NDArray]:
        """Everything that the state holds, as arrays."""
        user, score, positive, domain = self._columns()
        bits = np.array([self.sample_bits], dtype=np.int64)
        return {
            "sample_bits": bits,
            "user": user,
            "score": score,
            "positive": positive,
            "domain": domain,
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray], *, max_rows: int = MAX_ROWS) -> "GroupedAuc":
        """The state that ``to_arrays`` wrote.

        Args:
            arrays: what ``to_arrays`` returned.
            max_rows: as in the state that wrote them.
        """
        state = cls(max_rows=max_rows)
        state.sample_bits = int(arrays["sample_bits"][0])
        columns = tuple(arrays[name] for name in ("user", "score", "positive", "domain"))
        state._parts = [columns]
        state._rows = int(columns[0].size)
        return state


def _dense(user: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Users as numbers below 2^31 in the same order."""
    least = int(user.min())
    if int(user.max()) - least < 2**31:
        return (user - least).astype(np.uint64)
    return np.unique(user, return_inverse=True)[1].astype(np.uint64)


def _exact_dot(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """The sum of products of non-negative integers, whatever its size.

    In limbs of 21 bits, so that 2^21 products of two limbs fit into an int64.
    """
    bits, mask = 21, (1 << 21) - 1
    total = 0
    for shift_a in range(0, 63, bits):
        limb_a = (a >> shift_a) & mask
        if not limb_a.any():
            continue
        for shift_b in range(0, 63, bits):
            limb_b = (b >> shift_b) & mask
            total += int((limb_a * limb_b).sum()) << (shift_a + shift_b)
    return total


def _ordered_bits(score_B: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Map float32 to uint32 such that a < b if and only if the bits of a are below those of b."""
    score = score_B.astype(np.float32) + np.float32(0.0)  # turns -0.0 into 0.0
    if not np.isfinite(score).all():
        raise DataError(
            refusal(
                "auc",
                "scores",
                must="be finite",
                got=f"{int(np.count_nonzero(~np.isfinite(score)))} that are not",
                fix="check the training loss",
            )
        )
    bits = score.view(np.uint32)
    sign = np.uint32(0x80000000)
    return np.where(bits & sign, ~bits, bits | sign)


def _sampled(user: NDArray[np.int64], bits: int) -> NDArray[np.bool_]:
    """Which users stay in a sample of 2^-bits of them: splitmix64, then low bits."""
    # Without the increment, user 0 would hash to 0 and stay however often the sample is halved;
    # in many logs that is everybody who is not signed in.
    x = user.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return (x & np.uint64((1 << bits) - 1)) == 0
