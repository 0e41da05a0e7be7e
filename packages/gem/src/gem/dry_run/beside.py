"""A forecast beside the dry run of the same plan: `gem plan --dry-run`.

Dense bytes are equal to the byte, but for numbers of a few bytes that a forecast leaves out (sums
of label weights, of squares for the norm). Bytes of tables depend on which ids a batch has: the
forecast has their expectation, the dry run those of one batch; and it has the mean over ranks,
where the rank that runs may hold more tables than others. Where sharding groups merge gradients of
rows, the dry run has too few: all ranks of a group ask for the same rows there. Memory differs by
what a forecast does not follow: which tensors are alive at the fullest moment.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gem.config import RunConfig
from gem.dry_run.count import StepCount, count_step
from gem.planning.command import Planned
from gem.planning.lengths import length_laws
from gem.planning.schema import declared_schema
from gem.train.parallel_spec import ParallelSpec
from gem_embeddings.contract import TableLoad
from gem_parallel.contract import ParallelPlan, Topology
from gem_parallel.planning.forecast import Forecast
from gem_parallel.planning.links import axis_group, slowest_tier

# A collective that carries less is a number that ranks agree on, not a tensor of the model.
_NUMBERS_BYTES = 4096
_WHOLE = ("world", "table_shard", "table_replicate")


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes that one rank gives in a step.

    Attributes:
        axis: of the mesh.
        collective: its name.
        links: outermost tier that it crosses; ``-`` for none.
        forecast_bytes: as forecast; 0 where the forecast has none.
        counted_bytes: as counted.
    """

    axis: str
    collective: str
    links: str
    forecast_bytes: float
    counted_bytes: int


@dataclass(frozen=True, slots=True)
class Beside:
    """Forecast and dry run of a plan.

    Attributes:
        forecast: of the plan.
        count: of one of its ranks.
        lines: collective by collective.
        number_bytes: what was counted of numbers that ranks agree on, left out of the lines.
        seconds: how long the dry run took.
    """

    forecast: Forecast
    count: StepCount
    lines: tuple[Line, ...]
    number_bytes: int
    seconds: float


def beside(planned: Planned, *, rank: int = 0) -> Beside:
    """Run a step of the plan that the recipe names, or else of the best plan, and compare.

    Args:
        planned: answer of `gem plan`.
        rank: rank that runs.

    Returns:
        both.

    Raises:
        ConfigError: a process group exists in this process.
        UnsupportedError: a plan that the trainer does not run.
    """
    found = planned.given or planned.search.best[0].forecast
    began = time.perf_counter()
    config = config_of(planned, found.plan)
    schema = declared_schema(config)
    count = count_step(
        config,
        schema,
        found.ranks,
        rank=rank,
        loads={load.feature_name: TableLoad.model_validate(load) for load in planned.tables.loads},
        laws=length_laws(config.data, schema, planned.lengths),
    )
    lines, numbers = _lines(found, count, planned.topology)
    return Beside(found, count, lines, numbers, time.perf_counter() - began)


def config_of(planned: Planned, plan: ParallelPlan) -> RunConfig:
    """The recipe under a plan, with the batch that was planned for on each rank.

    Args:
        planned: answer of `gem plan`.
        plan: of its ranks.

    Returns:
        a config that the trainer takes.
    """
    config = planned.config
    axes = {name: getattr(plan, name) for name in ParallelPlan.model_fields}
    chosen = config.parallel.model_dump() if config.parallel is not None else {}
    chosen |= {"table_replicas": planned.tables.replicas, **axes}
    tables = config.model.embeddings.model_copy(update={"initial_rows": "by_place"})
    batch = planned.work.examples * plan.world_size
    return config.model_copy(
        update={
            "parallel": ParallelSpec.model_validate(chosen),
            "train": config.train.model_copy(update={"batch_examples": batch}),
            "model": config.model.model_copy(update={"embeddings": tables}),
        }
    )


def _lines(found: Forecast, count: StepCount, topology: Topology) -> tuple[tuple[Line, ...], int]:
    plan = found.plan
    forecast: dict[tuple[str, str], float] = {}
    for each in found.exchanged:
        if each.members > 1:
            key = (_axis(each.axis, plan), each.collective)
            forecast[key] = forecast.get(key, 0.0) + each.given_bytes
    counted: dict[tuple[str, str], int] = {}
    for (axis, collective), given in count.totals().items():
        key = (_axis(axis, plan), collective)
        counted[key] = counted.get(key, 0) + given
    numbers = {
        key: given
        for key, given in counted.items()
        if key not in forecast and given < _NUMBERS_BYTES
    }
    lines = [
        Line(
            axis,
            collective,
            _links(axis, plan, topology),
            forecast.get((axis, collective), 0.0),
            counted.get((axis, collective), 0),
        )
        for axis, collective in sorted({*forecast, *counted} - {*numbers})
    ]
    return tuple(lines), sum(numbers.values())


def _axis(axis: str, plan: ParallelPlan) -> str:
    """An axis without the parts of it that have one rank."""
    if axis in _WHOLE:
        return axis
    return "_".join(part for part in axis.split("_") if getattr(plan, part) > 1)


def _links(axis: str, plan: ParallelPlan, topology: Topology) -> str:
    tier = slowest_tier(axis_group(plan, axis, topology), topology)
    return "-" if tier is None else tier.name


def beside_json(found: Beside) -> dict[str, Any]:
    """Both as plain values.

    Args:
        found: forecast and dry run.

    Returns:
        bytes, names and lists of them.
    """
    count = found.count
    return {
        "rank": count.rank,
        "plan": found.forecast.plan.model_dump(mode="json"),
        "collectives": [
            {
                "axis": line.axis,
                "collective": line.collective,
                "links": line.links,
                "forecast_bytes": line.forecast_bytes,
                "counted_bytes": line.counted_bytes,
            }
            for line in found.lines
        ],
        "number_bytes": found.number_bytes,
        "forecast_memory_bytes": found.forecast.memory.total,
        "counted_memory_bytes": count.peak_bytes,
        "fullest_in": count.peak_section,
        "held_bytes": dict(count.held_bytes),
        "gradient_bytes": count.gradient_bytes,
        "events": dict(count.events),
        "seconds": round(found.seconds, 3),
    }


def beside_text(found: Beside) -> str:
    """Both for people.

    Args:
        found: forecast and dry run.

    Returns:
        lines of text, ending in a newline.
    """
    count = found.count
    rows = [("   collective", "axis", "links", "forecast MiB", "dry run MiB", "difference")]
    rows += [
        (
            f"   {line.collective}",
            line.axis,
            line.links,
            f"{line.forecast_bytes / 2**20:.2f}",
            f"{line.counted_bytes / 2**20:.2f}",
            _difference(line),
        )
        for line in found.lines
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    forecast_gib, counted_gib = (
        size / 2**30 for size in (found.forecast.memory.total, count.peak_bytes)
    )
    held = _listed({**count.held_bytes, "gradients": count.gradient_bytes})
    lines = [
        f"dry run of rank {count.rank} of {count.ranks}, {found.seconds:.0f} s: the trainer's own "
        "step, ranks and floating-point values in name only",
        *table,
        f"   memory at the fullest: forecast {forecast_gib:.1f} GiB, dry run {counted_gib:.1f} GiB "
        f"({count.peak_section})",
        f"   held: {held}",
        f"   numbers that ranks agree on, not forecast: {found.number_bytes} bytes",
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in sizes.items() if size)


def _difference(line: Line) -> str:
    if line.forecast_bytes == line.counted_bytes:
        return "none"
    if not line.forecast_bytes:
        return "not forecast"
    share = line.counted_bytes / line.forecast_bytes - 1.0
    bytes_apart = line.counted_bytes - line.forecast_bytes
    return f"{bytes_apart:+.0f} bytes" if abs(share) < 1e-4 else f"{1e2 * share:+.1f} %"
