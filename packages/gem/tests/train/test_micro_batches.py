"""Gradient accumulation: the parts of a batch give the gradients of the whole."""

import pytest
import torch

from gem.config import RunConfig
from gem.data.prepare import default_folder, prepare
from gem.data.reader import open_reader
from gem.model.build import build_model
from gem.model.heads import multi_task_loss
from gem.train.clock import StepClock
from gem.train.micro_batches import micro_batches
from gem.train.step import TrainStep
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

NO_DROPOUT = "model.dropout=0.0"


@pytest.fixture(scope="module")
def data(tiny, data_root):
    config = tiny()
    folder = default_folder(config.data, data_root)
    prepare("synthetic", folder, options=config.data.synthetic)
    return folder


def first_batch(config, folder, batch_size):
    return next(open_reader(folder, config.data, batch_size=batch_size).batches("train"))


@pytest.mark.parametrize("parts", [1, 3, 7, 40])
def test_the_parts_are_the_batch(tiny, data, parts):
    batch = first_batch(tiny(), data, 27)
    cut = list(micro_batches(batch, parts))
    assert len(cut) == parts
    assert sum(part.examples for part in cut) == batch.examples == 27
    assert max(p.examples for p in cut) - min(p.examples for p in cut) <= 1
    for name in ("numbers_BD", "labels_BA", "label_mask_BA", "weights_B", "domains_B", "row_B"):
        assert torch.equal(torch.cat([getattr(p, name) for p in cut]), getattr(batch, name))
    whole = {**batch.ids, **{n: s.numbers for n, s in batch.streams.items()}}
    for name, jagged in whole.items():
        sequences = []
        for part in cut:
            own = part.ids[name] if name in part.ids else part.streams[name].numbers
            own.checked("values")
            sequences += own.to_list()
        assert len(sequences) == 27
        assert all(torch.equal(a, b) for a, b in zip(sequences, jagged.to_list(), strict=True))
    for name, stream in batch.streams.items():
        for part in cut:
            own = part.streams[name]
            assert all(ids.offsets_O is own.numbers.offsets_O for ids in own.ids.values())
        gaps = torch.cat([part.streams[name].gap_seconds.values for part in cut])
        assert torch.equal(gaps, stream.gap_seconds.values)
        for field, ids in stream.ids.items():
            joined = torch.cat([part.streams[name].ids[field].values for part in cut])
            assert torch.equal(joined, ids.values)


def gradients_of(step):
    return {
        name: p.grad.to_dense() if p.grad.is_sparse else p.grad
        for name, p in step.model.named_parameters()
        if p.grad is not None
    }


@pytest.mark.parametrize("parts", [2, 40])
def test_gradients_are_those_of_the_whole_batch_however_long_its_histories(tiny, data, parts):
    config = tiny(NO_DROPOUT, f"train.accumulation_parts={parts}")
    batch = first_batch(config, data, 27)
    schema = open_reader(data, config.data, batch_size=27).schema
    torch.manual_seed(1)
    model = build_model(config.model, schema)
    settings = {"total_steps": 10, "clock": StepClock(torch.device("cpu"))}
    step = TrainStep(config, model, schema, World(), **settings)
    # The oracle: the loss over the whole batch, in one backward pass.
    multi_task_loss(model(batch), batch, step.task_weights).backward()
    expected = {n: g.clone() for n, g in gradients_of(step).items()}
    logits, loss = step._gradients(batch)
    assert logits.shape == batch.labels_BA.shape
    found = gradients_of(step)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).abs().max()
        assert error <= 2e-5 * gradient.abs().max() + 1e-8, name
    assert loss == pytest.approx(
        float(multi_task_loss(model(batch), batch, step.task_weights)), rel=1e-5
    )


def train_some(world: World, config: RunConfig, folder):
    reader = open_reader(folder, config.data, batch_size=27, rank=world.rank, world_size=world.size)
    torch.manual_seed(config.seed)
    model = build_model(config.model, reader.schema)
    clock = StepClock(world.device)
    step = TrainStep(config, model, reader.schema, world, total_steps=10, clock=clock)
    losses = [float(step(batch, i).loss) for i, batch in enumerate(reader.batches("train"))]
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def test_two_ranks_in_parts_train_like_one_in_one_go(tiny, data):
    rows = "data.max_rows=55"  # the last batch has one example: most parts have none
    settings = [NO_DROPOUT, rows, "train.clip_norm=0.05"]
    losses, alone = train_some(World(), tiny(*settings), data)
    ranks = run_ranks(train_some, 2, tiny(*settings, "train.accumulation_parts=3"), data)
    assert [a + b for a, b in zip(ranks[0][0], ranks[1][0], strict=True)] == pytest.approx(
        losses, rel=1e-5
    )
    start = dict(build_model_of(tiny(*settings), data).named_parameters())
    for name, expected in alone.items():
        assert torch.equal(ranks[0][1][name], ranks[1][1][name])
        moved = (expected - start[name].detach()).abs().max()
        assert (ranks[0][1][name] - expected).abs().max() <= 1e-3 * moved + 1e-7, name


def build_model_of(config, folder):
    torch.manual_seed(config.seed)
    return build_model(config.model, open_reader(folder, config.data, batch_size=27).schema)
