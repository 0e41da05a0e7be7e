"""One rung of a ladder: a model is trained, and its NE and its exact FLOPs are written down."""

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gem.config import RunConfig, load_recipe
from gem.data.schema import BatchSchema
from gem.dry_run.build import build_step
from gem.model.flops import total_flops, training_flops
from gem.planning.schema import declared_schema
from gem.scaling.planted import CLICK, CONTENT, Drawn, PlantedWorld, history_lengths
from gem.scaling.spec import PlantedSpec
from gem.train.clock import StepClock
from gem.train.normalized_entropy import CLIP, binary_entropy
from gem_opkit.bench import provenance
from gem_opkit.ceilings import device_name
from gem_opkit.errors import ConfigError, UnsupportedError, refusal
from gem_parallel.launch import World, process_group

# Numbers of batches that no training reaches.
HELD_OUT_FROM = 1 << 30
# Steps that the host may be ahead of a GPU.
_AHEAD = 16
# Of the examples of training, each with an NE of its own.
_PARTS = 8


@dataclass(frozen=True, slots=True)
class RungJob:
    """What one process trains.

    Attributes:
        ladder: name.
        rung: name.
        recipe: shipped name or path.
        settings: keys that are replaced, those of all rungs first.
        content: numbers of the content vector that candidate and events carry.
        seed: of the weights.
        planted: the world; None for the recipe's data set.
        examples: of training, where the world is planted.
        held_out: that NE is measured on, likewise.
        device: ``auto``, ``cpu`` or ``cuda``.
        run: folder of the run, where a data set is read.
    """

    ladder: str
    rung: str
    recipe: str
    settings: tuple[str, ...]
    content: int
    seed: int
    planted: PlantedSpec | None
    examples: int
    held_out: int
    device: str
    run: Path


def train_rung(job: RungJob) -> dict[str, Any]:
    """Train and measure.

    Args:
        job: what.

    Returns:
        plain values: ``ladder``, ``rung``, ``seed``, ``settings``, ``ne`` (task -> NE of rows that
        nothing was learned from), ``flops_per_example`` of training, exact, ``examples``,
        ``parameters``, ``seconds``, ``examples_per_s``, ``device``, and the ``provenance`` of a
        row of results; of a planted world also
        ``ne_of_labels``, ``ne_progressive`` of the last third, ``ne_while_training`` of each
        eighth, ``peak_bytes`` of the GPU, and ``ne_of_rates``, which is what somebody who knows
        every taste would reach.

    Raises:
        ConfigError: a recipe that the world does not fit.
        UnsupportedError: a planted world on several ranks.
    """
    config = rung_config(job)
    found = _on_data(job, config) if job.planted is None else _on_planted(job, config, job.planted)
    about = {
        "ladder": job.ladder,
        "rung": job.rung,
        "seed": job.seed,
        "settings": list(job.settings),
        "content": job.content,
    }
    return about | found | {"provenance": provenance()}


def rung_config(job: RungJob) -> RunConfig:
    """Read the recipe of a rung.

    Args:
        job: any.

    Returns:
        it, with what the rung replaces; its content joins the inputs and the fields of the stream.

    Raises:
        ConfigError: as `load_recipe`.
    """
    if not job.content:
        return load_recipe(job.recipe, job.settings, seed=job.seed)
    plain = load_recipe(job.recipe, job.settings, seed=job.seed).data
    names = [f"{CONTENT}{k:02d}" for k in range(job.content)]
    longer = {"data.inputs": plain.inputs}
    for name, stream in (plain.streams or {}).items():
        longer[f"data.streams.{name}.fields"] = stream.fields
    told = [f"{key}={json.dumps([*(had or ()), *names])}" for key, had in longer.items()]
    told.append(f"data.synthetic.content_width={job.content}")
    return load_recipe(job.recipe, (*job.settings, *told), seed=job.seed)


def planted_schema(config: RunConfig) -> BatchSchema:
    """What batches of a planted world hold: the recipe's inputs, one task, one domain.

    Args:
        config: the recipe; its data set is ``synthetic``.

    Returns:
        the schema.

    Raises:
        ConfigError: another data set, or keys of a run that no rung of such a world has.
    """
    train = config.train
    for key, got, is_set in (
        ("passes", train.passes, train.passes > 1),
        ("ema_decay", train.ema_decay, train.ema_decay is not None),
        ("label_delay", train.label_delay, train.label_delay != "none"),
        ("guard.nonfinite", train.guard.nonfinite, train.guard.nonfinite != "stop"),
        ("guard.spike_factor", train.guard.spike_factor, train.guard.spike_factor is not None),
        ("interim.every_steps", train.interim.every_steps, train.interim.every_steps is not None),
    ):
        if is_set:
            raise ConfigError(
                refusal(
                    "gem scaling",
                    f"train.{key}",
                    must="be left out where the world is planted: one pass over examples that are "
                    "drawn, every step is taken, and the weights at the end are scored",
                    got=got,
                    fix='leave it out, or set source = "data"',
                )
            )
    if config.data.dataset != "synthetic":
        raise ConfigError(
            refusal(
                "gem scaling",
                "data.dataset",
                must='be "synthetic" where the world is planted: it names the inputs',
                got=repr(config.data.dataset),
                fix='set it, or source = "data"',
            )
        )
    schema = declared_schema(config, op="gem scaling")
    return schema.model_copy(update={"labels": (CLICK,), "domains": ("all",)})


def flops_of_lengths(
    config: RunConfig, schema: BatchSchema, counts: Mapping[int, int], *, batches: int
) -> int:
    """FLOPs of training on examples of which only the lengths of histories matter.

    Args:
        config: the recipe, whose model is counted.
        schema: of the batches, with one stream or none.
        counts: events of an example -> how many examples have so many.
        batches: that the examples come in: learned queries are projected once in each.

    Returns:
        FLOPs of all of them, exact.
    """
    any_length = next(iter(counts))
    once = 2 * _flops(config, schema, [any_length]) - _flops(config, schema, [any_length] * 2)
    each = sum(
        count * (_flops(config, schema, [events]) - once) for events, count in counts.items()
    )
    return batches * once + each


def planted_flops(job: RungJob) -> float:
    """FLOPs of training an example of a rung, exact, before it is run.

    Args:
        job: of a planted world.

    Returns:
        the mean over its examples.

    Raises:
        ConfigError: as `planted_schema`; a job on a data set; too few examples for a batch.
    """
    config = rung_config(job)
    if job.planted is None:
        raise ConfigError(
            refusal(
                "gem scaling",
                "source",
                must='be "planted" where FLOPs are told before a run',
                got='"data"',
                fix="run it",
            )
        )
    schema, size = planted_schema(config), config.train.batch_examples
    steps = _steps(job, size)
    counts: Counter[int] = Counter()
    for number in range(steps):
        counts.update(history_lengths(job.planted, schema, number, size).tolist())
    return flops_of_lengths(config, schema, counts, batches=steps) / (steps * size)


def _steps(job: RungJob, size: int) -> int:
    if job.examples < size:
        raise ConfigError(
            refusal(
                "gem scaling",
                "examples",
                must=f"fill a batch of {size}",
                got=job.examples,
                fix="ask for more, or lower train.batch_examples",
            )
        )
    return job.examples // size


def _flops(config: RunConfig, schema: BatchSchema, events: list[int]) -> int:
    """Of one batch, by the events of its examples."""
    lengths = {stream.name: events for stream in schema.streams}
    parts = training_flops(config.model, schema, examples=len(events), lengths=lengths)
    return total_flops(parts.values()).total


def _on_planted(job: RungJob, config: RunConfig, planted: PlantedSpec) -> dict[str, Any]:
    schema = planted_schema(config)
    size = config.train.batch_examples
    steps, held_out = _steps(job, size), -(-job.held_out // size)
    counts: Counter[int] = Counter()
    with process_group(job.device) as world:
        _refuse_ranks(world)
        torch.use_deterministic_algorithms(config.train.deterministic)
        drawn = PlantedWorld(planted, schema, world.device)
        clock = StepClock(world.device)
        step = build_step(config, schema, world, total_steps=steps, clock=clock)
        sums: list[Tensor] = []
        began = first = _now(world)
        for number in range(steps):
            if number % _AHEAD == 0:
                _now(world)
            one = drawn.batch(number, size)
            counts.update(drawn.lengths(number, size).tolist())
            sums.append(_sums(step(one.batch, number).p_BA, one))
            if number == 0:
                first = _now(world)  # kernels are compiled by then
        ended = _now(world)
        held = [
            _sums(step.score(one.batch), one)
            for one in (drawn.batch(HELD_OUT_FROM + n, size) for n in range(held_out))
        ]
        # The last third of the run: what came before was scored by a model that knew little.
        late = _ne(torch.stack(sums[-max(1, steps // 3) :]).sum(0))
        parts = torch.stack(sums).tensor_split(min(_PARTS, steps))
        found = _ne(torch.stack(held).sum(0))
        dense = sum(p.numel() for p in step.dense.values())
        tables = sum(source.num_embeddings for source in _tables(schema).values())
        return {
            "ne": {CLICK: found["of_rates"]},
            "ne_of_labels": found["of_labels"],
            "ne_progressive": late["of_rates"],
            "ne_of_rates": found["known"],
            "ne_while_training": [_ne(part.sum(0))["of_rates"] for part in parts],
            "examples": steps * size,
            "held_out": held_out * size,
            "batch_examples": size,
            "events": sum(events * count for events, count in counts.items()),
            "flops_per_example": flops_of_lengths(config, schema, counts, batches=steps)
            / (steps * size),
            "parameters": {
                "dense": dense,
                "tables": tables * config.model.embeddings.embedding_dim,
            },
            "seconds": ended - began,
            "examples_per_s": (steps - 1) * size / (ended - first) if steps > 1 else None,
            "peak_bytes": _peak_bytes(world),
            "device": device_name(world.device),
        }


def _refuse_ranks(world: World) -> None:
    """Every rank would draw the same examples, and write the same files."""
    if world.size > 1:
        raise UnsupportedError(
            refusal(
                "gem scaling",
                "a planted rung",
                must="be trained by one process",
                got=f"{world.size} ranks",
                fix="leave torchrun out; --jobs trains several rungs at once",
            )
        )


def _tables(schema: BatchSchema) -> dict[str, Any]:
    sources = [*schema.ids, *(source for stream in schema.streams for source in stream.ids)]
    return {source.table: source for source in sources}


def _sums(p_BA: Tensor, one: Drawn) -> Tensor:
    """Examples, clicks, expected clicks; log loss, its expectation, and that of the rates."""
    p_B, rate_B = p_BA[:, 0].double().clamp(CLIP, 1.0 - CLIP), one.rates_B.double()
    label_B = one.batch.labels_BA[:, 0].double()

    def loss(target_B: Tensor, said_B: Tensor) -> Tensor:
        return -(target_B * said_B.log() + (1.0 - target_B) * torch.log1p(-said_B))

    parts = (
        torch.ones_like(p_B),
        label_B,
        rate_B,
        loss(label_B, p_B),
        loss(rate_B, p_B),
        loss(rate_B, rate_B.clamp(CLIP, 1.0 - CLIP)),
    )
    return torch.stack([part.sum() for part in parts])


def _ne(sums: Tensor) -> dict[str, float | None]:
    """NE of labels, of rates, and of those who know the rates; None where there is no entropy."""
    count, clicks, expected, of_labels, of_rates, known = sums.tolist()
    seen, entropy = (count * binary_entropy(sum_ / count) for sum_ in (clicks, expected))
    return {
        "of_labels": of_labels / seen if seen else None,
        "of_rates": of_rates / entropy if entropy else None,
        "known": known / entropy if entropy else None,
    }


def _peak_bytes(world: World) -> int | None:
    return torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else None


def _now(world: World) -> float:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter()


def _on_data(job: RungJob, config: RunConfig) -> dict[str, Any]:
    """Train as `gem train` does, in a folder of its own, and read what the run has left."""
    # Here: it reads files and draws progress, which nothing planted needs.
    from gem.train.loop import train

    summary = train(config, job.run, resume=job.run.exists())
    flops = summary["efficiency"]["flops_per_example"]
    tested = {task: found["ne"] for task, found in summary["test"].items()}
    return {
        "ne": tested,
        "auc": {task: found["auc"] for task, found in summary["test"].items()},
        "dataset": summary["dataset"],
        "examples": summary["examples"],
        "flops_per_example": flops,
        "seconds": None,
        "examples_per_s": summary["throughput"]["examples_per_s"],
        "device": summary["device"],
    }
