"""`gem stages`: train an upstream model of users and a ranker with and without its embeddings.

For each seed: the upstream model in one pass; its embeddings in time order, each made by a
checkpoint that had learned from nothing later; the ranker without them and with them. What has
ended is kept, so the command goes on where it was stopped. Gains are told of the test rows:

    transfer ratio = NE that the ranker gains / NE that the upstream model gains

Source: LLaTTE (arXiv:2601.20083), where about half of an upstream gain reaches the ranker.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gem.children import Children, threads_of
from gem.config import load_recipe
from gem.data.embedding_files import MANIFEST
from gem.data.prepare import provide
from gem.report.paired import paired_bootstrap, task_losses
from gem.stages.spec import StagesSpec
from gem.train.given_versions import with_versions
from gem.train.run import DATA_ROOT
from gem.train.run_folder import check_folder
from gem_opkit.bench import device_folder, provenance, write_rows
from gem_opkit.errors import DataError, refusal

_SUMMARY = "summary.json"
_LOG_CHARACTERS = 600
EMBEDDING = "upstream"
Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Stages:
    """What is trained, and where.

    Attributes:
        spec: both stages.
        settings: ``KEY=VALUE`` texts over both recipes.
        out: folder of all runs.
        jobs: runs at the same time.
    """

    spec: StagesSpec
    settings: tuple[str, ...]
    out: Path
    jobs: int = 1

    @property
    def has_base(self) -> bool:
        """Whether gains are counted from a smaller upstream model."""
        return bool(self.spec.upstream.base_settings)

    def folder(self, kind: str, seed: int) -> Path:
        """Folder of a run or of embeddings."""
        return self.out / f"{kind}-{seed}"

    def upstream_settings(self, kind: str) -> tuple[str, ...]:
        """Settings of an upstream model: ``upstream`` or ``base``."""
        own = self.spec.upstream
        more = own.base_settings if kind == "base" else ()
        return (*own.settings, *more, *self.settings)

    def ranker_settings(self, name: str, kind: str | None, seed: int) -> tuple[str, ...]:
        """Settings of a ranker that reads the embeddings of such a model, or none."""
        own = self.spec.rankers[name]
        texts = [*own.settings, *self.settings, "train.predictions=true"]
        if kind is not None:
            folder = json.dumps(str(self.folder(f"embeddings-of-{kind}", seed)))
            texts.append(f"data.user_embeddings.{EMBEDDING}.folder={folder}")
            if own.max_age_hours is not None:
                key = f"data.user_embeddings.{EMBEDDING}.max_age_hours"
                texts.append(f"{key}={own.max_age_hours}")
        return tuple(texts)


def run_stages(asked: Stages, told: Told) -> dict[str, Any]:
    """Train what is not trained yet, and compare.

    Args:
        asked: what to train.
        told: is given a line about each run.

    Returns:
        ``{name, seeds, upstream_recipe, dataset, device, gains_from, rankers -> {recipe, settings,
        embeddings, tasks -> {ne, ne_with_minus_without, upstream_gain, ranker_gain,
        transfer_ratio, why_no_ratio}}}``; with a smaller upstream model a task also has
        ``ne_with_minus_with_base``, the paired interval of the ranker's gain.

    Raises:
        DataError: a run failed.
    """
    spec = asked.spec
    kinds = ("upstream", "base") if asked.has_base else ("upstream",)
    asked.out.mkdir(parents=True, exist_ok=True)
    for recipe, texts in (
        (spec.upstream.recipe, asked.upstream_settings("upstream")),
        *((r.recipe, (*r.settings, *asked.settings)) for r in spec.rankers.values()),
    ):  # made once, and not by several runs at a time
        provide(load_recipe(recipe, texts).data, DATA_ROOT)
    children = Children()

    def upstream(work: tuple[str, int]) -> None:
        _upstream(asked, *work, children, told)

    def ranker(work: tuple[str, str | None, int]) -> None:
        _, kind, seed = work
        if kind is not None:
            made[kind, seed].result()
        _ranker(asked, work, children, told)

    names = tuple(spec.rankers)
    with threads_of(children, asked.jobs) as pool:
        # Whoever waits for an upstream model stands behind it, so that one thread will do.
        made = {(k, s): pool.submit(upstream, (k, s)) for k in kinds for s in spec.seeds}
        wanted = [(name, kind, s) for kind in (None, *kinds) for s in spec.seeds for name in names]
        list(pool.map(ranker, wanted))
    return compared(asked)


def _upstream(asked: Stages, kind: str, seed: int, children: Children, told: Told) -> None:
    own, run = asked.spec.upstream, asked.folder(kind, seed)
    _train(own.recipe, asked.upstream_settings(kind), seed, run, children, told)
    out = asked.folder(f"embeddings-of-{kind}", seed)
    if (out / MANIFEST).is_file():
        return
    words = ["predict", str(run), "--embeddings", "--every", repr(own.every_hours)]
    if own.refresh_on is not None:
        words += ["--refresh-on", own.refresh_on]
    _run([*words, "--out", str(out)], out / MANIFEST, children)
    told(f"{out}: written")


def _ranker(
    asked: Stages, work: tuple[str, str | None, int], children: Children, told: Told
) -> None:
    name, kind, seed = work
    run = asked.folder(_ranker_name(name, kind), seed)
    settings = asked.ranker_settings(name, kind, seed)
    _train(asked.spec.rankers[name].recipe, settings, seed, run, children, told)


def _ranker_name(name: str, kind: str | None) -> str:
    return f"{name}-without" if kind is None else f"{name}-with-{kind}"


def _train(
    recipe: str,
    settings: Sequence[str],
    seed: int,
    folder: Path,
    children: Children,
    told: Told,
) -> None:
    if (folder / _SUMMARY).is_file():
        config = with_versions(load_recipe(recipe, settings, seed=seed))
        check_folder(config, folder, resume=True)  # refused if it is a run of other settings
        told(f"{folder}: was trained before")
        return
    words = ["train", recipe, "--seed", str(seed)]
    for text in settings:
        words += ["--set", text]
    _run([*words, "--out", str(folder), "--resume"], folder / _SUMMARY, children)
    told(f"{folder}: trained")


def _run(words: Sequence[str], result: Path, children: Children) -> None:
    command = [sys.executable, "-m", "gem", *words]
    done = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with children.running(done):
        _, said = done.communicate()
    if done.returncode or not result.is_file():
        raise DataError(
            refusal(
                "gem stages",
                f"gem {words[0]} {words[1]}",
                must=f"end with {result}",
                got=f"exit code {done.returncode}: {said.strip()[-_LOG_CHARACTERS:]}",
                fix="mend it and run the command again; what has ended is kept",
            )
        )


def compared(asked: Stages) -> dict[str, Any]:
    """Compare finished runs.

    Args:
        asked: what has been trained.

    Returns:
        as `run_stages`.
    """
    spec = asked.spec

    def summaries(kind: str) -> list[dict[str, Any]]:
        paths = [asked.folder(kind, seed) / _SUMMARY for seed in spec.seeds]
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    upstream = summaries("upstream")
    below = summaries("base") if asked.has_base else None
    rankers: dict[str, Any] = {}
    for name in spec.rankers:
        runs = _Runs(
            upstream,
            below,
            summaries(_ranker_name(name, None)),
            summaries(_ranker_name(name, "upstream")),
            summaries(_ranker_name(name, "base")) if asked.has_base else None,
        )
        found = {task: _compared(asked, name, runs, task) for task in runs.plain[0]["test"]}
        embeddings = [summary["user_embeddings"] for summary in runs.reading]
        rankers[name] = {
            "recipe": runs.plain[0]["recipe"],
            "settings": list(spec.rankers[name].settings),
            "tasks": found,
            "embeddings": embeddings,
        }
    return {
        "name": spec.name,
        "seeds": list(spec.seeds),
        "upstream_recipe": upstream[0]["recipe"],
        "dataset": upstream[0]["dataset"],
        "device": upstream[0]["device"],
        "gains_from": "a smaller upstream model" if below is not None else "no upstream model",
        "rankers": rankers,
    }


@dataclass(frozen=True, slots=True)
class _Runs:
    """Summaries of one ranker and of what it reads, a seed each."""

    upstream: list[dict[str, Any]]
    below: list[dict[str, Any]] | None
    plain: list[dict[str, Any]]
    reading: list[dict[str, Any]]
    reading_below: list[dict[str, Any]] | None


def _compared(asked: Stages, name: str, runs: _Runs, task: str) -> dict[str, Any]:
    ne = {"ranker_without": _ne(runs.plain, task), "ranker_with": _ne(runs.reading, task)}
    if task in runs.upstream[0]["test"]:
        ne["upstream"] = _ne(runs.upstream, task)
        below = runs.below
        ne["upstream_base"] = [1.0] * len(runs.plain) if below is None else _ne(below, task)
    if runs.reading_below is not None:
        ne["ranker_with_base"] = _ne(runs.reading_below, task)
    reading = _losses(asked, _ranker_name(name, "upstream"), task)
    gaps: dict[str, str | None] = {"ne_with_minus_without": None}
    if runs.reading_below is not None:
        gaps["ne_with_minus_with_base"] = "base"
    return {
        "ne": {key: _told(values) for key, values in ne.items()},
        **{
            key: paired_bootstrap(reading, _losses(asked, _ranker_name(name, other), task))
            for key, other in gaps.items()
        },
        **_transfer(ne, has_base=runs.below is not None),
    }


def _losses(asked: Stages, kind: str, task: str) -> list[Any]:
    return [task_losses(asked.folder(kind, seed), task) for seed in asked.spec.seeds]


def _ne(summaries: Sequence[dict[str, Any]], task: str) -> list[float | None]:
    return [summary["test"][task]["ne"] for summary in summaries]


def _told(values: Sequence[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return {"mean": None, "half_range": None, "seeds": list(values)}
    half = (max(known) - min(known)) / 2
    return {"mean": statistics.fmean(known), "half_range": half, "seeds": known}


def _transfer(ne: dict[str, list[float | None]], *, has_base: bool) -> dict[str, Any]:
    """Gains and their ratio, or why there is none."""
    none = {"upstream_gain": None, "ranker_gain": None, "transfer_ratio": None}
    before = ne["ranker_with_base" if has_base else "ranker_without"]
    ranker = _gain(before, ne["ranker_with"])
    if "upstream" not in ne:
        return none | {"ranker_gain": ranker, "why_no_ratio": "the upstream model lacks the task"}
    upstream = _gain(ne["upstream_base"], ne["upstream"])
    if upstream is None or ranker is None:
        return none | {"why_no_ratio": "an NE is not defined on the test rows"}
    gains = {"upstream_gain": upstream, "ranker_gain": ranker}
    if upstream <= 0:
        why = "the upstream model gains nothing over what it is compared with"
        return none | gains | {"why_no_ratio": why}
    return gains | {"transfer_ratio": ranker / upstream, "why_no_ratio": None}


def _gain(before: Sequence[float | None], after: Sequence[float | None]) -> float | None:
    pairs = list(zip(before, after, strict=True))
    found = [b - a for b, a in pairs if b is not None and a is not None]
    return statistics.fmean(found) if len(found) == len(pairs) else None


def write_stages(found: dict[str, Any], asked: Stages, results: Path | None) -> None:
    """Write what was found, beside the runs.

    Args:
        found: from `run_stages`.
        asked: says where.
        results: folder of all results, whose rows of the same case are replaced; None for none.
    """
    origin = provenance()
    text = json.dumps({**found, **origin}, indent=1, allow_nan=False)
    (asked.out / "stages.json").write_text(text + "\n", encoding="utf-8")
    (asked.out / "stages.md").write_text(table(found), encoding="utf-8")
    if results is not None:
        rows = [
            {
                "bench": "stages",
                "case": f"{found['name']}: {name}, {task}",
                "ranker": name,
                "task": task,
                **{key: value for key, value in found.items() if key != "rankers"},
                **{key: value for key, value in own.items() if key != "tasks"},
                **of_task,
                **origin,
            }
            for name, own in found["rankers"].items()
            for task, of_task in own["tasks"].items()
        ]
        write_rows(results / device_folder(found["device"]) / "stages.jsonl", rows)


def table(found: dict[str, Any]) -> str:
    """What was found as Markdown.

    Args:
        found: from `run_stages`.

    Returns:
        one row a ranker and task.
    """
    lines = [
        "| ranker | task | upstream NE | ranker without | ranker with | with minus without, 95 % "
        "| upstream gain | ranker gain | transfer ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    pairs = [(n, t, o) for n, r in found["rankers"].items() for t, o in r["tasks"].items()]
    for name, task, own in pairs:
        gap = own["ne_with_minus_without"]
        against = f"{gap['ne_difference']:+.4f} ({gap['low_95']:+.4f} to {gap['high_95']:+.4f})"
        cells = [
            name,
            task,
            _cell(own["ne"].get("upstream")),
            _cell(own["ne"]["ranker_without"]),
            _cell(own["ne"]["ranker_with"]),
            against,
            *(
                "n/a" if own[key] is None else f"{own[key]:.4f}"
                for key in ("upstream_gain", "ranker_gain")
            ),
            "n/a" if own["transfer_ratio"] is None else f"{own['transfer_ratio']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\nGains are counted from {found['gains_from']}.\n"


def _cell(values: dict[str, Any] | None) -> str:
    if values is None or values["mean"] is None:
        return "n/a"
    spread = f" ± {values['half_range']:.4f}" if len(values["seeds"]) > 1 else ""
    return f"{values['mean']:.4f}{spread}"
