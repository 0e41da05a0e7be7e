"""What an example may see of events and entities, through the reader, against plain Python.

The oracle goes over all rows of a small random log for every example, by the words of the
contract: events without times, feedback that is known later, a stream that holds events of
another one, entity rows that begin to hold at some time.
"""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem.data.check import check
from gem.data.dataset import Dataset, DatasetWriter
from gem.data.features import DatasetSpec, DataSpec
from gem.data.reader import open_reader
from gem.data.sources import Sources
from gem_opkit.errors import DataError

DELAY, LIKED, NOT_VALID = 5, 3, -1.0
USERS, ITEMS = 3, 5
FEEDBACK = {"stream": "shown", "field": "feedback", "positive": [2, 3], "negative": [1]}
STATISTICS = [
    {"kind": "rate", "name": "item", "keys": ["item_id"], "label": "click", "output": "none"},
    {"kind": "history_count", "name": "shown_count", "stream": "shown", "max_events": 4},
    {"kind": "history_count", "name": "liked_count", "stream": "liked", "max_events": 4},
    {"kind": "history_gap", "name": "newest", "stream": "liked", "max_events": 4},
    {"kind": "history_gap", "name": "oldest", "stream": "liked", "event": "oldest"},
    {
        "kind": "history",
        "name": "known",
        "base": "item",
        "value": "weight",
        "feedback": {**FEEDBACK, "max_events": 4},
    },
    {
        "kind": "history",
        "name": "near_price",
        "base": "item",
        "value": "weight",
        "weights": [{"kind": "number_near", "field": "price", "scale": 2.0}],
        "feedback": {**FEEDBACK, "max_events": 4},
    },
]


def spec(rows, delay=DELAY, **changes):
    feedback = {"name": "feedback", "table": "feedback", "visible_after_ms": delay}
    item = {"name": "item_id", "table": "item"}
    return DatasetSpec.model_validate(
        {
            "name": "seen",
            "tables": [
                {"name": "user", "num_embeddings": USERS},
                {"name": "item", "num_embeddings": ITEMS},
                {"name": "feedback", "num_embeddings": 4},
            ],
            "entities": [
                {
                    "name": "user",
                    "key": "user_id",
                    "valid_from": "since",
                    "numbers": [{"name": "age", "fill": NOT_VALID}],
                },
                {
                    "name": "item",
                    "key": "item_id",
                    "valid_from": "since",
                    "numbers": [{"name": "price", "fill": NOT_VALID}],
                },
            ],
            "streams": [
                {"name": "shown", "untimed": "untimed", "ids": [item, feedback]},
                {
                    "name": "liked",
                    "untimed": "untimed",
                    "also": {"stream": "shown", "field": "feedback", "values": [LIKED]},
                    "ids": [item],
                },
            ],
            "examples": {
                "rows": rows,
                "item": "item_id",
                "ids": [
                    {"name": "user_id", "table": "user"},
                    {"name": "item_id", "table": "item"},
                ],
                "labels": [{"name": "click"}],
            },
            "splits": [{"name": "train", "start": 0, "stop": rows}],
        }
        | changes
    )


def write(folder, log, delay=DELAY):
    """A log is (examples, shown, liked, last, since), as the strategy below draws it."""
    examples, shown, liked, last, since = log
    ints = {"type": pa.int64()}
    with DatasetWriter(folder) as writer:
        user, item, time = list(zip(*examples, strict=True))
        writer.examples(
            {
                "user_id": pa.array(user, **ints),
                "item_id": pa.array(item, **ints),
                "time_ms": pa.array(time, **ints),
                "click": pa.array([1.0] * len(user)),
            }
        )
        for name, events in (("shown", shown), ("liked", liked)):
            writer.events(
                name,
                {
                    "user_id": pa.array([e[0] for e in events], **ints),
                    "item_id": pa.array([e[1] for e in events], **ints),
                    "feedback": pa.array([e[2] for e in events], **ints),
                    "time_ms": pa.array(
                        [last[e[0]] if e[3] is None else e[3] for e in events], **ints
                    ),
                    "untimed": pa.array([int(e[3] is None) for e in events], **ints),
                },
            )
        for name, count in (("user", USERS), ("item", ITEMS)):
            writer.entity(
                name,
                {
                    f"{name}_id": pa.array(range(count), **ints),
                    "since": pa.array(since[:count], **ints),
                    ("age" if name == "user" else "price"): [float(10 + i) for i in range(count)],
                },
            )
        writer.finish(spec(len(examples), delay))
    return folder


times = st.integers(0, 25)
events = st.lists(
    st.tuples(
        st.integers(0, USERS - 1), st.integers(0, ITEMS - 1), st.integers(0, 3), st.none() | times
    ),
    max_size=25,
)
logs = st.tuples(
    st.lists(
        st.tuples(st.integers(0, USERS - 1), st.integers(0, ITEMS - 1), times),
        min_size=1,
        max_size=12,
    ).map(lambda rows: sorted(rows, key=lambda row: row[2])),
    events,
    events,
    st.lists(times, min_size=USERS, max_size=USERS),
    st.lists(times, min_size=ITEMS, max_size=ITEMS),
)


def shown_to(log, user, now, delay):
    """(item, feedback as known, milliseconds since) of every visible impression, oldest first."""
    _, shown, _, last, _ = log
    stored = [
        (i, 0 if delay else f, now - last[u]) for u, i, f, t in shown if t is None and u == user
    ]
    if last[user] >= now:
        stored = []
    own = [(t, i, f) for u, i, f, t in shown if t is not None and u == user and t < now]
    own.sort(key=lambda event: event[0])
    return stored + [(i, f if now - t >= delay else 0, now - t) for t, i, f in own]


def liked_by(log, user, now, delay):
    """(item, milliseconds since) of every visible liked event, in the order of being seen."""
    _, shown, liked, last, _ = log
    stored = [(i, now - last[u]) for u, i, _, t in liked if t is None and u == user]
    if not delay:  # what the stored ones were is known at once, so they are taken, too
        stored += [
            (i, now - last[u]) for u, i, f, t in shown if t is None and u == user and f == LIKED
        ]
    if last[user] >= now:
        stored = []
    seen = [(t, 0, i, t) for u, i, _, t in liked if t is not None and u == user and t < now]
    for u, i, f, t in shown:
        if u == user and f == LIKED and t is not None and t + max(delay, 1) <= now:
            seen.append((t + max(delay, 1) - 1, 1, i, t))
    seen.sort(key=lambda event: event[:2])
    return stored + [(i, now - t) for _, _, i, t in seen]


def price_at(log, item, now):
    return 10.0 + item if now >= log[4][item] else NOT_VALID


@settings(max_examples=60, deadline=None)
@given(logs, st.sampled_from([DELAY, 1, 0]), st.integers(1, 6))
def test_examples_see_what_the_contract_says(tmp_path_factory, log, delay, max_events):
    folder = write(tmp_path_factory.mktemp("seen") / "data", log, delay)
    read = {"max_events": max_events}
    data = DataSpec.model_validate(
        {
            "dataset": "seen",
            "streams": {
                "shown": {**read, "fields": ["item_id", "feedback", "price"]},
                "liked": read,
            },
            "statistics": STATISTICS,
        }
    )
    reader = open_reader(folder, data, batch_size=5)
    names = reader.schema.numbers
    row = 0
    for batch in reader.batches("train"):
        shown, liked = batch.streams["shown"], batch.streams["liked"]
        for place in range(batch.examples):
            user, item, now = log[0][row]
            expected = shown_to(log, user, now, delay)[-max_events:]
            got = zip(
                shown.ids["item_id"].to_list()[place].tolist(),
                shown.ids["feedback"].to_list()[place].tolist(),
                [round(1000 * s) for s in shown.gap_seconds.to_list()[place].tolist()],
                strict=True,
            )
            assert list(got) == expected
            prices = shown.numbers.to_list()[place][:, 0].tolist()
            assert prices == [price_at(log, one, now) for one, _, _ in expected]
            expected = liked_by(log, user, now, delay)[-max_events:]
            gaps = [round(1000 * s) for s in liked.gap_seconds.to_list()[place].tolist()]
            assert list(zip(liked.ids["item_id"].to_list()[place].tolist(), gaps, strict=True)) == (
                expected
            )
            numbers = dict(zip(names, batch.numbers_BD[place].tolist(), strict=True))
            assert numbers["age"] == (10.0 + user if now >= log[4][user] else NOT_VALID)
            assert numbers["price"] == price_at(log, item, now)
            _check_statistics(log, user, item, now, delay, numbers)
            row += 1
    assert row == len(log[0])


def _check_statistics(log, user, item, now, delay, numbers):
    shown, liked = shown_to(log, user, now, delay)[-4:], liked_by(log, user, now, delay)
    known = [one for one, feedback, _ in shown if feedback]
    near = [
        math.exp(-abs(price_at(log, one, now) - price_at(log, item, now)) / 2.0) for one in known
    ]
    expected = {
        "shown_count": math.log1p(len(shown)),
        "liked_count": math.log1p(len(liked[-4:])),
        "newest": math.log1p(liked[-1][1] / 1000) if liked else 0.0,
        "oldest": math.log1p(liked[-200:][0][1] / 1000) if liked else 0.0,
        "known": math.log1p(len(known)),
        "near_price": math.log1p(sum(near)),
    }
    assert {name: numbers[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_a_user_with_two_last_times_is_refused(tmp_path):
    events = [(1, 0, 0, None), (1, 1, 0, None)]
    write(tmp_path / "data", ([(1, 0, 9)], events, [], [3, 4, 5], [0] * ITEMS))
    # The folder is as its contract says; only the times of the stored events are made to differ.
    part = tmp_path / "data/events/shown/part-00000.parquet"
    table = pq.read_table(part)
    times = pa.array([4, 6], pa.int64())
    pq.write_table(table.set_column(table.column_names.index("time_ms"), "time_ms", times), part)
    sources = Sources(Dataset.open(tmp_path / "data"), DataSpec(dataset="seen"))
    with pytest.raises(DataError, match=r"one time a user.*got 4 and 6 for user 1"):
        sources.stream("shown")


def streams_with(**also):
    item = {"name": "item_id", "table": "item"}
    feedback = {"name": "feedback", "table": "feedback", "visible_after_ms": 5}
    return [
        {"name": "shown", "ids": [item, feedback]},
        {
            "name": "liked",
            "also": {"stream": "shown", "field": "feedback", "values": [3]} | also,
            "ids": [item],
        },
    ]


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        (streams_with(stream="showed"), "did you mean 'shown'"),
        (streams_with(stream="liked"), "must be another stream that is no union itself"),
        (streams_with(field="feedbak"), "did you mean 'feedback'"),
        (streams_with(values=[0, 3]), "got 0, which stands for unknown"),
        (
            [
                streams_with()[0],
                streams_with()[1]
                | {"ids": [{"name": "feedback", "table": "feedback", "visible_after_ms": 4}]},
            ],
            "field 'feedback' must be declared as in the stream 'shown'",
        ),
    ],
)
def test_a_union_that_cannot_be_made_is_refused(streams, message):
    with pytest.raises(ValueError, match=message):
        spec(1, streams=streams)


def test_rows_of_unknown_keys_hold_their_fills_at_any_time(tmp_path):
    log = ([(0, 0, -(2**40))], [], [], [0] * USERS, [-(2**41)] * ITEMS)
    folder = write(tmp_path / "data", log)
    part = folder / "entities/item/part-00000.parquet"
    table = pq.read_table(part)
    pq.write_table(table.slice(1), part)
    reader = open_reader(folder, DataSpec(dataset="seen"), batch_size=1)
    (batch,) = reader.batches("train")
    numbers = dict(zip(reader.schema.numbers, batch.numbers_BD[0].tolist(), strict=True))
    assert numbers == {"age": 10.0, "price": NOT_VALID}
    assert np.isfinite(batch.numbers_BD.numpy()).all()


def test_a_constant_column_is_no_fault_where_other_events_join_the_stream(tmp_path):
    shown = [(user, 1, user, 5) for user in range(3)]
    liked = [(user, 2, 0, None) for user in range(3)]
    examples = [(0, 1, 10), (1, 2, 12), (2, 0, 13)]
    since = [0] * max(USERS, ITEMS)
    report = check(write(tmp_path / "data", (examples, shown, liked, [5] * USERS, since)))
    constant = [f.where for f in report.findings if f.kind == "constant" and "events" in f.where]
    assert constant == ["events/shown, column 'item_id'"]
