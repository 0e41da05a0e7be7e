"""What other models give to rows: cached embeddings point-in-time, a teacher's logits, a slice."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gem.config import load_recipe
from gem.data.dataset import Dataset
from gem.data.embedding_files import (
    EmbeddingRows,
    Manifest,
    read_manifest,
    read_parts,
    write_manifest,
    write_part,
)
from gem.data.features import DataSpec
from gem.data.given_spec import TeacherRead, UserEmbeddingRead
from gem.data.prepare import prepare
from gem.data.reader import open_reader
from gem.data.slice import slice_dataset
from gem.data.synthetic_spec import SyntheticSpec
from gem.data.teacher import Teacher
from gem.data.user_embeddings import UserEmbeddings
from gem.planning.schema import declared_schema
from gem_opkit.errors import ConfigError, DataError, UnsupportedError

OPTIONS = SyntheticSpec(rows=300, users=20, items=12, categories=3, max_backlog_events=8)
MODEL = "a" * 64
PLAIN = {"dataset": "synthetic", "synthetic": OPTIONS.model_dump()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "synthetic"
    prepare("synthetic", out, options=OPTIONS)
    return out


def write(folder, rows, *, fingerprint=MODEL, width=2):
    """A folder of one part for each two rows of (user, valid_from, number)."""
    folder.mkdir(parents=True)
    parts = []
    for low in range(0, len(rows), 2):
        users, times, numbers = (np.array(c) for c in zip(*rows[low : low + 2], strict=True))
        values = np.stack([numbers, -numbers], axis=1).astype(np.float32)
        part = EmbeddingRows(users.astype(np.int64), times.astype(np.int64), values)
        parts.append(write_part(folder, 1000 + low, part, fingerprint))
    manifest = Manifest(
        fingerprint=fingerprint,
        version="0",
        recipe="up",
        dataset="synthetic",
        width=width,
        every_hours=1.0,
        begin_ms=0,
        until_ms=2000,
        parts=tuple(parts),
    )
    write_manifest(folder, manifest)
    return folder


ROWS = [(3, 100, 1.0), (1, 100, 2.0), (3, 200, 3.0), (3, 300, 4.0), (9, 250, 5.0)]


def test_the_newest_embedding_strictly_older_is_read(tmp_path):
    found = UserEmbeddings("up", UserEmbeddingRead(folder=str(write(tmp_path / "e", ROWS))))
    users = np.repeat(np.arange(11), 12)
    times = np.tile(np.arange(50, 350, 25), 11)
    columns = found.columns(users, times)
    _, ages = found.rows_at(users, times)
    for row, (user, time) in enumerate(zip(users, times, strict=True)):
        older = [(t, x) for u, t, x in ROWS if u == user and t < time]
        want = [0.0, 0.0, 0.0] if not older else [max(older)[1], -max(older)[1], 1.0]
        assert columns[row].tolist() == want
        assert ages[row] == pytest.approx((time - max(older)[0]) / 3.6e6 if older else 0.0)


def test_an_embedding_that_is_too_old_counts_as_none(tmp_path):
    read = UserEmbeddingRead(folder=str(write(tmp_path / "e", ROWS)), max_age_hours=50 / 3.6e6)
    found = UserEmbeddings("up", read)
    users, times = np.array([3, 3, 3]), np.array([250, 251, 301])
    assert found.columns(users, times)[:, -1].tolist() == [1.0, 0.0, 1.0]


def test_a_folder_without_embeddings_has_none(tmp_path):
    found = UserEmbeddings("up", UserEmbeddingRead(folder=str(write(tmp_path / "e", []))))
    assert found.columns(np.array([1, 2]), np.array([5, 6])).tolist() == [[0.0] * 3] * 2


def test_the_embeddings_of_another_model_are_refused(tmp_path):
    folder = str(write(tmp_path / "e", ROWS))
    with pytest.raises(
        DataError, match=r"embeddings\.up\.folder must be of the model bbbbbbbbbbbb"
    ):
        UserEmbeddings("up", UserEmbeddingRead(folder=folder, fingerprint="b" * 64))


def test_a_part_of_another_model_is_refused(tmp_path):
    folder = write(tmp_path / "e", ROWS)
    alien = write(tmp_path / "alien", ROWS, fingerprint="b" * 64)
    name = read_manifest(folder, "here").parts[0].file
    (folder / name).write_bytes((alien / name).read_bytes())
    with pytest.raises(DataError, match="must be of one model"):
        read_parts(folder, read_manifest(folder, "here"), "here")


def test_damaged_missing_and_foreign_files_are_refused(tmp_path):
    folder = write(tmp_path / "e", ROWS)
    part = folder / read_manifest(folder, "here").parts[1].file
    whole = part.read_bytes()
    part.write_bytes(whole[:-30])
    with pytest.raises(DataError, match="must hold every part whole"):
        read_parts(folder, read_manifest(folder, "here"), "here")
    part.unlink()
    with pytest.raises(DataError, match="must hold every part whole"):
        read_parts(folder, read_manifest(folder, "here"), "here")
    part.write_bytes(whole)
    manifest = folder / "embeddings.json"
    raw = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(raw | {"format": 7}))
    with pytest.raises(DataError, match="must be of format 1; got 7"):
        read_manifest(folder, "here")
    manifest.write_text(json.dumps(raw | {"widht": 2}))
    with pytest.raises(DataError, match="widht"):
        read_manifest(folder, "here")
    manifest.write_text("{")
    with pytest.raises(DataError, match="that is JSON"):
        read_manifest(folder, "here")
    with pytest.raises(DataError, match=r"must hold embeddings\.json"):
        read_manifest(tmp_path, "here")


def test_no_flipped_bit_changes_what_is_read(tmp_path):
    folder = write(tmp_path / "e", ROWS)
    manifest = read_manifest(folder, "here")
    part = folder / manifest.parts[0].file
    whole, right = part.read_bytes(), read_parts(folder, manifest, "here")
    refused = 0
    for place in range(4, min(len(whole) - 8, 300), 7):
        broken = bytearray(whole)
        broken[place] ^= 4
        part.write_bytes(bytes(broken))
        try:
            found = read_parts(folder, manifest, "here")
        except DataError:
            refused += 1
            continue
        for name in ("users", "valid_from_ms", "values"):
            assert np.array_equal(getattr(found, name), getattr(right, name))
    assert refused > 10


def test_a_part_with_numbers_that_are_none_is_refused(tmp_path):
    folder = write(tmp_path / "e", [(1, 100, float("nan")), (2, 100, 1.0)])
    with pytest.raises(DataError, match="must hold finite numbers"):
        read_parts(folder, read_manifest(folder, "here"), "here")


def test_equal_rows_give_equal_bytes(tmp_path):
    one, two = write(tmp_path / "one", ROWS), write(tmp_path / "two", ROWS)
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes()


def test_batches_carry_them_with_their_ages(folder, tmp_path):
    examples = Dataset.open(folder).examples(["user_id", "time_ms"])
    users, times = (examples[n].values for n in ("user_id", "time_ms"))
    rows = [(int(users[k]), int(times[k]), float(k)) for k in range(0, 200, 9)]
    made = write(tmp_path / "e", rows)
    data = DataSpec.model_validate(
        PLAIN | {"user_embeddings": {"up": {"folder": str(made)}, "old": {"folder": str(made)}}}
    )
    reader = open_reader(folder, data, batch_size=64)
    assert [(v.name, v.width) for v in reader.schema.vectors] == [("up", 2), ("old", 2)]
    age = reader.schema.numbers.index("up_age_hours")
    seen = 0
    for batch in reader.batches("train"):
        for row, vector, number in zip(
            batch.row_B.tolist(), batch.vectors_BV.tolist(), batch.numbers_BD[:, age], strict=True
        ):
            older = [(t, x) for u, t, x in rows if u == users[row] and t < times[row]]
            want = [0.0] * 3 if not older else [max(older)[1], -max(older)[1], 1.0]
            assert vector == want * 2
            hours = (times[row] - max(older)[0]) / 3.6e6 if older else 0.0
            assert float(number) == pytest.approx(hours, rel=1e-5)
            seen += bool(older)
    assert seen > 20
    facts = reader.embedding_facts("train")["up"]
    assert facts["known_frac"] == pytest.approx(seen / reader.rows("train"))


def test_workers_give_the_same(folder, tmp_path):
    made = write(tmp_path / "e", [(u, 1_000, float(u)) for u in range(20)])
    data = PLAIN | {"user_embeddings": {"up": {"folder": str(made)}}}
    plain = open_reader(folder, DataSpec.model_validate(data), batch_size=64)
    several = open_reader(folder, DataSpec.model_validate(data | {"workers": 1}), batch_size=64)
    for one, other in zip(plain.batches("valid"), several.batches("valid"), strict=True):
        assert torch.equal(one.vectors_BV, other.vectors_BV)
    several.close()


def test_users_as_of_the_time_of_an_example_are_what_the_example_sees(folder):
    reader = open_reader(folder, DataSpec.model_validate(PLAIN), batch_size=50)
    as_of, times = reader.as_of(), Dataset.open(folder).examples(["time_ms"])["time_ms"].values
    assert set(reader.schema.of_user) == {"user_id", "age_group", "country"}
    assert {"item_id", "category", "tags"} <= set(reader.schema.of_item)
    for batch in reader.batches("train"):
        alone = as_of.users(batch.user_B.numpy(), times[batch.row_B.numpy()])
        assert set(alone.ids) == {"user_id", "age_group", "country"}
        for name, ids in alone.ids.items():
            assert torch.equal(ids.values, batch.ids[name].values)
        for name, stream in batch.streams.items():
            other = alone.streams[name]
            assert torch.equal(stream.numbers.lengths, other.numbers.lengths)
            assert torch.equal(stream.gap_seconds.values, other.gap_seconds.values)
            for field, ids in stream.ids.items():
                assert torch.equal(ids.values, other.ids[field].values)


def test_an_unknown_user_has_fills_and_no_history(folder):
    reader = open_reader(folder, DataSpec.model_validate(PLAIN), batch_size=50)
    batch = reader.as_of().users(np.array([20]), np.array([0]))
    assert all(stream.numbers.total_tokens == 0 for stream in batch.streams.values())


def test_news_are_when_what_is_known_of_a_user_changes(folder):
    reader = open_reader(folder, DataSpec.model_validate(PLAIN), batch_size=50)
    as_of = reader.as_of()
    users, when = as_of.news()
    last = int(when.max())

    def known(user, time):
        batch = as_of.users(np.array([user]), np.array([time]))
        return [
            (name, ids.values.tolist())
            for stream in batch.streams.values()
            for name, ids in stream.ids.items()
        ]

    for user in np.unique(users)[:5]:
        own = np.unique(when[users == user])[-6:]
        for before, after in zip(own, [*own[1:], last + 10], strict=True):
            # Nothing changes between two pieces of news, and each of them changes something.
            assert known(user, before + 1) == known(user, after)
            assert known(user, before) != known(user, before + 1)


def test_all_items_are_read(folder):
    reader = open_reader(folder, DataSpec.model_validate(PLAIN), batch_size=50)
    keys, ids = reader.as_of().items()
    entity = Dataset.open(folder).entity("item")
    assert keys.tolist() == entity["item_id"].values.tolist()
    assert ids["category"].values.tolist() == entity["category"].values.tolist()
    assert ids["item_id"].values.tolist() == keys.tolist()


def test_a_model_of_users_has_no_statistics(folder):
    data = PLAIN | {"running_scale": {}}
    reader = open_reader(folder, DataSpec.model_validate(data), batch_size=50)
    with pytest.raises(ConfigError, match="statistics and running_scale must be left out"):
        reader.as_of()


def test_a_plan_refuses_what_only_files_tell():
    config = load_recipe("synthetic-debug", ["data.user_embeddings.up.folder=nowhere"])
    with pytest.raises(UnsupportedError, match=r"data\.user_embeddings must be left out"):
        declared_schema(config)


# -- a teacher -----------------------------------------------------------------------------------
def predictions(folder, rows, *, tasks=("click",), fingerprint=MODEL):
    folder.mkdir()
    user, item, time, p = (list(column) for column in zip(*rows, strict=True))
    columns = {"user": user, "item": item, "time_ms": time} | {f"p_{t}": p for t in tasks}
    pq.write_table(pa.table(columns), folder / "predictions.parquet")
    (folder / "predictions.json").write_text(json.dumps({"fingerprint": fingerprint}))
    return str(folder)


def test_a_teachers_logits_are_found_by_user_item_and_time(tmp_path):
    rng = np.random.default_rng(1)
    rows = [
        (*map(int, key), float(rng.random()))
        for key in np.unique(rng.integers(0, 6, (80, 3)), axis=0)
    ]
    read = TeacherRead(folder=predictions(tmp_path / "p", rows))
    teacher = Teacher(read, ("conversion", "click"))
    asked = rng.integers(0, 6, (200, 3))
    found = teacher.logits(asked[:, 0], asked[:, 1], asked[:, 2])
    known = {row[:3]: row[3] for row in rows}
    assert np.isnan(found[:, 0]).all()
    hits = 0
    for key, logit in zip(asked.tolist(), found[:, 1], strict=True):
        p = known.get(tuple(key))
        assert np.isnan(logit) if p is None else 1 / (1 + np.exp(-logit)) == pytest.approx(p)
        hits += p is not None
    assert 20 < hits < 180


def test_a_certain_teacher_has_finite_logits(tmp_path):
    rows = [(1, 1, 1, 0.0), (1, 1, 2, 1.0)]
    teacher = Teacher(TeacherRead(folder=predictions(tmp_path / "p", rows)), ("click",))
    one = np.array([1, 1])
    assert np.isfinite(teacher.logits(one, one, np.array([1, 2]))).all()


def test_another_teacher_or_none_is_refused(tmp_path):
    rows = [(1, 1, 1, 0.5)]
    folder = predictions(tmp_path / "p", rows)
    with pytest.raises(DataError, match="must be of the model bbbbbbbbbbbb"):
        Teacher(TeacherRead(folder=folder, fingerprint="b" * 64), ("click",))
    with pytest.raises(DataError, match="must predict one of like"):
        Teacher(TeacherRead(folder=folder), ("like",))
    with pytest.raises(DataError, match=r"predictions\.json that names its model"):
        Teacher(TeacherRead(folder=str(tmp_path)), ("click",))


def test_rows_of_training_have_a_teacher_and_others_none(folder, tmp_path):
    examples = Dataset.open(folder).examples(["user_id", "item_id", "time_ms"])
    columns = [examples[n].values.tolist() for n in ("user_id", "item_id", "time_ms")]
    keys = list(zip(*columns, strict=True))
    rows = [(*key, 0.25) for key in keys[::2]]
    data = PLAIN | {"teacher": {"folder": predictions(tmp_path / "p", rows)}}
    reader = open_reader(folder, DataSpec.model_validate(data), batch_size=64)
    assert reader.schema.teacher
    said = torch.cat([batch.teacher_BA for batch in reader.batches("train")])
    assert said[::2, 0].tolist() == pytest.approx([np.log(1 / 3)] * 120)
    unsaid = torch.tensor([key not in keys[::2] for key in keys[:240]])
    assert unsaid.sum() > 80
    assert said[unsaid].isnan().all()
    assert said[:, 1].isnan().all()
    assert all(batch.teacher_BA.isnan().all() for batch in reader.batches("test"))


# -- a slice -------------------------------------------------------------------------------------
def test_a_slice_keeps_rows_splits_and_histories(folder, tmp_path):
    whole = Dataset.open(folder)
    category = 2
    items = whole.entity("item")
    wanted = items["item_id"].values[items["category"].values == category].tolist()
    spec = slice_dataset(folder, tmp_path / "slice", {"item_id": wanted})
    part = Dataset.open(tmp_path / "slice")
    names = ["user_id", "item_id", "time_ms", "click"]
    before, after = whole.examples(names), part.examples(names)
    kept = np.isin(before["item_id"].values, wanted)
    for name in names:
        assert np.array_equal(before[name].values[kept], after[name].values, equal_nan=True)
    for split in whole.spec.splits:
        own = next(s for s in spec.splits if s.name == split.name)
        assert own.stop - own.start == kept[split.start : split.stop].sum()
    for stream in whole.spec.streams:
        one, other = whole.events(stream.name), part.events(stream.name)
        for name, column in one.items():
            assert np.array_equal(column.values, other[name].values)
    data = DataSpec.model_validate(PLAIN)
    rows = {r: n for n, r in enumerate(np.flatnonzero(kept))}
    sliced = next(iter(open_reader(tmp_path / "slice", data, batch_size=500).batches("train")))
    full = next(iter(open_reader(folder, data, batch_size=500).batches("train")))
    lengths = full.streams["clicks"].numbers.lengths
    assert sliced.streams["clicks"].numbers.lengths.tolist() == [
        int(lengths[row]) for row in rows if row < len(lengths)
    ]


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"price": [1]}, "must be an id column of the examples"),
        ({}, "must name at least one column"),
        ({"item_id": [99]}, "must leave at least one example"),
    ],
)
def test_a_slice_of_nothing_is_refused(folder, tmp_path, where, said):
    with pytest.raises((ConfigError, DataError), match=said):
        slice_dataset(folder, tmp_path / "slice", where)
    assert not (tmp_path / "slice").exists()
