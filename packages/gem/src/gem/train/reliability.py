"""The reliability of probabilities: predicted against observed rates, in groups of equal size.

Made from the counts of positives and negatives by score that the AUC keeps anyway, so it costs a
step nothing, and ranks and resumed runs merge to the same groups.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem.train.auc import FRACTIONAL, NO_EXAMPLES, AucState
from gem.train.metrics import MetricBlock

GROUPS = 15
_FEWEST_EXAMPLES = 20  # of a group


def reliability(block: MetricBlock) -> dict[str, Any]:
    """Reliability by task and domain.

    Args:
        block: metric state of some examples.

    Returns:
        task -> ``{all: groups, domains -> name -> groups}``, groups as `reliability_groups`
        gives them.
    """
    found: dict[str, Any] = {}
    for task in block.tasks:
        whole = AucState()
        for part in block.auc[task]:
            whole.merge(part)
        fractional = [sums.fractional > 0 for sums in block.entropy[task]]
        found[task] = {
            "all": reliability_groups(whole, fractional=any(fractional)),
            "domains": {
                name: reliability_groups(block.auc[task][d], fractional=fractional[d])
                for d, name in enumerate(block.domains)
            },
        }
    return found


def reliability_groups(state: AucState, *, fractional: bool = False) -> dict[str, Any]:
    """Cut examples, ordered by their score, into groups of about equal size.

    Args:
        state: counts by score.
        fractional: whether a label was neither 0 nor 1; such labels have no observed rate here.

    Returns:
        ``{groups: [{low, high, predicted, examples, positives}], null_reason}``: lowest and
        highest score of a group, its mean score, and its whole counts. Equal scores are never
        parted. ``groups`` is empty where ``null_reason`` says why.

    Numerics: means in float64. While the state is exact so are the scores; once it has dropped
        low bits, a score is the middle of those that share a count.
    """
    arrays = state.to_arrays()
    examples = arrays["positives"] + arrays["negatives"]
    total = int(examples.sum())
    if fractional or not total:
        return {"groups": [], "null_reason": FRACTIONAL if fractional else NO_EXAMPLES}
    scores = _scores(arrays["keys"], int(arrays["dropped_bits"][0]))
    count = int(np.clip(total // _FEWEST_EXAMPLES, 1, GROUPS))
    # The group of a score is where the middle one of its examples lies among all.
    middle = np.cumsum(examples) - 0.5 * examples
    group = np.minimum((middle * count / total).astype(np.int64), count - 1)
    first = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    ends = np.r_[first[1:], group.size]
    sizes = np.add.reduceat(examples, first)
    sums = np.add.reduceat(examples * scores, first)
    positives = np.add.reduceat(arrays["positives"], first)
    return {
        "groups": [
            {
                "low": float(scores[begin]),
                "high": float(scores[end - 1]),
                "predicted": float(total_score / size),
                "examples": int(size),
                "positives": int(positive),
            }
            for begin, end, total_score, size, positive in zip(
                first, ends, sums, sizes, positives, strict=True
            )
        ],
        "null_reason": None,
    }


def _scores(keys: NDArray[np.uint32], dropped_bits: int) -> NDArray[np.float64]:
    """The scores that `AucState` has made its keys of."""
    bits = keys.astype(np.uint32) << np.uint32(dropped_bits)
    if dropped_bits:
        bits = bits | np.uint32(1 << (dropped_bits - 1))
    sign = np.uint32(0x80000000)
    return (
        np.where(bits & sign, bits ^ sign, ~bits).astype(np.uint32).view(np.float32).astype(float)
    )
