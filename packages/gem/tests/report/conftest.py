"""Finished runs to report on, trained once; and lets the tests import `html_page`."""

import shutil
import sys
from pathlib import Path

import pytest

from gem.train.loop import train

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def runs(tiny, data_root, tmp_path_factory):
    """Folders of two seeds of a recipe, and of another recipe on the same data."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed, settings in (
        ("one", 1, ()),
        ("two", 2, ()),
        ("slow", 1, ("name=slow", "train.dense.lr=1e-5")),
    ):
        train(tiny(*settings, seed=seed), folder / name, data_root=data_root)
    return folder


@pytest.fixture
def copy(runs, tmp_path):
    """A run's folder of its own, to be spoiled."""
    return Path(shutil.copytree(runs / "one", tmp_path / "run"))
