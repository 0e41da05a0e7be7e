"""Rates that forecasts of recipes are made with: measured on one H200, or fitted to a results file.

The shares of the attention operators are those of their benchmarks' rows for 128-wide heads. The
others are fitted, pass by pass, to a row of a whole step: what its forward and backward passes take
beyond attention and copies of weights is shared out over products and elementwise work, so that
both reach the same share of their roofline. A step of several GPUs whose dense weights are copies
tells how much hidden collectives slow what they run beside, and what an engine's tables take.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from gem.config import load_recipe
from gem.planning.measured_rows import alone, forecast_of
from gem.planning.tables import tables_of
from gem.planning.work import work_of
from gem_opkit.cost import Cost
from gem_opkit.errors import ConfigError, GemError, refusal
from gem_parallel.contract import Accelerator, ParallelPlan, Topology
from gem_parallel.planning.compute import operator_ms, weights_ms
from gem_parallel.planning.forecast import accelerator_of, forecast
from gem_parallel.planning.links import wire_bytes
from gem_parallel.planning.rates import PassShare, Rates
from gem_parallel.planning.work import Work

_FITTED = ("matmul", "elementwise")
# Of the bandwidth and of the matmul rate; below it a fit has gone wrong.
_LEAST_SHARE = 0.02
_WHOLE = PassShare(forward=1.0, backward=1.0)

# What the forecasts of the shipped machines are made with: written by
# packages/gem/benchmarks/plot_scaling.py from the rows under results.
DEFAULT = Rates.model_validate_json(
    (resources.files("gem.planning") / "rates.json").read_text(encoding="utf-8")
)
# Kind of attention -> benchmark and case whose rows say what share of the roofline it reaches. The
# cases are those nearest to what the recipe h200 asks of the kind.
ATTENTION_CASES = {
    "attention": ("jagged_flash_attention", "self_2048_fill_.5"),
    "window": ("jagged_flash_attention", "self_8192_window_128"),
    "block": ("block_attention", "blocks_2048_fill_.5"),
    "gdpa": ("generalized_attention", "cross_2048_keys_256_fast_gelu"),
    "pooled": ("pooled_attention", "seeds_256_keys_2048"),
}


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Rates and links that were fitted to measurements.

    Attributes:
        rates: what forecasts take.
        topology: the machines, with links as they were measured.
    """

    rates: Rates
    topology: Topology


def calibrated(
    rows: Sequence[Mapping[str, Any]], topology: Topology, rates: Rates = DEFAULT
) -> Calibrated:
    """Fit rates to measured rows.

    Args:
        rows: of ``step.jsonl`` (the first one of one GPU counts, or of several that tells the
            sections of each by itself; and the first of one recipe with it whose dense weights are
            copies on several) and of ``collectives.jsonl`` (all, for the links inside a host), and
            beside these of attention (`ATTENTION_CASES`); other rows are passed over.
        topology: the machines, with an accelerator.
        rates: what stays where nothing was measured.

    Returns:
        the fit.

    Raises:
        ConfigError: no row of either kind, or a row that no rate explains.
    """
    steps = [row for row in rows if row.get("bench") == "step" and _has_one_gpu(row)]
    links = [row for row in rows if row.get("bench") == "collectives"]
    if not steps and not links:
        raise ConfigError(
            refusal(
                "gem plan",
                "--calibrate",
                must="hold a row of bench_step on one GPU or with --alone, or rows of collectives",
                got=", ".join(sorted({str(row.get("bench")) for row in rows})) or "no row",
                fix="run packages/gem/benchmarks/bench_step.py, and give its file",
            )
        )
    try:
        if links:
            rates, topology = _fitted_links(links, topology, rates)
        rates = _fitted_attention(rows, topology, rates)
        if steps:
            first = alone(steps[0]) if "alone_sections_ms" in steps[0] else steps[0]
            rates = _fitted_step(first, topology, rates)
            if several := [row for row in rows if _is_of_copies(row, first)]:
                rates = _fitted_copies(several[0], topology, rates)
        rates = Rates.model_validate(rates.model_dump())
    except GemError:
        raise
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as fault:
        raise ConfigError(
            refusal(
                "gem plan",
                "--calibrate",
                must="hold whole rows, with numbers above 0",
                got=f"{type(fault).__name__}: {'; '.join(str(fault).splitlines()[:3])}",
                fix="give a file that a benchmark of this project has written",
            )
        ) from fault
    return Calibrated(rates, topology)


def _fitted_links(
    rows: Sequence[Mapping[str, Any]], topology: Topology, rates: Rates
) -> tuple[Rates, Topology]:
    """Least squares of the relative error of time = overhead + bytes sent / rate."""
    # Divided by the time: 1 = overhead / t + slope * bytes / t.
    aa = ab = bb = a1 = b1 = 0.0
    if not all(row["given_bytes"] > 0 and 0 < row["ms"] < math.inf for row in rows):
        raise _unfit("a size or a time that is not above 0")
    sizes = {row["given_bytes"] for row in rows}
    if len(sizes) < 2:
        raise _unfit(f"{len(sizes)} in {len(rows)} rows of collectives")
    for row in rows:
        sent = wire_bytes(row["collective"], row["given_bytes"], row["ranks"])
        a, b = 1.0 / row["ms"], sent / row["ms"]
        aa, ab, bb, a1, b1 = aa + a * a, ab + a * b, bb + b * b, a1 + a, b1 + b
    overhead_ms = (a1 * bb - b1 * ab) / (aa * bb - ab * ab)
    slope = (b1 * aa - a1 * ab) / (aa * bb - ab * ab)
    tier = topology.host_tier
    if not (0.0 < slope < math.inf and math.isfinite(overhead_ms)):
        raise _unfit(f"{overhead_ms:g} ms and {slope:g} ms a byte")
    share = min(1.0, 1e-6 / slope / tier.gbytes_per_s)
    tier = tier.model_copy(update={"collective_frac": share})
    launch_us = max(0.0, 1e3 * overhead_ms - tier.latency_us)
    told = f"links inside a host: {len(rows)} collectives of {rows[0]['ranks']} ranks"
    return (
        rates.model_copy(update={"launch_us": launch_us, "sources": (*rates.sources, told)}),
        topology.model_copy(update={"host_tier": tier}),
    )


def _unfit(got: str) -> ConfigError:
    return ConfigError(
        refusal(
            "gem plan",
            "--calibrate",
            must="hold collectives of several sizes, of which a larger one takes longer",
            got=got,
            fix="run packages/parallel/benchmarks/collectives.py again, and give its file",
        )
    )


def _has_one_gpu(row: Mapping[str, Any]) -> bool:
    return row.get("gpus") == 1 or "alone_sections_ms" in row


def _is_of_copies(row: Mapping[str, Any], first: Mapping[str, Any]) -> bool:
    """Whether a row has dense weights whole and tables cut, and all in fp32, on several GPUs."""
    if row.get("bench") != "step" or not isinstance(row.get("gpus"), int) or row["gpus"] < 2:
        return False
    plan = {f"replicate={row['gpus']}", f"table_shard={row['gpus']}"}
    recipes = [str(each.get("case")).partition(",")[0] for each in (row, first)]
    same = recipes[0] == recipes[1] and row.get("set") == first.get("set")
    return same and set(str(row.get("plan")).split()) == plan


def _fitted_copies(row: Mapping[str, Any], topology: Topology, rates: Rates) -> Rates:
    """Fit an engine's tables and the contention inside a host to a step of several GPUs."""
    plain = rates.model_copy(update={"engine_factor": 1.0, "contention": 0.0})
    parts = forecast_of(row, topology, plain).parts_ms
    tables_ms = row["sections_ms"]["tables"] - parts["exposed tables"]
    if parts["tables"] > 0 and tables_ms > 0:
        factor = tables_ms / parts["tables"]
        rates = rates.model_copy(update={"engine_factor": factor})
    steps_ms = [
        forecast_of(row, topology, rates.model_copy(update={"contention": x})).step_ms
        for x in (0.0, 1.0)
    ]
    hidden_ms = steps_ms[1] - steps_ms[0]
    if hidden_ms > 0:
        slowed = max(0.0, (row["step_ms"] - steps_ms[0]) / hidden_ms)
        rates = rates.model_copy(update={"contention": slowed})
    told = f"contention in a host, and an engine's tables: {row['case']}, {row.get('measured_at')}"
    return rates.model_copy(update={"sources": (*rates.sources, told)})


def _fitted_step(row: Mapping[str, Any], topology: Topology, rates: Rates) -> Rates:
    """Fit shares, optimizer and tables to the sections of one measured step."""
    recipe = str(row["case"]).partition(",")[0]
    config = load_recipe(recipe, [str(text) for text in row.get("set", ())])
    examples = int(row["examples_a_rank"])
    work = work_of(config, examples=examples)
    alone = topology.model_copy(update={"hosts": 1, "ranks_per_host": 1})
    tables = tables_of(config, examples=examples).step(ParallelPlan(), alone)
    found = forecast(work, ParallelPlan(), alone, tables=tables, rates=rates)
    device = accelerator_of(topology)
    sections = row["sections_ms"]
    shares = dict(rates.shares)
    reached = [
        _reached(work, device, rates, sections[name], index)
        for index, name in enumerate(("forward", "backward"))
    ]
    for kind in _FITTED:
        shares[kind] = PassShare(forward=reached[0][kind], backward=reached[1][kind])
    optimizer = sections["optimizer"] / found.parts_ms["optimizer"]
    factors = {
        "table_factor": sections["tables"] / tables.local_ms if tables.local_ms else 1.0,
    }
    if config.parallel is not None and not config.parallel.tables_are_local:
        factors["engine_factor"] = factors["table_factor"]
    told = f"step of {row['case']} on {row['device']}, {row.get('measured_at', 'undated')}"
    return rates.model_copy(
        update={
            "shares": shares,
            "optimizer_share": _share(rates.optimizer_share / optimizer),
            **factors,
            "sources": (*rates.sources, told),
        }
    )


def _share(value: float) -> float:
    if not value >= _LEAST_SHARE:
        raise ConfigError(
            refusal(
                "gem plan",
                "--calibrate",
                must=f"explain a step by shares of the roofline of {_LEAST_SHARE} or more",
                got=f"{value:.4f}",
                fix="check that the row's recipe and settings are those of this version",
            )
        )
    return min(1.0, value)


def _reached(
    work: Work, device: Accelerator, rates: Rates, measured_ms: float, index: int
) -> dict[str, float]:
    """Shares of the fitted kinds, once what is known of a pass is taken away from its time."""
    roofs = dict.fromkeys(_FITTED, 0.0)
    plain = rates.model_copy(update={"shares": dict.fromkeys((*rates.shares, *_FITTED), _WHOLE)})
    others = 0.0
    for unit in work.units:
        others += weights_ms(unit, work, ParallelPlan(), device)[index]
        for op in unit.all_operators():
            if op.kind in _FITTED:
                roofs[op.kind] += operator_ms([op], device, plain)[index]
            else:
                others += operator_ms([op], device, rates)[index]
    left = measured_ms - others
    if not 0.0 < left < math.inf:
        raise ConfigError(
            refusal(
                "gem plan",
                "--calibrate",
                must=f"take longer than attention and copies of weights, {others:.1f} ms",
                got=f"{measured_ms:.1f} ms",
                fix="check that the row's recipe and settings are those of this version",
            )
        )
    # One share for both kinds: nothing says which of them is the slower one.
    return dict.fromkeys(_FITTED, _share(sum(roofs.values()) / left))


def _fitted_attention(rows: Sequence[Mapping[str, Any]], topology: Topology, rates: Rates) -> Rates:
    """Take the shares of attention kinds from the rows of their cases, where these are there."""
    device = accelerator_of(topology)
    shares, told = dict(rates.shares), list(rates.sources)
    for kind, (bench, case) in ATTENTION_CASES.items():
        found = [
            next((r for r in rows if (r.get("bench"), r.get("case")) == (bench, wanted)), None)
            for wanted in (f"{case}_forward", f"{case}_backward")
        ]
        passes: list[float] = []
        for row in found:
            if row is not None:
                cost = Cost(row["flops"], row["bytes"])
                roof = cost.roofline_ms(
                    device.matmul_tflops * 1e12, device.memory_gbytes_per_s * 1e9
                )
                passes.append(_share(roof / row["ms"]))
        if len(passes) == 2:
            shares[kind] = PassShare(forward=passes[0], backward=passes[1])
            told.append(f"{kind}: {bench}, {case}")
    return rates.model_copy(update={"shares": shares, "sources": tuple(told)})
