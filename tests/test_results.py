"""Figures in the documents are those of the committed result rows."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "quality.md"
TASKS = {"ml100k-time": ["label"], "kuairand-days": ["is_click", "long_view"]}
RECIPES = {"ml100k-time": {"ml100k-time", "ml100k-din"}, "kuairand-days": {"kuairand-days"}}
INPUTS = ("as shipped", "without statistics")
CASES = [(protocol, task) for protocol, tasks in TASKS.items() for task in tasks]


def quality_rows() -> list[dict]:
    file = ROOT / "results" / "cpu" / "quality.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def shown_rows(protocol: str, task: str) -> list[list[str]]:
    """Cells of a table of the page, without its head."""
    text = PAGE.read_text(encoding="utf-8")
    (table,) = re.findall(rf"<!-- table {protocol} {task} -->\n(.+?)<!-- end -->", text, re.DOTALL)
    lines = [line for line in table.splitlines() if line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def is_ours(row: dict, protocol: str, task: str, inputs: str) -> bool:
    shipped = row.get("settings") == []
    return (
        row.get("recipe") in RECIPES[protocol]
        and row["task"] == task
        and shipped == (inputs == "as shipped")
    )


def numbers(text: str) -> list[float]:
    return [float(figure) for figure in re.findall(r"[+-]?\d*\.\d+", text)]


def assert_shows(text: str, *wanted: float, digits: int = 4) -> None:
    assert numbers(text) == pytest.approx(wanted, abs=0.5001 * 10**-digits)


@pytest.mark.parametrize(("protocol", "task"), CASES)
def test_our_lines_are_mean_and_range_of_the_seeds(protocol, task):
    lines = [cells for cells in shown_rows(protocol, task) if cells[0].startswith("**")]
    assert {(cells[0].strip("*"), cells[1]) for cells in lines} == {
        (recipe, inputs) for recipe in RECIPES[protocol] for inputs in INPUTS
    }
    for name, inputs, auc, ne, calibration, *against in lines:
        rows = [
            row
            for row in quality_rows()
            if is_ours(row, protocol, task, inputs) and row["recipe"] == name.strip("*")
        ]
        seeds = {row["seed"]: row["test"] for row in rows if "seed" in row}
        assert seeds.keys() == {1, 2, 3}
        for text, key in ((auc, "auc"), (ne, "ne")):
            found = [test[key] for test in seeds.values()]
            assert_shows(text, sum(found) / 3, (max(found) - min(found)) / 2)
        mean = sum(test["calibration"] for test in seeds.values()) / 3
        assert_shows(calibration, mean, digits=3)
        assert against == ["", ""]


@pytest.mark.parametrize(("protocol", "task"), CASES)
def test_peer_lines_are_their_rows_and_name_the_better_side(protocol, task):
    lines = [cells for cells in shown_rows(protocol, task) if not cells[0].startswith("**")]
    rows = {
        (row["model"], row["inputs"]): row
        for row in quality_rows()
        if row.get("protocol") == protocol and row["task"] == task and row["settings"] == []
    }
    assert len(lines) == len(rows) >= 5
    for model, inputs, auc, ne, calibration, against, better in lines:
        row = rows[model, inputs]
        assert row["seeds"] == [1, 2, 3]
        assert len(row["test"]) == 3
        for text, key in ((auc, "auc"), (ne, "ne")):
            found = [test[key] for test in row["test"]]
            assert_shows(text, sum(found) / 3, (max(found) - min(found)) / 2)
        assert_shows(calibration, sum(test["calibration"] for test in row["test"]) / 3, digits=3)
        gap = row["against_ours"]
        assert_shows(against, gap["ne_difference"], gap["low_95"], gap["high_95"])
        if gap["low_95"] > 0:
            assert better == "ours"
        elif gap["high_95"] < 0:
            assert better == "theirs"
        else:
            assert better == "neither"


@pytest.mark.parametrize(("protocol", "task"), CASES)
def test_a_difference_is_that_of_the_two_lines(protocol, task):
    """The bootstrap's middle comes from losses; the lines above come from metrics."""
    ours = {
        cells[1]: numbers(cells[3])[0]
        for cells in shown_rows(protocol, task)
        if cells[0] == f"**{protocol}**"
    }
    for cells in shown_rows(protocol, task):
        if not cells[0].startswith("**"):
            difference = numbers(cells[3])[0] - ours[cells[1]]
            assert numbers(cells[5])[0] == pytest.approx(difference, abs=1.6e-4)


def test_the_table_of_the_ablation_is_that_of_its_rows():
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"<!-- rows ablation -->\n(.+?)<!-- end -->", page, re.DOTALL)
    lines = [line.strip("|").split("|") for line in text.splitlines() if line][2:]
    file = ROOT / "results" / "cpu" / "ablation.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    found = {row["variant"]: row for row in rows}
    assert [cells[0].strip() for cells in lines] == [row["variant"] for row in rows]
    for name, valid, test, auc, gap, verdict, flops, speed in lines:
        row = found[name.strip()]
        assert_shows(valid, row["valid"]["ne"], row["valid_half_range"]["ne"])
        assert_shows(test, row["test"]["ne"], row["test_half_range"]["ne"])
        assert_shows(auc, row["test"]["auc"], row["test_half_range"]["auc"])
        assert_shows(flops, row["flops_per_example"] / 1e6, digits=2)
        assert int(speed.replace(",", "")) == round(row["examples_per_s"])
        if row["ne_minus_base"] is None:
            assert (gap.strip(), verdict.strip()) == ("", "")
            continue
        low, high = row["ne_minus_base"]["low_95"], row["ne_minus_base"]["high_95"]
        assert_shows(gap, row["ne_minus_base"]["ne_difference"], low, high)
        assert verdict.strip() == ("worse" if low > 0 else "better" if high < 0 else "neither")


def test_bootstrap_in_the_text_is_that_of_the_rows():
    text = PAGE.read_text(encoding="utf-8").replace("\n", " ")
    (found,) = re.findall(
        r"resamples: (-?\.\d{4}), 95 % between (-?\.\d{4}) and (-?\.\d{4})\.", text
    )
    (row,) = (
        r
        for r in quality_rows()
        if r.get("recipes") == ["ml100k-time", "ml100k-din"] and r["settings"] == []
    )
    wanted = [f"{row[key]:.4f}" for key in ("ne_difference", "low_95", "high_95")]
    assert list(found) == [figure.replace("0.", ".", 1) for figure in wanted]
