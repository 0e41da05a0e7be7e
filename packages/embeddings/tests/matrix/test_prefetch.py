"""Ids that travel ahead change nothing, and no number of batches on any rank hangs another."""

from functools import partial

import pytest
import torch
from oracle import LOOKUPS, OWNER, SPECS, batch, batch_loss, mesh_of, nccl_world, on

from gem_embeddings.contract import OptimizerSpec
from gem_embeddings.engine import build_tables
from gem_embeddings.plan import place_tables
from gem_embeddings.prefetch import Prefetcher
from gem_jagged.batch import Jagged
from gem_opkit.errors import DataError
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks


def build(world, sharding="row_wise", replicas=1, *, fully=False, engine="torch"):
    specs, optimizer = list(SPECS.values()), OptimizerSpec(lr=0.1)
    plan = place_tables(
        specs,
        dict.fromkeys(SPECS, sharding),
        table_shard=world.size // replicas,
        table_replicate=replicas,
        fully_sharded=fully,
        optimizer=optimizer,
    )
    mesh = mesh_of(world, world.size // replicas, replicas)
    return build_tables(specs, LOOKUPS, plan, optimizer, world, engine=engine, seed=5, mesh=mesh)


def nothing():
    """A batch of no examples."""
    none = Jagged.from_lengths(torch.zeros(0, dtype=torch.int64), [])
    return 0, dict.fromkeys(OWNER, none), {"liked": torch.zeros(0)}


def ahead(engine, batches, *, empty=nothing):
    return Prefetcher(engine, batches, ids=lambda b: b[1], weights=lambda b: b[2], empty=empty)


def train(engine, lookups):
    """Losses of (examples, what the engine takes)."""
    losses = []
    for examples, given in lookups:
        loss = batch_loss(examples, engine(*given))
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, {name: engine.full_weight(name) for name in SPECS}


def both_loops(world, counts, plans, engine):
    """Plain and prefetched, of the rank's own number of batches."""
    for sharding, replicas, fully in plans:
        own = [on(world, batch(step, world.rank)) for step in range(counts[world.rank])]
        joined = own + [on(world, nothing()) for _ in range(max(counts) - len(own))]
        make = partial(build, world, sharding, replicas, fully=fully, engine=engine)
        plain = train(make(), [(b[0], (b[1], b[2])) for b in joined])
        tables = make()
        ready = (
            (r.batch[0], (r.lookup,))
            for r in ahead(tables, iter(own), empty=partial(on, world, nothing()))
        )
        found = train(tables, ready)
        assert found[0] == plain[0]
        assert all(torch.equal(found[1][name], plain[1][name]) for name in SPECS)
        assert tables.counters() == _counted(make(), joined)


def _counted(engine, batches):
    train(engine, [(b[0], (b[1], b[2])) for b in batches])
    return engine.counters()


ENGINES = ["torch", pytest.param("torchrec", marks=pytest.mark.torchrec)]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_prefetched_loop_equals_the_plain_one_bit_for_bit(engine):
    plans = [("table_wise", 1, False), ("row_wise", 2, False)]
    if engine == "torch":
        both_loops(World(), [4], [("row_wise", 1, False)], engine)
        plans = [("column_wise", 1, False), ("row_wise", 2, True)]
    run_ranks(both_loops, 2, [4, 4], plans, engine)


@pytest.mark.gpu
def test_the_prefetched_loop_equals_the_plain_one_on_a_gpu():
    both_loops(World(device=torch.device("cuda")), [4], [("row_wise", 1, False)], "torch")


def both_loops_over_nccl(world, store, *rest):
    both_loops(nccl_world(world, store), *rest)


@pytest.mark.gpu2
def test_the_prefetched_loop_equals_the_plain_one_on_two_gpus(tmp_path):
    plans = [("row_wise", 1, False), ("row_wise", 2, True)]
    run_ranks(both_loops_over_nccl, 2, tmp_path / "store", [2, 3], plans, "torch")


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_with_zero_two_and_three_batches_do_not_hang(engine):
    plans = [("row_wise", 1, False), ("table_wise", 3, False)]
    run_ranks(both_loops, 3, [0, 2, 3], plans, engine)


def without_batches(world):
    engine = build(world)
    assert list(ahead(engine, [])) == []
    # A rank that has run out and has no empty batch of its own still takes part.
    own = [batch(0, 0)] if world.rank == 0 else []
    for ready in ahead(engine, own, empty=None):
        assert (ready.batch is None) == (world.rank == 1)
        vectors = engine(ready.lookup)
        sum(x.sum() for x in vectors.values()).backward()
        assert world.rank == 0 or all(len(x) == 0 for x in vectors.values())


def test_no_batches_at_all_and_a_rank_without_an_empty_batch():
    without_batches(World())
    run_ranks(without_batches, 2)


def test_the_next_ids_are_sent_before_this_batch_is_looked_up(monkeypatch):
    engine, events = build(World()), []
    start, look_up = engine.start, engine.forward

    def started(*given):
        events.append("send")
        return start(*given)

    def looked_up(*given):
        events.append("look up")
        return look_up(*given)

    monkeypatch.setattr(engine, "start", started)
    monkeypatch.setattr(engine, "forward", looked_up)
    ready = ahead(engine, [batch(step, 2) for step in range(3)])
    train(engine, ((r.batch[0], (r.lookup,)) for r in ready))
    assert events == ["send", "send", "look up", "send", "look up", "look up"]


def left_early(world):
    batches = [batch(step, world.rank) for step in range(4)]
    engine = build(world)
    for ready in ahead(engine, batches):
        batch_loss(ready.batch[0], engine(ready.lookup)).backward()
        break
    again = ((r.batch[0], (r.lookup,)) for r in ahead(engine, batches[1:]))
    found = train(engine, again)
    plain = train(build(world), [(b[0], (b[1], b[2])) for b in batches])
    assert found[0] == plain[0][1:]
    assert all(torch.equal(found[1][name], plain[1][name]) for name in SPECS)


def test_leaving_the_loop_together_leaves_tables_that_train_on():
    run_ranks(left_early, 2)


def rows_until_broken(world):
    yield batch(0, world.rank)
    yield batch(1, world.rank)
    if world.rank == 1:
        raise OSError("disk gone")
    yield batch(2, world.rank)


def with_bad_ids(world):
    yield batch(0, world.rank)
    examples, ids, weights = batch(1, world.rank)
    if world.rank == 1:
        ids = {**ids, "seen": Jagged.from_list([torch.tensor([99])] * examples)}
    yield examples, ids, weights
    yield batch(2, world.rank)


def broken(world, replicas, batches, own, good):
    """Every rank trains on the good batches and then raises."""
    engine, steps = build(world, replicas=replicas), 0
    with pytest.raises(own if world.rank == 1 else (DataError,)) as told:
        for ready in ahead(engine, batches(world)):
            batch_loss(ready.batch[0], engine(ready.lookup)).backward()
            engine.sync()
            steps += 1
    assert steps == good
    return str(told.value)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_batch_that_cannot_be_read_on_one_rank_ends_all(replicas):
    words = run_ranks(broken, 2, replicas, rows_until_broken, (OSError,), 1)
    assert words == [
        "Prefetcher: batches must be read and looked up on every rank; got on rank 1: OSError: "
        "disk gone; mend the data of that rank; all ranks have stopped before the same batch",
        "disk gone",
    ]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_bad_id_on_one_rank_ends_all(replicas):
    words = run_ranks(broken, 2, replicas, with_bad_ids, (DataError,), 1)
    assert "ids['seen'] must be in [0, 23) for table 'item'; got 99" in words[1]
    assert "rank 1" in words[0]


def with_functions_that_fail(world, name):
    """One of what ``Prefetcher`` is given to take batches apart fails on the last rank."""

    def fails(given):
        taken = given[0] if given else 2
        if world.rank == 1 and taken == 2:
            raise KeyError(name)
        return {"ids": given[1], "weights": given[2]}[name] if given else nothing()

    engine = build(world)
    # The number of examples says which batch it is.
    own = [(index, *batch(index, world.rank)[1:]) for index in range(3)]
    given = {"ids": lambda b: b[1], "weights": lambda b: b[2], "empty": nothing}
    given[name] = (lambda: fails(())) if name == "empty" else fails
    steps = 0
    with pytest.raises(KeyError if world.rank == 1 else DataError) as told:
        for ready in Prefetcher(
            engine, own[:2] if name == "empty" and world.rank == 1 else own, **given
        ):
            sum(x.sum() for x in engine(ready.lookup).values()).backward()
            steps += 1
    return steps, str(told.value)


@pytest.mark.parametrize("name", ["ids", "weights", "empty"])
def test_a_batch_that_cannot_be_taken_apart_on_one_rank_ends_all(name):
    first, second = run_ranks(with_functions_that_fail, 2, name, timeout_s=30.0)
    assert first[0] == second[0] == 1
    assert f"on rank 1: KeyError: '{name}'" in first[1]
