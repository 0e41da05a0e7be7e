"""Checkpoints beside the training: one at a time, of the moment they were asked for, or told of."""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from gem.train import checkpoint_writer
from gem.train.checkpoint import latest_complete, load_checkpoint, read_manifest
from gem.train.checkpoint_faults import disk_faults_named
from gem.train.checkpoint_writer import CheckpointWriter, take_snapshot, write_snapshot
from gem.train.loop import train
from gem.train.run_folder import CHECKPOINTS
from gem_opkit.errors import DataError
from gem_parallel.launch import World


class State:
    """Makes snapshots of a model of one layer, after so many steps."""

    def __init__(self, tiny):
        from gem.train.checkpoint import TrainState
        from gem.train.metrics import MetricStream

        self.config = tiny()
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2)
        optimizers = {"dense": torch.optim.Adam(model.parameters(), lr=0.1)}
        self.state = TrainState(model, optimizers, {}, MetricStream(["click"], ["all"], 2))

    def weights(self):
        return self.state.model.weight.tolist()

    def step(self):
        self.state.model(torch.ones(3)).sum().backward()
        self.state.optimizers["dense"].step()
        self.state.step += 1

    def snapshot(self):
        current = self.state.metrics.current
        return take_snapshot(self.state, self.config, World(), current=current, dataset="d")


@pytest.fixture
def held(monkeypatch):
    """Holds writes until it is set; counts those that are under way at once."""
    go, write = threading.Event(), checkpoint_writer.write_snapshot
    held_up: list[int] = []

    def slow(checkpoints, snapshot, **settings):
        held_up.append(snapshot.step)
        assert go.wait(30)
        path = write(checkpoints, snapshot, **settings)
        held_up.remove(snapshot.step)
        return path

    monkeypatch.setattr(checkpoint_writer, "write_snapshot", slow)
    go.held_up = held_up
    return go


def test_training_goes_on_while_a_checkpoint_is_written(tiny, tmp_path, held):
    one = State(tiny)
    with CheckpointWriter(tmp_path, keep=2, background=True) as writer:
        one.step()
        then = one.weights()
        writer.write(one.snapshot())
        one.step()  # the write has not begun to look at the weights yet
        assert one.weights() != then
        assert latest_complete(tmp_path) is None
        assert writer.take_fault() is None  # nor does asking wait for it
        held.set()
    other = State(tiny)
    load_checkpoint(tmp_path / "step-1", other.state, World())
    assert other.weights() == then


def test_never_two_at_once(tiny, tmp_path, held):
    one = State(tiny)
    with CheckpointWriter(tmp_path, keep=9, background=True) as writer:
        for _ in range(2):
            one.step()
            snapshot = one.snapshot()
            if one.state.step == 2:
                threading.Timer(0.2, held.set).start()
            writer.write(snapshot)
            assert held.held_up in ([one.state.step], [])
        writer.wait()
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "step-2"}
    assert writer.longest_s >= 0.1


def test_the_best_one_stays(tiny, tmp_path):
    one = State(tiny)
    with CheckpointWriter(tmp_path, keep=1, background=False) as writer:
        for _ in range(4):
            one.step()
            writer.write(one.snapshot(), best=2)
            assert writer.take_fault() is None
    assert {path.name for path in tmp_path.iterdir()} == {"step-2", "step-4"}


def test_the_same_step_again_replaces_it(tiny, tmp_path):
    one = State(tiny)
    with CheckpointWriter(tmp_path, keep=1, background=False) as writer:
        one.step()
        writer.write(one.snapshot())
        one.state.loop.stopped_early = True
        writer.write(one.snapshot())
        assert writer.take_fault() is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert read_manifest(tmp_path / "step-1")["loop"]["stopped_early"] is True


def test_a_kill_while_a_step_is_written_again_loses_nothing(tiny, tmp_path, monkeypatch):
    """Between the moves of the old one and of the new one there is none by its own name."""
    one = State(tiny)
    one.step()
    write_snapshot(tmp_path, one.snapshot(), keep=1)
    rename = Path.rename

    def killed(self, target):
        if self.name == "partial-step-1":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        write_snapshot(tmp_path, one.snapshot(), keep=1)
    monkeypatch.undo()
    left = latest_complete(tmp_path)
    assert left == tmp_path / "replaced-step-1"
    other = State(tiny)
    load_checkpoint(left, other.state, World())
    assert (other.state.step, other.weights()) == (1, one.weights())
    one.state.loop.evaluated_step = 1
    write_snapshot(tmp_path, one.snapshot(), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert read_manifest(tmp_path / "step-1")["loop"]["evaluated_step"] == 1


def test_a_model_of_other_shapes_is_refused(tiny, tmp_path):
    one, other = State(tiny), State(tiny)
    path = write_snapshot(tmp_path, one.snapshot(), keep=1)
    other.state.model = torch.nn.Linear(4, 2)
    words = r"must be those of the model; got missing model/weight \[2, 4\], unknown .*\[2, 3\]"
    with pytest.raises(DataError, match=words):
        load_checkpoint(path, other.state, World())


def full_from(monkeypatch, first: int, last: int) -> None:
    """A disk that is full for some writes, counted from 1."""
    create, count = dcp.filesystem.FileSystem.create_stream, [0]

    def create_stream(self, path, mode):
        if mode == "wb" and path.name.endswith(".distcp"):
            count[0] += 1
            if first <= count[0] <= last:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(self, path, mode)

    monkeypatch.setattr(dcp.filesystem.FileSystem, "create_stream", create_stream)


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_failed_write_ends_the_run_with_one_line(
    tiny, data_root, tmp_path, monkeypatch, background
):
    config = tiny(f"train.checkpoint_async={background}", "train.passes=2")
    full_from(monkeypatch, 2, 2)
    with pytest.raises(DataError, match=r"must take another checkpoint; got .*No space left"):
        train(config, tmp_path, data_root=data_root)
    assert [path.name for path in (tmp_path / CHECKPOINTS).iterdir()] == ["step-3"]
    monkeypatch.undo()
    train(config, tmp_path, resume=True, data_root=data_root)
    assert latest_complete(tmp_path / CHECKPOINTS).name == "step-20"


def test_a_run_may_go_on_without_a_checkpoint_but_not_without_the_last(
    tiny, data_root, tmp_path, monkeypatch
):
    config = tiny("train.checkpoint_failure=go_on")
    full_from(monkeypatch, 1, 2)
    train(config, tmp_path / "a", data_root=data_root)
    assert {p.name for p in (tmp_path / "a" / CHECKPOINTS).iterdir()} == {"step-9", "step-10"}
    monkeypatch.undo()
    full_from(monkeypatch, 4, 4)
    with pytest.raises(DataError, match="must take another checkpoint"):
        train(config, tmp_path / "b", data_root=data_root)
    assert latest_complete(tmp_path / "b" / CHECKPOINTS).name == "step-9"


def test_no_copy_is_needed_to_get_the_same_files(tiny, data_root, tmp_path):
    files = []
    for background in ("true", "false"):
        config = tiny(f"train.checkpoint_async={background}")
        folder = tmp_path / background
        train(config, folder, data_root=data_root)
        files.append(
            {
                str(path.relative_to(folder)): path.read_bytes()
                for path in (folder / CHECKPOINTS).glob("*/*.distcp")
            }
        )
    assert files[0] == files[1]
    assert len(files[0]) == 4


@pytest.mark.parametrize("free", [0, 1 << 30])
def test_a_write_that_failed_for_no_reason_given_is_laid_to_a_full_disk(
    tmp_path, monkeypatch, free
):
    partial = tmp_path / "partial-step-3"
    partial.mkdir()
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    fault = RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    said = "No space left on device" if free == 0 else "file write failed"
    with (
        pytest.raises((DataError, RuntimeError), match=said) as caught,
        disk_faults_named(partial),
    ):
        raise fault
    assert isinstance(caught.value, DataError) == (free == 0)
    assert not partial.exists()


def test_what_a_killed_run_had_begun_to_remove_goes_though_nothing_is_left_to_write(
    tiny, unbroken, data_root, tmp_path
):
    folder = tmp_path / "run"
    shutil.copytree(unbroken[0], folder)
    half = folder / CHECKPOINTS / "partial-step-6"
    shutil.copytree(folder / CHECKPOINTS / "step-6", half)
    (half / "manifest.json").unlink()
    train(tiny(), folder, resume=True, data_root=data_root)
    assert not half.exists()
    assert (folder / CHECKPOINTS / "step-6").exists()
