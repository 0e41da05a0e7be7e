"""Deal pieces of unequal work over holders, equally many to each, so that the sums come out even.

Three ways, in the order of how even they come out. `deal_snake` sorts and goes to and fro over the
holders. `deal_sorted` sorts too, and in each round gives the heaviest piece to the holder that has
the least so far. `even_out` then swaps pieces of the heaviest holder against those of the lightest
ones while that lowers the heavier sum of the two. All are deterministic: work is in whole numbers
and ties go to the lower index.
"""

import numpy as np

# Lightest holders that the heaviest one is compared with in a swap.
_PARTNERS = 32
# Swaps a holder at most; a handful is what it takes.
_MOST_SWAPS = 16
# The heaviest holder may be above the mean by this share: further swaps are not worth their time.
EVEN_ENOUGH = 0.001


def deal_snake(work_N: np.ndarray, holders: int) -> np.ndarray:
    """Deal in rounds that go to and fro.

    Args:
        work_N: work of each piece, int64; as many as a multiple of the holders.
        holders: how many, > 0.

    Returns:
        holder of each piece, int64 (N,).
    """
    order = np.argsort(-work_N, kind="stable")
    rounds = np.arange(len(work_N)) // holders
    place = np.arange(len(work_N)) % holders
    dealt = np.empty(len(work_N), np.int64)
    dealt[order] = np.where(rounds % 2 == 0, place, holders - 1 - place)
    return dealt


def deal_sorted(work_N: np.ndarray, holders: int) -> np.ndarray:
    """Deal in rounds, the heaviest piece of a round to the holder with the least so far.

    Args:
        work_N: work of each piece, int64; as many as a multiple of the holders.
        holders: how many, > 0.

    Returns:
        holder of each piece, int64 (N,).

    Cost: N log N in all.
    """
    order = np.argsort(-work_N, kind="stable")
    sums = np.zeros(holders, np.int64)
    dealt = np.empty(len(work_N), np.int64)
    for begin in range(0, len(work_N), holders):
        pieces, lightest = order[begin : begin + holders], np.argsort(sums, kind="stable")
        dealt[pieces] = lightest
        sums[lightest] += work_N[pieces]
    return dealt


def even_out(
    work_N: np.ndarray, dealt_N: np.ndarray, holders: int, *, until: float = EVEN_ENOUGH
) -> np.ndarray:
    """Swap pieces between the heaviest holder and light ones while that helps.

    Args:
        work_N: work of each piece, int64.
        dealt_N: holder of each piece; equally many pieces each.
        holders: how many.
        until: share above the mean at which the heaviest holder is left alone, >= 0.

    Returns:
        holder of each piece, int64 (N,). The heaviest holder has no more than before.

    Numerics: ends where the heaviest holder is within ``until`` of the mean, where no swap with
        one of the 32 lightest holders lowers the heavier sum, or after 16 swaps a holder. A sum is
        at least that of the heaviest piece, and no dealing can change that.
    """
    if holders == 1 or len(work_N) <= holders:
        return dealt_N.copy()
    held = np.argsort(dealt_N, kind="stable").reshape(holders, -1)
    weights = work_N[held]
    sums = weights.sum(1)
    enough = (1.0 + until) * float(sums.sum()) / holders
    for _ in range(_MOST_SWAPS * holders):
        heavy = int(np.argmax(sums))
        if sums[heavy] <= enough:
            break
        light = np.argsort(sums, kind="stable")[: min(_PARTNERS, holders - 1)]
        light = light[light != heavy]
        if not len(light):  # all sums are equal
            break
        # gain[i, j, m]: what moves when piece i of the heavy one and piece m of partner j swap.
        moved = weights[heavy][:, None, None] - weights[light][None]
        higher = np.maximum(sums[heavy] - moved, sums[light][None, :, None] + moved)
        best = int(np.argmin(higher))
        if higher.flat[best] >= sums[heavy]:
            break
        mine, partner, theirs = np.unravel_index(best, higher.shape)
        other, amount = int(light[partner]), moved[mine, partner, theirs]
        for array in (held, weights):
            array[heavy, mine], array[other, theirs] = array[other, theirs], array[heavy, mine]
        sums[heavy] -= amount
        sums[other] += amount
    dealt = np.empty(len(work_N), np.int64)
    dealt[held.ravel()] = np.repeat(np.arange(holders), held.shape[1])
    return dealt


def deal(work_N: np.ndarray, holders: int, *, until: float = EVEN_ENOUGH) -> np.ndarray:
    """Deal as evenly as is known here: sorted, then by swaps.

    Args:
        work_N: work of each piece, int64; as many as a multiple of the holders.
        holders: how many, > 0.
        until: as in `even_out`.

    Returns:
        holder of each piece, int64 (N,).
    """
    return even_out(work_N, deal_sorted(work_N, holders), holders, until=until)


def sums_of(work_N: np.ndarray, dealt_N: np.ndarray, holders: int) -> np.ndarray:
    """Add up what each holder has.

    Args:
        work_N: work of each piece, int64.
        dealt_N: holder of each piece.
        holders: how many.

    Returns:
        int64 (holders,).
    """
    sums = np.zeros(holders, np.int64)
    np.add.at(sums, dealt_N, work_N)
    return sums
