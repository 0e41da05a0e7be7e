"""The engine against a slow oracle in plain Python, which knows nothing of blocks or states."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem.data.dataset import Dataset
from gem.data.features import DataSpec, RunningScale
from gem.data.reader import open_reader
from gem.data.running_scale import RunningScaler
from gem.data.sources import Sources
from gem.data.statistics.engine import StatisticsEngine
from gem.data.statistics.keyed_sums import KeyedSums, PairSums, mix64, to_fixed
from gem.data.statistics.rates import Block
from gem.data.statistics.rates import logit as rate_logit
from gem_opkit.errors import ConfigError

FEEDBACK = {
    "stream": "views",
    "field": "feedback",
    "positive": [2],
    "negative": [1],
    "max_events": 5,
}
OTHER = {**FEEDBACK, "negative": [0, 1], "max_events": 3}


def history(name, value="residual", *weights, feedback=FEEDBACK, **more):
    return {
        "kind": "history",
        "name": name,
        "feedback": feedback,
        "base": "item",
        "value": value,
        "weights": list(weights),
        **more,
    }


def rate(name, keys=(), **more):
    return {"kind": "rate", "name": name, "keys": list(keys), "label": "click", **more}


SPECS = [
    rate("all", prior=2.0, towards=0.55, output="none"),
    rate("item", ["item_id"], prior=3.0, towards="all"),
    rate("item_place", ["item_id", "place"], prior=4.0, towards="item", output="offset"),
    rate("tag", ["tags"], prior=2.0, towards="all"),
    rate("tag_place", ["tags", "place"], prior=2.0, towards="tag", output="offset"),
    {"kind": "count", "name": "brand_count", "keys": ["brand"], "label": "click"},
    {"kind": "count", "name": "tag_count", "keys": ["tags"], "label": "click"},
    {"kind": "history_count", "name": "events", "stream": "views", "max_events": 4},
    {"kind": "history_gap", "name": "newest", "stream": "views", "max_events": 4},
    {"kind": "history_gap", "name": "oldest", "stream": "views", "event": "oldest"},
    history("plain"),
    history("rate", "rate", {"kind": "rate_near", "scale": 0.3}, prior=2.0),
    history("recent", "centred", {"kind": "rank", "scale": 2.0}),
    history("soon", "residual", {"kind": "time", "scale_s": 4.0}),
    history("session", "weight", {"kind": "window", "window_s": 6.0}),
    history("same_item", "residual", {"kind": "same", "field": "item_id"}),
    history("same_brand", "centred", {"kind": "same", "field": "brand"}, centre_prior=1.0),
    history("near_tags", "weight", {"kind": "overlap", "field": "tags", "power": 2.0}),
    history("near_price", "residual", {"kind": "number_near", "field": "price", "scale": 2.0}),
    history(
        "both",
        "residual",
        {"kind": "count_near", "scale": 0.5},
        {"kind": "rank", "scale": 2.0},
        feedback=OTHER,
    ),
    {"kind": "pair", "name": "votes", "feedback": FEEDBACK, "base": "item", "prior": 4.0},
    {"kind": "pair", "name": "pairs", "feedback": FEEDBACK, "base": "item", "value": "count"},
    {"kind": "event", "name": "e_rate", "feedback": FEEDBACK, "base": "item", "value": "rate"},
    {"kind": "event", "name": "e_res", "feedback": FEEDBACK, "base": "item", "value": "residual"},
    {"kind": "event", "name": "e_cen", "feedback": FEEDBACK, "base": "item", "value": "centred"},
    {
        "kind": "event",
        "name": "e_pair",
        "feedback": FEEDBACK,
        "base": "item",
        "value": "pair",
        "prior": 4.0,
    },
    {
        "kind": "event",
        "name": "e_w",
        "feedback": FEEDBACK,
        "base": "item",
        "value": "weight",
        "weights": [{"kind": "rank", "scale": 2.0}],
    },
]
READ_EVENTS = 4


def data_spec(statistics=SPECS, **more):
    return DataSpec.model_validate(
        {
            "dataset": "tiny",
            "inputs": [],
            "streams": {"views": {"max_events": READ_EVENTS, "fields": ["item_id"]}},
            "statistics": statistics,
            **more,
        }
    )


def logit(p):
    return math.log(p / (1 - p))


class Oracle:
    """Recomputes every value of a row from the whole log, by the words of the definitions."""

    def __init__(self, examples, events, train, specs=SPECS):
        self.examples, self.events, self.train = examples, events, train
        self.specs = {spec["name"]: spec for spec in specs}
        self.votes, self.known_sums = {}, {}

    def fields(self, row):
        user, item = self.examples[row][:2]
        place = row % 3 if row % 5 else 3  # 3 is the fill
        tags = [item + 1, 60 + item]
        return {
            "user_id": [user],
            "item_id": [item],
            "place": [place],
            "tags": tags,
            "brand": [item % 3],
        }

    def keys(self, names, row):
        fields, keys = self.fields(row), [()]
        for name in names:
            keys = [(*key, value) for key in keys for value in fields[name]]
        return keys

    def sums(self, names, key, time):
        memo = (*names, key, time)  # the loops below are slow, their result never changes
        if memo not in self.known_sums:
            self.known_sums[memo] = self.count(names, key, time)
        return self.known_sums[memo]

    def count(self, names, key, time):
        total = count = 0
        for row in range(self.train):
            label = self.examples[row][3]
            if self.examples[row][2] < time and label is not None:
                for other in self.keys(names, row):
                    if other == key:
                        total, count = total + label, count + 1
        return total, count

    def rate(self, name, key, row):
        """The rate of a key as the row sees it; the key fits the statistic's own keys."""
        spec = self.specs[name]
        total, count = self.sums(spec["keys"], key, self.examples[row][2])
        towards = self.towards(spec, key, row)
        return (total + spec["prior"] * towards) / (count + spec["prior"])

    def towards(self, spec, key, row):
        towards = spec["towards"]
        if isinstance(towards, float):
            return towards
        names = self.specs[towards]["keys"]
        return self.rate(towards, tuple(key[spec["keys"].index(n)] for n in names), row)

    def seen(self, row, max_events):
        """(item, seconds ago, feedback) of the events of a row, oldest first."""
        user, _, time = self.examples[row][:3]
        own = [e for e in self.events if e[0] == user and e[2] < time]
        own = sorted(own, key=lambda e: e[2])[-max_events:]
        return [(i, time - t, f if time - t >= 2 else 0) for _, i, t, f in own]

    def history(self, row, spec):
        """Per event: item, seconds ago, past label or None, residual, centred residual."""
        feedback = spec["feedback"]
        result = []
        for item, ago, shown in self.seen(row, feedback["max_events"]):
            past = 1 if shown in feedback["positive"] else 0
            if shown not in feedback["positive"] + feedback["negative"]:
                past = None
            p = self.rate(spec["base"], (item,), row)
            result.append((item, ago, past, 0.0 if past is None else past - p))
        known = [e for e in result if e[2] is not None]
        centre = sum(e[3] for e in known) / (len(known) + spec.get("centre_prior", 5.0))
        return [(*e, 0.0 if e[2] is None else e[3] - centre) for e in result]

    def weight(self, weight, row, item, ago, rank):
        mine = self.examples[row][1]
        match weight["kind"]:
            case "rank":
                return math.exp(-rank / weight["scale"])
            case "time":
                return 1 / (1 + ago / weight["scale_s"])
            case "window":
                return float(ago < weight["window_s"])
            case "same":
                return float(mine == item or (weight["field"] == "brand" and mine % 3 == item % 3))
            case "overlap":
                left, right = {mine + 1, 60 + mine}, {item + 1, 60 + item}
                return (len(left & right) / len(left | right)) ** weight["power"]
            case "number_near":
                return math.exp(-abs(mine - item) / weight["scale"])
            case "rate_near":
                gap = logit(self.rate("item", (item,), row)) - logit(
                    self.rate("item", (mine,), row)
                )
                return math.exp(-((gap / weight["scale"]) ** 2) / 2)
            case "count_near":
                time = self.examples[row][2]
                theirs = self.sums(["item_id"], (item,), time)[1]
                own = self.sums(["item_id"], (mine,), time)[1]
                return math.exp(-abs(math.log1p(theirs) - math.log1p(own)) / weight["scale"])

    def weights(self, spec, row, events):
        result = []
        for place, (item, ago, *_) in enumerate(events):
            product = 1.0
            for weight in spec["weights"]:
                product *= self.weight(weight, row, item, ago, len(events) - 1 - place)
            result.append(product)
        return result

    def added(self, row, spec):
        """What a training row adds to the pairs of its item: (other item, product)."""
        if row not in self.votes:
            _, item, _, label = self.examples[row][:4]
            self.votes[row] = []
            if label is not None:
                surprise = label - self.rate(spec["base"], (item,), row)
                for other, _, past, residual, _ in self.history(row, spec):
                    if past is not None:
                        self.votes[row].append((other, surprise * residual))
        return self.votes[row]

    def pair(self, row, other, spec):
        total = count = 0
        mine, time = self.examples[row][1:3]
        for earlier in range(self.train):
            if self.examples[earlier][2] < time:
                for theirs, product in self.added(earlier, spec):
                    if {self.examples[earlier][1], theirs} == {mine, other}:
                        total, count = total + product, count + 1
        return total, count

    def value(self, spec, row):
        match spec["kind"]:
            case "rate":
                values = []
                for key in self.keys(spec["keys"], row):
                    p = logit(self.rate(spec["name"], key, row))
                    if spec.get("output") == "offset":
                        p -= logit(self.towards(spec, key, row))
                    values.append(p)
                return sum(values) / len(values)
            case "count":
                time = self.examples[row][2]
                counts = [self.sums(spec["keys"], k, time)[1] for k in self.keys(spec["keys"], row)]
                return sum(math.log1p(n) for n in counts) / len(counts)
            case "history_count":
                return math.log1p(len(self.seen(row, spec["max_events"])))
            case "history_gap":
                events = self.seen(row, spec.get("max_events", 200))
                if not events:
                    return 0.0
                return math.log1p(events[0 if spec.get("event") == "oldest" else -1][1])
            case "history":
                events = self.history(row, spec)
                kept = [
                    (w, e)
                    for w, e in zip(self.weights(spec, row, events), events, strict=True)
                    if e[2] is not None
                ]
                total, prior = sum(w for w, _ in kept), spec.get("prior", 3.0)
                if spec["value"] == "weight":
                    return math.log1p(total)
                if spec["value"] == "rate":
                    p = self.rate(spec["base"], (self.examples[row][1],), row)
                    return logit((sum(w * e[2] for w, e in kept) + prior * p) / (total + prior))
                which = {"residual": 3, "centred": 4}[spec["value"]]
                return sum(w * e[which] for w, e in kept) / (total + prior)
            case "pair":
                events = [e for e in self.history(row, spec) if e[2] is not None]
                sums = [self.pair(row, e[0], spec) for e in events]
                if spec.get("value") == "count":
                    return math.log1p(sum(n for _, n in sums) / max(len(sums), 1))
                return sum(
                    s / (n + spec["prior"]) * e[4] for (s, n), e in zip(sums, events, strict=True)
                )

    def event_values(self, spec, row):
        events = self.history(row, spec)
        match spec["value"]:
            case "rate":
                values = [logit(self.rate(spec["base"], (e[0],), row)) for e in events]
            case "residual":
                values = [e[3] for e in events]
            case "centred":
                values = [e[4] for e in events]
            case "pair":
                sums = [self.pair(row, e[0], spec) for e in events]
                values = [s / (n + spec["prior"]) for s, n in sums]
            case "weight":
                values = self.weights(spec, row, events)
        return values[-READ_EVENTS:]


def engine(folder, spec=None, *, train, block_rows=512, plain=()):
    sources = Sources(Dataset.open(folder), data_spec() if spec is None else spec)
    return StatisticsEngine(sources, (0, train), block_rows=block_rows, plain=plain)


def all_rows(made, rows):
    block = made.cursor(0).rows(0, rows)
    return block.numbers, block.events["views"]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 100_000), rows=st.integers(0, 30), span=st.integers(1, 40))
def test_every_statistic_equals_the_oracle(tiny, logs, seed, rows, span):
    examples, events = logs(seed, rows, span)
    train = rows * 3 // 4
    made = engine(tiny(examples, events, train=train), train=train, block_rows=seed % 13 + 1)
    numbers, event_numbers = all_rows(made, rows)
    oracle = Oracle(examples, events, train)
    row_specs = [s for s in SPECS if s["kind"] != "event" and s.get("output") != "none"]
    event_specs = [s for s in SPECS if s["kind"] == "event"]
    assert made.example_names == tuple(spec["name"] for spec in row_specs)
    assert made.event_names("views") == tuple(spec["name"] for spec in event_specs)
    for place, spec in enumerate(row_specs):
        expected = [oracle.value(spec, row) for row in range(rows)]
        np.testing.assert_allclose(
            numbers[:, place], expected, rtol=1e-5, atol=1e-6, err_msg=spec["name"]
        )
    for place, spec in enumerate(event_specs):
        expected = [v for row in range(rows) for v in oracle.event_values(spec, row)]
        np.testing.assert_allclose(
            event_numbers[:, place], expected, rtol=1e-5, atol=1e-6, err_msg=spec["name"]
        )


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 100_000), span=st.integers(1, 60), block_rows=st.integers(1, 50))
def test_blocks_change_not_one_bit(tiny, logs, seed, span, block_rows):
    examples, events = logs(seed, 60, span)
    folder = tiny(examples, events, train=45)
    data = data_spec(running_scale={"prior_rows": 5.0} if seed % 2 else None)
    numbers, event_numbers = all_rows(engine(folder, data, train=45), 60)
    cut, event_cut = all_rows(engine(folder, data, train=45, block_rows=block_rows), 60)
    assert np.array_equal(numbers, cut)
    assert np.array_equal(event_numbers, event_cut)


@pytest.mark.parametrize("row", [0, 1, 17, 44, 45, 46, 59])
@pytest.mark.parametrize(
    ("block_rows", "scale"), [(1, None), (1, {}), (8, None), (8, {}), (99, {})]
)
def test_a_cursor_may_start_anywhere(tiny, logs, row, block_rows, scale):
    examples, events = logs(3, 60, 25)
    data = data_spec(running_scale=scale)
    made = engine(tiny(examples, events, train=45), data, train=45, block_rows=block_rows)
    numbers, event_numbers = all_rows(made, 60)
    for _ in range(2):  # the second continues from what the first has left behind
        cursor = made.cursor(row)
        got = cursor.rows(row, 60)
        made.release(cursor)
        assert np.array_equal(got.numbers, numbers[row:])
        offset = len(event_numbers) - len(got.events["views"])
        assert np.array_equal(got.events["views"], event_numbers[offset:])


def test_reading_again_after_the_last_split_needs_no_replay(tiny, logs):
    examples, events = logs(3, 60, 25)
    made = engine(tiny(examples, events, train=45), train=45, block_rows=8)
    numbers, _ = all_rows(made, 60)
    walked = []
    compute = made.compute
    made.compute = lambda state, block, outputs: (
        walked.append((block, outputs)) or compute(state, block, outputs=outputs)
    )
    cursor = made.cursor(0)
    cursor.rows(0, 60)
    made.release(cursor)
    walked.clear()
    cursor = made.cursor(45)
    assert np.array_equal(cursor.rows(45, 60).numbers, numbers[45:])
    assert all(outputs for _, outputs in walked)
    assert all(block >= made.frozen for block, _ in walked)


def test_a_split_that_begins_amid_equal_times_needs_no_replay(tiny):
    """Its first rows have the time of the last training row and must not see it."""
    examples = [(1, row % 3, row // 4, float(row % 2), None) for row in range(16)]
    made = engine(tiny(examples, [], train=10), train=10, block_rows=3)
    numbers, _ = all_rows(made, 16)
    cursor = made.cursor(0)
    for low in range(16):
        cursor.rows(low, low + 1)
    made.release(cursor)
    made.compute = None  # what is asked for now lies ready
    assert np.array_equal(made.cursor(10).rows(10, 12).numbers, numbers[10:12])


def test_two_cursors_do_not_disturb_each_other(tiny, logs):
    examples, events = logs(5, 60, 25)
    made = engine(tiny(examples, events, train=45), train=45, block_rows=8)
    numbers, _ = all_rows(made, 60)
    left, right = made.cursor(0), made.cursor(0)
    for low in range(0, 60, 10):
        assert np.array_equal(left.rows(low, low + 10).numbers, numbers[low : low + 10])
        if low >= 20:
            assert np.array_equal(
                right.rows(low - 20, low - 10).numbers, numbers[low - 20 : low - 10]
            )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 100_000), span=st.integers(1, 40), row=st.integers(0, 39))
def test_nothing_at_or_after_a_row_reaches_it(tiny, logs, seed, span, row):
    """Point in time: change everything from a row's time on, and no input before changes."""
    examples, events = logs(seed, 40, span)
    time = examples[row][2]
    flipped = {None: 1.0, 0.0: 1.0, 1.0: None}
    changed = [
        e if e[2] < time else (e[0], (e[1] + r) % 6, e[2], flipped[e[3]], 1.0)
        for r, e in enumerate(examples)
    ]
    changed[row] = examples[row]  # the row itself stays, all others of its time change
    later = [e if e[2] < time else (e[0], (e[1] + 1) % 6, e[2], (e[3] + 1) % 3) for e in events]
    later += [(user, 2, time + extra, 2) for user in range(5) for extra in (0, 3)]
    inputs = {"inputs": None, "streams": {"views": {"max_events": READ_EVENTS}}}
    inputs["running_scale"] = {"prior_rows": 3} if seed % 2 else None
    batches = [
        next(open_reader(folder, data_spec(**inputs), batch_size=40).batches("train"))
        for folder in (tiny(examples, events), tiny(changed, later))
    ]
    kept = [r for r in range(40) if examples[r][2] < time or r == row]
    before, after = (batch.numbers_BD[kept] for batch in batches)
    assert before.equal(after)
    for name in batches[0].ids:
        before, after = (batch.ids[name].to_list() for batch in batches)
        assert all(before[r].equal(after[r]) for r in kept)
    left, right = (batch.streams["views"] for batch in batches)
    members = [(left.numbers, right.numbers), (left.gap_seconds, right.gap_seconds)]
    members += [(left.ids[name], right.ids[name]) for name in left.ids]
    for before, after in members:
        before, after = before.to_list(), after.to_list()
        assert all(before[r].equal(after[r]) for r in kept)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 100_000), span=st.integers(1, 40), block_rows=st.integers(1, 50))
def test_running_scale_equals_its_definition(tiny, logs, seed, span, block_rows):
    examples, events = logs(seed, 40, span)
    folder = tiny(examples, events, train=30)
    specs = [rate("r", ["item_id"]), {"kind": "history_count", "name": "n", "stream": "views"}]
    transforms = {"bid": {"offset": 2.0, "scale": 0.5}, "n": {"scale": 0.1}}
    scale = {"prior_rows": 4.0, "limit": 2.0}
    plain, scaled = (
        engine(
            folder,
            data_spec(specs, transforms=transforms, running_scale=running),
            train=30,
            block_rows=block_rows,
            plain=("bid", "price"),
        )
        .cursor(0)
        .rows(0, 40)
        .numbers
        for running in (None, scale)
    )
    assert plain.shape == (40, 4)
    for row in range(40):
        seen = [r for r in range(30) if examples[r][2] < examples[row][2]]
        for column in range(4):
            values = [float(plain[r, column]) for r in seen]
            mean = sum(values) / (len(values) + 4)
            square = (sum(v * v for v in values) + 4) / (len(values) + 4)
            expected = (float(plain[row, column]) - mean) / math.sqrt(square - mean**2)
            expected = min(max(expected, -2.0), 2.0)
            assert scaled[row, column] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_running_sums_do_not_depend_on_blocks_to_the_last_bit():
    numbers = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    whole, cut = (RunningScaler(RunningScale(), 3) for _ in range(2))
    for scaler, cuts in ((whole, [0, 300]), (cut, [0, 7, 8, 100, 300])):
        for first, end in pairwise(cuts):
            rows = np.arange(first, end)
            scaler.scale(Block(rows, rows - first, rows >= 0), numbers[first:end])
            scaler.close(add=True)
    assert np.array_equal(whole._known, cut._known)


def test_labels_of_other_splits_add_nothing(tiny, logs):
    examples, events = logs(8, 40, 20)
    changed = [e if r < 30 else (*e[:3], 1.0, 1.0) for r, e in enumerate(examples)]
    left, _ = all_rows(engine(tiny(examples, events, train=30), train=30), 40)
    right, _ = all_rows(engine(tiny(changed, events, train=30), train=30), 40)
    assert np.array_equal(left, right)


def test_first_row_has_nothing_but_priors(tiny):
    folder = tiny([(1, 2, 5, 1.0, None)], [])
    numbers, event_numbers = all_rows(engine(folder, train=1), 1)
    made = dict(zip(engine(folder, train=1).example_names, numbers[0].tolist(), strict=True))
    assert made["item"] == pytest.approx(logit(0.55), abs=1e-6)
    assert made["rate"] == pytest.approx(logit(0.55), abs=1e-6)
    assert all(value == 0 for name, value in made.items() if name not in ("item", "rate", "tag"))
    assert event_numbers.shape == (0, 5)


def test_missing_sets_of_ids_overlap_with_nothing(tiny):
    items = [(0, None, 0, 0.0), (1, None, 0, 0.0), (2, [], 0, 0.0), (3, [5], 0, 0.0)]
    examples = [(1, item, 100, 1.0, None) for item in (0, 1, 2, 3, 4)]
    folder = tiny(examples, [(1, item, item, 2) for item in (0, 2, 3, 4)], items=items)
    overlap = history("shared", "weight", {"kind": "overlap", "field": "tags"})
    specs = [SPECS[0], SPECS[1], overlap]
    block = engine(folder, data_spec(specs), train=5).cursor(0).rows(0, 5)
    # Item 4 has no row at all. Only item 3 has tags, which it shares with itself.
    assert block.numbers[:, 1].tolist() == pytest.approx([0, 0, 0, math.log(2), 0])


def test_statistics_of_no_rows(tiny, logs):
    made = engine(tiny(*logs(1)), train=40)
    block = made.cursor(7).rows(7, 7)
    assert block.numbers.shape == (0, len(made.example_names))
    assert block.events["views"].shape == (0, 5)


def test_hashed_ids_give_what_row_ids_give(tiny, logs):
    """With room for all of them, any int64 ids count exactly as small ones do."""
    examples, events = logs(4, 40, 20)
    big = [-(2**63), 2**63 - 1, -1, 0, 2**40, 12345678901]
    specs = [s for s in SPECS if not any(w["kind"] == "overlap" for w in s.get("weights", []))]
    far = tiny(
        [(u, big[i], *rest) for u, i, *rest in examples],
        [(u, big[i], *rest) for u, i, *rest in events],
        items=[(big[i], [i + 1, 60 + i], i % 3, float(i)) for i in range(6)],
        hashed=True,
    )
    left, _ = all_rows(engine(tiny(examples, events), data_spec(specs), train=40), 40)
    right, _ = all_rows(engine(far, data_spec(specs), train=40), 40)
    assert np.array_equal(left, right)


def without(*names):
    return [spec for spec in SPECS if spec["name"] not in names]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([rate("r", ["itemid"])], "got 'itemid'; did you mean 'item_id'"),
        ([{**rate("r"), "label": "clik"}], "label must be a label .* did you mean 'click'"),
        ([rate("r", towards="later"), rate("later")], "declared before it; got 'later'"),
        ([rate("r", ["tags"]), rate("q", ["item_id"], towards="r")], "towards of 'q' must have"),
        ([history("h")], "base of 'h' must be a rate that is declared before it; got 'item'"),
        ([rate("item", ["place"]), history("h")], "base must be a rate with one single-valued key"),
        ([rate("item", ["tags"]), history("h")], "base must be a rate with one single-valued key"),
        (
            [rate("p", ["place"]), rate("item", ["item_id"], towards="p"), history("h")],
            "towards of 'item' must be a number or a rate without keys",
        ),
        (
            [*SPECS[:2], history("h", feedback={**FEEDBACK, "field": "feedbak"})],
            "feedback.field must be an id field .* did you mean 'feedback'",
        ),
        (
            [*SPECS[:2], history("h", "weight", {"kind": "same", "field": "tags"})],
            "single-valued for kind = 'same'",
        ),
        (
            [*SPECS[:2], history("h", "weight", {"kind": "overlap", "field": "price"})],
            "weights.field must be one of the ids of the entity with key 'item_id'; got 'price'",
        ),
        (
            [
                *SPECS[:2],
                history("h", "weight", {"kind": "number_near", "field": "pric", "scale": 1}),
            ],
            "did you mean 'price'",
        ),
        (
            [*SPECS[:2], {**SPECS[-1], "feedback": {**FEEDBACK, "max_events": 3}}],
            "'e_w' must cover the 4 events that are read; got feedback.max_events = 3",
        ),
    ],
)
def test_refuses(tiny, logs, specs, message):
    with pytest.raises(ConfigError, match=message):
        engine(tiny(*logs(1, 5)), data_spec(specs), train=5)


def test_event_statistic_needs_its_stream_to_be_read(tiny, logs):
    with pytest.raises(ConfigError, match="'e_rate' must be about a stream that is read"):
        engine(tiny(*logs(1, 5)), data_spec(streams={}), train=5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(-9, 9)), max_size=12),
        max_size=4,
    )
)
def test_keyed_sums_equal_a_dictionary(blocks):
    """Blocks of (key, group, value); every row reads all keys as of every group."""
    sums, before = KeyedSums(6), []
    for block in blocks:
        keys, groups, values = np.array(block, np.int64).reshape(-1, 3).T
        opened = sums.open_block(keys, groups, values)
        asked = np.array([(k, g) for k in range(6) for g in range(5)])
        reading = opened.read(asked[:, 0], asked[:, 1])
        for (key, group), total, count in zip(asked, reading.sums, reading.counts, strict=True):
            seen = [v for k, v in before if k == key]
            seen += [v for k, g, v in block if k == key and g < group]
            assert (total, count) == (sum(seen), len(seen))
        opened.close(add=True)
        before += [(k, v) for k, _, v in block]


def test_a_block_that_is_not_added_leaves_nothing():
    sums = KeyedSums(3)
    one = np.array([1])
    sums.open_block(one, one * 0, one * 7).close(add=False)
    opened = sums.open_block(one, one * 0, one * 5)
    assert opened.read(one, one * 0).counts.tolist() == [0]
    assert opened.read(one, one).sums.tolist() == [5]


@pytest.mark.parametrize("table_rows", [1, 7, 100])
def test_pairs_have_no_order_and_share_rows_when_there_are_too_many(table_rows):
    random = np.random.default_rng(0)
    sums, before = PairSums(5, table_rows), []
    for _ in range(4):
        left, right = random.integers(0, 5, (2, 30))
        groups, values = np.sort(random.integers(0, 6, 30)), random.integers(-9, 9, 30)
        adds = random.random(30) < 0.7
        rows = sums.rows(left, right)
        assert np.array_equal(rows, sums.rows(right, left))
        assert rows.min() >= 0
        assert rows.max() < min(table_rows, 25)
        reading = sums.read_and_add(rows, groups, values, adds)
        block = list(zip(rows, groups, values, adds, strict=True))
        for (row, group, *_), total, count in zip(block, reading.sums, reading.counts, strict=True):
            seen = [v for r, v in before if r == row]
            seen += [v for r, g, v, a in block if r == row and g < group and a]
            assert (total, count) == (sum(seen), len(seen))
        before += [(r, v) for r, _, v, a in block if a]
    if table_rows == 100:
        assert len({int(r) for r in sums.rows(*np.triu_indices(5))}) == 15


def test_fixed_point_is_exact_for_labels_and_near_for_others():
    assert (to_fixed(np.array([0.0, 1.0, 0.5])) / 2**30).tolist() == [0, 1, 0.5]
    values = np.random.default_rng(0).normal(size=1000)
    assert np.abs(to_fixed(values) / 2**30 - values).max() <= 2**-31


def test_mix64_equals_the_published_generator():
    """SplitMix64 from seed 0 begins with these numbers; its k-th state is k times the constant."""
    states = (np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix64(states).tolist() == expected


def test_a_rate_that_is_rounded_to_its_end_has_a_finite_logit():
    """As with a prior of 1e-30: (1 + 1e-30 · 0.3) / (1 + 1e-30) is 1."""
    ends = rate_logit(np.array([0.0, 1.0]))
    assert np.isfinite(ends).all()
    assert ends[0] < -700 and 36 < ends[1] < 37
    inside = np.array([1e-300, 1e-9, 0.3, 1 - 2**-52])
    assert rate_logit(inside).tolist() == np.log(inside / (1.0 - inside)).tolist()
