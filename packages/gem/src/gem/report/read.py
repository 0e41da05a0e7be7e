"""A run's folder as a report reads it: whatever is there, and a sentence on what is not.

Unfinished runs, runs of older versions and files that were cut short are normal here. Only a folder
without a readable `config.toml` is refused. Imports no torch.
"""

import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gem.train.run_log import METRICS_FILE
from gem.train.summary import DIAGNOSTICS_FILE, SUMMARY_FILE
from gem_opkit.errors import ConfigError, refusal

CONFIG_FILE = "config.toml"
PERIODS = ("progressive", "valid", "test")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run has left.

    Attributes:
        folder: of the run.
        config: `config.toml`, as it stands there.
        config_text: the same as text.
        rows: rows of training in `metrics.jsonl`, in order of steps.
        summary: `summary.json`, or what the log holds of it; may lack any key.
        diagnostics: `diagnostics.json`; empty where there is none.
        finished: whether the run has written its summary.
        missing: sentences on what is not there and how to get it.
    """

    folder: Path
    config: dict[str, Any]
    config_text: str
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    diagnostics: dict[str, Any]
    finished: bool
    missing: tuple[str, ...]

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return str(self.config.get("name", self.folder.name))

    @property
    def seed(self) -> str:
        """The seed, as text."""
        return str(self.config.get("seed", "?"))

    @property
    def step(self) -> int:
        """The newest step that is known of."""
        last = number(pick(self.rows[-1], "step")) if self.rows else None
        found = (last, number(self.summary.get("steps")), number(self.diagnostics.get("step")))
        return int(max(value or 0 for value in found))

    @property
    def dataset(self) -> str:
        """Name of the data set."""
        return str(
            self.summary.get("dataset")
            or pick(self.diagnostics, "data", "name")
            or pick(self.config, "data", "dataset")
            or "unknown"
        )

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the data set; None where none is recorded."""
        found = pick(self.diagnostics, "data", "fingerprint")
        return found if isinstance(found, str) else _fingerprint_of_checkpoints(self.folder)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, in order."""
        for found in (*(self.summary.get(p) for p in PERIODS), pick(self.rows, -1, "lifetime")):
            if isinstance(found, dict) and found:
                return tuple(found)
        return ()


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder.

    Args:
        folder: of the run.

    Returns:
        Everything that it holds.

    Raises:
        ConfigError: it is no run.
    """
    path = folder / CONFIG_FILE
    try:
        text = path.read_text(encoding="utf-8-sig")
        config = tomllib.loads(text)
    except (OSError, ValueError) as fault:  # no file, not UTF-8, not TOML
        there = path.is_file()
        raise ConfigError(
            refusal(
                "gem report",
                "RUN",
                must=f"be the folder of a run, with its {CONFIG_FILE}",
                got=f"{path}, which cannot be read ({fault})" if there else str(folder),
                fix="give the folder that gem train wrote",
            )
        ) from None
    missing: list[str] = []
    rows, held_out = _log(folder / METRICS_FILE, missing)
    summary = _json(folder / SUMMARY_FILE)
    finished = bool(summary)
    if not finished:
        missing.append(
            f"The run has not finished: there is no {SUMMARY_FILE}. Results are those of the log "
            f"so far; speed and memory are not known. gem train --resume continues it."
        )
        summary = _summary_so_far(rows, held_out)
    diagnostics = _json(folder / DIAGNOSTICS_FILE)
    if not diagnostics:
        missing.append(
            f"There is no {DIAGNOSTICS_FILE}: the run is of an older version, or the file was "
            f"removed. Calibration by prediction, history lengths, tables, time by part and "
            f"versions are not known."
        )
    elif diagnostics.get("histories", 0) is None:
        missing.append(
            "History lengths are not known: the run began with a version that did not count them."
        )
    return RunRecord(folder, config, text, rows, summary, diagnostics, finished, tuple(missing))


def pick(value: Any, *path: str | int) -> Any:
    """Follow keys and indices into JSON of which any part may be missing.

    Args:
        value: where to begin.
        path: keys of tables, indices of arrays.

    Returns:
        What is there, or None.
    """
    for key in path:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and -len(value) <= key < len(value):
            value = value[key]
        else:
            return None
    return value


def number(value: Any) -> float | None:
    """A finite number, or None for anything else.

    Args:
        value: of JSON.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def table(value: Any) -> dict[str, Any]:
    """A table of JSON, or an empty one for anything else.

    Args:
        value: of JSON.
    """
    return value if isinstance(value, dict) else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        return table(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _log(path: Path, missing: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of training, and split -> metrics of the rows of evaluations at the end."""
    rows: list[dict[str, Any]] = []
    held_out: dict[str, Any] = {}
    wrong = 0
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        lines = []
    for line in lines:
        try:
            row = table(json.loads(line))
        except ValueError:
            row = {}
        if number(row.get("step")) is None:
            wrong += 1
        elif row.get("interim"):
            pass  # amid the training, and perhaps of a few batches: no result of the run
        elif isinstance(row.get("split"), str):
            held_out[row["split"]] = row.get("metrics")
        else:
            rows.append(row)
    if wrong:
        lines_left_out = "A line" if wrong == 1 else f"{wrong} lines"
        missing.append(f"{lines_left_out} of {METRICS_FILE} cannot be read and is left out.")
    if not rows:
        missing.append(
            f"{METRICS_FILE} has no row of training yet, so there are no curves. A row comes "
            f"every train.log_every_steps."
        )
    return sorted(rows, key=lambda row: row["step"]), held_out


def _summary_so_far(rows: list[dict[str, Any]], held_out: dict[str, Any]) -> dict[str, Any]:
    return {"progressive": table(pick(rows, -1, "lifetime")), **held_out}


def _fingerprint_of_checkpoints(folder: Path) -> str | None:
    for path in sorted(folder.glob("checkpoints/step-*/manifest.json")):
        found = _json(path).get("dataset")
        if isinstance(found, str):
            return found
    return None
