"""Every bad input ends in one line that says what to do, and nothing is lost."""

import hashlib
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import bad_inputs
from bad_inputs import CASES, PAGE, Case, block, make_world, outcome


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


def contents(folder):
    """Every file with a digest of what is in it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def page():
    """name of a case -> what the page shows of it."""
    text = PAGE.read_text(encoding="utf-8")
    return dict(
        re.findall(r"^### ([^\n]*)\n\n```text\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_input_is_one_line_and_loses_nothing(case, world, page, tmp_path):
    found = {}

    def make():
        case.make()
        found.update(contents(tmp_path))

    code, _, err = outcome(Case(case.group, case.name, case.words, make), world, tmp_path)
    assert (code, err.count("\n")) == (case.code, 1), err
    assert err.startswith("error: ") and err.endswith("\n")
    assert "Traceback" not in err
    assert str(tmp_path) not in err, "paths are as the user gave them"
    # What is there, what was expected, and what to do: or the name that was meant.
    assert re.search(r"must .+; got .+; .+|unknown key .+; did you mean", err), err
    assert contents(tmp_path) == found
    shown = page[f"{case.name[0].upper()}{case.name[1:]}"]
    printed = block(case, err.strip()).split("```text\n")[1].removesuffix("\n```\n")
    assert shown == printed, "write the page anew: python packages/gem/tests/bad_inputs.py"


def test_the_page_shows_every_case_and_no_other(page):
    names = [f"{case.name[0].upper()}{case.name[1:]}" for case in CASES]
    assert list(page) == names
    assert len(set(names)) == len(names)
    assert PAGE.read_text(encoding="utf-8").startswith(bad_inputs.HEAD)


def test_debug_shows_the_traceback_above_the_line(world, tmp_path):
    case = next(case for case in CASES if case.name == "a label outside {0, 1}")
    plain = outcome(case, world, tmp_path / "plain")
    words = ("--debug", *case.words)
    shown = outcome(Case(case.group, case.name, words, case.make), world, tmp_path / "shown")
    assert shown[0] == plain[0] == 2
    *trace, last = shown[2].splitlines()
    assert last == plain[2].strip()
    assert trace[0] == "Traceback (most recent call last):"
    assert any("in read_columns" in line for line in trace)
