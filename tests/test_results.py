"""Figures in the documents are those of the committed result rows."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
RAW = ["data.statistics=[]", "data.transforms={}"]


def quality_rows() -> list[dict]:
    file = ROOT / "results" / "cpu" / "quality.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_quality_table_shows_the_mean_over_three_seeds():
    text = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
    shown = re.findall(
        r"^\| (ml100k-\w+) \| (as shipped|without statistics) \| (.+?) \| (.+?) \| (.+?) \|$",
        text,
        flags=re.MULTILINE,
    )
    assert len(shown) == 4
    for recipe, inputs, *figures in shown:
        settings = [] if inputs == "as shipped" else RAW
        (row,) = (
            row
            for row in quality_rows()
            if row.get("recipe") == recipe and "seed" not in row and row["settings"] == settings
        )
        assert row["seeds"] == [1, 2, 3]
        test = row["test"]
        assert figures == [f"{test[key]:.4f}"[1:] for key in ("auc", "ne")] + [
            f"{test['calibration']:.3f}".removeprefix("0")
        ]


def test_bootstrap_in_the_text_is_that_of_the_rows():
    text = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
    (found,) = re.findall(
        r"resamples: (-?\.\d{4}), 95 % between (-?\.\d{4}) and (-?\.\d{4})\.",
        text.replace("\n", " "),
    )
    (row,) = (r for r in quality_rows() if "ne_difference" in r and r["settings"] == [])
    wanted = [f"{row[key]:.4f}" for key in ("ne_difference", "low_95", "high_95")]
    assert list(found) == [figure.replace("0.", ".", 1) for figure in wanted]
