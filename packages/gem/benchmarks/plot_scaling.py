"""Forecast weak scaling of a recipe over 1 to 4,096 GPUs, and hold forecasts to measured steps.

    python packages/gem/benchmarks/plot_scaling.py

in the repository's root writes the tables and the picture of docs/scaling.md. Measured steps are
the rows of step.jsonl under results; rates are fitted to the first one of one GPU, and to
collectives.jsonl. Three ways to hold tables are forecast. 1D: one sharding group of all ranks. 2D:
eight copies of every shard, on the GPUs of a host, averaged each step. Fully sharded 2D: the same,
each copy keeping an eighth between steps. The dense part takes its best plan each time. Needs no
GPU and no torch.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gem.config import load_recipe
from gem.planning.command import default_topology
from gem.planning.rates import DEFAULT, Calibrated, calibrated, read_rows
from gem.planning.tables import tables_of
from gem.planning.work import work_of
from gem.report.svg import HALF, Axis, Plot
from gem_opkit.errors import ConfigError
from gem_parallel.contract import ParallelPlan
from gem_parallel.planning.forecast import Forecast, forecast
from gem_parallel.planning.planner import search
from gem_parallel.topology import PRESETS

ROOT = Path(__file__).resolve().parents[3]
PAGE, PICTURE = ROOT / "docs" / "scaling.md", ROOT / "docs" / "images" / "scaling.svg"
GPUS = tuple(2**power for power in range(13))
COPIES = 8
WAYS = ("1D", "2D", "fully sharded 2D")
# Rows of each table, beside those of the recipe: 100 times as many are 2.7 TB.
TIMES = (1, 100)
STYLE = """
.grid{stroke:#ddd}.axis{stroke:#888}.line{fill:none;stroke-width:2}
text{font:12px sans-serif;fill:#333}.title{font-size:13px;font-weight:bold}
.c0{stroke:#1668b8}.c1{stroke:#c4501b;stroke-dasharray:7 4}.c2{stroke:#2b8a3e;stroke-dasharray:2 3}
.k{stroke-width:2}svg.back{background:#fff}
"""


@dataclass(frozen=True, slots=True)
class Point:
    """A forecast of one way on some GPUs.

    Attributes:
        times: rows of each table, as a multiple of the recipe's.
        way: how tables are held.
        gpus: ranks.
        forecast: of the best dense plan; None where nothing fits.
        weak_scaling: MFU over that of one rank.
    """

    times: int
    way: str
    gpus: int
    forecast: Forecast | None
    weak_scaling: float


def main() -> None:
    """Forecast, draw, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="h200")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    given = parser.parse_args()
    points = [
        point for times in TIMES for gpus in GPUS for point in forecasts(given.recipe, times, gpus)
    ]
    PICTURE.write_text(picture(points), encoding="utf-8")
    write_table("scaling", table(points))
    write_table("measured", measured(given.results))


def write_table(name: str, lines: Sequence[str]) -> None:
    """Replace a table of the page.

    Args:
        name: that stands in the comment above it.
        lines: of Markdown.
    """
    begin, end = f"<!-- table {name} -->\n", "<!-- end -->"
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    _, _, tail = rest.partition(end)
    PAGE.write_text(head + begin + "\n".join(lines) + f"\n{end}{tail}", encoding="utf-8")


def measured(folder: Path) -> list[str]:
    """Lines of the table of measured steps.

    Args:
        folder: of all results.

    Returns:
        Markdown; the first row is the one that rates were fitted to, and that weak scaling is
        counted against.
    """
    places = [folder / place / "step.jsonl" for place in ("h200", "h200x2")]
    rows = [row for place in places if place.is_file() for row in read_rows(place)]
    rows.sort(key=lambda row: (row["gpus"], not row["case"].startswith("h200,"), row["case"]))
    collectives = read_rows(folder / "h200x2" / "collectives.jsonl")
    fitted = calibrated([*rows, *collectives], PRESETS["h200x2"])
    sys.stdout.write(f"{fitted.rates!r}\n{fitted.topology.host_tier!r}\n")  # for gem.planning.rates
    lines = [
        "| recipe | GPUs, plan | MFU | weak scaling | measured, ms | forecast, ms | error "
        "| peak, GiB | forecast, GiB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        found = forecast_of(row, fitted)
        here = " (fitted to it)" if row is rows[0] else ""
        name = ", ".join([str(row["case"]).partition(",")[0], *row["set"]])
        error = found.step_ms / row["step_ms"] - 1
        lines.append(
            f"| {name}{here} | {row['gpus']}, {row['plan']} | {100 * row['e2e_mfu']:.1f} % | "
            f"{row['e2e_mfu'] / rows[0]['e2e_mfu']:.3f} | {row['step_ms']:.1f} | "
            f"{found.step_ms:.1f} | {100 * error:+.1f} % | {row['peak_bytes'] / 2**30:.1f} | "
            f"{found.memory.total / 2**30:.1f} |"
        )
    return lines


def forecast_of(row: Mapping[str, Any], fitted: Calibrated) -> Forecast:
    """Forecast the step that a row of bench_step measured.

    Args:
        row: of step.jsonl.
        fitted: rates and links.

    Returns:
        the forecast of its plan.
    """
    plan = [f"parallel.{word}" for word in row["plan"].split()] if row["gpus"] > 1 else []
    # Where an engine holds the tables, their first rows are drawn by place; that costs no step.
    settings = ['model.embeddings.initial_rows="by_place"', *row["set"], *plan]
    config = load_recipe(str(row["case"]).partition(",")[0], settings)
    ranks = ParallelPlan() if config.parallel is None else config.parallel
    axes = ParallelPlan.model_validate({n: getattr(ranks, n) for n in ParallelPlan.model_fields})
    topology = fitted.topology.model_copy(update={"ranks_per_host": row["gpus"]})
    examples = row["examples_a_rank"]
    step = tables_of(config, examples=examples).step(axes, topology)
    work = work_of(config, examples=examples)
    return forecast(work, axes, topology, tables=step, rates=fitted.rates)


def forecasts(recipe: str, times: int, gpus: int) -> list[Point]:
    """The best plan of each way on some GPUs.

    Args:
        recipe: its name.
        times: rows of each table, as a multiple of the recipe's.
        gpus: ranks.

    Returns:
        one point for each way; without a forecast where it does not exist or does not fit.
    """
    rows = load_recipe(recipe).data.hash_rows
    settings = [f"data.hash_rows.{name}={times * count}" for name, count in rows.items()]
    config = load_recipe(recipe, settings)
    work, tables, topology = work_of(config), tables_of(config), default_topology(gpus)
    points: list[Point] = []
    for way in WAYS:
        copies = 1 if way == "1D" else COPIES
        fixed = {"table_replicate": copies, "fully_sharded_tables": way == WAYS[2]}
        found = None
        if gpus % copies == 0 and (way == "1D" or gpus > COPIES):
            try:
                found = search(
                    work, topology, tables=tables.step, rates=DEFAULT, fixed=fixed, most=1
                )
            except ConfigError:
                found = None
        if found is None or not found.best[0].forecast.fits:
            points.append(Point(times, way, gpus, None, 0.0))
            continue
        best = found.best[0].forecast
        points.append(Point(times, way, gpus, best, found.weak_scaling(best)))
    return points


def table(points: Sequence[Point]) -> list[str]:
    """Lines of the page's table.

    Args:
        points: all of them.

    Returns:
        Markdown.
    """
    lines = [
        "| rows | GPUs | "
        + " | ".join(f"{way}: step ms, weak scaling, GiB a rank" for way in WAYS)
        + " |",
        "| --- | ---: | " + " | ".join("---" for _ in WAYS) + " |",
    ]
    for times in TIMES:
        for gpus in GPUS:
            here = [p for p in points if (p.times, p.gpus) == (times, gpus)]
            if any(p.forecast is not None for p in here):
                cells = " | ".join(cell(p) for p in here)
                lines.append(f"| x {times} | {gpus:,} | {cells} |")
    return lines


def cell(point: Point) -> str:
    """What the table says of a forecast.

    Args:
        point: the forecast.
    """
    found = point.forecast
    if found is None:
        return "-"
    gib = found.memory.total / 2**30
    return f"{found.step_ms:.0f}, {point.weak_scaling:.3f}, {gib:.0f}"


def picture(points: Sequence[Point]) -> str:
    """Two plots side by side, a file of its own.

    Args:
        points: all of them.

    Returns:
        SVG.
    """
    width, height = HALF.width, HALF.height
    parts: list[str] = []
    for place, times in enumerate(TIMES):
        here = [p for p in points if p.times == times and p.forecast is not None]
        size = "27 GB" if times == 1 else "2.7 TB"
        parts.append(
            f'<text class="title" x="{place * width + 70}" y="16">tables of {size}</text>'
            f'<g transform="translate({place * width} 20)">'
            f'<svg width="{width}" height="{height}">{plot(here, size)}</svg></g>'
        )
    for place, way in enumerate(WAYS):
        x, y = 70 + 150 * place, height + 34
        parts.append(
            f'<line class="k c{place}" x1="{x}" y1="{y - 4}" x2="{x + 26}" y2="{y - 4}"/>'
            f'<text x="{x + 32}" y="{y}">{way}</text>'
        )
    return (
        f'<svg class="back" xmlns="http://www.w3.org/2000/svg" width="{2 * width}" '
        f'height="{height + 46}" viewBox="0 0 {2 * width} {height + 46}">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def plot(points: Iterable[Point], size: str) -> str:
    """Weak scaling over the number of GPUs, on a logarithmic axis.

    Args:
        points: with forecasts.
        size: of the tables, in words.
    """
    ticks = [(float(power), f"{2**power:,}") for power in range(0, 13, 2)]
    drawn = Plot(
        HALF,
        Axis(0.0, 12.6, "GPUs"),
        Axis(0.2, 1.05, "forecast weak scaling"),
        f"forecast weak scaling over 1 to 4,096 GPUs, tables of {size}",
        x_ticks=ticks,
    )
    found = list(points)
    for place, way in enumerate(WAYS):
        line = [(math.log2(p.gpus), p.weak_scaling) for p in found if p.way == way]
        drawn.line(line, f"c{place}")
    return drawn.svg()


if __name__ == "__main__":
    main()
