"""What a plan asks for without any effect is told, or refused."""

from types import SimpleNamespace

import pytest
import torch

from gem.dry_run.build import build_step
from gem.planning.schema import declared_schema
from gem.train.clock import StepClock
from gem.train.idle_keys import idle_keys, refuse_copies
from gem.train.parallel_spec import ParallelSpec
from gem.train.progress import Display
from gem.train.run import build_run
from gem_opkit.errors import UnsupportedError
from gem_parallel.launch import World

ALL = ["parallel.overlap_sides=true", "parallel.table_wire_dtype=bf16", "parallel.gathers=measured"]
TOLD = [
    "parallel.gathers=measured copies nothing: parallel.shard is 1",
    "parallel.table_wire_dtype=bf16 changes nothing: every rank holds all tables",
    "parallel.overlap_sides=true changes nothing: ",
]


def lines(config):
    world = World()
    schema, clock = declared_schema(config), StepClock(world.device)
    return idle_keys(build_step(config, schema, world, total_steps=1, clock=clock))


def test_every_key_without_effect_has_a_line(tiny):
    assert lines(tiny()) == []
    assert lines(tiny("model.layers=['transformer', 'interaction']", *ALL)) == [
        *TOLD[:2],
        f"{TOLD[2]}there is one stream on cpu",
    ]
    only = lines(tiny("model.layers=['interaction']", ALL[0]))
    assert only == [f"{TOLD[2]}the model has no transformer layers"]
    halves = ("precision.default=bf16_autocast",)
    assert lines(tiny("parallel.reduce_dtype=bf16")) == [
        "parallel.reduce_dtype=bf16 changes nothing: gradients of one rank are summed with nobody's"
    ]
    assert lines(tiny(*halves, "parallel.gather_dtype=bf16", "parallel.keep_gathered=true")) == [
        "parallel.gather_dtype=bf16 changes nothing: parallel.shard and parallel.expert are 1",
        "parallel.keep_gathered=true changes nothing: parallel.shard and parallel.expert are 1",
    ]
    engine = ("model.embeddings.initial_rows=by_place", "parallel.table_engine=torch")
    assert lines(tiny(*engine, ALL[1])) == []


def test_a_run_says_them(tiny, data_root, monkeypatch):
    said = []
    monkeypatch.setattr(Display, "stage", lambda display, text: said.append(text))
    config = tiny("model.layers=['transformer', 'interaction']", *ALL)
    build_run(config, data_root / "unused", World(), Display(None), data_root)
    assert all(any(line.startswith(told) for line in said) for told in TOLD)


@pytest.mark.parametrize(("below", "told"), [(100, []), (101, ["replicate_below=101"])])
def test_weights_that_are_all_copies_are_not_gathered(below, told):
    plan = ParallelSpec(shard=2, gathers="copy_engine", replicate_below=below)
    step = SimpleNamespace(
        plan=plan, gathers={}, sizes={"a": 7, "b": 100}, engine=object(), world=World()
    )
    assert [line.rpartition(".")[2] for line in idle_keys(step)] == told


def test_copy_engines_are_refused_on_a_cpu_by_the_key():
    plan = ParallelSpec(gathers="copy_engine")
    with pytest.raises(UnsupportedError, match=r"parallel\.gathers must be .*compute on cpu"):
        refuse_copies(plan, torch.device("cpu"))
    refuse_copies(plan, torch.device("cuda"))
    refuse_copies(ParallelSpec(gathers="measured"), torch.device("cpu"))
