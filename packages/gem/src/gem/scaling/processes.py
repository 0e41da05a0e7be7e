"""Rungs that are trained: here, or several at once in processes of their own, on all GPUs."""

import json
import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gem.children import Children, threads_of
from gem.scaling.rung import RungJob, train_rung
from gem.train.interrupt import Interrupted
from gem_opkit.errors import DataError, GemError, MeasurementError, refusal

Begin = Callable[[RungJob, Path], Future[dict[str, Any]]]
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def job_name(job: RungJob) -> str:
    """Name of a rung with its seed.

    Args:
        job: any.
    """
    return f"{job.ladder}.{job.rung}.seed-{job.seed}"


@contextmanager
def beginner(jobs: int) -> Iterator[Begin]:
    """What begins a rung: in this process, one after the other, or several in their own.

    Args:
        jobs: rungs that are trained at once. Where several GPUs are visible, each process sees one
            of them, that on which the fewest run.

    Yields:
        a function of a job and of the file that its record is written to.
    """
    if jobs == 1:
        yield _here
        return
    children, gpus = Children(), Gpus(torch.cuda.device_count(), os.environ.get(_VISIBLE))
    with threads_of(children, jobs) as threads:
        yield lambda job, path: threads.submit(_in_a_process, children, gpus, job, path)


class Gpus:
    """Deals processes to GPUs.

    Args:
        count: GPUs that are visible.
        visible: their names, as CUDA_VISIBLE_DEVICES has them; None: numbers from 0 up.
    """

    def __init__(self, count: int, visible: str | None) -> None:
        names = visible.split(",") if visible else [str(index) for index in range(count)]
        self._lock = threading.Lock()
        self._running = dict.fromkeys(names[:count], 0)

    @contextmanager
    def one(self) -> Iterator[str | None]:
        """Take a GPU for the length of a ``with`` block.

        Yields:
            its name; None where there is no choice.
        """
        if len(self._running) < 2:
            yield None
            return
        with self._lock:
            name = min(self._running, key=lambda each: self._running[each])
            self._running[name] += 1
        try:
            yield name
        finally:
            with self._lock:
                self._running[name] -= 1


def write_whole(path: Path, text: str) -> None:
    """Write a file that is whole or not there.

    Args:
        path: of the file.
        text: its content.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def _here(job: RungJob, path: Path) -> Future[dict[str, Any]]:
    done: Future[dict[str, Any]] = Future()
    done.set_result(_train_and_write(job, path))
    return done


def _in_a_process(children: Children, gpus: Gpus, job: RungJob, path: Path) -> dict[str, Any]:
    """Train a rung in a process that gives its memory back with its end."""
    # A forked one could not use a GPU.
    context = multiprocessing.get_context("spawn")
    with gpus.one() as gpu:
        # No daemon: the workers of a reader are children of its own.
        process = context.Process(target=_apart, args=(job, path, gpu), daemon=False)
        process.start()
        with children.running(process):
            process.join()
    if process.exitcode or not path.is_file():
        raise MeasurementError(
            refusal(
                "gem scaling",
                job_name(job),
                must="be trained to its end",
                got=f"a process that ended with {process.exitcode}",
                fix="see what it said; call gem scaling again to go on from the other rungs",
            )
        )
    return json.loads(path.read_text(encoding="utf-8"))


def _apart(job: RungJob, path: Path, gpu: str | None) -> None:
    """Train a rung as all that this process does; what ends it early is a line, or nothing."""
    if gpu is not None:
        os.environ[_VISIBLE] = gpu  # CUDA has not begun in this process
    try:
        _train_and_write(job, path)
    except GemError as fault:
        raise SystemExit(f"{job_name(job)}: {fault}") from None
    except (Interrupted, KeyboardInterrupt):
        raise SystemExit(1) from None


def _train_and_write(job: RungJob, path: Path) -> dict[str, Any]:
    found = train_rung(job)
    unknown = [task for task, ne in found["ne"].items() if ne is None or not math.isfinite(ne)]
    if unknown:
        raise DataError(
            refusal(
                "gem scaling",
                job_name(job),
                must="have an NE, of labels of both kinds and predictions that are numbers",
                got=f"none for {', '.join(unknown)}",
                fix="take more rows, or lower train.dense.lr and train.tables.lr",
            )
        )
    write_whole(path, json.dumps(found, indent=1, allow_nan=False) + "\n")
    return found
