"""Curves elsewhere: what is sent, and a clear word where the package is missing."""

import importlib
import sys
import types

import pytest

from gem.train.loop import train
from gem_opkit.errors import ConfigError, UnsupportedError

SETTINGS = ("train.wandb.project=ads", "train.wandb.mode=offline")


class Recorder(types.ModuleType):
    """Stands in for wandb: keeps what it is told, and has the rule that steps do not fall."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.begun, self.rows, self.ended = [], [], 0

    def Settings(self, **settings):
        return settings

    def init(self, **settings):
        self.begun.append(settings)
        return self

    def log(self, numbers, step):
        assert not self.rows or step >= self.rows[-1][0]
        assert all(isinstance(value, float) for value in numbers.values())
        self.rows.append((step, numbers))

    def finish(self):
        self.ended += 1


def test_every_row_is_sent_and_a_resumed_run_is_the_same_one(
    tiny, data_root, tmp_path, monkeypatch
):
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", recorder)
    config = tiny(*SETTINGS, "train.interim.every_steps=5")
    summary = train(config, tmp_path, data_root=data_root)
    assert (len(recorder.begun), recorder.ended) == (1, 1)
    began = recorder.begun[0]
    assert (began["project"], began["mode"]) == ("ads", "offline")
    assert began["config"]["train"]["batch_examples"] == 32
    assert [step for step, _ in recorder.rows] == [2, 4, 5, 6, 8, 10, 10, 10, 10]
    names = {name for _, numbers in recorder.rows for name in numbers}
    assert {"loss", "lr", "window/click/ne", "interim/valid/metrics/click/ne"} <= names
    last = {n: v for _, numbers in recorder.rows for n, v in numbers.items()}
    assert last["final/test/metrics/click/ne"] == summary["test"]["click"]["ne"]
    train(config, tmp_path, resume=True, data_root=data_root)
    assert recorder.begun[1]["id"] == began["id"]
    assert [step for step, _ in recorder.rows[9:]] == [10, 10]  # the evaluation at the end
    assert recorder.ended == 2


def test_a_failure_there_is_no_failure_of_the_run(tiny, data_root, tmp_path, monkeypatch, caplog):
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", recorder)
    monkeypatch.setattr(recorder, "log", lambda *_, **__: 1 / 0)
    summary = train(tiny(*SETTINGS), tmp_path / "run", data_root=data_root)
    assert summary["steps"] == 10
    assert caplog.text.count("wandb takes no more rows (division by zero)") == 1
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "wandb", recorder)
    monkeypatch.setattr(recorder, "finish", lambda: 1 / 0)
    train(tiny(*SETTINGS, "data.max_rows=32"), tmp_path / "short", data_root=data_root)
    assert caplog.text.count("wandb has not taken everything (division by zero)") == 1
    monkeypatch.setattr(recorder, "init", lambda **_: 1 / 0)
    with pytest.raises(ConfigError, match=r"train\.wandb must be able to begin a run there; got Z"):
        train(tiny(*SETTINGS), tmp_path / "other", data_root=data_root)


def test_without_the_package_it_is_refused_by_name(tiny, data_root, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name)
    )
    words = (
        r"train\.wandb must find the package wandb; got none; pip install 'gem-trainer\[wandb\]'"
    )
    with pytest.raises(UnsupportedError, match=words):
        train(tiny(*SETTINGS), tmp_path, data_root=data_root)
    assert list(tmp_path.iterdir()) == []
