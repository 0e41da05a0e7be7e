"""The page of a report: one self-contained HTML file, made by a template that escapes everything.

The file loads nothing: style and drawings stand in it, and it has no script.
"""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from gem.report import sections, what_ran
from gem.report.calibration import reliability_figure
from gem.report.compare import Group, check_one_data_set, differences, group_runs
from gem.report.curves import loss_figure, ne_figure
from gem.report.figure import Figure, Safe, run_name
from gem.report.histories import history_figure
from gem.report.label_rates import label_rate_figure
from gem.report.read import RunRecord, pick, read_run, table
from gem.report.significance import Beside, beside_the_first
from gem_opkit.errors import ConfigError, refusal

REPORT_FILE = "report.html"
_MOST_DIFFERENCES = 60
# Embedding tables that are shown at once; a few more are not worth a click.
_MOST_TABLES, _SPARED = 12, 3


def compared(folders: Sequence[Path]) -> tuple[list[Beside], list[str]]:
    """Compare the recipes of several runs with the first one, on the same test rows.

    Args:
        folders: of the runs, all on one data set.

    Returns:
        as `gem.report.significance.beside_the_first`.

    Raises:
        ConfigError: a folder is no run, or runs are of different data sets.
    """
    runs = [read_run(folder) for folder in dict.fromkeys(folders)]
    check_one_data_set(runs)
    return beside_the_first(group_runs(runs), _tasks(runs))


def write_report(
    folders: Sequence[Path],
    out: Path | None = None,
    *,
    beside: tuple[list[Beside], list[str]] | None = None,
) -> Path:
    """Write the report of one run or of several.

    Args:
        folders: of the runs, at least one; each counts once.
        out: the file; none: ``report.html``, in the folder of the only run or, of several, here.
        beside: from `compared`, where somebody has it already.

    Returns:
        The file.

    Raises:
        ConfigError: a folder is no run, runs are of different data sets, or ``out`` is a folder.
    """
    if out is not None and out.is_dir():
        raise ConfigError(
            refusal(
                "gem report",
                "--out",
                must="be a file",
                got=f"{out}, which is a folder",
                fix=f"give {out / REPORT_FILE}, say",
            )
        )
    runs = [read_run(folder) for folder in dict.fromkeys(folders)]
    text = report_html(runs, beside=beside)
    path = out
    if path is None:
        path = runs[0].folder / REPORT_FILE if len(runs) == 1 else Path(REPORT_FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)
    return path


def report_html(
    runs: Sequence[RunRecord], *, beside: tuple[list[Beside], list[str]] | None = None
) -> str:
    """The page.

    Args:
        runs: at least one, all on one data set.
        beside: as for `write_report`.

    Raises:
        ConfigError: they are of different data sets.
    """
    from jinja2 import Environment, StrictUndefined

    check_one_data_set(runs)
    groups = group_runs(runs)
    if beside is None:
        beside = beside_the_first(groups, _tasks(runs))
    room = resources.files("gem.report")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((room / "page.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        style=Safe((room / "page.css").read_text(encoding="utf-8")),
        **_content(groups, runs, beside),
    )


def _tasks(runs: Sequence[RunRecord]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(task for run in runs for task in run.tasks))


def _content(
    groups: Sequence[Group],
    runs: Sequence[RunRecord],
    beside: tuple[list[Beside], list[str]],
) -> dict[str, Any]:
    tasks = _tasks(runs)
    first = runs[0]
    firsts = [group.runs[0] for group in groups]
    streams = list(table(first.diagnostics.get("histories")))
    return {
        "title": " and ".join(group.label for group in groups),
        "subtitle": _subtitle(groups, runs),
        "states": [_state(run, groups) for run in runs],
        "notices": _notices(runs),
        "groups": [group.label for group in groups],
        "cards": sections.cards(groups, tasks),
        "metrics": list(sections.METRICS.values()),
        "results": sections.results(groups, tasks, by_domain=False),
        "domain_results": sections.results(groups, tasks, by_domain=True),
        "remarks": sections.remarks(groups, tasks),
        "beside": beside[0],
        "not_beside": beside[1],
        "seeds": max(len(group.runs) for group in groups),
        # Two figures stand beside each other; where one is left over it takes the whole width.
        "progress": [
            _shown(loss_figure(groups, wide=len(tasks) % 2 == 0)),
            *(_shown(ne_figure(groups, task)) for task in tasks),
        ],
        "calibration": [
            _shown(reliability_figure(groups, period, task))
            for task in tasks
            for period in _calibrated(groups, task)
        ],
        "data": [
            *(_shown(label_rate_figure(groups, t)) for t in tasks),
            *(
                _shown(history_figure(first, s, wide=s == streams[-1] and len(streams) % 2 == 1))
                for s in streams
            ),
        ],
        "speed": sections.speed(groups),
        "time_bars": sections.time_bars(groups),
        "tables": [
            (
                group.label if len(groups) > 1 else "",
                sections.table_total(run),
                *_folded(rows),
            )
            for group, run in zip(groups, firsts, strict=True)
            if (rows := sections.table_rows(run))
        ],
        "differences": differences(groups)[:_MOST_DIFFERENCES] if len(groups) > 1 else [],
        "ran": [
            (run_name(run, groups) if len(runs) > 1 else "", what_ran.facts(run)) for run in runs
        ],
        "configs": [
            (group.label, run.config_text) for group, run in zip(groups, firsts, strict=True)
        ],
        "version": pick(first.diagnostics, "process", "starts", -1, "versions", "gem-trainer"),
    }


def _folded(rows: list[sections.TableRow]) -> tuple[list[sections.TableRow], ...]:
    """The tables that are shown at once, and those that open."""
    shown = len(rows) if len(rows) <= _MOST_TABLES + _SPARED else _MOST_TABLES
    return rows[:shown], rows[shown:]


def _calibrated(groups: Sequence[Group], task: str) -> list[str]:
    """The progressive period and the last one that has examples."""
    return list(dict.fromkeys(("progressive", sections.headline_period(groups, task))))


def _subtitle(groups: Sequence[Group], runs: Sequence[RunRecord]) -> str:
    if len(runs) == 1:
        return f"seed {runs[0].seed} · {what_ran.subtitle(runs[0])}"
    recipes = f"{len(groups)} recipes, " if len(groups) > 1 else ""
    return f"{recipes}{len(runs)} runs · {runs[0].dataset}"


def _state(run: RunRecord, groups: Sequence[Group]) -> tuple[bool, str]:
    alone = len(groups) == 1 and len(groups[0].runs) == 1
    return run.finished, what_ran.status(run) if alone else (
        f"{run_name(run, groups)}: {what_ran.status(run)}"
    )


def _notices(runs: Sequence[RunRecord]) -> list[str]:
    if len(runs) == 1:
        return list(runs[0].missing)
    return [f"{run.folder}: {sentence}" for run in runs for sentence in run.missing]


def _shown(figure: Figure) -> dict[str, Any]:
    """A figure as the template takes it: drawings are this package's own, all else is escaped."""
    return {
        "title": figure.title,
        "text": figure.text,
        "drawings": [Safe(drawing) for drawing in figure.drawings],
        "legend": figure.legend,
        "headers": figure.headers,
        "rows": figure.rows,
        "wide": figure.wide,
        "empty": figure.empty,
    }
