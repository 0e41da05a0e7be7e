"""A command of `gem` in a process of its own, with a fault that strikes at a chosen moment.

Processes come from a fork server that has torch loaded. A fault is put in from outside, by hooks
around a step or around the files that are opened for writing: the product has no such hooks.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

LIMIT_S = 90.0  # a run takes seconds: one that takes so long hangs
_FILE_EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")


@dataclass(frozen=True)
class Strike:
    """What happens in a process, and when.

    Attributes:
        what: kill and stop end the process; stop_twice does not let it finish; disk lets no file
            grow any more; clock sets the time of day; nan spoils the numbers of a batch; worker
            kills one of the processes that read.
        at: before the so-manieth step, or at the so-manieth file that is opened for writing,
            renamed or removed.
        count: which one, from 1.
        amount: of the disk: bytes that a file may have; of the clock: seconds that it jumps.
    """

    what: Literal["kill", "stop", "stop_twice", "interrupt", "disk", "clock", "nan", "worker"]
    at: Literal["step", "file"]
    count: int
    amount: float = 0.0

    def __str__(self) -> str:
        """Where it strikes, in words."""
        place = f"step {self.count}" if self.at == "step" else f"file operation {self.count}"
        return place + (f", {self.amount:+.0f} s" if self.what == "clock" else "")


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: exit code; minus a signal's number; None where it hangs and was ended from outside.
        out, err: what it printed.
        files: files that it opened for writing, renamed or removed.
        workers: processes that it had started and that lived when the fault struck.
        seconds: from its start to its end.
    """

    code: int | None
    out: str
    err: str
    files: int
    workers: tuple[int, ...]
    seconds: float

    @property
    def last_line(self) -> str:
        """The last line on stderr that says anything."""
        return next((line for line in reversed(self.err.splitlines()) if line.strip()), "")


@dataclass
class Command:
    """A command of `gem`, or the ranks of one.

    Args:
        folder: where it runs.
        words: of the command.
        ranks: processes.
        strike: the fault; None for none.
        rank: in which it strikes.
    """

    folder: Path
    words: tuple[str, ...]
    ranks: int = 1
    strike: Strike | None = None
    rank: int = 0
    _started: list[Any] = field(default_factory=list)

    def run(self) -> list[Ended]:
        """Run it.

        Returns:
            how each rank ended.
        """
        began = time.monotonic()
        context = multiprocessing.get_context("forkserver")
        shared = _shared_environment(self.ranks)
        outputs = [Path(tempfile.mkdtemp(dir=self.folder)) for _ in range(self.ranks)]
        processes = []
        for rank, output in enumerate(outputs):
            strike = self.strike if rank == self.rank else None
            env = shared | ({"RANK": str(rank)} if self.ranks > 1 else {})
            arguments = (str(self.folder), self.words, env, strike, str(output))
            process = context.Process(target=_child, args=arguments)
            process.start()
            processes.append(process)
        ended = []
        for process, output in zip(processes, outputs, strict=True):
            process.join(max(0.1, LIMIT_S - (time.monotonic() - began)))
            code = process.exitcode
            if code is None:
                process.kill()
                process.join()
            read = [
                (output / name).read_text() if (output / name).is_file() else ""
                for name in ("out", "err", "files", "workers")
            ]
            workers = tuple(int(word) for word in read[3].split())
            seconds = time.monotonic() - began
            ended.append(Ended(code, read[0], read[1], len(read[2]), workers, seconds))
        return ended


def _shared_environment(ranks: int) -> dict[str, str]:
    if ranks == 1:
        return {}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    return {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}


def preload(modules: Sequence[str] = ("torch", "torch.distributed", "gem.train.loop")) -> None:
    """Have the fork server load what every process needs."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))


# -- in the process --------------------------------------------------------------------------------
def _child(
    folder: str, words: tuple[str, ...], env: dict[str, str], strike: Strike | None, output: str
) -> None:
    os.chdir(folder)
    os.environ.update(env, OMP_NUM_THREADS="1")
    for number, name in ((1, "out"), (2, "err")):
        with Path(output, name).open("wb") as file:
            os.dup2(file.fileno(), number)
    from gem.cli import main

    place = _Place(output, strike)
    place.watch_files()
    place.watch_steps()
    sys.argv = ["gem", *words]
    main()


class _Place:
    """Counts steps and file operations of this process, and strikes at one of them."""

    def __init__(self, output: str, strike: Strike | None) -> None:
        self._output = Path(output)
        self._strike = strike
        self._steps = self._files = 0
        self._counted = os.open(self._output / "files", os.O_WRONLY | os.O_CREAT, 0o644)
        self._lock = threading.Lock()
        self._skew_s = 0.0

    def watch_files(self) -> None:
        """Count what is done to files below the current folder."""

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if not _changes_files(event, arguments):
                return
            with self._lock:
                self._files += 1
                count = self._files
            os.write(self._counted, b".")
            if self._strike is not None and (self._strike.at, self._strike.count) == (
                "file",
                count,
            ):
                self._act()

        sys.addaudithook(hook)

    def watch_steps(self) -> None:
        """Count the steps of training, each before it is taken."""
        from gem.train.step import TrainStep

        taken = TrainStep.__call__

        def counted(step: Any, batch: Any, number: int) -> Any:
            self._steps += 1
            strike = self._strike
            if strike is not None and strike.at == "step" and strike.count == self._steps:
                if strike.what == "nan":
                    numbers = batch.numbers_BD.clone()
                    numbers[self._steps % len(numbers), 0] = float("nan")
                    batch = dataclasses.replace(batch, numbers_BD=numbers)
                else:
                    self._act()
            return taken(step, batch, number)

        TrainStep.__call__ = counted

    def _act(self) -> None:
        strike = self._strike
        if strike is None:
            return
        workers = [child for child in multiprocessing.active_children() if child.pid]
        pids = [str(child.pid) for child in workers]
        handle = os.open(self._output / "workers", os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(handle, " ".join(pids).encode())
        os.close(handle)
        if strike.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif strike.what == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif strike.what == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        elif strike.what == "stop_twice":
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        elif strike.what == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(strike.amount), resource.RLIM_INFINITY))
        elif strike.what == "worker" and workers:
            victim = workers[strike.count % len(workers)]
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(victim.pid or 0), signal.SIGKILL)
        elif strike.what == "clock":
            self._set_clock(strike.amount)

    def _set_clock(self, seconds: float) -> None:
        """From here on the time of day is another one; the monotonic clock goes on."""
        real_s: Callable[[], float] = time.time
        real_ns: Callable[[], int] = time.time_ns
        time.time = lambda: real_s() + seconds
        time.time_ns = lambda: real_ns() + int(seconds * 1e9)


def _changes_files(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "open":
        path, mode, flags = arguments
        writes = isinstance(mode, str) and any(letter in mode for letter in "wax+")
        writes = writes or bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))
    elif event in _FILE_EVENTS:
        path, writes = arguments[0], True
    else:
        return False
    if not writes or not isinstance(path, str | bytes | os.PathLike):
        return False
    # Relative: of the run. Absolute ones are devices, caches and this harness.
    return not os.fsdecode(path).startswith("/")
