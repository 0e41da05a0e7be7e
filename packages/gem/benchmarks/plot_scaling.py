"""Fit rates to measured steps, hold forecasts to them, and forecast 1 to 4,096 GPUs.

    python packages/gem/benchmarks/plot_scaling.py

in the repository's root writes the rates that ship with `gem plan`, and the tables and the picture
of docs/scaling.md. Rates are fitted to a step of h200 on one GPU and one of copies on two, to
collectives.jsonl and to the rows of attention, all under results; every other row of step.jsonl is
a check. Four ways to hold
tables are forecast. 1D: one sharding group of all ranks. 2D: eight copies of every shard, on the
GPUs of a host. Fully sharded 2D: the same, each copy keeping an eighth between steps. 2D with far
copies: each of the eight copies of the tables on neighbouring hosts. The dense part takes its best
plan each time. Needs no GPU and no torch.
"""

import argparse
import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forecast_rows import (
    SHIPPED,
    fit,
    measured,
    rates_table,
    shipped,
    split_table,
    ways_table,
)

from gem.config import RunConfig, load_recipe
from gem.planning.chosen import plan_of_recipe
from gem.planning.command import default_topology
from gem.planning.tables import tables_of
from gem.planning.work import work_of
from gem.report.svg import HALF, Axis, Plot
from gem_opkit.errors import ConfigError
from gem_parallel.contract import DENSE_AXES, SPARSE_AXES, ParallelPlan
from gem_parallel.planning.forecast import Forecast
from gem_parallel.planning.planner import Search, search
from gem_parallel.planning.rates import Rates

ROOT = Path(__file__).resolve().parents[3]
PAGE, PICTURE = ROOT / "docs" / "scaling.md", ROOT / "docs" / "images" / "scaling.svg"
GPUS = tuple(2**power for power in range(13))
COPIES = 8
WAYS = ("1D", "2D", "fully sharded 2D", "2D, far copies")
# What each way fixes of the copies of tables.
FIXED: dict[str, dict[str, int | bool | str]] = {
    WAYS[0]: {"table_replicate": 1, "fully_sharded_tables": False},
    WAYS[1]: {"table_replicate": COPIES, "table_copies": "near", "fully_sharded_tables": False},
    WAYS[2]: {"table_replicate": COPIES, "table_copies": "near", "fully_sharded_tables": True},
    WAYS[3]: {"table_replicate": COPIES, "table_copies": "far", "fully_sharded_tables": False},
}
# Rows of each table, beside those of the recipe: 100 times as many are 2.7 TB.
TIMES = (1, 100)
# What a recipe may choose beside its axes, each line on top of those before it.
CHOICES = {
    "fp32 on every wire, batches as they come": (),
    "vectors of tables in bf16": ('parallel.table_wire_dtype="bf16"',),
    "parameters gathered in bf16": ('parallel.gather_dtype="bf16"',),
    "gathered once a step": ("parallel.keep_gathered=true",),
    "batches balanced in groups of 64 ranks": (
        'parallel.balance="within_group"',
        "parallel.balance_group=64",
    ),
    "gradients of rows exchanged between copies": ('parallel.table_replicas="gradients"',),
    "each copy of the tables on neighbouring hosts": (),
    "gradients summed in bf16": ('parallel.reduce_dtype="bf16"',),
}
# From this one on copies lie far apart.
FAR = "each copy of the tables on neighbouring hosts"
# Milliseconds by which a millisecond of a hidden collective between hosts might slow a step.
BETWEEN_HOSTS = (0.1, 0.3, 0.6)
# The last one rounds what many ranks add up, which no training has been measured with.
PROVEN = tuple(CHOICES)[:-1]
ALL_CHOICES = tuple(setting for name in PROVEN for setting in CHOICES[name])
STYLE = """
.grid{stroke:#ddd}.axis{stroke:#888}.line{fill:none;stroke-width:2}
text{font:12px sans-serif;fill:#333}.title{font-size:13px;font-weight:bold}
.c0{stroke:#1668b8}.c1{stroke:#c4501b;stroke-dasharray:7 4}.c2{stroke:#2b8a3e;stroke-dasharray:2 3}
.c3{stroke:#7a3fa0;stroke-dasharray:9 3 2 3}
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
    """Fit, forecast, draw, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="h200")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    given = parser.parse_args()
    fitted = fit(given.results)
    (ROOT / SHIPPED).write_text(shipped(fitted.rates), encoding="utf-8")
    points = [
        point
        for times in TIMES
        for gpus in GPUS
        for point in forecasts(given.recipe, times, gpus, fitted.rates)
    ]
    PICTURE.write_text(picture(points), encoding="utf-8")
    write_table("rates", rates_table(fitted))
    write_table("measured", measured(given.results, fitted))
    write_table("split", split_table(given.results))
    write_table("ways", ways_table(given.results))
    write_table("choices", *choices(given.recipe, fitted.rates))
    write_table("contention", contentions(given.recipe, fitted.rates))
    write_table("scaling", table(points))


def write_table(name: str, *tables: Sequence[str]) -> None:
    """Replace a part of the page.

    Args:
        name: that stands in the comment above it.
        tables: lines of Markdown of each of its tables.
    """
    lines = [line for table in tables for line in ("", *table)][1:]
    begin, end = f"<!-- table {name} -->\n", "<!-- end -->"
    head, found, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    if not found:
        raise SystemExit(f"{PAGE} must have the line {begin.strip()}")
    _, _, tail = rest.partition(end)
    PAGE.write_text(head + begin + "\n".join(lines) + f"\n{end}{tail}", encoding="utf-8")


def recipe_of(recipe: str, times: int, settings: Sequence[str] = ALL_CHOICES) -> RunConfig:
    """A recipe with larger tables.

    Args:
        recipe: its name.
        times: rows of each table, as a multiple of the recipe's.
        settings: what it chooses beside.

    Returns:
        its config.
    """
    rows = load_recipe(recipe).data.hash_rows
    larger = [f"data.hash_rows.{name}={times * count}" for name, count in rows.items()]
    return load_recipe(recipe, [*larger, *settings])


def forecasts(recipe: str, times: int, gpus: int, rates: Rates) -> list[Point]:
    """The best plan of each way on some GPUs.

    Args:
        recipe: its name.
        times: rows of each table, as a multiple of the recipe's.
        gpus: ranks.
        rates: of the forecast.

    Returns:
        one point for each way; without a forecast where it does not exist or does not fit.
    """
    config = recipe_of(recipe, times)
    work, tables, topology = work_of(config), tables_of(config), default_topology(gpus)
    points: list[Point] = []
    for way in WAYS:
        fixed, found = FIXED[way], None
        copies = 1 if way == WAYS[0] else COPIES
        if gpus % copies == 0 and (way == WAYS[0] or gpus > COPIES):
            with contextlib.suppress(ConfigError):
                found = search(
                    work,
                    topology,
                    tables=tables.step,
                    rates=rates,
                    fixed=fixed,
                    like=plan_of_recipe(config),
                    most=1,
                )
        if found is None or not found.best[0].forecast.fits:
            points.append(Point(times, way, gpus, None, 0.0))
            continue
        best = found.best[0].forecast
        points.append(Point(times, way, gpus, best, found.weak_scaling(best)))
    return points


def best_of(
    recipe: str,
    settings: Sequence[str],
    rates: Rates,
    gpus: int,
    fixed: Mapping[str, int | bool | str],
) -> Search:
    """The best plan of a recipe.

    Args:
        recipe: its name.
        settings: what it chooses beside its plan.
        rates: of the forecast.
        gpus: ranks.
        fixed: what every plan must have.

    Returns:
        a search for one plan.
    """
    config = recipe_of(recipe, 1, settings)
    return search(
        work_of(config),
        default_topology(gpus),
        tables=tables_of(config).step,
        rates=rates,
        fixed=fixed,
        like=plan_of_recipe(config),
        most=1,
    )


def contentions(recipe: str, rates: Rates, gpus: int = GPUS[-1]) -> list[str]:
    """Lines of the table of what contention between hosts, which nobody has measured, decides.

    Args:
        recipe: its name.
        rates: of the forecast.
        gpus: ranks.

    Returns:
        Markdown.
    """
    every = tuple(setting for chosen in CHOICES.values() for setting in chosen)
    lines = [
        "| contention between hosts | all but sums in bf16: step ms, weak scaling | all |",
        "| ---: | --- | --- |",
    ]
    for value in (*BETWEEN_HOSTS, None):
        own = rates.model_copy(update={"adapter_contention": value})
        cells: list[str] = []
        for settings in (ALL_CHOICES, every):
            found = best_of(recipe, settings, own, gpus, FIXED[WAYS[3]])
            best = found.best[0].forecast
            cells.append(f"{best.step_ms:.1f}, {found.weak_scaling(best):.3f}")
        told = f"{rates.contention:.2f}, as inside one" if value is None else f"{value:.2f}"
        lines.append(f"| {told} | {' | '.join(cells)} |")
    return lines


def choices(recipe: str, rates: Rates, gpus: int = GPUS[-1]) -> tuple[list[str], list[str]]:
    """Lines of the tables of what a recipe may choose, and of where the step goes.

    Args:
        recipe: its name.
        rates: of the forecast.
        gpus: ranks.

    Returns:
        Markdown of both.
    """
    settings: list[str] = []
    fixed = FIXED[WAYS[1]]
    one: Forecast | None = None
    found: list[tuple[str, ParallelPlan, Forecast]] = []
    lines = [
        f"| {gpus:,} GPUs, line upon line | step, ms | weak scaling | plan |",
        "| --- | ---: | ---: | --- |",
    ]
    for name, chosen in CHOICES.items():
        settings += chosen
        fixed = FIXED[WAYS[3]] if name == FAR else fixed
        result = best_of(recipe, settings, rates, gpus, fixed)
        best, one = result.best[0].forecast, result.single
        found.append((name, best.plan, best))
        axes = ", ".join(
            f"{axis}={getattr(best.plan, axis)}"
            for axis in (*DENSE_AXES, *SPARSE_AXES)
            if getattr(best.plan, axis) > 1
        )
        axes += ", table_copies=far" if best.plan.table_copies == "far" else ""
        lines.append(f"| {name} | {best.step_ms:.1f} | {result.weak_scaling(best):.3f} | {axes} |")
    columns = [one, found[0][2], found[-1][2]] if one is not None else []
    parts = [
        f"| part of the step, ms | 1 GPU | {gpus:,}, first line | {gpus:,}, last line |",
        "| --- | ---: | ---: | ---: |",
    ]
    parts += [
        f"| {part} | " + " | ".join(f"{column.parts_ms[part]:.1f}" for column in columns) + " |"
        for part in columns[0].parts_ms
        if any(column.parts_ms[part] >= 0.05 for column in columns)
    ]
    return lines, parts


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

    Returns:
        step time, weak scaling and memory, or a dash.
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

    Returns:
        the inner parts of an SVG.
    """
    ticks = [(float(power), f"{2**power:,}") for power in range(0, 13, 2)]
    drawn = Plot(
        HALF,
        Axis(0.0, 12.6, "GPUs"),
        Axis(0.2, 1.15, "forecast weak scaling"),
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
