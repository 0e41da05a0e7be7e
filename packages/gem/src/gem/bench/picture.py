"""The picture of a step: its kinds of work, and what each module takes, as one SVG file.

Own drawing rather than a plotting library, as in `gem.report.svg`, whose plots have no bars that
lie and add up.
"""

from collections.abc import Iterable, Mapping
from html import escape

from gem.bench.schema import GAPS, Profile, RegionShare, StepReport
from gem.bench.words import KIND_WORDS, region_words

_COLOURS = {
    "attention": "#1668b8",
    "products": "#d9650b",
    "elementwise": "#2b8a3e",
    "tables": "#8746c9",
    "optimizer": "#b08900",
    "data": "#6b7280",
    "collectives": "#c42f55",
    GAPS: "#cfd6de",
}
_STYLE = """
text{font:12px sans-serif;fill:#2b2f36}.t{font-size:15px;font-weight:bold}.q{fill:#5b6470}
.r{text-anchor:end}.w{fill:#fff;text-anchor:middle}.m{text-anchor:middle}.h{font-weight:bold}
.g{stroke:#e3e7ec}.back{background:#fff}
"""
_WIDTH, _LEFT, _BAR, _ROW = 1000, 170, 460, 22
# Right edges of the columns behind the bars.
_COLUMNS = (("ms", 690), ("all time", 784), ("attention", 880), ("products", 976))
_LEAST = 0.002  # share of the step below which a module is not drawn by itself
_LEAST_DRAWN = 5e-4  # share of the step below which a kind has no entry
_LETTER = 6.6  # width of one, about


def picture(report: StepReport) -> str:
    """Draw a report.

    Args:
        report: with a profile.

    Returns:
        SVG, a file of its own; text says what colours do.
    """
    profile = report.profile
    if profile is None:
        return _file(60, [_text(20, 30, "no step was profiled")], "no profile")
    parts = [_text(20, 28, _title(report), "t"), _text(20, 48, _subtitle(report, profile), "q")]
    y = 70
    kinds = {kind.kind: kind.ms for kind in profile.kinds} | {GAPS: report.host_gap_ms or 0.0}
    whole = sum(kinds.values())
    parts += [_stack(20, y, _WIDTH - 40, 30, kinds, whole, labelled=True)]
    parts += _legend(y + 52, kinds, whole)
    y += 132
    parts += [_text(20, y, "by module, forward and backward", "h")]
    parts += [_text(edge, y, name, "r h") for name, edge in _COLUMNS]
    shown = _shown(profile)
    longest = max(sum(region.kinds_ms.values()) for region in shown)
    for region in shown:
        y += _ROW
        parts += _row(y, region, longest)
    y += 30
    note = "FLOPs of the model, TFLOP/s: over all time, over that of attention, of other products"
    if report.efficiency.peak_tflops is not None:
        note += f"; and share of {report.efficiency.peak_tflops:,.0f}"
    parts += [_text(20, y, note, "q")]
    return _file(y + 18, parts, f"{_title(report)}; {_spoken(kinds, whole)}")


def _title(report: StepReport) -> str:
    mfu = report.efficiency.e2e_mfu
    reached = "" if mfu is None else f", {100 * mfu:.1f} % MFU"
    where = report.device if report.gpus == 1 else f"{report.gpus} x {report.device}"
    by = "" if report.impl == "auto" else f", impl={report.impl}"
    return f"{report.recipe} on {where}{by}: {report.step_ms:.1f} ms a step{reached}"


def _subtitle(report: StepReport, profile: Profile) -> str:
    return (
        f"{report.examples_a_rank:,} examples a rank, {report.flops_a_step / 1e12:.3g} TFLOP a "
        f"step ({_percent(report.flops_attention, report.flops_a_step)} attention); "
        f"{profile.busy_ms:.1f} ms of work, by a profile of {profile.steps} steps"
    )


def _spoken(kinds: Mapping[str, float], whole: float) -> str:
    return ", ".join(
        f"{KIND_WORDS[kind]} {_percent(ms, whole)}" for kind, ms in kinds.items() if ms
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def _stack(
    x: float,
    y: float,
    width: float,
    height: float,
    kinds: Mapping[str, float],
    whole: float,
    *,
    labelled: bool = False,
) -> str:
    drawn: list[str] = []
    for kind, ms in kinds.items():
        length = width * ms / whole if whole else 0.0
        if length > 0.05:
            title = f"<title>{escape(KIND_WORDS[kind])}: {ms:.2f} ms</title>"
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{height}" '
                f'fill="{_COLOURS[kind]}">{title}</rect>'
            )
            label = f"{ms:.1f}"
            if labelled and length > _LETTER * len(label) + 8:
                style = "m" if kind == GAPS else "w"
                drawn.append(_text(x + length / 2, y + height / 2 + 4, label, style))
        x += length
    return "".join(drawn)


def _legend(y: float, kinds: Mapping[str, float], whole: float) -> list[str]:
    parts: list[str] = []
    across = 3
    for place, (kind, ms) in enumerate(
        (k, ms) for k, ms in kinds.items() if ms > _LEAST_DRAWN * whole
    ):
        x, at = 20 + (_WIDTH - 40) / across * (place % across), y + 20 * (place // across)
        text = f"{KIND_WORDS[kind]} {ms:.1f} ms, {_percent(ms, whole)}"
        parts.append(
            f'<rect x="{x:.0f}" y="{at - 10}" width="11" height="11" fill="{_COLOURS[kind]}"/>'
            + _text(x + 17, at, text)
        )
    return parts


def _shown(profile: Profile) -> list[RegionShare]:
    """Modules that can be seen; the others are in ``rest``."""
    return [r for r in profile.regions if r.share >= _LEAST] or list(profile.regions)


def _row(y: float, region: RegionShare, longest: float) -> Iterable[str]:
    ms = sum(region.kinds_ms.values())
    yield f'<line class="g" x1="20" y1="{y - 15}" x2="{_WIDTH - 20}" y2="{y - 15}"/>'
    yield _text(_LEFT - 10, y, region_words(region.name), "r")
    yield _stack(_LEFT, y - 11, _BAR * ms / longest, 14, region.kinds_ms, ms)
    cells = [f"{ms:.2f}"]
    for work in (region.whole, region.attention, region.products):
        cell = "" if work.tflops_per_s is None else f"{work.tflops_per_s:.3g}"
        share = "" if work.peak_frac is None else f", {100 * work.peak_frac:.0f} %"
        cells.append(cell + share)
    for cell, (_, edge) in zip(cells, _COLUMNS, strict=True):
        yield _text(edge, y, cell, "r")


def _text(x: float, y: float, text: str, style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _file(height: float, parts: Iterable[str], alt: str) -> str:
    return (
        f'<svg class="back" xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" '
        f'height="{height:.0f}" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(alt, quote=True)}"><style>{_STYLE}</style>'
        f'<rect width="{_WIDTH}" height="{height:.0f}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )
