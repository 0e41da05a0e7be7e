"""A log that is streamed, with pieces and budgets so small that every boundary is met.

What it gives must equal what the same log gives when it is held in memory; `test_reader`,
`test_join` and `test_visibility` hold that against plain Python.
"""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batch_rows import assert_equal_rows, flip, reader, rows_of

from gem.data import example_rows, log, log_index
from gem.data.array_folder import MANIFEST
from gem.data.columns import ColumnRequest, part_files, read_columns
from gem.data.dataset import Dataset, DatasetWriter
from gem.data.features import DatasetSpec, DataSpec
from gem.data.log_index import LogIndex
from gem.data.scan import PieceReader
from gem.data.stream_source import whole_stream
from gem_opkit.errors import DataError

STATISTICS = [
    {"kind": "rate", "name": "rate", "keys": ["item_id"], "label": "click"},
    {"kind": "rate", "name": "tag_rate", "keys": ["tags"], "label": "click"},
    {"kind": "history_count", "name": "count", "stream": "views"},
    {
        "kind": "event",
        "name": "surprise",
        "feedback": {"stream": "views", "field": "feedback", "positive": [2], "negative": [1]},
        "base": "rate",
        "value": "residual",
    },
]


@pytest.fixture
def streaming(monkeypatch):
    """Every log is taken for one that does not fit, and is read a few rows at a time."""
    monkeypatch.setattr(log, "log_bytes", lambda dataset, data: 1 << 60)
    monkeypatch.setattr(example_rows, "_MOST_PIECE_ROWS", 7)
    monkeypatch.setattr(example_rows, "_LEAST_PIECE_ROWS", 7)
    monkeypatch.setattr(log_index, "_MOST_PIECE_BYTES", 700)
    monkeypatch.setattr(log_index, "_LEAST_PIECE_BYTES", 700)
    return reader


@pytest.mark.parametrize("batch_size", [1, 10, 40])
@pytest.mark.parametrize("scale", [None, {"prior_rows": 1}])
def test_streamed_rows_equal_those_in_memory(tiny, logs, monkeypatch, batch_size, scale, request):
    folder = tiny(*logs(6), train=31)
    options = {"statistics": STATISTICS, "running_scale": scale}
    derived = [
        {"kind": "bucket", "name": "bid_group", "field": "bid", "boundaries": [0.2, 5]},
        {"kind": "day_of_week", "name": "day"},
        {"kind": "elapsed_days", "name": "days"},
    ]
    options["derived"] = derived
    whole = reader(folder, batch_size, **options)
    expected = [rows_of(whole.batches(split)) for split in ("train", "test")]
    streamed = request.getfixturevalue("streaming")(folder, batch_size, **options)
    assert isinstance(streamed._sources._log, log.StreamedLog)
    for split, rows in zip(("train", "test"), expected, strict=True):
        assert_equal_rows(rows_of(streamed.batches(split)), rows)
    # Two readings at a time, one of them from the middle.
    late = list(streamed.batches("train", start_step=streamed.steps("train") // 2))
    both = zip(streamed.batches("train"), streamed.batches("test"), strict=False)
    assert_equal_rows(rows_of(late), rows_of(list(whole.batches("train"))[-len(late) :]))
    pairs = list(both)
    assert_equal_rows(rows_of(test for _, test in pairs), rows_of(list(whole.batches("test"))))


def test_ranks_and_resume_of_a_streamed_log(tiny, logs, streaming):
    folder = tiny(*logs(9))
    before = [list(streaming(folder, 8, r, 2).batches("train"))[:2] for r in range(2)]
    after = [streaming(folder, 8, r, 3).batches("train", start_step=2) for r in range(3)]
    seen = [row for part in (*before, *after) for batch in part for row in batch.row_B.tolist()]
    assert sorted(seen) == list(range(40))


def test_empty_logs_are_streamed(tiny, streaming):
    made = streaming(tiny([], []), statistics=STATISTICS)
    assert list(made.batches("train")) == []
    (batch,) = streaming(tiny([(1, 2, 5, 1.0, None)], [])).batches("train")
    assert batch.event_tokens == 0
    assert batch.streams["views"].numbers.values.shape == (0, 1)


def test_a_fault_in_the_middle_names_file_and_row(tiny, logs, streaming):
    folder = tiny(*logs(3))
    part = folder / "examples/part-00000.parquet"
    table = pq.read_table(part)
    places = table.column("place").to_pylist()
    places[23] = 99
    changed = table.set_column(table.column_names.index("place"), "place", pa.array(places))
    pq.write_table(changed, part)
    batches = streaming(folder, 5).batches("train")
    assert [next(batches).row_B.tolist()[0] for _ in range(4)] == [0, 5, 10, 15]
    with pytest.raises(DataError, match=r"part-00000.parquet: column 'place' in row 23 must lie"):
        next(batches)


def test_times_that_fall_between_pieces_are_refused(tiny, logs, streaming):
    folder = tiny(*logs(3))
    part = folder / "examples/part-00000.parquet"
    table = pq.read_table(part)
    times = table.column("time_ms").to_pylist()
    times[30] = times[29] - 1
    changed = table.set_column(table.column_names.index("time_ms"), "time_ms", pa.array(times))
    pq.write_table(changed, part, row_group_size=30)  # so that a piece ends there
    with pytest.raises(DataError, match=r"time_ms must not fall.* in row 30 over all files"):
        streaming(folder)


# -- pieces ----------------------------------------------------------------------------------------
def test_pieces_hold_the_rows_of_the_files(tmp_path, rng):
    """Row groups longer and shorter than a piece, an empty file, lists and nulls, any order."""
    sizes, lengths = (40, 0, 23), rng.integers(0, 4, 63).tolist()
    tables, first = [], 0
    for number, size in enumerate(sizes):
        rows = range(first, first + size)
        columns = {
            "a": pa.array([None if row % 5 == 0 else row for row in rows], pa.int64()),
            "l": pa.array([list(range(lengths[row])) for row in rows], pa.list_(pa.int64())),
        }
        pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet", row_group_size=17)
        tables.append(columns)
        first += size
    requests = [ColumnRequest("a", "id", fill=-7), ColumnRequest("l", "ids", fill=0)]
    whole = read_columns(part_files(tmp_path), requests)
    pieces = PieceReader(part_files(tmp_path), 6)
    assert pieces.rows == 63
    assert max(piece.rows for piece in pieces.pieces) == 6
    offsets = whole["l"].offsets
    for number in [*range(len(pieces.pieces)), *rng.permutation(len(pieces.pieces)).tolist()]:
        piece = pieces.pieces[number]
        got, rows = pieces.read(number, requests), slice(piece.first, piece.first + piece.rows)
        assert got["a"].values.tolist() == whole["a"].values[rows].tolist()
        mine = offsets[piece.first : piece.first + piece.rows + 1]
        assert got["l"].offsets.tolist() == (mine - mine[0]).tolist()
        assert got["l"].values.tolist() == whole["l"].values[mine[0] : mine[-1]].tolist()
        assert all(pieces.number_of(row) == number for row in range(rows.start, rows.stop))


def test_lists_of_the_examples_are_those_in_memory(tmp_path, rng, streaming):
    lengths = rng.integers(0, 4, 40)
    with DatasetWriter(tmp_path / "data") as writer:
        writer.examples(
            {
                "user_id": np.zeros(40, np.int64),
                "time_ms": np.arange(40),
                "words": pa.array(
                    [None if n == 3 else rng.integers(0, 9, n).tolist() for n in lengths],
                    pa.list_(pa.int64()),
                ),
                "click": np.ones(40, np.float32),
            }
        )
        spec = {
            "name": "lists",
            "tables": [{"name": "word", "num_embeddings": 9}],
            "examples": {
                "rows": 40,
                "ids": [{"name": "words", "table": "word", "multi": True, "fill": 8}],
                "labels": [{"name": "click"}],
            },
            "splits": [{"name": "train", "start": 0, "stop": 40}],
        }
        writer.finish(DatasetSpec.model_validate(spec))
    dataset = Dataset.open(tmp_path / "data")
    column = dataset.examples(["words"])["words"]
    whole = np.split(column.values, column.offsets[1:-1])
    words = example_rows.StreamedExamples(dataset, budget_bytes=1).column("words")
    for low, high in [(0, 40), (5, 5), *sorted(rng.integers(0, 41, (30, 2)).tolist())]:
        ids = words.ids(np.arange(min(low, high), max(low, high)))
        got = np.split(ids.values, ids.offsets[1:-1]) if len(ids.offsets) > 1 else []
        expected = whole[min(low, high) : max(low, high)]
        assert [row.tolist() for row in got] == [row.tolist() for row in expected]
    for size in (3, 11):
        batches = streaming(tmp_path / "data", size, dataset="lists").batches("train")
        rows = [row.tolist() for batch in batches for row in batch.ids["words"].to_list()]
        assert rows == [row.tolist() for row in whole]


# -- events ----------------------------------------------------------------------------------------
def union_data_set(folder, rng, delay, *, users=4, events=60):
    """`liked` holds events of its own and those of `shown` that were liked; some are untimed."""
    (folder / "examples").mkdir(parents=True)
    item = {"name": "item_id", "table": "item"}
    number = {"name": "dwell", "fill": 0.5}
    feedback = {"name": "feedback", "table": "feedback", "visible_after_ms": delay}
    spec = {
        "name": "union",
        "tables": [
            {"name": "item", "num_embeddings": 9},
            {"name": "feedback", "num_embeddings": 4},
        ],
        "streams": [
            {"name": "shown", "untimed": "untimed", "ids": [item, feedback], "numbers": [number]},
            {
                "name": "liked",
                "untimed": "untimed",
                "also": {"stream": "shown", "field": "feedback", "values": [3]},
                "ids": [item],
                "numbers": [number],
            },
        ],
        "examples": {"rows": 0, "labels": [{"name": "click"}]},
        "splits": [],
    }
    last = rng.integers(3, 9, users)
    for name in ("shown", "liked"):
        (folder / "events" / name).mkdir(parents=True)
        for part in range(2):
            user = rng.integers(0, users, events)
            # One user has no untimed events, and another one has no others.
            untimed = np.where(user == 1, False, (user == 2) | (rng.random(events) < 0.3))
            time = np.where(untimed, last[user], rng.integers(0, 20, events))
            columns = {
                "user_id": user,
                "time_ms": time,
                "untimed": untimed.astype(np.int64),
                "item_id": rng.integers(0, 9, events),
                "feedback": rng.integers(0, 4, events),
                "dwell": pa.array([None if v < 0.2 else v for v in rng.random(events)]),
            }
            pq.write_table(pa.table(columns), folder / f"events/{name}/{part}.parquet")
    empty = {"user_id": pa.array([], pa.int64()), "time_ms": pa.array([], pa.int64())}
    pq.write_table(pa.table(empty), folder / "examples/0.parquet")
    return Dataset(folder, DatasetSpec.model_validate(spec))


@pytest.mark.parametrize("delay", [0, 1, 6])
@pytest.mark.parametrize("budget_bytes", [1 << 10, 1 << 20])
def test_mapped_streams_equal_those_in_memory(tmp_path, rng, monkeypatch, delay, budget_bytes):
    """With buckets of a few events, and with all of them sorted at once."""
    monkeypatch.setattr(log_index, "_MOST_PIECE_BYTES", 1300)
    monkeypatch.setattr(log_index, "_LEAST_PIECE_BYTES", 1300)
    dataset = union_data_set(tmp_path / "data", rng, delay)
    index = LogIndex(dataset, DataSpec(dataset="union"), budget_bytes=budget_bytes)
    users = np.repeat(np.arange(6), 30)
    times = np.tile(np.arange(-2, 28), 6)
    for name in ("shown", "liked"):
        spec = dataset.spec.stream(name)
        whole, mapped = whole_stream(dataset, spec), index.stream(spec)
        for most in (3, 500):
            mine = whole.index.history(users, times, most)
            theirs = mapped.index.history(users, times, most)
            assert np.array_equal(mine.offsets, theirs.offsets)
            assert np.array_equal(mine.events, theirs.events)
        gaps = np.repeat(times, mine.lengths) - whole.index.times[mine.events]
        assert np.array_equal(mapped.index.times.whole(), whole.index.times)
        assert np.array_equal(mapped.index.untimed.whole(), whole.index.untimed)
        for field in (*spec.ids, *spec.numbers):
            assert np.array_equal(mapped.column(field.name).whole(), whole.column(field.name))
            left = mapped.visible(field.name, mine.events, gaps)
            assert np.array_equal(left, whole.visible(field.name, mine.events, gaps))
            assert left.dtype == whole.column(field.name).dtype


def test_untimed_events_with_two_times_are_refused(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(log_index, "_MOST_PIECE_BYTES", 1300)
    dataset = union_data_set(tmp_path / "data", rng, 6)
    part = dataset.folder / "events/shown/1.parquet"
    table = pq.read_table(part)
    untimed = table.column("untimed").to_pylist()
    row = untimed.index(1)
    times = table.column("time_ms").to_pylist()
    user, was = table.column("user_id").to_pylist()[row], times[row]
    times[row] = 77
    pq.write_table(
        table.set_column(table.column_names.index("time_ms"), "time_ms", pa.array(times)), part
    )
    index = LogIndex(dataset, DataSpec(dataset="union"), budget_bytes=1 << 10)
    with pytest.raises(DataError, match=rf"one time a user.*got {was} and 77 for user {user}"):
        index.stream(dataset.spec.stream("shown"))
    assert not list((dataset.folder / ".index").glob("stream-*"))


@pytest.mark.parametrize("count", [1, 30])
def test_the_last_user_may_have_untimed_events_alone(tmp_path, rng, monkeypatch, count):
    """Nothing comes behind them that would say where they end, in one piece or in several."""
    monkeypatch.setattr(log_index, "_MOST_PIECE_BYTES", 1300)
    monkeypatch.setattr(log_index, "_LEAST_PIECE_BYTES", 1300)
    dataset = union_data_set(tmp_path / "data", rng, 0)
    columns = {
        "user_id": pa.array([9] * count, pa.int64()),
        "time_ms": pa.array([4] * count, pa.int64()),
        "untimed": pa.array([1] * count, pa.int64()),
        "item_id": pa.array(np.arange(count) % 9, pa.int64()),
        "feedback": pa.array([3] * count, pa.int64()),
        "dwell": pa.array([1.0] * count),
    }
    for name in ("shown", "liked"):
        pq.write_table(pa.table(columns), dataset.folder / f"events/{name}/2.parquet")
    index = LogIndex(dataset, DataSpec(dataset="union"), budget_bytes=1 << 10)
    for name, events in (("shown", count), ("liked", 2 * count)):
        mapped = index.stream(dataset.spec.stream(name))
        found = mapped.index.history(np.asarray([9, 9, 8]), np.asarray([4, 5, 5]), 500)
        assert found.lengths.tolist() == [0, events, 0]
        assert mapped.column("item_id")[found.events[:count]].tolist() == (
            (np.arange(count) % 9).tolist()
        )


# -- files that change -----------------------------------------------------------------------------
def in_two_files(folder, group=10):
    """Examples in two files; the second is opened long after the reading began."""
    first = folder / "examples/part-00000.parquet"
    second = folder / "examples/part-00001.parquet"
    table = pq.read_table(first)
    pq.write_table(table.slice(0, 20), first, row_group_size=group)
    pq.write_table(table.slice(20), second, row_group_size=group)
    return second, table.slice(20)


def put(path, table, **options):
    """Give a path another file, as `rename` does."""
    pq.write_table(table, path.with_suffix(".new"), **options)
    path.with_suffix(".new").rename(path)


CHANGES = {
    "other rows": lambda path, table: put(path, table.take([*range(19, -1, -1)])),
    "fewer rows": lambda path, table: put(path, table.slice(0, 8)),
    "no rows": lambda path, table: put(path, table.slice(0, 0)),
    "other groups": lambda path, table: put(path, table, row_group_size=5),
    "no column": lambda path, table: put(path, table.drop_columns(["place"])),
    "gone": lambda path, table: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_read_is_refused(tiny, logs, streaming, change):
    """Silence would mix rows of two data sets."""
    folder = tiny(*logs(3))
    second, table = in_two_files(folder)
    batches = streaming(folder, 4).batches("train")
    assert next(batches).row_B.tolist() == [0, 1, 2, 3]
    CHANGES[change](second, table)
    with pytest.raises(
        DataError, match=r"part-00001.parquet must (stay as it is|be a whole)"
    ) as one:
        list(batches)
    assert "\n" not in str(one.value)


def test_an_index_of_files_that_change_meanwhile_is_not_kept(tiny, logs, streaming, monkeypatch):
    folder = tiny(*logs(3))
    part = folder / "events/views/part-00000.parquet"
    writes = log_index._write_stream

    def changes(writer, records, log):
        writes(writer, records, log)
        part.touch()

    monkeypatch.setattr(log_index, "_write_stream", changes)
    with pytest.raises(DataError, match=r"events/views must stay as it is while it is read"):
        streaming(folder)
    assert not list((folder / ".index").glob("stream-*"))


def test_events_that_cannot_be_read_are_one_line(tiny, logs, streaming):
    folder = tiny(*logs(3))
    (folder / "events/views/part-00001.parquet").symlink_to(folder / "nowhere")
    with pytest.raises(DataError, match=r"part-00001.parquet must be a whole Parquet file") as one:
        streaming(folder, workers=1)
    assert "\n" not in str(one.value)


# -- where the index lies, and what becomes of it --------------------------------------------------
@pytest.mark.parametrize("name", ["users", "starts", "times", "field-item_id", "field-dwell"])
def test_no_flipped_bit_of_an_index_reaches_a_batch(tiny, logs, streaming, name):
    """It is found, or the index is made again; and the next reading gives the rows as they were."""
    folder = tiny(*logs(4))
    expected = rows_of(streaming(folder).batches("train"))
    (path,) = (folder / ".index").glob(f"stream-*/{name}.bin")
    random = np.random.default_rng(7)
    for place in random.integers(0, path.stat().st_size, 4).tolist():
        (path,) = (folder / ".index").glob(f"stream-*/{name}.bin")
        flip(path, place)
        if name in ("users", "starts"):
            assert_equal_rows(rows_of(streaming(folder).batches("train")), expected)
            continue
        with pytest.raises(DataError, match=rf"other bytes in .* of {name}.bin"):
            rows_of(streaming(folder).batches("train"))
        assert_equal_rows(rows_of(streaming(folder).batches("train")), expected)


def test_changed_files_are_indexed_anew(tiny, logs, streaming):
    examples, events = logs(4)
    folder = tiny(examples, events)
    before = rows_of(streaming(folder).batches("train"))
    part = folder / "events/views/part-00000.parquet"
    table = pq.read_table(part)
    pq.write_table(table.slice(0, len(table) // 2), part)
    after = rows_of(streaming(folder).batches("train"))
    assert sum(map(len, after["views.gap"])) < sum(map(len, before["views.gap"]))
    names = [entry.name for entry in (folder / ".index").glob("stream-*")]
    assert len(names) == 1


def test_an_index_lies_where_the_recipe_says(tiny, logs, streaming, tmp_path):
    folder = tiny(*logs(4))
    list(streaming(folder, index_folder=str(tmp_path / "index")).batches("train"))
    assert not (folder / ".index").exists()
    manifests = list((tmp_path / "index").glob(f"tiny-*/stream-views-*/{MANIFEST}"))
    assert len(manifests) == 1
    assert {"users", "starts", "times", "field-item_id"} <= json.loads(
        manifests[0].read_text()
    ).keys()


def test_a_place_that_takes_no_index_is_named(tiny, logs, streaming, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DataError, match=r"take the index.*set data.index_folder"):
        streaming(tiny(*logs(4)), index_folder=str(tmp_path / "file"))
