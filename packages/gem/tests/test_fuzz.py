"""Any recipe, contract or Parquet file gives a result or one line; no other error, no hang.

Hypothesis mutates sound inputs: a mutated one comes far enough to meet checks behind the first.
"""

import copy
import shutil
import signal
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from bad_inputs import RECIPE

from gem.config import RunConfig, parse_recipe
from gem.data.check import check
from gem.data.columns import ColumnRequest, read_columns
from gem.data.prepare import prepare
from gem.data.reader import open_reader
from gem.data.synthetic_spec import SyntheticSpec
from gem.data.toml_text import toml_text
from gem.faults import one_line
from gem_opkit.errors import GemError

FUZZ = settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
ROWS = 24
LONGEST_S = 20


@contextmanager
def no_hang():
    def late(number, frame):
        raise TimeoutError(f"no result within {LONGEST_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def result_or_one_line(call):
    """What a call gives; None where it refuses in one line. Any other error is raised."""
    with no_hang():
        try:
            return call()
        except GemError as fault:
            line = one_line(fault)
            assert line and "\n" not in line
            assert len(line) < 2000, line
            return None


words = st.sampled_from(
    ["", "gem", "din", "x", "click", "item_id", "clicks", "adam", "ü", "a b", "../x", "\x00", "é\n"]
)
scalars = st.one_of(
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63 - 1, -(2**63), 2**63, 10**30, 64, 400]),
    st.floats(),
    words,
    st.dates(),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=2)),
    max_leaves=4,
)


def paths(value, here=()):
    """Every place in nested tables and arrays."""
    yield here
    parts = value.items() if isinstance(value, dict) else []
    parts = enumerate(value) if isinstance(value, list) else parts
    for key, part in parts:
        yield from paths(part, (*here, key))


@st.composite
def mutated(draw, tree):
    """A sound tree with a few places replaced, removed, doubled or added."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        places = [path for path in paths(tree) if path]
        path = draw(st.sampled_from(places))
        owner = tree
        for key in path[:-1]:
            owner = owner[key]
        match draw(st.sampled_from(["replace", "replace", "remove", "add", "double"])):
            case "replace":
                owner[path[-1]] = draw(values)
            case "remove":
                del owner[path[-1]]
            case "add" if isinstance(owner, dict):
                owner[draw(words)] = draw(values)
            case "double" if isinstance(owner, list):
                owner.append(copy.deepcopy(owner[path[-1]]))
    return tree


def as_toml(tree):
    """TOML of a tree; mixed arrays and the like, which our writer refuses, become nothing."""
    try:
        return toml_text(tree)
    except (GemError, TypeError, ValueError):
        return None


@FUZZ
@given(tree=mutated(tomllib.loads(RECIPE)))
def test_any_recipe(tree):
    text = as_toml(tree)
    if text is not None:
        config = result_or_one_line(lambda: parse_recipe(text, name="x", origin="x.toml"))
        assert config is None or isinstance(config, RunConfig)


@FUZZ
@given(
    at=st.integers(0, len(RECIPE)),
    removed=st.integers(0, 30),
    added=st.text(alphabet="[]{}=.\"'\\\n#,0159eE+-_ anu\x00\x7fü", max_size=8),
)
def test_any_text_of_a_recipe(at, removed, added):
    text = RECIPE[:at] + added + RECIPE[at + removed :]
    result_or_one_line(lambda: parse_recipe(text, name="x", origin="x.toml"))


keys = st.sampled_from(
    ["data", "model", "train", "streams", "clicks", "0", "statistics", "-1", "", "x"]
)


@FUZZ
@given(
    path=st.lists(keys, max_size=5).map(".".join),
    value=st.one_of(st.text(max_size=12), st.sampled_from(["[", "{}", "nan", "1e999", "'", '"""'])),
    equals=st.sampled_from(["=", "=", "=", "", "=="]),
)
def test_any_override(path, value, equals):
    settings = [path + equals + value]
    result_or_one_line(lambda: parse_recipe(RECIPE, name="x", origin="x", overrides=settings))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "data"
    options = SyntheticSpec(rows=ROWS, users=5, items=6, categories=3, max_backlog_events=4)
    prepare("synthetic", folder, options=options)
    return folder


def read_all(folder):
    config = parse_recipe(RECIPE, name="x", origin="x.toml")
    reader = open_reader(folder, config.data, batch_size=7)
    return [sum(batch.examples for batch in reader.batches(name)) for name in ("train", "test")]


def test_any_contract(data, tmp_path):
    """Of those that are accepted the data set is read whole, and checked."""
    sound = tomllib.loads((data / "dataset.toml").read_text())
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    accepted = []

    @FUZZ
    @given(tree=mutated(sound))
    def run(tree):
        text = as_toml(tree)
        if text is None:
            return
        (folder / "dataset.toml").write_text(text)
        result_or_one_line(lambda: check(folder))
        accepted.append(result_or_one_line(lambda: read_all(folder)) is not None)

    run()
    assert any(accepted) and not all(accepted)


NUMBERS = [pa.int8(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64(), pa.float32(), pa.float64()]
NUMBERS += [pa.float16(), pa.string(), pa.large_string(), pa.decimal128(22, 2), pa.bool_()]
TIMES = [pa.timestamp("ms"), pa.timestamp("ns", tz="UTC"), pa.time64("us"), pa.duration("ms")]
LISTS = [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.string())]
LISTS += [pa.list_(pa.float64()), pa.list_(pa.list_(pa.int64()))]
ODD = {
    pa.int64(): [2**63 - 1, -(2**63), 2**62, 0, 5],
    pa.uint64(): [2**63, 2**64 - 1, 0, 5],
    pa.float64(): [float("nan"), float("inf"), 1e300, -0.0, 0.5, 1.0],
}


def lists_of(values, kind):
    """A list of 0 to 2 of each value; a null stays one."""
    lengths = [0 if value is None else value % 3 for value in values]
    flat = pa.array([v for v, n in zip(values, lengths, strict=True) for _ in range(n)], pa.int64())
    inner = kind.value_type
    if pa.types.is_list(inner):
        flat = pa.ListArray.from_arrays(pa.array(range(len(flat) + 1), pa.int32()), flat)
    ends = [None if value is None else sum(lengths[:row]) for row, value in enumerate(values)]
    starts = pa.array([*ends, len(flat)], pa.int32())
    return pa.ListArray.from_arrays(starts, flat.cast(inner)).cast(kind)


def arrays(rows):
    """Columns of many types, of a few rows, with nulls."""
    ids = st.lists(st.one_of(st.none(), st.integers(0, 5)), min_size=rows, max_size=rows)
    whole = ids.map(lambda values: pa.array(values, pa.int64()))
    texts = whole.map(lambda array: array.cast(pa.string()))

    def odd(kind):
        drawn = st.lists(st.sampled_from(ODD[kind]), min_size=rows, max_size=rows)
        return drawn.map(lambda values: pa.array(values, kind))

    return st.one_of(
        *(whole.map(lambda array, kind=kind: array.cast(kind)) for kind in (*NUMBERS, *TIMES)),
        *(ids.map(lambda values, kind=kind: lists_of(values, kind)) for kind in LISTS),
        *(odd(kind) for kind in ODD),
        whole.map(lambda array: array.dictionary_encode()),
        texts.map(lambda array: array.dictionary_encode()),
        texts.map(lambda array: array.cast(pa.binary())),
        whole.map(lambda array: array.cast(pa.int32()).cast(pa.date32())),
        whole.map(lambda array: pa.StructArray.from_arrays([array], ["a"])),
        st.just(pa.nulls(rows)),
        st.just(pa.array([[None]] * rows, pa.list_(pa.null()))),
        st.just(pa.array([[1, None]] * rows, pa.list_(pa.int64(), 2))),
    )


requests = st.builds(
    ColumnRequest,
    name=st.just("x"),
    kind=st.sampled_from(["id", "ids", "time", "number", "label", "weight"]),
    fill=st.sampled_from([None, 0, 3]),
    rows=st.sampled_from([None, 4, 6]),
)


@FUZZ
@given(parts=st.lists(st.integers(0, 5).flatmap(arrays), min_size=1, max_size=2), request=requests)
def test_any_column(tmp_path, parts, request):
    files = []
    for place, part in enumerate(parts):
        files.append(tmp_path / f"part-{place}.parquet")
        pq.write_table(pa.table({"x": part}), files[-1], row_group_size=3)
    column = result_or_one_line(lambda: read_columns(files, [request])["x"])
    if column is not None:
        assert column.rows == sum(map(len, parts))
        wanted = np.int64 if request.kind in ("id", "ids", "time") else np.float32
        assert column.values.dtype == wanted


def test_any_data_set(data, tmp_path):
    """A column of the examples, the events or an entity becomes another, or loses its values."""
    folder = tmp_path / "data"
    files = sorted(path.relative_to(data) for path in data.rglob("*.parquet"))
    accepted = []

    @settings(FUZZ, max_examples=80)
    @given(choice=st.data())
    def run(choice):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(data, folder)
        path = folder / choice.draw(st.sampled_from(files))
        table = pq.read_table(path)
        place = choice.draw(st.integers(0, table.num_columns - 1))
        column = choice.draw(arrays(table.num_rows))
        pq.write_table(table.set_column(place, table.column_names[place], column), path)
        result_or_one_line(lambda: check(folder))
        accepted.append(result_or_one_line(lambda: read_all(folder)) is not None)

    run()
    assert any(accepted) and not all(accepted)


@FUZZ
@given(at=st.floats(0, 1), bit=st.integers(0, 7), kept=st.floats(0, 1), cuts=st.booleans())
def test_any_bytes_of_a_parquet_file(data, tmp_path, at, bit, kept, cuts):
    path = next((data / "examples").glob("*.parquet"))
    content = bytearray(path.read_bytes())
    content[min(int(at * len(content)), len(content) - 1)] ^= 1 << bit
    if cuts:
        content = content[: int(kept * len(content))]
    damaged = tmp_path / "part-0.parquet"
    damaged.write_bytes(content)
    names = ["user_id", "time_ms"]
    result_or_one_line(lambda: read_columns([damaged], [ColumnRequest(n, "id", 0) for n in names]))
