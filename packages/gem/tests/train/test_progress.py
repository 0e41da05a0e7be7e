"""What a person sees: plain lines away from a terminal, and the table at the end."""

import io
import re

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
        ["train", "20/100", "loss", "0.5000", "NE", "n/a", "1,234", "ex/s", "left", "20", "s"]
    )
    assert lines[-1].split()[1] == "50/100"


def test_the_time_left_is_told_where_there_is_some_and_it_can_be_judged(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = plain_console()
    with Display(console).bar("valid", 4) as bar:
        for done in range(1, 5):
            now[0] += 6.0
            bar.update(done)
    lines = [line.strip() for line in console.file.getvalue().splitlines()]
    assert lines == ["valid 1/4", "valid 2/4", "valid 3/4  left 6 s", "valid 4/4"]


def test_no_console_prints_nothing(capsys):
    display = Display(None)
    display.stage("build")
    with display.bar("train", 3) as bar:
        bar.update(1, loss=1.0)
    assert capsys.readouterr() == ("", "")


def terminal(width: int) -> Console:
    # Progress asks the environment too; this is what a person sees.
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)


def shown(console: Console) -> list[str]:
    """What stood on the lines of a terminal, one after another."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\r", console.file.getvalue())
    return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def test_a_moving_line_is_whole_at_80_columns():
    console = terminal(80)
    with Display(console).bar("train", 156_250, 12_000) as bar:
        bar.update(12_345, loss=0.61234, NE=0.98765, examples_per_s=123_456.0)
        bar._progress.refresh()
        lines = shown(console)
    assert all(len(line) <= 80 for line in lines)
    found = re.search(
        r"train 12345/156250  loss 0\.6123  NE 0\.9877  123,456 ex/s  left (\S+)$", lines[-1]
    )
    assert found, lines
    assert re.fullmatch(r"[\d:]+|-+:-+", found[1])


def test_a_stage_that_wraps_stays_right_of_the_time():
    console = terminal(40)
    Display(console).stage("read data set [bold] " + "word " * 12 + "/a/long/path" * 5)
    lines = shown(console)
    assert len(lines) > 2
    assert lines[0].startswith("   0.0 s  read data set [bold] word")
    assert all(line.startswith(" " * 10) for line in lines[1:])
    assert all(len(line) <= 40 for line in lines)
    console = plain_console()
    Display(console).stage("x " * 200)
    assert console.file.getvalue().count("\n") == 1


def summary_of(domains):
    values = {
        **{"ne": 0.9, "auc": None, "gauc": 0.6, "logloss": 0.5, "calibration": 1.0},
        **{"examples": 1_000_000, "positives": 10},
    }
    found = {
        task: {**values, "domains": dict.fromkeys(domains, values)}
        for task in ("click", "conversion")
    }
    return {
        **{"recipe": "r", "dataset": "d[red]", "seed": 1},
        **dict.fromkeys(("progressive", "valid", "test"), found),
    }


@pytest.mark.parametrize("domains", [["all"], ["feed", "story[x]"]])
def test_table_has_a_row_for_every_domain_when_there_are_several(domains):
    table = progress.results_table(summary_of(domains))
    assert table.row_count == (6 if domains == ["all"] else 18)
    console = plain_console()
    console.print(table)
    text = console.file.getvalue()
    assert "n/a" in text
    assert "1,000,000" in text
    assert "r on d[red], seed 1" in text
    assert text.count("story[x]") == (0 if domains == ["all"] else 6)
    assert [text.count(period) for period in progress.PERIODS] == [1, 1, 1]


def test_table_is_whole_at_80_columns():
    console = terminal(80)
    Display(console).results(summary_of(["feed", "stories"]))
    text = console.file.getvalue()
    assert "…" not in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert re.search(r"period +task +labels +NE +AUC +GAUC +loss +calib\.", text)
    assert re.search(
        r"progressive +click +1,000,000 +0\.9000 +n/a +0\.6000 +0\.5000 +1\.0000", text
    )
    assert re.search(r"\n +conversion +1,000,000", text)


def test_domains_that_are_left_out_are_said_to_be_elsewhere():
    console = plain_console()
    Display(console).results(summary_of(["feed", "stories"]), domains="run[1]/summary.json")
    text = console.file.getvalue()
    assert "feed" not in text
    assert "by domain: run[1]/summary.json" in text
    console = plain_console()
    Display(console).results(summary_of(["all"]), domains="run/summary.json")
    assert "by domain" not in console.file.getvalue()


def test_no_speed_is_printed_where_no_step_was_taken():
    console = plain_console()
    summary = {
        "throughput": {"examples_per_s": 5.0, "tokens_per_s": 6.0},
        "memory": {"peak_bytes": 2**30},
    }
    Display(console).costs(summary, {"data": None, "model": None})
    assert console.file.getvalue() == ""
    Display(console).costs(summary, {"data": 0.25, "model": 0.75})
    assert "5 examples/s" in console.file.getvalue()
