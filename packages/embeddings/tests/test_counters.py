import pytest
import torch

from gem_embeddings.contract import LookupSpec, TableSpec
from gem_embeddings.counters import COUNTS, TableCounters, TableCounts
from gem_embeddings.tables import EmbeddingTables
from gem_jagged.batch import Jagged


def three_tables():
    shared = {"embedding_dim": 2, "num_embeddings": 5}
    return [
        TableSpec(name="exact", feature_names=("a", "b"), **shared),
        TableSpec(name="near", feature_names=("c",), out_of_range="clamp", **shared),
        TableSpec(name="zeros", feature_names=("d",), out_of_range="zero", **shared),
    ]


def jagged(*lists):
    return Jagged.from_list([torch.tensor(ids, dtype=torch.int64) for ids in lists])


def batch():
    return {
        "a": jagged([1, 1], []),
        "b": jagged([2], [1, 1]),
        "history": jagged([4, 4, 1], []),
        "c": jagged([-3, 0], [9, 4]),
        "d": jagged([7], [7, 2]),
    }


def test_counts_of_a_batch_by_hand():
    tables = EmbeddingTables(
        three_tables(), [LookupSpec(feature_name="history", table_name="exact")]
    )
    for _ in range(2):
        sum(x.sum() for x in tables(batch()).values()).backward()
    once = {
        # An example of an unpooled feature has no vector to be empty.
        "exact": TableCounts(looked_up=8, unique=3, empty_bags=1),
        "near": TableCounts(looked_up=4, unique=2, out_of_range=2, clipped=2),
        # A row that was not read is not counted as one.
        "zeros": TableCounts(looked_up=3, unique=1, out_of_range=2),
    }
    twice = {name: counts + counts for name, counts in once.items()}
    assert tables.counters() == twice
    assert tables.counts.take() == twice
    assert tables.counters() == dict.fromkeys(once, TableCounts())


def test_evaluation_is_not_counted():
    tables = EmbeddingTables(
        three_tables(), [LookupSpec(feature_name="history", table_name="exact")]
    )
    tables.eval()(batch())
    assert set(tables.counters().values()) == {TableCounts()}
    assert tables.out_of_range_counts()["near"] == 2  # of all lookups, as ever


def test_a_step_that_is_undone_leaves_no_count():
    counters = TableCounters(three_tables())
    counters.add("exact", looked_up=3, unique=2)
    counters.add_outside("near", torch.tensor(1))
    before, mark = counters.read(), counters.mark()
    counters.add("exact", looked_up=5, empty_bags=1)
    counters.add_outside("near", torch.tensor(4))
    assert counters.read()["near"] == TableCounts(out_of_range=5, clipped=5)
    counters.return_to(mark)
    counters.add("zeros", looked_up=1)
    assert counters.read() == {**before, "zeros": TableCounts(looked_up=1)}


def test_counts_have_the_names_of_the_log():
    assert COUNTS == ("looked_up", "unique", "out_of_range", "empty_bags", "clipped")


@pytest.mark.gpu
def test_counting_waits_for_no_device():
    tables = EmbeddingTables([three_tables()[1]], device="cuda").train()
    ids = {"c": Jagged.from_list([torch.tensor([-3, 0]), torch.tensor([9])]).to("cuda")}
    tables(ids)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tables(ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tables.counters()["near"] == TableCounts(looked_up=6, out_of_range=4, clipped=4)
