"""Timing: turns, warm-up, the device's own time on a simulated device, and replayed graphs."""

import gc
import time
import weakref
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch

from gem_opkit import timing
from gem_opkit.bench import backward_of
from gem_opkit.timing import ReplayedCall, time_call, time_in_turn


@pytest.fixture(autouse=True)
def small_flush(monkeypatch):
    monkeypatch.setattr("gem_opkit.timing._FLUSH_BYTES", 2**20)


def test_warmup_is_not_counted():
    seen = []
    timing = time_call(lambda: seen.append(1), warmup=2, calls=5)
    assert len(seen) == 7 and timing.calls == 5


@pytest.mark.parametrize(("calls", "rounds"), [(3, 2), (6, 2), (11, 2), (12, 4), (20, 4), (21, 4)])
def test_who_is_compared_takes_turns(calls, rounds):
    seen = []
    runs = {name: partial(seen.append, name) for name in "abc"}
    timings = time_in_turn(runs, warmup=1, calls=calls)
    assert list(timings) == ["a", "b", "c"]
    assert {timing.calls for timing in timings.values()} == {calls}
    assert {timing.rounds for timing in timings.values()} == {rounds}
    assert "".join(seen[:3]) == "abc"
    blocks = [name for name, _ in groupby(seen[3:])]
    # Whoever ends a round begins the next, which groupby joins to one block.
    assert "".join(blocks) == ("abcba" + "bcba" * rounds)[: 2 * rounds + 1]
    assert {seen[3:].count(name) for name in "abc"} == {calls}


def test_a_machine_that_slows_down_favours_nobody(monkeypatch):
    # Every call takes a little longer than the one before, whoever makes it.
    now = [0.0, 1.0]

    def work():
        now[0] += now[1]
        now[1] *= 1.01

    monkeypatch.setattr("gem_opkit.timing.time.perf_counter", lambda: now[0])
    timings = time_in_turn({"ours": work, "peer": work}, calls=20)
    # One after the other the second would seem 22 % slower.
    assert timings["peer"].ms == pytest.approx(timings["ours"].ms, rel=0.01)


class Machine:
    """A host and a device with a queue; both clocks in milliseconds."""

    cycles_per_ms = 2e6

    def __init__(self):
        self.host = self.free = 0.0
        self.waits_ms = []

    def launch(self, host_ms, device_ms):
        self.host += host_ms
        self.free = max(self.host, self.free) + device_ms

    def synchronize(self, *_):
        self.host = max(self.host, self.free)

    def sleep(self, cycles):
        self.waits_ms.append(cycles / self.cycles_per_ms)
        self.launch(0.005, self.waits_ms[-1])

    def event(self, **_):
        event = SimpleNamespace(at=None)

        def record():
            self.host += 0.001
            event.at = max(self.host, self.free)

        event.record, event.synchronize = record, self.synchronize
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def put_in_place_of_torch(self, monkeypatch):
        flush = SimpleNamespace(zero_=lambda: self.launch(0.005, 0.07))
        cuda = SimpleNamespace(
            Event=self.event,
            synchronize=self.synchronize,
            device=lambda _: nullcontext(),
            _sleep=self.sleep,
        )
        fake = SimpleNamespace(
            device=torch.device, uint8=torch.uint8, empty=lambda *_, **__: flush, cuda=cuda
        )
        monkeypatch.setattr(timing, "torch", fake)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.host * 1e-3)
        timing._cycles_per_ms.cache_clear()


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    made.put_in_place_of_torch(monkeypatch)
    yield made
    timing._cycles_per_ms.cache_clear()


@pytest.mark.parametrize("calls", [3, 8, 20])
def test_time_of_a_device_has_neither_the_host_nor_the_flush(machine, calls):
    def many_launches():
        for _ in range(40):
            machine.launch(0.02, 0.005)

    timings = time_in_turn(
        {"busy host": many_launches, "busy device": lambda: machine.launch(0.02, 3.0)},
        device="cuda",
        calls=calls,
    )
    # The host takes 0.8 ms for the first, which is what its events would show without a queue.
    assert timings["busy host"].ms == pytest.approx(40 * 0.005, abs=0.002)
    assert timings["busy host"].p80_ms == pytest.approx(40 * 0.005, abs=0.002)
    assert timings["busy device"].ms == pytest.approx(3.0, abs=0.002)


def test_the_device_waits_for_no_longer_than_the_host_needs(machine):
    time_in_turn({"": lambda: machine.launch(0.5, 0.1)}, device="cuda", calls=12)
    calibration, rounds = machine.waits_ms[:2], machine.waits_ms[2:]
    assert calibration == [0.5, 0.5]
    assert len(rounds) == 4
    # Three calls of half a millisecond, and half as much again.
    assert rounds == pytest.approx([1.5 * 3 * 0.507] * 4, rel=0.01)


def test_a_call_that_waits_for_its_device_shows_it(machine):
    def waits():
        machine.launch(0.01, 0.2)
        machine.synchronize()
        machine.host += 0.3  # what it does on the host with the answer
        machine.launch(0.01, 0.2)

    found = time_in_turn({"": waits}, device="cuda", calls=12)[""]
    assert found.ms == pytest.approx(0.2 + 0.3 + 0.01 + 0.2, abs=0.02)


def test_a_long_wait_is_cut(machine):
    def slow():
        machine.host += 400.0

    time_in_turn({"": slow}, device="cuda", calls=3)
    assert max(machine.waits_ms) == 500.0


def test_a_replayed_call_keeps_what_its_graph_reads(monkeypatch):
    replays = []
    graph = SimpleNamespace(replay=lambda: replays.append(1))
    stream = SimpleNamespace(wait_stream=lambda _: None)
    fakes = {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "CUDAGraph": lambda: graph,
        "stream": lambda _: nullcontext(),
        "graph": lambda *_, **__: nullcontext(),
        "device": lambda _: nullcontext(),
        "synchronize": lambda *_: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    seen = []

    class Kept:
        pass

    def make():
        upstream = Kept()
        seen.append(weakref.ref(upstream))
        return lambda: id(upstream)

    call = ReplayedCall(make)
    assert not seen  # nothing is captured before it is needed
    first = call()
    gc.collect()
    # Freed memory is reused or unmapped, and the graph would read it all the same.
    assert len(seen) == 1 and seen[0]() is not None
    assert call() == first == id(seen[0]())
    assert replays == [1, 1]
    del call
    gc.collect()
    assert seen[0]() is None


@pytest.mark.gpu
def test_replayed_backward_reads_its_own_gradient_on_gpu():
    x = torch.randn(2**24, device="cuda", requires_grad=True)
    call = ReplayedCall(lambda: backward_of(lambda x: 2 * x, (x.detach().requires_grad_(),)))
    before = call()[0].clone()
    # What the capture did not keep would be unmapped now, or overwritten.
    torch.cuda.empty_cache()
    others = [torch.full((2**24,), 7.0, device="cuda") for _ in range(8)]
    assert torch.equal(call()[0], before)
    assert all((other == 7).all() for other in others)


@pytest.mark.gpu
def test_time_of_a_device_has_no_host_in_it_on_gpu():
    x = torch.zeros(1, device="cuda")

    def slow_host():
        x.add_(1)
        time.sleep(0.002)
        x.add_(1)

    # The device takes some microseconds for both.
    assert time_call(slow_host, device="cuda", calls=12).ms < 0.2
