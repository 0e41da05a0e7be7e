"""`gem bench step`: measure, check, and write what was found."""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast, get_args

from gem.bench.asked import Asked, Where, recipe_of
from gem.bench.check import CheckReport, check
from gem.bench.endure import EndureReport, endure
from gem.bench.measure import measure
from gem.bench.picture import picture
from gem.bench.rows import write_check, write_endured, write_row
from gem.bench.schema import StepReport
from gem_opkit.errors import ConfigError, refusal
from gem_opkit.impl import Impl
from gem_parallel.launch import World, process_group


def asked_for(  # noqa: PLR0913 - each is an option of the command
    recipe: str,
    *,
    settings: Sequence[str] = (),
    plan: Sequence[str] = (),
    examples: int | None = None,
    steps: int = 20,
    warmup: int = 4,
    profiled: int = 3,
    impl: str = "auto",
    batches: Where = "host",
) -> Asked:
    """Put together what the command was asked for.

    Args:
        recipe: as in `Asked`.
        settings: likewise.
        plan: likewise.
        examples: likewise.
        steps: likewise.
        warmup: likewise.
        profiled: likewise.
        impl: likewise.
        batches: likewise.

    Raises:
        ConfigError: a word for ``impl`` that does not exist, or an axis without a size.
    """
    for text in plan:
        axis, _, size = text.partition("=")
        if not axis or not size:
            raise ConfigError(
                refusal(
                    "gem bench step",
                    "--plan",
                    must="look like shard=2",
                    got=repr(text),
                    fix="write it like that",
                )
            )
    if impl not in get_args(Impl):
        raise ConfigError(
            refusal(
                "gem bench step",
                "--impl",
                must=f"be one of {', '.join(get_args(Impl))}",
                got=repr(impl),
                fix="leave it away for the kernels",
            )
        )
    return Asked(
        recipe=recipe,
        settings=tuple(settings),
        plan=tuple(plan),
        examples=examples,
        steps=steps,
        warmup=warmup,
        profiled=profiled,
        impl=cast(Impl, impl),
        batches=batches,
    )


def refuse_mixed(check: int | None, *, endure: int, given: Mapping[str, object]) -> None:
    """Refuse options of a measurement where none is made.

    Args:
        check: steps that are compared; None for none.
        endure: steps that only have to be finite.
        given: options that timing alone reads, as they were given -> their values; those that were
            left to their defaults are not among them.

    Raises:
        ConfigError: one that would be left aside.
    """
    if (check is None and not endure) or not given:
        return
    option, value = next(iter(given.items()))
    writes = option in ("--out", "--svg")
    raise ConfigError(
        refusal(
            "gem bench step",
            option,
            must="come without --check and --endure",
            got=value,
            fix="leave it out; --json and --rows keep what they find"
            if writes
            else "leave it out; it is for timing alone",
        )
    )


def _make_room(out: Path | None, svg: Path | None, rows: Path | None) -> None:
    """Make the folders of what will be written; what fails should do so before the measurement."""
    for path in (out, svg):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            _demand_writable(path if path.exists() else path.parent)
    if rows is not None:
        rows.mkdir(parents=True, exist_ok=True)
        _demand_writable(rows)


def _demand_writable(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def bench_step(
    asked: Asked,
    *,
    out: Path | None = None,
    svg: Path | None = None,
    rows: Path | None = None,
    told: Callable[[str], None],
) -> StepReport | None:
    """Measure the steps of a recipe, and write what was asked for.

    Args:
        asked: what.
        out: file of the JSON document.
        svg: file of the picture.
        rows: folder of results, in which a row is kept by device.
        told: called with what is done.

    Returns:
        the report; None on all ranks but the first.

    Raises:
        ConfigError, MeasurementError: as `measure`, and a picture of steps that are not profiled.
        OSError: what was asked for cannot be written; before anything is measured.
    """
    if svg is not None and not asked.profiled:
        raise ConfigError(
            refusal(
                "gem bench step",
                "--svg",
                must="go with profiled steps",
                got="--profile 0",
                fix="leave --profile away",
            )
        )
    _make_room(out, svg, rows)
    with process_group(recipe_of(asked, World()).train.device) as world:
        report = measure(asked, world, told=told)
        if not world.is_first:
            return None
        for path, text in (
            (out, lambda: report.model_dump_json(indent=2) + "\n"),
            (svg, lambda: picture(report)),
        ):
            if path is not None:
                path.write_text(text(), encoding="utf-8")
        if rows is not None:
            write_row(rows, report)
        return report


def bench_check(
    asked: Asked,
    *,
    further: int = 0,
    rows: Path | None = None,
    told: Callable[[str], None],
) -> CheckReport:
    """Compare kernels with references over the steps of a recipe.

    Args:
        asked: what.
        further: steps that the kernels go on for alone.
        rows: folder of results, in which a row is kept by device.
        told: called with what is done.

    Returns:
        the report.
    """
    with process_group(recipe_of(asked, World()).train.device) as world:
        report = check(asked, world, further=further, told=told)
        if rows is not None:
            write_check(rows, report)
        return report


def check_text(report: CheckReport) -> str:
    """Write a comparison for people.

    Args:
        report: of three runs.

    Returns:
        lines of text, ending in a newline.
    """
    lines = [f"{report.recipe}: {report.steps} steps of {report.examples} examples, three ways"]
    for run in (report.exact, report.reference, report.kernels):
        ne = ", ".join(f"{task} {value:.4f}" for task, value in run.ne.items())
        lines.append(
            f"   {run.precision}, impl={run.impl}: loss {run.losses[0]:.4f} to "
            f"{run.losses[-1]:.4f}, NE {ne}"
        )
    if further := len(report.kernels.further_losses):
        lines.append(f"   the kernels went on for {further} steps")
    lines.append("the kernels agree" if report.agrees else f"they do not agree: {report.said}")
    return "\n".join(lines) + "\n"


def bench_endure(
    asked: Asked, *, rows: Path | None = None, told: Callable[[str], None]
) -> EndureReport:
    """Train many steps with the kernels, whose losses have to be finite.

    Args:
        asked: what; its steps are all that is taken.
        rows: folder of results, in which a row is kept by device.
        told: called with what is done.

    Returns:
        the report.
    """
    with process_group(recipe_of(asked, World()).train.device) as world:
        report = endure(asked, world, told=told if world.is_first else lambda stage: None)
        if rows is not None and world.is_first:
            write_endured(rows, report)
        return report


def endured_text(report: EndureReport) -> str:
    """Write a long run for people.

    Args:
        report: of the run.

    Returns:
        lines of text, ending in a newline.
    """
    first, last = (
        "not finite" if x is None else f"{x:.4f}" for x in (report.loss_first, report.loss_last)
    )
    return (
        f"{report.recipe}: {report.steps} steps of {report.examples} examples in "
        f"{report.seconds:.1f} s, loss {first} to {last}\n"
        f"{report.said or 'every loss is finite'}\n"
    )
