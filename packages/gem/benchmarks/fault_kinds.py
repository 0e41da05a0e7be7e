"""The kinds of faults of the campaign: where each strikes, and what counts as survival."""

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_world import (
    DISK_BYTES,
    EQUAL,
    OLDER,
    OPTIONS,
    RECIPE,
    RESUMED,
    SKIPPED,
    STEPS,
    STOPPED,
    TRAIN,
    WORKERS,
    Fault,
    LostError,
)
from faulty_runs import Command, Ended, Strike


def kill_at_step(fault: Fault) -> str:
    """Kill -9 of the process, before a step."""
    fault.begin()
    (ended,) = fault.strike(Strike("kill", "step", fault.random.randint(1, STEPS)))
    return _after_kill(fault, ended)


def kill_at_file(fault: Fault) -> str:
    """Kill -9 of the process, when a file is opened for writing, renamed or removed."""
    fault.begin()
    strike = Strike("kill", "file", fault.random.randint(1, fault.world.files[1]))
    (ended,) = fault.strike(strike)
    return _after_kill(fault, ended)


def kill_twice(fault: Fault) -> str:
    """Kill -9, and once more while it goes on."""
    fault.begin()
    (first,) = fault.strike(Strike("kill", "step", fault.random.randint(1, STEPS)))
    if first.code != -signal.SIGKILL:
        raise LostError(f"ended with {first.code}: {first.err[-600:]}")
    where = fault.where
    strike = Strike("kill", "file", fault.random.randint(1, fault.world.files[1] // 2))
    (second,) = fault.strike(strike)
    fault.where = f"{where}, then {strike}"
    return _after_kill(fault, second)


def _after_kill(fault: Fault, ended: Ended) -> str:
    if ended.code == 0:  # fewer file operations this time: the fault did not strike
        fault.compare()
        return EQUAL
    if ended.code != -signal.SIGKILL:
        raise LostError(f"ended with {ended.code}: {ended.err[-600:]}")
    _gone(ended)
    fault.resume()
    return RESUMED


def _gone(ended: Ended) -> None:
    """Hold that the processes that read do not outlive the one that they read for."""
    deadline = time.monotonic() + 15
    while any(_lives(pid) for pid in ended.workers):
        if time.monotonic() > deadline:
            for pid in filter(_lives, ended.workers):
                os.kill(pid, signal.SIGKILL)
            raise LostError("a worker process outlives its run")
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def kill_a_rank(fault: Fault) -> str:
    """Kill -9 of one of two ranks; the other one ends with one line."""
    fault.ranks = 2
    fault.begin()
    rank = fault.random.randint(0, 1)
    ended = fault.strike(Strike("kill", "step", fault.random.randint(1, STEPS)), rank=rank)
    fault.one_line(ended[1 - rank])
    fault.resume()
    return STOPPED


def kill_a_worker(fault: Fault) -> str:
    """Kill -9 of a process that reads; the run ends with one line."""
    fault.words = WORKERS
    fault.begin()
    (ended,) = fault.strike(Strike("worker", "step", fault.random.randint(1, STEPS // 2)))
    if not ended.workers:
        raise LostError("there were no workers to kill")
    if ended.code == 0:  # it had read everything by then
        fault.compare()
        return EQUAL
    fault.one_line(ended)
    _gone(ended)
    fault.resume()
    return STOPPED


def kill_with_workers(fault: Fault) -> str:
    """Kill -9 of a process that others read for: they end, too."""
    fault.words = WORKERS
    fault.begin()
    (ended,) = fault.strike(Strike("kill", "step", fault.random.randint(1, STEPS)))
    return _after_kill(fault, ended)


def damaged_index(fault: Fault) -> str:
    """A file of the index of events on disk is cut short or gone while a run is broken off."""

    def damage(file: Path) -> str:
        if fault.random.getrandbits(1):
            return _cut(file, fault.random)
        file.unlink()
        return "removed"

    return _damaged_index(fault, damage)


def flipped_index(fault: Fault) -> str:
    """A bit of the index of events on disk flips while a run is broken off."""
    return _damaged_index(fault, lambda file: _flip(file, fault.random))


def _damaged_index(fault: Fault, damage: Callable[[Path], str]) -> str:
    fault.words = WORKERS
    fault.begin()
    (ended,) = fault.strike(Strike("kill", "step", fault.random.randint(1, STEPS)))
    _gone(ended)
    index = fault.place / "data" / ".index"
    files = [path for path in index.glob("*/*") if path.is_file() and path.stat().st_size]
    file = fault.random.choice(sorted(files))
    fault.where = f"{file.name}: {damage(file)}"
    ended = fault.train()
    if ended.code == 0:
        told = [line for line in ended.err.splitlines() if "made again" in line]
        fault.message = told[0].strip() if told else ""
        fault.compare()
        return RESUMED
    fault.one_line(ended)
    fault.resume()  # which makes the index again
    return STOPPED


def stop(fault: Fault) -> str:
    """SIGTERM: a checkpoint and exit code 0."""
    fault.begin()
    return _after_stop(fault, "stop", 0, to_step=True)


def interrupt(fault: Fault) -> str:
    """SIGINT: a checkpoint and exit code 130."""
    fault.begin()
    return _after_stop(fault, "interrupt", 130, to_step=True)


def stop_twice(fault: Fault) -> str:
    """A second SIGTERM ends at once."""
    fault.begin()
    return _after_stop(fault, "stop_twice", 128 + signal.SIGTERM, to_step=False)


def _after_stop(fault: Fault, what: Any, code: int, *, to_step: bool) -> str:
    step = fault.random.randint(1, STEPS)
    (ended,) = fault.strike(Strike(what, "step", step))
    if ended.code != code or "Traceback" in ended.err:
        raise LostError(f"ended with {ended.code} and not {code}: {ended.err[-600:]}")
    fault.message = ended.last_line
    saved = [int(p.name[5:]) for p in (fault.place / "run/checkpoints").glob("step-*")]
    if to_step and max(saved, default=0) != step:
        raise LostError(f"no checkpoint of step {step}: {saved}")
    fault.resume()
    return RESUMED


def full_disk(fault: Fault) -> str:
    """From a moment on no file grows beyond a few bytes, as on a disk that is full."""
    fault.begin()
    count, amount = (
        fault.random.randint(1, fault.world.files[1]),
        fault.random.choice(DISK_BYTES),
    )
    (ended,) = fault.strike(Strike("disk", "file", count, amount))
    if ended.code == 0:  # nothing large was written after it
        fault.compare()
        return EQUAL
    fault.one_line(ended)
    fault.resume()
    return STOPPED


def clock_jump(fault: Fault) -> str:
    """The time of day is set, by up to ten years, forwards or backwards."""
    fault.begin()
    seconds = fault.random.choice((-1, 1)) * 10 ** fault.random.uniform(0, 8.5)
    (ended,) = fault.strike(Strike("clock", "step", fault.random.randint(1, STEPS), seconds))
    if ended.code != 0:
        raise LostError(f"ended with {ended.code}: {ended.err[-600:]}")
    fault.compare()
    return EQUAL


def nan_batch_stops(fault: Fault) -> str:
    """A batch with a NaN ends the run with one line, which names the file that holds the batch."""
    fault.begin()
    (ended,) = fault.strike(Strike("nan", "step", fault.random.randint(1, STEPS)))
    fault.one_line(ended)
    named = re.search(r"run/faulty-batches/\S+\.pt", fault.message)
    if named is None or not (fault.place / named[0]).is_file():
        raise LostError(f"no batch was kept: {fault.message}")
    fault.resume()
    return STOPPED


def nan_batch_is_skipped(fault: Fault) -> str:
    """A batch with a NaN is skipped, where the recipe says so: counted, kept, and told."""
    fault.words = (*TRAIN, "--set", "train.guard.nonfinite=skip")
    fault.begin()
    (ended,) = fault.strike(Strike("nan", "step", fault.random.randint(1, STEPS)))
    if ended.code != 0:
        raise LostError(f"ended with {ended.code}: {ended.err[-600:]}")
    summary = json.loads((fault.place / "run" / "summary.json").read_text(encoding="utf-8"))
    kept = list((fault.place / "run" / "faulty-batches").glob("*.pt"))
    told = [line for line in ended.err.splitlines() if "warning: skipped step" in line]
    if summary["training"]["skipped_steps"] != 1 or len(kept) != 1 or len(told) != 1:
        raise LostError(f"{summary['training']}, {len(kept)} batches kept, told {told}")
    fault.message = told[0].strip()
    return SKIPPED


def _damaged_checkpoint(fault: Fault, damage: Callable[[Path], str]) -> str:
    """Damage a file of the newest checkpoint of a run that was killed; go on at once."""
    fault.begin(half=True)
    folders = (fault.place / "run" / "checkpoints").glob("step-*")
    newest = max(folders, key=lambda folder: int(folder.name[5:]))
    file = fault.random.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    fault.where = f"{file.relative_to(newest.parent)}: {damage(file)}"
    ended = fault.train()
    if ended.code == 0:
        told = [line for line in ended.err.splitlines() if "is damaged" in line]
        fault.message = told[0].strip() if told else ""
        fault.compare()
        return OLDER if told else EQUAL
    fault.one_line(ended)
    shutil.rmtree(newest)  # as the line says
    fault.resume()
    return STOPPED


def truncated_checkpoint(fault: Fault) -> str:
    """A file of the newest checkpoint is cut short."""
    return _damaged_checkpoint(fault, lambda file: _cut(file, fault.random))


def flipped_checkpoint(fault: Fault) -> str:
    """One bit of a file of the newest checkpoint is flipped."""
    return _damaged_checkpoint(fault, lambda file: _flip(file, fault.random))


def missing_checkpoint(fault: Fault) -> str:
    """A file of the newest checkpoint is gone."""

    def remove(file: Path) -> str:
        file.unlink()
        return "removed"

    return _damaged_checkpoint(fault, remove)


def _damaged_data(fault: Fault, damage: Callable[[Path], str], *, half: bool) -> str:
    fault.begin(half)
    file = fault.random.choice(sorted((fault.place / "data").rglob("*.parquet")))
    whole = file.read_bytes()
    fault.where = f"{file.relative_to(fault.place)}: {damage(file)}"
    ended = fault.train()
    if ended.code == 0:
        fault.compare()
        return EQUAL
    fault.one_line(ended)
    file.write_bytes(whole)
    fault.resume()
    return STOPPED


def truncated_data(fault: Fault) -> str:
    """A Parquet file is cut short, before a run or half way through it."""
    half = bool(fault.random.getrandbits(1))
    return _damaged_data(fault, lambda file: _cut(file, fault.random), half=half)


def flipped_data(fault: Fault) -> str:
    """One bit of a Parquet file is flipped, before a run."""
    return _damaged_data(fault, lambda file: _flip(file, fault.random), half=False)


def flipped_data_half_way(fault: Fault) -> str:
    """One bit of a Parquet file is flipped while a run is broken off."""
    return _damaged_data(fault, lambda file: _flip(file, fault.random), half=True)


def _cut(file: Path, random: random.Random) -> str:
    whole = file.read_bytes()
    length = random.randrange(len(whole)) if whole else 0
    file.write_bytes(whole[:length])
    return f"{length} of {len(whole)} bytes left"


def _flip(file: Path, random: random.Random) -> str:
    content = bytearray(file.read_bytes())
    place, bit = random.randrange(len(content)), random.randrange(8)
    content[place] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {place} of {len(content)}"


def kill_prepare(fault: Fault) -> str:
    """Kill -9 while the data set is made; it is made again."""
    fault.begin()
    shutil.rmtree(fault.place / "data")
    settings = [f"data.synthetic.{key}={value}" for key, value in _options().items()]
    text = RECIPE.replace('folder = "data"\n', "")
    (fault.place / "recipe.toml").write_text(text, encoding="utf-8")
    for setting in settings:
        fault.words = (*fault.words, "--set", setting)
    (ended,) = fault.strike(Strike("kill", "file", fault.random.randint(1, 14)))
    return _after_kill(fault, ended)


def _options() -> dict[str, Any]:
    return OPTIONS.model_dump(exclude_defaults=True)


def kill_predict(fault: Fault) -> str:
    """Kill -9 while predictions are written: nothing is there, and the next try writes them."""
    fault.begin()
    fault.train()
    words = ("predict", "run", "--out", "predictions")
    strike = Strike("kill", "file", fault.random.randint(1, 4))
    fault.where = f"predict, {strike}"
    (ended,) = Command(fault.place, words, strike=strike).run()
    whole = (fault.place / "predictions" / "predictions.json").is_file()
    if ended.code not in (0, -signal.SIGKILL) or (ended.code and whole):
        raise LostError(f"ended with {ended.code}, whole: {whole}: {ended.err[-600:]}")
    if ended.code:
        (again,) = Command(fault.place, words).run()
        if again.code != 0:
            raise LostError(f"predict again ended with {again.code}: {again.err[-600:]}")
    fault.compare()
    return RESUMED if ended.code else EQUAL


KINDS: dict[str, Callable[[Fault], str]] = {
    "kill -9 at a step": kill_at_step,
    "kill -9 at a file": kill_at_file,
    "kill -9 twice": kill_twice,
    "kill -9 of a rank": kill_a_rank,
    "kill -9 of a worker": kill_a_worker,
    "kill -9 with workers": kill_with_workers,
    "kill -9 of prepare": kill_prepare,
    "kill -9 of predict": kill_predict,
    "SIGTERM": stop,
    "SIGTERM twice": stop_twice,
    "SIGINT": interrupt,
    "full disk": full_disk,
    "checkpoint cut short": truncated_checkpoint,
    "checkpoint bit flipped": flipped_checkpoint,
    "checkpoint file gone": missing_checkpoint,
    "Parquet cut short": truncated_data,
    "Parquet bit flipped": flipped_data,
    "Parquet bit flipped half way": flipped_data_half_way,
    "index damaged": damaged_index,
    "index bit flipped": flipped_index,
    "NaN batch, stop": nan_batch_stops,
    "NaN batch, skip": nan_batch_is_skipped,
    "clock jump": clock_jump,
}
