"""Two recipes on the same rows: more than chance, or not."""

import json
import math
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from html_page import Page
from typer.testing import CliRunner

from gem import faults
from gem.cli import app
from gem.report.page import report_html
from gem.report.paired import task_losses
from gem.report.read import read_run
from gem_opkit.errors import DataError

ROWS = 400


def predict(folder, shift, *, seed=0, rows=ROWS):
    """Predictions that are off by so many logits, with labels that all runs share."""
    draw = np.random.default_rng(seed)
    logit = draw.normal(-1.0, 1.0, rows)
    label = (draw.random(rows) < 1 / (1 + np.exp(-logit))).astype(float)
    table = {
        "split": ["test"] * rows,
        "task": ["click"] * rows,
        "row": list(range(rows)),
        "label": label.tolist(),
        "p": (1 / (1 + np.exp(-(logit + shift)))).tolist(),
    }
    pq.write_table(pa.table(table), folder / "predictions.parquet")
    return label, logit


@pytest.fixture
def several(runs, tmp_path):
    """Copies of the runs, without predictions."""
    for name in ("one", "two", "slow"):
        shutil.copytree(runs / name, tmp_path / name)
        (tmp_path / name / "predictions.parquet").unlink(missing_ok=True)
    return tmp_path


def said(*words):
    return CliRunner().invoke(app, ["report", *map(str, words)], obj=faults.Asked())


@pytest.mark.parametrize("table", [None, {"split": ["test"], "p": [0.5]}])
def test_predictions_that_cannot_be_read_are_named(several, table):
    predict(several / "one", 0.0)
    if table is None:
        (several / "slow/predictions.parquet").write_bytes(b"PAR1 cut short")
    else:
        pq.write_table(pa.table(table), several / "slow/predictions.parquet")
    out = said(several / "one", several / "slow", "--out", several / "page.html")
    assert out.exit_code == 0, out.output
    page = (several / "page.html").read_text()
    assert "predictions.parquet must be a Parquet file with split, task, row, label, p" in page
    with pytest.raises(DataError, match=r"write it again with gem eval .*slow --predictions"):
        task_losses(several / "slow", "click")


def test_two_runs_are_compared_on_the_same_rows(several):
    label, logit = predict(several / "one", 0.0)
    predict(several / "slow", 2.0)
    out = said(several / "one", several / "slow", "--out", several / "page.html", "--json")
    assert out.exit_code == 0, out.output
    (found,) = json.loads(out.output)["compared"]

    def loss(shift):
        p = 1 / (1 + np.exp(-(logit + shift)))
        return -(label * np.log(p) + (1 - label) * np.log(1 - p)).mean()

    rate = label.mean()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert found["ne_difference"] == pytest.approx((loss(2.0) - loss(0.0)) / entropy)
    assert 0 < found["low_95"] < found["ne_difference"] < found["high_95"]
    assert found["verdict"] == "worse"
    assert found["rows"] == ROWS
    page = (several / "page.html").read_text()
    assert "More than chance?" in page
    assert f"{found['ne_difference']:+.5f}" in page
    shown = said(several / "slow", several / "one", "--out", several / "page.html").output
    assert "better" in " ".join(shown.split())


def test_a_small_difference_is_not_told_apart(several):
    predict(several / "one", 0.0)
    predict(several / "slow", 0.02)
    shown = said(several / "one", several / "slow", "--out", several / "page.html").output
    assert "not told apart" in " ".join(shown.split())


def test_losses_of_seeds_are_averaged(several):
    """Two seeds that are off in opposite ways: their mean loss counts, not one of them."""
    predict(several / "one", -1.0)
    predict(several / "two", 1.0)
    predict(several / "slow", 1.0)
    folders = [several / name for name in ("one", "two", "slow")]
    both = said(*folders, "--out", several / "page.html", "--json")
    alone = said(*folders[1:], "--out", several / "page.html", "--json")
    first, second = (json.loads(each.output)["compared"][0] for each in (both, alone))
    assert second["ne_difference"] == 0.0
    assert abs(first["ne_difference"]) > 0.01


def test_runs_that_cannot_be_compared_say_why(several):
    runs = [read_run(several / name) for name in ("one", "slow")]
    assert "Not compared: " in report_html(runs)
    assert "gem eval" in report_html(runs)
    asked = (several / "one", several / "slow", "--out", several / "page.html")
    shown = " ".join(said(*asked).output.split())
    assert "not compared: paired: run must hold predictions.parquet" in shown
    document = json.loads(said(*asked, "--json").output)
    assert document["compared"] == []
    assert any("gem eval" in reason for reason in document["not_compared"])
    predict(several / "one", 0.0)
    predict(several / "slow", 0.0, rows=ROWS - 1)
    assert "must be on the same rows" in report_html(runs)
    predict(several / "slow", 0.0, seed=5)  # other labels of the same rows
    assert "must have the same labels" in report_html(runs)
    assert "More than chance?" not in report_html([runs[0], read_run(several / "two")])
    Page(report_html(runs))
