"""The forecasts on docs/scaling.md are what the command that it names says today."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "packages/gem/benchmarks/plot_scaling.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("plot_scaling", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plot_scaling"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("times", "gpus"), [(1, 1), (1, 16), (100, 256)])
def test_page_shows_todays_forecasts(script, times, gpus):
    cells = [script.cell(point) for point in script.forecasts("h200", times, gpus)]
    line = f"| x {times} | {gpus:,} | {' | '.join(cells)} |"
    assert line in script.PAGE.read_text(encoding="utf-8").splitlines()


def test_picture_holds_a_line_for_each_way(script):
    drawn = script.PICTURE.read_text(encoding="utf-8")
    assert drawn.count("<polyline") == len(script.TIMES) * len(script.WAYS)
    assert all(f">{way}</text>" in drawn for way in script.WAYS)
