"""Bad input on one rank is refused on all of them, moves nothing, and tables train on after it."""

import pytest
import torch
from oracle import LOOKUPS, SPECS, batch, batch_loss

from gem_embeddings.contract import OptimizerSpec
from gem_embeddings.engine import build_tables
from gem_embeddings.plan import place_tables
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, GemError
from gem_opkit.testing import check_refuses
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks


def build(world, sharding="row_wise", **options):
    specs, optimizer = list(SPECS.values()), OptimizerSpec(lr=0.1)
    plan = place_tables(
        specs, dict.fromkeys(SPECS, sharding), table_shard=world.size, optimizer=optimizer
    )
    return build_tables(specs, LOOKUPS, plan, optimizer, world, seed=5, **options)


def spoilt(ids, name, values):
    """The feature with other ids, in one example."""
    lengths = [len(values)] + [0] * (ids[name].batch - 1)
    return {**ids, name: Jagged.from_lengths(values, lengths)}


# What is wrong, how it is made, and what the rank that has it says.
SPOILS = {
    "beyond": (
        lambda ids, w: (spoilt(ids, "seen", torch.tensor([3, 23])), w),
        r"ids\['seen'\] must be in \[0, 23\) for table 'item'; got 23 at position 1 \(example 0\)",
    ),
    "negative": (
        lambda ids, w: (spoilt(ids, "history", torch.tensor([-1])), w),
        r"ids\['history'\] must be in \[0, 23\) for table 'item'; got -1 at position 0",
    ),
    "far beyond": (
        lambda ids, w: (spoilt(ids, "liked", torch.tensor([2**62])), {}),
        r"got 4611686018427387904 at position 0",
    ),
    "floats": (
        lambda ids, w: (spoilt(ids, "place", torch.tensor([0.5])), w),
        r"ids\['place'\] must be int32 or int64; got torch.float32",
    ),
    "no features": (lambda ids, w: (None, w), "ids must be a dict of features; got NoneType"),
    "weights in a list": (
        lambda ids, w: (ids, {"liked": w["liked"].tolist()}),
        r"weights\['liked'\] must be a tensor; got list",
    ),
    "missing": (
        lambda ids, w: ({name: x for name, x in ids.items() if name != "words"}, w),
        "ids must have the feature 'words'; got flag, history, liked, place, seen",
    ),
    "weights": (
        lambda ids, w: (ids, {"liked": w["liked"][:-1]}),
        r"weights\['liked'\] must have one weight for each of \d+ ids; got shape",
    ),
    "weights of an unpooled feature": (
        lambda ids, w: (ids, {"history": torch.ones(ids["history"].total_tokens)}),
        r"weights\['history'\] must belong to a pooled feature",
    ),
}


def refused_everywhere(world, bad_rank, name="torch"):
    engine, words = build(world, engine=name), {}
    for what, (spoil, _) in SPOILS.items():
        before = {table: engine.full_weight(table) for table in SPECS}
        _, ids, weights = batch(2, 3 * (world.rank == bad_rank))
        if world.rank == bad_rank:
            ids, weights = spoil(ids, weights)
        with pytest.raises(GemError) as told:
            engine(ids, weights)
        words[what] = str(told.value)
        assert all(torch.equal(engine.full_weight(n), w) for n, w in before.items())
        # The ranks are still in step.
        examples, ids, weights = batch(2, world.rank)
        batch_loss(examples, engine(ids, weights)).backward()
    return words


@pytest.mark.parametrize(
    ("engine", "world_size"),
    [("torch", 1), ("torch", 2), pytest.param("torchrec", 2, marks=pytest.mark.torchrec)],
)
def test_a_bad_batch_on_one_rank_is_refused_on_all(engine, world_size):
    bad = world_size - 1
    if world_size == 1:
        by_rank = [refused_everywhere(World(), 0)]
    else:
        by_rank = run_ranks(refused_everywhere, world_size, bad, engine)
    check_refuses(
        [(raises(by_rank[bad][name]), GemError, pattern) for name, (_, pattern) in SPOILS.items()]
    )
    if world_size > 1:
        assert all(f"rank {bad}" in words for words in by_rank[0].values())


class Lost(dict):
    """Features that cannot be read, for a reason that no operator foresees."""

    def __getitem__(self, name):
        raise OSError("the disk is gone")


def told_of_any_fault(world, name):
    engine = build(world, engine=name)
    examples, ids, weights = batch(2, world.rank)
    with pytest.raises(Exception) as told:
        engine(Lost(ids) if world.rank else ids, weights)
    batch_loss(examples, engine(ids, weights)).backward()
    return type(told.value).__name__, str(told.value)


@pytest.mark.parametrize("engine", ["torch", pytest.param("torchrec", marks=pytest.mark.torchrec)])
def test_a_fault_of_any_kind_on_one_rank_stops_all(engine):
    first, second = run_ranks(told_of_any_fault, 2, engine)
    assert second == ("OSError", "the disk is gone")
    assert first[0] == "DataError"
    assert "rank 1" in first[1]


def test_ids_that_another_engine_has_started_are_refused():
    one, other = build(World()), build(World())
    _, ids, weights = batch(2, 0)
    with pytest.raises(ConfigError, match="must have been started by this engine"):
        one(other.start(ids, weights))


def raises(message):
    def again():
        raise GemError(message)

    return again


def test_refuses_what_cannot_be_built():
    world = World()
    specs = list(SPECS.values())
    plan = place_tables(specs[1:], {}, table_shard=1)
    four = place_tables(specs, dict.fromkeys(SPECS, "row_wise"), table_shard=4)
    other = [specs[0].model_copy(update={"num_embeddings": 24}), *specs[1:]]
    rows = place_tables(specs, dict.fromkeys(SPECS, "row_wise"), table_shard=1)
    optimizer = OptimizerSpec()
    check_refuses(
        [
            (
                lambda: build_tables(specs, LOOKUPS, plan, optimizer, world),
                ConfigError,
                "plan must place the tables item, near, one, query; got near, one, query",
            ),
            (
                lambda: build_tables(specs, LOOKUPS, four, optimizer, world),
                ConfigError,
                "4",
            ),
            (
                lambda: build_tables(other, LOOKUPS, rows, optimizer, world),
                ConfigError,
                "plan of table 'item' must cover 24 rows of 16; got 23 rows of 16",
            ),
            (
                lambda: build(world, engine="fbgemm"),
                ConfigError,
                'engine must be "torch" or "torchrec"; got \'fbgemm\'',
            ),
            (lambda: build(world).set_lr(-1.0), ConfigError, "lr"),
            (lambda: build(world).full_weight("nothing"), ConfigError, "nothing"),
        ]
    )
