"""A run goes on on another number of ranks: equal decisions, and equal numbers up to rounding."""

import dataclasses
import io
import json
import math
from contextlib import contextmanager
from itertools import count

import pytest
from rich.console import Console

from gem.config import RunConfig
from gem.train import loop
from gem.train.interrupt import Interrupted
from gem.train.loop import train
from gem.train.progress import Display
from gem.train.run_log import METRICS_FILE
from gem.train.step import TrainStep
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

SETTINGS = [
    *("model.dropout=0.0", "train.accumulation_parts=2", "train.guard.nonfinite=skip"),
    *("train.interim.every_steps=3", "train.interim.stop_after=3"),
]
BAD_ROW = 90  # of the third step; on two ranks it is in the slice of the second one
take_step = TrainStep.__call__


def spoiling(self, batch, step):
    bad_B = batch.row_B == BAD_ROW
    numbers_BD = batch.numbers_BD.masked_fill(bad_B[:, None], math.nan)
    return take_step(self, dataclasses.replace(batch, numbers_BD=numbers_BD), step)


def stopped_on_rank(world: World, config: RunConfig, folder, data_root):
    @contextmanager
    def these_ranks(_):
        yield world

    loop.process_group = these_ranks
    TrainStep.__call__ = spoiling
    asked = count(1)  # the third time amid the evaluation after step 3
    loop.StopRequest.reason = lambda _: 15 * (next(asked) >= 3 and world.rank == 1)
    with pytest.raises(Interrupted) as end:
        train(config, folder, data_root=data_root)
    return str(end.value)


def rows(folder):
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def test_from_two_ranks_to_one(tiny, data_root, tmp_path, monkeypatch):
    config = tiny(*SETTINGS)
    monkeypatch.setattr(TrainStep, "__call__", spoiling)
    whole = train(config, tmp_path / "whole", data_root=data_root)
    assert whole["training"]["skipped_steps"] == 1
    part = tmp_path / "part"
    # One rank has the bad row, one gets the signal: both skip, and both stop.
    ends = run_ranks(stopped_on_rank, 2, config, part, data_root)
    assert ends == ["stopped by signal 15 after step 3"] * 2
    files = sorted(path.name for path in (part / "faulty-batches").iterdir())
    assert files == ["step-3-rank-0.pt", "step-3-rank-1.pt"]
    said = io.StringIO()
    display = Display(Console(file=said))
    again = train(config, part, resume=True, data_root=data_root, display=display)
    assert said.getvalue().count("warning: dropout") == 1
    assert "2 ranks wrote this checkpoint, 1 continue it" in said.getvalue()
    assert again["training"] == pytest.approx(whole["training"], rel=1e-5)
    for period in ("progressive", "valid", "test"):
        for key in ("examples", "positives"):
            assert again[period]["click"][key] == whole[period]["click"][key]
        assert again[period]["click"]["ne"] == pytest.approx(whole[period]["click"]["ne"], rel=1e-5)
    found, expected = rows(part), rows(tmp_path / "whole")
    assert [(r["step"], "interim" in r) for r in found] == [
        (r["step"], "interim" in r) for r in expected
    ]
    # That of step 4 is of a step on two ranks and one on one.
    losses = [[r["loss"] for r in some if "loss" in r] for some in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    asked = [[r["tables"] for r in some if "tables" in r] for some in (found, expected)]
    for there, here in zip(*asked, strict=True):
        for name, counts in there.items():
            other = here[name]
            # Each rank of a step counts its own different rows.
            assert counts.pop("unique") >= other.pop("unique") > 0
            assert counts == other
