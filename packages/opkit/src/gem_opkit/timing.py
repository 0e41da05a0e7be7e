"""How long calls take: compared in turn, caches flushed, and the host kept ahead of the device.

``time_in_turn`` says what is measured. ``ReplayedCall`` captures a call in a CUDA graph for those
that take less time than their launch.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from gem_opkit.errors import ConfigError, refusal

# Written between repetitions, so that no call finds its inputs in a cache.
_FLUSH_BYTES = 2**28
# Even, so that who is first in one round is last in as many others.
_MOST_ROUNDS = 4
_CALLS_A_ROUND = 3
# How long the device waits before a round: the host's measured time and half as much again, for
# hosts have moods. A call that waits for its device cannot be run ahead of, however long.
_MARGIN = 1.5
_LONGEST_WAIT_MS = 500.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Repeated timing of a call.

    Attributes:
        ms: median of the rounds' medians, milliseconds.
        p20_ms: a fifth of the calls were faster.
        p80_ms: a fifth were slower.
        calls: number of timed calls.
        rounds: number of rounds over which they were spread.
    """

    ms: float
    p20_ms: float
    p80_ms: float
    calls: int
    rounds: int


def time_call(
    run: Callable[[], Any], *, device: Any = "cpu", warmup: int = 3, calls: int = 20
) -> Timing:
    """Time one call as ``time_in_turn`` times several.

    Args:
        run: the call.
        device: where it works.
        warmup: calls that are not timed, at least 1; compilation and tuning fall here.
        calls: calls that are timed, at least 3.

    Returns:
        the timing.

    Raises:
        ConfigError: too few calls for a median.
    """
    return time_in_turn({"": run}, device=device, warmup=warmup, calls=calls)[""]


def time_in_turn(
    runs: Mapping[str, Callable[[], Any]],
    *,
    device: Any = "cpu",
    warmup: int = 3,
    calls: int = 20,
) -> dict[str, Timing]:
    """Time calls that are to be compared, in turn: caches flushed, CUDA events or perf_counter.

    A GPU is slower when it is hot, and any machine has moods. So the calls are spread over rounds
    of at least three each (four rounds, or two where the calls are fewer than twelve), each round
    takes every candidate, and every other round takes them in reverse.

    On a CPU a time is what passes from before a call to after it.

    On a GPU it is the time of the device alone, from the end of the flush to the end of the call's
    last kernel. The host's time to launch the call is not in it: before each round the device is
    kept waiting for as long as the host will need to launch the round, as measured, so that the
    queue is full when the first event passes. What stays in the time is a call that waits for the
    device itself, because nobody can launch ahead of it; and the launches of a call that needs more
    than the thousand places of the device's queue, or more than half a second of the host.

    Args:
        runs: name -> call.
        device: where they work.
        warmup: calls of each that are not timed, at least 1; compilation and tuning fall here. On a
            GPU one more follows, by which the host's time is measured.
        calls: calls of each that are timed, at least 3.

    Returns:
        name -> timing, in the order of ``runs``.

    Raises:
        ConfigError: too few calls for a median.
    """
    for name, value, least in (("warmup", warmup, 1), ("calls", calls, 3)):
        if value < least:
            raise ConfigError(
                refusal("time_call", name, must=f"be at least {least}", got=value, fix="raise it")
            )
    device = torch.device(device)
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    for run in runs.values():
        for _ in range(warmup):
            run()
    host_ms: dict[str, float] = {}
    if device.type == "cuda":
        host_ms = {name: _host_ms(run, flush, device) for name, run in runs.items()}
    rounds = _MOST_ROUNDS if calls >= _MOST_ROUNDS * _CALLS_A_ROUND else 2
    names = list(runs)
    times_ms: dict[str, list[list[float]]] = {name: [] for name in names}
    for index in range(rounds):
        share = calls // rounds + (index < calls % rounds)
        for name in names if index % 2 == 0 else reversed(names):
            if device.type == "cuda":
                ahead_ms = _ahead_ms(host_ms[name], share)
                times = _event_times_ms(runs[name], flush, share, device, ahead_ms)
            else:
                times = _clock_times_ms(runs[name], flush, share)
            times_ms[name].append(times)
    return {name: _summary(by_round) for name, by_round in times_ms.items()}


def wait_for(device: Any) -> None:
    """Wait until a device has done what it was given; a CPU has.

    Args:
        device: a torch device or its name.

    Raises:
        RuntimeError: the device had failed before, in work that nobody waited for.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _summary(by_round: Sequence[Sequence[float]]) -> Timing:
    times_ms = [ms for times in by_round for ms in times]
    fifths = statistics.quantiles(times_ms, n=5, method="inclusive")
    median = statistics.median(statistics.median(times) for times in by_round)
    return Timing(median, fifths[0], fifths[3], len(times_ms), len(by_round))


def _clock_times_ms(run: Callable[[], Any], flush: torch.Tensor, calls: int) -> list[float]:
    times_ms = []
    for _ in range(calls):
        flush.zero_()
        began = time.perf_counter()
        run()
        times_ms.append(1e3 * (time.perf_counter() - began))
    return times_ms


def _event_times_ms(
    run: Callable[[], Any], flush: torch.Tensor, calls: int, device: torch.device, ahead_ms: float
) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    with torch.cuda.device(device):
        cycles = int(ahead_ms * _cycles_per_ms(device))
        torch.cuda.synchronize(device)
        torch.cuda._sleep(cycles)
        for start, end in events:
            flush.zero_()
            start.record()
            run()
            end.record()
    # An event's time is only known once it has passed.
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in events]


def _host_ms(run: Callable[[], Any], flush: torch.Tensor, device: torch.device) -> float:
    """Return how long the host takes for one timed call: flush, two events and the call."""
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        flush.zero_()
        events[0].record()
        run()
        events[1].record()
        taken_ms = 1e3 * (time.perf_counter() - began)
    torch.cuda.synchronize(device)
    return taken_ms


def _ahead_ms(host_ms: float, calls: int) -> float:
    return min(_MARGIN * host_ms * calls, _LONGEST_WAIT_MS)


@cache
def _cycles_per_ms(device: torch.device) -> float:
    """Measure how many cycles of its wait the device does in a millisecond."""
    cycles = 10**6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)  # the first loads its kernel
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / start.elapsed_time(end)


class ReplayedCall:
    """A call that is captured in a CUDA graph when it is first made, and replayed from then on.

    A graph holds addresses and no tensors. Whatever it reads must live as long as it does: this
    object keeps the graph, its result, and the call with all that its closure has. What a call
    puts into a cache of its own and what may be dropped from there it must not read.
    """

    def __init__(self, make: Callable[[], Callable[[], Any]], *, device: Any = "cuda") -> None:
        """Remember how the call is made.

        Args:
            make: returns the call. It runs on the stream of the capture, where the forward of a
                call that is a backward must have run. Called once, with the first replay.
            device: where the call works.
        """
        self._make = make
        self._device = torch.device(device)
        self._run: Callable[[], Any] | None = None
        self._graph: Any = None
        self._result: Any = None

    def __call__(self) -> Any:
        """Replay the call; return its result, which the next replay overwrites.

        Returns:
            what the captured call returned: the same tensors in every replay.

        Raises:
            RuntimeError: the call cannot be captured.
        """
        graph = self._graph or self._captured()
        graph.replay()
        return self._result

    def _captured(self) -> Any:
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                run = self._make()
                run()  # compiles
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, stream=stream):
                    result = run()
            torch.cuda.synchronize()
        self._run, self._graph, self._result = run, graph, result
        return graph
