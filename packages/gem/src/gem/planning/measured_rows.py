"""Measured steps: rows of ``step.jsonl``, and what is forecast of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from gem.config import RunConfig, load_recipe
from gem.planning.chosen import plan_of_recipe
from gem.planning.tables import tables_of
from gem.planning.work import work_of
from gem_opkit.errors import ConfigError, refusal
from gem_parallel.contract import Topology
from gem_parallel.planning.forecast import Forecast, forecast
from gem_parallel.planning.rates import Rates


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a results file.

    Args:
        path: one JSON object a line.

    Returns:
        its rows.

    Raises:
        ConfigError: no such file, or a line that is no JSON object.
    """
    if not path.is_file():
        raise ConfigError(
            refusal("gem plan", "--calibrate", must="be a file", got=path, fix="check the path")
        )
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(
        path.read_text(encoding="utf-8", errors="replace").splitlines(), 1
    ):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict):
            raise ConfigError(
                refusal(
                    "gem plan",
                    "--calibrate",
                    must="hold one JSON object a line",
                    got=f"line {number} of {path}",
                    fix="give a file that a benchmark of this project has written",
                )
            )
        rows.append(row)
    return rows


def alone(row: Mapping[str, Any]) -> dict[str, Any]:
    """The step that each GPU took by itself, beside a step of all of them.

    Args:
        row: of ``step.jsonl``, measured with ``bench_step.py --alone``.

    Returns:
        as a row of one GPU: means over the cards; without sections where the row has none.

    Raises:
        KeyError: the row tells nothing of single GPUs.
    """
    found = {key: row[key] for key in ("bench", "device", "set", "examples_a_rank")}
    sections = row.get("alone_sections_ms")
    if sections is not None:
        found["sections_ms"] = {name: fmean(each) for name, each in sections.items()}
    recipe, cards = str(row["case"]).partition(",")[0], len(row["alone_step_ms"])
    changed = "".join(f", {text}" for text in row["set"])
    return {
        **found,
        "case": f"{recipe}, each of {cards} by itself, {row['examples_a_rank']} a rank{changed}",
        "gpus": 1,
        "plan": "replicate=1",
        "step_ms": fmean(row["alone_step_ms"]),
        "e2e_mfu": fmean(row["alone_mfu"]),
        "commit": row.get("commit"),
        "measured_at": row.get("measured_at"),
    }


def config_of_row(row: Mapping[str, Any]) -> RunConfig:
    """The recipe that a row of ``step.jsonl`` was measured with.

    Args:
        row: its case, settings and plan.

    Returns:
        the recipe, with the plan where the row is of several GPUs.
    """
    plan = [f"parallel.{word}" for word in row["plan"].split()] if row["gpus"] > 1 else []
    # Where an engine holds the tables, their first rows are drawn by place; that costs no step.
    settings = ['model.embeddings.initial_rows="by_place"', *map(str, row["set"]), *plan]
    return load_recipe(str(row["case"]).partition(",")[0], settings)


def forecast_of(row: Mapping[str, Any], topology: Topology, rates: Rates) -> Forecast:
    """Forecast the step that a row of ``step.jsonl`` measured.

    Args:
        row: the row.
        topology: one host like that of the row.
        rates: of the forecast.

    Returns:
        the forecast of its plan.
    """
    config, examples = config_of_row(row), int(row["examples_a_rank"])
    plan = plan_of_recipe(config)
    topology = topology.model_copy(update={"hosts": 1, "ranks_per_host": row["gpus"]})
    step = tables_of(config, examples=examples).step(plan, topology)
    work = work_of(config, examples=examples)
    return forecast(work, plan, topology, tables=step, rates=rates)
