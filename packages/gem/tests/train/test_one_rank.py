"""A single rank that goes the way of several learns what one that goes its own way does."""

from dataclasses import replace

import pytest
import torch

from gem.data.batch import ExampleBatch
from gem.train import step as step_module
from gem.train.dense_adam import DenseAdam
from gem.train.progress import Display
from gem.train.run import build_run, torch_settings
from gem_parallel.testing import run_ranks

WAYS = ("replicate", "shard", "expert")
SETTINGS = [
    *("model.dropout=0.0", "model.embeddings.initial_rows=by_place", "model.experts.count=4"),
    *("train.log_every_steps=1", "train.dense.lr=1e-2", "train.tables.lr=0.1"),
    *("train.clip_norm=0.5", "data.max_rows=128", "parallel.table_engine=torch"),
    "parallel.replicate_below=40",
]
HALF = [*SETTINGS, "precision.default=bf16_autocast"]


def as_on_a_gpu() -> None:
    """Let this process take the optimizer and the weights in bf16 that a GPU takes."""

    def optimizer(spec, parameters, *, names=()):
        made = torch_optimizer(spec, parameters, names=names)
        settings = {key: made.defaults[key] for key in ("betas", "eps")}
        return DenseAdam(made.param_groups, **settings)

    torch_optimizer = step_module.dense_optimizer
    step_module.dense_optimizer = optimizer
    step_module.TrainStep._reads_working_weights = lambda self, config: True


def learn(config, world, data_root) -> tuple[list[list[float]], int, int, list[int]]:
    """Losses and norms, weights with a copy in bf16, calls started ahead, ids looked up."""
    with torch_settings(config.train):
        run = build_run(config, data_root / "unused", world, Display(None), data_root)
        step = run.step
        step.ahead.on, step.ahead.stream = True, None
        started = fetched = 0
        begin, fetch = step.engine.start_ahead, step.engine.fetch_ahead

        def counted(ids):
            nonlocal started
            started += 1
            return begin(ids)

        def counted_too(coming):
            nonlocal fetched
            fetched += 1
            fetch(coming)

        step.engine.start_ahead, step.engine.fetch_ahead = counted, counted_too
        step.model.train()
        found = []
        batches: list[ExampleBatch] = list(run.reader.batches("train"))
        for number, batch in enumerate(batches):
            if number + 1 < len(batches):
                step.expect(batches[number + 1])
            scored = step(batch, number)
            found.append([float(scored.loss), float(scored.grad_norm)])
        assert fetched == (started if world.grouped else 0)
        # What a checkpoint holds is the same on every way.
        held = [*step.dense.values()]
        held += [v for state in step.optimizers["dense"].state.values() for v in state.values()]
        assert {tensor.dtype for tensor in held} == {torch.float32}
        copies = 0 if step.working is None else len(step.working.copies)
        looked_up = [counts.looked_up for counts in step.lookups.counts.take().values()]
        return found, copies, started, looked_up


def learn_all(world, config, half, data_root):
    whole = {way: learn(config, replace(world, way=way), data_root) for way in (None, *WAYS)}
    as_on_a_gpu()
    return whole, {way: learn(half, replace(world, way=way), data_root) for way in (None, *WAYS)}


@pytest.fixture(scope="module")
def learned(tiny, data_root):
    return run_ranks(learn_all, 1, tiny(*SETTINGS), tiny(*HALF), data_root)[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_way_of_several_ranks_learns_what_one_rank_learns(learned, way):
    (alone, _, _, looked_up), (found, _, started, counted) = learned[0][None], learned[0][way]
    assert len(found) == started + 1 == 4
    assert torch.tensor(found) == pytest.approx(torch.tensor(alone), rel=2e-6)
    assert counted == looked_up  # started ahead or not


@pytest.mark.parametrize("way", WAYS)
def test_weights_in_bf16_are_read_on_every_way(learned, way):
    (alone, every, _, _), (found, copies, _, _) = learned[1][None], learned[1][way]
    # Of experts and of copies; what is cut is gathered in the format of the plan.
    assert copies == every if way == "replicate" else 0 < copies < every
    assert found[0] == pytest.approx(alone[0], rel=1e-6)
    # Sums of gradients of rows in another order move products in bf16 by their last bit.
    assert torch.tensor(found) == pytest.approx(torch.tensor(alone), rel=2e-3)
