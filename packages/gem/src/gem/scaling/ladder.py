"""Climb: train every rung once, predict the last one before it is run, and write it all down.

DIR/spec.json         what is climbed; another one in the same folder is refused
DIR/rungs/*.json      a rung each, written when it has ended; what is there is not run again, and
                      rungs that are one model are trained once
DIR/prediction.json   written before the last rung of the law begins
DIR/scaling.json      everything, DIR/scaling.svg and DIR/report.html the pictures of it; written
                      when the law is known, and again at the end
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from gem.data.prepare import provide
from gem.scaling.law import Law, fit_law
from gem.scaling.picture import scaling_svg, write_page
from gem.scaling.planted import CLICK
from gem.scaling.processes import Begin, beginner, job_name, write_whole
from gem.scaling.rung import RungJob, planted_flops, planted_schema, rung_config
from gem.scaling.spec import LadderSpec, RungSpec, ScalingSpec
from gem.train.run import DATA_ROOT
from gem_opkit.bench import provenance
from gem_opkit.errors import ConfigError, refusal

Told = Callable[[str], None]


def climb(
    spec: ScalingSpec, out: Path, *, device: str = "auto", jobs: int = 1, told: Told | None = None
) -> dict[str, Any]:
    """Train what is missing and write the results.

    Args:
        spec: the ladders.
        out: folder; what it holds of the same ladders is kept.
        device: that trains.
        jobs: rungs that are trained at once, each in a process of its own where there are several.
        told: gets a line for each rung; None: nobody.

    Returns:
        the content of ``scaling.json``: ``spec``, ``rungs``; of a law also ``law``, ``prediction``
        and ``outcome``.

    Raises:
        ConfigError: the folder holds other ladders, a recipe of a rung is wrong, or a device is
            named where recipes name it.
        DataError: as training, and as `gem.scaling.law.fit_law`; a rung without an NE.
        MeasurementError: the process of a rung has failed; what it said stands on stderr.
        Interrupted: a signal or its time limit ended the run of a rung in this process; it goes on
            when called again.
    """
    say = told or (lambda line: None)
    every = list(_jobs(spec, out, device))
    same = _check(spec, every, device)
    _claim(spec, out)
    if spec.source == "data":  # made once, and not by several rungs at a time
        for job in {job_name(each): each for each in same.values()}.values():
            if not _file(out, job).is_file():
                provide(rung_config(job).data, DATA_ROOT)
    last = _last_rung(spec)
    of_law = [job for job in every if job.ladder == spec.law]
    before = [job for job in of_law if last is not None and job.rung != last.name]
    # The dearest first, as they end last. Those of the law have the device to themselves.
    with beginner(jobs) as begin:
        _run(begin, before[::-1], same, out, say)
        if last is not None:
            predict(spec, out, device, say)
            _run(begin, [job for job in of_law if job not in before], same, out, say)
            _write_found(collect(spec, out), out)  # what is cut off from here on has its law
        _run(begin, [job for job in every if job not in of_law], same, out, say)
    found = collect(spec, out)
    _write_found(found, out)
    return found


def predict(spec: ScalingSpec, out: Path, device: str, say: Told) -> dict[str, Any]:
    """Say where the last rung of the law will lie, once, before it is run.

    Args:
        spec: with a law.
        out: folder that holds its other rungs.
        device: as for `climb`.
        say: gets the line.

    Returns:
        the content of ``prediction.json``.

    Raises:
        ConfigError: the last rung is there and a prediction is not.
    """
    path, rung = out / "prediction.json", _last_rung(spec)
    of_law = [job for job in _jobs(spec, out, device) if job.ladder == spec.law]
    own = [job for job in of_law if rung is not None and job.rung == rung.name]
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    there = [job_name(job) for job in own if _file(out, job).is_file()]
    if there:
        raise ConfigError(
            refusal(
                "gem scaling",
                "--out",
                must="hold a prediction that was written before its rung was run",
                got=f"{there[0]}, and no {path.name}",
                fix="remove that rung's file, or climb in another folder",
            )
        )
    flops, ne = _points(spec, out)
    law = fit_law(flops, ne, confidence=spec.confidence)
    cost = planted_flops(own[0])
    low, high = law.predicted(cost)
    found = {
        "ladder": spec.law,
        "rung": own[0].rung,
        "flops_per_example": cost,
        "ne": law.at(cost),
        "low": low,
        "high": high,
        "law": _told_law(law),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": provenance()["commit"],
    }
    write_whole(path, json.dumps(found, indent=1, allow_nan=False) + "\n")
    say(
        f"predicted: {own[0].rung} of {spec.law}, {cost:.3g} FLOPs an example: NE "
        f"{found['ne']:.5f} [{low:.5f}, {high:.5f}]"
    )
    return found


def collect(spec: ScalingSpec, out: Path) -> dict[str, Any]:
    """Read what a folder holds.

    Args:
        spec: the ladders.
        out: folder with the rungs of the law, and of other ladders those that have ended.

    Returns:
        as `climb`.
    """
    rungs = [_read(out, job) for job in _jobs(spec, out, "auto") if _file(out, job).is_file()]
    found: dict[str, Any] = {"spec": spec.model_dump(mode="json"), "rungs": rungs}
    last = _last_rung(spec)
    if last is None:
        return found
    prediction = json.loads((out / "prediction.json").read_text(encoding="utf-8"))
    own = [r["ne"][CLICK] for r in rungs if r["ladder"] == spec.law and r["rung"] == last.name]
    outcome = {"ne": fmean(own), "inside": prediction["low"] <= fmean(own) <= prediction["high"]}
    flops, ne = _points(spec, out)
    law = fit_law(flops, ne, confidence=spec.confidence)
    return found | {"law": _told_law(law), "prediction": prediction, "outcome": outcome}


def _jobs(spec: ScalingSpec, out: Path, device: str) -> Iterable[RungJob]:
    """Every rung with every seed, those of the law first."""
    planted = spec.planted if spec.source == "planted" else None
    for ladder in sorted(spec.ladders, key=lambda each: each.name != spec.law):
        for rung in ladder.rungs:
            for seed in ladder.seeds or spec.seeds:
                yield RungJob(
                    ladder=ladder.name,
                    rung=rung.name,
                    recipe=spec.recipe,
                    settings=(*spec.set, *rung.set),
                    content=rung.content,
                    seed=seed,
                    planted=planted,
                    examples=spec.examples,
                    held_out=spec.held_out,
                    device=device,
                    run=out / "runs" / f"{ladder.name}.{rung.name}.seed-{seed}",
                )


def _law_ladder(spec: ScalingSpec) -> LadderSpec | None:
    return next((ladder for ladder in spec.ladders if ladder.name == spec.law), None)


def _last_rung(spec: ScalingSpec) -> RungSpec | None:
    ladder = _law_ladder(spec)
    return None if ladder is None else ladder.rungs[-1]


def _points(spec: ScalingSpec, out: Path) -> tuple[list[float], list[float]]:
    """FLOPs and mean NE of the rungs that the law is fitted to."""
    ladder = _law_ladder(spec)
    flops: list[float] = []
    ne: list[float] = []
    for rung in () if ladder is None else ladder.rungs[:-1]:
        own = [
            _read(out, job)
            for job in _jobs(spec, out, "auto")
            if (job.ladder, job.rung) == (spec.law, rung.name)
        ]
        flops.append(fmean(each["flops_per_example"] for each in own))
        ne.append(fmean(each["ne"][CLICK] for each in own))
    return flops, ne


def _told_law(law: Law) -> dict[str, Any]:
    low, high = law.eta_interval
    return asdict(law) | {"eta_low": low, "eta_high": high}


def _check(spec: ScalingSpec, jobs: Iterable[RungJob], device: str) -> dict[str, RungJob]:
    """Refuse what a rung would refuse, before a folder is taken and the first one is trained.

    Returns:
        name of each job -> the first one that trains the same model on the same examples.
    """
    if spec.source == "data" and device != "auto":
        raise ConfigError(
            refusal(
                "gem scaling",
                "--device",
                must='be left out where source = "data": each rung trains as its recipe says',
                got=device,
                fix="write train.device into the ladder's set",
            )
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            refusal("gem scaling", "--device", must="be there", got="cuda, and no GPU",
                    fix="leave it out, or ask for cpu")
        )  # fmt: skip
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            refusal("gem scaling", "--device", must="be auto, cpu or cuda", got=repr(device),
                    fix="choose one of them")
        )  # fmt: skip
    same: dict[str, RungJob] = {}
    known: dict[str, RungJob] = {}
    for job in jobs:
        try:
            config = rung_config(job)
            if job.planted is not None:
                planted_schema(config)
        except ConfigError as fault:
            raise ConfigError(f"gem scaling: {job_name(job)}: {fault}") from fault
        first = known.setdefault(config.model_dump_json(), job)
        if job.ladder == spec.law and first is not job:
            raise ConfigError(
                refusal("gem scaling", job_name(job), must="be another model than the rungs below",
                        got=f"that of rung {first.rung}", fix="let it grow")
            )  # fmt: skip
        same[job_name(job)] = first
    return same


def _claim(spec: ScalingSpec, out: Path) -> None:
    """Take a folder for these ladders, or refuse it."""
    path, text = out / "spec.json", spec.model_dump_json(indent=1) + "\n"
    if path.is_file():
        if json.loads(path.read_text(encoding="utf-8")) != json.loads(text):
            raise ConfigError(
                refusal(
                    "gem scaling",
                    "--out",
                    must="be a new folder, or one of the same ladders",
                    got=f"{out}, whose {path.name} says something else",
                    fix="name another folder",
                )
            )
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            refusal("gem scaling", "--out", must="be a new or empty folder", got=str(out),
                    fix="name another folder")
        )  # fmt: skip
    (out / "rungs").mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def _run(
    begin: Begin, jobs: Iterable[RungJob], same: Mapping[str, RungJob], out: Path, say: Told
) -> None:
    """Train what is missing, each model once."""
    waiting, others = [], []
    for job in jobs:
        path = _file(out, job)
        if path.is_file():
            say(f"{job_name(job)}: is there")
        elif same[job_name(job)] is job:
            waiting.append((job, begin(job, path)))
        else:
            others.append(job)
    for job, done in waiting:
        found = done.result()
        ne = ", ".join(f"{task} {value:.5f}" for task, value in found["ne"].items())
        say(f"{job_name(job)}: {found['flops_per_example']:.4g} FLOPs an example, NE {ne}")
    for job in others:
        first = same[job_name(job)]
        own: dict[str, Any] = {
            "ladder": job.ladder,
            "rung": job.rung,
            "settings": list(job.settings),
            "content": job.content,
        }
        own["same_as"] = {"ladder": first.ladder, "rung": first.rung}
        found = _read(out, first) | own
        write_whole(_file(out, job), json.dumps(found, indent=1, allow_nan=False) + "\n")
        say(f"{job_name(job)}: the same as {job_name(first)}")


def _write_found(found: Mapping[str, Any], out: Path) -> None:
    write_whole(out / "scaling.json", json.dumps(found, indent=1, allow_nan=False) + "\n")
    write_whole(out / "scaling.svg", scaling_svg(found))
    write_page(found, out / "report.html")


def _file(out: Path, job: RungJob) -> Path:
    return out / "rungs" / f"{job_name(job)}.json"


def _read(out: Path, job: RungJob) -> dict[str, Any]:
    return json.loads(_file(out, job).read_text(encoding="utf-8"))
