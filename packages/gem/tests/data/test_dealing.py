"""Rows dealt over ranks for even work: every row once, in its step, as without dealing."""

import numpy as np
import pytest
from batch_rows import assert_equal_rows, reader, rows_of, tensors

from gem.data import example_rows, log
from gem.data.dealing import Balance
from gem_parallel.balance.step import Dealing
from gem_parallel.balance.work import WorkModel

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
STEP, RANKS = 16, 3
WORK = WorkModel.of_kind("quadratic", 50, stream="views")


def dealt(folder, variant, *, ranks=RANKS, parts=1, **section):
    """A reader for each rank."""
    made = []
    for rank in range(ranks):
        one = reader(folder, STEP, rank, ranks, statistics=STATISTICS, **section)
        one.balance = Balance(Dealing(variant, 2, parts=parts, group_ranks=2), WORK)
        made.append(one)
    return made


def by_row(batches):
    """Rows sorted by their place in the log: what is the same however they were dealt."""
    found = rows_of(batches)
    order = np.argsort([int(row) for row in found["row_B"]], kind="stable")
    return {name: [rows[place] for place in order] for name, rows in found.items()}


@pytest.mark.parametrize(
    ("streamed", "variant"), [(False, "global"), (True, "global"), (False, "within_group")]
)
def test_all_ranks_together_read_each_step_as_one_process_does(
    tiny, logs, monkeypatch, streamed, variant
):
    folder = tiny(*logs(9), train=33)
    alone = list(reader(folder, STEP, statistics=STATISTICS).batches("train"))
    if streamed:
        monkeypatch.setattr(log, "log_bytes", lambda dataset, data: 1 << 60)
        monkeypatch.setattr(example_rows, "_MOST_PIECE_ROWS", 7)
        monkeypatch.setattr(example_rows, "_LEAST_PIECE_ROWS", 7)
    readers = dealt(folder, variant)
    steps = list(zip(*(made.batches("train") for made in readers), strict=True))
    assert len(steps) == len(alone) == 3
    for batches, whole in zip(steps, alone, strict=True):
        assert_equal_rows(by_row(batches), tensors(whole))
    if variant == "within_group":  # of two ranks: the third keeps its rows
        plain = reader(folder, STEP, 2, RANKS, statistics=STATISTICS).batches("train")
        assert [b.row_B.tolist() for b in plain] == [b[2].row_B.tolist() for b in steps]
    # It does change who reads what, and a resumed rank reads the same again, in the same order.
    plain = list(reader(folder, STEP, 0, RANKS, statistics=STATISTICS).batches("train"))
    assert [b.row_B.tolist() for b in plain] != [b[0].row_B.tolist() for b in steps]
    again = readers[0].batches("train", start_step=1)
    assert_equal_rows(rows_of(again), rows_of([batches[0] for batches in steps[1:]]))


def test_workers_deal_as_the_rank_itself(tiny, logs):
    folder = tiny(*logs(9), train=33)
    alone = list(dealt(folder, "global")[0].batches("train"))
    made = dealt(folder, "global", workers=1)[0]
    found = list(made.batches("train"))
    made.close()
    assert_equal_rows(rows_of(found), rows_of(alone))
    assert [batch.work for batch in found] == [batch.work for batch in alone]


def work_of(batches):
    return [
        int(WORK.of({"views": b.streams["views"].numbers.lengths.numpy()}).sum()) for b in batches
    ]


@pytest.mark.parametrize("variant", ["group", "global"])
def test_what_a_batch_says_of_the_step_is_what_its_ranks_got(tiny, logs, variant):
    folder = tiny(*logs(9), train=33)
    readers = dealt(folder, variant)
    plain = [reader(folder, STEP, rank, RANKS).batches("train") for rank in range(RANKS)]
    even, uneven = [], []
    for batches, slices in zip(
        zip(*(made.batches("train") for made in readers), strict=True),
        zip(*plain, strict=True),
        strict=True,
    ):
        after, before = work_of(batches), work_of(slices)
        for batch in batches:
            assert batch.work.ranks == pytest.approx(max(after) * RANKS / max(sum(after), 1))
            assert batch.work.ranks_before == pytest.approx(
                max(before) * RANKS / max(sum(before), 1)
            )
        even.append(batches[0].work.ranks)
        uneven.append(batches[0].work.ranks_before)
    assert np.mean(even) < np.mean(uneven)


def test_local_leaves_every_rank_its_rows_and_evens_its_parts(tiny, logs):
    folder = tiny(*logs(9), train=33)
    parts_before, parts = [], []
    for rank, made in enumerate(dealt(folder, "local", ranks=2, parts=2)):
        plain = reader(folder, STEP, rank, 2, statistics=STATISTICS).batches("train")
        for batch, slice_ in zip(made.batches("train"), plain, strict=True):
            assert_equal_rows(by_row([batch]), tensors(slice_))
            assert (batch.work.ranks, batch.work.ranks_before, batch.work.moved_frac) == (
                None,
                None,
                0,
            )
            parts_before.append(batch.work.parts_before)
            parts.append(batch.work.parts)
    assert np.mean(parts) < np.mean(parts_before)


def test_one_rank_and_other_splits_keep_the_order_of_the_log(tiny, logs):
    folder = tiny(*logs(9), train=33)
    alone = reader(folder, STEP, statistics=STATISTICS)
    (one,) = dealt(folder, "global", ranks=1)
    assert_equal_rows(rows_of(one.batches("train")), rows_of(alone.batches("train")))
    for rank, made in enumerate(dealt(folder, "global")):
        plain = reader(folder, STEP, rank, RANKS, statistics=STATISTICS)
        assert_equal_rows(rows_of(made.batches("test")), rows_of(plain.batches("test")))


def test_lengths_are_those_of_the_histories(tiny, logs):
    made = reader(tiny(*logs(9), train=33), 33)
    (batch,) = made.batches("train")
    lengths = made._streams["views"].lengths(0, 33)
    assert lengths.tolist() == batch.streams["views"].numbers.lengths.tolist()
    assert len(set(lengths.tolist())) > 3
    assert made._streams["views"].lengths(5, 5).tolist() == []
