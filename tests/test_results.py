"""Figures in the documents are those of the committed result rows."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "quality.md"
TASKS = {"ml100k-time": ["label"], "kuairand-days": ["is_click", "long_view"]}
INPUTS = ("as shipped", "without statistics")
ONE_PASS = [(protocol, task, "one") for protocol, tasks in TASKS.items() for task in tasks]
MARKER = r"<!-- table (\S+) (\S+?)(?: (any))? -->"
CASES = [
    (protocol, task, passes or "one")
    for protocol, task, passes in re.findall(MARKER, PAGE.read_text(encoding="utf-8"))
]
# What a peer is compared with, where its row does not say so.
REFERENCE = {"ml100k-time": "ml100k-time", "kuairand-days": "kuairand-days"}


def quality_rows() -> list[dict]:
    file = ROOT / "results" / "cpu" / "quality.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def shown_rows(protocol: str, task: str, passes: str) -> list[list[str]]:
    """Cells of a table of the page, without its head."""
    text = PAGE.read_text(encoding="utf-8")
    marker = f"<!-- table {protocol} {task}{' any' if passes == 'any' else ''} -->"
    (table,) = re.findall(rf"{marker}\n(.+?)<!-- end -->", text, re.DOTALL)
    lines = [line for line in table.splitlines() if line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def is_ours(row: dict, recipe: str, task: str, inputs: str) -> bool:
    raw = "data.statistics=[]" in row["settings"]
    return row.get("recipe") == recipe and row["task"] == task and raw == (inputs != "as shipped")


def repeated(row: dict) -> bool:
    return any(setting.startswith("train.passes=") for setting in row["settings"])


def numbers(text: str) -> list[float]:
    return [float(figure) for figure in re.findall(r"[+-]?\d*\.\d+", text)]


def assert_shows(text: str, *wanted: float, digits: int = 4) -> None:
    assert numbers(text) == pytest.approx(wanted, abs=0.5001 * 10**-digits)


def test_the_page_has_the_tables_of_one_pass():
    assert set(ONE_PASS) <= set(CASES) and len(set(CASES)) == len(CASES)


@pytest.mark.parametrize(("protocol", "task", "passes"), CASES)
def test_our_lines_are_mean_and_range_of_the_seeds(protocol, task, passes):
    lines = [c for c in shown_rows(protocol, task, passes) if c[0].startswith("**")]
    recipes = {cells[0].strip("*") for cells in lines}
    assert {(cells[0].strip("*"), cells[1]) for cells in lines} == {
        (recipe, inputs) for recipe in recipes for inputs in INPUTS
    }
    for name, inputs, auc, ne, calibration, *against in lines:
        rows = [row for row in quality_rows() if is_ours(row, name.strip("*"), task, inputs)]
        # Any number may be one, where that was best on the valid rows.
        several = [row for row in rows if repeated(row)] if passes == "any" else []
        rows = several or [row for row in rows if not repeated(row)]
        seeds = {row["seed"]: row["test"] for row in rows if "seed" in row}
        assert seeds.keys() == {1, 2, 3}
        for text, key in ((auc, "auc"), (ne, "ne")):
            found = [test[key] for test in seeds.values()]
            assert_shows(text, sum(found) / 3, (max(found) - min(found)) / 2)
        mean = sum(test["calibration"] for test in seeds.values()) / 3
        assert_shows(calibration, mean, digits=3)
        assert against == ["", ""]


@pytest.mark.parametrize(("protocol", "task", "passes"), CASES)
def test_peer_lines_are_their_rows_and_name_the_better_side(protocol, task, passes):
    shown = shown_rows(protocol, task, passes)
    lines = [cells for cells in shown if not cells[0].startswith("**")]
    rows = {
        (row["model"], row["inputs"]): row
        for row in quality_rows()
        if row.get("protocol") == protocol
        and row["task"] == task
        and row["settings"] == []
        and row.get("passes", "one") == passes
    }
    assert len(lines) == len(rows) >= 5
    for model, inputs, auc, ne, calibration, against, better in lines:
        row = rows[model, inputs]
        assert row.get("ours", REFERENCE[protocol]) == shown[0][0].strip("*")
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


@pytest.mark.parametrize(("protocol", "task", "passes"), CASES)
def test_a_difference_is_that_of_the_two_lines(protocol, task, passes):
    """The bootstrap's middle comes from losses; the lines above come from metrics."""
    shown = shown_rows(protocol, task, passes)
    ours = {cells[1]: numbers(cells[3])[0] for cells in shown if cells[0] == shown[0][0]}
    for cells in shown:
        if not cells[0].startswith("**"):
            difference = numbers(cells[3])[0] - ours[cells[1]]
            assert numbers(cells[5])[0] == pytest.approx(difference, abs=1.6e-4)


ABLATIONS = re.findall(
    r"<!-- rows ablation (\S+) (\S+) -->\n(.+?)<!-- end -->",
    (ROOT / "docs" / "models.md").read_text(encoding="utf-8"),
    re.DOTALL,
)


@pytest.mark.parametrize("recipe, task, text", ABLATIONS, ids=lambda x: x if len(x) < 40 else "")
def test_a_table_of_an_ablation_is_that_of_its_rows(recipe, task, text):
    lines = [line.strip("|").split("|") for line in text.splitlines() if line][2:]
    file = ROOT / "results" / "cpu" / "ablation.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if (row["recipe"], row["task"]) == (recipe, task)]
    found = {row["variant"]: row for row in rows}
    assert [cells[0].strip() for cells in lines] == [row["variant"] for row in rows]
    for name, seeds, valid, test, auc, gap, verdict, flops, speed in lines:
        row = found[name.strip()]
        assert int(seeds) == len(row["seeds"])
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


def test_the_page_has_a_table_of_an_ablation():
    assert ("ml100k-time", "label") in {(recipe, task) for recipe, task, _ in ABLATIONS}


def test_tables_of_stages_and_students_are_those_of_the_rows(tmp_path):
    filled = tmp_path / "page.md"
    filled.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    script = ROOT / "packages" / "gem" / "benchmarks" / "transfer_tables.py"
    subprocess.run([sys.executable, script, "--page", filled], check=True)
    assert filled.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


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


def test_the_demo_gives_what_the_page_says():
    text = PAGE.read_text(encoding="utf-8").replace("\n", " ")
    (shown,) = re.findall(
        r"test rows AUC (\S+) and NE (\S+) of clicks, (\S+) and (\S+) of long views", text
    )
    for task, found in (("is_click", shown[:2]), ("long_view", shown[2:])):
        (row,) = (
            row
            for row in quality_rows()
            if row.get("recipe") == "kuairand-days"
            and row.get("seed") == 1
            and row["task"] == task
            and not row["settings"]
        )
        assert_shows(" ".join(found), row["test"]["auc"], row["test"]["ne"])


def test_two_passes_in_the_text_are_those_of_the_rows():
    text = PAGE.read_text(encoding="utf-8").replace("\n", " ")
    (shown,) = re.findall(r"Two passes of `kuairand-days` reach(.+?): the long view", text)
    wanted = [
        figure
        for raw in (False, True)
        for task in TASKS["kuairand-days"]
        for row in quality_rows()
        if is_ours(row, "kuairand-days", task, "without statistics" if raw else "as shipped")
        and repeated(row)
        and "seeds" in row
        for figure in (row["test"]["ne"], row["half_range"]["test"]["ne"])
    ]
    assert len(wanted) == 8
    assert_shows(shown, *wanted)


def test_progressive_figures_in_the_text_are_those_of_the_rows():
    text = PAGE.read_text(encoding="utf-8").replace("\n", " ")
    found = re.findall(r"progressive NE is (\S+)\s+where that of `ml100k-time` is (\.\d+)", text)
    means = [
        row["progressive"]["ne"]
        for recipe in ("ml100k-cross", "ml100k-time")
        for row in quality_rows()
        if row.get("recipe") == recipe and "seeds" in row and row["settings"] == []
    ]
    assert_shows(" ".join(found[0]), *means)
