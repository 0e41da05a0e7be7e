"""metrics.jsonl: each row once, also after a run that was killed and resumed."""

import json

import pytest

from gem.train.run_log import METRICS_FILE, RunLog
from gem_opkit.errors import DataError


def steps_in(folder):
    return [json.loads(row)["step"] for row in (folder / METRICS_FILE).read_text().splitlines()]


def test_resuming_cuts_off_what_is_done_again(tmp_path):
    with RunLog(tmp_path, 0, enabled=True) as log:
        for step in (5, 10, 15):
            log.write({"step": step, "loss": 1.0 / step})
        log.write({"step": 15, "split": "test", "metrics": {}})
    path = tmp_path / METRICS_FILE
    path.write_text(path.read_text() + '{"step": 20, "lo')  # killed in the middle of a row
    with RunLog(tmp_path, 10, enabled=True) as log:
        assert steps_in(tmp_path) == [5, 10]
        log.write({"step": 15, "loss": 0.5})
    assert steps_in(tmp_path) == [5, 10, 15]


def test_numbers_reach_tensorboard_under_their_path(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(tmp_path, 0, enabled=True) as log:
        log.write({"step": 7, "window": {"click": {"ne": 0.5, "auc": None}}, "note": "x"})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["window/click/ne"]
    [event] = events.Scalars("window/click/ne")
    assert (event.step, event.value) == (7, 0.5)


def test_other_ranks_write_nothing(tmp_path):
    with RunLog(tmp_path, 0, enabled=False) as log:
        log.write({"step": 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["not json", "[1]", "{}", '{"step": "1"}', "3", "\0\0"])
def test_a_damaged_row_is_named(tmp_path, line):
    """Dropping it in silence would leave a gap that nobody asked for."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(DataError, match=r"metrics.jsonl line 2 must be a JSON object"):
        RunLog(tmp_path, 1, enabled=True)
    assert path.read_text().endswith(line + "\n")
