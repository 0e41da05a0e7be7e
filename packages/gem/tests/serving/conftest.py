"""Artefacts of the tiny recipe."""

import sys
from pathlib import Path

import pytest

# For the module beside the tests: served_runs.
sys.path.insert(0, str(Path(__file__).parent))

from served_runs import SHORT, Served


@pytest.fixture(scope="session")
def served(tiny, tmp_path_factory, data_root):
    """The artefact of the tiny recipe."""
    return Served(tiny(*SHORT), tmp_path_factory.mktemp("served"), data_root)


@pytest.fixture
def serve_of(tiny, tmp_path, data_root):
    """Makes the artefact of a variant of the tiny recipe."""
    return lambda *overrides: Served(tiny(*SHORT, *overrides), tmp_path, data_root)
