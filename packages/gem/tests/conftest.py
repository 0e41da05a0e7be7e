"""A recipe that trains the full model in about a second, and its data set."""

import multiprocessing

import numpy as np
import pytest
import torch

import gem_parallel.testing  # noqa: F401 - sets up the fork server that the ranks come from
from gem.config import RunConfig, parse_recipe

# Loaded once by that server in place of once a rank. Nothing here starts threads.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["torch", "torch.distributed", "gem.train.loop"]
)

TINY = """
name = "tiny"
[data]
dataset = "synthetic"
[data.synthetic]
rows = 400
users = 40
items = 30
categories = 4
max_backlog_events = 12
[data.streams.clicks]
max_events = 6
[data.streams.impressions]
max_events = 8
[[data.statistics]]
kind = "rate"
name = "item_rate"
keys = ["item_id"]
label = "click"
towards = 0.3
[model]
kind = "gem"
width = 8
layers = ["transformer", "interaction"]
summary_tokens = 2
summary_hidden = 8
dropout = 0.1
[model.embeddings]
embedding_dim = 4
[model.stream]
width = 8
seeds = 2
summary_tokens = 2
[model.experts]
fm_tokens = 2
linear_tokens = 2
rank = 2
mlp_widths = [8]
[model.heads]
trunk_widths = [8]
[train]
batch_examples = 32
log_every_steps = 2
window_steps = 4
checkpoint_every_steps = 3
keep_checkpoints = 9
threads = 1
device = "cpu"
ema_decay = 0.9
clip_norm = 1.0
[train.schedule]
warmup_steps = 2
tables = true
"""


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20_261_129)


@pytest.fixture(scope="session")
def data_root(tmp_path_factory):
    """Where the tests' data sets lie; the first run that needs one makes it."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def tiny():
    """Makes the tiny config, with overrides."""

    def make(*overrides: str, seed: int | None = None) -> RunConfig:
        return parse_recipe(TINY, name="tiny", origin="tiny", overrides=overrides, seed=seed)

    return make


@pytest.fixture
def tiny_file(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="session", autouse=True)
def _one_thread_for_shared_runs():
    """What several tests share is made before ``_one_thread`` of the first of them."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread():
    """Two cores are shared by many processes; more threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
