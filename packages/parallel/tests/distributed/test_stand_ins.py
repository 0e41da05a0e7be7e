"""Leaves that forward passes read in the place of parameters: whose gradients become theirs."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from gem_opkit.errors import ConfigError
from gem_parallel.contract import ParallelPlan
from gem_parallel.dense import parallelise
from gem_parallel.launch import World
from gem_parallel.sharding.copies import CopiedGradients
from gem_parallel.testing import run_ranks

WIDTH, RANKS = 5, 2
WIDE = 64


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 1)
    )


def inputs_of(rank: int) -> torch.Tensor:
    return torch.randn(4 + rank, WIDTH, generator=torch.Generator().manual_seed(rank))


def run(world: World, step: str) -> dict:
    """Gradients, norms and errors of a model whose matrices are read as their copies in bf16."""
    model = make_model()
    leaves: dict[nn.Parameter, torch.Tensor] = {}
    names: dict[str, torch.Tensor] = {}

    def stand_ins(whole):
        for name, p in whole.items():
            if name.endswith("weight"):
                leaves[p] = names[name] = p.detach().bfloat16().requires_grad_()
        return leaves

    plan = ParallelPlan.data_parallel(world.size)
    dense = parallelise(model, plan, world, units=[], stand_ins=stand_ins)
    given = names if step != "itself" else {k: v for k, v in names.items() if k != "0.weight"}
    if step == "missing":
        given = dict(given) | {"3.weight": names["3.weight"].detach()}
    own = {k: v.float() for k, v in given.items()}  # as products in bf16 hand them on
    functional_call(dense.module, own, (inputs_of(world.rank),)).square().sum().backward()
    norms = dense.norms()
    return {
        "gradients": {n: p.grad for n, p in dense.parameters.items()},
        "left": [n for n, leaf in names.items() if leaf.grad is not None],
        "norms": torch.stack(norms),
        "norm": dense.grad_norm(norms),
        "read again": dense.grad_norm(),
    }


def alone() -> dict[str, torch.Tensor]:
    """The mean of both ranks' gradients, matrices rounded as their copies are."""
    found: dict[str, torch.Tensor] = {}
    for rank in range(RANKS):
        model = make_model()
        leaves = {
            n: p.detach().bfloat16().requires_grad_() if n.endswith("weight") else p
            for n, p in model.named_parameters()
        }
        read = {n: leaf.float() for n, leaf in leaves.items()}
        functional_call(model, read, (inputs_of(rank),)).square().sum().backward()
        for name, leaf in leaves.items():
            found[name] = found.get(name, 0.0) + leaf.grad.float() / RANKS
    return found


def test_gradients_of_stand_ins_are_widened_and_merged():
    expected = alone()
    for found in run_ranks(run, RANKS, "whole"):
        assert not found["left"]
        for name, grad in found["gradients"].items():
            assert grad.dtype == torch.float32
            torch.testing.assert_close(grad, expected[name], rtol=1e-6, atol=1e-7, msg=name)
        wanted = torch.stack([grad.norm() for grad in found["gradients"].values()])
        torch.testing.assert_close(found["norms"], wanted)
        torch.testing.assert_close(found["norm"], wanted.norm())
        torch.testing.assert_close(found["read again"], wanted.norm())


@pytest.mark.parametrize(
    ("step", "said"),
    [("itself", "a gradient of 0.weight itself"), ("missing", "no gradient of 3.weight")],
)
def test_a_parameter_without_its_stand_in_is_refused(step, said):
    with pytest.raises(RuntimeError, match=said):
        run_ranks(run, RANKS, step)


def test_what_nobody_shares_keeps_the_format_of_its_stand_in():
    model = nn.Linear(WIDTH, 1, bias=False)
    leaf = model.weight.detach().bfloat16().requires_grad_()
    copies = CopiedGradients(
        [({"weight": model.weight}, None)], divisor=2, stand_ins={model.weight: leaf}
    )
    copies.forget()
    (leaf.float() * 2.0).sum().backward()
    assert leaf.grad is None
    assert model.weight.grad.dtype == torch.bfloat16
    assert torch.equal(model.weight.grad.float(), torch.ones(1, WIDTH))
    assert not dist.is_initialized()


def test_hooks_keep_no_model_alive_and_refuse_gradients_that_nobody_sums():
    parameter = nn.Parameter(torch.ones(3))
    copies = CopiedGradients([({"weight": parameter}, None)], divisor=1)
    (parameter * 2).sum().backward()
    assert parameter.grad is not None
    loss = (parameter * 2).sum()
    del copies
    gc.collect()
    with pytest.raises(ConfigError, match="must be kept as long as the model is trained"):
        loss.backward()
    alive = weakref.ref(parameter)
    del parameter, loss
    gc.collect()
    assert alive() is None
