"""A data set knows its raw files: after a change of one it is refused, and never taken silently."""

import json
import os
import shutil
from pathlib import Path

import pytest

from gem.cli import main
from gem.data.declared.make import _Maker
from gem.data.features import DataSpec
from gem.data.prepare import prepare, provide
from gem_opkit.errors import DataError

TOML = """name = "mine"
[files.shown]
paths = ["day-*.csv"]
[examples]
file = "shown"
user = "user"
item = "item"
time = "time"
time_format = "s"
labels = [{ name = "click", column = "click" }]
[entities.item]
file = "items.csv"
key = "item"
numbers = ["price"]
"""
DAYS = {
    "day-1.csv": "user,item,time,click\na,x,1,0\nb,y,2,1\n",
    "items.csv": "item,price\nx,1\n",
}
RECIPE = DataSpec(dataset="mine", folder="data")


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A log, its declaration, and the data set that was made of them."""
    monkeypatch.chdir(tmp_path)
    for name, text in (DAYS | {"mine.toml": TOML}).items():
        Path(name).write_text(text)
    prepare("mine.toml", "data")
    return tmp_path


def rewritten(name: str, text: str) -> None:
    """Another content, and a time of change that differs whatever the clock's steps."""
    before = Path(name).stat().st_mtime_ns
    Path(name).write_text(text)
    os.utime(name, ns=(before + 10**9, before + 10**9))


CHANGES = {
    "longer": (
        lambda: rewritten("day-1.csv", DAYS["day-1.csv"] + "a,y,3,1\n"),
        r"be made of \S*day-1.csv as it is now; got older rows: since then its 37 bytes became 45",
    ),
    "as long": (
        lambda: rewritten("day-1.csv", DAYS["day-1.csv"].replace("2,1", "2,0")),
        r"day-1.csv as it is now; got older rows: since then its content changed",
    ),
    "another file": (
        lambda: rewritten("items.csv", "item,price\nx,2\n"),
        r"items.csv as it is now; .* its content changed",
    ),
    "one more": (
        lambda: shutil.copy("day-1.csv", "day-2.csv"),
        r"day-\*.csv as it is now; .* 1 files became 2",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_by_name_and_nothing_is_overwritten(world, change):
    make, message = CHANGES[change]
    before = {path: path.read_bytes() for path in Path("data").rglob("*") if path.is_file()}
    make()
    for again in (
        lambda: prepare("mine.toml", "data"),
        lambda: prepare("mine.toml", "data", source="."),
        lambda: provide(RECIPE, world, fresh=True),
    ):
        with pytest.raises(DataError, match=message) as caught:
            again()
        assert "make a data set in a fresh folder (--out, data.folder), or remove data" in str(
            caught.value
        )
    assert before == {path: path.read_bytes() for path in Path("data").rglob("*") if path.is_file()}
    assert provide(RECIPE, world).examples.rows == 2, "a run that has begun goes on"
    assert prepare("mine.toml", "fresh").examples.rows == {"longer": 3, "one more": 4}.get(
        change, 2
    )


def test_the_same_content_is_no_change(world, capsys, monkeypatch):
    rewritten("day-1.csv", DAYS["day-1.csv"])
    shutil.copytree(world, "elsewhere", ignore=shutil.ignore_patterns("elsewhere"))
    assert prepare("mine.toml", "data", source="elsewhere").examples.rows == 2
    assert provide(RECIPE, world, fresh=True).examples.rows == 2
    monkeypatch.setattr("sys.argv", ["gem", "data", "prepare", "mine.toml", "--out", "data"])
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 0
    assert capsys.readouterr().out.strip() == "2 examples in data, which was made before"


@pytest.mark.parametrize("what", ["raw files gone", "no record"])
def test_what_is_not_known_is_taken_as_it_is(world, what):
    if what == "no record":
        Path("data/sources.json").unlink()
        rewritten("day-1.csv", "something else")
    else:
        for name in DAYS:
            Path(name).unlink()
    assert prepare("mine.toml", "data").examples.rows == 2
    assert provide(RECIPE, world, fresh=True).examples.rows == 2


def test_a_declaration_that_changed_is_refused_also_by_a_recipe(world):
    Path("mine.toml").write_text("# a remark\n" + TOML)
    provide(RECIPE, world, fresh=True)
    for text in (TOML + "[splits]\ntest_frac = 0.5\n", "name = "):
        Path("mine.toml").write_text(text)
        with pytest.raises(DataError, match=r"mine.toml as it is now; .* the declaration changed"):
            provide(RECIPE, world, fresh=True)


def test_a_damaged_record_is_refused(world):
    path = Path("data/sources.json")
    path.write_text(json.dumps({"folder": "."}))
    with pytest.raises(DataError, match=r"data/sources.json must say of which files .* or remove"):
        provide(RECIPE, world, fresh=True)


def test_a_file_that_changes_while_it_is_read_leaves_no_data_set(world, monkeypatch):
    collect = _Maker._collect

    def and_a_row_comes(maker):
        rewritten("day-1.csv", DAYS["day-1.csv"] + "a,y,3,1\n")
        return collect(maker)

    monkeypatch.setattr(_Maker, "_collect", and_a_row_comes)
    with pytest.raises(DataError, match=r"day-1.csv must stay as it is while it is read"):
        prepare("mine.toml", "other")
    assert not Path("other").exists()


def test_gem_train_begins_with_the_rows_of_today_and_resumes_with_its_own(world, monkeypatch):
    """`--resume` and `gem eval` read what the run has known from its start."""
    asked = []

    def ended(data, root, *, fresh):
        asked.append(fresh)
        raise DataError("far enough")

    monkeypatch.setattr("gem.train.run.provide", ended)
    words = ["train", "own-log", "--set", "data.dataset=mine", "--set", "data.folder=data"]
    for more in ([], ["--resume"]):
        monkeypatch.setattr("sys.argv", ["gem", *words, "--out", "run", *more])
        with pytest.raises(SystemExit):
            main()
    assert asked == [True, False]
