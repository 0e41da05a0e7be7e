"""The page: sound HTML that loads nothing, with the numbers of the run, whatever the run lacks."""

import json
import math
import random
import re
import subprocess
import sys
from statistics import fmean, stdev

import pytest
from html_page import Page, read_json

from gem.report.page import report_html, write_report
from gem.report.read import read_run
from gem.report.svg import HALF, Axis, Plot
from gem_opkit.errors import ConfigError

KEYS = ("ne", "auc", "gauc", "logloss", "calibration")


def page_of(*folders) -> Page:
    return Page(report_html([read_run(folder) for folder in folders]))


@pytest.fixture(scope="module")
def single(runs):
    return page_of(runs / "one")


def test_training_has_written_the_page(runs, single):
    assert (runs / "one" / "report.html").read_text() == single.html


def test_the_page_loads_nothing_and_runs_nothing(runs, single):
    for page in (single, page_of(runs / "one", runs / "two", runs / "slow")):
        names = {tag for tag, _ in page.tags}
        assert names.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "base"})
        for _, attributes in page.tags:
            assert attributes.keys().isdisjoint({"src", "srcset", "data", "xlink:href", "action"})
            assert not any(name.startswith("on") for name in attributes)
            assert (attributes.get("href", "#") or "").startswith("#")
        assert "@import" not in page.style
        assert "url(" not in page.style
        assert "http" not in page.html


def test_headings_tables_and_figures_say_what_they_are(single):
    tags = single.tags
    assert [tag for tag, _ in tags].count("h1") == 1
    assert ("html", {"lang": "en"}) in tags
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids))
    links = [a["href"] for tag, a in tags if tag == "a"]
    assert links == [f"#{name}" for name in ids]
    drawings = [a for tag, a in tags if tag == "svg" and "viewbox" in a]
    # Loss, two of NE, four of calibration, two rates, two histories: each at two widths.
    assert len(drawings) == 2 * 11
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in drawings)
    headers = [a for tag, a in tags if tag == "th"]
    assert headers
    assert all(a.get("scope") in ("col", "row", "rowgroup") for a in headers)


def test_no_coordinate_is_lost(single, runs):
    for page in (single, page_of(runs / "one", runs / "slow")):
        for _, attributes in page.tags:
            for name, value in ((n, v) for n, v in attributes.items() if v is not None):
                if name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height"):
                    assert math.isfinite(float(value))
                if name == "points":
                    assert all(math.isfinite(float(v)) for v in value.replace(",", " ").split())


def test_what_all_figures_of_a_section_say_is_said_once(single):
    assert single.text.count("Examples in order of their prediction") == 1
    assert single.text.count("What training makes small") == 1
    assert single.text.count("Log loss over the log loss") == 2  # the loss beside it says another


def test_the_numbers_of_an_axis_keep_clear_of_its_name():
    letter, half_a_line = 7.0, 7.0  # of the style sheet, at most
    for high in (1e-7, 0.475, 3.0, 123456.0):
        for kind in ("number", "percent"):
            axis = Axis.around([0.9 * high, high], "rate", kind)
            drawn = Plot(HALF, Axis(0, 1, "x"), axis, "a drawing").svg()
            ticks = re.findall(r'class="tick" x="([0-9.]+)"[^>]*text-anchor="end">([^<]*)<', drawn)
            name = re.search(r'class="label" transform="translate\(([0-9]+) ', drawn)
            assert len(ticks) >= 2
            assert name is not None
            for x, text in ticks:
                assert float(x) - letter * len(text) >= float(name[1]) + half_a_line


@pytest.mark.parametrize(("tables", "shown"), [(15, 15), (16, 12)])
def test_many_tables_are_folded_and_none_is_lost(copy, tables, shown):
    found = read_json(copy / "diagnostics.json")
    like = next(iter(found["tables"].values()))
    found["tables"] = {
        f"table{i}": {**like, "weight_bytes": 1000 - i, "rows": 100 + i} for i in range(tables)
    }
    (copy / "diagnostics.json").write_text(json.dumps(found))
    page = page_of(copy)
    parts = [rows for rows in page.tables if rows[0][:2] == ["table", "rows"]]
    assert [len(rows) - 1 for rows in parts] == [n for n in (shown, tables - shown) if n]
    rows = [row[1] for part in parts for row in part[1:]]
    assert rows == [str(100 + i) for i in range(tables)]
    assert (f"{tables - shown} smaller tables" in page.text) == (tables > shown)


def test_numbers_are_those_of_the_summary(runs, single):
    summary = read_json(runs / "one" / "summary.json")
    rows = single.table("period", "task", "NE")
    assert len(rows) == 6
    for period, task, *values, labels, positive in rows:
        found = summary[period][task]
        assert labels == f"{found['examples']:,}"
        assert positive == f"{100 * found['positives'] / found['examples']:.1f} %"
        assert values == [f"{found[k]:.4f}" if found[k] is not None else "n/a" for k in KEYS]
    for period, task, domain, *values, labels, _ in single.table("period", "task", "domain"):
        found = summary[period][task]["domains"][domain]
        assert labels == f"{found['examples']:,}"
        assert values == [f"{found[k]:.4f}" if found[k] is not None else "n/a" for k in KEYS]
        for reason in found["null_reasons"].values():
            assert reason in single.text
    for task in ("click", "conversion"):
        assert f"{summary['test'][task]['ne']:.4f}" in single.text
    assert "Finished, 10 of 10 steps" in single.text


def test_seeds_of_a_recipe_become_mean_and_deviation(runs):
    page = page_of(runs / "one", runs / "two")
    summaries = [read_json(runs / name / "summary.json") for name in ("one", "two")]
    for period, task, *_, calibration, _, _ in page.table("period", "task", "NE"):
        values = [summary[period][task]["calibration"] for summary in summaries]
        assert calibration == f"{fmean(values):.4f} ± {stdev(values):.4f}"
    assert "over the 2 seeds" in page.text
    assert "Where the recipes differ" not in page.text


def test_other_recipes_stand_side_by_side(runs):
    page = page_of(runs / "one", runs / "slow", runs / "two")
    test = {
        name: read_json(runs / name / "summary.json")["test"] for name in ("one", "two", "slow")
    }
    rows = page.table("metric", "tiny", "slow")
    assert [row[0] for row in rows] == ["NE", "AUC", "GAUC", "log loss", "calibration"]
    seeds = [test[name]["click"]["ne"] for name in ("one", "two")]
    assert rows[0][1].startswith(f"{fmean(seeds):.4f} ± {stdev(seeds):.4f}")
    assert rows[0][2].startswith(f"{test['slow']['click']['ne']:.4f}")
    assert page.table("setting", "tiny", "slow") == [["train.dense.lr", "0.001", "1e-05"]]


def test_best_is_ahead_by_more_than_seeds_lie_apart(runs, tmp_path):
    def marked(one, two, slow):
        for name, ne in (("one", one), ("two", two), ("slow", slow)):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            for file in ("config.toml", "metrics.jsonl"):
                (folder / file).write_bytes((runs / name / file).read_bytes())
            summary = read_json(runs / name / "summary.json")
            summary["test"]["click"]["ne"] = ne
            (folder / "summary.json").write_text(json.dumps(summary))
        page = page_of(*(tmp_path / name for name in ("one", "two", "slow")))
        return ["best" in cell for cell in page.table("metric", "tiny", "slow")[0]]

    assert marked(0.90, 0.91, 0.95) == [False, True, False]
    assert marked(0.90, 0.91, 0.80) == [False, False, True]
    assert marked(0.90, 0.91, 0.909) == [False, False, False]
    assert marked(0.90, 0.91, None) == [False, False, False]


def test_runs_on_other_data_are_refused(runs, copy):
    path = copy / "diagnostics.json"
    found = read_json(path)
    found["data"]["fingerprint"] = "f" * 64
    path.write_text(json.dumps(found))
    with pytest.raises(
        ConfigError, match=r"RUN must be runs on one data set.*ffff.*report of each"
    ):
        page_of(runs / "one", copy)


def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"RUN must be the folder of a run") as caught:
        write_report([tmp_path])
    assert "\n" not in str(caught.value)
    (tmp_path / "config.toml").write_bytes(b"\xff = [")
    with pytest.raises(ConfigError, match=r"cannot be read .*; give the folder"):
        write_report([tmp_path])
    assert list(tmp_path.iterdir()) == [tmp_path / "config.toml"]


def test_a_folder_is_no_file_to_write_and_nothing_is_left_in_it(runs, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match=r"--out must be a file; got .*there, which is a folder"):
        write_report([runs / "one"], tmp_path / "there")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_an_unfinished_run_has_a_page_that_says_so(copy):
    (copy / "summary.json").unlink()
    page = page_of(copy)
    assert "Unfinished, at step 10 of 10" in page.text
    assert "The run has not finished" in page.text
    assert {row[0] for row in page.table("period", "task")} == {"progressive", "valid", "test"}
    (copy / "metrics.jsonl").write_text('{"step": 2, "exam')
    page = page_of(copy)
    assert "A line of metrics.jsonl cannot be read" in page.text
    assert "No metrics yet" in page.text


def test_skipped_steps_and_an_early_stop_are_told(copy):
    summary = json.loads((copy / "summary.json").read_text())
    assert "skipped steps" not in page_of(copy).text
    summary["training"] |= {"skipped_steps": 3, "skipped_examples": 96, "stopped_early": True}
    summary["training"] |= {"best_step": 4, "best_ne": 0.87654}
    (copy / "summary.json").write_text(json.dumps(summary))
    text = page_of(copy).text
    assert "Stopped early, after 10 of 10 steps" in text
    assert "no evaluation got better any more; the best was after step 4, NE 0.8765" in text
    assert "3, of 96 examples" in text


def test_an_evaluation_amid_the_training_is_no_result(copy):
    path = copy / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if "split" in row:
            row["interim"] = True
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (copy / "summary.json").unlink()
    assert {row[0] for row in page_of(copy).table("period", "task")} == {"progressive"}


def test_a_run_of_an_older_version_has_a_page_that_says_what_is_missing(copy):
    (copy / "diagnostics.json").unlink()
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("time_ms", None)
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = page_of(copy)
    assert "There is no diagnostics.json" in page.text
    assert "Nothing is recorded of the tables" in page.text
    assert page.text.count("Nothing to draw: this run has not recorded it.") == 4  # calibrations
    assert len(page.table("period", "task", "NE")) == 6


def test_words_of_the_data_are_never_markup(copy):
    nasty = "<script>alert(1)</script>\"'&<b>"
    text = (copy / "diagnostics.json").read_text()
    for word in ("feed", "item", "clicks", "click", "synthetic"):
        text = text.replace(f'"{word}"', json.dumps(nasty + word))
    (copy / "diagnostics.json").write_text(text)
    text = (copy / "summary.json").read_text()
    for word in ("feed", "click", "all labels are equal", "cpu"):
        text = text.replace(f'"{word}"', json.dumps(nasty + word))
    (copy / "summary.json").write_text(text)
    with (copy / "config.toml").open("a") as file:
        file.write(f"\n[more]\nkey = {json.dumps(nasty)}\n")
    page = page_of(copy)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "b" not in {tag for tag, _ in page.tags}
    assert page.text.count("<script>alert(1)</script>") > 8


def test_long_names_do_not_widen_the_page(single):
    assert "overflow-wrap: anywhere" in single.style
    wrapped = [a for tag, a in single.tags if a.get("class") == "scroll"]
    assert len(wrapped) == len([tag for tag, _ in single.tags if tag == "table"])
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in wrapped)


JUNK = (None, math.nan, math.inf, -1, 0, 1e300, "x", "", [], {}, [None], True)


def spoiled(value, random_):
    """The same JSON with one thing in it replaced by something else."""
    while True:
        inner = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        key, part = random_.choice(inner)
        if isinstance(part, dict | list) and part and random_.random() < 0.85:
            value = part
            continue
        value[key] = random_.choice(JUNK)
        return


@pytest.mark.parametrize("file", ["summary.json", "diagnostics.json", "metrics.jsonl"])
def test_a_page_comes_of_anything_that_a_file_holds(copy, file):
    text = (copy / file).read_text()
    random_ = random.Random(file)
    for _ in range(20):
        rows = [json.loads(line) for line in text.splitlines()] if file == "metrics.jsonl" else None
        content = json.loads(text) if rows is None else rows
        for _ in range(random_.choice((1, 3))):
            spoiled(content, random_)
        lines = [content] if rows is None else content
        (copy / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
        page = page_of(copy)
        assert "nan" not in page.text.lower().split()


def test_a_long_run_has_a_small_page(copy):
    path = copy / "metrics.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    with path.open("w") as file:
        for step in range(1, 5001):
            row |= {"step": step, "examples": 32 * step, "loss": 1 / step}
            file.write(json.dumps(row) + "\n")
    assert len(page_of(copy).html) < 300_000


def test_the_command_needs_no_torch(runs, tmp_path):
    program = (
        "import sys\nfrom gem.cli import main\n"
        f"sys.argv = ['gem', 'report', {str(runs / 'one')!r}, '--out', 'a/b.html', '--json']\n"
        "try: main()\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True, cwd=tmp_path
    )
    *document, torch = done.stdout.splitlines()
    assert json.loads("".join(document))["report"] == "a/b.html"
    assert torch == "False"
    assert (tmp_path / "a" / "b.html").read_text() == (runs / "one" / "report.html").read_text()
