"""The parts of a report that are words and tables: results, speed, tables, and what ran."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gem.report import words
from gem.report.compare import Group, Spread
from gem.report.figure import run_name
from gem.report.read import PERIODS, RunRecord, number, pick, table

METRICS = {
    "ne": "NE",
    "auc": "AUC",
    "gauc": "GAUC",
    "logloss": "log loss",
    "calibration": "calibration",
}
# Of these a smaller value is better; calibration is best at 1 and the others when large.
_SMALL_IS_GOOD = ("ne", "logloss")
_SECTIONS = {
    "data": "waiting for data",
    "forward": "model, forward",
    "backward": "model, backward",
    "model": "model, forward and backward",
    "tables": "embedding tables",
    "optimizer": "optimizer",
    "checkpoint": "waiting for checkpoints",
    "evaluation": "evaluation while training",
    "other": "metrics and logs",
}
_ABOUT = {
    "ne": words.about_ne,
    "auc": words.about_auc,
    "calibration": words.about_calibration,
}


@dataclass(frozen=True, slots=True)
class Tile:
    """One number with its name and what it says."""

    name: str
    value: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Card:
    """What was reached in one task: tiles of one recipe, or a table of several."""

    task: str
    period: str
    tiles: tuple[Tile, ...]
    rows: tuple[tuple[str, tuple[tuple[str, bool], ...]], ...] = ()


def headline_period(groups: Sequence[Group], task: str) -> str:
    """The period that is spoken of first: the last one that has examples.

    Args:
        groups: of runs.
        task: its name.
    """
    for period in reversed(PERIODS):
        if any(value > 0 for group in groups for value in group.values(period, task, "examples")):
            return period
    return PERIODS[0]


def cards(groups: Sequence[Group], tasks: Sequence[str]) -> list[Card]:
    """What was reached, by task.

    Args:
        groups: of runs.
        tasks: their names.
    """
    found = []
    for task in tasks:
        period = headline_period(groups, task)
        examples = Spread.of(groups[0].values(period, task, "examples"))
        of = f"{period} period, {words.count(examples.mean if examples else 0)} known labels"
        if len(groups) == 1:
            tiles = tuple(_tile(groups[0], period, task, key) for key in _ABOUT)
            found.append(Card(task, of, tiles))
        else:
            rows = tuple(
                (METRICS[key], _side_by_side(groups, period, task, key)) for key in METRICS
            )
            found.append(Card(task, of, (), rows))
    return found


def _tile(group: Group, period: str, task: str, key: str) -> Tile:
    spread = Spread.of(group.values(period, task, key))
    reason = pick(group.runs[0].summary, period, task, "null_reasons", key)
    about = _ABOUT[key](spread.mean if spread else None, None if reason is None else str(reason))
    return Tile(METRICS[key], words.spread(spread), about)


def _side_by_side(
    groups: Sequence[Group], period: str, task: str, key: str
) -> tuple[tuple[str, bool], ...]:
    """A metric of every group, and whether it is the best one."""
    spreads = [Spread.of(group.values(period, task, key)) for group in groups]
    known = sorted((_cost(key, s.mean), i) for i, s in enumerate(spreads) if s is not None)
    best = None
    if len(known) > 1:
        # Ahead by less than seeds lie apart is not ahead.
        noise = max((s.deviation or 0.0 for s in spreads if s is not None), default=0.0)
        best = known[0][1] if known[1][0] - known[0][0] > noise else None
    return tuple((words.spread(s), i == best) for i, s in enumerate(spreads))


def _cost(key: str, value: float) -> float:
    if key == "calibration":
        return abs(value - 1)
    return value if key in _SMALL_IS_GOOD else -value


@dataclass(frozen=True, slots=True)
class ResultRow:
    """The metrics of a recipe in one period, task and domain."""

    group: str
    place: int  # of the recipe among all
    examples: str
    rate: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResultBlock:
    """A row for each recipe."""

    period: str
    task: str
    domain: str
    rows: tuple[ResultRow, ...]


def results(groups: Sequence[Group], tasks: Sequence[str], *, by_domain: bool) -> list[ResultBlock]:
    """Metrics of every period, task and recipe.

    Args:
        groups: of runs.
        tasks: their names.
        by_domain: those of each domain by itself, where there are several.
    """
    blocks = []
    for period in PERIODS:
        for task in tasks:
            for domain in _domains(groups, period, task) if by_domain else ("",):
                path = (period, task, "domains", domain) if domain else (period, task)
                rows = tuple(
                    _result(group, place, path)
                    for place, group in enumerate(groups)
                    if group.values(*path, "examples")
                )
                if rows:
                    blocks.append(ResultBlock(period, task, domain, rows))
    return blocks


def _domains(groups: Sequence[Group], period: str, task: str) -> tuple[str, ...]:
    found = tuple(table(pick(groups[0].runs[0].summary, period, task, "domains")))
    return found if len(found) > 1 else ()


def _result(group: Group, place: int, path: tuple[str, ...]) -> ResultRow:
    examples = Spread.of(group.values(*path, "examples"))
    positives = Spread.of(group.values(*path, "positives"))
    rate = positives.mean / examples.mean if positives and examples and examples.mean else None
    return ResultRow(
        group.label,
        place,
        words.count(examples.mean if examples else None),
        words.percent(rate),
        tuple(words.spread(Spread.of(group.values(*path, key))) for key in METRICS),
    )


def remarks(groups: Sequence[Group], tasks: Sequence[str]) -> list[str]:
    """Why a metric is missing, and which ones are not exact, each said once.

    Args:
        groups: of runs.
        tasks: their names.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for run in (run for group in groups for run in group.runs):
        for period, task, domain, values in _all_values(run, tasks):
            where = f"{task}{f' in {domain}' if domain else ''}, {period}"
            for kind in ("null_reasons", "notes"):
                for key, text in table(values.get(kind)).items():
                    places = found.setdefault((METRICS.get(key, key), str(text)), [])
                    if where not in places:
                        places.append(where)
    # Metrics that are missing for one reason in the same places are named together.
    names: dict[tuple[str, str], list[str]] = {}
    for (name, text), places in found.items():
        names.setdefault((text, "; ".join(places)), []).append(name)
    return [f"{', '.join(keys)}: {text} ({places})" for (text, places), keys in names.items()]


def _all_values(
    run: RunRecord, tasks: Sequence[str]
) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    for period in PERIODS:
        for task in tasks:
            whole = table(pick(run.summary, period, task))
            yield period, task, "", whole
            domains = table(whole.get("domains"))
            if len(domains) > 1:
                for domain, values in domains.items():
                    yield period, task, domain, table(values)


@dataclass(frozen=True, slots=True)
class TimeBar:
    """Where the time of a run's training went."""

    name: str
    parts: tuple[tuple[str, float, str, str], ...]  # name, percent, share as text, a step's part
    quantiles: str


def time_bars(groups: Sequence[Group]) -> list[TimeBar]:
    """Where the time went, by run.

    Args:
        groups: of runs.
    """
    return [
        bar
        for group in groups
        for run in group.runs
        if (bar := _time_bar(run, run_name(run, groups)))
    ]


def _time_bar(run: RunRecord, name: str) -> TimeBar | None:
    process = table(run.diagnostics.get("process"))
    given = table(process.get("seconds")) or table(pick(run.rows, -1, "time_frac"))
    seconds = {k: v for k, found in given.items() if (v := number(found)) is not None and v >= 0}
    total, steps = sum(seconds.values()), number(process.get("steps_timed"))
    if not total:
        return None
    order = [key for key in _SECTIONS if key in seconds]
    order += [key for key in seconds if key not in _SECTIONS]
    parts = tuple(
        (
            _SECTIONS.get(key, key),
            100 * seconds[key] / total,
            words.percent(seconds[key] / total),
            words.milliseconds(1e3 * seconds[key] / steps) if steps else words.NONE,
        )
        for key in order
    )
    step_ms = table(process.get("step_ms"))
    quantiles = ", ".join(
        f"{text} {words.milliseconds(value)}"
        for key, text in (
            ("p10", "a tenth are faster than"),
            ("p50", "half faster than"),
            ("p99", "one in a hundred slower than"),
            ("max", "the slowest took"),
        )
        if (value := number(step_ms.get(key))) is not None
    )
    timed = f"{words.count(steps)} steps timed: {quantiles}." if steps and quantiles else ""
    return TimeBar(name, parts, timed)


def speed(groups: Sequence[Group]) -> list[tuple[str, list[Tile]]]:
    """Speed, memory and efficiency of every finished run.

    Args:
        groups: of runs.
    """
    found = []
    for group in groups:
        for run in group.runs:
            if tiles := _speed_tiles(run):
                found.append((run_name(run, groups), tiles))
    return found


def _speed_tiles(run: RunRecord) -> list[Tile]:
    def value(*path: str) -> float | None:
        return number(pick(run.summary, *path))

    if value("throughput", "examples_per_s") is None:
        return []
    ranks = value("world_size") or 1
    device = str(run.summary.get("device", "unknown device"))
    on = device if ranks == 1 else f"{ranks:.0f} × {device}"
    mfu, flops = value("efficiency", "e2e_mfu"), value("efficiency", "flops_per_example")
    return [
        Tile(
            "examples a second",
            words.count(value("throughput", "examples_per_s")),
            f"{words.count(value('throughput', 'tokens_per_s'))} events a second, on {on}",
        ),
        Tile(
            "median step",
            words.milliseconds(value("throughput", "step_ms_median")),
            f"{words.percent(value('throughput', 'data_wait_frac'))} of the time waiting for data",
        ),
        Tile("peak memory", words.size(value("memory", "peak_bytes")), "of the largest process"),
        Tile(
            "model FLOPs in use (MFU)",
            words.percent(mfu),
            "of what the device can do in BF16"
            if mfu is not None
            else "the peak of this device is not known",
        ),
        Tile(
            "work an example",
            words.NONE if flops is None else f"{words.short(flops / 1e6)} MFLOP",
            "forward and backward, valid events only",
        ),
    ]


@dataclass(frozen=True, slots=True)
class TableRow:
    """An embedding table after training."""

    name: str
    inputs: str
    rows: str
    width: str
    trained: str
    trained_percent: float
    norm_trained: str
    norm_untrained: str
    weights: str
    optimizer: str
    outside: str


def table_rows(run: RunRecord) -> list[TableRow]:
    """The embedding tables of a run, the largest first, and their sum.

    Args:
        run: of which they are.
    """
    facts = [(name, table(found)) for name, found in table(run.diagnostics.get("tables")).items()]
    facts.sort(key=lambda pair: -(number(pair[1].get("weight_bytes")) or 0))
    return [_table_row(name, found) for name, found in facts]


def table_total(run: RunRecord) -> str:
    """Memory of all tables, in words.

    Args:
        run: of which they are.
    """
    facts = [table(found) for found in table(run.diagnostics.get("tables")).values()]
    weights = sum(number(found.get("weight_bytes")) or 0 for found in facts)
    state = sum(number(found.get("optimizer_bytes")) or 0 for found in facts)
    rows = sum(number(found.get("rows")) or 0 for found in facts)
    return (
        f"{len(facts)} tables of {words.count(rows)} rows in all: {words.size(weights)} of "
        f"weights and {words.size(state)} of optimizer state on every rank."
    )


def _table_row(name: str, found: dict[str, Any]) -> TableRow:
    rows, trained = number(found.get("rows")), number(found.get("rows_trained"))
    share = trained / rows if rows and trained is not None else None
    inputs = found.get("inputs")
    return TableRow(
        name,
        ", ".join(str(i) for i in inputs) if isinstance(inputs, list) else "",
        words.count(rows) + (" hashed" if found.get("id_space") == "hash" else ""),
        words.count(number(found.get("width"))),
        f"{words.count(trained)} ({words.percent(share, 0)})" if share is not None else words.NONE,
        100 * (share or 0.0),
        _norm(found.get("norm_trained")),
        _norm(found.get("norm_untrained")),
        words.size(number(found.get("weight_bytes"))),
        words.size(number(found.get("optimizer_bytes"))),
        words.count(number(found.get("out_of_range"))),
    )


def _norm(found: Any) -> str:
    mean, most = number(pick(found, "mean")), number(pick(found, "max"))
    return (
        "–" if mean is None else f"{mean:.3g} (max {words.NONE if most is None else f'{most:.3g}'})"
    )
