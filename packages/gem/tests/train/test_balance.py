"""Ranks that share the work of a step out evenly learn what one process learns."""

import json
import socket
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gem.config import RunConfig
from gem.data.prepare import default_folder
from gem.data.reader import open_reader
from gem.model.flops import batch_flops, total_flops, training_flops
from gem.train import loop, rank_times
from gem.train.balance import step_balance, work_model
from gem.train.balance_check import check_balance
from gem.train.interrupt import Interrupted
from gem.train.loop import train
from gem.train.progress import Display
from gem.train.run import build_run, torch_settings
from gem.train.run_log import METRICS_FILE
from gem.train.run_plan import plan_of
from gem_opkit.errors import ConfigError
from gem_parallel.collectives import all_reduce_sum
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

# Large steps, so that whatever learns wrongly shows in ten of them.
BASE = [
    *("model.dropout=0.0", "model.embeddings.initial_rows=by_place", "train.dense.lr=1e-2"),
    *("train.tables.lr=0.1", "train.log_every_steps=1", "train.clip_norm=0.5"),
]
SHARDED = [
    *("parallel.replicate=2", "parallel.shard=2", "parallel.table_shard=2"),
    *("parallel.table_replicate=2", "parallel.replicate_below=40"),
    *("parallel.table_sharding.item=['row_wise']", "parallel.fully_sharded_tables=true"),
]
COPIES = ["parallel.replicate=4", "parallel.table_replicate=4"]
RUNS = {
    "local": [*COPIES, "parallel.balance=local", "parallel.base_batch=1"],
    "group": [*SHARDED, "parallel.balance=group", "parallel.balance_group=2"],
    "global": [*SHARDED, "parallel.balance=global"],
}


def settings(name):
    parts = ["train.accumulation_parts=2"] if name == "local" else []
    return [*BASE, "parallel.base_batch=2", *parts, *RUNS[name]]


def learn(config: RunConfig, world: World, data_root):
    """Loss and gradient norm of every step; rows and FLOPs of this rank in it."""
    with torch_settings(config.train):
        run = build_run(config, data_root / "unused", world, Display(None), data_root)
        run.step.model.train()
        found, rows, flops = [], [], []
        for number, batch in enumerate(run.reader.batches("train")):
            scored = run.step(batch, number)
            loss = all_reduce_sum(scored.loss.double(), world)
            found.append([float(loss), float(scored.grad_norm)])
            rows.append(batch.row_B.tolist())
            flops.append(batch_flops(config.model, run.reader.schema, batch).total)
        return found, rows, flops


def learn_all(world: World, configs: dict[str, RunConfig], data_root):
    return {name: learn(config, world, data_root) for name, config in configs.items()}


@pytest.fixture(scope="module")
def learned(tiny, data_root):
    alone = learn(tiny(*BASE), World(), data_root)
    configs = {name: tiny(*settings(name)) for name in RUNS}
    return run_ranks(learn_all, 4, configs, data_root), alone


@pytest.mark.parametrize("name", RUNS)
def test_every_variant_learns_what_one_process_learns(learned, name):
    ranks, (wanted, all_rows, _) = learned
    assert len(wanted) == 10
    assert wanted[-1][0] < 0.96 * wanted[0][0]  # it matters what is learned
    for rank in ranks:
        assert torch.tensor(rank[name][0]) == pytest.approx(torch.tensor(wanted), rel=2e-6)
    for step, rows in enumerate(all_rows):
        assert sorted(row for rank in ranks for row in rank[name][1][step]) == rows


def test_ranks_come_out_more_even(learned, tiny, data_root):
    ranks, _ = learned
    config = tiny(*BASE)
    plain = []
    for rank in range(4):
        folder = default_folder(config.data, data_root)
        reader = open_reader(folder, config.data, batch_size=32, rank=rank, world_size=4)
        counted = (batch_flops(config.model, reader.schema, b) for b in reader.batches("train"))
        plain.append([flops.total for flops in counted])
    flops = {"off": plain} | {name: [rank[name][2] for rank in ranks] for name in RUNS}
    ratio = {
        name: float(np.mean(np.max(found, axis=0) / np.mean(found, axis=0)))
        for name, found in flops.items()
    }
    assert ratio["local"] == ratio["off"] > 1.02
    assert ratio["global"] < 1.0 + 0.5 * (ratio["off"] - 1.0)
    assert ratio["global"] <= ratio["group"] < ratio["off"]


SLOW_MS = 60.0
TICK_MS = 1.0


class Clock:
    """Goes on when it is read or told to: what else the machine does shows in no time."""

    def __init__(self) -> None:
        self._ms = 0.0

    def sleep_ms(self, ms: float) -> None:
        self._ms += ms

    def perf_counter(self) -> float:
        self._ms += TICK_MS
        return 1e-3 * self._ms


def legs(world: World, config: RunConfig, root, data_root) -> list[str]:
    """An unbroken run, of which rank 1 computes slowly, and one that is stopped and continued."""
    told = []
    clock = Clock()

    @contextmanager
    def these_ranks(_):
        yield world

    def building(*args, **options):
        run = build_run(*args, **options)
        if world.rank == 1:
            inside = next(run.step.model.get_submodule("heads").children())
            inside.register_forward_pre_hook(lambda *_: clock.sleep_ms(SLOW_MS))
        return run

    def stopping(run, _):
        return 15 * (run.state.step == 4)

    loop.process_group = these_ranks
    agreed, built = loop._agreed, loop.build_run
    row, real = rank_times.RankRows.row, rank_times.time
    loop.build_run = building
    Display.stage = lambda _, text: told.append(text)
    rank_times.time = SimpleNamespace(perf_counter=clock.perf_counter)
    # Nobody waits for data here: how long that takes is the machine's affair.
    rank_times.RankRows.row = lambda self, works, *_: row(self, works, data_ms=0.0, step_ms=1e3)
    train(config, root / "whole", data_root=data_root)
    of_slow_run = list(told)
    rank_times.time, rank_times.RankRows.row = real, row
    loop.build_run, loop._agreed = built, stopping
    with pytest.raises(Interrupted):
        train(config, root / "parts", data_root=data_root)
    loop._agreed = agreed
    train(config, root / "parts", resume=True, data_root=data_root)
    return of_slow_run


def rows(folder):
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


@pytest.fixture(scope="module")
def two_ranks(tiny, data_root, tmp_path_factory):
    """What the first rank showed of the slow run, and the rows of both runs of `legs`."""
    root = tmp_path_factory.mktemp("balance")
    config = tiny(
        *("model.embeddings.initial_rows=by_place", "train.log_every_steps=1"),
        *("parallel.replicate=2", "parallel.table_shard=2", "parallel.balance=global"),
        *("parallel.base_batch=4", "train.accumulation_parts=2", "train.straggler.rows=2"),
        "train.straggler.ratio=1.5",
    )
    told = run_ranks(legs, 2, config, root, data_root)[0]
    return told, rows(root / "whole"), rows(root / "parts")


def test_a_resumed_run_equals_an_unbroken_one_to_the_bit(two_ranks):
    _, whole, parts = two_ranks
    keys = ("step", "loss", "grad_norm", "lifetime", "balance", "split", "click")
    found, wanted = ([{k: r.get(k) for k in keys} for r in some] for some in (parts, whole))
    assert len(wanted) == 12
    assert found == wanted


def test_the_log_says_how_even_the_work_is(two_ranks):
    steps = [row["balance"] for row in two_ranks[1] if "balance" in row]
    assert len(steps) == 10
    before, after, moved = (
        np.mean([step[key] for step in steps]) for key in ("before", "max_over_mean", "moved_frac")
    )
    assert 1.0 <= after < before
    assert 0.0 < moved < 1.0
    assert all(step["max_over_mean"] <= step["worst"] for step in steps)
    # Micro-batches too.
    assert np.mean([s["parts"] for s in steps]) < np.mean([s["parts_before"] for s in steps])


def test_a_slow_rank_is_named_with_its_host(two_ranks):
    told, whole, _ = two_ranks
    steps = [row for row in whole if "stragglers" in row]
    assert steps[0]["stragglers"] == []  # not for a single row
    named = [one for row in steps for one in row["stragglers"]]
    assert len(named) == len(steps) - 1
    for one in named:
        assert (one["rank"], one["cause"], one["host"]) == (1, "compute", socket.gethostname())
        assert one["ratio"] > 1.5
    assert [one["rows"] for one in named] == list(range(2, len(steps) + 1))
    # There are two micro-batches a step, and the mean is that of two ranks.
    extra = [row["compute_ms"]["max"] - row["compute_ms"]["mean"] for row in steps]
    assert extra == pytest.approx([SLOW_MS] * len(steps))
    lines = [line for line in told if "is slow" in line]
    assert len(lines) == 1  # when it becomes one, whatever the number of rows in which it is
    assert lines[0].startswith(f"warning: rank 1 on host {socket.gethostname()} is slow")
    assert "2 rows of the log" in lines[0]


def test_work_model_is_the_flops_of_the_recipe(tiny, data_root):
    config = tiny("model.stream.window_tokens=3")
    run = build_run(config, data_root / "unused", World(), Display(None), data_root)
    schema = run.reader.schema
    model = work_model(config.model, schema)
    lengths = {"clicks": np.array([0, 6, 1, 4]), "impressions": np.array([8, 0, 3, 5])}
    for place, found in enumerate(model.of(lengths)):
        own = {name: [int(values[place])] for name, values in lengths.items()}
        parts = training_flops(config.model, schema, examples=1, lengths=own)
        assert found * model.unit == total_flops(parts.values()).total


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["parallel.balance=local"], 'must be "within_group", "group" or "global"'),
        (["parallel.balance=global", "parallel.replicate=2"], "must be below 16"),
        (["parallel.balance=local", "train.accumulation_parts=32"], "must be below 1,"),
    ],
)
def test_a_balance_that_could_not_change_anything_is_refused(tiny, given, named):
    config = tiny(*given)
    ranks = config.parallel.world_size
    with pytest.raises(ConfigError, match=named):
        check_balance(config, config.parallel, ranks)


def test_one_rank_takes_the_recipe_of_several(tiny):
    config = tiny("parallel.balance=global")
    check_balance(config, plan_of(config, World()), 1)
    off = tiny("parallel.balance=off")
    assert step_balance(off, off.parallel, None, 1) is None
