"""Which regions run again, and what of them is kept all the same: least time within a budget.

For each region there is a curve of choices, from keeping all that autograd wants down to keeping
the inputs alone. Between the two lie those that keep the results of some operators, taken in the
order of milliseconds saved by a byte. A walk over the regions carries every sum of bytes and time
that no other one beats in both; it ends with the least time. Imports no torch.

Budget and peak. In the backward pass the last region comes first. When region r is run, whatever
the regions up to r have kept is there, and all of r's own, made again. The budget is held at each
of these moments: a region whose making again would not fit is not run again, and the last region,
whose memory would be back at once, is only where that costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from gem_opkit.errors import ConfigError, refusal
from gem_parallel.recompute.profile import H200, Call, Profile, Rates

# Sums that are carried from one region to the next, and choices of a region: more are thinned out,
# which may miss the least time by a little, never the budget.
_MOST_SUMS = 500
_MOST_CHOICES = 24
_LARGEST = 6


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """What becomes of a region.

    Attributes:
        name: of the module.
        kind: ``keep`` leaves it to autograd; ``recompute`` runs it again in the backward pass.
        kept: operators whose results are kept though it is run again: name and place among those
            of that name.
        kept_bytes: that it keeps and no region before it does, packed ones as packed.
        remade_bytes: that are there beside these while its backward pass runs.
        again_ms: time of what is run again, and of packing.
    """

    name: str
    kind: Literal["keep", "recompute"]
    kept: frozenset[tuple[str, int]] = frozenset()
    kept_bytes: int = 0
    remade_bytes: int = 0
    again_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """What becomes of all regions.

    Attributes:
        regions: in the order in which they run.
        kept_bytes: between forward and backward pass, all regions and what lies outside of them.
        outside_bytes: of these, what lies outside.
        peak_bytes: most at a time.
        again_ms: time of what is run again, and of packing.
        unchanged_bytes: kept if nothing were run again and nothing packed.
        least_bytes: smallest budget that there is a plan for.
        budget_bytes: asked for; None for no budget.
        packed: storages that are packed, of what is kept.
    """

    regions: tuple[RegionPlan, ...]
    kept_bytes: int
    outside_bytes: int
    peak_bytes: int
    again_ms: float
    unchanged_bytes: int
    least_bytes: int
    budget_bytes: int | None
    packed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Sum:
    kept: int
    ms: float
    before: "_Sum | None" = None
    plan: RegionPlan | None = None


def choose(
    profile: Profile,
    budget_bytes: int | None,
    *,
    rates: Rates = H200,
    bound: Literal["peak", "kept"] = "peak",
) -> RecomputePlan:
    """Choose.

    Args:
        profile: of the forward pass.
        budget_bytes: for all that is kept and made again, at any moment; None for no bound, which
            runs nothing again.
        rates: that weigh time against memory.
        bound: what the budget is for: ``peak``, all that is there at any moment; ``kept``, what is
            kept between the two passes alone, as torch's own ``activation_memory_budget``.

    Returns:
        the plan of least time.

    Raises:
        ConfigError: no plan stays below the budget; the message names the least that one does.
    """
    inputs = _first_seen(profile)
    curves = [_choices(profile, place, rates) for place in range(len(inputs) - 1)]
    least = _least(curves, inputs)
    if bound == "kept":
        curves = [[replace(choice, remade_bytes=0) for choice in curve] for curve in curves]
    if budget_bytes is not None and budget_bytes < _least(curves, inputs):
        raise ConfigError(
            refusal(
                "recompute",
                "memory.budget_gib",
                must=f"be at least {_gib_up(least)}, which running every region again takes",
                got=f"{budget_bytes / 2**30:.3f}",
                fix="raise it, run the batch in more parts (train.accumulation_parts), or pack "
                'what is kept (memory.kept = "fp8")',
            )
        )
    if budget_bytes is None:
        curves = [[choice for choice in curve if choice.kind == "keep"] for curve in curves]
    sums = [_Sum(0, 0.0)]
    for base, curve in zip(inputs, curves, strict=False):
        grown = [
            _Sum(s.kept + base + c.kept_bytes, s.ms + c.again_ms, s, c)
            for s in sums
            for c in curve
            if budget_bytes is None or s.kept + base + c.kept_bytes + c.remade_bytes <= budget_bytes
        ]
        sums = _best(grown)
    last = inputs[-1]
    fitting = [s for s in sums if budget_bytes is None or s.kept + last <= budget_bytes]
    found = min(fitting, key=lambda s: (s.ms, s.kept))
    plans: list[RegionPlan] = []
    end: _Sum | None = found
    while end is not None and end.plan is not None:
        plans.append(end.plan)
        end = end.before
    return _summed(profile, plans[::-1], inputs, budget_bytes, least)


def _first_seen(profile: Profile) -> list[int]:
    """Bytes that every choice keeps: what lies outside, and inputs, each where it comes first.

    One entry for each region, and one for what lies behind the last.
    """
    seen: set[int] = set()
    found = []
    for place, outside in enumerate(profile.outside):
        given = profile.regions[place].inputs if place < len(profile.regions) else ()
        # What lies outside is never packed; what a region is given is in its choices.
        fresh = {*outside} - seen
        seen |= fresh | {*given}
        found.append(profile.size(fresh))
    return found


def _outside(profile: Profile) -> set[int]:
    return {s for part in profile.outside for s in part}


def _given_before(profile: Profile, place: int) -> set[int]:
    """Storages that are kept anyhow by the time that a region runs."""
    known: set[int] = set()
    for earlier in range(place + 1):
        known |= {*profile.outside[earlier]}
        if earlier < place:
            known |= {*profile.regions[earlier].inputs}
    return known


def region_plan(
    profile: Profile, place: int, kept: Sequence[Call] | None, *, rates: Rates = H200
) -> RegionPlan:
    """Plan one region by hand, with its bytes and time.

    Args:
        profile: of the forward pass.
        place: of the region in it.
        kept: of the region's calls, those whose results are kept while all else runs again; None
            to leave it to autograd.
        rates: that weigh time against memory.

    Returns:
        the region's plan.
    """
    region = profile.regions[place]
    known = _given_before(profile, place)
    given, saved = {*region.inputs} - known, {*region.saved} - known
    # What it hands on is counted where it is needed.
    later = {s for other in profile.regions[place + 1 :] for s in other.inputs}
    later = later.union(*profile.outside[place + 1 :]) - given
    again_ms = 0.0
    # Inputs count in any case: the region that made them leaves them to this one.
    if kept is None:
        stored = given | saved
    else:
        stored = given.union(*(call.made for call in kept))
        again = region.calls[: region.needed_calls]
        chosen = {(call.name, call.place) for call in kept}
        again_ms = sum(rates.ms(call) for call in again if (call.name, call.place) not in chosen)
    own = stored - later
    # What somebody outside keeps whole is here in packed form besides.
    twice = {*region.inputs, *region.saved}.union(stored) & _outside(profile)
    twice &= profile.packed.keys()
    packed = stored & profile.packed.keys()
    # What runs again is whole at once, beside what it was packed as; else an operator's own.
    remade = (
        profile.packed_size(saved - own) + profile.most_at_once(region, packed)
        if kept is None
        else profile.size((saved - own) | packed)
    )
    # Read and written at the end of the forward pass, and again in the backward pass.
    moved = profile.size(packed - later) + profile.packed_size(packed - later)
    return RegionPlan(
        name=region.name,
        kind="keep" if kept is None else "recompute",
        kept=frozenset((c.name, c.place) for c in kept or ()),
        kept_bytes=profile.packed_size(own) + profile.packed_size(twice - own),
        remade_bytes=remade,
        again_ms=again_ms + 2e3 * moved / rates.pack_bytes_per_s,
    )


def plan_by_hand(
    profile: Profile, regions: Sequence[RegionPlan], *, rates: Rates = H200
) -> RecomputePlan:
    """Sum up a plan that somebody has made, to be compared or followed.

    Args:
        profile: of the forward pass.
        regions: one for each region, in their order; from `region_plan`.
        rates: that weigh time against memory.

    Returns:
        the plan; its budget is None.
    """
    inputs = _first_seen(profile)
    curves = [_choices(profile, place, rates) for place in range(len(inputs) - 1)]
    return _summed(profile, regions, inputs, None, _least(curves, inputs))


def _choices(profile: Profile, place: int, rates: Rates) -> list[RegionPlan]:
    """The curve of a region, least memory first: what no other choice beats in all ways."""
    region = profile.regions[place]
    keepable = sorted(
        (call for call in region.calls[: region.needed_calls] if call.can_be_kept),
        key=lambda call: -rates.ms(call) / max(1, profile.packed_size(call.made)),
    )
    # Beginnings of the list; and every set of the largest few, with all that is small.
    largest = sorted(keepable, key=lambda call: -profile.packed_size(call.made))[:_LARGEST]
    small = [call for call in keepable if call not in largest]
    sets = [keepable[:count] for count in _counts(len(keepable))]
    sets += [
        [*small, *some] for count in range(len(largest)) for some in combinations(largest, count)
    ]
    found = [region_plan(profile, place, kept, rates=rates) for kept in (*sets, None)]
    found.sort(key=lambda c: (c.kept_bytes, c.kept_bytes + c.remade_bytes, c.again_ms))
    curve: list[RegionPlan] = []
    for each in found:
        most = each.kept_bytes + each.remade_bytes
        if not any(
            c.again_ms <= each.again_ms and c.kept_bytes + c.remade_bytes <= most for c in curve
        ):
            curve.append(each)
    # Somebody who sets no budget runs nothing again.
    return curve if any(c.kind == "keep" for c in curve) else [*curve, _left_alone(found)]


def _left_alone(found: Sequence[RegionPlan]) -> RegionPlan:
    """The choice that leaves a region to autograd."""
    return next(c for c in found if c.kind == "keep")


def _counts(keepable: int) -> list[int]:
    """Numbers of operators to keep that are tried; not all where there are many."""
    if keepable <= _MOST_CHOICES:
        return list(range(keepable + 1))
    return sorted({round(keepable * i / _MOST_CHOICES) for i in range(_MOST_CHOICES + 1)})


def _least(curves: Sequence[Sequence[RegionPlan]], inputs: Sequence[int]) -> int:
    """The smallest budget that some choice stays within at every moment."""
    # Kept so far, and the most that has been there at a time.
    sums = [(0, 0)]
    for base, curve in zip(inputs, curves, strict=False):
        grown = sorted(
            (kept + base + c.kept_bytes, max(most, kept + base + c.kept_bytes + c.remade_bytes))
            for kept, most in sums
            for c in curve
        )
        sums = []
        for each in grown:
            if not sums or each[1] < sums[-1][1]:
                sums.append(each)
    return min(max(most, kept + inputs[-1]) for kept, most in sums)


def _best(sums: Sequence[_Sum]) -> list[_Sum]:
    """Those that no other one beats in memory and time; at most `_MOST_SUMS`, the least first."""
    found: list[_Sum] = []
    for each in sorted(sums, key=lambda s: (s.kept, s.ms)):
        if not found or each.ms < found[-1].ms:
            found.append(each)
    if len(found) <= _MOST_SUMS:
        return found
    step = len(found) / _MOST_SUMS
    # Dropping one means taking the next larger or the next smaller one: both exist as they are.
    return [*(found[int(i * step)] for i in range(_MOST_SUMS)), found[-1]]


def _summed(
    profile: Profile,
    plans: Sequence[RegionPlan],
    inputs: Sequence[int],
    budget_bytes: int | None,
    least: int,
) -> RecomputePlan:
    sums, peak = 0, 0
    for base, plan in zip(inputs, plans, strict=False):
        sums += base + plan.kept_bytes
        peak = max(peak, sums + plan.remade_bytes)
    stored = kept_storages(profile, plans)
    outside = _outside(profile)
    # What lies outside is whole; where a region packs it as well, both are there.
    packed = stored & profile.packed.keys()
    kept = profile.packed_size(packed) + profile.size((stored | outside) - (packed - outside))
    return RecomputePlan(
        regions=tuple(plans),
        kept_bytes=kept,
        outside_bytes=profile.size(outside),
        peak_bytes=max(peak, kept),
        again_ms=sum(plan.again_ms for plan in plans),
        unchanged_bytes=profile.unchanged_bytes(),
        least_bytes=least,
        budget_bytes=budget_bytes,
        packed=frozenset(packed),
    )


def kept_storages(profile: Profile, plans: Sequence[RegionPlan]) -> set[int]:
    """What regions keep under their plans.

    Args:
        profile: of the forward pass.
        plans: of its regions, in their order.

    Returns:
        storages; what lies outside of regions is left out, unless a region keeps it too.
    """
    found: set[int] = set()
    for region, plan in zip(profile.regions, plans, strict=True):
        if plan.kind == "keep":
            found |= {*region.saved}
            continue
        found |= {*region.inputs}
        for call in region.calls:
            if (call.name, call.place) in plan.kept:
                found |= {*call.made}
    return found


def _gib_up(size: int) -> str:
    """GiB, rounded up to what can be asked for."""
    return f"{-(-size * 1000 // 2**30) / 1000:.3f}"
