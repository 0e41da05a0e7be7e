"""Run with nothing but this package's wheels installed: plan, wrap and train one step."""

import torch

from gem_parallel.contract import ParallelPlan
from gem_parallel.dense import data_parallel, loss_scale
from gem_parallel.launch import process_group
from gem_parallel.topology import axis_tiers, preset

tiers = axis_tiers(ParallelPlan.data_parallel(2), preset("h200x2"))
if tiers["replicate"] is None or tiers["replicate"].name != "nvlink":
    raise SystemExit(f"replicas on one host must talk over nvlink; got {tiers['replicate']}")

with process_group("cpu") as world:
    model = torch.nn.Linear(4, 1)
    wrapped = data_parallel(model, ParallelPlan.data_parallel(world.size), world)
    x_BD = torch.ones(8, 4)
    (wrapped(x_BD).sum() * loss_scale(8, world)).backward()
    if model.weight.grad is None or not torch.equal(model.weight.grad, torch.full((1, 4), 8.0)):
        raise SystemExit(f"gradient must be 8; got {model.weight.grad}")
print("gem-parallel works")
