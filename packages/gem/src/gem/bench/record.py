"""Record a few steps with torch's profiler, and say what they spent their time on."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gem.bench.kinds import KINDS, Kind
from gem.bench.regions import ModuleRanges, RegionFlops
from gem.bench.schema import GAPS, KindShare, PassWork, Profile, RegionShare
from gem.bench.shares import Shares, shares_of
from gem.bench.trace import STEP_RANGE, read_trace
from gem.train.clock import StepClock

REST = "rest"


def record(
    run: Callable[[int], None], steps: int, *, clock: StepClock, ranges: ModuleRanges
) -> list[dict[str, Any]]:
    """Record steps, and one before them that is not counted.

    Args:
        run: runs a step, told which one it is.
        steps: counted steps, above 0.
        clock: of the steps; names their sections.
        ranges: name their modules.

    Returns:
        events of the trace, for `read_trace`.
    """
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds, acc_events=True) as recorded, ranges.named():
        clock.named_in_trace = True
        for number in range(steps + 1):
            with record_function(f"{STEP_RANGE}{number}"):
                run(number)
        clock.named_in_trace = False
        clock.mark("other")  # ends the range that is open
        if on_gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def profile_of(
    events: Sequence[Mapping[str, Any]],
    flops: Mapping[str, RegionFlops],
    *,
    peak_flops_per_s: float | None,
) -> Profile:
    """Say what the steps of a trace spent their time on.

    Args:
        events: from `record`.
        flops: of one step, on one rank, by module.
        peak_flops_per_s: of one device; None where unknown.

    Returns:
        shares that add up to the step, and what each module reached of the peak.

    Raises:
        MeasurementError: no steps in the trace.
    """
    shares = shares_of(read_trace(events))
    by_kind, hidden = shares.by_kind(), shares.hidden_by_kind()
    kinds = [
        KindShare(
            kind=kind,
            ms=by_kind.get(kind, 0.0),
            share=by_kind.get(kind, 0.0) / shares.step_ms,
            hidden_ms=hidden.get(kind, 0.0),
            launches=sum(n for (_, _, own), n in shares.launches.items() if own == kind),
        )
        for kind in KINDS
    ]
    gaps = KindShare(
        kind=GAPS,
        ms=shares.gap_ms,
        share=shares.gap_ms / shares.step_ms,
        hidden_ms=0.0,
        launches=0.0,
    )
    names = [*flops, *sorted({*shares.by_region()} - {*flops})]
    told = _Told(shares, flops, peak_flops_per_s)
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(_layer(name), []).append(name)
    return Profile(
        steps=shares.steps,
        step_ms=shares.step_ms,
        busy_ms=shares.step_ms - shares.gap_ms,
        kinds=(*kinds, gaps),
        layers=tuple(told.of(layer, members) for layer, members in layers.items()),
        regions=tuple(told.of(name, [name]) for name in names),
        attention=_work(
            sum(own.attention.total for own in flops.values()),
            shares.kernel_ms(kind="attention"),
            peak_flops_per_s,
        ),
        products=_work(
            sum(own.products.total for own in flops.values()),
            shares.kernel_ms(kind="products"),
            peak_flops_per_s,
        ),
    )


def _layer(name: str) -> str:
    """The layer of a module; a module outside of all layers stands for itself."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else name


@dataclass(frozen=True, slots=True)
class _Told:
    """Says what modules take."""

    shares: Shares
    flops: Mapping[str, RegionFlops]
    peak_flops_per_s: float | None

    def of(self, name: str, members: Sequence[str]) -> RegionShare:
        """What some modules take together."""
        shares = self.shares

        def ms(**which: str) -> float:
            return sum(shares.of(region=member, **which) for member in members)

        def work(kind: Kind, counted: int) -> PassWork:
            ran_ms = sum(shares.kernel_ms(kind=kind, region=member) for member in members)
            return _work(counted, ran_ms, self.peak_flops_per_s)

        known = [self.flops[member] for member in members if member in self.flops]
        attention = sum(own.attention.total for own in known)
        products = sum(own.products.total for own in known)
        whole = ms()
        return RegionShare(
            name=name or REST,
            forward_ms=ms(phase="forward"),
            backward_ms=ms(phase="backward"),
            outside_ms=ms(phase="outside"),
            share=min(1.0, whole / shares.step_ms),
            kinds_ms={kind: own for kind in KINDS if (own := ms(kind=kind))},
            waited_ms=sum(shares.waited_ms.get(member, 0.0) for member in members),
            launches=sum(n for (own, _, _), n in shares.launches.items() if own in members),
            whole=_work(attention + products, whole, self.peak_flops_per_s),
            attention=work("attention", attention),
            products=work("products", products),
        )


def _work(flops: int, ms: float, peak_flops_per_s: float | None) -> PassWork:
    rate = 1e3 * flops / ms if flops and ms > 0 else None
    return PassWork(
        flops=flops,
        ms=ms,
        tflops_per_s=None if rate is None else 1e-12 * rate,
        peak_frac=None if rate is None or peak_flops_per_s is None else rate / peak_flops_per_s,
    )
