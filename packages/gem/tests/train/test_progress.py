"""What a person sees: plain lines away from a terminal, and the table at the end."""

import io

import pytest
from rich.console import Console

from gem.train import progress
from gem.train.progress import Display


def plain_console():
    return Console(file=io.StringIO(), width=120, force_terminal=False)


def test_plain_lines_come_every_few_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = plain_console()
    with Display(console).bar("train", 100) as bar:
        for done in range(1, 51):
            now[0] += 0.25
            bar.update(done, loss=0.5, NE=None, examples_per_s=1234.0)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 3  # after 5 s, after 10 s, and the last one
    assert lines[0].split() == (
        ["train", "20/100", "loss", "0.5000", "NE", "n/a", "examples/s", "1,234", "left", "20", "s"]
    )
    assert lines[-1].split()[1] == "50/100"


def test_no_console_prints_nothing(capsys):
    display = Display(None)
    display.stage("build")
    with display.bar("train", 3) as bar:
        bar.update(1, loss=1.0)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("domains", [["all"], ["feed", "story"]])
def test_table_has_a_row_for_every_domain_when_there_are_several(domains):
    values = {
        **{"ne": 0.9, "auc": None, "gauc": 0.6, "logloss": 0.5, "calibration": 1.0},
        **{"examples": 1000, "positives": 10},
    }
    found = {"click": {**values, "domains": dict.fromkeys(domains, values)}}
    summary = {"recipe": "r", "dataset": "d", "seed": 1, "valid": found, "test": found}
    table = progress.results_table(summary)
    assert table.row_count == (2 if domains == ["all"] else 6)
    console = plain_console()
    console.print(table)
    text = console.file.getvalue()
    assert "n/a" in text
    assert "1,000" in text
