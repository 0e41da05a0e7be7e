"""`gem plan`: the best plans for a recipe on some machines, with what each costs and why."""

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gem.config import RunConfig, load_recipe
from gem.planning.lengths import LengthLaw
from gem.planning.rates import DEFAULT, Calibrated, calibrated, read_rows
from gem.planning.tables import TablesOf, tables_of
from gem.planning.work import work_of
from gem_opkit.errors import ConfigError, refusal
from gem_parallel.contract import ParallelPlan, Topology
from gem_parallel.planning.forecast import Forecast, forecast
from gem_parallel.planning.planner import Search, search
from gem_parallel.planning.work import Work
from gem_parallel.topology import PRESETS, read_topology, scaled_to

_AXES = ("replicate", "shard", "expert", "table_shard", "table_replicate")
# Without a topology: the smallest of these that has the ranks.
_BY_SIZE = ("h200", "h200x2", "h200x8", "gem4096")
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command was asked.

    Attributes:
        recipe: name or path.
        gpus: ranks.
        topology: preset or path; None for H200s.
        settings: keys of the recipe that are replaced.
        axes: texts ``axis=size`` that every plan must have.
        batch: examples of a rank; None for the recipe's batch on each rank.
        lengths: texts ``stream=low:high``.
        ids: texts ``input=mean``.
        calibrate: results file; None for the rates that ship.
        most: plans wanted.
    """

    recipe: str
    gpus: int
    topology: str | None = None
    settings: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    batch: int | None = None
    lengths: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    calibrate: Path | None = None
    most: int = 5


@dataclass(frozen=True, slots=True)
class Planned:
    """What the command answers.

    Attributes:
        asked: what was asked.
        config: the recipe.
        topology: machines, of as many ranks.
        work: of one rank.
        tables: of the recipe.
        lengths: stream -> how long its histories are, as the command was told.
        search: the best plans.
        given: forecast of the plan that the recipe itself names; None where it names none.
        sources: where the rates are from.
        seconds: how long it took.
    """

    asked: Asked
    config: RunConfig
    topology: Topology
    work: Work
    tables: TablesOf
    lengths: Mapping[str, LengthLaw]
    search: Search
    given: Forecast | None
    sources: tuple[str, ...]
    seconds: float


def plan_recipe(asked: Asked) -> Planned:
    """Answer the command.

    Args:
        asked: what was asked.

    Returns:
        the answer.

    Raises:
        ConfigError: a word that means nothing, statistics that nobody has said, machines that do
            not have the ranks, or no plan that fits.
    """
    began = time.perf_counter()
    topology = _topology(asked)
    config = load_recipe(asked.recipe, asked.settings)
    lengths, ids = _lengths(asked.lengths), _means(asked.ids)
    fitted = Calibrated(DEFAULT, topology)
    if asked.calibrate is not None:
        fitted = calibrated(read_rows(asked.calibrate), topology)
    work = work_of(config, examples=asked.batch, lengths=lengths, ids=ids)
    tables = tables_of(config, examples=work.examples, lengths=lengths, ids=ids)
    found = search(
        work,
        fitted.topology,
        tables=tables.step,
        rates=fitted.rates,
        fixed=_axes(asked.axes),
        most=asked.most,
    )
    given = None
    if config.parallel is not None:
        plan = ParallelPlan.model_validate(
            {name: getattr(config.parallel, name) for name in ParallelPlan.model_fields}
        )
        plan.check_world(asked.gpus)
        step = tables.step(plan, fitted.topology)
        given = forecast(work, plan, fitted.topology, tables=step, rates=fitted.rates)
    return Planned(
        asked=asked,
        config=config,
        topology=fitted.topology,
        work=work,
        tables=tables,
        lengths=lengths,
        search=found,
        given=given,
        sources=fitted.rates.sources,
        seconds=time.perf_counter() - began,
    )


def _topology(asked: Asked) -> Topology:
    if asked.topology is not None:
        return scaled_to(read_topology(asked.topology), asked.gpus)
    return default_topology(asked.gpus)


def default_topology(gpus: int) -> Topology:
    """The machines that are planned for where nobody names others: hosts of eight H200.

    Args:
        gpus: ranks.

    Returns:
        the smallest preset that has the ranks, cut down to them.

    Raises:
        ConfigError: more ranks than the largest preset has, or hosts that are half used.
    """
    for name in _BY_SIZE:
        if gpus <= PRESETS[name].world_size:
            return scaled_to(PRESETS[name], gpus)
    return scaled_to(PRESETS[_BY_SIZE[-1]], gpus)  # which says how many there are


def _pair(option: str, text: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise _bad(option, text, example)
    return name.strip(), value.strip()


def _bad(option: str, text: str, example: str) -> ConfigError:
    return ConfigError(
        refusal(
            "gem plan",
            option,
            must=f"look like {example}",
            got=repr(text),
            fix="write it like that",
        )
    )


def _lengths(texts: Sequence[str]) -> dict[str, LengthLaw]:
    laws: dict[str, LengthLaw] = {}
    for text in texts:
        name, value = _pair("--lengths", text, "clicks=1:200")
        low, colon, high = value.partition(":")
        fewest, longest = _whole(low), _whole(high)
        if not colon or fewest is None or longest is None or fewest > longest:
            raise _bad("--lengths", text, "clicks=1:200, fewest and most events")
        _once("--lengths", name, laws)
        laws[name] = LengthLaw(fewest, longest)
    return laws


def _means(texts: Sequence[str]) -> dict[str, float]:
    means: dict[str, float] = {}
    for text in texts:
        name, value = _pair("--ids", text, "genres=2.5")
        try:
            mean = float(value)
        except ValueError:
            raise _bad("--ids", text, "genres=2.5") from None
        if not 0 < mean < math.inf:
            raise _bad("--ids", text, "genres=2.5, more than none")
        _once("--ids", name, means)
        means[name] = mean
    return means


def _axes(texts: Sequence[str]) -> dict[str, int | bool]:
    fixed: dict[str, int | bool] = {}
    for text in texts:
        name, value = _pair("--axis", text, "shard=8")
        _once("--axis", name, fixed)
        if name == "fully_sharded_tables" and value in ("true", "false"):
            fixed[name] = value == "true"
        elif size := _whole(value):
            fixed[name] = size
        else:
            raise _bad("--axis", text, "shard=8, or fully_sharded_tables=true")
    return fixed


def _whole(text: str) -> int | None:
    """A whole number in decimal digits; None for other words, and for one beyond all counts."""
    # `isdigit` alone takes a superscript, which `int` does not.
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def _once(option: str, name: str, given: Mapping[str, object]) -> None:
    if name in given:
        raise ConfigError(
            refusal(
                "gem plan",
                option,
                must="name each thing once",
                got=f"{name!r} twice",
                fix="leave one of them out",
            )
        )


def settings_of(planned: Planned, plan: ParallelPlan) -> tuple[str, ...]:
    """What the recipe has to say so that the trainer runs a plan as it was forecast.

    Args:
        planned: the answer.
        plan: one of its plans.

    Returns:
        texts ``key=value`` for ``--set``, behind those that the command was given.
    """
    own, embeddings = planned.config.parallel, planned.config.model.embeddings
    settings: list[str] = []
    if plan.world_size > 1 or own is not None:
        # Of the axes of tables, one that is not said follows from the other.
        said = [a for a in _AXES if getattr(plan, a) > 1 or own is not None]
        settings += [f"parallel.{axis}={getattr(plan, axis)}" for axis in said]
        if plan.fully_sharded_tables or (own is not None and own.fully_sharded_tables):
            value = str(plan.fully_sharded_tables).lower()
            settings.append(f"parallel.fully_sharded_tables={value}")
        if own is not None and own.replicate_below != plan.replicate_below:
            settings.append(f"parallel.replicate_below={plan.replicate_below}")
        if plan.table_shard > 1 or plan.fully_sharded_tables:
            if plan.table_replicate > 1 and own is None:
                settings.append(f"parallel.table_replicas={planned.tables.replicas}")
            if embeddings.initial_rows != "by_place":
                settings.append("model.embeddings.initial_rows=by_place")
    batch = planned.work.examples * plan.world_size
    if batch != planned.config.train.batch_examples:
        settings.append(f"train.batch_examples={batch}")
    return tuple(settings)


def _command(planned: Planned, plan: ParallelPlan) -> str:
    topology, words = planned.topology, ["gem", "train", planned.asked.recipe]
    for setting in (*planned.asked.settings, *settings_of(planned, plan)):
        words += ["--set", setting]
    if plan.world_size > 1:
        hosts = ["--nnodes", str(topology.hosts)] if topology.hosts > 1 else []
        start = ["torchrun", *hosts, "--nproc-per-node", str(topology.ranks_per_host), "-m"]
        words = [*start, *words]
    return shlex.join(words)


def as_json(planned: Planned) -> dict[str, Any]:
    """The answer as one JSON document.

    Args:
        planned: the answer.

    Returns:
        plain values; bytes, milliseconds and shares by name.
    """
    search_, topology = planned.search, planned.topology
    return {
        "recipe": planned.config.name,
        "gpus": topology.world_size,
        "topology": topology.model_dump(mode="json"),
        "examples_per_gpu": planned.work.examples,
        "events_per_gpu": round(planned.work.tokens),
        "dense_parameters": sum(p.elements for p in planned.work.parameters()),
        "table_parameters": sum(s.num_embeddings * s.embedding_dim for s in planned.tables.specs),
        "flops_per_gpu": planned.work.flops(),
        "plans": [
            {
                **forecast_json(ranked.forecast, search_),
                "reason": ranked.reason,
                "settings": settings_of(planned, ranked.forecast.plan),
            }
            for ranked in search_.best
        ],
        "given": None if planned.given is None else forecast_json(planned.given, search_),
        "tried": search_.tried,
        "refused": dict(search_.refused),
        "rates_from": list(planned.sources),
        "seconds": round(planned.seconds, 3),
    }


def forecast_json(found: Forecast, against: Search) -> dict[str, Any]:
    """One forecast as plain values.

    Args:
        found: the forecast.
        against: holds the forecast of one rank.

    Returns:
        its plan, times, shares, memory and collectives.
    """
    return {
        "plan": found.plan.model_dump(mode="json"),
        "step_ms": found.step_ms,
        "parts_ms": dict(found.parts_ms),
        "kinds_ms": dict(found.kinds_ms),
        "exposed_ms": found.exposed_ms,
        "e2e_mfu": found.e2e_mfu,
        "local_mfu": found.local_mfu,
        "scaling_ratio": found.scaling_ratio,
        "weak_scaling": against.weak_scaling(found),
        "memory_bytes": {**asdict(found.memory), "total": found.memory.total},
        "fits": found.fits,
        "collectives": [asdict(each) for each in found.exchanged],
    }


def as_text(planned: Planned) -> str:
    """The answer for people: one line a plan, the best one in detail, and the reasons.

    Args:
        planned: the answer.

    Returns:
        lines of text, ending in a newline.
    """
    topology, work = planned.topology, planned.work
    names = [t.name for t in (topology.host_tier, topology.zone_tier, topology.cluster_tier) if t]
    lines = [
        f"{planned.config.name} on {topology.world_size} ranks: {topology.hosts} hosts of "
        f"{topology.ranks_per_host}, links {', '.join(names)}",
        f"a rank: {work.examples:,} examples, {work.tokens:,.0f} events, "
        f"{work.flops() / 1e12:.1f} TFLOP a step; {sum(p.elements for p in work.parameters()):,} "
        f"dense parameters, {sum(s.num_embeddings for s in planned.tables.specs):,} table rows",
        "",
        *_table(_rows(planned)),
        "",
        *_detail(planned.search.best[0].forecast),
        "",
        "why:",
        *(f"  {number}  {r.reason}" for number, r in enumerate(planned.search.best, 1)),
    ]
    first = planned.search.best[0].forecast.plan
    where = " on each host" if topology.hosts > 1 else ""
    lines.append(f"to train by 1{where}: {_command(planned, first)}")
    lines += [f"left out: {n} plans, {why}" for why, n in planned.search.refused.items()]
    lines.append(f"copies of tables exchange {planned.tables.replicas} (parallel.table_replicas)")
    lines += [f"rates: {source}" for source in planned.sources]
    return "\n".join(line.rstrip() for line in lines) + "\n"


_HEADINGS = (
    *("", "replicate", "shard", "expert", "table_shard", "table_replicate", "tables"),
    *("step ms", "exposed ms", "MFU %", "scaling", "weak", "GiB a rank"),
)


def _rows(planned: Planned) -> list[tuple[str, ...]]:
    found = [(str(n), ranked.forecast) for n, ranked in enumerate(planned.search.best, 1)]
    if planned.given is not None:
        found.append(("recipe", planned.given))
    return [_HEADINGS, *(_row(name, one, planned.search) for name, one in found)]


def _row(name: str, found: Forecast, against: Search) -> tuple[str, ...]:
    plan = found.plan
    too_much = "" if found.fits else " (does not fit)"
    return (
        name,
        *(str(getattr(plan, axis)) for axis in _AXES),
        "fully sharded" if plan.fully_sharded_tables else "",
        f"{found.step_ms:.1f}",
        f"{found.exposed_ms:.1f}",
        f"{1e2 * found.e2e_mfu:.1f}",
        f"{found.scaling_ratio:.3f}",
        f"{against.weak_scaling(found):.3f}",
        f"{found.memory.total / 2**30:.1f}{too_much}",
    )


def _detail(found: Forecast) -> list[str]:
    parts = _listed(found.parts_ms, "ms")
    kinds = _listed(found.kinds_ms, "ms")
    held = {name: value / 2**30 for name, value in asdict(found.memory).items()}
    lines = [f"1: step {parts}", f"   compute {kinds}", f"   memory {_listed(held, 'GiB')}"]
    rows: list[tuple[str, ...]] = [
        ("   collective", "axis", "ranks", "links", "MiB a rank", "calls", "ms alone", "of")
    ]
    rows += [
        (
            f"   {each.collective}",
            each.axis,
            str(each.members),
            each.tier or "-",
            f"{each.given_bytes / 2**20:.1f}",
            str(each.calls),
            f"{each.ms:.2f}",
            ", ".join(each.what),
        )
        for each in found.exchanged
    ]
    return [*lines, *(_table(rows) if len(rows) > 1 else [])]


def _listed(values: Mapping[str, float], unit: str) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in values.items() if value) + f" {unit}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
