"""The answer of `gem plan` as text, as JSON, and as settings of a training run."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gem.planning.chosen import names_a_plan, not_counted
from gem.planning.command import Planned
from gem_parallel.contract import DENSE_AXES, SPARSE_AXES, ParallelPlan
from gem_parallel.planning.forecast import Forecast
from gem_parallel.planning.planner import Search

_AXES = (*DENSE_AXES, *SPARSE_AXES)


def settings_of(planned: Planned, plan: ParallelPlan) -> tuple[str, ...]:
    """What the recipe has to say so that the trainer runs a plan as it was forecast.

    Args:
        planned: the answer.
        plan: one of its plans.

    Returns:
        texts ``key=value`` for ``--set``, behind those that the command was given.
    """
    own, embeddings = planned.config.parallel, planned.config.model.embeddings
    named = names_a_plan(planned.config)
    settings: list[str] = []
    if plan.world_size > 1 or named:
        # Of the axes of tables, one that is not said follows from the other.
        said = [a for a in _AXES if getattr(plan, a) > 1 or named]
        settings += [f"parallel.{axis}={getattr(plan, axis)}" for axis in said]
        if plan.fully_sharded_tables or (own is not None and own.fully_sharded_tables):
            value = str(plan.fully_sharded_tables).lower()
            settings.append(f"parallel.fully_sharded_tables={value}")
        if plan.table_copies != ("near" if own is None else own.table_copies):
            settings.append(f"parallel.table_copies={plan.table_copies}")
        if own is not None and own.replicate_below != plan.replicate_below:
            settings.append(f"parallel.replicate_below={plan.replicate_below}")
        if plan.table_shard > 1 or plan.fully_sharded_tables:
            replicas = planned.tables.replicas
            if plan.table_replicate > 1 and (own is None or own.table_replicas != replicas):
                settings.append(f"parallel.table_replicas={replicas}")
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
        "not_counted": list(not_counted(planned.config)),
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
    if keys := not_counted(planned.config):
        lines.append(f"not counted: {', '.join(keys)}")
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
        _told_of_tables(plan),
        f"{found.step_ms:.1f}",
        f"{found.exposed_ms:.1f}",
        f"{1e2 * found.e2e_mfu:.1f}",
        f"{found.scaling_ratio:.3f}",
        f"{against.weak_scaling(found):.3f}",
        f"{found.memory.total / 2**30:.1f}{too_much}",
    )


def _told_of_tables(plan: ParallelPlan) -> str:
    """How copies of tables lie, beside their number."""
    told = ["fully sharded"] * plan.fully_sharded_tables
    told += ["far copies"] * (plan.table_copies == "far" and plan.table_replicate > 1)
    return ", ".join(told)


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
