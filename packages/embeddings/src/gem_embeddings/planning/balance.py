"""Which ranks hold which parts: the largest first on the least loaded ranks, then moves.

Time and bytes are balanced together, within the limits of memory. Everything is
decided by costs and names, never by the order in which tables were given.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gem_embeddings.planning.candidates import Candidate

# Moves after the greedy start; each one lowers the most loaded rank, so few are needed.
_MOST_MOVES = 200


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes that a rank may hold; infinite where there is no limit.

    Attributes:
        held_bytes: between steps.
        gathered_bytes: while copies are gathered.
    """

    held_bytes: float
    gathered_bytes: float


class DoesNotFitError(Exception):
    """A part finds no rank with enough memory; the planner then cuts finer, or gives up.

    Attributes:
        table_name: the table.
        missing_bytes: bytes that the emptiest ranks lack.
    """

    def __init__(self, table_name: str, missing_bytes: int) -> None:
        super().__init__(f"{table_name}: {missing_bytes} bytes are missing")
        self.table_name = table_name
        self.missing_bytes = missing_bytes


@dataclass(slots=True)
class RankLoads:
    """What every rank of a sharding group has to do and to hold.

    Attributes:
        ms: time of a step.
        held_bytes: weights and optimizer rows between steps.
        copy_bytes: gathered copies of weights.
        ranks: table name -> ranks that its cut is laid over, in the order of its parts; a
            ``range`` where these are all ranks.
    """

    ms: list[float]
    held_bytes: list[int]
    copy_bytes: list[int]
    ranks: dict[str, Sequence[int]]

    def add(self, rank: int, candidate: Candidate, sign: int = 1) -> None:
        """Put one part on a rank, or take it away.

        Args:
            rank: the rank.
            candidate: how the table is cut.
            sign: 1 to put, -1 to take away.
        """
        self.ms[rank] += sign * candidate.part.ms
        self.held_bytes[rank] += sign * candidate.part.held_bytes
        self.copy_bytes[rank] += sign * candidate.part.copy_bytes

    def missing(self, rank: int, candidate: Candidate, limits: Limits) -> float:
        """Return the bytes that a rank lacks for one more part; 0 where it fits.

        Args:
            rank: the rank.
            candidate: how the table is cut.
            limits: of every rank.
        """
        held = self.held_bytes[rank] + candidate.part.held_bytes
        gathered = held + self.copy_bytes[rank] + candidate.part.copy_bytes
        return max(0.0, held - limits.held_bytes, gathered - limits.gathered_bytes)


def assign(
    chosen: Mapping[str, Candidate], table_shard: int, host_ranks: int, limits: Limits
) -> RankLoads:
    """Give every part of every table a rank.

    Args:
        chosen: table name -> how it is cut.
        table_shard: ranks of a sharding group.
        host_ranks: ranks of it on one host.
        limits: of every rank.

    Returns:
        the loads, with the ranks of each table.

    Raises:
        DoesNotFitError: a part fits on no rank.
    """
    items = []
    loads = RankLoads([0.0] * table_shard, [0] * table_shard, [0] * table_shard, {})
    for name, candidate in sorted(chosen.items()):
        every_rank = range(table_shard)
        owners = candidate.holders(every_rank)
        if candidate.places in (0, table_shard) and isinstance(owners, range):
            loads.ranks[name] = every_rank
        else:
            items.append((name, candidate))
    _add_wide(chosen, loads)
    _check_wide(chosen, loads, limits)
    fullness = _fullness(chosen, table_shard)
    items.sort(key=lambda item: (-fullness(item[1].part.ms, item[1].part.held_bytes), item[0]))
    pools = {unit: _LeastLoaded(unit, loads, fullness) for unit in {1, host_ranks}}
    for name, candidate in items:
        unit = host_ranks if candidate.sharding in ("table_row_wise", "grid") else 1
        places = candidate.places // unit
        loads.ranks[name] = pools[unit].take(places, name, candidate, limits)
    _move(chosen, loads, limits)
    return loads


def _add_wide(chosen: Mapping[str, Candidate], loads: RankLoads) -> None:
    """Add tables that are laid over all ranks; the last ranks own nothing of a short one."""
    ranks = len(loads.ms)
    ends = [(0.0, 0, 0)] * (ranks + 1)
    for name in loads.ranks:
        part, end = chosen[name].part, chosen[name].parts or ranks
        ms, held, copies = ends[end]
        ends[end] = ms + part.ms, held + part.held_bytes, copies + part.copy_bytes
    ms, held, copies = 0.0, 0, 0
    for rank in range(ranks - 1, -1, -1):
        more = ends[rank + 1]
        ms, held, copies = ms + more[0], held + more[1], copies + more[2]
        loads.ms[rank], loads.held_bytes[rank], loads.copy_bytes[rank] = ms, held, copies


def _check_wide(chosen: Mapping[str, Candidate], loads: RankLoads, limits: Limits) -> None:
    """Refuse where tables on all ranks are too much; blame the largest of them."""
    # The first rank has a part of each of them.
    held, copies = loads.held_bytes[0], loads.copy_bytes[0]
    missing = max(held - limits.held_bytes, held + copies - limits.gathered_bytes)
    if missing > 0:
        name = max(
            sorted(loads.ranks),
            key=lambda table: chosen[table].part.held_bytes + chosen[table].part.copy_bytes,
        )
        raise DoesNotFitError(name, int(missing))


def _fullness(chosen: Mapping[str, Candidate], table_shard: int) -> Callable[[float, float], float]:
    """Return a measure of how full a rank is: 1 at the mean of the fuller of time and bytes.

    Bytes count even where memory is plenty: the collectives between copies move them all.
    """
    whole_ms = sum(candidate.total_ms(table_shard) for candidate in chosen.values())
    held = sum(c.part.held_bytes * (c.parts or table_shard) for c in chosen.values())
    mean_ms, mean_bytes = whole_ms / table_shard or 1.0, held / table_shard or 1.0
    return lambda ms, bytes_held: max(ms / mean_ms, bytes_held / mean_bytes)


class _LeastLoaded:
    """Ranks, or hosts of ranks, by how full they are. Loads only grow while it is in use."""

    def __init__(
        self, unit: int, loads: RankLoads, fullness: Callable[[float, float], float]
    ) -> None:
        self._unit, self._loads, self._fullness = unit, loads, fullness
        self._heap = [(self._key(first), first) for first in range(0, len(loads.ms), unit)]
        heapq.heapify(self._heap)

    def _key(self, first: int) -> float:
        held, ms = self._loads.held_bytes, self._loads.ms
        return max(self._fullness(ms[r], held[r]) for r in range(first, first + self._unit))

    def _in_order(self) -> Iterator[int]:
        """Units from the least loaded one on; what was pushed before it grew is pushed again."""
        while self._heap:
            key, first = heapq.heappop(self._heap)
            now = self._key(first)
            if now > key:
                heapq.heappush(self._heap, (now, first))
            else:
                yield first

    def take(self, count: int, name: str, candidate: Candidate, limits: Limits) -> tuple[int, ...]:
        """Put a table's parts on the least loaded units that have room for them."""
        taken: list[int] = []
        seen: list[int] = []
        least_missing = float("inf")
        for first in self._in_order():
            seen.append(first)
            ranks = range(first, first + self._unit)
            missing = max(self._loads.missing(rank, candidate, limits) for rank in ranks)
            if missing > 0:
                least_missing = min(least_missing, missing)
                continue
            taken.append(first)
            if len(taken) == count:
                break
        if len(taken) < count:
            raise DoesNotFitError(name, int(least_missing) if seen else 0)
        taken.sort()
        places = tuple(first + offset for first in taken for offset in range(self._unit))
        for rank in candidate.holders(places):
            self._loads.add(rank, candidate)
        for first in seen:
            heapq.heappush(self._heap, (self._key(first), first))
        return places


def _move(chosen: Mapping[str, Candidate], loads: RankLoads, limits: Limits) -> None:
    """Take parts off the most loaded rank, or swap them, while that makes it less loaded."""
    on_rank: dict[int, set[str]] = {}
    for name, ranks in loads.ranks.items():
        if chosen[name].sharding in ("table_wise", "column_wise") and len(ranks) < len(loads.ms):
            for rank in chosen[name].holders(ranks):
                on_rank.setdefault(rank, set()).add(name)
    # Moves are for time; none may make the fullest rank fuller.
    limits = Limits(
        held_bytes=min(limits.held_bytes, max(loads.held_bytes)),
        gathered_bytes=limits.gathered_bytes,
    )
    for _ in range(_MOST_MOVES):
        most = max(range(len(loads.ms)), key=loads.ms.__getitem__)
        least = min(range(len(loads.ms)), key=loads.ms.__getitem__)
        swap = _best_swap(chosen, loads, limits, on_rank, most, least)
        if swap is None:
            return
        for name, source, target in ((swap[0], most, least), (swap[1], least, most)):
            if name is None:
                continue
            loads.add(source, chosen[name], -1)
            loads.add(target, chosen[name])
            on_rank[source].discard(name)
            on_rank.setdefault(target, set()).add(name)
            ranks = tuple(target if rank == source else rank for rank in loads.ranks[name])
            loads.ranks[name] = ranks


def _best_swap(
    chosen: Mapping[str, Candidate],
    loads: RankLoads,
    limits: Limits,
    on_rank: Mapping[int, set[str]],
    most: int,
    least: int,
) -> tuple[str, str | None] | None:
    """Find what to move from the most to the least loaded rank, and what to take back."""
    gap = loads.ms[most] - loads.ms[least]
    best, best_after = None, gap * (1 - 1e-6)
    there = sorted(on_rank.get(least, ()))
    for given in sorted(on_rank.get(most, ())):
        if least in loads.ranks[given]:
            continue
        for back in (None, *there):
            if back is not None and most in loads.ranks[back]:
                continue
            moved = chosen[given].part.ms - (0.0 if back is None else chosen[back].part.ms)
            after = abs(gap - 2 * moved)
            if after < best_after and _swap_fits(chosen, loads, limits, given, back, least, most):
                best, best_after = (given, back), after
    return best


def _swap_fits(
    chosen: Mapping[str, Candidate],
    loads: RankLoads,
    limits: Limits,
    given: str,
    back: str | None,
    least: int,
    most: int,
) -> bool:
    if back is None:
        return loads.missing(least, chosen[given], limits) == 0
    loads.add(least, chosen[back], -1)
    loads.add(most, chosen[given], -1)
    fits = (
        loads.missing(least, chosen[given], limits) == 0
        and loads.missing(most, chosen[back], limits) == 0
    )
    loads.add(least, chosen[back])
    loads.add(most, chosen[given])
    return fits
