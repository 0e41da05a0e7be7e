"""The README's Python runs, and its table names every check of the kit."""

import re
from pathlib import Path

from gem_opkit import derivatives, dims, testing
from gem_opkit.testing import run_fresh

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_first_use_runs_and_prints_what_it_says():
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 1
    printed = run_fresh(blocks[0]).splitlines()
    assert printed[0] == re.search(r"# (mean: gain_D .*)", blocks[0])[1]
    assert printed[1].startswith("Cost(flops=30, bytes=192) ")


def test_every_check_and_marker_that_it_names_exists():
    for name in re.findall(r"`(check_\w+)[(`]", README):
        assert any(hasattr(where, name) for where in (testing, dims, derivatives)), name
    named = re.search(r"markers \((.*?)\)", README, flags=re.DOTALL)[1]
    assert re.findall(r"`(\w+)`", named) == list(testing.MARKERS)
