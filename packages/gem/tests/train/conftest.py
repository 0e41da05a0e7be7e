"""One finished run that many tests compare with or copy. Nobody writes into it."""

import sys
from pathlib import Path

import pytest

from gem.train.loop import train

# For the modules beside the tests: same_run, dying_run.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def unbroken(tiny, tmp_path_factory, data_root):
    """Its folder and its summary."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    return folder, train(tiny(), folder, data_root=data_root)
