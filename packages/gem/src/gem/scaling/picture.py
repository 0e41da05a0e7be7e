"""The pictures of a ladder: NE over FLOPs with the law's bands, as an SVG file and as a page."""

import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from gem.report.figure import Figure, Safe
from gem.report.svg import FULL, NARROW, Axis, Plot, Size
from gem.report.words import short
from gem.scaling.gains import falling, gains, synergy
from gem.scaling.law import Law

# Of an SVG that stands alone: the light colours of the page.
_STYLE = """
svg.plot{background:#fff;font-family:sans-serif}text{font-size:12px;fill:#5b6470}
.tick,.note{font-size:11px}.label{font-size:12px}.grid{stroke:#e9ecf0}.axis{stroke:#9aa4b1}
.line{fill:none;stroke-width:2}.whisker{stroke-width:1.6;stroke:#c42f55}
.line.c0{stroke:#2563c9}.line.c1{stroke:#d9650b}.line.c2{stroke:#0c8577}.line.c3{stroke:#8746c9}
.line.c4{stroke:#c42f55}.line.c5{stroke:#6d7410}.band.c0{fill:#2563c9;opacity:.14}
.dot.c0{fill:#2563c9}.dot.c1{fill:#d9650b}.dot.c2{fill:#0c8577}.dot.c3{fill:#8746c9}
.dot.c4{fill:#c42f55}.dot.c5{fill:#6d7410}
"""
_STEPS = 40
_RUNG_COLUMNS = (
    *("ladder", "rung", "FLOPs an example", "NE", "still fell by", "seeds", "parameters"),
    "settings",
)
GAIN_COLUMNS = ("ladder", "from", "to", "FLOPs", "NE falls by", "per e-fold of FLOPs")


def scaling_svg(found: Mapping[str, Any]) -> str:
    """Draw a ladder as a file of its own.

    Args:
        found: content of ``scaling.json``.

    Returns:
        SVG.
    """
    drawn = _plot(found, _tasks(found)[0], FULL).svg()
    head, _, rest = drawn.partition(">")
    size = f' xmlns="http://www.w3.org/2000/svg" width="{FULL.width}" height="{FULL.height}"'
    return f"{head}{size}><style>{_STYLE}</style>{rest}\n"


def write_page(found: Mapping[str, Any], path: Path) -> None:
    """Write the page of a ladder: one self-contained HTML file.

    Args:
        found: content of ``scaling.json``.
        path: of the file.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    room, css = resources.files("gem.scaling"), resources.files("gem.report") / "page.css"
    template = environment.from_string((room / "page.html.jinja").read_text(encoding="utf-8"))
    figures = [_figure(found, task) for task in _tasks(found)]
    text = template.render(
        style=Safe(css.read_text(encoding="utf-8")),
        recipe=Path(found["spec"]["recipe"]).stem,
        figures=[
            {"figure": each, "drawings": [Safe(drawing) for drawing in each.drawings]}
            for each in figures
        ],
        words=[*law_words(found), *synergy_words(found)],
        tables=[
            {"name": "Rungs", "headers": _RUNG_COLUMNS, "rows": _table(found)},
            {"name": "What growth takes off NE", "headers": GAIN_COLUMNS, "rows": gain_rows(found)},
        ],
    )
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def law_words(found: Mapping[str, Any]) -> list[str]:
    """What the law says, in sentences.

    Args:
        found: content of ``scaling.json``.

    Returns:
        lines; where there is no law, one that says so.
    """
    if "law" not in found:
        return ["No law is fitted: the ladder is reported as it came out."]
    law, said, came = found["law"], found["prediction"], found["outcome"]
    share = f"{100 * law['confidence']:g} %"
    return [
        f"NE(C) = {law['ne_0']:.5f} - {law['eta']:.5f} log(C / {law['flops_0']:.4g}), fitted to "
        f"{law['rungs']} rungs; eta {law['eta_low']:.5f} to {law['eta_high']:.5f} ({share}).",
        f"Rung {said['rung']} of {said['flops_per_example']:.4g} FLOPs an example was predicted at "
        f"{said['ne']:.5f}, {said['low']:.5f} to {said['high']:.5f} ({share}), before it was run; "
        f"it came out at {came['ne']:.5f}, {'within' if came['inside'] else 'outside'} the band.",
        *_falling_words(found),
    ]


def _falling_words(found: Mapping[str, Any]) -> list[str]:
    """Whether the rungs of the law were trained alike, as far as their curves tell."""
    ladder = found["spec"]["law"]
    own = [rung for rung in found["rungs"] if rung["ladder"] == ladder]
    names = dict.fromkeys(rung["rung"] for rung in own)
    fell = {name: falling([r for r in own if r["rung"] == name]) for name in names}
    told = [f"{name} by {value:.5f}" for name, value in fell.items() if value is not None]
    if len(told) < len(fell):
        return []
    return [
        f"From the last part but one of training to the last, NE of the rungs of {ladder} still "
        f"fell: {', '.join(told)}. A rung that falls faster than those below is trained less than "
        f"they are."
    ]


def synergy_words(found: Mapping[str, Any]) -> list[str]:
    """What growth in all directions gives beside each of them alone.

    Args:
        found: content of ``scaling.json``.

    Returns:
        a line, or none where nothing begins at a rung of the law's ladder.
    """
    both = synergy(found, _tasks(found)[0])
    if both is None:
        return []
    alone = ", ".join(f"{gain.ladder} {gain.fall:.5f}" for gain in both.alone)
    whole = both.together
    return [
        f"From rung {whole.first}, each direction alone takes off NE: {alone}; in sum "
        f"{both.sum_of_falls:.5f}. All together, to rung {whole.last}, take off {whole.fall:.5f}."
    ]


def gain_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Cells of what each ladder takes off NE, under `GAIN_COLUMNS`.

    Args:
        found: content of ``scaling.json``.

    Returns:
        a row a ladder, and one for all directions together from the rung where each begins.
    """
    task = _tasks(found)[0]
    every, both = gains(found, task), synergy(found, task)
    if both is not None and both.together not in every:
        every.insert(1, both.together)
    return [
        (
            gain.ladder,
            gain.first,
            gain.last,
            f"{gain.cost:.3g} ×",
            f"{gain.fall:.5f}" + ("" if gain.error is None else f" ± {gain.error:.5f}"),
            "–" if gain.eta is None else f"{gain.eta:.5f}",
        )
        for gain in every
    ]


def _tasks(found: Mapping[str, Any]) -> list[str]:
    return list(found["rungs"][0]["ne"])


def _points(found: Mapping[str, Any], ladder: str, task: str) -> list[tuple[str, float, float]]:
    """Name, FLOPs and mean NE of the rungs of a ladder, in their order."""
    own = [r for r in found["rungs"] if r["ladder"] == ladder]
    names = dict.fromkeys(r["rung"] for r in own)
    return [
        (
            name,
            fmean(r["flops_per_example"] for r in own if r["rung"] == name),
            fmean(r["ne"][task] for r in own if r["rung"] == name),
        )
        for name in names
    ]


def _ladders(found: Mapping[str, Any]) -> list[str]:
    names = list(dict.fromkeys(r["ladder"] for r in found["rungs"]))
    law = found["spec"]["law"]
    # The law's ladder has the first colour.
    return sorted(names, key=lambda name: name != law)


def _plot(found: Mapping[str, Any], task: str, size: Size) -> Plot:
    ladders = {name: _points(found, name, task) for name in _ladders(found)}
    every = [point for points in ladders.values() for point in points]
    law = _law(found)
    x = Axis.around((math.log10(flops) for _, flops, _ in every), "FLOPs of training an example")
    shown = [ne for _, _, ne in every]
    if law is not None:
        shown += [found["prediction"]["low"], found["prediction"]["high"]]
    y = Axis.around(shown, f"NE of {task}")
    alt = f"NE of {task} over FLOPs an example; " + " ".join(law_words(found))
    plot = Plot(size, x, y, alt, x_ticks=_powers(x))
    if law is not None:
        grid = [x.low + (x.high - x.low) * step / _STEPS for step in range(_STEPS + 1)]
        low, high = zip(*(law.predicted(10**at) for at in grid), strict=True)
        plot.band([*zip(grid, low, strict=True)], [*zip(grid, high, strict=True)], "c0")
        plot.line([(at, law.at(10**at)) for at in grid], "c0")
    for place, (name, points) in enumerate(ladders.items()):
        style = f"c{place % 6}"
        if law is None or place:
            plot.line([(math.log10(flops), ne) for _, flops, ne in points], style)
        plot.dots(
            (
                ((math.log10(flops), ne), f"{name} {rung}: {flops:.4g} FLOPs, NE {ne:.5f}")
                for rung, flops, ne in points
            ),
            style,
        )
        if points and size is not NARROW:
            _, flops, ne = points[-1]
            plot.note(math.log10(flops), ne, name, anchor="end")
    if law is not None:
        said = found["prediction"]
        at = math.log10(said["flops_per_example"])
        plot.whisker(at, said["low"], said["high"], "c4")
    return plot


def _powers(x: Axis) -> list[tuple[float, str]]:
    """Marks at 1, 2 and 5 times powers of ten, fewer where they are many."""
    first, last = math.floor(x.low), math.ceil(x.high)
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    marks = [
        (power + math.log10(step), f"{step}e{power}")
        for power in range(first, last + 1)
        for step in steps
    ]
    return [mark for mark in marks if x.low <= mark[0] <= x.high]


def _law(found: Mapping[str, Any]) -> Law | None:
    if "law" not in found:
        return None
    told = {key: found["law"][key] for key in Law.__dataclass_fields__}
    return Law(**told)


def _figure(found: Mapping[str, Any], task: str) -> Figure:
    text = "A dot is a rung, the mean of its seeds."
    if "law" in found:
        text += (
            " The line is the law, the tinted band holds another rung with its confidence, and the "
            "red bar is what was predicted of the last one."
        )
    return Figure(
        title=f"NE of {task} over the cost of the model",
        text=text,
        drawings=tuple(_plot(found, task, size).svg() for size in (FULL, NARROW)),
        legend=tuple((f"c{place % 6}", name) for place, name in enumerate(_ladders(found))),
        wide=True,
    )


def _table(found: Mapping[str, Any]) -> Sequence[tuple[str, ...]]:
    task = _tasks(found)[0]
    rows = []
    for ladder in _ladders(found):
        for rung, flops, ne in _points(found, ladder, task):
            own = [r for r in found["rungs"] if (r["ladder"], r["rung"]) == (ladder, rung)]
            size, fell = own[0].get("parameters"), falling(own)
            rows.append(
                (
                    ladder,
                    rung,
                    f"{flops:.5g}",
                    f"{ne:.5f}",
                    "–" if fell is None else f"{fell:.5f}",
                    str(len(own)),
                    "–" if size is None else f"{short(size['dense'])} + {short(size['tables'])}",
                    " ".join(_settings(own[0])) or "–",
                )
            )
    return rows


def _settings(rung: Mapping[str, Any]) -> list[str]:
    """What a rung sets, its content first."""
    content = rung.get("content")
    return [*([f"content={content}"] if content else []), *rung["settings"]]
