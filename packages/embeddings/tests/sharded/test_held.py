"""Gradients that are held over several backward passes, and those of other sharding groups."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gem_embeddings.contract import OptimizerSpec, Sharding, TableSpec
from gem_embeddings.engine import Exchanged, Update, build_tables
from gem_embeddings.planning.layout import place_tables
from gem_embeddings.sharded.engine import TorchTables
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, DataError, UnsupportedError
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

WIDTH, ROWS, EXAMPLES = 16, 40, 6
SPECS = (
    TableSpec(name="big", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=("big",)),
    TableSpec(name="cut", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=("cut",)),
    TableSpec(name="few", embedding_dim=WIDTH, num_embeddings=3, feature_names=("few",)),
)
# Large, or AdaGrad would move a row alike whatever its gradient is multiplied by.
RULE = OptimizerSpec(lr=0.1, eps=0.05)
# One process holds any of them; two ranks are one group or two.
SHARDINGS: dict[str, Sharding] = {"big": "row_wise", "cut": "column_wise", "few": "replicated"}


def engine_of(
    world: World,
    replicas: int = 1,
    *,
    fully: bool = False,
    update: Update = "step",
    exchanged: Exchanged = "gradients",
    single_pass: bool = False,
) -> TorchTables:
    plan = place_tables(
        SPECS,
        SHARDINGS,
        table_shard=world.size // replicas,
        table_replicate=replicas,
        fully_sharded=fully,
        optimizer=RULE,
    )
    engine = build_tables(
        SPECS, (), plan, RULE, world, seed=5, update=update, replicas=exchanged,
        single_pass=single_pass,
    )  # fmt: skip
    assert isinstance(engine, TorchTables)
    return engine


def examples_of(draw: int) -> tuple[dict[str, list[list[int]]], Tensor]:
    """Ids of some examples, and what their vectors are multiplied by in the loss."""
    numbers = torch.Generator().manual_seed(draw)
    ids = {
        spec.name: [
            torch.randint(0, spec.num_embeddings, (n,), generator=numbers).tolist()
            for n in torch.randint(0, 4, (EXAMPLES,), generator=numbers).tolist()
        ]
        for spec in SPECS
    }
    return ids, torch.randn(EXAMPLES, WIDTH, generator=numbers)


def learn(engine: TorchTables, draw: int, begin: int = 0, end: int = EXAMPLES) -> None:
    """Run the backward pass of some of the examples, whose losses add up."""
    ids, factors_BE = examples_of(draw)
    vectors = engine(
        {
            name: Jagged.from_lengths(
                torch.tensor([i for one in of[begin:end] for i in one], dtype=torch.int64),
                [len(one) for one in of[begin:end]],
            )
            for name, of in ids.items()
        }
    )
    total_BE = torch.stack(list(vectors.values())).sum(0) * factors_BE[begin:end]
    (total_BE.sum() / EXAMPLES).backward()


def content(engine: TorchTables) -> list[Tensor]:
    """All that is kept of weights and optimizer rows on this rank, as copies."""
    return [buffer.filled().clone() for buffer in engine._rows.buffers()]


def weights_of(engine: TorchTables) -> Tensor:
    return torch.cat([engine.full_weight(spec.name).flatten() for spec in SPECS])


def hold(world: World) -> dict[str, Any]:
    """What holding does to the tables of two groups of one rank or one of all."""
    found: dict[str, Any] = {}
    for replicas in (1, world.size):
        whole, parts, dropped = (
            engine_of(world, replicas, fully=replicas > 1) for _ in range(3)
        )  # fmt: skip
        for step in range(2):
            draw = 10 * step + world.rank
            learn(whole, draw)
            whole.apply()
            # The last part has no examples.
            for begin, end in ((0, 1), (1, 4), (4, EXAMPLES), (EXAMPLES, EXAMPLES)):
                learn(parts, draw, begin, end)
            before = content(parts)
            parts.apply()
            moved = not all(map(torch.equal, before, content(parts)))
            kept = content(dropped)
            learn(dropped, draw + 5)
            dropped.discard()
            same = all(map(torch.equal, kept, content(dropped))) and dropped.step == step
            learn(dropped, draw)
            dropped.apply()
            found[f"{replicas} {step}"] = moved, same, parts.step
        found[f"weights {replicas}"] = [weights_of(e) for e in (whole, parts, dropped)]
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_passes_add_up_and_what_is_discarded_leaves_every_bit(ranks: int) -> None:
    told = [hold(World())] if ranks == 1 else run_ranks(hold, ranks)
    one = told[0]["weights 1"][0]
    for found in told:
        for replicas in {1, ranks}:
            assert [found[f"{replicas} {step}"] for step in range(2)] == [
                (True, True, 1), (True, True, 2)
            ]  # fmt: skip
            whole, parts, dropped = found[f"weights {replicas}"]
            assert torch.equal(whole, dropped)
            # Rounding of fp32 in another order of addition; weights are below 2.
            torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)
            # Two groups that exchange gradients learn what one group does.
            torch.testing.assert_close(whole, one, rtol=0, atol=1e-6)


def exchange(world: World) -> list[list[Tensor]]:
    """Content and weights on this rank after groups have seen different data."""
    found = []
    for replicas, fully in ((1, False), (2, False), (2, True), (4, False)):
        engine = engine_of(world, replicas, fully=fully, update="backward")
        for step in range(3):
            # The last rank never has an example.
            end = 0 if world.rank == world.size - 1 else EXAMPLES
            learn(engine, 10 * step + world.rank, 0, end)
        before = content(engine)
        engine.sync()
        assert all(map(torch.equal, before, content(engine)))
        found.append([weights_of(engine), *(before if replicas > 1 and not fully else [])])
    return found


def test_groups_that_exchange_gradients_stay_equal_and_learn_as_one() -> None:
    told = run_ranks(exchange, 4)
    for of_case in zip(*told, strict=True):
        # Ranks 0 and 1 hold the same rows of two groups.
        assert all(map(torch.equal, of_case[0][1:], of_case[1][1:]))
        for found in of_case:
            assert torch.equal(found[0], of_case[0][0])
            torch.testing.assert_close(found[0], told[0][0][0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("single_pass", [False, True])
def test_what_is_held_is_looked_at_before_it_moves_rows(single_pass: bool) -> None:
    engine = engine_of(World(), single_pass=single_pass)
    before = content(engine)
    assert bool(engine.held_finite())
    learn(engine, 0)
    assert engine.held_finite().shape == ()
    assert bool(engine.held_finite())
    if single_pass:  # holds one pass at a time
        engine.discard()
    for bad in (float("nan"), float("inf"), -(2.0**61)):
        vectors = engine({spec.name: Jagged.from_list([torch.tensor([1])]) for spec in SPECS})
        (vectors["cut"].sum() * bad).backward()
        assert not bool(engine.held_finite()), bad
        engine.discard()
        assert bool(engine.held_finite())
    assert all(map(torch.equal, before, content(engine)))
    # A state that is refused is not loaded, so what is held stays; one that is loaded drops it.
    learn(engine, 0)
    with pytest.raises(ConfigError, match="have the keys"):
        engine.load_table_state({})
    engine.apply()
    assert not all(map(torch.equal, before, content(engine)))
    learn(engine, 1)
    engine.load_table_state(engine.table_state())
    with pytest.raises(ConfigError, match="apply must follow a backward pass"):
        engine.apply()


def test_a_single_pass_learns_what_held_ones_learn() -> None:
    plain, single = engine_of(World()), engine_of(World(), single_pass=True)
    for step in range(2):
        for engine in (plain, single):
            learn(engine, step)
            engine.apply()
        assert single.step == step + 1
    torch.testing.assert_close(weights_of(single), weights_of(plain), rtol=0, atol=1e-6)
    assert single.counters() == plain.counters()
    learn(single, 2)
    with pytest.raises(ConfigError, match="single_pass must be false"):
        learn(single, 3)
    single.discard()
    learn(single, 2)
    # An evaluation counts nothing and holds nothing.
    before = single.counters()
    single.eval()
    with torch.no_grad():
        single({spec.name: Jagged.from_list([torch.tensor([1])]) for spec in SPECS})
    assert single.counters() == before
    single.apply()


def test_a_second_pass_that_goes_another_way_is_refused_too() -> None:
    def even(engine: TorchTables) -> None:
        learn(engine, 0)

    def uneven(engine: TorchTables) -> None:
        # Features with different numbers of examples: picked out and held.
        ids = {s.name: Jagged.from_list([torch.tensor([1])] * n) for n, s in enumerate(SPECS, 1)}
        torch.stack([vectors.sum() for vectors in engine(ids).values()]).sum().backward()

    engine = engine_of(World(), single_pass=True)
    for first, second in ((even, uneven), (uneven, even)):
        first(engine)
        with pytest.raises(ConfigError, match="single_pass must be false"):
            second(engine)
        engine.apply()
        with pytest.raises(ConfigError, match="apply must follow a backward pass"):
            engine.apply()


def overflow_between_groups(world: World) -> list[bool]:
    """What is said of gradients that fit fp32, for groups that exchange them in fp16."""
    plan = place_tables(SPECS, SHARDINGS, table_shard=1, table_replicate=2, optimizer=RULE)
    engine = build_tables(
        SPECS, (), plan, RULE, world, update="step", replicas="gradients", wire_dtype="fp16"
    )
    said = []
    # The largest number of fp16 is 65504; the fourth reaches it in two passes.
    for factors in ((1e4,), (1e5,), (4e4,), (4e4, 4e4)):
        for factor in factors:
            vectors = engine({spec.name: Jagged.from_list([torch.tensor([1])]) for spec in SPECS})
            (vectors["big"].sum() * factor + vectors["cut"].sum() + vectors["few"].sum()).backward()
        finite = bool(engine.held_finite())
        said.append(finite)
        if finite:
            engine.apply()
        else:
            engine.discard()
    assert all(bool(engine.full_weight(spec.name).isfinite().all()) for spec in SPECS)
    return said


def test_gradients_that_would_overflow_between_groups_are_not_finite() -> None:
    assert run_ranks(overflow_between_groups, 2) == [[True, False, True, False]] * 2


def test_calls_that_do_not_fit_the_setting_are_refused() -> None:
    engine = engine_of(World())
    # As a part of a model it takes what any module takes.
    seen: list[torch.nn.Module] = []
    torch.nn.Sequential(engine).apply(seen.append)
    assert engine in seen
    engine.discard()
    with pytest.raises(ConfigError, match="apply must follow a backward pass; got none"):
        engine.apply()
    learn(engine, 0)
    engine.apply()
    with pytest.raises(ConfigError, match="apply must follow a backward pass"):
        engine.apply()
    assert engine.step == 1
    at_once = engine_of(World(), update="backward")
    for call in ("apply", "discard", "held_finite"):
        with pytest.raises(ConfigError, match=f'{call} must be called where update is "step"'):
            getattr(at_once, call)()
    for name, value in (("update", "later"), ("replicas", "both"), ("wire_dtype", "int8")):
        plan = place_tables(SPECS, SHARDINGS, table_shard=1)
        given: Any = {name: value}
        with pytest.raises(ConfigError, match=f"{name} must be .* or .*; got '{value}'"):
            build_tables(SPECS, (), plan, RULE, World(), **given)


def given_to(draw: int) -> tuple[dict[str, Jagged], Tensor]:
    ids, factors_BE = examples_of(draw)
    given = {
        name: Jagged.from_list([torch.tensor(one, dtype=torch.int64) for one in of])
        for name, of in ids.items()
    }
    return given, factors_BE


def test_rows_read_ahead_are_those_that_forward_finds() -> None:
    """Bit for bit, and nothing is counted before it is looked up."""
    plain, ahead = (engine_of(World(), single_pass=True) for _ in range(2))
    batches = [given_to(draw) for draw in range(4)]
    assert ahead.reads_ahead
    coming = ahead.start_ahead(batches[0][0])
    for step, (ids, factors_BE) in enumerate(batches):
        one, other = plain(ids), ahead(coming)
        assert ahead.counters() == plain.counters()
        for found in (one, other):
            sum((vectors * factors_BE).sum() for vectors in found.values()).backward()
        plain.apply()
        if step + 1 < len(batches):
            coming = ahead.start_ahead(batches[step + 1][0])
        ahead.apply()
        ahead.read_ahead(coming)
        for name in one:
            assert torch.equal(one[name], other[name])
    assert torch.equal(weights_of(plain), weights_of(ahead))
    # Rows moved between two lookups; read earlier, they would have been others.
    assert not torch.equal(weights_of(plain), weights_of(engine_of(World())))
    # A bad id is refused when it is looked up, not when it is started.
    bad = dict(batches[0][0], big=Jagged.from_list([torch.tensor([ROWS])] * EXAMPLES))
    counts, coming = ahead.counters(), ahead.start_ahead(bad)
    ahead.read_ahead(coming)
    with pytest.raises(DataError, match=str(ROWS)):
        ahead(coming)
    assert ahead.counters() == counts


def fetch_ahead(world: World, replicas: int) -> None:
    plain, ahead = (engine_of(world, replicas) for _ in range(2))
    first = weights_of(plain)
    batches = [given_to(10 * draw + world.rank) for draw in range(4)]
    assert ahead.fetches_ahead == (replicas < world.size)
    coming = ahead.start_ahead(batches[0][0])
    for step, (ids, factors_BE) in enumerate(batches):
        one, other = plain(ids), ahead(coming)
        assert ahead.counters() == plain.counters()
        for found in (one, other):
            sum((vectors * factors_BE).sum() for vectors in found.values()).backward()
        plain.apply()
        if step + 1 < len(batches):
            coming = ahead.start_ahead(batches[step + 1][0])
        ahead.apply()
        sent = ahead.group.calls["all_to_all"]
        ahead.fetch_ahead(coming)
        assert ahead.group.calls["all_to_all"] == sent + 2 * (step + 1 < len(batches))
        for name in one:
            assert torch.equal(one[name], other[name])
    assert torch.equal(weights_of(plain), weights_of(ahead))
    assert not torch.equal(first, weights_of(ahead))
    # A bad id of one rank is refused on all of its group, when it is looked up.
    bad = dict(batches[0][0])
    if world.rank < replicas:
        bad["big"] = Jagged.from_list([torch.tensor([ROWS])] * EXAMPLES)
    counts, coming = ahead.counters(), ahead.start_ahead(bad)
    ahead.fetch_ahead(coming)
    with pytest.raises(DataError, match=str(ROWS) if world.rank < replicas else "by rank"):
        ahead(coming)
    assert ahead.counters() == counts
    again = ahead.start_ahead(batches[0][0])
    ahead.fetch_ahead(again)
    assert all(map(torch.equal, ahead(again).values(), plain(batches[0][0]).values()))


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_vectors_fetched_ahead_are_those_that_the_lookup_finds(ranks: int, replicas: int) -> None:
    run_ranks(fetch_ahead, ranks, replicas)


def refuse_to_fetch_ahead(world: World) -> None:
    engine = engine_of(world, world.size, fully=True)
    assert not engine.fetches_ahead
    with pytest.raises(UnsupportedError, match="fetch_ahead must be called where fetches_ahead"):
        engine.fetch_ahead(engine.start(given_to(0)[0]))


def test_rows_that_are_cut_between_steps_are_not_fetched_ahead() -> None:
    run_ranks(refuse_to_fetch_ahead, 2)


def test_engines_that_cannot_read_ahead_say_so() -> None:
    engine = engine_of(World())
    coming = engine.start(given_to(0)[0])
    with pytest.raises(UnsupportedError, match="read_ahead must be called where"):
        engine.read_ahead(coming)
    with pytest.raises(UnsupportedError, match="start_ahead must be called where"):
        engine.start_ahead(given_to(0)[0])
