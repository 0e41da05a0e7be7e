"""Regions in CUDA graphs learn what they learn without; what does not fit them is refused."""

import pytest
import torch
from torch import nn

from gem.config import load_recipe
from gem.dry_run.build import build_step
from gem.dry_run.inputs import random_batch, uniform_lengths
from gem.planning.schema import declared_schema
from gem.train.clock import StepClock
from gem.train.compiled import regions
from gem.train.graphed import GraphedRegion, graph_regions, refuse_graphs
from gem_opkit.errors import UnsupportedError
from gem_parallel.launch import World

# Sizes of the batches: the second capture waits for its second batch, the odd one runs as written.
SIZES = (32, 32, 32, 20, 32, 32)
CUDA = World(device=torch.device("cuda"))


def losses_of(*settings):
    config = load_recipe("synthetic-debug", ["train.deterministic=true", *settings])
    schema = declared_schema(config)
    torch.use_deterministic_algorithms(True)
    try:
        step = build_step(
            config, schema, CUDA, total_steps=len(SIZES), clock=StepClock(CUDA.device)
        )
        draw, losses = torch.Generator().manual_seed(4), []
        for number, size in enumerate(SIZES):
            lengths = {s.name: uniform_lengths(size, s.max_events, draw) for s in schema.streams}
            batch = random_batch(schema, lengths, draw).to(CUDA.device)
            losses.append(step(batch, number).loss)
    finally:
        torch.use_deterministic_algorithms(False)
    weights = {name: p.detach().cpu() for name, p in step.dense.items()}
    return torch.stack(losses).tolist(), weights, step


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16_autocast"])
def test_graphs_leave_every_bit(precision):
    settings = ("train.device=cuda", f"precision.default={precision}")
    plain, weights, _ = losses_of(*settings)
    graphed, others, step = losses_of(*settings, "train.cuda_graphs=true")
    assert graphed == plain
    assert all(torch.equal(others[name], own) for name, own in weights.items())
    found = [step.model.get_submodule(name).forward for name in regions(step.model)]
    assert len(found) > 3
    assert all(isinstance(own, GraphedRegion) and own.captures == 1 for own in found)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((), "must be used on a GPU; got on cpu"),
        (("train.compile=aot_eager",), "must be used with train.compile"),
        (("train.accumulation_parts=2",), "with train.accumulation_parts = 1"),
        (("memory.kept=fp8",), r"without \[memory\]"),
        (("precision.recipe=fp8_block",), "without products in 8 bits"),
    ],
)
def test_what_does_not_go_with_graphs_is_refused(settings, said):
    config = load_recipe("synthetic-debug", ["train.cuda_graphs=true", *settings])
    with pytest.raises(UnsupportedError, match=said):
        refuse_graphs(config, CUDA if settings else World())


def test_dropout_is_refused():
    heads = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    with pytest.raises(UnsupportedError, match=r"got heads\.1 with 0\.5"):
        graph_regions(nn.ModuleDict({"heads": heads}))
