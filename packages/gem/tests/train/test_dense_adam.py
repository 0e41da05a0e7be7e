"""The optimizer of the dense part on a GPU, and the bf16 weights that forward passes read."""

import copy

import pytest
import torch

from gem.train.dense_adam import DenseAdam, WorkingWeights
from gem_precision.layers import Mlp

SETTINGS = {"betas": (0.8, 0.99), "eps": 1e-6}


def model_and_input(device="cpu"):
    torch.manual_seed(0)
    model = Mlp((12, 32, 32, 4)).to(device)
    return model, torch.randn(64, 12).to(device)


def groups(model):
    first, *rest = model.parameters()
    return [
        {"params": [first], "lr": 0.02, "weight_decay": 0.0},
        {"params": rest, "lr": 0.01, "weight_decay": 0.1},
    ]


def gradients(model, x, forward=None):
    """Loss and gradients under autocast to bf16."""
    model.zero_grad(set_to_none=True)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        out = (forward or model)(x)
    loss = out.float().square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_working_weights_change_no_bit(device):
    model, x = model_and_input(device)
    plain = gradients(model, x)
    expected = [p.grad.clone() for p in model.parameters()]
    working = WorkingWeights(model)
    own = gradients(model, x, lambda x: working.forward(model, x))
    assert all(p.grad is None for p in model.parameters())
    working.hand_over()
    assert torch.equal(own, plain)
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert parameter.grad.dtype == torch.bfloat16
        assert parameter.grad.abs().max() > 0
        assert torch.equal(parameter.grad.float(), grad)


def test_a_weight_that_somebody_wrote_is_copied_again():
    model, x = model_and_input()
    working = WorkingWeights(model)
    with torch.no_grad():
        next(model.parameters()).mul_(2.0)
    assert torch.equal(
        gradients(model, x, lambda x: working.forward(model, x)), gradients(model, x)
    )


@pytest.mark.gpu
def test_copies_follow_a_model_that_is_moved():
    model, x = model_and_input()
    working = WorkingWeights(model)
    model, x = model.cuda(), x.cuda()
    own = gradients(model, x, lambda x: working.forward(model, x))
    working.hand_over()
    assert all(p.grad.is_cuda for p in model.parameters())
    assert torch.equal(own, gradients(model, x))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_steps_are_those_of_torchs_optimizer(device):
    model, x = model_and_input(device)
    twin = copy.deepcopy(model)
    torchs = torch.optim.Adam(groups(twin), **SETTINGS, decoupled_weight_decay=True)
    own = DenseAdam(groups(model), **SETTINGS)
    working = WorkingWeights(model)
    own.copies = working.copies
    for _ in range(3):
        gradients(twin, x)
        norm = torch.nn.utils.clip_grad_norm_(list(twin.parameters()), 0.1)
        torchs.step()
        gradients(model, x, lambda x: working.forward(model, x))
        working.hand_over()
        own.factor = (0.1 / (norm + 1e-6)).clamp(max=1.0)
        own.step()
        working.note_step()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        # A rounding of fp32 moves a product in bf16 by its last bit, and Adam divides by the root.
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(working.copies[parameter], parameter.bfloat16())
    # Either goes on from the other's state.
    torchs.load_state_dict(own.state_dict())
    own.load_state_dict(torchs.state_dict())
    assert {float(s["step"]) for s in own.state.values()} == {3.0}


def test_weights_without_a_gradient_stay():
    model, _ = model_and_input()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = DenseAdam(groups(model), **SETTINGS)
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    optimizer.step()
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert moved == [True, False, False]
    assert len(optimizer.state) == 1
    first.grad = None
    optimizer.step()  # nobody has one
    assert float(optimizer.state[first]["step"]) == 1.0


def test_a_step_tells_nothing_of_weights_that_it_left_alone():
    model, x = model_and_input()
    working = WorkingWeights(model)
    first, *rest = model.parameters()
    # Somebody writes, and a step without the copies moves other weights before they are read.
    with torch.no_grad():
        first.mul_(2.0)
    for parameter in rest:
        parameter.grad = torch.zeros_like(parameter, dtype=torch.bfloat16)
    optimizer = DenseAdam(groups(model), **SETTINGS)
    optimizer.copies = working.copies
    optimizer.step()
    working.note_step()
    own = gradients(model, x, lambda x: working.forward(model, x))
    assert torch.equal(working.copies[first], first.bfloat16())
    assert torch.equal(own, gradients(model, x))


def test_weights_that_do_not_learn_have_no_copies():
    model, x = model_and_input()
    first, *rest = model.parameters()
    first.requires_grad_(requires_grad=False)
    working = WorkingWeights(model)
    gradients(model, x, lambda x: working.forward(model, x))
    working.hand_over()
    assert first.grad is None
    assert all(p.grad is not None for p in rest)
