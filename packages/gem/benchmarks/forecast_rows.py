"""Rates that are fitted to measured rows, and forecasts held to all of them.

Used by plot_scaling.py, which writes them down.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from gem.config import load_recipe
from gem.planning.chosen import plan_of_recipe
from gem.planning.rates import ATTENTION_CASES, DEFAULT, Calibrated, calibrated, read_rows
from gem.planning.tables import tables_of
from gem.planning.work import work_of
from gem_parallel.planning.forecast import Forecast, forecast
from gem_parallel.planning.rates import Rates
from gem_parallel.topology import PRESETS

# In the repository: the file that `gem plan` reads its rates from.
SHIPPED = Path("packages") / "gem" / "src" / "gem" / "planning" / "rates.json"
# What no row tells.
CHOSEN = (
    "contention, and tables that an engine holds: chosen in development, on sharded plans of h200 "
    "on two H200, at 246 ms a step of one"
)


def step_rows(folder: Path) -> list[dict[str, Any]]:
    """Every measured step, the one that rates are fitted to first.

    Args:
        folder: of all results.

    Returns:
        rows as their benchmark wrote them.
    """
    places = [folder / place / "step.jsonl" for place in ("h200", "h200x2")]
    rows = [row for place in places if place.is_file() for row in read_rows(place)]
    rows.sort(key=lambda row: (not row["case"].startswith("h200,"), row["gpus"], row["case"]))
    return rows


def earlier_state(folder: Path) -> dict[str, Any]:
    """What was forecast of rows of an earlier state, when that was the state of the repository.

    Rows of several GPUs stay when the code goes on, until such machines are there again. What they
    are held to are the forecasts of their own commit, which knew the same step.

    Args:
        folder: of all results.

    Returns:
        ``commit``; ``forecasts``, case -> step_ms and memory_bytes; and ``one_gpu``, recipe -> the
        row of one GPU. Empty where no file says so.
    """
    file = folder / "h200x2" / "forecast.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def forecast_figures(
    row: Mapping[str, Any], fitted: Calibrated, earlier: Mapping[str, Any]
) -> tuple[float, int]:
    """Step time and memory that are forecast of a row, by the state that it was measured in.

    Args:
        row: of step.jsonl.
        fitted: rates and links of today.
        earlier: from `earlier_state`.

    Returns:
        milliseconds, and bytes of a rank.
    """
    if row["gpus"] > 1 and row["commit"] == earlier.get("commit"):
        then = earlier["forecasts"][row["case"]]
        return then["step_ms"], then["memory_bytes"]
    found = forecast_of(row, fitted)
    return found.step_ms, found.memory.total


def fit(folder: Path) -> Calibrated:
    """Fit rates and links to the rows of a folder.

    Args:
        folder: of all results.

    Returns:
        what forecasts of H200s are made with.
    """
    benches = sorted({bench for bench, _ in ATTENTION_CASES.values()})
    places = [folder / "h200" / f"{bench}.jsonl" for bench in benches]
    rows = [row for place in places if place.is_file() for row in read_rows(place)]
    rows += [*step_rows(folder), *read_rows(folder / "h200x2" / "collectives.jsonl")]
    plain = DEFAULT.model_copy(update={"sources": (CHOSEN,)})
    return calibrated(rows, PRESETS["h200x2"], plain)


def shipped(rates: Rates) -> str:
    """The text of the file that `gem plan` reads its rates from: three digits of each.

    Args:
        rates: as fitted.

    Returns:
        JSON.
    """
    short = json.loads(
        rates.model_dump_json(), parse_float=lambda text: float(f"{float(text):.3g}")
    )
    return json.dumps(short, indent=2) + "\n"


def rates_table(fitted: Calibrated) -> list[str]:
    """Lines of the table of rates.

    Args:
        fitted: rates and links.

    Returns:
        Markdown.
    """
    rates, tier = fitted.rates, fitted.topology.host_tier
    lines = ["| what | forward | backward |", "| --- | ---: | ---: |"]
    lines += [
        f"| share of the roofline: {kind} | {share.forward:.2f} | {share.backward:.2f} |"
        for kind, share in sorted(rates.shares.items())
    ]
    return [
        *lines,
        f"| share of the bandwidth: dense optimizer | | {rates.optimizer_share:.2f} |",
        f"| time of whole tables over its estimate | | {rates.table_factor:.1f} |",
        f"| the same in an engine | | {rates.engine_factor:.1f} |",
        f"| links in a host, of {tier.gbytes_per_s:.0f} GB/s | | {tier.collective_frac:.2f} |",
        f"| a collective beside its bytes | | {rates.launch_us:.0f} us |",
    ]


def measured(folder: Path, fitted: Calibrated) -> list[str]:
    """Lines of the table of measured steps.

    Args:
        folder: of all results.
        fitted: rates and links.

    Returns:
        Markdown; the first row is the one that rates were fitted to. Weak scaling is counted
        against one GPU with the same recipe: the same cards, each alone in the same job, where the
        row tells it; else the row of one GPU.
    """
    lines = [
        "| recipe | GPUs, plan | MFU | weak scaling | measured, ms | forecast, ms | error "
        "| peak, GiB | forecast, GiB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    alone: dict[str, float] = {}
    rows, earlier = step_rows(folder), earlier_state(folder)
    for row in rows:
        step_ms, memory_bytes = forecast_figures(row, fitted, earlier)
        then = row["gpus"] > 1 and row["commit"] == earlier.get("commit")
        name = ", ".join([str(row["case"]).partition(",")[0], *row["set"]])
        if row["gpus"] == 1:
            alone[name] = row["e2e_mfu"]
        here = " (fitted to it)" if row is rows[0] else ""
        base = earlier["one_gpu"][name]["e2e_mfu"] if then else alone.get(name)
        if "alone_mfu" in row:  # of these very cards, in the same job
            base = mean(row["alone_mfu"])
        weak = f"{row['e2e_mfu'] / base:.3f}" if base else "-"
        state = f", at {row['commit'][:7]}" if then else ""
        error = step_ms / row["step_ms"] - 1
        lines.append(
            f"| {name}{here}{state} | {row['gpus']}, {row['plan']} | "
            f"{100 * row['e2e_mfu']:.1f} % | {weak} | {row['step_ms']:.1f} | "
            f"{step_ms:.1f} | {100 * error:+.1f} % | {row['peak_bytes'] / 2**30:.1f} | "
            f"{memory_bytes / 2**30:.1f} |"
        )
    return lines


def ways_table(folder: Path) -> list[str]:
    """Lines of the table of what the way of several ranks costs one rank.

    Args:
        folder: of all results.

    Returns:
        Markdown of the rows of bench_one_rank: each way, and one rank's own in the same process.
    """
    lines = [
        "| way | step, ms | one rank's own, ms | slower by, ms | kernels run, ms "
        "| one rank's own, ms | kernels | one rank's own | lookups waited for |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    file = folder / "h200" / "one_rank.jsonl"
    for row in read_rows(file) if file.is_file() else ():
        own = row["single"]
        lines.append(
            f"| {row['way']} | {row['step_ms']:.1f} | {own['step_ms']:.1f} | "
            f"{row['slower_ms']:+.1f} | {row['busy_ms']:.1f} | {own['busy_ms']:.1f} | "
            f"{row['kernels']:,} | {own['kernels']:,} | {row['waits']} of {row['lookups']} |"
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
    axes = plan_of_recipe(config)
    topology = fitted.topology.model_copy(update={"ranks_per_host": row["gpus"]})
    examples = row["examples_a_rank"]
    step = tables_of(config, examples=examples).step(axes, topology)
    work = work_of(config, examples=examples)
    return forecast(work, axes, topology, tables=step, rates=fitted.rates)
