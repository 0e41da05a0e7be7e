"""metrics.jsonl: each row once, also after a run that was killed and resumed."""

import errno
import io
import json

import pytest

from gem.faults import one_line
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


def scalars(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_curves_of_a_resumed_run_are_those_of_an_unbroken_one(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1e9)  # files of one second are two files
    with RunLog(tmp_path, 0, enabled=True) as log:
        for step in (5, 10, 15):
            log.write({"step": step, "loss": 1.0})
    with RunLog(tmp_path, 10, enabled=True) as log:
        log.write({"step": 15, "loss": 2.0})
    assert scalars(tmp_path, "loss") == [(5, 1.0), (10, 1.0), (15, 2.0)]


class FullDisk(io.FileIO):
    """Takes some bytes of a write, and then no more."""

    room = 10**9

    def write(self, content):
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = super().write(bytes(content)[: self.room])
        self.room -= taken
        return taken


def test_a_full_disk_is_named_and_leaves_whole_rows(tmp_path):
    with pytest.raises(OSError) as caught, RunLog(tmp_path, 0, enabled=True) as log:
        log.write({"step": 1})
        log._file.close()
        log._file = FullDisk(tmp_path / METRICS_FILE, "a")
        log._file.room = 5
        log.write({"step": 2})
    line = one_line(caught.value, "gem train")
    assert line.startswith(
        f"gem train: {tmp_path / METRICS_FILE} must lie on a disk with free space"
    )
    assert "continues with --resume" in line
    assert steps_in(tmp_path) == [1]


def test_without_room_for_curves_the_run_goes_on(tmp_path, caplog):
    with RunLog(tmp_path, 0, enabled=True) as log:
        log.write({"step": 1, "loss": 1.0})
        log._board._writer._writer = FullDisk(tmp_path / "elsewhere", "a")
        log._board._writer._writer.room = 5
        for step in (2, 3):
            log.write({"step": step, "loss": 1.0})
    assert caplog.text.count("tensorboard takes no more curves ([Errno 28] No space left") == 1
    assert steps_in(tmp_path) == [1, 2, 3]
    assert scalars(tmp_path, "loss") == [(1, 1.0)]


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
