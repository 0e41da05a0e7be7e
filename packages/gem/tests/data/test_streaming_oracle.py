"""Streamed batches against plain Python that goes over all rows for every example.

Random small logs, each written in a way of its own: several files, empty ones, row groups and pages
of a few rows, ids as any integer type or as categories, nulls and NaN wherever they may stand,
users with huge and negative ids, equal times, events without a time, a stream that holds events
of another one. Read with random budgets, batch sizes, ranks and first steps.
"""

import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batch_rows import reader, rows_of

from gem.data import example_rows, log, log_index
from gem.data.features import DatasetSpec
from gem.data.log_index import LogIndex
from gem.data.toml_text import toml_text

INTEGERS = (pa.int64(), pa.int32(), pa.int16(), pa.uint8(), pa.uint64(), "categories")
LISTS = (pa.list_(pa.int64()), pa.list_(pa.int32()), pa.large_list(pa.uint8()))
NAN, STRANGER = float("nan"), 77
EVENT = ("user_id", "time_ms", "untimed", "item_id", "feedback", "dwell")
EXAMPLE = ("user_id", "time_ms", "item_id", "place", "bid", "click", "weight", "tags")
NUMBERS = ("dwell", "bid", "click", "weight")


def spec_of(rows, train, delay, dwell_delay, untimed):
    item = {"name": "item_id", "table": "item", "fill": 6}
    feedback = {"name": "feedback", "table": "feedback", "visible_after_ms": delay, "fill": 1}
    dwell = {"name": "dwell", "fill": 0.5, "visible_after_ms": dwell_delay, "unknown": -2.0}
    both = {"numbers": [dwell]} | ({"untimed": "untimed"} if untimed else {})
    also = {"stream": "shown", "field": "feedback", "values": [3]}
    tables = [{"name": "user", "num_embeddings": 100, "id_space": "hash"}]
    tables += [
        {"name": name, "num_embeddings": count}
        for name, count in (("item", 7), ("feedback", 4), ("place", 4), ("tag", 9))
    ]
    return DatasetSpec.model_validate(
        {
            "name": "tiny",
            "tables": tables,
            "streams": [
                {"name": "shown", "ids": [item, feedback], **both},
                {"name": "liked", "also": also, "ids": [item], **both},
            ],
            "examples": {
                "rows": rows,
                "item": "item_id",
                "ids": [
                    {"name": "user_id", "table": "user"},
                    item,
                    {"name": "place", "table": "place", "fill": 3},
                    {"name": "tags", "table": "tag", "multi": True, "fill": 8},
                ],
                "numbers": [{"name": "bid", "fill": 7.0}],
                "labels": [{"name": "click"}],
                "weight": "weight",
            },
            "splits": [
                {"name": "train", "start": 0, "stop": train},
                {"name": "test", "start": train, "stop": rows},
            ],
        }
    )


class RandomLog:
    """A log as lists of dicts, and its files."""

    def __init__(self, seed, folder):
        self.any = any_ = random.Random(seed)
        count = any_.choice([1, 2, 4, 9])
        users = [any_.randint(*any_.choice([(-(2**63), 2**63 - 1), (-3, 3)])) for _ in range(count)]
        start, span = any_.choice([0, -50, 1_650_000_000_000, 2**62 - 50]), any_.choice([1, 5, 40])
        self.delay, self.dwell_delay = any_.choice([0, 1, 2, 20]), any_.choice([0, 3])
        untimed, last = any_.random() < 0.8, {u: start + any_.randint(0, span) for u in users}
        last[STRANGER] = start
        self.examples = [
            {
                "user_id": any_.choice(users),
                "time_ms": time,
                "item_id": any_.choice([None, *range(7)]),
                "place": any_.choice([None, 0, 1, 2]),
                "bid": any_.choice([None, NAN, any_.random()]),
                "click": any_.choice([None, NAN, 0.0, 1.0, 0.5]),
                "weight": any_.choice([0.0, 1.0, 2.5]),
                "tags": any_.choice([None, [], [1], [None, 2, 3]]),
            }
            for time in sorted(
                start + any_.randint(0, span) for _ in range(any_.choice([0, 1, 40]))
            )
        ]
        self.events = {}
        for name in ("shown", "liked"):
            often = any_.choice([0.0, 0.3, 1.0]) if untimed else 0.0
            self.events[name] = rows = []
            for _ in range(any_.choice([0, 1, 40, 120])):
                user, has_none = any_.choice([*users, STRANGER]), any_.random() < often
                rows.append(
                    {
                        "user_id": user,
                        "time_ms": last[user] if has_none else start + any_.randint(0, span),
                        "untimed": int(has_none),
                        "item_id": any_.choice([None, *range(7)]),
                        "feedback": any_.choice([None, 0, 1, 2, 3]),
                        "dwell": any_.choice([None, NAN, any_.random()]),
                    }
                )
            if any_.random() < 0.3:  # as the index has them
                rows.sort(key=lambda e: (e["user_id"], -e["untimed"], e["time_ms"]))
            self._write(folder / "events" / name, rows, EVENT)
        self._write(folder / "examples", self.examples, EXAMPLE)
        self.train = any_.randint(0, len(self.examples))
        spec = spec_of(len(self.examples), self.train, self.delay, self.dwell_delay, untimed)
        text = toml_text({"format": 1} | spec.model_dump(mode="json", exclude_defaults=True))
        (folder / "dataset.toml").write_text(text)

    def _write(self, folder, rows, names):
        folder.mkdir(parents=True)
        cuts = sorted(self.any.randint(0, len(rows)) for _ in range(self.any.randint(0, 3)))
        for number, (a, b) in enumerate(zip([0, *cuts], [*cuts, len(rows)], strict=True)):
            order = self.any.sample(names, len(names))
            table = pa.table({name: self._column(name, rows[a:b]) for name in order})
            pq.write_table(
                table,
                folder / f"{number}.parquet",
                row_group_size=self.any.choice([1, 3, 7, 1000]),
                data_page_size=self.any.choice([16, 200, 1 << 20]),
                use_dictionary=self.any.random() < 0.5,
            )

    def _column(self, name, rows):
        values = [row[name] for row in rows]
        if name == "tags":
            return pa.array(values, self.any.choice(LISTS))
        if name in NUMBERS:
            return pa.array(values, self.any.choice([pa.float32(), pa.float64()]))
        kind = self.any.choice(INTEGERS)
        if kind == "categories":
            return pa.array(values, pa.int64()).dictionary_encode()
        try:
            return pa.array(values, kind)
        except (pa.ArrowInvalid, OverflowError):  # they do not fit
            return pa.array(values, pa.int64())

    # -- what an example sees, by the words of the contract ---------------------------------------
    def seen(self, stream, user, now):
        """Events of a stream, oldest first."""
        first, then = [], []
        for event in self.events[stream]:
            if event["user_id"] == user and event["time_ms"] < now:
                (first if event["untimed"] else then).append((event["time_ms"], event))
        if stream == "liked":
            for event in self.events["shown"]:
                time = event["time_ms"]
                if event["user_id"] != user or event["feedback"] != 3:
                    continue
                if event["untimed"]:
                    first += [(time, event)] if not self.delay and time < now else []
                elif time + max(self.delay, 1) <= now:
                    then.append((time + max(self.delay - 1, 0), event))
        then.sort(key=lambda one: one[0])  # Python's sort keeps the order of equal times
        return [event for _, event in (*first, *then)]

    def fields(self, event, now):
        gap = now - event["time_ms"]
        hidden = [delay and (event["untimed"] or gap < delay) for delay in self.delays]
        return {
            "item_id": filled(event["item_id"], 6),
            "feedback": 0 if hidden[0] else filled(event["feedback"], 1),
            "numbers": [-2.0 if hidden[1] else float32(filled(event["dwell"], 0.5))],
            "gap": float32(gap / 1000),
        }

    @property
    def delays(self):
        return self.delay, self.dwell_delay


def filled(value, fill):
    return fill if value is None or value != value else value


def float32(value):
    return float(np.float32(value))


@pytest.mark.parametrize("seed", range(40))
def test_streamed_batches_are_what_plain_python_sees(tmp_path, monkeypatch, seed):
    made = RandomLog(seed, tmp_path)
    choice = made.any.choice
    monkeypatch.setattr(log, "log_bytes", lambda dataset, data: 1 << 60)
    rows, piece_bytes, index_bytes = choice([1, 7, 64]), choice([150, 3000]), choice([200, 1 << 20])
    for module, name, value in (
        (example_rows, "PIECE_ROWS", rows),
        (log_index, "PIECE_BYTES", piece_bytes),
    ):
        monkeypatch.setattr(module, f"_MOST_{name}", value)
        monkeypatch.setattr(module, f"_LEAST_{name}", value)
    monkeypatch.setattr(
        log, "LogIndex", lambda of, data, **_: LogIndex(of, data, budget_bytes=index_bytes)
    )
    most, batch_size, ranks = choice([1, 3, 100]), choice([1, 3, 8, 100]), made.any.randint(1, 4)
    read = {"max_events": most}
    readers = [
        reader(tmp_path, batch_size, rank, ranks, streams={"shown": read, "liked": read})
        for rank in range(ranks)
    ]
    for split, (low, high) in (("train", (0, made.train)), ("test", (made.train, None))):
        begin = choice([0, made.any.randint(0, readers[0].steps(split))])
        by_rank = [list(one.batches(split, start_step=begin)) for one in readers]
        got = rows_of(batch for step in zip(*by_rank, strict=True) for batch in step)
        expected = made.examples[low:high][begin * batch_size :]
        assert sum(len(batches[0].row_B) for batches in by_rank if batches) <= batch_size
        assert len(got.get("row_B", [])) == len(expected)
        for place, example in enumerate(expected):
            _check(made, example, {name: of[place].tolist() for name, of in got.items()}, most)


def _check(made, example, got, most):
    user, now = example["user_id"], example["time_ms"]
    assert got["user_B"] == user
    assert got["ids.user_id"] == [user]
    assert got["ids.item_id"] == [filled(example["item_id"], 6)]
    assert got["ids.place"] == [filled(example["place"], 3)]
    tags = [None] if example["tags"] is None else example["tags"]
    assert got["ids.tags"] == [filled(tag, 8) for tag in tags]
    assert got["numbers_BD"] == [float32(filled(example["bid"], 7.0))]
    assert got["label_mask_BA"] == [filled(example["click"], None) is not None]
    assert got["labels_BA"] == [filled(example["click"], 0.0)]
    assert got["weights_B"] == example["weight"]
    for stream in ("shown", "liked"):
        seen = [made.fields(event, now) for event in made.seen(stream, user, now)[-most:]]
        assert got[f"{stream}.ids.item_id"] == [event["item_id"] for event in seen]
        assert got[f"{stream}.numbers"] == [event["numbers"] for event in seen]
        assert got[f"{stream}.gap"] == [event["gap"] for event in seen]
        if stream == "shown":
            assert got["shown.ids.feedback"] == [event["feedback"] for event in seen]
