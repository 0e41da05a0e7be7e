"""A process finds its place from torchrun's environment, and says what is wrong with it."""

import pytest
import torch

from gem_opkit.errors import ConfigError
from gem_parallel import launch
from gem_parallel.launch import World, process_group


def test_alone_is_a_world_of_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with process_group("cpu") as world:
        assert world == World(rank=0, size=1, device=torch.device("cpu"))
        assert world.is_first


@pytest.mark.parametrize("size", ["two", "²", "-1", "9" * 5000])
def test_bad_environment_is_named(monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigError, match="WORLD_SIZE must be a whole number; got '"):  # noqa: SIM117
        with process_group("cpu"):
            pass


@pytest.mark.parametrize(
    ("rank", "size", "word"),
    [
        ("2", "2", r"RANK must be in \[0, WORLD_SIZE\); got RANK 2 of WORLD_SIZE 2"),
        ("0", "0", "got RANK 0 of WORLD_SIZE 0"),
        ("1", "1", "got RANK 1 of WORLD_SIZE 1"),
        (None, "2", "RANK must be set with WORLD_SIZE 2; got none"),
    ],
)
def test_a_place_that_does_not_exist_is_refused_not_waited_for(monkeypatch, rank, size, word):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigError, match=word):  # noqa: SIM117
        with process_group("cpu"):
            pass


def test_unknown_device_is_refused():
    with pytest.raises(ConfigError, match="auto, cpu or cuda; got 'tpu'"):  # noqa: SIM117
        with process_group("tpu"):
            pass


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    # Also where there is a GPU: a skip here would fail on that machine.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="got local rank 0 and 0 GPUs"):  # noqa: SIM117
        with process_group("cuda"):
            pass


def _thread(folder, number, name, state):
    (folder / str(number)).mkdir(exist_ok=True)
    (folder / str(number) / "stat").write_text(f"{number} ({name}) {state} 1 2 3\n")


def test_the_end_waits_for_threads_of_gloo_that_had_no_core(monkeypatch, tmp_path):
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            _thread(tmp_path, 2, "pt_gloo_runloop", "S")

    monkeypatch.setattr(launch, "_TASKS", tmp_path)
    monkeypatch.setattr(launch.time, "sleep", nap)
    _thread(tmp_path, 1, "python", "R")
    _thread(tmp_path, 2, "pt_gloo_runloop", "R")
    (tmp_path / "3").mkdir()  # A thread that has just ended.
    launch._settle()
    assert len(naps) == 3


def test_the_end_does_not_wait_for_ever(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "_TASKS", tmp_path)
    monkeypatch.setattr(launch, "_SETTLE_S", 0.01)
    monkeypatch.setattr(launch, "_SETTLE_LIMIT_S", 0.05)
    _thread(tmp_path, 2, "pt_gloo_runloop", "D")
    launch._settle()
    assert launch._gloo_is_busy()
