"""A run that dies at any moment at which it writes goes on as if it had not, to the last bit."""

import pytest
from dying_run import dies
from same_run import final_tensors, log_rows, results

from gem.train.loop import train
from gem.train.run_folder import CHECKPOINTS
from gem_parallel.testing import run_ranks

# Checkpoints of few steps, of which old ones go; one step is written again, once it is evaluated.
SETTINGS = (
    *("train.checkpoint_every_steps=2", "train.keep_checkpoints=1"),
    *("train.interim.every_steps=4", "train.interim.stop_after=9"),
)
# Every so many operations: each death costs seconds, and neighbours are alike.
STRIDE = 17


@pytest.fixture(scope="module")
def whole(tiny, data_root, tmp_path_factory):
    """An unbroken run, and how often one changes something on the disk."""
    folder, config = tmp_path_factory.mktemp("whole"), tiny(*SETTINGS)
    summary = train(config, folder / "run", data_root=data_root)
    (operations,) = run_ranks(dies, 1, config, folder / "again", data_root, None)
    return config, folder / "run", summary, operations


@pytest.mark.parametrize("first", [2, 8])
def test_a_run_that_dies_at_any_moment_continues_bit_for_bit(whole, data_root, tmp_path, first):
    config, unbroken, summary, operations = whole
    assert operations > 50
    wanted = final_tensors(unbroken)
    for last in range(first, operations + 1, STRIDE):
        folder = tmp_path / str(last)
        with pytest.raises(TimeoutError, match=r"no result from ranks \[0\]: dead"):
            run_ranks(dies, 1, config, folder, data_root, last)
        again = train(config, folder, resume=True, data_root=data_root)
        assert results(again) == results(summary), last
        assert log_rows(folder) == log_rows(unbroken), last
        got = final_tensors(folder)
        assert got.keys() == wanted.keys()
        assert all(got[name].equal(wanted[name]) for name in got), last
        # Nothing half written or half removed stays behind.
        names = {path.name for path in (folder / CHECKPOINTS).iterdir()}
        assert names == {path.name for path in (unbroken / CHECKPOINTS).iterdir()}, last
