"""A report as one row of ``results/<device>/step.jsonl``, which plans are calibrated with.

Steps of the references have a file of their own, ``step_reference.jsonl``, those of a recipe with
other settings ``step_set.jsonl``, comparisons of kernels with references ``step_check.jsonl``, and
long runs ``step_endure.jsonl``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gem.bench.check import CheckReport
from gem.bench.endure import EndureReport
from gem.bench.schema import StepReport
from gem_opkit.bench import device_folder, provenance, write_rows


def row_of(report: StepReport) -> dict[str, Any]:
    """Write a report as a flat row.

    Args:
        report: of any device.

    Returns:
        what was measured, by names that earlier rows have too; the profile by kind and by module.
    """
    impl = "" if report.impl == "auto" else f", impl={report.impl}"
    changed = "".join(f", {text}" for text in report.settings)
    plan = f"{report.gpus} ranks, {report.plan}, {report.examples_a_rank} a rank"
    row: dict[str, Any] = {
        "bench": _file(report),
        "case": f"{report.recipe}, {plan}{impl}{changed}",
        "device": report.device,
        "gpus": report.gpus,
        "plan": report.plan,
        "set": list(report.settings),
        "impl": report.impl,
        "examples_a_rank": report.examples_a_rank,
        "parts": report.parts,
        "events_a_rank": list(report.events_a_rank),
        "steps": report.steps,
        "step_ms": report.step_ms,
        "step_ms_fastest": report.step_ms_fastest,
        "step_ms_slowest": report.step_ms_slowest,
        "examples_per_s": report.examples_per_s,
        "flops_a_step": report.flops_a_step,
        "flops_attention": report.flops_attention,
        "flops_products": report.flops_products,
        "flops_per_example": report.flops_a_step / report.examples_a_rank / report.gpus,
        **report.efficiency.model_dump(),
        "sections_ms": report.sections_ms,
        "held_bytes": report.held_bytes,
        **report.memory.model_dump(),
        "loss_first": report.loss_first,
        "loss_last": report.loss_last,
        "left_out": report.left_out,
    }
    if report.profile is not None:
        row["host_gap_ms"] = report.host_gap_ms
        row["profile"] = report.profile.model_dump(mode="json")
    return {**row, **report.provenance}


def write_row(folder: Path, report: StepReport, *, beside: Mapping[str, Any] | None = None) -> None:
    """Add a report to the rows of its device; it replaces the row of the same case.

    Args:
        folder: of all results.
        report: of any device.
        beside: figures that belong to the row and to no report.
    """
    place = device_folder(report.device, gpus=report.gpus)
    write_rows(folder / place / f"{_file(report)}.jsonl", [{**row_of(report), **(beside or {})}])


def _file(report: StepReport) -> str:
    if report.impl != "auto":
        return f"step_{report.impl}"
    return "step_set" if report.settings else "step"


def write_check(folder: Path, report: CheckReport) -> None:
    """Add a comparison with the references to the rows of its device.

    Args:
        folder: of all results.
        report: of three runs.
    """
    alone = len(report.kernels.further_losses)
    further = f", {alone} more with the kernels" if alone else ""
    row = {
        "bench": "step_check",
        "case": f"{report.recipe}, {report.steps} steps of {report.examples}{further}",
        **report.model_dump(mode="json"),
        **provenance(),
    }
    write_rows(folder / device_folder(report.device) / "step_check.jsonl", [row])


def write_endured(folder: Path, report: EndureReport) -> None:
    """Add a long run to the rows of its device.

    Args:
        folder: of all results.
        report: of the run.
    """
    row = {
        "bench": "step_endure",
        "case": f"{report.recipe}, {report.steps} steps of {report.examples}",
        **report.model_dump(mode="json"),
        **provenance(),
    }
    write_rows(folder / device_folder(report.device) / "step_endure.jsonl", [row])
