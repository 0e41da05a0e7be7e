"""Batches joined by worker processes, in the order in which one process would make them.

A crew has two `torch.utils.data.DataLoader`s. The first has the workers: a step's rows go to the
next one in turn, which joins them, and the results come back in the order of the steps, whichever
is ready first. The second has one process that walks over the log in order, for the statistics,
which depend on everything before; there is none where a recipe has no statistics. So neither the
number of workers nor their speed can change a batch.

Arrays travel through shared memory, all those of a step in one block. A fault of the data is raised
in the process that asked. A worker that dies, of whatever cause, ends the reading with one line.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from gem.data.assemble import Arrays
from gem.data.spans import Span
from gem.data.statistics.engine import StatisticsBlock
from gem_opkit.errors import DataError, GemError, refusal

# Batches that each worker makes ahead.
_AHEAD = 2
_ALIGNMENT = 64


class Spans(Protocol):
    """The steps of a reading, in order."""

    def __iter__(self) -> Iterator[Span]:
        """One after the other."""
        ...

    def __len__(self) -> int:
        """How many there are."""
        ...


class Parts(Protocol):
    """What a process of the crew opens: the reader, in it."""

    def arrays(self, span: Span) -> Arrays:
        """What the log says of the rows."""
        ...

    def statistics(self, span: Span) -> StatisticsBlock | None:
        """The statistics of the rows; spans rise from one that begins a reading."""
        ...


class Crew:
    """Processes that read, until the crew is dropped.

    Args:
        workers: how many join, > 0.
        statistics: whether there is one for statistics besides.
        open_parts: picklable; opens the data set in a process.
    """

    def __init__(self, workers: int, *, statistics: bool, open_parts: Callable[[], Parts]) -> None:
        self._joined = _Lane(_Work(open_parts, _join), workers, _AHEAD)
        self._computed: _Lane | None = None
        if statistics:
            self._computed = _Lane(_Work(open_parts, _compute), 1, _AHEAD * workers)

    def read(self, spans: "Spans") -> Iterator[tuple[Arrays, StatisticsBlock | None]]:
        """Read steps in order.

        Args:
            spans: of the steps.

        Yields:
            arrays and statistics of each.

        Raises:
            DataError: the data is malformed, or a worker died.
        """
        # Started first: it has the longer way, over all rows of all ranks.
        computed: Iterable[Arrays | None] = repeat(None)
        if self._computed is not None:
            computed = self._computed.read(spans)
        for arrays, numbers in zip(self._joined.read(spans), computed, strict=False):
            yield arrays, None if numbers is None else _as_block(numbers)

    def is_whole(self) -> bool:
        """Whether all processes live; one that waits may be killed like any other."""
        return self._joined.is_whole() and (self._computed is None or self._computed.is_whole())

    def close(self) -> None:
        """End the processes, whatever they do. May be called twice."""
        self._joined.close()
        if self._computed is not None:
            self._computed.close()


class _Context(ForkServerContext):
    """Starts processes from a fork server, and remembers them.

    A plain fork would copy locks that other threads hold, and lose the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started: list[BaseProcess] = []
        _import_once()

    # A class in the library, called like a function all the same.
    def Process(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, *args: Any, **options: Any
    ) -> BaseProcess:
        """Make a process."""
        process = ForkServerProcess(*args, **options)
        self.started.append(process)
        return process


def _import_once() -> None:
    """Let the fork server import what every worker needs, where nobody has told it what to.

    It begins with the first process that is started through it; later this changes nothing.
    """
    server = getattr(forkserver, "_forkserver", None)
    if getattr(server, "_preload_modules", None) == ["__main__"]:  # as Python leaves it
        multiprocessing.set_forkserver_preload(["__main__", "gem.data.reader"])


class _Lane:
    """One DataLoader, whose processes stay from one reading to the next."""

    def __init__(self, work: "_Work", workers: int, ahead: int) -> None:
        self._plan, self._context = _Plan(), _Context()
        self._loader = DataLoader(
            work,
            batch_size=None,
            sampler=self._plan,
            num_workers=workers,
            prefetch_factor=ahead,
            persistent_workers=True,
            collate_fn=_as_it_is,
            worker_init_fn=_follow_the_rank,
            multiprocessing_context=self._context,
            # Of its own: seeds of workers are drawn from it, and the run's must not move.
            generator=torch.Generator(),
        )

    def read(self, spans: "Spans") -> Iterator[Arrays]:
        self._plan.spans = spans
        with _deaths_named():
            results = iter(self._loader)
        return self._results(results)

    def is_whole(self) -> bool:
        return all(process.is_alive() for process in self._context.started)

    def close(self) -> None:
        for process in self._context.started:
            process.terminate()
        for process in self._context.started:
            process.join()

    def _results(self, results: Iterator[Any]) -> Iterator[Arrays]:
        while True:
            with _deaths_named():
                result = next(results, None)
            if result is None:
                return
            if isinstance(result, _Fault):
                raise result.error
            yield _unpacked(result)


@contextlib.contextmanager
def _deaths_named() -> Iterator[None]:
    """Say in one line that a worker died; what torch says of it has many forms."""
    try:
        yield
    except (RuntimeError, OSError, EOFError) as fault:
        lines = str(fault).strip().splitlines()
        raise DataError(
            refusal(
                "gem data",
                "a worker process",
                must="live as long as the run",
                got=lines[0].rstrip(".") if lines else type(fault).__name__,
                fix="see whether memory or /dev/shm was full, and continue with --resume; "
                "data.workers=0 reads without workers",
            )
        ) from fault


class _Plan(Sampler[Span]):
    """The steps of the reading that comes next."""

    def __init__(self) -> None:
        self.spans: Spans = ()

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    def __len__(self) -> int:
        return len(self.spans)


class _Work(Dataset[Any]):
    """What one process does with a span, once it has opened the data set."""

    def __init__(
        self, open_parts: Callable[[], Parts], does: Callable[[Parts, Span], Arrays]
    ) -> None:
        self._open, self._does = open_parts, does
        self._parts: Parts | None = None

    def __getitem__(self, span: Span) -> "_Packed | _Fault":
        try:
            if self._parts is None:
                self._parts = self._open()
            return _packed(self._does(self._parts, span))
        except GemError as error:
            return _Fault(error)


def _join(parts: Parts, span: Span) -> Arrays:
    return parts.arrays(span)


def _compute(parts: Parts, span: Span) -> Arrays:
    block = parts.statistics(span)
    if block is None:
        raise TypeError("Crew: statistics were asked for and there are none")
    return {"numbers": block.numbers} | {f"event:{n}": v for n, v in block.events.items()}


def _as_block(arrays: Arrays) -> StatisticsBlock:
    events = {n.removeprefix("event:"): v for n, v in arrays.items() if n.startswith("event:")}
    return StatisticsBlock(arrays["numbers"], events)


def _as_it_is(result: Any) -> Any:
    return result


def _follow_the_rank(number: int) -> None:
    """Live as long as the rank that started this worker, and let it decide how long that is.

    A Ctrl-C or a scheduler's SIGTERM reaches all processes, and the rank still wants its step. Its
    own SIGTERM ends the worker at once, whatever it does, and so does its death: DataLoader's
    watchdog looks at the parent process, which is the fork server and lives on.
    """
    del number
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = multiprocessing.parent_process()
    if rank is None:
        return
    if hasattr(signal, "sigwaitinfo"):  # macOS has none: SIGTERM ends a worker there, whoever asks
        # First of all: a thread from before would take the signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey_sigterm_of, args=(rank.pid,), daemon=True).start()
    threading.Thread(target=_end_with, args=(rank,), daemon=True).start()


def _end_with(rank: BaseProcess) -> None:
    rank.join()
    os._exit(1)


def _obey_sigterm_of(rank: int | None) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)


@dataclass(frozen=True, slots=True)
class _Fault:
    """An error of the data, on its way to the process that asked."""

    error: GemError


@dataclass(frozen=True, slots=True)
class _Packed:
    """Arrays in one block of shared memory: name, dtype and shape of each, in order."""

    block: Tensor
    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]


def _packed(arrays: Arrays) -> _Packed:
    size = sum(_room(values.nbytes) for values in arrays.values())
    block = torch.empty(max(size, 1), dtype=torch.uint8).share_memory_()
    into, place = block.numpy(), 0
    for values in arrays.values():
        end = place + values.nbytes
        into[place:end].view(values.dtype).reshape(values.shape)[...] = values
        place += _room(values.nbytes)
    return _Packed(block, tuple((n, v.dtype.str, v.shape) for n, v in arrays.items()))


def _unpacked(packed: _Packed) -> Arrays:
    block, place, arrays = packed.block.numpy(), 0, {}
    for name, dtype, shape in packed.arrays:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        arrays[name] = block[place : place + size].view(dtype).reshape(shape)
        place += _room(size)
    return arrays


def _room(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
