"""`diagnostics.json`: what a report shows of a run and the log of its steps does not hold.

Written when a run begins, with every checkpoint, and at its end, each time whole. `docs/report.md`
describes every key. All but ``process`` depends on config, data and the number of ranks alone: a
run that was stopped and resumed leaves what an unbroken one leaves. What is counted of the data is
the same on any number of ranks. ``process`` says how the run was started and how long it took.
"""

import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from gem import __version__
from gem.train.clock import StepClock
from gem.train.metrics import MetricBlock
from gem.train.reliability import reliability
from gem.train.run import Run, reduced_counters
from gem.train.summary import DIAGNOSTICS_FILE, write_json
from gem.train.table_counts import counter_names, counts_by_table
from gem.train.table_facts import table_facts

FORMAT = 1
_VERSIONS_OF = ("torch", "triton", "numpy", "pyarrow", "pydantic")
_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


class Diagnostics:
    """Collects and writes the record of one run. Every rank makes one; the first one writes.

    Args:
        run: at the step at which this process begins.
    """

    def __init__(self, run: Run) -> None:
        self._path = run.folder / DIAGNOSTICS_FILE
        self._process = _process_of(self._path) if run.world.is_first else {}
        self._process["starts"] = [
            *self._process.get("starts", ())[-99:],  # of a run that fails again and again
            {
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "step": run.state.step,
                "command": command_line(sys.argv),
                "ranks": run.world.size,
                "versions": versions(),
            },
        ]
        self._constant = {
            "total_steps": run.total_steps,
            "passes": run.spec.passes,
            "data": _data_facts(run),
            "model": {"kind": run.config.model.kind, "parameters": _parameters(run)},
        }

    def write(self, run: Run, held_out: Mapping[str, MetricBlock] | None = None) -> None:
        """Write the record as of now. Every rank has to call this.

        Args:
            run: after some step.
            held_out: split -> metric state, once the run has been evaluated.
        """
        histories = run.state.histories.merged(run.world).counts
        tables = table_facts(
            run.step.model, run.reader.schema, run.step.optimizers.get("tables"), run.world
        )
        counters = reduced_counters(run.state.counters, run.world, counter_names(run.step.model))
        for table, counts in counts_by_table(run.step.model, counters).items():
            tables[table]["in_training"] = counts
        if not run.world.is_first:
            return
        periods = {"progressive": run.state.metrics.lifetime, **(held_out or {})}
        if run.clock.step_ms:
            self._process |= _timing(run.clock)
        if held_out is not None:
            self._process["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(
            self._path,
            {
                "format": FORMAT,
                "finished": held_out is not None,
                "step": run.state.step,
                **self._constant,
                "tables": tables,
                "histories": None
                if histories is None
                else {name: _sparse(counts) for name, counts in histories.items()},
                "reliability": {name: reliability(block) for name, block in periods.items()},
                "process": self._process,
            },
        )


def versions() -> dict[str, str]:
    """Versions of Python, the system and the packages that decide what a run computes."""
    found = {
        "gem-trainer": __version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
    }
    for name in _VERSIONS_OF:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def command_line(argv: Sequence[str]) -> str:
    """The words that started this process, as a person types them.

    Args:
        argv: as in ``sys.argv``.

    Returns:
        ``gem ...``, or only the name of another program, whose words mean nothing here.
    """
    program = Path(argv[0]) if argv else Path()
    if program.name in ("gem", "gem.exe") or program.parts[-2:] == ("gem", "__main__.py"):
        return shlex.join(["gem", *argv[1:]])
    return f"from Python, by {program.name or 'an interactive session'}"


def _process_of(path: Path) -> dict[str, Any]:
    """What earlier processes of the run have left; nothing where they left nothing readable."""
    try:
        process = json.loads(path.read_text(encoding="utf-8"))["process"]
        return dict(process) if isinstance(process["starts"], list) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _data_facts(run: Run) -> dict[str, Any]:
    spec, schema, reader = run.reader.dataset, run.reader.schema, run.reader
    splits = {}
    for split in spec.splits:
        times = reader.times_ms(split.name)
        splits[split.name] = {
            "examples": len(times),
            "first_ms": int(times[0]) if len(times) else None,
            "last_ms": int(times[-1]) if len(times) else None,
        }
    return {
        "name": spec.name,
        "description": spec.description,
        "terms": spec.terms,
        "fingerprint": run.dataset,
        "labels": {label.name: label.description for label in spec.examples.labels},
        "domains": list(schema.domains),
        "splits": splits,
        "streams": {
            stream.name: {
                "max_events": stream.max_events,
                "ids": [source.name for source in stream.ids],
                "numbers": list(stream.numbers),
            }
            for stream in schema.streams
        },
        "ids": [source.name for source in schema.ids],
        "numbers": list(schema.numbers),
    }


def _parameters(run: Run) -> dict[str, Any]:
    parts = {name: 0 for name, _ in run.step.model.named_children()} | {"own": 0}
    for name, size in run.step.sizes.items():
        parts[name.partition(".")[0] if "." in name else "own"] += size
    return {
        "dense": sum(run.step.sizes.values()),
        "tables": sum(spec.num_embeddings * spec.embedding_dim for spec in run.step.lookups.specs),
        "dense_by_part": {n: c for n, c in parts.items() if c},
    }


def _timing(clock: StepClock) -> dict[str, Any]:
    """Where the time of this process went; its steps are those since it began."""
    step_ms = np.asarray(clock.step_ms, dtype=np.float64)
    found = np.quantile(step_ms, list(_QUANTILES.values()))
    return {
        "steps_timed": len(step_ms),
        "seconds": dict(clock.seconds),
        "step_ms": {n: float(v) for n, v in zip(_QUANTILES, found, strict=True)},
    }


def _sparse(counts: np.ndarray) -> list[list[int]]:
    """Pairs of a length and its number of examples, without those of no examples."""
    lengths = np.flatnonzero(counts)
    return np.stack([lengths, counts[lengths]], axis=1).tolist()
