"""`--profile`: a trace of a few steps that other programs read."""

import json

import torch

from gem.train.loop import train
from gem.train.trace import PROFILE_FOLDER


def test_a_trace_names_the_sections_of_a_step(tiny, data_root, tmp_path):
    watched = train(tiny(), tmp_path, profile=True, data_root=data_root)
    [path] = (tmp_path / PROFILE_FOLDER).iterdir()
    assert path.name == "trace-rank-0.json"
    events = json.loads(path.read_text())["traceEvents"]
    counts = {}
    for event in events:
        counts[event.get("name")] = counts.get(event.get("name"), 0) + 1
    # Three steps, each with one forward and one backward pass, and operators within.
    for section in ("forward", "backward", "data"):
        assert 3 <= counts[f"gem: {section}"] <= 12, section
    assert counts["aten::mm"] >= 3
    durations = [e["dur"] for e in events if e.get("name") == "gem: backward"]
    assert max(durations) > 0
    plain = train(tiny(), tmp_path / "plain", data_root=data_root)
    for period in ("progressive", "valid", "test"):
        assert watched[period] == plain[period]


def test_a_disk_without_room_for_a_trace_is_no_end_of_the_run(
    tiny, data_root, tmp_path, monkeypatch, caplog
):
    """torch writes what fits under a name of its own and says nothing."""

    def cut_short(self, path):
        (tmp_path / PROFILE_FOLDER / f"{path}.tmp").write_text('{"traceEvents": [')

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", cut_short)
    assert train(tiny(), tmp_path, profile=True, data_root=data_root)["steps"] == 10
    assert "trace-rank-0.json cannot be written" in caplog.text
    assert list((tmp_path / PROFILE_FOLDER).iterdir()) == []


def test_a_run_too_short_for_a_trace_leaves_none(tiny, data_root, tmp_path):
    train(tiny("data.max_rows=64"), tmp_path, profile=True, data_root=data_root)
    assert not (tmp_path / PROFILE_FOLDER).exists()
