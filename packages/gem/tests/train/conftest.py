"""One finished run that many tests compare with or copy. Nobody writes into it."""

import pytest

from gem.train.loop import train


@pytest.fixture(scope="session")
def unbroken(tiny, tmp_path_factory, data_root):
    """Its folder and its summary."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    return folder, train(tiny(), folder, data_root=data_root)
