"""Lookups beside a step, and copies ahead of it, leave every bit as it was."""

import copy
from collections.abc import Iterator

import pytest
import torch

from gem.config import load_recipe
from gem.data.batch import ExampleBatch
from gem.dry_run.build import build_step
from gem.dry_run.inputs import random_batch, uniform_lengths
from gem.planning.schema import declared_schema
from gem.train.clock import StepClock
from gem.train.guard import Guard
from gem.train.inputs_ahead import copied_ahead, device_tensors, pinned
from gem.train.loop_state import LoopState
from gem_parallel.launch import World

# Few rows: batches have most of them in common, so rows read too early would be others.
SETTINGS = (
    "model.embeddings.initial_rows=by_place",
    *("parallel.table_engine=torch", "train.tables.lr=0.5", "train.deterministic=true"),
)
BATCHES, EXAMPLES = 4, 24


def drawn(config):
    schema = declared_schema(config)
    draw = torch.Generator().manual_seed(3)
    for _ in range(BATCHES):
        lengths = {s.name: uniform_lengths(EXAMPLES, s.max_events, draw) for s in schema.streams}
        yield random_batch(schema, lengths, draw)


def count_calls(owner, name):
    """Note each call of a method from now on."""
    calls, method = [], getattr(owner, name)

    def noted(*args):
        calls.append(args)
        return method(*args)

    owner.__dict__[name] = noted
    return calls


def trained(device: str, *further: str, ahead: bool, spoilt: int | None = None, rounds=None):
    """Losses, counts and rows of some steps; one batch may have a NaN, whose step is skipped."""
    settings = [*SETTINGS, f"train.device={device}", "train.guard.nonfinite=skip", *further]
    config = load_recipe("synthetic-debug", settings)
    world = World(device=torch.device(device))
    guard = Guard(config.train.guard, world, LoopState())
    torch.use_deterministic_algorithms(True)
    try:
        step = build_step(
            config,
            declared_schema(config),
            world,
            total_steps=BATCHES,
            clock=StepClock(world.device),
            guard=guard,
        )
        assert step.engine.reads_ahead
        assert step.ahead.on == (device == "cuda")
        step.ahead.on = ahead
        reads = count_calls(step.engine, "read_ahead")
        if rounds is not None:
            assert step.engine._rounds
            step.engine._rounds = rounds
        batches = list(drawn(config))
        if spoilt is not None:
            batches[spoilt].numbers_BD[0] = float("nan")
        losses, counts = [], []
        stream = step.ahead.stream if device == "cuda" else object()
        for number, arrived in enumerate(copied_ahead(batches, world.device, stream)):
            if arrived.following is not None:
                step.expect(arrived.following)
            losses.append(step(arrived.there, number).loss)
            counts.append(step.lookups.counts.take())
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(reads) == (0 if not ahead else BATCHES - 1 - (spoilt is not None))
    rows = {s.name: step.engine.full_weight(s.name) for s in step.engine.specs}
    return torch.stack(losses).tolist(), counts, rows


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("spoilt", [None, 1])
def test_lookups_ahead_change_nothing(device, spoilt):
    plain = trained(device, ahead=False, spoilt=spoilt)
    ahead = trained(device, ahead=True, spoilt=spoilt)
    assert [repr(x) for x in ahead[0]] == [repr(x) for x in plain[0]]
    assert ahead[1] == plain[1]
    assert all(torch.equal(ahead[2][name], rows) for name, rows in plain[2].items())


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [False, True])
def test_vectors_rounded_by_the_lookup_are_those_that_products_round(ahead):
    halves = "precision.default=bf16_autocast"
    wide = trained("cuda", halves, ahead=ahead, rounds=False)
    narrow = trained("cuda", halves, ahead=ahead, rounds=True)
    assert narrow[0] == wide[0]
    assert all(torch.equal(narrow[2][name], rows) for name, rows in wide[2].items())


def failing(batches) -> Iterator:
    yield from batches
    raise OSError("the disk is gone")


def test_batches_come_in_order_and_a_fault_when_its_batch_is_due():
    config = load_recipe("synthetic-debug")
    batches = list(drawn(config))[:2]
    arriving = copied_ahead(failing(batches), torch.device("cpu"), object())
    first, second = next(arriving), next(arriving)
    assert (first.host, first.there, first.following) == (batches[0], batches[0], batches[1])
    assert (second.there, second.following) == (batches[1], None)
    with pytest.raises(OSError, match="the disk is gone"):
        next(arriving)
    # Without a stream nothing is read before it is due.
    arriving = copied_ahead(failing(batches), torch.device("cpu"), None)
    assert [next(arriving).following for _ in batches] == [None, None]


def test_on_a_cpu_batches_pass_as_they_are():
    batches = iter([1, 2])
    assert pinned(batches, torch.device("cpu")) is batches


def test_closing_what_pins_closes_what_it_reads(monkeypatch):
    monkeypatch.setattr(ExampleBatch, "pinned", lambda batch: batch)  # no GPU pins here
    closed = []

    def reading():
        try:
            yield from drawn(load_recipe("synthetic-debug"))
        finally:
            closed.append(True)

    pinning = pinned(reading(), torch.device("cuda"))
    next(pinning)
    assert not closed
    pinning.close()
    assert closed


@pytest.mark.gpu
def test_a_copy_runs_beside_the_step():
    config = load_recipe("synthetic-debug")
    device, stream = torch.device("cuda"), torch.cuda.Stream()
    arriving = copied_ahead(pinned(drawn(config), device), device, stream)
    first = next(arriving)
    kept = [copy.deepcopy(t.cpu()) for t in device_tensors(first.there)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(400_000_000)  # cycles: about 0.2 s of a step
        step_ends = torch.cuda.Event()
        step_ends.record()
        second = next(arriving)
        copied = torch.cuda.Event()
        copied.record(stream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    copied.synchronize()
    assert not step_ends.query()  # the next batch is there, and the step still runs
    torch.cuda.synchronize()
    assert len(kept) == len(list(device_tensors(second.there))) > 8
    host = list(drawn(config))[1]
    assert torch.equal(second.there.numbers_BD.cpu(), host.numbers_BD)
    assert all(t.is_cuda for t in device_tensors(second.following))


@pytest.mark.gpu
def test_steps_and_what_runs_beside_them_wait_for_the_device_nowhere():
    settings = [*SETTINGS, "train.device=cuda", "train.deterministic=false"]
    config = load_recipe("synthetic-debug", [*settings, "model.embeddings.out_of_range=zero"])
    world, schema = World(device=torch.device("cuda")), declared_schema(config)
    clock = StepClock(world.device)
    step = build_step(config, schema, world, total_steps=BATCHES, clock=clock)
    batches = pinned(iter(list(drawn(config))), world.device)
    for number, arrived in enumerate(copied_ahead(batches, world.device, step.ahead.stream)):
        # The first steps compile kernels and make what is kept.
        torch.cuda.set_sync_debug_mode("error" if number >= 2 else "default")
        try:
            if arrived.following is not None:
                step.expect(arrived.following)
            scored = step(arrived.there, number)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert bool(scored.finite)
