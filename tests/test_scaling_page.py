"""What docs/scaling.md shows is what its command says today, and forecasts meet measured steps."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from gem_parallel.topology import PRESETS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
# Step time of a forecast against every measured one; the recipe that rates are fitted to is one.
BAND = 0.10
# Forecasts that take seconds each: lines between others that are looked at.
SECONDS = {(1, 2048), (100, 1024), (100, 2048)}


@pytest.fixture(scope="module")
def scripts():
    """The modules of packages/gem/benchmarks that write the page."""
    folder = str(ROOT / "packages/gem/benchmarks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("plot_scaling"), importlib.import_module("forecast_rows")
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def fitted(scripts):
    return scripts[1].fit(RESULTS)


def part(name):
    """Lines of the page between the marks of a table."""
    page = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    _, begin, rest = page.partition(f"<!-- table {name} -->\n")
    assert begin, name
    return rest.partition("<!-- end -->")[0].splitlines()


def test_every_measured_step_is_forecast_within_the_band(scripts, fitted):
    rows, earlier = scripts[1].step_rows(RESULTS), scripts[1].earlier_state(RESULTS)
    found = {row["case"]: scripts[1].forecast_figures(row, fitted, earlier)[0] for row in rows}
    errors = {row["case"]: found[row["case"]] / row["step_ms"] - 1 for row in rows}
    assert {case: error for case, error in errors.items() if abs(error) > BAND} == {}
    # Several GPUs, and a recipe that no rate was fitted to, are among them.
    assert {row["gpus"] for row in rows} == {1, 2}
    assert any(case.startswith("h200-long,") for case in errors)


def test_tables_of_rates_and_rows_are_todays(scripts, fitted):
    assert part("rates") == scripts[1].rates_table(fitted)
    assert part("measured") == scripts[1].measured(RESULTS, fitted)
    assert part("split") == scripts[1].split_table(RESULTS)
    assert part("ways") == scripts[1].ways_table(RESULTS)


def test_rates_that_ship_are_those_of_the_rows(scripts, fitted):
    assert json.loads((ROOT / scripts[1].SHIPPED).read_text()) == json.loads(
        scripts[1].shipped(fitted.rates)
    )
    # The links of the presets are constants of their file.
    share = fitted.topology.host_tier.collective_frac
    for preset in (each for each in PRESETS.values() if each.ranks_per_host > 1):
        assert preset.host_tier.collective_frac == pytest.approx(share, abs=0.01)


def test_table_of_choices_is_todays(scripts, fitted):
    lines, parts = scripts[0].choices("h200", fitted.rates)
    assert part("choices") == [*lines, "", *parts]
    assert part("contention") == scripts[0].contentions("h200", fitted.rates)
    # The aim, with all that a recipe may choose.
    assert float(lines[-1].split("|")[3]) >= 0.85


def test_sections_are_compared_with_those_of_one_gpu_of_the_same_job(scripts, tmp_path):
    row = next(row for row in scripts[1].step_rows(RESULTS) if row["gpus"] == 2)
    own = {name: [ms - place, 0.0] for place, (name, ms) in enumerate(row["sections_ms"].items())}
    told = row | {"alone_sections_ms": own, "commit": "abcdef0123"}
    folder = tmp_path / "h200x2"
    folder.mkdir()
    rows = "".join(json.dumps(each) + "\n" for each in (told, row | {"plan": "another"}))
    (folder / "step.jsonl").write_text(rows, encoding="utf-8")
    lines = scripts[1].split_table(tmp_path)
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    more = row["step_ms"] - row["alone_step_ms"][0]
    assert cells[2:4] == [f"{row['alone_step_ms'][0]:.1f}", f"{more:+.1f}"]
    # In the order data, forward, backward, tables, optimizer of the row: 0 to 4 ms more.
    assert cells[4:9] == ["+1.0", "+2.0", "+3.0", "+4.0", "+0.0"]
    assert lines[3] == ""
    assert lines[4].startswith("Rows of 4ec8230 have the time of one GPU")
    # Rates are then fitted to these sections, not to those of another state.
    one, _, told_how = scripts[1].fitted_steps(tmp_path)
    assert told_how is None
    assert one["sections_ms"]["forward"] == pytest.approx(sum(own["forward"]) / 2)


@pytest.mark.parametrize("times", [1, 100])
def test_table_of_forecasts_is_todays(scripts, fitted, times):
    shown = part("scaling")
    for gpus in scripts[0].GPUS:
        if (times, gpus) in SECONDS:
            continue
        points = scripts[0].forecasts("h200", times, gpus, fitted.rates)
        line = f"| x {times} | {gpus:,} | {' | '.join(map(scripts[0].cell, points))} |"
        nothing = all(point.forecast is None for point in points)
        assert (line in shown) != nothing, line


def test_picture_holds_a_line_for_each_way(scripts):
    drawn = scripts[0].PICTURE.read_text(encoding="utf-8")
    assert drawn.count("<polyline") == len(scripts[0].TIMES) * len(scripts[0].WAYS)
    assert all(f">{way}</text>" in drawn for way in scripts[0].WAYS)
