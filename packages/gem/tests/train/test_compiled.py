"""Regions of a model under torch.compile: what they compute, and how often they are traced."""

import pytest
import torch
from torch._dynamo.utils import counters

from gem.data.prepare import default_folder, prepare
from gem.data.reader import open_reader
from gem.model.build import build_model
from gem.train.clock import StepClock
from gem.train.compiled import compile_regions, regions
from gem.train.step import TrainStep
from gem_opkit.errors import UnsupportedError
from gem_parallel.contract import ParallelPlan
from gem_parallel.launch import World

SMALL = ("model.dropout=0.0", "data.max_rows=64", 'model.layers=["interaction"]')
SIZES = (32, 27, 19)


def losses_of(config, folder):
    """Losses of steps on batches of several sizes, and the regions."""
    torch.manual_seed(config.seed)
    found = []
    step = None
    for number, size in enumerate(SIZES):
        reader = open_reader(folder, config.data, batch_size=size)
        if step is None:
            model = build_model(config.model, reader.schema)
            clock = StepClock(torch.device("cpu"))
            step = TrainStep(config, model, reader.schema, World(), total_steps=9, clock=clock)
        batch = next(iter(reader.batches("train")))
        found.append(float(step(batch, number).loss))
    return found, regions(step.model)


def test_compiled_regions_learn_the_same_in_one_graph_each(tiny, data_root):
    config = tiny(*SMALL)
    folder = default_folder(config.data, data_root)
    prepare("synthetic", folder, options=config.data.synthetic)
    plain, names = losses_of(config, folder)
    assert len(names) == 3
    torch._dynamo.reset()
    counters.clear()
    compiled, _ = losses_of(tiny(*SMALL, 'train.compile="aot_eager"'), folder)
    assert compiled == pytest.approx(plain, rel=1e-4)
    assert not counters["graph_break"]
    # Once for the first size, once for any other; three sizes make no more.
    assert len(names) <= counters["stats"]["unique_graphs"] <= 2 * len(names)


def test_sharded_plans_are_refused(tiny, data_root):
    config = tiny()
    folder = default_folder(config.data, data_root)
    prepare("synthetic", folder, options=config.data.synthetic)
    reader = open_reader(folder, config.data, batch_size=8)
    model = build_model(config.model, reader.schema)
    with pytest.raises(UnsupportedError, match=r"train\.compile must be"):
        compile_regions(model, ParallelPlan(shard=2, table_replicate=2), "aot_eager")
