import numpy as np
import pytest
import torch
from batch_rows import assert_equal_rows, reader, rows_of, tensors

from gem.data.schema import BatchSchema
from gem_opkit.errors import ConfigError, UnsupportedError

EXAMPLES = [
    (1, 2, 5, 1.0, None),
    (2, 3, 5, 0.0, 1.0),
    (1, 0, 9, None, None),
    (4, 5, 9, 0.0, None),
]
EVENTS = [(1, 2, 1, 2), (1, 3, 4, 1), (2, 0, 3, 2), (1, 2, 5, 2), (2, 1, 5, 1), (1, 1, 8, 2)]
STATISTICS = [
    {"kind": "rate", "name": "rate", "keys": ["item_id"], "label": "click"},
    {
        "kind": "event",
        "name": "surprise",
        "feedback": {"stream": "views", "field": "feedback", "positive": [2], "negative": [1]},
        "base": "rate",
        "value": "residual",
    },
]


def test_one_batch_by_hand(tiny):
    made = reader(tiny(EXAMPLES, EVENTS))
    (batch,) = made.batches("train")
    assert batch.examples == 4
    assert batch.user_B.tolist() == [1, 2, 1, 4]
    assert batch.row_B.tolist() == [0, 1, 2, 3]
    assert batch.labels_BA.tolist() == [[1, 0], [0, 1], [0, 0], [0, 0]]
    assert batch.label_mask_BA.tolist() == [[True, False], [True] * 2, [False] * 2, [True, False]]
    assert batch.weights_B.tolist() == [1, 2, 1, 2]
    assert batch.domains_B.tolist() == [0, 1, 0, 1]
    assert made.schema.numbers == ("bid", "price")
    assert batch.numbers_BD.tolist() == [[7.0, 2.0], [0.125, 3.0], [0.25, 0.0], [0.375, 5.0]]
    assert batch.ids["place"].values.tolist() == [3, 1, 2, 0]
    assert batch.ids["brand"].values.tolist() == [2, 0, 0, 2]
    assert [row.tolist() for row in batch.ids["tags"].to_list()] == [
        [3, 62],
        [4, 63],
        [1, 60],
        [6, 65],
    ]
    views = batch.streams["views"]
    assert [row.tolist() for row in views.ids["item_id"].to_list()] == [
        [2, 3],
        [0],
        [2, 3, 2, 1],
        [],
    ]
    # Feedback is visible two seconds after the event, dwell one second after it.
    assert [row.tolist() for row in views.ids["feedback"].to_list()] == [
        [2, 0],
        [2],
        [2, 1, 2, 0],
        [],
    ]
    assert [row.tolist() for row in views.gap_seconds.to_list()] == [[4, 1], [2], [8, 5, 4, 1], []]
    assert [row.flatten().tolist() for row in views.numbers.to_list()] == [
        [0.25, 1.0],
        [0.5],
        [0.25, 1.0, 1.25, 2.0],
        [],
    ]


def test_members_of_a_stream_share_one_layout(tiny, logs):
    (batch,) = reader(tiny(*logs(2)), 40).batches("train")
    views = batch.streams["views"]
    for member in (*views.ids.values(), views.numbers, views.gap_seconds):
        assert member.offsets_O is views.numbers.offsets_O
        member.checked("values")
    for member in batch.ids.values():
        member.checked("values")
    assert views.gap_seconds.values.min() > 0


def test_schema_tells_what_the_batch_holds(tiny, logs):
    made = reader(tiny(*logs(2)), statistics=STATISTICS)
    assert isinstance(made.schema, BatchSchema)
    assert [field.name for field in made.schema.ids] == [
        "user_id",
        "item_id",
        "place",
        "tags",
        "brand",
    ]
    assert [field.multi for field in made.schema.ids] == [False, False, False, True, False]
    assert made.schema.numbers == ("bid", "price", "rate")
    assert made.schema.item == "item_id"
    assert made.schema.labels == ("click", "buy")
    assert made.schema.domains == ("feed", "stories")
    (stream,) = made.schema.streams
    assert stream.numbers == ("dwell", "surprise")
    assert [field.table for field in stream.ids] == ["item", "feedback"]
    for batch in made.batches("train"):
        assert set(batch.ids) == {field.name for field in made.schema.ids}
        assert batch.numbers_BD.shape[1] == 3
        assert batch.streams["views"].numbers.values.shape[1] == 2


@pytest.mark.parametrize("batch_size", [1, 3, 16, 39, 40, 100])
def test_batch_size_changes_no_row(tiny, logs, batch_size):
    folder = tiny(*logs(6), train=30)
    whole = rows_of(reader(folder, 40, statistics=STATISTICS).batches("train"))
    made = reader(folder, batch_size, statistics=STATISTICS)
    batches = list(made.batches("train"))
    assert len(batches) == made.steps("train") == -(-30 // batch_size)
    assert [b.examples for b in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert batches[-1].examples == 30 - batch_size * (len(batches) - 1)
    assert_equal_rows(rows_of(batches), whole)


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_slices_of_the_ranks_make_the_batch(tiny, logs, world_size):
    """Also where the last batch has fewer rows than there are ranks."""
    folder = tiny(*logs(6), train=31)
    one = list(reader(folder, 10, statistics=STATISTICS).batches("train"))
    ranks = [reader(folder, 10, r, world_size, statistics=STATISTICS) for r in range(world_size)]
    parts = [list(made.batches("train")) for made in ranks]
    assert {made.steps("train") for made in ranks} == {len(one)}
    assert {len(part) for part in parts} == {len(one)}
    for step, batch in enumerate(one):
        pieces = [part[step] for part in parts]
        assert_equal_rows(rows_of(pieces), tensors(batch))
        sizes = [piece.examples for piece in pieces]
        assert max(sizes) - min(sizes) <= 1
    assert any(part[-1].examples == 0 for part in parts) == (world_size > 1)


@pytest.mark.parametrize("start", [0, 1, 2, 5, 6])
def test_resume_gives_exactly_the_batches_from_there_on(tiny, logs, start):
    folder = tiny(*logs(9), train=35)
    whole = list(reader(folder, 6, statistics=STATISTICS).batches("train"))
    rest = list(reader(folder, 6, statistics=STATISTICS).batches("train", start_step=start))
    assert len(rest) == len(whole) - start
    assert_equal_rows(rows_of(rest), rows_of(whole[start:]))


def test_every_row_once_when_the_number_of_ranks_changes_on_resume(tiny, logs):
    folder = tiny(*logs(9))
    before = [list(reader(folder, 8, r, 2).batches("train"))[:2] for r in range(2)]
    after = [reader(folder, 8, r, 3).batches("train", start_step=2) for r in range(3)]
    seen = [row for part in (*before, *after) for batch in part for row in batch.row_B.tolist()]
    assert sorted(seen) == list(range(40))


def test_a_second_reading_equals_the_first(tiny, logs):
    made = reader(tiny(*logs(9), train=30), 7, statistics=STATISTICS)
    first = [rows_of(made.batches(split)) for split in ("train", "test")]
    next(iter(made.batches("train", start_step=2)))  # left halfway
    for split, rows in zip(("train", "test"), first, strict=True):
        assert_equal_rows(rows_of(made.batches(split)), rows)


def test_split_without_rows(tiny):
    made = reader(tiny(EXAMPLES, EVENTS), statistics=STATISTICS)
    assert made.steps("test") == 0
    assert list(made.batches("test")) == []


def test_data_set_without_examples_or_events(tiny):
    made = reader(tiny([], []), statistics=STATISTICS)
    assert made.steps("train") == 0
    assert list(made.batches("train")) == []


def test_users_without_events(tiny):
    (batch,) = reader(tiny(EXAMPLES, []), statistics=STATISTICS).batches("train")
    assert batch.event_tokens == 0
    assert batch.streams["views"].numbers.lengths.tolist() == [0] * 4
    assert batch.streams["views"].numbers.values.shape == (0, 2)
    assert torch.isfinite(batch.numbers_BD).all()


def test_only_the_last_events_are_read(tiny):
    (batch,) = reader(tiny(EXAMPLES, EVENTS), streams={"views": {"max_events": 2}}).batches("train")
    views = batch.streams["views"]
    assert [r.tolist() for r in views.ids["item_id"].to_list()] == [[2, 3], [0], [2, 1], []]


def test_chosen_inputs_and_fields(tiny):
    made = reader(
        tiny(EXAMPLES, EVENTS),
        inputs=["item_id", "price"],
        streams={"views": {"fields": ["brand", "price", "item_id"]}},
    )
    (batch,) = made.batches("train")
    assert list(batch.ids) == ["item_id"]
    assert made.schema.numbers == ("price",)
    views = batch.streams["views"]
    assert list(views.ids) == ["brand", "item_id"]
    assert [r.tolist() for r in views.ids["brand"].to_list()] == [[2, 0], [0], [2, 0, 2, 1], []]
    assert made.schema.streams[0].numbers == ("price",)
    assert views.numbers.values.flatten().tolist() == [2, 3, 0, 2, 3, 2, 1]


def test_no_streams_and_no_numbers(tiny):
    (batch,) = reader(tiny(EXAMPLES, EVENTS), inputs=["item_id"], streams={}).batches("train")
    assert batch.streams == {}
    assert batch.numbers_BD.shape == (4, 0)
    assert batch.event_tokens == 0


def test_derived_inputs(tiny):
    base = 3 * 86_400 + 23 * 3600  # Sunday 4 January 1970, 23 o'clock UTC
    examples = [(1, item, base + s, 1.0, None) for item, s in ((0, 0), (2, 1800), (3, 3600))]
    made = reader(
        tiny(examples, []),
        inputs=["item_id"],
        derived=[
            {"kind": "hour_of_day", "name": "hour"},
            {"kind": "hour_of_day", "name": "hour_delhi", "utc_offset_hours": 5.5},
            {"kind": "day_of_week", "name": "day"},
            {"kind": "elapsed_days", "name": "days"},
            {"kind": "bucket", "name": "price_group", "field": "price", "boundaries": [0.5, 2, 9]},
            {"kind": "bucket", "name": "bid_group", "field": "bid", "boundaries": [0.2, 5]},
        ],
    )
    (batch,) = made.batches("train")
    assert batch.ids["hour"].values.tolist() == [23, 23, 0]
    assert batch.ids["hour_delhi"].values.tolist() == [4, 5, 5]
    assert batch.ids["day"].values.tolist() == [6, 6, 0]
    assert batch.ids["price_group"].values.tolist() == [0, 2, 2]
    assert batch.ids["bid_group"].values.tolist() == [2, 0, 1]  # a null bid reads its fill, 7
    assert batch.numbers_BD.flatten().tolist() == pytest.approx([0, 1 / 48, 1 / 24])
    sizes = {field.name: field.num_embeddings for field in made.schema.ids}
    assert sizes == {
        "item_id": 6,
        "hour": 24,
        "hour_delhi": 24,
        "day": 7,
        "price_group": 4,
        "bid_group": 3,
    }


def test_bucket_on_events(tiny):
    made = reader(
        tiny(EXAMPLES, EVENTS),
        streams={"views": {"fields": ["group"]}},
        derived=[{"kind": "bucket", "name": "group", "field": "price", "boundaries": [1, 3]}],
    )
    (batch,) = made.batches("train")
    assert batch.streams["views"].ids["group"].values.tolist() == [1, 2, 0, 1, 2, 1, 1]


def test_transforms_are_fixed_maps(tiny):
    made = reader(
        tiny(EXAMPLES, EVENTS),
        transforms={
            "bid": {"offset": 1.0, "scale": 0.5, "limit": 3.0},
            "price": {"function": "log1p"},
            "dwell": {"scale": 0.25},
        },
    )
    (batch,) = made.batches("train")
    assert batch.numbers_BD[:, 0].tolist() == [3.0, -1.75, -1.5, -1.25]
    np.testing.assert_allclose(batch.numbers_BD[:, 1], np.log1p([2.0, 3.0, 0.0, 5.0]), rtol=1e-6)
    assert batch.streams["views"].numbers.values.flatten().tolist() == [1, 4, 2, 1, 4, 5, 8]


@pytest.mark.parametrize("statistics", [[], STATISTICS])
def test_running_scale_takes_all_numbers_of_the_examples(tiny, logs, statistics):
    folder = tiny(*logs(7), train=30)
    plain, scaled, halved = (
        reader(folder, size, statistics=statistics, running_scale=scale)
        for size, scale in (
            (40, None),
            (40, {"prior_rows": 1, "limit": 50}),
            (7, {"prior_rows": 1, "limit": 50}),
        )
    )
    assert scaled.schema == plain.schema
    (before,), (after,) = plain.batches("train"), scaled.batches("train")
    assert before.numbers_BD[0].equal(after.numbers_BD[0])  # the first row has only the prior
    assert not before.numbers_BD.equal(after.numbers_BD)
    rest = slice(15, None)
    assert after.numbers_BD[rest].abs().mean(0).lt(1.6).all()
    assert before.streams["views"].numbers.values.equal(after.streams["views"].numbers.values)
    assert_equal_rows(rows_of(halved.batches("train")), tensors(after))
    resumed = reader(folder, 7, running_scale={"prior_rows": 1, "limit": 50}, statistics=statistics)
    whole = list(halved.batches("train"))
    assert_equal_rows(rows_of(resumed.batches("train", start_step=3)), rows_of(whole[3:]))


def test_limit_of_rows(tiny, logs):
    made = reader(tiny(*logs(9), train=30), max_rows=4)
    assert made.rows("train") == made.rows("test") == 4
    (batch,) = made.batches("test")
    assert batch.row_B.tolist() == [30, 31, 32, 33]


def test_rows_of_a_hashed_table_are_the_recipes(tiny):
    folder = tiny([(2**62, -5, 3, 1.0, None)], [(2**62, -7, 1, 2)], hashed=True)
    made = reader(folder, hash_rows={"item": 1000})
    (batch,) = made.batches("train")
    assert batch.user_B.tolist() == [2**62]
    assert batch.ids["item_id"].values.tolist() == [-5]
    assert batch.ids["brand"].values.tolist() == [0]  # an item that the entity lacks: the fill
    assert batch.streams["views"].ids["item_id"].values.tolist() == [-7]
    item = next(field for field in made.schema.ids if field.name == "item_id")
    assert (item.num_embeddings, item.id_space) == (1000, "hash")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"inputs": ["user"]}, "inputs must name columns .* got 'user'; did you mean 'user_id'"),
        ({"streams": {"view": {}}}, "stream must be declared .* did you mean 'views'"),
        (
            {"streams": {"views": {"fields": ["itm_id"]}}},
            "field of stream 'views' .* got 'itm_id'; did you mean 'item_id'",
        ),
        (
            {"derived": [{"kind": "bucket", "name": "b", "field": "prise", "boundaries": [1]}]},
            "continuous input .* got 'prise'; did you mean 'price'",
        ),
        (
            {"derived": [{"kind": "hour_of_day", "name": "bid"}]},
            "derived input 'bid' must have a name of its own",
        ),
        ({"transforms": {"bit": {}}}, "transforms must name .* got 'bit'; did you mean 'bid'"),
        ({"hash_rows": {"item": 5}}, "hash_rows.item must be a positive number for a table with"),
        ({"hash_rows": {"itm": 5}}, "table must be declared .* did you mean 'item'"),
        (
            {"statistics": [{**STATISTICS[0], "name": "bid"}]},
            "statistic 'bid' must have a name of its own",
        ),
    ],
)
def test_refuses_names_that_are_not_there(tiny, section, message):
    with pytest.raises(ConfigError, match=message):
        reader(tiny(EXAMPLES, EVENTS), **section)


def test_refuses_several_ids_an_event(tiny):
    with pytest.raises(
        UnsupportedError, match="'tags' of stream 'views' must have one id an event"
    ):
        reader(tiny(EXAMPLES, EVENTS), streams={"views": {"fields": ["tags"]}})


def test_refuses_numbers_out_of_range(tiny):
    folder = tiny(EXAMPLES, EVENTS)
    with pytest.raises(ConfigError, match="batch_size must be > 0; got 0"):
        reader(folder, 0)
    with pytest.raises(ConfigError, match=r"rank must lie in 0 .. 1; got 2"):
        reader(folder, 4, 2, 2)
    with pytest.raises(ConfigError, match=r"split must be declared .* did you mean 'train'"):
        reader(folder).steps("trian")
    with pytest.raises(ConfigError, match=r"start_step must lie in 0 .. 1, .* got 2"):
        reader(folder).batches("train", start_step=2)
