"""One fault of each kind of the campaign in packages/gem/benchmarks/faults.py, at other places."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import faults
from fault_kinds import KINDS
from fault_world import EQUAL, SKIPPED, Fault, LostError, make_world

# The day's number is as good as any: other faults than those of the committed table.
SEED = 20_261_130


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_ends_as_the_unbroken_one_or_stops_with_one_line(kind, world, tmp_path):
    fault = Fault(world, tmp_path / "fault", random.Random(f"{SEED} {kind}"))
    outcome = KINDS[kind](fault)
    assert fault.where
    assert (outcome == SKIPPED) == (kind == "NaN batch, skip")
    if kind == "clock jump":
        assert outcome == EQUAL


def test_a_run_that_lost_something_is_told_from_one_that_did_not(world, tmp_path):
    """The harness itself: metrics that differ by a digit, and an error of two lines."""
    fault = Fault(world, tmp_path / "fault", random.Random(1))
    fault.begin()
    assert fault.train().code == 0
    fault.compare()
    summary = tmp_path / "fault" / "run" / "summary.json"
    text = summary.read_text()
    ne = world.unbroken[1]["test"]["click"]["ne"]
    assert repr(ne) in text
    summary.write_text(text.replace(repr(ne), repr(ne + 1e-15)))
    with pytest.raises(LostError, match="test click ne differs"):
        fault.compare()
    summary.unlink()
    ended = fault.train()
    assert ended.code == 0
    with pytest.raises(LostError, match="no clear line, exit code 0"):
        fault.one_line(ended)


@pytest.mark.parametrize(
    ("words", "rows_go_to", "page"),
    [
        (["--only", "SIGTERM"], None, False),
        (["--only", "SIGTERM", "--results", "own.jsonl"], "own.jsonl", False),
        (["--results", "own.jsonl"], "own.jsonl", False),
        ([], "committed.jsonl", True),
    ],
)
def test_a_part_of_a_campaign_leaves_the_committed_rows_alone(
    words, rows_go_to, page, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    committed, shown = Path("committed.jsonl"), Path("page.md")
    committed.write_text("")
    shown.write_text("<!-- table faults -->\n<!-- end -->\n")
    before = shown.read_text()
    row = {"bench": "faults", "case": "SIGTERM 0", "kind": "SIGTERM", "outcome": EQUAL}
    monkeypatch.setattr(faults, "RESULTS", committed)
    monkeypatch.setattr(faults, "PAGE", shown)
    monkeypatch.setattr(faults, "preload", lambda: None)
    monkeypatch.setattr(faults, "make_world", lambda _: None)
    monkeypatch.setattr(faults, "campaign", lambda *_: [row | {"seconds": 1.0}])
    monkeypatch.setattr("sys.argv", ["faults.py", *words])
    faults.main()
    assert "SIGTERM" in capsys.readouterr().out
    written = [path.name for path in tmp_path.glob("*.jsonl") if path.stat().st_size]
    assert written == ([] if rows_go_to is None else [rows_go_to])
    assert (shown.read_text() != before) == page
