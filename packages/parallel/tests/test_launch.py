"""A process finds its place from torchrun's environment, and says what is wrong with it."""

import pytest
import torch

from gem_opkit.errors import ConfigError
from gem_parallel.launch import World, process_group


def test_alone_is_a_world_of_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with process_group("cpu") as world:
        assert world == World(rank=0, size=1, device=torch.device("cpu"))
        assert world.is_first


def test_bad_environment_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE must be a whole number; got 'two'"):  # noqa: SIM117
        with process_group("cpu"):
            pass


def test_unknown_device_is_refused():
    with pytest.raises(ConfigError, match="auto, cpu or cuda; got 'tpu'"):  # noqa: SIM117
        with process_group("tpu"):
            pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="got local rank 0 and 0 GPUs"):  # noqa: SIM117
        with process_group("cuda"):
            pass
