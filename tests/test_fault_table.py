"""The table of docs/faults.md is that of the committed rows, and nothing in them was lost."""

import json
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTCOMES = ("equal", "resumed", "stopped", "older", "skipped")


def rows() -> list[dict]:
    file = ROOT / "results" / "cpu" / "faults.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_ten_faults_of_every_kind_and_none_lost():
    kinds = Counter(row["kind"] for row in rows())
    assert min(kinds.values()) >= 10
    assert sum(kinds.values()) >= 200
    assert {row["outcome"] for row in rows()} <= {*OUTCOMES}
    assert len({(row["seed"], row["commit"]) for row in rows()}) == 1


def test_a_fault_that_stops_a_run_is_told_in_one_line():
    for row in rows():
        if row["outcome"] in ("stopped", "older", "skipped"):
            assert row["message"] and "\n" not in row["message"], row


def test_the_page_shows_the_rows():
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- table faults -->\n(.+?)<!-- end -->", text, re.DOTALL)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    head, _, *shown = lines
    assert tuple(head[2:]) == OUTCOMES
    counted = Counter((row["kind"], row["outcome"]) for row in rows())
    assert [cells[0] for cells in shown] == list(dict.fromkeys(row["kind"] for row in rows()))
    for kind, total, *counts in shown:
        found = [counted[kind, outcome] for outcome in OUTCOMES]
        assert [int(count or 0) for count in counts] == found
        assert int(total) == sum(found)
