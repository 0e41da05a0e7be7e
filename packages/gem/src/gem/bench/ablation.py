"""`gem bench ablation`: what each element of a model is worth, by training without it.

Every variant is trained with every seed through the same function as ``gem train`` and compared
with the recipe itself on the same test rows. A finished run is not trained again, and one that was
broken off is continued.
"""

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gem.bench.variants import BASE, Variant
from gem.children import Children, threads_of
from gem.config import RunConfig, load_recipe
from gem.data.prepare import provide
from gem.report.paired import Losses, paired_bootstraps, task_losses
from gem.train.given_versions import with_versions
from gem.train.loop import train
from gem.train.run import DATA_ROOT
from gem.train.run_folder import check_folder
from gem_opkit.bench import device_folder, provenance, write_rows
from gem_opkit.errors import ConfigError, DataError, refusal

_SUMMARY = "summary.json"
_SPLITS = ("valid", "test")
_METRICS = ("ne", "auc", "calibration")
_LOG_CHARACTERS = 600


@dataclass(frozen=True, slots=True)
class Ablation:
    """What is trained.

    Attributes:
        recipe: name or file of the recipe.
        variants: the recipe itself first.
        settings: ``KEY=VALUE`` texts over the recipe, in every variant.
        seeds: of every variant, at least one.
        out: folder of all runs.
        jobs: runs at the same time, each a process of its own if there are several.
        data_root: where data sets lie that the recipe names no folder for.
    """

    recipe: str
    variants: tuple[Variant, ...]
    settings: tuple[str, ...]
    seeds: tuple[int, ...]
    out: Path
    jobs: int = 1
    data_root: Path = DATA_ROOT

    def config(self, variant: Variant, seed: int) -> RunConfig:
        """The resolved config of a run."""
        return load_recipe(self.recipe, self._settings(variant), seed=seed)

    def folder(self, variant: Variant, seed: int) -> Path:
        """Folder of a run."""
        return self.out / variant.folder / f"seed-{seed}"

    def command(self, variant: Variant, seed: int) -> list[str]:
        """The command line that trains a run alone."""
        words = [sys.executable, "-m", "gem", "train", self.recipe, "--seed", str(seed)]
        for text in self._settings(variant):
            words += ["--set", text]
        return [*words, "--out", str(self.folder(variant, seed)), "--resume"]

    def _settings(self, variant: Variant) -> list[str]:
        return [*self.settings, *variant.settings, "train.predictions=true"]


def seeds_of(text: str) -> tuple[int, ...]:
    """Read seeds.

    Args:
        text: whole numbers with commas between them.

    Returns:
        the seeds.

    Raises:
        ConfigError: something else, or a seed twice.
    """
    words = [word.strip() for word in text.split(",")]
    seeds = tuple(int(word) for word in words if word.isascii() and word.isdigit())
    if len(seeds) != len(words) or len(set(seeds)) != len(seeds) or max(seeds) >= 2**63:
        raise ConfigError(
            refusal(
                "gem bench ablation",
                "--seeds",
                must="be different whole numbers with commas between them",
                got=repr(text),
                fix="give such as 1,2,3",
            )
        )
    return seeds


def run_ablation(asked: Ablation, told: Callable[[str], None]) -> list[dict[str, Any]]:
    """Train what is not trained yet, and compare.

    Args:
        asked: what to train.
        told: is given a line about each run.

    Returns:
        a row for each variant and task, in order, as `table` shows them. Where a task's test rows
        cannot be compared, as without labels or with labels of one kind, ``ne_minus_base`` is None
        and ``not_compared`` says why.

    Raises:
        ConfigError: a variant that the recipe does not allow, or a folder of other runs.
        DataError: a run failed.
        Interrupted: a signal came amid a run of this process; it goes on when called again.
    """
    wanted = [(variant, seed) for variant in asked.variants for seed in asked.seeds]
    configs = {(v.name, s): _config(asked, v, s) for v, s in wanted}  # refused before any run
    for variant, seed in wanted:
        config = configs[variant.name, seed]
        check_folder(config, asked.folder(variant, seed), resume=True)
    missing = [(v, s) for v, s in wanted if not (asked.folder(v, s) / _SUMMARY).is_file()]

    children = Children()

    def one(work: tuple[Variant, int]) -> None:
        variant, seed = work
        if asked.jobs == 1:
            folder = asked.folder(variant, seed)
            config = configs[variant.name, seed]
            train(config, folder, resume=True, data_root=asked.data_root)
        else:
            _train_apart(asked, variant, seed, children)
        told(f"{variant.name}, seed {seed}: trained")

    told(f"{len(wanted)} runs, {len(missing)} of them to be trained")
    for variant, seed in missing:  # made once, and not by several runs at a time
        provide(configs[variant.name, seed].data, asked.data_root)
    if asked.jobs == 1:  # here, as a run hears Ctrl-C in the main thread alone
        for work in missing:
            one(work)
    else:
        with threads_of(children, asked.jobs) as pool:
            list(pool.map(one, missing))
    return compared(asked, told)


def _config(asked: Ablation, variant: Variant, seed: int) -> RunConfig:
    try:
        return with_versions(asked.config(variant, seed))  # as the run writes it down
    except ConfigError as fault:
        if variant.name == BASE:
            raise
        raise ConfigError(f"variant {variant.name!r}: {fault}; --only trains others") from None


def _train_apart(asked: Ablation, variant: Variant, seed: int, children: Children) -> None:
    command = asked.command(variant, seed)
    done = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with children.running(done):
        _, said = done.communicate()
    if done.returncode or not (asked.folder(variant, seed) / _SUMMARY).is_file():
        raise DataError(
            refusal(
                "gem bench ablation",
                f"{variant.name}, seed {seed}",
                must="train to its end",
                got=f"exit code {done.returncode}: {said.strip()[-_LOG_CHARACTERS:]}",
                fix="mend it and run the command again; finished runs are kept",
            )
        )


def compared(asked: Ablation, told: Callable[[str], None]) -> list[dict[str, Any]]:
    """Compare finished runs with those of the recipe itself.

    Args:
        asked: variants without a run of each seed are left out.
        told: is given a line about each of these.

    Returns:
        as `run_ablation`.

    Raises:
        ConfigError: a finished run has other settings than those that are asked for, which its row
            would name.
        DataError: the recipe itself is not finished with every seed.
    """
    summaries: dict[str, list[dict[str, Any]]] = {}
    for variant in asked.variants:
        folders = [asked.folder(variant, seed) for seed in asked.seeds]
        missing = [str(f) for f in folders if not (f / _SUMMARY).is_file()]
        if missing and variant.name == BASE:
            raise DataError(
                refusal(
                    "gem bench ablation",
                    "the recipe itself",
                    must="be trained with every seed",
                    got=f"no {_SUMMARY} in {', '.join(missing)}",
                    fix="train it first: leave --finished out",
                )
            )
        if missing:
            told(f"{variant.name}: left out, {len(missing)} of {len(folders)} runs not finished")
            continue
        for seed, folder in zip(asked.seeds, folders, strict=True):
            check_folder(_config(asked, variant, seed), folder, resume=True)
        own = [json.loads((f / _SUMMARY).read_text(encoding="utf-8")) for f in folders]
        summaries[variant.name] = own
    there = [variant for variant in asked.variants if variant.name in summaries]
    gaps: dict[tuple[str, str], dict[str, Any] | str] = {}
    for task in summaries[BASE][0]["test"]:
        gaps |= _gaps(asked, there, task, told)
    return [
        _row(asked, variant, task, summaries[variant.name], gaps.get((variant.name, task)))
        for variant in there
        for task in summaries[BASE][0]["test"]
    ]


def _gaps(
    asked: Ablation, there: Sequence[Variant], task: str, told: Callable[[str], None]
) -> dict[tuple[str, str], dict[str, Any] | str]:
    """Each variant against the recipe itself in a task, or why that cannot be said."""
    others = [variant for variant in there if variant.name != BASE]
    if not others:
        return {}
    (base,) = (variant for variant in there if variant.name == BASE)
    try:
        found = paired_bootstraps(
            [_losses(asked, variant, task) for variant in others], _losses(asked, base, task)
        )
    except DataError as fault:
        told(f"{task}: nothing compared: {fault}")
        return {(variant.name, task): str(fault) for variant in others}
    return {(variant.name, task): gap for variant, gap in zip(others, found, strict=True)}


def _losses(asked: Ablation, variant: Variant, task: str) -> list[Losses]:
    return [task_losses(asked.folder(variant, seed), task) for seed in asked.seeds]


def _row(
    asked: Ablation,
    variant: Variant,
    task: str,
    summaries: Sequence[dict[str, Any]],
    against: dict[str, Any] | str | None,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "bench": "ablation",
        "case": f"{summaries[0]['recipe']}: {variant.name}, {task}",
        "recipe": summaries[0]["recipe"],
        "variant": variant.name,
        "element": variant.element,
        "settings": [*asked.settings, *variant.settings],
        "task": task,
        "seeds": list(asked.seeds),
        "device": summaries[0]["device"],
        "jobs": asked.jobs,
        "flops_per_example": summaries[0]["efficiency"]["flops_per_example"],
        "examples_per_s": _mean([s["throughput"]["examples_per_s"] for s in summaries]),
        "ne_minus_base": None if isinstance(against, str) else against,
    }
    if isinstance(against, str):
        row["not_compared"] = against
    for split in _SPLITS:
        if split not in summaries[0]:
            continue
        found = {key: [s[split][task][key] for s in summaries] for key in _METRICS}
        row[split] = {key: _mean(values) for key, values in found.items()}
        row[f"{split}_half_range"] = {key: _half_range(values) for key, values in found.items()}
    return row


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _half_range(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return (max(known) - min(known)) / 2 if len(known) == len(values) else None


def write_ablation(rows: Sequence[dict[str, Any]], out: Path, results: Path | None) -> None:
    """Write the rows and the table.

    Args:
        rows: from `run_ablation`.
        out: folder of the runs; gets ``ablation.json`` and ``ablation.md``.
        results: folder of all results, whose rows of the same case are replaced; None for none.
    """
    origin = provenance()
    kept = [{**row, **origin} for row in rows]
    text = json.dumps(kept, indent=1, allow_nan=False)
    (out / "ablation.json").write_text(text + "\n", encoding="utf-8")
    (out / "ablation.md").write_text(table(rows), encoding="utf-8")
    if results is not None:
        write_rows(results / device_folder(rows[0]["device"]) / "ablation.jsonl", kept)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown, one table for each task.

    Args:
        rows: from `run_ablation`, or as they were written.

    Returns:
        text; "better" and "worse" stand only where the 95 % interval leaves out 0. What cannot be
        compared is "n/a", with the reason below the table.
    """
    head = (
        "| variant | valid NE | test NE | test AUC | NE minus base, 95 % | it is "
        "| MFLOP an example | examples/s |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    parts = []
    for task in dict.fromkeys(row["task"] for row in rows):
        lines = [f"{task}:\n\n{head}"]
        own = [row for row in rows if row["task"] == task]
        lines += [_line(row) for row in own]
        reasons = dict.fromkeys(row["not_compared"] for row in own if "not_compared" in row)
        lines += [f"\nNot compared: {reason}." for reason in reasons]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _line(row: dict[str, Any]) -> str:
    def metric(split: str, key: str) -> str:
        value, half = row[split][key], row[f"{split}_half_range"][key]
        if value is None or half is None:
            return "n/a"
        spread = f" ± {_figure(half)}" if len(row["seeds"]) > 1 else ""
        return _figure(value) + spread

    gap, against, verdict = row["ne_minus_base"], "", ""
    if "not_compared" in row:
        against = "n/a"
    if gap is not None:
        shown = [_figure(gap[key], sign=True) for key in ("ne_difference", "low_95", "high_95")]
        against = f"{shown[0]} ({shown[1]} to {shown[2]})"
        verdict = "worse" if gap["low_95"] > 0 else "better" if gap["high_95"] < 0 else "neither"
    flops, speed = row["flops_per_example"], row["examples_per_s"]
    cells = [
        row["variant"],
        metric("valid", "ne") if "valid" in row else "n/a",
        metric("test", "ne"),
        metric("test", "auc"),
        against,
        verdict,
        f"{flops / 1e6:.2f}",
        "n/a" if speed is None else f"{speed:,.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _figure(value: float, *, sign: bool = False) -> str:
    # A zero before the point is left out, and no digit of a larger number.
    return re.sub(r"^([+-]?)0\.", r"\1.", f"{value:{'+' if sign else ''}.4f}")
