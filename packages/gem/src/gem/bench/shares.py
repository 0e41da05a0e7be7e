"""Pieces of work become shares of a step that add up to it.

Where several streams work at once an instant counts once: for the compute that came first, and for
a collective or a copy only where no compute hides it. What is left is the time in which the device
waited for the host. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gem.bench.kinds import Kind
from gem.bench.trace import Piece, Traced

# Hidden behind everything else.
_BEHIND: tuple[Kind, ...] = ("collectives", "data")

Place = tuple[str, str, Kind]  # region, phase, kind


@dataclass(frozen=True, slots=True)
class Shares:
    """Milliseconds of a step, by whom they are for. All are means over the counted steps.

    Attributes:
        step_ms: a step.
        exposed_ms: (region, phase, kind) -> time that counts for it; together with ``gap_ms`` they
            are the step.
        hidden_ms: (region, phase, kind) -> time in which something else ran too, and counts.
        gap_ms: in which nothing ran.
        waited_ms: region -> gaps that ended with work of it: what the device waited for.
        launches: (region, phase, kind) -> pieces of work.
        steps: over how many steps the mean is.
    """

    step_ms: float
    exposed_ms: Mapping[Place, float]
    hidden_ms: Mapping[Place, float]
    gap_ms: float
    waited_ms: Mapping[str, float]
    launches: Mapping[Place, float]
    steps: int

    def by_kind(self) -> dict[Kind, float]:
        """Kind -> milliseconds."""
        return self._sum(2)

    def hidden_by_kind(self) -> dict[Kind, float]:
        """Kind -> milliseconds that do not count."""
        found: dict[Kind, float] = {}
        for (_, _, kind), ms in self.hidden_ms.items():
            found[kind] = found.get(kind, 0.0) + ms
        return found

    def kernel_ms(self, *, kind: Kind, region: str | None = None) -> float:
        """Milliseconds in which kernels of a kind ran, whatever ran beside them.

        Args:
            kind: of work.
            region: only for this one.
        """
        return sum(
            ms
            for times in (self.exposed_ms, self.hidden_ms)
            for (own, _, of_kind), ms in times.items()
            if of_kind == kind and region in (None, own)
        )

    def by_region(self) -> dict[str, float]:
        """Region -> milliseconds."""
        return self._sum(0)

    def of(self, *, region: str, phase: str | None = None, kind: str | None = None) -> float:
        """Milliseconds of a region.

        Args:
            region: its name.
            phase: only this one.
            kind: only this one.
        """
        return sum(
            ms
            for (own, in_phase, of_kind), ms in self.exposed_ms.items()
            if own == region and phase in (None, in_phase) and kind in (None, of_kind)
        )

    def _sum(self, place: int) -> dict:
        found: dict = {}
        for key, ms in self.exposed_ms.items():
            found[key[place]] = found.get(key[place], 0.0) + ms
        return found


@dataclass(slots=True)
class _Sweep:
    """What has been added up so far, microseconds over all steps."""

    exposed_us: dict[Place, float] = field(default_factory=dict)
    hidden_us: dict[Place, float] = field(default_factory=dict)
    waited_us: dict[str, float] = field(default_factory=dict)
    gap_us: float = 0.0

    def span(self, begin_us: float, end_us: float, active: list[Piece]) -> None:
        """Count a span in which the same pieces run."""
        length = end_us - begin_us
        if length <= 0:
            return
        front = min(active, key=_front)
        place = _place(front)
        self.exposed_us[place] = self.exposed_us.get(place, 0.0) + length
        for piece in active:
            if piece is not front:
                beside = _place(piece)
                self.hidden_us[beside] = self.hidden_us.get(beside, 0.0) + length

    def gap(self, length_us: float, region: str) -> None:
        """Count a span in which nothing runs, before work of a region."""
        if length_us > 0:
            self.gap_us += length_us
            self.waited_us[region] = self.waited_us.get(region, 0.0) + length_us


def _place(piece: Piece) -> Place:
    return piece.region, piece.phase, piece.kind


def _front(piece: Piece) -> tuple[bool, float]:
    return piece.kind in _BEHIND, piece.begin_us


def shares_of(traced: Traced) -> Shares:
    """Add up what a trace holds.

    Args:
        traced: from `read_trace`.

    Returns:
        means over its steps. What lies between the last work and the end of the steps is a gap
        that waited for nobody: its region is empty.
    """
    sweep = _Sweep()
    at, active = traced.begin_us, list[Piece]()
    launches: dict[Place, float] = {}
    for piece in traced.pieces:
        if piece.first:
            launches[_place(piece)] = launches.get(_place(piece), 0.0) + 1.0 / traced.steps
        at, active = _advance(sweep, at, active, piece.begin_us)
        if not active:
            sweep.gap(piece.begin_us - at, piece.region)
        at = max(at, piece.begin_us)
        if piece.end_us > at:
            active.append(piece)
    at, _ = _advance(sweep, at, active, traced.end_us)
    sweep.gap(traced.end_us - at, "")
    scale = 1e-3 / traced.steps
    return Shares(
        step_ms=scale * (traced.end_us - traced.begin_us),
        exposed_ms={place: scale * us for place, us in sweep.exposed_us.items()},
        hidden_ms={place: scale * us for place, us in sweep.hidden_us.items()},
        gap_ms=scale * sweep.gap_us,
        waited_ms={region: scale * us for region, us in sweep.waited_us.items()},
        launches=launches,
        steps=traced.steps,
    )


def _advance(
    sweep: _Sweep, at: float, active: list[Piece], until_us: float
) -> tuple[float, list[Piece]]:
    """Count up to a place, or to where nothing runs any more."""
    while active and at < until_us:
        end_us = min(until_us, min(piece.end_us for piece in active))
        sweep.span(at, end_us, active)
        at = end_us
        active = [piece for piece in active if piece.end_us > at]
    return at, active
