"""Nearest neighbours: exact ones are those of a plain sort, an index is judged by its recall."""

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem.serving.retrieval import (
    SearchSpec,
    Vectors,
    nearest,
    read_vectors,
    recall,
    search_named,
    write_nearest,
    write_vectors,
)
from gem_opkit.errors import ConfigError, DataError, UnsupportedError


@pytest.fixture
def both(rng):
    users = Vectors(np.arange(100, 150), rng.standard_normal((50, 16), np.float32), "one")
    items = Vectors(np.arange(7, 4_007) * 3, rng.standard_normal((4_000, 16), np.float32), "one")
    return users, items


def _sorted(users, items, count):
    scores = users.vectors.astype(np.float64) @ items.vectors.T.astype(np.float64)
    return items.keys[np.argsort(-scores, axis=1, kind="stable")[:, :count]]


def test_exact_neighbours_are_those_of_a_sort(both, monkeypatch):
    users, items = both
    want = _sorted(users, items, 20)
    for most in (1 << 24, 4_000 * 3):  # at once, and three users at a time
        monkeypatch.setattr("gem.serving.retrieval._MOST_SCORES", most)
        keys, scores = nearest(users, items, 20)
        assert (keys == want).mean() > 0.999  # float32 may swap two that are equal to rounding
        assert (np.diff(scores, axis=1) <= 0).all()


def test_equal_scores_go_by_the_key():
    users = Vectors(np.array([1]), np.ones((1, 2), np.float32), "m")
    items = Vectors(np.arange(10), np.ones((10, 2), np.float32), "m")
    assert nearest(users, items, 4)[0].tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("method", "effort", "least"),
    [("flat", 1, 1.0), ("hnsw", 256, 0.95), ("ivf", 102, 1.0), ("ivf", 8, 0.2)],
)
def test_an_index_finds_most_of_them(both, method, effort, least):
    users, items = both
    exact, _ = nearest(users, items, 20)
    found, scores = nearest(users, items, 20, SearchSpec(method=method, effort=effort))
    assert recall(found, exact) >= least
    there = found >= 0
    rows = np.searchsorted(items.keys, found)
    for place, user in enumerate(users.vectors):
        own = items.vectors[rows[place][there[place]]] @ user
        np.testing.assert_allclose(scores[place][there[place]], own, rtol=1e-4, atol=1e-5)


def test_less_effort_finds_less(both):
    users, items = both
    exact, _ = nearest(users, items, 20)
    by = [
        recall(nearest(users, items, 20, SearchSpec(method="ivf", effort=effort))[0], exact)
        for effort in (1, 8, 102)
    ]
    assert by == sorted(by)
    assert by[0] < by[2]


def test_recall_counts_what_is_shared():
    assert recall(np.array([[1, 2, 3, -1]]), np.array([[3, 1, 9, 8]])) == 0.5
    assert np.isnan(recall(np.empty((0, 3)), np.empty((0, 3))))


def test_faiss_that_is_not_there_is_no_exact_search(both, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UnsupportedError, match=r"gem-trainer\[retrieval\].*--method exact"):
        nearest(*both, 5, SearchSpec(method="hnsw"))


def test_vectors_of_two_models_are_refused(both):
    users, items = both
    other = Vectors(items.keys, items.vectors, "two")
    with pytest.raises(DataError, match="must have embeddings of one model"):
        nearest(users, other, 5)
    narrow = Vectors(items.keys, items.vectors[:, :8], "one")
    with pytest.raises(DataError, match="vectors of one width; got 16 and 8"):
        nearest(users, narrow, 5)
    for count in (0, 4_001):
        with pytest.raises(ConfigError, match=r"--count must lie in 1 \.\. 4000"):
            nearest(users, items, count)


def test_the_newest_vector_of_a_user_counts(tmp_path):
    notes = {b"gem_fingerprint": b"one", b"gem_format": b"1"}

    def part(name, users, times, values):
        flat = pa.array(np.repeat(np.asarray(values, np.float32), 2))
        columns = {
            "user": pa.array(users, pa.int64()),
            "valid_from_ms": pa.array(times, pa.int64()),
            "embedding": pa.FixedSizeListArray.from_arrays(flat, 2),
        }
        pq.write_table(pa.table(columns).replace_schema_metadata(notes), tmp_path / name)

    part("part-2.parquet", [5, 3], [20, 20], [52, 32])
    part("part-1.parquet", [3, 4], [10, 10], [31, 41])
    found = read_vectors(tmp_path, "user")
    assert found.keys.tolist() == [3, 4, 5]
    assert found.vectors.tolist() == [[32, 32], [41, 41], [52, 52]]
    assert found.fingerprint == "one"


def test_files_that_are_no_vectors_are_refused(both, tmp_path):
    write_vectors(tmp_path / "items.parquet", "item", both[1])
    again = read_vectors(tmp_path / "items.parquet", "item")
    np.testing.assert_array_equal(again.vectors, both[1].vectors)
    with pytest.raises(DataError, match="must hold embeddings by user"):
        read_vectors(tmp_path / "items.parquet", "user")
    pq.write_table(pa.table({"item": [1]}), tmp_path / "plain.parquet")
    with pytest.raises(DataError, match="must hold embeddings by item"):
        read_vectors(tmp_path / "plain.parquet", "item")
    (tmp_path / "none.parquet").write_text("none")
    with pytest.raises(DataError, match="must be a Parquet file"):
        read_vectors(tmp_path / "none.parquet", "item")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="must hold Parquet files"):
        read_vectors(tmp_path / "empty", "user")
    spoilt = both[1].vectors.copy()
    spoilt[3, 3] = np.nan
    write_vectors(tmp_path / "nan.parquet", "item", Vectors(both[1].keys, spoilt, "one"))
    with pytest.raises(DataError, match="must be finite"):
        read_vectors(tmp_path / "nan.parquet", "item")


def test_vectors_with_holes_or_of_other_types_are_refused(tmp_path):
    notes = {b"gem_fingerprint": b"one", b"gem_format": b"1"}
    flat = pa.array(np.arange(4, dtype=np.float32))
    good = {
        "user": pa.array([1, 2], pa.int64()),
        "valid_from_ms": pa.array([5, 6], pa.int64()),
        "embedding": pa.FixedSizeListArray.from_arrays(flat, 2),
    }
    lists = pa.list_(pa.float32(), 2)
    texts = pa.FixedSizeListArray.from_arrays(pa.array(list("abcd")), 2)
    for column, values, said in (
        ("user", pa.array([1, None], pa.int64()), "no null in user; got 1 nulls"),
        ("valid_from_ms", pa.array([None, None], pa.int64()), "no null in valid_from_ms; got 2"),
        ("embedding", pa.array([[1, 2], None], lists), "no null in embedding; got 1 nulls"),
        ("embedding", pa.array([[1, 2], [None, 1]], lists), "no null in embedding; got 1 nulls"),
        ("embedding", texts, "have vectors of numbers"),
        ("user", pa.array(["a", "b"]), "whole numbers as user; got string"),
        ("valid_from_ms", pa.array([0.5, 1.5]), "whole numbers as valid_from_ms; got double"),
    ):
        table = pa.table({**good, column: values}).replace_schema_metadata(notes)
        pq.write_table(table, tmp_path / "users.parquet")
        with pytest.raises(DataError, match=said):
            read_vectors(tmp_path / "users.parquet", "user")
    pq.write_table(pa.table(good).replace_schema_metadata(notes), tmp_path / "users.parquet")
    assert read_vectors(tmp_path / "users.parquet", "user").keys.tolist() == [1, 2]


def test_what_is_found_is_written_once(both, tmp_path):
    write_vectors(tmp_path / "users.parquet", "user", both[0])
    write_vectors(tmp_path / "items.parquet", "item", both[1])
    paths = tmp_path / "users.parquet", tmp_path / "items.parquet", tmp_path / "found.parquet"
    found = write_nearest(*paths, count=5, spec=search_named("flat", 64), with_recall=True)
    assert (found["users"], found["items"], found["recall"]) == (50, 4_000, 1.0)
    table = pq.read_table(paths[2])
    assert table.column("rank").to_pylist()[:6] == [0, 1, 2, 3, 4, 0]
    keys = np.asarray(table.column("item").to_pylist()).reshape(50, 5)
    assert recall(keys, _sorted(*both, 5)) == 1.0
    with pytest.raises(ConfigError, match="--out must be a new file"):
        write_nearest(*paths, count=5, spec=SearchSpec())
    with pytest.raises(ConfigError, match="--method must be one of exact, flat, hnsw, ivf"):
        search_named("faiss", 64)
