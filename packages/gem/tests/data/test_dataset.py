import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem.data.check import check
from gem.data.columns import ColumnRequest, part_files, read_columns
from gem.data.dataset import Dataset, DatasetWriter
from gem.data.features import DatasetSpec
from gem_opkit.errors import ConfigError, DataError

EXAMPLES = [(1, 2, 5, 1.0, None), (2, 3, 5, 0.0, 1.0), (1, 0, 9, None, None)]
EVENTS = [(1, 2, 1, 2), (1, 3, 2, 1), (2, 0, 3, 0)]


def files(folder, *tables, row_group=None):
    """Parquet files with the given columns, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    for place, columns in enumerate(tables):
        pq.write_table(
            pa.table(columns), folder / f"part-{place}.parquet", row_group_size=row_group
        )
    return part_files(folder)


def one(folder, request, *tables, **options):
    return read_columns(files(folder, *tables, **options), [request])[request.name]


def test_columns_are_found_by_name_not_by_position(tmp_path):
    left = {"a": [1, 2], "b": [3, 4]}
    right = {"b": [6], "a": [5]}
    got = read_columns(files(tmp_path, left, right), [ColumnRequest("b", "id")])
    assert got["b"].values.tolist() == [3, 4, 6]


def test_nothing_else_is_decoded(tmp_path):
    """A column that nobody asks for may hold anything, also what no kind would take."""
    table = {"a": [1], "junk": [b"\x00\xff"]}
    assert one(tmp_path, ColumnRequest("a", "id"), table).values.tolist() == [1]


def test_unknown_column_names_file_and_nearest(tmp_path):
    paths = files(tmp_path, {"user_id": [1]})
    with pytest.raises(DataError, match=r"part-0.parquet must have the column 'user_ids'") as fault:
        read_columns(paths, [ColumnRequest("user_ids", "id")])
    assert "did you mean 'user_id'" in str(fault.value)


def test_file_without_rows_between_others(tmp_path):
    empty = {"a": pa.array([], pa.int64())}
    got = one(tmp_path, ColumnRequest("a", "id"), {"a": [1]}, empty, {"a": [2]})
    assert got.values.tolist() == [1, 2]


def test_only_files_without_rows(tmp_path):
    empty = {"a": pa.array([], pa.int64()), "l": pa.array([], pa.list_(pa.int64()))}
    requests = [ColumnRequest("a", "id"), ColumnRequest("l", "ids")]
    got = read_columns(files(tmp_path, empty), requests)
    assert got["a"].values.dtype == np.int64
    assert got["a"].rows == got["l"].rows == 0
    assert got["l"].offsets.tolist() == [0]


def test_last_row_group_may_be_partial(tmp_path):
    got = one(tmp_path, ColumnRequest("a", "id"), {"a": list(range(10))}, row_group=4)
    assert got.values.tolist() == list(range(10))


def test_nulls_become_the_declared_fill(tmp_path):
    table = {
        "id": pa.array([1, None, 3]),
        "number": pa.array([None, 0.5, float("nan")]),
        "all": pa.array([None, None, None]),
        "label": pa.array([1.0, None, 0.0]),
    }
    requests = [
        ColumnRequest("id", "id", 7, 8),
        ColumnRequest("number", "number", -1.5),
        ColumnRequest("all", "id", 2),
        ColumnRequest("label", "label"),
    ]
    got = read_columns(files(tmp_path, table), requests)
    assert got["id"].values.tolist() == [1, 7, 3]
    assert got["number"].values.tolist() == [-1.5, 0.5, -1.5]
    assert got["all"].values.tolist() == [2, 2, 2]
    np.testing.assert_array_equal(got["label"].values, [1, np.nan, 0])
    assert [got[name].missing for name in ("id", "number", "all", "label")] == [1, 2, 3, 1]


def test_missing_list_is_one_fill_and_an_empty_one_is_none(tmp_path):
    table = {"l": pa.array([[1, None], None, [], [4]], pa.list_(pa.int64()))}
    got = one(tmp_path, ColumnRequest("l", "ids", 9, 10), table, table)
    assert got.values.tolist() == [1, 9, 9, 4] * 2
    assert got.offsets.tolist() == [0, 2, 3, 3, 4, 6, 7, 7, 8]
    assert got.missing == 4


@pytest.mark.parametrize(
    ("kind", "values", "options", "message"),
    [
        ("id", [0, 0, 0, 0, 5, 2], {"rows": 5}, r"in row 4 must lie in 0 .. 4; got 5"),
        ("id", [0, 0, 0, 0, -1, 2], {"rows": 5}, r"in row 4 must lie in 0 .. 4; got -1"),
        ("id", [0, 0, 0, 0, 1, None], {}, r"in row 5 must not be null"),
        ("time", [0, 0, 0, 1, None, 3], {}, r"in row 4 must not be null"),
        ("number", [0, 0, 0, 1, 2, float("inf")], {"fill": 0}, r"in row 5 must be finite; got inf"),
        ("label", [0, 0, 0, 0.0, 1.5, 1.0], {}, r"in row 4 must lie in \[0, 1\]; got 1.5"),
        ("weight", [0, 0, 0, 0.0, 1.0, -0.5], {}, r"in row 5 must be finite and at least 0"),
        ("ids", [[], [], [], [1], [2, 9], []], {"rows": 9}, r"in row 4 must lie in 0 .. 8; got 9"),
        ("id", [0.5, 1.0, 2.0], {}, r"must hold integers; got double"),
        ("id", ["a", "b", "c"], {}, r"must hold integers; got string"),
        ("number", ["1", "2", "3"], {"fill": 0}, r"must hold numbers; got string"),
        ("ids", [1, 2, 3], {"rows": 9}, r"must hold lists of integers; got int64"),
    ],
)
def test_bad_value_is_named_with_file_and_row(tmp_path, kind, values, options, message):
    """Rows are counted over the row groups of the file, which are of three rows here."""
    request = ColumnRequest("x", kind, **options)
    with pytest.raises(DataError, match=r"part-0.parquet: column 'x' " + message):
        one(tmp_path, request, {"x": pa.array(values)}, row_group=3)


def test_unsigned_ids_beyond_int64_are_refused(tmp_path):
    values = pa.array([1, 2**63], pa.uint64())
    with pytest.raises(DataError, match=f"in row 1 must fit in int64; got {2**63}"):
        one(tmp_path, ColumnRequest("x", "id"), {"x": values})


def test_cut_off_file_is_named(tmp_path):
    (path,) = files(tmp_path, {"a": list(range(100))})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"part-0.parquet must be a whole Parquet file"):
        read_columns([path], [ColumnRequest("a", "id")])


def test_data_set_reads_what_was_written(tiny):
    dataset = Dataset.open(tiny(EXAMPLES, EVENTS))
    got = dataset.examples(["user_id", "time_ms", "bid", "click", "place"])
    assert got["user_id"].values.tolist() == [1, 2, 1]
    assert got["time_ms"].values.tolist() == [5000, 5000, 9000]
    assert got["bid"].values.tolist() == [7.0, 0.125, 0.25]
    assert got["place"].values.tolist() == [3, 1, 2]
    assert dataset.events("views")["feedback"].values.tolist() == [2, 1, 0]
    assert dataset.entity("item", ["brand"])["brand"].values.tolist() == [0, 1, 2] * 2


def test_undeclared_column_is_refused_by_name(tiny):
    dataset = Dataset.open(tiny(EXAMPLES, EVENTS))
    with pytest.raises(ConfigError, match="got 'clik'; did you mean 'click'"):
        dataset.examples(["clik"])
    with pytest.raises(ConfigError, match=r"stream must be declared .* got 'view'; did you mean"):
        dataset.events("view")
    with pytest.raises(ConfigError, match="no entity 'itm'; did you mean 'item'"):
        dataset.entity("itm")


def test_times_of_examples_may_not_fall(tiny):
    dataset = Dataset.open(tiny([EXAMPLES[2], EXAMPLES[0]], EVENTS))
    with pytest.raises(DataError, match=r"time_ms must not fall.*got 5000 after 9000 in row 1"):
        dataset.examples(["time_ms"])


def test_key_of_an_entity_is_unique(tiny):
    items = [(1, [1], 0, 0.0), (1, [2], 0, 0.0)]
    with pytest.raises(DataError, match="item_id must be unique; got 1 twice"):
        Dataset.open(tiny(EXAMPLES, EVENTS, items=items)).entity("item")


def test_folder_without_data_set(tmp_path):
    with pytest.raises(DataError, match=r"folder must hold a dataset.toml"):
        Dataset.open(tmp_path)


def test_broken_contract_is_named(tiny):
    folder = tiny(EXAMPLES, EVENTS)
    path = folder / "dataset.toml"
    path.write_text(path.read_text() + "colour = 1\n")
    with pytest.raises(DataError, match=r"dataset.toml: unknown key 'splits.1.colour'; did you"):
        Dataset.open(folder)


def test_wrong_number_of_rows(tiny):
    folder = tiny(EXAMPLES, EVENTS)
    path = folder / "dataset.toml"
    path.write_text(path.read_text().replace("rows = 3", "rows = 4"))
    with pytest.raises(DataError, match=r"must have the 4 rows of dataset.toml; got 3"):
        Dataset.open(folder)


def test_part_without_files(tiny):
    folder = tiny(EXAMPLES, EVENTS)
    for path in (folder / "events" / "views").glob("*"):
        path.unlink()
    with pytest.raises(DataError, match=r"must have Parquet files in .*views; got none"):
        Dataset.open(folder).events("views")


def test_interrupted_writer_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), DatasetWriter(tmp_path / "new") as writer:
        writer.examples({"a": [1]})
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_writer_refuses_what_is_there_and_an_unfinished_set(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").write_text("x")
    with pytest.raises(DataError, match="out must be empty or not there yet"):
        DatasetWriter(tmp_path / "old").__enter__()
    with pytest.raises(DataError, match="finish must be called"), DatasetWriter(tmp_path / "new"):
        pass


@pytest.mark.parametrize("place", ["folder", "link"])
def test_an_empty_folder_that_is_there_stays_the_same_folder(tiny, tmp_path, place):
    """It may be a mount, which no rename can replace, or where a shell stands."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "folder" / ".partial" / "examples").mkdir(parents=True)  # of a killed process
    before = (tmp_path / "folder").stat().st_ino
    spec = Dataset.open(tiny(EXAMPLES, EVENTS)).spec
    with DatasetWriter(tmp_path / place) as writer:
        writer.events("views", {"a": [1]})
        writer.finish(spec)
    assert (tmp_path / "folder").stat().st_ino == before
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == [
        "dataset.toml",
        "events",
    ]


def test_a_place_that_cannot_become_a_folder_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    for name in ("file", "dangling", "circle"):
        with pytest.raises(DataError, match="out must be empty or not there yet"):
            DatasetWriter(tmp_path / name).__enter__()


def test_check_reports_rows_nulls_and_labels(tiny):
    report = check(tiny(EXAMPLES, EVENTS, train=2))
    assert report.problems == ()
    assert [(part.part, part.rows) for part in report.parts] == [
        ("examples", 3),
        ("events/views", 3),
        ("entities/item", 6),
    ]
    assert report.parts[0].missing == {"place": 1, "bid": 1, "click": 1, "buy": 2}
    click = [x for x in report.labels if x.label == "click"]
    assert [(x.split, x.examples, x.known, x.positives) for x in click] == [
        ("train", 2, 2, 1.0),
        ("test", 1, 0, 0.0),
    ]


def test_check_lists_the_fault_of_every_part(tiny):
    folder = tiny([(1, 99, 5, 1.0, None)], [(1, 77, 1, 2)])
    problems = check(folder).problems
    assert len(problems) == 2
    assert "column 'item_id' in row 0 must lie in 0 .. 5; got 99" in problems[0]
    assert "column 'item_id' in row 0 must lie in 0 .. 5; got 77" in problems[1]


@pytest.mark.parametrize("kept", [0, 20, -30], ids=["nothing", "head", "no footer"])
def test_cut_examples_name_their_file(tiny, kept):
    """The footer is read first of all, to count rows."""
    folder = tiny(EXAMPLES, EVENTS)
    path = folder / "examples" / "part-00000.parquet"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"examples.part-00000.parquet must be a whole Parquet"):
        Dataset.open(folder)


def test_damaged_page_names_its_file_and_check_goes_on(tiny):
    """Footer and row counts are fine; the fault shows when the page is decoded."""
    folder = tiny(EXAMPLES, [(1, 2, 1, 2)] * 50)
    path = folder / "events" / "views" / "part-00000.parquet"
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(byte ^ 0x5A for byte in content[4:400])
    path.write_bytes(content)
    report = check(folder)
    assert len(report.problems) == 1
    assert f"{path} must be a whole Parquet file" in report.problems[0]
    assert [part.part for part in report.parts] == ["examples", "entities/item"]


def test_no_flipped_bit_is_read_as_other_data(tiny, logs, rng):
    """Pages carry checksums; what lies between them is checked by their decoder or is not used."""
    folder = tiny(*logs(1))
    path = folder / "examples" / "part-00000.parquet"
    sound = path.read_bytes()
    footer_bytes = int.from_bytes(sound[-8:-4], "little")
    names = ("user_id", "item_id", "time_ms", "place", "bid", "click", "domain", "weight")
    expected = {n: c.values.tobytes() for n, c in Dataset.open(folder).examples(names).items()}
    refused = 0
    for place in rng.integers(4, len(sound) - 8 - footer_bytes, 200):
        content = bytearray(sound)
        content[place] ^= 1 << rng.integers(8)
        path.write_bytes(content)
        try:
            found = Dataset.open(folder).examples(names)
        except DataError:
            refused += 1
            continue
        assert {n: c.values.tobytes() for n, c in found.items()} == expected
    assert refused > 100


def test_column_that_occurs_twice_is_refused(tmp_path):
    columns = [pa.array([1]), pa.array([2])]
    pq.write_table(pa.Table.from_arrays(columns, names=["a", "a"]), tmp_path / "part-0.parquet")
    with pytest.raises(DataError, match=r"part-0.parquet must have one column 'a'; got 2"):
        read_columns(part_files(tmp_path), [ColumnRequest("a", "id")])


@pytest.mark.parametrize("time", [2**62, -(2**63), 2**63 - 1])
def test_times_whose_difference_overflows_are_refused(tmp_path, time):
    with pytest.raises(DataError, match=rf"in row 1 must be milliseconds .*; got {time}"):
        one(tmp_path, ColumnRequest("a", "time"), {"a": [5, time]})


def test_times_of_the_whole_allowed_range_are_read(tmp_path):
    ends = [1 - 2**62, 2**62 - 1]
    assert one(tmp_path, ColumnRequest("a", "time"), {"a": ends}).values.tolist() == ends


def test_contract_that_is_no_text_is_named(tiny):
    folder = tiny(EXAMPLES, EVENTS)
    (folder / "dataset.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"dataset.toml: the file must be TOML in UTF-8; got"):
        Dataset.open(folder)


def contract(tiny):
    return Dataset.open(tiny(EXAMPLES, EVENTS)).spec.model_dump()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [{"name": "bid"}]}, "label 'bid' must be a column that is nothing else"),
        ({"labels": [{"name": "place"}]}, "label 'place' must be a column that is nothing else"),
        ({"labels": [{"name": "domain"}]}, "label 'domain' must be a column that is nothing else"),
        ({"labels": [{"name": "weight"}]}, "label 'weight' must be a column that is nothing else"),
        ({"time": "bid"}, "time 'bid' must be no input as well"),
        ({"weight": "bid"}, "weight 'bid' must be no input as well"),
    ],
)
def test_column_with_two_roles_is_refused(tiny, change, message):
    """A label among the inputs would be learned from itself."""
    fields = contract(tiny)
    fields["examples"] |= change
    with pytest.raises(ValueError, match=message):
        DatasetSpec.model_validate(fields)


@pytest.mark.parametrize("name", ["user_id", "item_id"])
def test_ids_by_which_rows_are_joined_are_single(tiny, name):
    fields = contract(tiny)
    fields["examples"]["ids"] = [
        field | ({"multi": True} if field["name"] == name else {})
        for field in fields["examples"]["ids"]
    ]
    with pytest.raises(ValueError, match=f"'{name}' must hold one id a row"):
        DatasetSpec.model_validate(fields)


def test_domain_that_is_declared_twice_is_refused(tiny):
    """Reports are by name, so one of the two would hide the other."""
    with pytest.raises(ValueError, match="domain 'feed' must be declared once"):
        DatasetSpec.model_validate(contract(tiny) | {"domains": ["feed", "feed"]})
