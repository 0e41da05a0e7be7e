"""Statistics of labels that are known some time after their rows, against plain Python."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem.data.dataset import Dataset
from gem.data.features import DataSpec
from gem.data.sources import Sources
from gem.data.statistics.engine import StatisticsEngine
from gem_opkit.errors import UnsupportedError

ROWS, TRAIN = 40, 28
FEEDBACK = {"stream": "views", "field": "feedback", "positive": [2], "negative": [1]}


def rate(name, *keys, **more):
    return {"kind": "rate", "name": name, "keys": keys, "label": "click", "prior": 2.0, **more}


RESIDUAL = {"kind": "history", "name": "residual", "feedback": FEEDBACK, "base": "item"}
SPECS = [
    rate("all", towards=0.4),
    rate("item", "item_id", towards="all"),
    rate("by_place", "item_id", "place", towards="item", output="offset"),
    rate("by_tag", "tags", towards=0.3),
    {"kind": "count", "name": "count", "keys": ["item_id"], "label": "click"},
    RESIDUAL | {"prior": 3.0},
]


def delayed(tiny, logs, seed, span, delay_ms):
    examples, events = logs(seed, ROWS, span)
    folder = tiny(examples, events, train=TRAIN)
    spec = folder / "dataset.toml"
    label = '[[examples.labels]]\nname = "click"\n'
    text = spec.read_text()
    assert label in text
    spec.write_text(text.replace(label, f"{label}visible_after_ms = {delay_ms}\n"))
    return folder, examples, events


def engine(folder, block_rows=512, specs=SPECS):
    data = DataSpec.model_validate(
        {"dataset": "tiny", "inputs": [], "streams": {}, "statistics": specs}
    )
    sources = Sources(Dataset.open(folder), data)
    return StatisticsEngine(sources, (0, TRAIN), block_rows=block_rows)


class ByDefinition:
    """Every value from the whole log, with times in whole seconds."""

    def __init__(self, examples, events, delay_ms):
        self.examples, self.events = examples, events
        self.delay_s = max(delay_ms, 1) / 1000

    def labels(self, now, takes):
        """Labels of training rows that are known at a time, of the rows that `takes` accepts."""
        return [
            row[3]
            for place, row in enumerate(self.examples[:TRAIN])
            if row[3] is not None and row[2] + self.delay_s <= now and takes(place, row)
        ]

    def mean(self, now, towards, takes):
        labels = self.labels(now, takes)
        return (sum(labels) + 2.0 * towards) / (len(labels) + 2.0)

    def item_rate(self, item, now):
        every = self.mean(now, 0.4, lambda _, row: True)
        return self.mean(now, every, lambda _, row: row[1] == item)

    def residual(self, user, now):
        past = [e for e in self.events if e[0] == user and e[2] < now]
        past = [e for e in past if e[3] in (1, 2) and now - e[2] >= 2]
        return sum((e[3] == 2) - self.item_rate(e[1], now) for e in past) / (len(past) + 3.0)

    def values(self, place):
        user, item, now = self.examples[place][:3]
        spot = place_of(place)
        rate = self.item_rate(item, now)
        # An item has the tags item + 1 and 60 + item, so no two items share one.
        tag = self.mean(now, 0.3, lambda _, row: row[1] == item)
        same = self.mean(now, rate, lambda p, row: row[1] == item and place_of(p) == spot)
        return {
            "all": logit(self.mean(now, 0.4, lambda _, row: True)),
            "item": logit(rate),
            "by_place": logit(same) - logit(rate),
            "by_tag": logit(tag),
            "count": math.log1p(len(self.labels(now, lambda _, row: row[1] == item))),
            "residual": self.residual(user, now),
        }


def place_of(row):
    return row % 3 if row % 5 else 3


def logit(p):
    return math.log(p / (1 - p))


# Whole and broken seconds; one beyond the log, and the two that mean: strictly later.
delays = st.sampled_from([0, 1, 1000, 1001, 2500, 7000, 100_000])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), delays, st.integers(1, 16))
def test_a_label_counts_from_its_delay_on(tiny, logs, seed, span, delay_ms, block_rows):
    folder, examples, events = delayed(tiny, logs, seed, span, delay_ms)
    made = engine(folder, block_rows)
    numbers = made.cursor(0).rows(0, ROWS).numbers
    oracle = ByDefinition(examples, events, delay_ms)
    for place in range(ROWS):
        got = dict(zip(made.example_names, numbers[place].tolist(), strict=True))
        assert got == pytest.approx(oracle.values(place), rel=1e-5, abs=1e-6), place


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 60), delays, st.integers(1, 30))
def test_blocks_and_starts_change_not_one_bit(tiny, logs, seed, span, delay_ms, block_rows):
    folder, _, _ = delayed(tiny, logs, seed, span, delay_ms)
    whole = engine(folder).cursor(0).rows(0, ROWS).numbers
    after = [(TRAIN, ROWS), (TRAIN + 3, TRAIN + 5), (TRAIN, TRAIN + 1)]
    # The whole before; or a jump over rows near the end of training, and back.
    for before in [(0, ROWS)], [(TRAIN - 1, TRAIN), (TRAIN + 6, TRAIN + 8)]:
        made = engine(folder, block_rows)
        for low, high in [*before, *after]:
            cursor = made.cursor(low)
            assert np.array_equal(cursor.rows(low, high).numbers, whole[low:high])
            made.release(cursor)
    for low, high in itertools.pairwise([5, 11, TRAIN - 1, TRAIN + 1, ROWS]):
        cursor = engine(folder, block_rows).cursor(low)
        assert np.array_equal(cursor.rows(low, high).numbers, whole[low:high])


def test_a_later_split_needs_no_replay(tiny, logs):
    folder, _, _ = delayed(tiny, logs, 3, 30, 4000)
    made = engine(folder, 3)
    whole = made.cursor(0).rows(0, ROWS).numbers
    cursor = made.cursor(0)
    for row in range(ROWS):
        cursor.rows(row, row + 1)
    made.release(cursor)
    compute, walked = made.compute, []
    made.compute = lambda state, block, outputs: (
        walked.append(block) or compute(state, block, outputs=outputs)
    )
    cursor = made.cursor(TRAIN)
    assert np.array_equal(cursor.rows(TRAIN, ROWS).numbers, whole[TRAIN:])
    assert walked
    assert min(walked) >= made.frozen > made.last_learning + 1


def test_pairs_of_a_late_label_are_refused(tiny, logs):
    folder, _, _ = delayed(tiny, logs, 1, 30, 4000)
    pair = {"kind": "pair", "name": "votes", "feedback": FEEDBACK, "base": "item"}
    with pytest.raises(UnsupportedError, match=r"'votes' must be made of a label .* known at once"):
        engine(folder, specs=[*SPECS, pair])
