"""A log of one's own: what a declaration can say, and what is said of a wrong one."""

import gzip
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gem.data.dataset import Dataset
from gem.data.declared import time_order
from gem.data.declared.followed import LaterRows
from gem.data.prepare import prepare
from gem_opkit.errors import ConfigError, DataError

HEAD = 'name = "mine"\n[examples]\nfile = "log.csv"\nuser = "user"\nitem = "item"\ntime = "time"\n'
LABEL = 'labels = [{ name = "click", column = "click" }]\n'
PLAIN = HEAD + 'time_format = "s"\n' + LABEL
LOG = "user,item,time,click\nb,x,20,1\na,y,10,0\nb,y,10,\n"


def write(folder: Path, declaration=PLAIN, **files) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.toml").write_text(declaration)
    for name, content in ({"log": LOG} | files).items():
        (folder / f"{name}.csv").write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
    return str(folder / "mine.toml")


def made(folder: Path, declaration=PLAIN, **files) -> Dataset:
    prepare(write(folder / "raw", declaration, **files), folder / "data")
    return Dataset.open(folder / "data")


def column(dataset, name):
    return dataset.examples([name])[name]


def words(dataset, table, ids):
    return [dataset.spec.table(table).values[place] for place in ids]


def test_rows_come_in_order_of_time_and_then_of_the_file(tmp_path):
    dataset = made(tmp_path)
    assert column(dataset, "time_ms").values.tolist() == [10_000, 10_000, 20_000]
    assert words(dataset, "user", column(dataset, "user_id").values) == ["a", "b", "b"]
    assert words(dataset, "item", column(dataset, "item_id").values) == ["y", "y", "x"]
    clicks = column(dataset, "click").values
    assert clicks[[0, 2]].tolist() == [0, 1] and np.isnan(clicks[1])
    names = pq.read_table(tmp_path / "data" / "vocabularies" / "user").to_pylist()
    assert names == [{"id": 1, "value": "a"}, {"id": 2, "value": "b"}]


@given(
    times=st.lists(st.integers(-20, 20), max_size=60),
    at_once=st.integers(1, 7),
    chunk=st.integers(1, 9),
)
def test_sorting_in_pieces_equals_sorting_at_once(tmp_path_factory, times, at_once, chunk):
    table = pa.table({"t": pa.array(times, pa.int64()), "row": pa.array(range(len(times)))})
    chunks = (table.slice(start, chunk) for start in range(0, len(times), chunk))
    work = tmp_path_factory.mktemp("sort") / "work"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time_order, "ROWS_AT_ONCE", at_once)
        found = list(time_order.in_time_order(chunks, "t", np.array(times, np.int64), work))
    rows = [row for piece in found for row in piece.column("row").to_pylist()]
    assert rows == sorted(range(len(times)), key=lambda row: (times[row], row))
    assert not work.exists()


ROW = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 12))


@given(
    examples=st.lists(ROW, max_size=12), later=st.lists(ROW, max_size=12), within=st.integers(1, 6)
)
def test_labels_from_later_rows_equal_a_search_row_by_row(examples, later, within):
    end = max((time for *_, time in later), default=5)
    log = [np.array(values, np.int64) for values in zip(*later, strict=True)] or [
        np.empty(0, np.int64)
    ] * 3
    shown = [np.array(values, np.int64) for values in zip(*examples, strict=True)] or [
        np.empty(0, np.int64)
    ] * 3
    labels, known = LaterRows(*log, end).follow(*shown, within)
    for place, (user, item, time) in enumerate(examples):
        hit = any((u, i) == (user, item) and time < t <= time + within for u, i, t in later)
        assert labels[place] == hit
        assert known[place] == (hit or time + within <= end)


TIMES = {
    "ms": ("1760000000123", 1_760_000_000_123),
    "us": ("1760000000123999", 1_760_000_000_123),
    "s": (" 1760000000", 1_760_000_000_000),
    "iso": ("2025-10-09 08:53:20.5", 1_760_000_000_500),
    "iso ": ("2025-10-09T10:53:20+02:00", 1_760_000_000_000),
    "iso  ": ("2025-10-09", 1_759_968_000_000),
    "iso   ": ("2025-10-09T08:53:20.000000001Z", 1_760_000_000_000),
    "%d.%m.%Y %H:%M": ("09.10.2025 08:53", 1_759_999_980_000),
}


@pytest.mark.parametrize("form", TIMES)
def test_times_of_many_forms(tmp_path, form):
    text, milliseconds = TIMES[form]
    declaration = HEAD + f'time_format = "{form.strip()}"\n' + LABEL
    dataset = made(tmp_path, declaration, log=f"user,item,time,click\n1,2,{text},0\n")
    assert column(dataset, "time_ms").values.tolist() == [milliseconds]


ZONED = {
    "%d.%m.%Y %H:%M": (["09.01.2025 08:53", "09.07.2025 08:53"], [60, 120]),
    "iso": (["2025-01-09T08:53:00", "2025-07-09T08:53:00"], [60, 120]),
    "iso ": (["2025-01-09T08:53:00Z", "2025-07-09T09:53:00+01:00"], [0, 0]),
}


@pytest.mark.parametrize("form", ZONED)
def test_times_without_a_zone_are_those_of_the_declared_one(tmp_path, form):
    texts, minutes_east = ZONED[form]
    declaration = HEAD + f'time_format = "{form.strip()}"\ntime_zone = "Europe/Berlin"\n' + LABEL
    rows = "".join(f"1,2,{text},0\n" for text in texts)
    dataset = made(tmp_path, declaration, log="user,item,time,click\n" + rows)
    utc = [datetime(2025, month, 9, 8, 53, tzinfo=UTC) for month in (1, 7)]
    expected = [
        (moment.timestamp() - minutes * 60) * 1000
        for moment, minutes in zip(utc, minutes_east, strict=True)
    ]
    assert column(dataset, "time_ms").values.tolist() == expected


def test_an_hour_that_a_clock_shows_twice_is_the_first_and_one_that_it_skips_is_refused(tmp_path):
    declaration = HEAD + 'time_format = "iso"\ntime_zone = "Europe/Berlin"\n' + LABEL
    twice = "user,item,time,click\n1,2,2025-10-26 02:30:00,0\n"
    dataset = made(tmp_path / "twice", declaration, log=twice)
    first = datetime(2025, 10, 26, 0, 30, tzinfo=UTC).timestamp() * 1000
    assert column(dataset, "time_ms").values.tolist() == [first]
    skipped = twice + "1,2,2025-03-30 02:30:00,0\n"
    with pytest.raises(DataError, match=r"\(iso\) of Europe/Berlin; got .*02:30:00' in row 2"):
        made(tmp_path / "skipped", declaration, log=skipped)


def test_times_with_and_without_a_zone_in_one_log_are_refused(tmp_path):
    log = "user,item,time,click\n1,2,2025-10-09 08:00:00,0\n1,2,2025-10-09 08:00:00Z,0\n"
    with pytest.raises(DataError, match=r"\(iso\), all of them with a zone or all without; got "):
        made(tmp_path, HEAD + 'time_format = "iso"\n' + LABEL, log=log)


def test_a_decimal_comma_is_declared_and_a_point_is_then_refused(tmp_path):
    declaration = (
        PLAIN + 'numbers = [{ column = "price", decimal = ",", pattern = "(.*) EUR", fill = 3 }]\n'
    )
    log = "user;item;time;click;price\na;x;1;0;-1,5 EUR\na;x;2;0;7 EUR\na;x;3;0;\n"
    files = '[files.log]\npaths = ["log.csv"]\nseparator = ";"\n'
    declaration = declaration.replace('"log.csv"', '"log"') + files
    found = column(made(tmp_path / "comma", declaration, log=log), "price").values
    assert found.tolist() == [-1.5, 7.0, 3.0]
    for number, cell in enumerate(["1.5", "1.234,5"]):
        with pytest.raises(DataError, match=f"'price' must hold numbers .* got '{cell}' in row 4"):
            made(tmp_path / str(number), declaration, log=log + f"a;x;4;0;{cell} EUR\n")


@pytest.mark.parametrize("unit", ["s", "ns"])
def test_times_and_whole_numbers_of_parquet_need_no_format(tmp_path, unit):
    moments = [datetime(2025, 10, 9, 8, 53, 20), datetime(2025, 10, 9, 8, 53, 21)]
    table = {
        "user": pa.array([7, 7]),
        "item": pa.array([1.0, None]),  # as pandas writes whole numbers with gaps
        "time": pa.array(moments, pa.timestamp(unit)),
        "click": pa.array([True, False]),
    }
    declaration = write(tmp_path / "raw", (HEAD + LABEL).replace("log.csv", "log.parquet"))
    pq.write_table(pa.table(table), tmp_path / "raw" / "log.parquet")
    with pytest.raises(DataError, match=r"column 'item' must be there in every row; .* in row 2"):
        prepare(declaration, tmp_path / "data")
    table["item"] = pa.array([1.0, 3.0])
    pq.write_table(pa.table(table), tmp_path / "raw" / "log.parquet")
    prepare(declaration, tmp_path / "data")
    dataset = Dataset.open(tmp_path / "data")
    assert column(dataset, "time_ms").values.tolist() == [1_760_000_000_000, 1_760_000_001_000]
    assert words(dataset, "item", column(dataset, "item_id").values) == ["1", "3"]
    assert column(dataset, "click").values.tolist() == [1, 0]


def test_files_of_another_dialect(tmp_path):
    declaration = (
        'name = "mine"\n[files.log]\npaths = ["part-*.csv.gz"]\nseparator = "||"\n'
        'encoding = "latin-1"\nmissing = ["", "?"]\ncolumns = ["user", "what", "price", "click"]\n'
        '[examples]\nfile = "log"\nuser = "user"\n'
        'categories = [{ column = "what", name = "kind" }]\n'
        'numbers = ["price"]\nlabels = [{ name = "click", column = "click" }]\n'
    )
    path = write(tmp_path / "raw", declaration)
    for part, line in enumerate(["u1||café||1.5||1", "u2||?||||0"]):
        content = gzip.compress((line + "\n").encode("latin-1"))
        (tmp_path / "raw" / f"part-{part}.csv.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"gz must not be compressed, as its separator has several"):
        prepare(path, tmp_path / "data")
    (tmp_path / "raw" / "mine.toml").write_text(declaration.replace('"||"', '"|"'))
    for part, line in enumerate(["u1|café|1.5|1", "u2|?||0"]):
        content = gzip.compress((line + "\n").encode("latin-1"))
        (tmp_path / "raw" / f"part-{part}.csv.gz").write_bytes(content)
    prepare(path, tmp_path / "data")
    dataset = Dataset.open(tmp_path / "data")
    assert words(dataset, "kind", column(dataset, "kind").values) == ["café", "unknown value"]
    assert (column(dataset, "price").values.tolist(), column(dataset, "price").missing) == (
        [1.5, 0.0],
        1,
    )
    assert column(dataset, "time_ms").values.tolist() == [0, 1]


def test_headings_are_matched_without_marks_and_blanks(tmp_path):
    log = b"\xef\xbb\xbfuser, item ,time,click\na,x,1,0\n"
    assert made(tmp_path, log=log).spec.examples.rows == 1


def test_hashed_categories_keep_whole_numbers_and_tell_texts_apart(tmp_path):
    declaration = PLAIN.replace("[examples]", "hash_rows = { item = 50 }\n[examples]")
    log = "user,item,time,click\na,7,1,0\na,007,2,0\na,shoe,3,0\n"
    dataset = made(tmp_path, declaration, log=log)
    ids = column(dataset, "item_id").values.tolist()
    assert ids[0] == 7 and len({*ids}) == 3 and min(ids) >= 0
    table = dataset.spec.table("item")
    assert (table.id_space, table.num_embeddings) == ("hash", 50)


def test_labels_by_rule(tmp_path):
    labels = (
        'labels = [{ name = "click", column = "what", values = ["click", "buy"] },\n'
        '{ name = "buy", column = "what", values = ["buy"], known_if = "click" },\n'
        '{ name = "dear", column = "price", at_least = 2 }]\n'
    )
    log = "user,item,time,what,price\na,x,1,view,1\na,x,2,buy,2\na,x,3,click,\n"
    dataset = made(tmp_path, HEAD + 'time_format = "s"\n' + labels, log=log)
    assert column(dataset, "click").values.tolist() == [0, 1, 1]
    buy, dear = column(dataset, "buy").values, column(dataset, "dear").values
    assert np.isnan(buy[0]) and buy[1:].tolist() == [1, 0]
    assert dear[:2].tolist() == [0, 1] and np.isnan(dear[2])


def test_rows_that_are_left_out_are_counted(tmp_path):
    declaration = PLAIN.replace(
        LABEL,
        "time_from = 1970-01-01T00:00:05Z\ntime_until = 1970-01-01T00:00:15Z\n"
        'where = { column = "user", values = ["b"] }\n' + LABEL,
    )
    dataset = made(tmp_path, declaration)
    assert dataset.spec.examples.rows == 1 and dataset.spec.options["left_out_rows"] == 2
    with pytest.raises(DataError, match="must have rows that are examples; got none"):
        made(tmp_path / "none", declaration.replace('["b"]', '["c"]'))
    assert not (tmp_path / "none" / "data").exists()


def test_the_same_declaration_again_is_the_same_data_set_and_another_is_refused(tmp_path):
    made(tmp_path)
    path = str(tmp_path / "raw" / "mine.toml")
    assert prepare(path, tmp_path / "data").examples.rows == 3
    write(tmp_path / "raw", PLAIN + "[splits]\ntest_frac = 0.2\n")
    with pytest.raises(DataError, match="must hold a data set made with declaration = "):
        prepare(path, tmp_path / "data")


def test_files_may_lie_elsewhere(tmp_path):
    path = write(tmp_path / "a")
    write(tmp_path / "b", log="user,item,time,click\na,x,1,0\n")
    assert prepare(path, tmp_path / "data", source=tmp_path / "b").examples.rows == 1


CELLS = {
    "user,item,time,click\na,x,1,0\n,x,2,0\n": "'user' must be there in every row; .* in row 2",
    "user,item,time,click\na,x,1,0\na,x,,0\n": "'time' must have a time in .* in row 2",
    "user,item,time,click\na,x,soon,0\n": r"'time' must hold times \(s\); got 'soon' in row 1",
    "user,item,time,click\na,x,1,0\nb,x,2,0\nb,x,3,0\nb,x,1.5,0\nb,x,?,0\n": "'1.5' in row 4",
    f"user,item,time,click\na,x,{2**60},0\n": f"'time' must be a time in s since 1970; got {2**60}",
    "user,item,time,click\na,x,1,0\na,x,2,2\n": r"'click' must lie in \[0, 1\], or .* 2.0 in row 2",
    "user,item,time,click\na,x,1,yes\n": (
        r"'click' must hold numbers, or have values = .* 'yes' in row 1"
    ),
    "user;item;time;click\na;x;1;0\n": "got 0 .*; say under .files.NAME. which separator it has",
    "user;item;time;click\na;x;1,5;0\n": "Expected 1 columns, got 2.*how it is written: separator",
    "user,item,time,click\na,x,1,inf\n": "'click' must be finite, as float32; got inf in row 1",
    "user,item,time,klick\na,x,1,0\n": "one column 'click'; got 0 .*; did you mean 'klick'",
    "user,item,time,time,click\na,x,1,1,0\n": "one column 'time'; got 2 of that name",
    "user,item,time,click\na,x,1\n": "log.csv must be readable .*Expected 4 columns, got 3",
    "": "log.csv must be readable as its declaration says; got Empty CSV file",
    "user,item,time,click\n": "'log.csv' must have rows that are examples; got none",
    b"user,item,time,click\na,caf\xe9,1,0\n": "log.csv must be readable .*UTF8 .*encoding",
    b"PAR1\x00\x00": "log.csv must ",
}


@pytest.mark.parametrize("log", CELLS, ids=range(len(CELLS)))
def test_a_wrong_cell_is_one_line(tmp_path, log):
    with pytest.raises(DataError, match=CELLS[log]) as fault:
        made(tmp_path, log=log)
    assert "\n" not in str(fault.value)
    assert not (tmp_path / "data").exists()


def test_no_format_is_guessed_for_times(tmp_path):
    with pytest.raises(DataError, match=r"'time' must have a time_format in the declaration"):
        made(tmp_path, HEAD + LABEL)


def test_an_entity_has_a_row_for_each_key(tmp_path):
    declaration = PLAIN + '[entities.item]\nfile = "items.csv"\nkey = "id"\ncategories = ["kind"]\n'
    with pytest.raises(DataError, match=r"'id' must be there and unique; got x twice in row 2"):
        made(tmp_path, declaration, items="id,kind\nx,a\nx,b\n")
    with pytest.raises(DataError, match=r"source must hold items.csv; got \S+ without it"):
        made(tmp_path / "none", declaration)
    other = declaration.replace("entities.item", "entities.shop")
    with pytest.raises(ConfigError, match=r"entities.shop.of must be a category of the examples"):
        made(tmp_path / "other", other, items="id,kind\nx,a\n")


DECLARATIONS = {
    PLAIN.replace("user =", "usr ="): "unknown key 'examples.usr'; did you mean 'examples.user'",
    PLAIN.replace("time_format", 'name = "x"\ntime_format'): "unknown key 'examples.name'",
    PLAIN.replace('"s"', '"s"\ntime_zone = "Europe/Berlin"'): "time_zone must be left out where",
    PLAIN.replace('"s"', '"iso"\ntime_zone = "Berlin"'): "time_zone must be a name .*got 'Berlin'",
    PLAIN.replace('"s"', '"seconds"'): "time_format must be s, ms, us, iso or a pattern",
    PLAIN.replace(', column = "click"', ""): "'click' must have one of column and followed_by",
    PLAIN.replace('"click" }', '"click", above = 0, at_least = 1 }'): "at most one of values,",
    PLAIN.replace('"click" }', '"click", known_if = "buy" }'): "known_if must name a label before",
    PLAIN.replace(LABEL, 'categories = ["my column"]\n' + LABEL): (
        "'my column' must have a name .*write { column = 'my column', name = "
    ),
    PLAIN + "[splits]\nvalid_frac = 0.6\ntest_frac = 0.4\n": "must be below 1; got 0.6 . 0.4",
    PLAIN + "[splits]\ntest_from = 2025-01-01\n": "must have both of valid_from and test_from",
    PLAIN + '[[streams]]\nname = "s"\nlabels = ["buy"]\n': "labels of the examples; got 'buy'",
    PLAIN + '[[streams]]\nname = "s"\ncategories = ["kind"]\n': "got 'kind'",
    PLAIN + '[[streams]]\nname = "s"\nnumbers = ["n"]\n': "must name its file, or be of the",
    PLAIN.replace('user = "user"\n', "") + '[[streams]]\nname = "s"\n': "must have a user",
    PLAIN.replace("[examples]", "hash_rows = { kind = 9 }\n[examples]"): "tables of categories",
    PLAIN.replace('user = "user"\n', "")
    + '[[streams]]\nname = "s"\nfile = "log.csv"\n': "user and",
    PLAIN.replace("= [", "= ["[:-1]): "file must be TOML in UTF-8",
}


@pytest.mark.parametrize("declaration", DECLARATIONS, ids=range(len(DECLARATIONS)))
def test_a_wrong_declaration_is_one_line(tmp_path, declaration):
    with pytest.raises(ConfigError, match=DECLARATIONS[declaration]) as fault:
        made(tmp_path, declaration)
    assert str(fault.value).startswith(f"{tmp_path / 'raw' / 'mine.toml'}: ")
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ('categories = ["click"]\n', "label 'click' must be a column that is nothing else"),
        ('numbers = ["item_id"]\n', "input 'item_id' must be declared once; got it twice"),
    ],
)
def test_names_that_meet_are_refused_before_anything_is_read(tmp_path, added, message):
    with pytest.raises(ConfigError, match=message):
        made(tmp_path, PLAIN + added, log="not even a log")


def test_a_declaration_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"NAME must be the path of a declaration, .* got '.*no"):
        prepare(str(tmp_path / "no.toml"), tmp_path / "data")
