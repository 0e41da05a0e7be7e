"""Save under one plan, load under another, go on with the numbers of the run that never stopped."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_runs import END, EXAMPLES, SAVED_AT, build, part, rule, train, weights
from oracle import LOOKUPS, SPECS, batch_loss, nccl_world

from gem_embeddings.checkpoint import (
    TableSaver,
    load_plain_tables,
    load_tables,
    save_plain_tables,
    save_tables,
)
from gem_embeddings.contract import OptimizerSpec
from gem_embeddings.optimizer import table_optimizer
from gem_embeddings.tables import EmbeddingTables
from gem_opkit.errors import DataError
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks


def unbroken(world, kinds, folder):
    """Save at step 7, in the background, and train on at once."""
    found = {}
    for kind, sharding in kinds.items():
        engine = build(world, kind, sharding, replicas=2, fully=sharding != "grid")
        with TableSaver(engine) as saver:
            train(engine, 0, SAVED_AT)
            engine.sync()
            at_save = weights(engine)
            saver.save(folder / kind)
            losses = train(engine, SAVED_AT, END)
        assert (folder / kind / ".metadata").exists()
        again = build(world, kind, sharding, replicas=2, fully=sharding != "grid")
        load_tables(again, folder / kind)
        # The copy was made before the steps that followed it.
        assert all(torch.equal(w, at_save[name]) for name, w in weights(again).items())
        assert (again.step, again.lr) == (SAVED_AT, 0.03)
        # Under the same plan the rest of the run is the same bit for bit.
        assert train(again, SAVED_AT, END) == losses
        assert all(torch.equal(w, weights(engine)[n]) for n, w in weights(again).items())
        found[kind] = losses, weights(again)
    return found


def resumed(world, kinds, folder, engine="torch"):
    found = {}
    for kind, (sharding, replicas, fully) in kinds.items():
        tables = build(world, kind, sharding, replicas, fully=fully, engine=engine)
        load_tables(tables, folder / kind)
        found[kind] = train(tables, SAVED_AT, END), weights(tables)
    return found


SAVED = {"rowwise_adagrad": "column_wise", "adam": "row_wise", "adagrad": "grid", "sgd": "row_wise"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder, and the losses and weights of the unbroken run on 2 x 2 ranks."""
    folder = tmp_path_factory.mktemp("saved")
    by_rank = run_ranks(unbroken, 4, SAVED, folder)
    return folder, {kind: (mean_of(by_rank, kind, [0, 2]), by_rank[0][kind][1]) for kind in SAVED}


def mean_of(by_rank, kind, ranks):
    """Loss of the whole batch: the mean over the ranks of one sharding group."""
    losses = torch.tensor([by_rank[rank][kind][0] for rank in ranks], dtype=torch.float64)
    return losses.mean(0)


@pytest.mark.parametrize(
    ("ranks", "plans"),
    [
        (1, dict.fromkeys(SAVED, ("row_wise", 1, False))),
        (
            2,
            {
                "rowwise_adagrad": ("grid", 1, False),
                "adam": ("column_wise", 1, False),
                "adagrad": ("row_wise", 2, True),
                "sgd": ("replicated", 1, False),
            },
        ),
        (
            3,
            {
                "rowwise_adagrad": ("row_wise", 1, False),
                "adam": ("table_wise", 1, False),
                "adagrad": ("column_wise", 1, False),
                "sgd": ("table_row_wise", 1, False),
            },
        ),
    ],
)
def test_saved_on_two_by_two_ranks_and_continued_elsewhere(saved, ranks, plans):
    folder, right = saved
    if ranks == 1:
        by_rank = [resumed(World(), plans, folder)]
    else:
        by_rank = run_ranks(resumed, ranks, plans, folder)
    check_continued(by_rank, plans, right)


def check_continued(by_rank, plans, right):
    ranks = len(by_rank)
    for kind, (_, replicas, _) in plans.items():
        losses, tables = right[kind]
        group = list(range(0, ranks, replicas))
        torch.testing.assert_close(
            mean_of(by_rank, kind, group), losses, rtol=2e-5, atol=2e-5, msg=kind
        )
        for seen in by_rank:
            for name, weight in seen[kind][1].items():
                torch.testing.assert_close(weight, tables[name], rtol=2e-5, atol=2e-5)


def test_replicas_write_each_element_once(saved):
    """Overlapping pieces of replicas would be refused by torch, or written several times."""
    folder, _ = saved
    for kind in SAVED:
        index = dcp.FileSystemReader(folder / kind).read_metadata().state_dict_metadata
        for spec in SPECS.values():
            entry = index[f"tables.{spec.name}.weight"]
            held = torch.zeros(spec.num_embeddings, spec.embedding_dim)
            for chunk in entry.chunks:
                (row, column), (rows, columns) = chunk.offsets, chunk.sizes
                held[row : row + rows, column : column + columns] += 1
            assert (held == 1).all()


def test_whole_tables_load_it_with_and_without_an_optimizer(saved):
    folder, _ = saved
    for kind in SAVED:
        engine = build(World(), kind, "row_wise")
        load_tables(engine, folder / kind)
        expected = weights(engine)
        tables = EmbeddingTables(list(SPECS.values()), LOOKUPS)
        load_plain_tables(tables, folder / kind, world=World())
        assert all(torch.equal(w.detach(), expected[n]) for n, w in tables.weights.items())
        optimizer = table_optimizer(tables.table_parameters(), rule(kind))
        load_plain_tables(tables, folder / kind, optimizer, kind, world=World())
        losses = train(engine, SAVED_AT, END)
        for step in range(SAVED_AT, END):
            loss = batch_loss(EXAMPLES, tables(part(step, 0, 1)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert float(loss.detach()) == pytest.approx(losses[step - SAVED_AT], rel=2e-5)


def test_whole_tables_save_what_an_engine_loads(tmp_path):
    tables = EmbeddingTables(list(SPECS.values()), LOOKUPS)
    optimizer = table_optimizer(tables.table_parameters(), OptimizerSpec(kind="adam", lr=0.2))
    batch_loss(EXAMPLES, tables(part(0, 0, 1))).backward()
    optimizer.step()
    save_plain_tables(tables, tmp_path / "plain", optimizer, "adam", world=World())
    engine = build(World(), "adam", "table_wise")
    load_tables(engine, tmp_path / "plain")
    assert (engine.step, engine.lr) == (1, 0.2)
    assert all(torch.equal(w.detach(), weights(engine)[n]) for n, w in tables.weights.items())


def test_evaluation_needs_no_optimizer_rows(saved):
    """Tables of another optimizer take the weights alone; with its rows they are refused."""
    folder, right = saved
    engine = build(World(), "sgd", "row_wise")
    with pytest.raises(DataError, match="must be of the optimizer sgd; got adam; use that one"):
        load_tables(engine, folder / "adam")
    assert engine.step == 0
    load_tables(engine, folder / "adam", optimizer=False)
    assert (engine.step, engine.lr) == (0, 0.1)
    first = batch_loss(EXAMPLES, engine.eval()(part(SAVED_AT, 0, 1)))
    assert float(first) == pytest.approx(float(right["adam"][0][0]), rel=2e-5)


def refused(world, folder, changes, message):
    engine = build(world, "adam", "row_wise", **changes)
    before = weights(engine)
    with pytest.raises(DataError, match=message):
        load_tables(engine, folder)
    assert all(torch.equal(w, before[name]) for name, w in weights(engine).items())
    assert (engine.step, engine.lr) == (0, 0.1)


def refused_on_all(world, cases):
    for case in cases:
        refused(world, *case)


def test_a_missing_shard_or_another_table_is_named_and_nothing_is_half_loaded(saved, tmp_path):
    folder, _ = saved
    shutil.copytree(folder / "adam", tmp_path / "torn")
    (tmp_path / "torn" / "__3_0.distcp").unlink()
    cases = [
        (tmp_path / "torn", {}, "have the file __3_0.distcp, [0-9]+ bytes; got no such file"),
        (
            folder / "adam",
            {"near": {"num_embeddings": 7}},
            r"hold tables.near.weight of \[7, 16\]; got \[6, 16\]",
        ),
    ]
    for case in cases:
        refused(World(), *case)
    run_ranks(refused_on_all, 2, cases)
    renamed = build(World(), "adam", "row_wise", one={"name": "two"})
    others = "tables.item.exp_avg, .* and 8 more; load the tables that were saved"
    with pytest.raises(DataError, match=f"must hold tables.two.weight; got {others}"):
        load_tables(renamed, folder / "adam")
    with pytest.raises(DataError, match="must not exist; got something there"):
        save_tables(build(World(), "adam", "row_wise"), folder / "adam")


def beside_dense(world, folder):
    """The recipe for one checkpoint of everything: the tables' DTensors in a dict of one's own."""
    engine = build(world, "adam", "column_wise", 2, fully=True)
    train(engine, 0, 2)
    state = {"dense": torch.arange(3.0), **engine.table_state()}
    dcp.save(state, checkpoint_id=folder / "all")
    background = dcp.async_save(state, checkpoint_id=folder / "copied")
    expected = weights(engine)
    train(engine, 2, 3)
    background.result()
    for name in ("all", "copied"):
        again = build(world, "adam", "row_wise")
        state = {"dense": torch.zeros(3), **again.table_state()}
        dcp.load(state, checkpoint_id=folder / name)
        assert torch.equal(state["dense"], torch.arange(3.0))
        assert all(torch.equal(w, expected[n]) for n, w in weights(again).items()), name


def test_the_state_of_tables_goes_into_a_checkpoint_of_everything(tmp_path):
    run_ranks(beside_dense, 4, tmp_path)


def test_rows_of_a_lower_precision_load_what_was_saved_in_fp32(saved):
    folder, _ = saved
    whole, low = build(World(), "sgd", "row_wise"), {"row_dtype": "bf16"}
    rounded = build(World(), "sgd", "row_wise", **dict.fromkeys(SPECS, low))
    for engine in (whole, rounded):
        load_tables(engine, folder / "sgd")
    for name, weight in weights(whole).items():
        assert torch.equal(weights(rounded)[name], weight.to(torch.bfloat16))


def fails_in_the_background(world, taken, free):
    engine = build(world, "sgd", "row_wise")
    saver = TableSaver(engine)
    saver.save(taken)
    with pytest.raises(DataError, match="must not exist; got something there"):
        saver.save(free)  # the one before it is told of first
    saver.save(free)
    saver.wait()
    load_tables(engine, free)
    with pytest.raises(DataError, match="must not exist"), TableSaver(engine) as saver:
        saver.save(taken)


def test_a_save_in_the_background_that_fails_is_told_on_every_rank(saved, tmp_path):
    taken, _ = saved
    fails_in_the_background(World(), taken / "sgd", tmp_path / "one")
    run_ranks(fails_in_the_background, 2, taken / "sgd", tmp_path / "two")


@pytest.mark.torchrec
def test_torchrec_continues_what_the_torch_engine_has_saved(saved):
    folder, right = saved
    plans = {
        "rowwise_adagrad": ("row_wise", 1, False),
        "adagrad": ("column_wise", 1, False),
        "sgd": ("table_wise", 2, False),
    }
    check_continued(run_ranks(resumed, 2, plans, folder, "torchrec"), plans, right)


def saved_by_torchrec(world, folder):
    found = {}
    for kind, sharding in (("rowwise_adagrad", "row_wise"), ("adagrad", "column_wise")):
        engine = build(world, kind, sharding, 2, engine="torchrec")
        engine.sync()
        train(engine, 0, SAVED_AT)
        with TableSaver(engine) as saver:
            saver.save(folder / kind)
            found[kind] = train(engine, SAVED_AT, END), weights(engine)
    return found


@pytest.mark.torchrec
def test_the_torch_engine_continues_what_torchrec_has_saved(tmp_path):
    by_rank = run_ranks(saved_by_torchrec, 4, tmp_path)
    right = {kind: (mean_of(by_rank, kind, [0, 2]), by_rank[0][kind][1]) for kind in by_rank[0]}
    one = {"rowwise_adagrad": ("row_wise", 1, False), "adagrad": ("table_wise", 1, False)}
    check_continued([resumed(World(), one, tmp_path)], one, right)
    three = {"rowwise_adagrad": ("grid", 1, False), "adagrad": ("row_wise", 3, True)}
    check_continued(run_ranks(resumed, 3, three, tmp_path), three, right)


@pytest.mark.gpu
def test_a_gpu_continues_what_a_cpu_has_saved_and_the_reverse(tmp_path):
    cpu, gpu = World(), World(device=torch.device("cuda"))
    for kind in SAVED:
        first = build(cpu, kind, "row_wise")
        train(first, 0, SAVED_AT)
        save_tables(first, tmp_path / f"{kind}-cpu")
        second = build(gpu, kind, "table_wise")
        load_tables(second, tmp_path / f"{kind}-cpu")
        losses = train(first, SAVED_AT, END)
        with TableSaver(second) as saver:
            saver.save(tmp_path / f"{kind}-gpu")
            found = train(second, SAVED_AT, END)
        assert found == pytest.approx(losses, rel=2e-5)
        third = build(cpu, kind, "row_wise")
        load_tables(third, tmp_path / f"{kind}-gpu")
        assert train(third, SAVED_AT, END) == losses


def over_nccl(world, store, folder):
    gpus, found = nccl_world(world, store), {}
    for kind, fully in (("rowwise_adagrad", True), ("adam", False)):
        engine = build(gpus, kind, "row_wise", 2, fully=fully)
        with TableSaver(engine) as saver:
            train(engine, 0, SAVED_AT)
            engine.sync()
            saver.save(folder / kind)
            losses = train(engine, SAVED_AT, END)
        for sharding, replicas in (("row_wise", 2), ("column_wise", 1)):
            again = build(gpus, kind, sharding, replicas, fully=fully and replicas == 2)
            load_tables(again, folder / kind)
            found[kind, sharding] = train(again, SAVED_AT, END)
        found[kind] = losses
    return found


@pytest.mark.gpu2
def test_two_gpus_continue_what_they_have_saved_and_a_cpu_does(tmp_path):
    by_rank = run_ranks(over_nccl, 2, tmp_path / "store", tmp_path)
    for kind in ("rowwise_adagrad", "adam"):
        losses = by_rank[0][kind]  # of a group of one rank: those of whole batches
        for seen in by_rank:
            assert seen[kind, "row_wise"] == pytest.approx(losses, rel=2e-5)
        halves = [seen[kind, "column_wise"] for seen in by_rank]
        means = [(a + b) / 2 for a, b in zip(*halves, strict=True)]
        assert means == pytest.approx(losses, rel=2e-5)
        engine = build(World(), kind, "row_wise")
        load_tables(engine, tmp_path / kind)
        assert train(engine, SAVED_AT, END) == pytest.approx(losses, rel=2e-5)
