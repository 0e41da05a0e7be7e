"""Rates that are fitted to measured rows, and forecasts held to all of them.

Used by plot_scaling.py, which writes them down.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from gem.planning.measured_rows import alone, forecast_of, read_rows
from gem.planning.rates import ATTENTION_CASES, DEFAULT, Calibrated, calibrated
from gem_parallel.planning.rates import Rates
from gem_parallel.topology import PRESETS

# In the repository: the file that `gem plan` reads its rates from.
SHIPPED = Path("packages") / "gem" / "src" / "gem" / "planning" / "rates.json"
_SECTIONS = ("forward", "backward", "tables", "optimizer")


def step_rows(folder: Path) -> list[dict[str, Any]]:
    """Every measured step.

    Args:
        folder: of all results.

    Returns:
        rows as their benchmark wrote them, and behind those of one GPU the steps that the cards of
        several took each by itself; h200 first.
    """
    places = [folder / place / "step.jsonl" for place in ("h200", "h200x2")]
    rows = [row for place in places if place.is_file() for row in read_rows(place)]
    # All rows of a job tell the same of its cards; of several jobs one that kept sections counts.
    cards = [alone(row) for row in rows if "alone_step_ms" in row]
    cards.sort(key=lambda row: ("sections_ms" in row, str(row["measured_at"])))
    rows += {row["case"]: row for row in cards}.values()
    rows.sort(key=lambda row: (not row["case"].startswith("h200,"), row["gpus"], row["case"]))
    return rows


def fitted_steps(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None, str | None]:
    """The steps of h200 that rates are fitted to.

    Where the cards of several GPUs have told what a step of one takes, but not its sections, those
    of the row of one GPU are shared out over that time: the cards are those of the other rows.

    Args:
        folder: of all results.

    Returns:
        the step of one GPU with its sections; that of copies on several, where there is one; and
        what was made of them, in words, where sections were shared out.

    Raises:
        StopIteration: no row of one GPU has sections.
    """
    rows = [row for row in step_rows(folder) if row["case"].startswith("h200,") and not row["set"]]
    copies = next((r for r in rows if r["plan"] == f"replicate={r['gpus']} table_shard=2"), None)
    cards = next((row for row in rows if row["gpus"] == 1 and "step_ms_fastest" not in row), None)
    if cards is not None and "sections_ms" in cards:
        return cards, copies, None
    one = next(row for row in rows if row["gpus"] == 1 and "sections_ms" in row)
    if cards is None:
        return one, copies, None
    share = cards["step_ms"] / one["step_ms"]
    sections = {name: share * one["sections_ms"][name] for name in _SECTIONS}
    told = (
        f"step of h200: {cards['step_ms']:.1f} ms, which the cards of two took each by itself, "
        f"{cards['measured_at']}, shared out as the sections of {one['case']}, {one['measured_at']}"
    )
    return {**cards, "sections_ms": sections}, copies, told


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
        row: from `step_rows`.
        fitted: rates and links of today.
        earlier: from `earlier_state`.

    Returns:
        milliseconds, and bytes of a rank.
    """
    if row["gpus"] > 1 and row["commit"] == earlier.get("commit"):
        then = earlier["forecasts"][row["case"]]
        return then["step_ms"], then["memory_bytes"]
    found = forecast_of(row, fitted.topology, fitted.rates)
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
    one, copies, told = fitted_steps(folder)
    rows += [one, *([] if copies is None else [copies])]
    rows += read_rows(folder / "h200x2" / "collectives.jsonl")
    plain = DEFAULT.model_copy(update={"sources": (), "adapter_contention": None})
    found = calibrated(rows, PRESETS["h200x2"], plain)
    if told is None:
        return found
    sources = [told if text.startswith("step of ") else text for text in found.rates.sources]
    return Calibrated(found.rates.model_copy(update={"sources": tuple(sources)}), found.topology)


def shipped(rates: Rates) -> str:
    """The text of the file that `gem plan` reads its rates from: three digits of each.

    Args:
        rates: as fitted.

    Returns:
        JSON.
    """
    short = json.loads(
        rates.model_dump_json(exclude_none=True),
        parse_float=lambda text: float(f"{float(text):.3g}"),
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
        f"| the same in an engine of several GPUs | | {rates.engine_factor:.1f} |",
        f"| links in a host, of {tier.gbytes_per_s:.0f} GB/s | | {tier.collective_frac:.2f} |",
        f"| a collective beside its bytes | | {rates.launch_us:.0f} us |",
        f"| contention, ms a ms of a hidden collective | | {rates.contention:.2f} |",
    ]


def measured(folder: Path, fitted: Calibrated) -> list[str]:
    """Lines of the table of measured steps.

    Args:
        folder: of all results.
        fitted: rates and links.

    Returns:
        Markdown; rows that rates were fitted to say so. Weak scaling is counted against one GPU
        with the same recipe: the same cards, each alone in the same job, where the row tells it;
        else the row of one GPU.
    """
    lines = [
        "| recipe | GPUs, plan | MFU | weak scaling | measured, ms | forecast, ms | error "
        "| peak, GiB | forecast, GiB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    single: dict[str, float] = {}
    fitted_to = {row["case"] for row in fitted_steps(folder)[:2] if row is not None}
    rows, earlier = step_rows(folder), earlier_state(folder)
    for row in rows:
        step_ms, memory_bytes = forecast_figures(row, fitted, earlier)
        then = row["gpus"] > 1 and row["commit"] == earlier.get("commit")
        name = ", ".join([str(row["case"]).partition(",")[0], *row["set"]])
        if row["gpus"] == 1:
            single[name] = row["e2e_mfu"]
        here = " (fitted to it)" if row["case"] in fitted_to else ""
        base = earlier["one_gpu"][name]["e2e_mfu"] if then else single.get(name)
        if "alone_mfu" in row:  # of these very cards, in the same job
            base = mean(row["alone_mfu"])
        weak = f"{row['e2e_mfu'] / base:.3f}" if base else "-"
        state = f", at {row['commit'][:7]}" if then or row["gpus"] == 1 else ""
        error = step_ms / row["step_ms"] - 1
        peak = f"{row['peak_bytes'] / 2**30:.1f}" if "peak_bytes" in row else "-"
        lines.append(
            f"| {name}{here}{state} | {row['gpus']}, {row['plan']} | "
            f"{100 * row['e2e_mfu']:.1f} % | {weak} | {row['step_ms']:.1f} | "
            f"{step_ms:.1f} | {100 * error:+.1f} % | {peak} | "
            f"{memory_bytes / 2**30:.1f} |"
        )
    return lines


def split_table(folder: Path) -> list[str]:
    """Lines of the table of what each section of several GPUs takes beyond one of the same job.

    Args:
        folder: of all results.

    Returns:
        Markdown: of the rows that tell the sections of their cards each by itself, and a sentence
        on how many do not.
    """
    rows = [row for row in step_rows(folder) if row["gpus"] > 1]
    told = [row for row in rows if "alone_sections_ms" in row]
    lines: list[str] = []
    if told:
        columns = (*_SECTIONS, "data")
        lines += [
            f"| recipe | plan | one GPU, ms | more, ms | {' | '.join(columns)} | weak scaling |",
            f"| --- | --- | ---: | ---: |{' ---: |' * len(columns)} ---: |",
        ]
        for row in told:
            # The sections of a row are those of its first rank, so those of that card are taken.
            own = {name: each[0] for name, each in row["alone_sections_ms"].items()}
            more = [row["sections_ms"].get(n, 0.0) - own.get(n, 0.0) for n in columns]
            one, weak = row["alone_step_ms"][0], row["e2e_mfu"] / mean(row["alone_mfu"])
            lines.append(
                f"| {str(row['case']).partition(',')[0]} | {row['plan']} | {one:.1f} | "
                f"{row['step_ms'] - one:+.1f} | {' | '.join(f'{ms:+.1f}' for ms in more)} | "
                f"{weak:.3f} |"
            )
    left = sorted({str(row["commit"])[:7] for row in rows if row not in told})
    if left:
        lines += [""] * bool(told)
        lines.append(
            f"Rows of {', '.join(left)} have the time of one GPU in the same job, not its sections."
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
