"""Experts beside the event streams: the same numbers, whatever runs at the same time."""

import re

import pytest
import torch
from batches import SCHEMA, ragged_batch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from gem.config import parse_recipe
from gem.model.build import build_model, overlap_sides, refuse_cut_sides
from gem.model.gem import GemLayer
from gem.model.spec import GemSpec
from gem.train.parallel_spec import ParallelSpec
from gem_opkit.errors import UnsupportedError
from gem_parallel.side_stream import SideStream
from gem_parallel.testing import one_rank_group

LAYERS = ("transformer", "interaction", "transformer", "interaction")


def model_of(device, *, sides, width=32, dropout=0.2):
    torch.manual_seed(0)
    experts = {"count": 2, "fm_tokens": 4, "linear_tokens": 4, "rank": 4, "mlp_widths": [64]}
    spec = GemSpec.model_validate(
        {
            "width": width,
            "layers": LAYERS,
            "dropout": dropout,
            "stream": {"width": width, "heads": 2},
            "experts": experts,
            "heads": {"trunk_widths": [16], "init_gain": 1.0},
        }
    )
    model = build_model(spec, SCHEMA).to(device)
    if sides:
        overlap_sides(model, device)
    return model.train()


def steps(model, batch, count=3):
    """Logits and gradients of some steps; what is dropped depends on the order of launches."""
    torch.manual_seed(1)
    found = []
    for _ in range(count):
        logits_BA = model(batch)
        logits_BA.square().sum().backward()
        dense = [p.grad for n, p in model.named_parameters() if not n.startswith("tables.")]
        found.append((logits_BA.detach().clone(), [grad.clone() for grad in dense]))
    return found


def test_on_a_cpu_it_changes_no_bit(monkeypatch):
    device, batch, begun = torch.device("cpu"), ragged_batch(), []
    expected = steps(model_of(device, sides=False), batch)
    begin = SideStream.begin
    monkeypatch.setattr(
        SideStream, "begin", lambda side, *given: begun.append(given) or begin(side, *given)
    )
    for (logits_BA, grads), (wanted_BA, wanted) in zip(
        steps(model_of(device, sides=True), batch), expected, strict=True
    ):
        assert torch.equal(logits_BA, wanted_BA)
        assert all(map(torch.equal, grads, wanted))
    assert len(begun) == 3 * LAYERS.count("transformer")


@pytest.mark.gpu
def test_on_a_gpu_it_changes_the_order_of_sums_at_most():
    device = torch.device("cuda")
    batch = ragged_batch().to(device)
    expected = steps(model_of(device, sides=False, width=64), batch)
    model = model_of(device, sides=True, width=64)
    assert all(part.side is not None for part in model.modules() if isinstance(part, GemLayer))
    for (logits_BA, grads), (wanted_BA, wanted) in zip(steps(model, batch), expected, strict=True):
        torch.testing.assert_close(logits_BA, wanted_BA, rtol=1e-5, atol=1e-6)
        for grad, wanted_grad in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, wanted_grad, rtol=1e-3, atol=1e-5)


def test_gathered_parameters_are_refused():
    with pytest.raises(UnsupportedError, match=r"parallel.overlap_sides must be false.*shard=2"):
        ParallelSpec(shard=2, table_shard=2, overlap_sides=True)
    for axis in ("replicate", "expert"):
        plan = ParallelSpec.model_validate({axis: 2, "table_shard": 2, "overlap_sides": True})
        assert plan.overlap_sides


def test_parameters_that_are_cut_beside_experts_are_refused():
    model = model_of(torch.device("cpu"), sides=True)
    refuse_cut_sides(model)
    with one_rank_group("shard"):
        mesh = init_device_mesh("cpu", (1,))
        # Experts of an interaction layer run behind its streams: they may be cut.
        for layer, refused in ((1, False), (2, True)):
            mixture = model.get_submodule(f"layers.{layer}.experts")
            name, parameter = next(iter(mixture.named_parameters()))
            holder, _, key = name.rpartition(".")
            cut = torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh))
            setattr(mixture.get_submodule(holder), key, cut)
            if refused:
                words = f"layers.2.experts.{name} with {parameter.numel()} elements"
                with pytest.raises(UnsupportedError, match=re.escape(words)):
                    refuse_cut_sides(model)
            else:
                refuse_cut_sides(model)


def test_a_recipe_turns_it_on():
    from gem.dry_run.build import build_step
    from gem.planning.schema import declared_schema
    from gem.train.clock import StepClock
    from gem_parallel.launch import World

    layers = 'layers = ["transformer", "interaction"]'
    text = f'[data]\ndataset = "synthetic"\n[model]\nkind = "gem"\n{layers}\n'
    for value in ("true", "false"):
        given = [f"parallel.overlap_sides={value}"]
        config = parse_recipe(text, name="small", origin="small", overrides=given)
        world = World()
        step = build_step(
            config, declared_schema(config), world, total_steps=1, clock=StepClock(world.device)
        )
        layer = step.model.get_submodule("layers.0")
        assert (layer.side is not None) == (value == "true")
