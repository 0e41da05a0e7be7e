"""The plan of least time within a budget, held to every plan that there is."""

import itertools
import random

import pytest

from gem_opkit.cost import Cost
from gem_opkit.errors import ConfigError
from gem_parallel.recompute.choose import choose, plan_by_hand, region_plan
from gem_parallel.recompute.profile import Call, Profile, Rates, Region

MIB = 2**20
# A byte takes a nanosecond, so that milliseconds are easy to say.
RATES = Rates(flops_per_s=1e12, bytes_per_s=1e9, call_ms=0.0, pack_bytes_per_s=1e9)


def drawn(seed, *, packed=False):
    """A chain of regions: each reads what the last one made, and saves some of what it makes."""
    draw = random.Random(seed)
    sizes = {0: draw.randint(1, 9) * MIB, 1: MIB}
    regions, given = [], 0
    for place in range(draw.randint(1, 3)):
        calls, saved = [], [given] if draw.random() < 0.7 else []
        for number in range(draw.randint(1, 3)):
            own = len(sizes)
            sizes[own] = draw.randint(1, 9) * MIB
            cost = Cost(draw.randint(1, 9) * 10**9, 0)
            calls.append(
                Call(f"op{draw.randint(0, 1)}", 2 * number, cost, (own,), draw.random() < 0.8)
            )
            if draw.random() < 0.8:
                saved.append(own)
        needed = len(calls) - (calls[-1].made[0] not in saved)
        regions.append(Region(f"r{place}", tuple(calls), (given,), tuple(saved), needed))
        given = calls[-1].made[0]
    outside = [(1,)] + [()] * (len(regions) - 1) + [(given,)]
    short = {s: size // 2 for s, size in sizes.items() if packed and s % 2}
    return Profile(tuple(regions), tuple(outside), sizes, short)


def walk(profile, choices):
    """Time, most memory at a time, and what is kept at the end: step by step, by sets."""
    kept, ms, moments = set(profile.outside[0]), 0.0, []
    for region, outside, kept_calls in zip(
        profile.regions, profile.outside[1:], choices, strict=True
    ):
        if kept_calls is None:
            kept |= {*region.saved}
            moments.append(sum(profile.bytes[s] for s in kept | {*region.inputs}))
        else:
            kept |= {*region.inputs} | {s for call in kept_calls for s in call.made}
            again = [c for c in region.calls[: region.needed_calls] if c not in kept_calls]
            ms += sum(c.cost.flops / 1e9 for c in again)
            moments.append(sum(profile.bytes[s] for s in kept | {*region.saved}))
        kept |= {*outside}
    return ms, max(moments), sum(profile.bytes[s] for s in kept)


def every_choice(profile):
    for kinds in itertools.product(
        *(
            [
                None,
                *(
                    subset
                    for count in range(len(region.calls) + 1)
                    for subset in itertools.combinations(
                        [c for c in region.calls[: region.needed_calls] if c.can_be_kept], count
                    )
                ),
            ]
            for region in profile.regions
        )
    ):
        yield kinds, walk(profile, kinds)


@pytest.mark.parametrize("seed", range(40))
def test_no_other_plan_is_faster_within_the_budget(seed):
    profile = drawn(seed)
    plans = list(every_choice(profile))
    peaks = sorted({max(peak, kept) for _, (_, peak, kept) in plans})
    # Between the least that any plan takes and the most.
    for budget in [peaks[0], peaks[len(peaks) // 3], peaks[len(peaks) // 2], peaks[-1]]:
        # Inputs count as kept also where nobody saves them.
        spare = sum(profile.bytes[s] for region in profile.regions for s in region.inputs)
        fitting = [ms for _, (ms, peak, kept) in plans if max(peak, kept) <= budget - spare]
        if budget < choose(profile, None, rates=RATES).least_bytes:
            assert not fitting
            continue
        found = choose(profile, budget, rates=RATES)
        own = {r.name: r for r in found.regions}
        choices = [
            None
            if own[region.name].kind == "keep"
            else tuple(c for c in region.calls if (c.name, c.place) in own[region.name].kept)
            for region in profile.regions
        ]
        ms, peak, kept = walk(profile, choices)
        assert found.again_ms == pytest.approx(ms)
        assert found.kept_bytes == kept
        assert max(peak, kept) <= found.peak_bytes <= budget
        assert ms <= min(fitting, default=ms) + 1e-6


def test_the_least_budget_has_a_plan_and_a_byte_less_has_none():
    for seed in range(30):
        profile = drawn(seed, packed=seed % 2 == 1)
        least = choose(profile, None, rates=RATES).least_bytes
        assert choose(profile, least, rates=RATES).peak_bytes <= least
        with pytest.raises(ConfigError, match=r"memory.budget_gib must be at least 0\.\d{3}, "):
            choose(profile, least - 1, rates=RATES)


def test_without_a_budget_nothing_runs_again():
    profile = drawn(3)
    found = choose(profile, None, rates=RATES)
    assert {r.kind for r in found.regions} == {"keep"}
    assert found.again_ms == 0
    assert found.kept_bytes == found.unchanged_bytes == profile.unchanged_bytes()


def chain(*sizes_ms, share=None):
    """Regions that each make one tensor and keep it: (MiB, ms)."""
    sizes, regions = {0: MIB}, []
    for place, (mib, ms) in enumerate(sizes_ms):
        sizes[place + 1] = mib * MIB
        call = Call("op", 0, Cost(round(ms * 1e9), 0), (place + 1,))
        regions.append(Region(f"r{place}", (call,), (0,), (place + 1,), 1, ((place + 1,),)))
    packed = {} if share is None else {s: round(size * share) for s, size in sizes.items() if s}
    return Profile(tuple(regions), ((),) * (len(regions) + 1), sizes, packed)


def test_what_saves_most_memory_for_its_time_runs_again_first():
    # 1, 4 and 2 ms for 10 MiB each; the last is made again beside all that is kept.
    profile = chain((10, 1.0), (10, 4.0), (10, 2.0), (10, 0.5))
    again = {}
    for mib in (41, 31, 21, 11):
        found = choose(profile, mib * MIB, rates=RATES)
        again[mib] = [r.name for r in found.regions if r.kind == "recompute"]
    assert again == {41: [], 31: ["r0"], 21: ["r0", "r2"], 11: ["r0", "r1", "r2"]}


def test_the_last_region_is_not_made_again_as_that_frees_nothing():
    profile = chain((10, 5.0), (10, 1.0))
    found = choose(profile, 11 * MIB, rates=RATES)
    assert [r.kind for r in found.regions] == ["recompute", "keep"]
    assert found.peak_bytes == 11 * MIB


def test_packing_shortens_what_is_kept_and_costs_time():
    profile = chain((10, 5.0), (10, 5.0), share=0.5)
    found = choose(profile, None, rates=RATES)
    assert found.kept_bytes == 10 * MIB
    assert found.unchanged_bytes == 20 * MIB
    # Each of 20 MiB is read and half of it written, and the other way round.
    assert found.again_ms == pytest.approx(2 * 30 * MIB / 1e6)
    # Whole again one at a time.
    assert found.peak_bytes == (1 + 5 + 5 + 10) * MIB


def test_a_plan_by_hand_has_the_bytes_of_the_chosen_one():
    profile = drawn(7)
    chosen = choose(profile, choose(profile, None).least_bytes, rates=RATES)
    regions = []
    for place, own in enumerate(chosen.regions):
        calls = profile.regions[place].calls
        kept = [c for c in calls if (c.name, c.place) in own.kept]
        regions.append(
            region_plan(profile, place, None if own.kind == "keep" else kept, rates=RATES)
        )
    by_hand = plan_by_hand(profile, regions, rates=RATES)
    assert by_hand.regions == chosen.regions
    assert (by_hand.kept_bytes, by_hand.peak_bytes) == (chosen.kept_bytes, chosen.peak_bytes)
