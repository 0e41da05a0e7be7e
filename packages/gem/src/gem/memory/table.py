"""The memory table of a plan: what is kept, packed, run again, and why."""

from typing import Any

from gem_parallel.recompute.choose import RecomputePlan, RegionPlan
from gem_parallel.recompute.profile import H200, Profile, Rates, Region

# Operators that a line names; the rest is a number.
_NAMED = 3


def memory_json(profile: Profile, plan: RecomputePlan) -> dict[str, Any]:
    """A plan as plain values.

    Args:
        profile: of the forward pass.
        plan: for it.

    Returns:
        sums, and one entry for each region.
    """
    return {
        "budget_bytes": plan.budget_bytes,
        "least_bytes": plan.least_bytes,
        "unchanged_bytes": plan.unchanged_bytes,
        "kept_bytes": plan.kept_bytes,
        "outside_bytes": plan.outside_bytes,
        "packed_from_bytes": profile.size(plan.packed),
        "packed_bytes": profile.packed_size(plan.packed),
        "peak_bytes": plan.peak_bytes,
        "again_ms": plan.again_ms,
        "regions": [
            {
                "region": own.name,
                "kind": own.kind,
                "saved_bytes": profile.size(region.saved),
                "kept_bytes": own.kept_bytes,
                "again_ms": own.again_ms,
                "kept": sorted(f"{name} {place}" for name, place in own.kept),
                "again": _again(region, own),
                "why": _why(profile, region, own, plan),
            }
            for region, own in zip(profile.regions, plan.regions, strict=True)
        ],
    }


def memory_line(plan: RecomputePlan) -> str:
    """A plan in a line, for the log of a run.

    Args:
        plan: any.
    """
    again = sum(region.kind == "recompute" for region in plan.regions)
    return (
        f"memory: {_size(plan.kept_bytes)} of activations are kept in place of "
        f"{_size(plan.unchanged_bytes)}, at most {_size(plan.peak_bytes)} at a time; "
        f"{again} of {len(plan.regions)} regions run again, {len(plan.packed)} tensors packed"
    )


def memory_text(profile: Profile, plan: RecomputePlan) -> str:
    """A plan for people.

    Args:
        profile: of the forward pass.
        plan: for it.

    Returns:
        lines of text, ending in a newline.
    """
    asked = "no budget" if plan.budget_bytes is None else f"budget {_size(plan.budget_bytes)}"
    packed = profile.size(plan.packed)
    lines = [
        f"{asked}: {_size(plan.kept_bytes)} are kept for the backward pass in place of "
        f"{_size(plan.unchanged_bytes)}, at most {_size(plan.peak_bytes)} are there at a time; "
        f"{plan.again_ms:.1f} ms more work",
        f"least budget {_size(plan.least_bytes)}; outside of regions, always kept: "
        f"{_size(plan.outside_bytes)}",
    ]
    if packed:
        lines.append(f"packed: {_size(packed)} as {_size(profile.packed_size(plan.packed))}")
    rows = [("region", "saved", "kept", "again ms", "what and why")]
    for region, own in zip(profile.regions, plan.regions, strict=True):
        rows.append(
            (
                region.name,
                _size(profile.size(region.saved)),
                _size(own.kept_bytes),
                f"{own.again_ms:.2f}",
                _why(profile, region, own, plan),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += [
        "  ".join(
            cell.rjust(width) if 0 < column < 4 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.2f} MiB"


def _again(region: Region, own: RegionPlan) -> list[str]:
    if own.kind == "keep":
        return []
    return [
        f"{call.name} {call.place}"
        for call in region.calls[: region.needed_calls]
        if call.made and (call.name, call.place) not in own.kept
    ]


def _why(
    profile: Profile, region: Region, own: RegionPlan, plan: RecomputePlan, rates: Rates = H200
) -> str:
    """Milliseconds that a GiB costs or saves, which is what the choice went by."""
    if own.kind == "keep":
        if plan.budget_bytes is None:
            return "all kept: no budget"
        whole = sum(rates.ms(call) for call in region.calls[: region.needed_calls])
        gib = profile.size(region.saved) / 2**30
        rate = f", {whole / gib:.2f} ms a GiB to make again" if gib else ""
        return f"all kept{rate}"
    by_name = {(c.name, c.place): c for c in region.calls}
    kept = sorted((by_name[key] for key in own.kept), key=lambda c: -profile.size(c.made))
    again = [
        c
        for c in region.calls[: region.needed_calls]
        if c.made and (c.name, c.place) not in own.kept
    ]
    again.sort(key=lambda c: -profile.size(c.made))
    return (
        f"again: {_named([c.name for c in again])} ({_rate(profile, again, rates)}); "
        f"kept: {_named([c.name for c in kept])} ({_rate(profile, kept, rates)})"
    )


def _rate(profile: Profile, calls: list[Any], rates: Rates) -> str:
    gib = profile.size({s for call in calls for s in call.made}) / 2**30
    return f"{sum(rates.ms(c) for c in calls) / gib:.2f} ms a GiB" if gib else "nothing"


def _named(names: list[str]) -> str:
    """The largest few, without the words that all of them have."""
    short = [name.removesuffix(".default").rpartition("aten.")[2] for name in names]
    once = list(dict.fromkeys(short))
    rest = f" and {len(once) - _NAMED} more" if len(once) > _NAMED else ""
    return (", ".join(once[:_NAMED]) or "the inputs alone") + rest
