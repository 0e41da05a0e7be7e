"""The loop on a GPU: everything on at once, a resume, and faults with and without a wait."""

import dataclasses
import math
import shutil

import pytest

from gem.train.checkpoint import latest_complete
from gem.train.loop import train
from gem.train.run_folder import CHECKPOINTS
from gem.train.step import TrainStep
from gem_opkit.errors import DataError

ON = (
    *("train.device=cuda", "train.accumulation_parts=2", "train.interim.every_steps=3"),
    *("train.guard.nonfinite=skip", "train.guard.spike_factor=50.0"),
)


def spoil(monkeypatch, bad_step: int) -> None:
    """Put a NaN into the batch of a step, counted from 1."""
    take = TrainStep.__call__

    def with_nan(self, batch, step):
        if step + 1 == bad_step:
            numbers_BD = batch.numbers_BD.clone()
            numbers_BD[3] = math.nan
            batch = dataclasses.replace(batch, numbers_BD=numbers_BD)
        return take(self, batch, step)

    monkeypatch.setattr(TrainStep, "__call__", with_nan)


@pytest.mark.gpu
def test_a_resumed_run_reaches_what_an_unbroken_one_does(tiny, data_root, tmp_path, monkeypatch):
    spoil(monkeypatch, 5)
    config, whole = tiny(*ON), tmp_path / "whole"
    unbroken = train(config, whole, profile=True, data_root=data_root)
    assert unbroken["training"]["skipped_steps"] == 1
    assert (whole / "faulty-batches" / "step-5-rank-0.pt").exists()
    assert (whole / "profile" / "trace-rank-0.json").stat().st_size > 0
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    for step in (9, 10):
        shutil.rmtree(part / CHECKPOINTS / f"step-{step}")
    resumed = train(config, part, resume=True, data_root=data_root)
    assert resumed["training"]["skipped_steps"] == 1
    for period in ("progressive", "valid", "test"):
        for task, found in unbroken[period].items():
            assert resumed[period][task]["examples"] == found["examples"]
            assert resumed[period][task]["ne"] == pytest.approx(found["ne"], rel=1e-4)


@pytest.mark.gpu
def test_without_a_wait_a_fault_ends_the_run_before_it_is_saved(
    tiny, data_root, tmp_path, monkeypatch
):
    spoil(monkeypatch, 5)
    with pytest.raises(
        DataError, match=r"must be finite; got .* in step 5; its batch \(rows 128 to"
    ):
        train(tiny("train.device=cuda"), tmp_path, data_root=data_root)
    assert latest_complete(tmp_path / CHECKPOINTS).name == "step-3"
    assert (tmp_path / "faulty-batches" / "step-5-rank-0.pt").exists()
