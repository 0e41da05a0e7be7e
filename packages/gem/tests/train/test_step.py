"""One step: scored before it is learned from, and the same on several ranks as on one."""

from pathlib import Path

import pytest
import torch

from gem.config import RunConfig
from gem.data.prepare import default_folder, prepare
from gem.data.reader import open_reader
from gem.model.build import build_model
from gem.train.averages import averaged_weights
from gem.train.clock import SECTIONS, StepClock
from gem.train.step import TrainStep, dense_optimizer, probabilities
from gem_opkit.errors import ConfigError
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

NO_DROPOUT = "model.dropout=0.0"


@pytest.fixture
def data(tiny, data_root):
    config = tiny()
    folder = default_folder(config.data, data_root)
    prepare("synthetic", folder, options=config.data.synthetic)
    return folder


def make_step(config: RunConfig, folder: Path, world: World, batch_size: int):
    reader = open_reader(
        folder, config.data, batch_size=batch_size, rank=world.rank, world_size=world.size
    )
    torch.manual_seed(config.seed)
    model = build_model(config.model, reader.schema)
    clock = StepClock(world.device)
    return reader, TrainStep(config, model, reader.schema, world, total_steps=10, clock=clock)


def train_some(world: World, config: RunConfig, folder: Path):
    reader, step = make_step(config, folder, world, batch_size=27)
    sizes, losses = [], []
    for index, batch in enumerate(reader.batches("train")):
        sizes.append(batch.examples)
        losses.append(float(step(batch, index).loss))
    weights = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    return sizes, losses, weights


@pytest.mark.parametrize("world_size", [2, 4])
def test_uneven_and_empty_ranks_train_like_one(tiny, data, world_size):
    # 27 examples do not divide by the ranks, and the last batch has one: some ranks have none.
    config = tiny(NO_DROPOUT, "data.max_rows=55", "train.clip_norm=0.05")
    sizes, losses, alone = train_some(World(), config, data)
    assert sizes == [27, 27, 1]
    ranks = run_ranks(train_some, world_size, config, data)
    assert [sum(r[0][i] for r in ranks) for i in range(3)] == sizes
    assert 0 in [r[0][2] for r in ranks]
    assert [sum(r[1][i] for r in ranks) for i in range(3)] == pytest.approx(losses, rel=1e-5)
    start = dict(make_step(config, data, World(), 27)[1].model.named_parameters())
    for name, expected in alone.items():
        for _, _, weights in ranks:
            assert torch.equal(weights[name], ranks[0][2][name])  # every rank has the same bits
        moved = (expected - start[name].detach()).abs().max()
        error = (ranks[0][2][name] - expected).abs().max()
        assert error <= 1e-3 * moved + 1e-7, name


def test_a_batch_is_scored_before_it_is_learned_from(tiny, data):
    config = tiny(NO_DROPOUT)
    reader, step = make_step(config, data, World(), batch_size=32)
    batch = next(reader.batches("train"))
    with torch.no_grad():
        before = probabilities(step.model(batch))
    scored = step(batch, 0)
    with torch.no_grad():
        after = probabilities(step.model(batch))
    assert torch.equal(scored.p_BA, before)
    assert not torch.equal(scored.p_BA, after)


def test_the_averages_follow_the_weights(tiny, data):
    reader, step = make_step(tiny(NO_DROPOUT), data, World(), batch_size=32)
    expected = {name: value.clone() for name, value in step.ema.items()}
    assert set(expected) == set(step.dense)
    for index, batch in enumerate(reader.batches("train")):
        step(batch, index)
        decay = min(0.9, (1 + index) / (10 + index))
        for name, parameter in step.dense.items():
            expected[name] = decay * expected[name] + (1 - decay) * parameter.detach()
    for name, value in step.ema.items():
        torch.testing.assert_close(value, expected[name])


def test_averaged_weights_come_and_go(tiny, data):
    reader, step = make_step(tiny(NO_DROPOUT), data, World(), batch_size=32)
    for index, batch in enumerate(reader.batches("train")):
        step(batch, index)
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    with pytest.raises(KeyError), averaged_weights(step.model, step.ema):
        for name, value in step.ema.items():
            assert torch.equal(step.dense[name], value)
        raise KeyError
    for name, parameter in step.model.named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("tables", [True, False])
def test_the_schedule_reaches_tables_where_it_should(tiny, data, tables):
    config = tiny(f"train.schedule.tables={str(tables).lower()}", "train.tables.lr=0.5")
    _, step = make_step(config, data, World(), batch_size=32)
    step.set_rates(9)
    dense, table = (step.optimizers[name].param_groups[0]["lr"] for name in ("dense", "tables"))
    assert dense == pytest.approx(1e-4)
    assert table == pytest.approx(0.05 if tables else 0.5)


def test_rate_factors_go_by_the_longest_prefix(tiny):
    parameters = {
        "heads.trunk.weight": torch.nn.Parameter(torch.zeros(2, 2)),
        "heads.offset": torch.nn.Parameter(torch.zeros(2)),
        "shortcut.weight": torch.nn.Parameter(torch.zeros(2, 2)),
    }
    spec = tiny(
        'train.dense.lr_factors={heads = 2.0, "heads.trunk" = 3.0}', "train.dense.weight_decay=0.1"
    ).train
    groups = dense_optimizer(spec, parameters).param_groups
    found = {
        name: (group["lr"], group["weight_decay"])
        for group in groups
        for name, parameter in parameters.items()
        if any(parameter is member for member in group["params"])
    }
    assert found == {
        "heads.trunk.weight": (pytest.approx(3e-3), 0.1),
        "heads.offset": (pytest.approx(2e-3), 0.0),  # vectors do not decay
        "shortcut.weight": (pytest.approx(1e-3), 0.1),
    }
    spec = tiny("train.dense.lr_factors={shortcutt = 2.0}").train
    with pytest.raises(ConfigError, match="got 'shortcutt'; did you mean 'shortcut'"):
        dense_optimizer(spec, parameters)


def test_the_clock_books_lookups_under_tables(tiny, data):
    reader, step = make_step(tiny(), data, World(), batch_size=32)
    clock = step.clock
    batches = list(reader.batches("train"))  # made outside of the steps, so not to be counted
    for index, batch in enumerate(batches):
        clock.begin_step()
        step(batch, index)
        clock.end_step()
    fractions = clock.fractions()
    assert list(fractions) == list(SECTIONS)
    assert sum(fractions.values()) == pytest.approx(1.0)
    in_steps = {name for name, share in fractions.items() if share}
    assert in_steps == {*SECTIONS} - {"checkpoint", "evaluation"}
    # Every moment of a step is in exactly one section.
    assert sum(clock.step_ms) == pytest.approx(1e3 * sum(clock.seconds.values()), rel=0.05)
    assert min(clock.step_ms) <= clock.median_ms() <= max(clock.step_ms)
    # Nor is an evaluation, which looks up rows too.
    before = dict(clock.seconds)
    step.model.eval()
    step.model(batches[0])
    assert clock.seconds == before
