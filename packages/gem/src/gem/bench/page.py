"""A report of `gem bench step` as text."""

from collections.abc import Iterable, Sequence

from gem.bench.schema import PassWork, RegionShare, StepReport
from gem.bench.words import KIND_WORDS, region_words

_GIB = 2**30


def as_text(report: StepReport) -> str:
    """Write a report for people.

    Args:
        report: of any device.

    Returns:
        lines of text, ending in a newline.
    """
    lines = [*_head(report), *_profile(report), *_memory(report)]
    lines.append(f"left out: {report.left_out}")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _head(report: StepReport) -> Iterable[str]:
    reached, flops = report.efficiency, report.flops_a_step
    where = report.device if report.gpus == 1 else f"{report.gpus} x {report.device}"
    yield (
        f"{report.recipe} on {where}, {report.plan}, impl={report.impl}: {report.step_ms:.2f} ms a "
        f"step ({report.step_ms_fastest:.2f} to {report.step_ms_slowest:.2f}, {report.steps} steps)"
    )
    parts = "" if report.parts == 1 else f" in {report.parts} parts"
    yield (
        f"   {report.examples_a_rank:,} examples a rank{parts}, {report.examples_per_s:,.0f} "
        f"examples/s; loss {report.loss_first:.4f} to {report.loss_last:.4f}"
    )
    yield (
        f"   {_flops(flops)} a step: attention {_share(report.flops_attention, flops)}, "
        f"other products {_share(report.flops_products, flops)}"
    )
    if reached.e2e_mfu is None:
        yield f"   MFU n/a: no peak is known of {report.device}"
    else:
        local = "n/a" if reached.local_mfu is None else f"{100 * reached.local_mfu:.1f} %"
        ratio = "n/a" if reached.scaling_ratio is None else f"{reached.scaling_ratio:.3f}"
        yield (
            f"   MFU {100 * reached.e2e_mfu:.1f} % = local MFU {local} x scaling ratio {ratio}, "
            f"of {reached.peak_tflops:,.0f} TFLOP/s ({reached.peak_source})"
        )
    yield "   sections: " + ", ".join(f"{k} {ms:.2f}" for k, ms in report.sections_ms.items())


def _flops(count: float) -> str:
    return f"{count / 1e9:.4g} GFLOP" if count < 1e11 else f"{count / 1e12:.4g} TFLOP"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def _profile(report: StepReport) -> Iterable[str]:
    profile = report.profile
    if profile is None:
        yield "no step was profiled here"
        return
    yield f"where {profile.steps} profiled steps of {profile.step_ms:.2f} ms went"
    rows = [("   kind", "ms", "share", "hidden ms", "launches")]
    rows += [
        (
            f"   {KIND_WORDS[kind.kind]}",
            f"{kind.ms:.2f}",
            f"{100 * kind.share:.1f} %",
            f"{kind.hidden_ms:.2f}",
            f"{kind.launches:.0f}",
        )
        for kind in profile.kinds
    ]
    yield from _table(rows)
    yield f"   without the profiler host gaps are {report.host_gap_ms:.2f} ms a step"
    for name, work in (("attention", profile.attention), ("other products", profile.products)):
        yield f"   {name}: {_flops(work.flops)} at {_rate(work)}"
    yield from _regions("layer", profile.layers)
    yield from _regions("module", profile.regions)


def _regions(what: str, regions: Sequence[RegionShare]) -> Iterable[str]:
    head = ("ms", "share", "forward", "backward", "waited", "FLOPs/time", "attention", "products")
    rows = [(f"   {what}", *head)]
    rows += [
        (
            f"   {region_words(region.name)}",
            f"{sum(region.kinds_ms.values()):.2f}",
            f"{100 * region.share:.1f} %",
            f"{region.forward_ms:.2f}",
            f"{region.backward_ms:.2f}",
            f"{region.waited_ms:.2f}",
            _rate(region.whole),
            _rate(region.attention),
            _rate(region.products),
        )
        for region in regions
    ]
    yield from _table(rows)


def _rate(work: PassWork) -> str:
    if work.tflops_per_s is None:
        return "-"
    share = "" if work.peak_frac is None else f", {100 * work.peak_frac:.0f} %"
    return f"{_flops(1e12 * work.tflops_per_s)}/s{share}"


def _memory(report: StepReport) -> Iterable[str]:
    memory = report.memory
    text = (
        f"memory: weights {memory.parameter_bytes / _GIB:.2f} GiB, optimizer "
        f"{memory.optimizer_bytes / _GIB:.2f}"
    )
    if memory.kept_bytes is not None:
        text += f", kept for the backward pass {memory.kept_bytes / _GIB:.2f}"
    if memory.peak_bytes is not None:
        text += f"; peak {memory.peak_bytes / _GIB:.2f}"
    if memory.peak_ratio is not None:
        text += f", {memory.peak_ratio:.3f} of their sum"
    yield text


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells])
