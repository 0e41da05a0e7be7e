"""`gem data check`: each fault is planted in a sound log and has to be found, and nothing else."""

import io
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from sklearn.metrics import roc_auc_score

from gem.data.check import check
from gem.data.checks.leaks import auc, power
from gem.data.checks.printing import print_report
from gem.data.checks.rows import RowHashes
from gem.data.columns import Column
from gem.data.dataset import DatasetWriter
from gem.data.features import DatasetSpec

ROWS, USERS, ITEMS = 1200, 40, 50
DAY_MS = 86_400_000
START_MS = 1_700_000_000_000 // DAY_MS * DAY_MS


def sound():
    """Columns of a log in which no input knows the label and nothing is odd."""
    random = np.random.default_rng(5)
    time = START_MS + np.sort(random.integers(0, 4 * DAY_MS, ROWS))
    time += np.arange(ROWS)  # no two examples are equal
    click = (random.random(ROWS) < 0.3).astype(np.float32)
    buy = np.where(click == 1, (random.random(ROWS) < 0.4).astype(np.float32), np.nan)
    user = random.integers(0, USERS, ROWS)
    user[:USERS] = np.arange(USERS)
    events = 900
    return {
        "examples": {
            "user_id": user,
            "item_id": random.integers(0, ITEMS, ROWS),
            "time_ms": time,
            "place": random.integers(0, 4, ROWS),
            "bid": random.normal(size=ROWS).astype(np.float32),
            "click": click,
            "buy": pa.array(buy, from_pandas=True),
        },
        "events": {
            "user_id": np.r_[np.arange(USERS), random.integers(0, USERS, events - USERS)],
            "item_id": random.integers(0, ITEMS, events),
            "time_ms": START_MS - 5 * DAY_MS + np.sort(random.integers(0, 5 * DAY_MS, events)),
        },
        "item": {
            "item_id": np.arange(ITEMS),
            "price": random.normal(size=ITEMS).astype(np.float32),
            "tags": pa.array([[i % 7, i % 3] for i in range(ITEMS)]),
        },
    }


def write(folder, parts, *, row_group=None):
    rows = len(parts["examples"]["click"])
    spec = {
        "name": "planted",
        "tables": [
            {"name": "user", "num_embeddings": USERS},
            {"name": "item", "num_embeddings": ITEMS},
            {"name": "place", "num_embeddings": 9},
        ],
        "entities": [
            {
                "name": "item",
                "key": "item_id",
                "ids": [{"name": "tags", "table": "place", "multi": True}],
                "numbers": [{"name": "price"}],
            }
        ],
        "streams": [{"name": "views", "ids": [{"name": "item_id", "table": "item"}]}],
        "examples": {
            "rows": rows,
            "item": "item_id",
            "ids": [
                {"name": "user_id", "table": "user"},
                {"name": "item_id", "table": "item"},
                {"name": "place", "table": "place"},
            ],
            "numbers": [
                {"name": name, "fill": -1.0}
                for name in parts["examples"]
                if name not in ("user_id", "item_id", "time_ms", "place", "click", "buy")
            ],
            "labels": [{"name": "click"}, {"name": "buy"}],
        },
        "splits": [
            {"name": "train", "start": 0, "stop": rows - 400},
            {"name": "valid", "start": rows - 400, "stop": rows - 200},
            {"name": "test", "start": rows - 200, "stop": rows},
        ],
    }
    with DatasetWriter(folder) as writer:
        writer.examples(parts["examples"])
        writer.events("views", parts["events"])
        writer.entity("item", parts["item"])
        writer.finish(DatasetSpec.model_validate(spec))
    return folder


def found(folder, parts):
    """Findings by kind, but for the note that every log has: the last events are seen by none."""
    report = check(write(folder, parts))
    return report, {finding.kind: finding for finding in report.findings}


def test_a_sound_log_has_nothing_to_say(tmp_path):
    report = check(write(tmp_path / "d", sound()))
    assert [finding.text for finding in report.findings] == []
    assert report.problems == ()
    assert [day.examples for day in report.days] and len(report.days) == 4
    assert sum(day.examples for day in report.days) == ROWS
    assert report.histories[0].events == 900
    assert report.histories[0].never_seen == report.histories[0].users_without == 0


def leaking(name):
    """A number that gives the click away, each in its own way."""
    parts = sound()
    click = parts["examples"]["click"]
    noise = np.random.default_rng(6).normal(size=ROWS).astype(np.float32)
    column = {
        "equal": click,
        "opposite": 1 - click,
        "larger": noise + 10 * click,
        "null": pa.array(np.where(click == 1, noise, np.nan), from_pandas=True),
        "null else": pa.array(np.where(click == 0, noise, np.nan), from_pandas=True),
        "constant": np.where(click == 1, 7, noise).astype(np.float32),
        "odd": (np.round(5 * noise) * 2 + click).astype(np.float32),  # odd for clicks
    }[name]
    parts["examples"]["extra"] = column
    return parts


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("equal", "equals 'click'"),
        ("opposite", "is 1 less 'click'"),
        ("larger", "tells the positives of 'click' from the others"),
        ("odd", "tells the positives of 'click' from the others"),
        ("null", "is missing in 0.0% of the positives of 'click' and 100.0% of the others"),
        ("null else", "is missing in 100.0% of the positives of 'click' and 0.0% of the others"),
        ("constant", "is 7 in all positives of 'click', and in 0.0% of the others"),
    ],
)
def test_a_column_that_knows_the_label_is_an_error(tmp_path, name, said):
    report, kinds = found(tmp_path / "d", leaking(name))
    leak = kinds["leak"]
    assert (leak.grade, leak.where) == ("error", "examples, column 'extra'")
    assert leak.found == said
    assert "AUC 1.0000" in leak.how or "AUC 0.99" in leak.how
    assert f"in {ROWS:,} rows" in leak.how
    assert len(report.problems) == 1


def test_a_column_with_a_chance_name_is_a_note(tmp_path):
    parts = sound()
    parts["examples"]["play_time"] = parts["examples"].pop("bid")
    report, kinds = found(tmp_path / "d", parts)
    assert kinds["leak-name"].grade == "note"
    assert kinds["leak-name"].where == "examples, column 'play_time'"
    assert report.problems == ()


def test_an_entity_that_knows_the_labels_of_the_whole_log_is_a_warning(tmp_path):
    parts = sound()
    item, click = parts["examples"]["item_id"], parts["examples"]["click"]
    rate = np.bincount(item, click, ITEMS) / np.maximum(np.bincount(item, minlength=ITEMS), 1)
    parts["item"]["price"] = rate.astype(np.float32)
    _, kinds = found(tmp_path / "d", parts)
    leak = kinds["leak-entity"]
    assert (leak.grade, leak.where) == ("warning", "entities/item, column 'price'")
    assert leak.found == "follows the mean of 'click' over the whole log"


def test_an_entity_field_that_tells_the_label_is_an_error(tmp_path):
    """A label that belongs to the item: every example of it has the same."""
    parts = sound()
    kind = np.arange(ITEMS) % 2
    parts["item"]["tags"] = pa.array([[int(k)] for k in kind])
    parts["examples"]["click"] = kind[parts["examples"]["item_id"]].astype(np.float32)
    report, _ = found(tmp_path / "d", parts)
    leaks = {f.where: f.grade for f in report.findings if f.kind == "leak"}
    assert leaks["entities/item, column 'tags'"] == "error"


def test_unsorted_time_is_an_error_with_its_place(tmp_path):
    parts = sound()
    time = parts["examples"]["time_ms"]
    time[[100, 101]] = time[[101, 100]]
    report, kinds = found(tmp_path / "d", parts)
    finding = kinds["time-order"]
    assert f"got {time[101]} after {time[100]} in row 101" in finding.found
    assert "and 1 such rows" in finding.found
    assert report.problems == (finding.text,)


def test_ids_that_change_type_are_an_error_that_names_both_files(tmp_path):
    folder = write(tmp_path / "d", sound())
    path = folder / "examples" / "part-00000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 700), path)
    names = table.column("user_id").cast(pa.string())
    other = table.set_column(table.schema.get_field_index("user_id"), "user_id", names)
    pq.write_table(other.slice(700), path.with_name("part-00001.parquet"))
    kinds = {finding.kind: finding for finding in check(folder).findings}
    assert kinds["type-change"].grade == "error"
    assert kinds["type-change"].where == "examples, column 'user_id'"
    assert "integer in part-00000.parquet and string in part-00001.parquet" in (
        kinds["type-change"].found
    )
    assert "must hold integers; got string" in kinds["unreadable"].found


def test_every_bad_column_is_listed_not_only_the_first(tmp_path):
    parts = sound()
    parts["examples"]["item_id"][3] = ITEMS
    parts["examples"]["place"][4] = -1
    parts["examples"]["click"][5] = 2.0
    problems = check(write(tmp_path / "d", parts)).problems
    assert len(problems) == 3
    for said in ("row 3 must lie in 0 .. 49; got 50", "row 4 must lie", "row 5 must lie in [0, 1]"):
        assert sum(said in problem for problem in problems) == 1


def test_rows_that_occur_twice_are_counted(tmp_path):
    parts = sound()
    for name, column in parts["examples"].items():
        if isinstance(column, np.ndarray):
            column[[7, 8, 9]] = column[6]
        else:
            values = column.to_pylist()
            values[7:10] = [values[6]] * 3
            parts["examples"][name] = pa.array(values, pa.float32())
    parts["examples"]["click"][9] = 1 - parts["examples"]["click"][6]
    report, _ = found(tmp_path / "d", parts)
    said = [finding.found for finding in report.findings if finding.kind == "duplicates"]
    assert said == [
        "2 of 1,200 rows repeat an earlier one; the first is row 7 of the data set, "
        "from 0 in order of time",
        "1 of 1,200 rows equal an earlier one in everything but a label",
    ]


def test_events_that_nobody_can_see_are_an_error(tmp_path):
    parts = sound()
    parts["events"]["time_ms"] += 9 * DAY_MS
    report, kinds = found(tmp_path / "d", parts)
    assert kinds["history"].grade == "error"
    assert "no example sees any of its events: all come at the time of" in kinds["history"].found
    assert report.histories[0].never_seen == 900
    parts = sound()
    parts["examples"]["user_id"] %= 20
    parts["events"]["user_id"] = parts["events"]["user_id"] % 20 + 20
    _, kinds = found(tmp_path / "e", parts)
    assert "none of its users has an example" in kinds["history"].found


def test_histories_are_counted_as_the_join_would(tmp_path):
    parts = sound()
    parts["events"]["time_ms"] += 6 * DAY_MS  # some before the examples, some among and after them
    parts["events"]["user_id"][parts["events"]["user_id"] == 3] = 4
    report, _ = found(tmp_path / "d", parts)
    examples, events = parts["examples"], parts["events"]
    lengths, seen = [], np.zeros(900, bool)
    for user, time in zip(examples["user_id"], examples["time_ms"], strict=True):
        mine = (events["user_id"] == user) & (events["time_ms"] < time)
        lengths.append(int(mine.sum()))
        seen |= mine
    history = report.histories[0]
    assert history.never_seen == int((~seen).sum()) > 0
    assert history.median == np.median(lengths)
    assert history.longest == max(lengths)
    assert history.empty_frac == np.mean(np.array(lengths) == 0)
    assert history.users_without == 1


def test_a_day_with_other_labels_is_a_warning(tmp_path):
    parts = sound()
    day = (parts["examples"]["time_ms"] - START_MS) // DAY_MS
    parts["examples"]["click"][day == 2] = 0
    parts["examples"]["buy"] = pa.array(
        np.where(parts["examples"]["click"] == 1, np.arange(ROWS) % 2, np.nan), from_pandas=True
    )
    report, kinds = found(tmp_path / "d", parts)
    assert kinds["label-rate"].grade == "warning"
    assert f"0.0000 on {report.days[2].day}" in kinds["label-rate"].found
    for index, reported in enumerate(report.days):
        mine = parts["examples"]["click"][day == index]
        assert reported.rates["click"] == pytest.approx(mine.mean())
        assert reported.known["click"] == len(mine)


def test_gaps_and_units_of_time(tmp_path):
    parts = sound()
    parts["examples"]["time_ms"][600:] += 30 * DAY_MS
    _, kinds = found(tmp_path / "d", parts)
    assert "no example for 30.0 days" in kinds["time-gap"].found
    parts = sound()
    for part in ("examples", "events"):
        parts[part]["time_ms"] //= 1000
    _, kinds = found(tmp_path / "e", parts)
    assert "look like seconds" in kinds["time-unit"].found


def test_columns_that_say_nothing(tmp_path):
    parts = sound()
    parts["examples"]["bid"] = np.full(ROWS, 2.5, np.float32)
    parts["examples"]["place"] = pa.nulls(ROWS, pa.int64())
    parts["item"]["price"] = pa.array([1.0] * 10 + [None] * 40, pa.float32())
    report, _ = found(tmp_path / "d", parts)
    said = {f.where: (f.grade, f.found) for f in report.findings}
    assert said["examples, column 'bid'"] == ("warning", "is 2.5 in every row")
    assert said["examples, column 'place'"] == ("warning", "is missing in every row")
    assert said["entities/item, column 'price'"] == ("note", "is missing in 80.0% of 50 values")
    assert report.parts[0].missing["place"] == ROWS
    assert report.parts[0].fills["place"] == 0


def test_labels_of_one_class_or_none(tmp_path):
    parts = sound()
    parts["examples"]["click"][-200:] = 0
    parts["examples"]["buy"] = pa.nulls(ROWS, pa.float32())
    report, _ = found(tmp_path / "d", parts)
    said = {(f.where, f.grade): f.found for f in report.findings if f.kind == "label"}
    assert said["split 'test', label 'click'", "warning"] == "0 in all 200 examples that know it"
    assert said["split 'train', label 'buy'", "warning"] == "unknown in all 800 examples"


def test_small_row_groups_are_a_note(tmp_path):
    folder = write(tmp_path / "d", sound())
    path = folder / "examples" / "part-00000.parquet"
    pq.write_table(pq.read_table(path), path, row_group_size=10)
    kinds = {finding.kind: finding for finding in check(folder).findings}
    assert kinds["row-groups"].found == "120 row groups of 10 rows on average"


def test_a_printed_report_has_it_all_and_takes_names_as_they_are(tmp_path):
    parts = leaking("equal")
    folder = write(tmp_path / "[bold]", parts)
    console = Console(file=io.StringIO(), width=100)
    print_report(console, check(folder))
    text = console.file.getvalue()
    for said in ("[bold]", "examples", "1,200", "Label rates by day", "error: ", "is not sound"):
        assert said in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_no_rows_at_all(tmp_path):
    empty = {
        part: {name: pa.array(column).slice(0, 0) for name, column in columns.items()}
        for part, columns in sound().items()
    }
    write(tmp_path / "d", sound())
    for part, columns in zip(
        ("examples", "events/views", "entities/item"), empty.values(), strict=True
    ):
        pq.write_table(pa.table(columns), tmp_path / "d" / part / "part-00000.parquet")
    toml = tmp_path / "d" / "dataset.toml"
    text = re.sub(r"(rows|start|stop) = \d+", r"\1 = 0", toml.read_text())
    toml.write_text(text)
    report = check(tmp_path / "d")
    assert [finding.grade for finding in report.findings if finding.kind == "split"] == [
        "error",
        "note",
        "note",
    ]
    assert [part.rows for part in report.parts] == [0, 0, 0]


def test_area_equals_scikit_learn_also_with_ties(rng):
    for values in (rng.normal(size=300), rng.integers(0, 4, 300)):
        positive = rng.random(300) < 0.3
        assert auc(values, positive) == pytest.approx(roc_auc_score(positive, values), abs=1e-12)


def test_an_id_that_is_new_in_every_row_predicts_nothing(rng):
    label = (rng.random(4000) < 0.5).astype(np.float32)
    found = power(np.arange(4000), None, label, is_number=False)
    assert found.auc < 0.55
    assert power(np.arange(12), None, label[:12], is_number=False) is None  # too few to say


def test_hashes_tell_rows_apart_by_value_place_and_length():
    def hashed(*lists):
        hashes = RowHashes(len(lists))
        values = np.array([v for one in lists for v in one], np.int64)
        hashes.add(Column(values, np.cumsum([0, *map(len, lists)])))
        return hashes.values

    rows = hashed([], [0], [0, 0], [1, 2], [2, 1], [3], [1, 2])
    assert len(set(rows.tolist())) == 6
    assert rows[3] == rows[6]
    numbers = RowHashes(3)
    numbers.add(Column(np.array([0.0, -0.0, np.nan], np.float32)))
    assert numbers.values[0] == numbers.values[1] != numbers.values[2]
