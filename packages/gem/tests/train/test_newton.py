"""Newton's method for the map from numbers to logits: its formula, its state, its refusals."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from gem.model.heads import Shortcut, multi_task_loss
from gem.train import newton
from gem.train import step as step_module
from gem.train.loop import train
from gem.train.newton import NewtonMap
from gem.train.run_folder import CHECKPOINTS
from gem_opkit.errors import ConfigError, UnsupportedError

NEWTON = "model.numbers.shortcut_rule=newton"
PERIODS = ("progressive", "valid", "test")


def rows(rng, count, width, tasks):
    """Rows of two tasks, some of whose labels nobody knows, with weights."""
    batch = SimpleNamespace(
        labels_BA=torch.from_numpy(rng.integers(0, 2, (count, tasks))).float(),
        label_mask_BA=torch.from_numpy(rng.random((count, tasks)) < 0.7),
        weights_B=torch.from_numpy(rng.uniform(0.5, 2.0, count)).float(),
    )
    return torch.from_numpy(rng.normal(size=(count, width))).float(), batch


def learn(linear, mover, x_BD, batch, rest_BA, task_weights):
    """One step as the trainer takes it; the rest of the model gives fixed logits."""
    logits_BA = linear(x_BD) + rest_BA
    known_A = (batch.label_mask_BA * batch.weights_B.unsqueeze(1)).sum(0)
    multi_task_loss(logits_BA, batch, task_weights, known_A=known_A).backward()
    mover.observe(x_BD, logits_BA.detach(), batch)
    mover.take(known_A)
    assert linear.linear.weight.grad is None
    mover.step()


@pytest.mark.parametrize("gain", [1.0, 10.0])
def test_steps_are_those_of_the_formula(rng, gain):
    width, tasks, prior, task_weights = 4, 2, 0.3, (1.0, 0.25)
    shortcut = Shortcut(width, tasks, gain=gain)
    mover = NewtonMap(shortcut.linear.weight, prior=prior, gain=gain, task_weights=task_weights)
    w = np.zeros((tasks, width))
    curvature = [np.eye(width) / prior for _ in range(tasks)]
    for _ in range(3):
        x_BD, batch = rows(rng, 40, width, tasks)
        rest_BA = torch.from_numpy(rng.normal(size=(40, tasks))).float()
        learn(shortcut, mover, x_BD, batch, rest_BA, task_weights)
        x, y = x_BD.double().numpy(), batch.labels_BA.numpy()
        for a in range(tasks):
            p = 1 / (1 + np.exp(-(x @ w[a] + rest_BA.double().numpy()[:, a])))
            counts = batch.label_mask_BA.numpy()[:, a] * batch.weights_B.double().numpy()
            curvature[a] += (x * (counts * p * (1 - p))[:, None]).T @ x
            w[a] -= np.linalg.inv(curvature[a]) @ (x.T @ (counts * (p - y[:, a])))
    np.testing.assert_allclose(gain * shortcut.linear.weight.detach().numpy(), w, rtol=2e-5)


def test_one_pass_is_near_the_optimum_of_all_rows(rng):
    """Of correlated inputs; Adam, in the same steps, is not."""
    width, count = 6, 4096
    mixed = rng.normal(size=(width, width)) @ np.diag([3.0, 1.0, 0.5, 0.2, 0.1, 0.05])
    x = rng.normal(size=(count, width)) @ mixed
    x /= x.std(0)
    truth = rng.normal(size=width)
    y = rng.random(count) < 1 / (1 + np.exp(-(x @ truth)))
    x_BD, label_BA = torch.from_numpy(x).float(), torch.from_numpy(y[:, None]).float()
    best = np.zeros(width)
    for _ in range(50):  # of all rows at once, with the same prior
        p = 1 / (1 + np.exp(-(x @ best)))
        hessian = np.eye(width) / 10.0 + (x * (p * (1 - p))[:, None]).T @ x
        best -= np.linalg.solve(hessian, x.T @ (p - y) + best / 10.0)

    def loss(weight):
        z = x @ weight
        return np.mean(np.logaddexp(0, z) - y * z)

    found = {}
    for rule in ("newton", "adam"):
        shortcut = Shortcut(width, 1)
        weight = shortcut.linear.weight
        mover = NewtonMap(weight, prior=10.0, gain=1.0, task_weights=(1.0,))
        adam = torch.optim.Adam([weight], lr=0.01)
        for at in range(0, count, 128):
            part = slice(at, at + 128)
            batch = SimpleNamespace(
                labels_BA=label_BA[part],
                label_mask_BA=torch.ones(128, 1, dtype=torch.bool),
                weights_B=torch.ones(128),
            )
            if rule == "newton":
                learn(shortcut, mover, x_BD[part], batch, torch.zeros(128, 1), (1.0,))
            else:
                adam.zero_grad()
                multi_task_loss(shortcut(x_BD[part]), batch, (1.0,)).backward()
                adam.step()
        found[rule] = loss(weight.detach().double().numpy()[0])
    lowest = loss(best)
    assert found["newton"] - lowest < 0.1 * (found["adam"] - lowest)
    assert found["newton"] - lowest < 2e-3


def test_a_task_of_weight_0_does_not_move(rng):
    shortcut = Shortcut(3, 2)
    mover = NewtonMap(shortcut.linear.weight, prior=1.0, gain=1.0, task_weights=(1.0, 0.0))
    x_BD, batch = rows(rng, 20, 3, 2)
    learn(shortcut, mover, x_BD, batch, torch.zeros(20, 2), (1.0, 0.0))
    weight = shortcut.linear.weight.detach()
    assert weight[0].abs().min() > 0 and not weight[1].any()


def test_a_resumed_run_is_the_unbroken_one_and_parts_are_the_whole(tiny, data_root, tmp_path):
    whole = train(tiny(NEWTON), tmp_path / "whole", data_root=data_root)
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    for step in ("step-10", "step-9"):
        shutil.rmtree(tmp_path / "broken" / CHECKPOINTS / step, ignore_errors=True)
    (tmp_path / "broken" / "summary.json").unlink()
    again = train(tiny(NEWTON), tmp_path / "broken", resume=True, data_root=data_root)
    assert {k: again[k] for k in PERIODS} == {k: whole[k] for k in PERIODS}
    plain = train(tiny(), tmp_path / "plain", data_root=data_root)
    assert plain["progressive"] != whole["progressive"]
    still = ("model.dropout=0.0", NEWTON)
    one = train(tiny(*still), tmp_path / "one", data_root=data_root)
    parts = tiny(*still, "train.accumulation_parts=4")
    four = train(parts, tmp_path / "four", data_root=data_root)
    for period in PERIODS:
        assert four[period]["click"]["ne"] == pytest.approx(one[period]["click"]["ne"], rel=1e-5)


# Where the map is 0 still, loss and gradients are finite, and the squares of the curvature are not.
@pytest.mark.parametrize(("wrong", "at"), [(float("nan"), 4), (1e20, 0)])
def test_a_step_that_is_left_out_leaves_no_trace(tiny, data_root, tmp_path, monkeypatch, wrong, at):
    """Its rows are not in the curvature, and the map stays."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    plain = step_module.TrainStep.__call__

    def held(step):
        weight = step.newton.weight_AD
        return weight.detach().clone(), step.newton.state[weight]["curvature"].clone()

    def spoiling(step, batch, number):
        seen[:] = seen or [held(step)]
        if number == at:
            batch = replace(batch, numbers_BD=batch.numbers_BD.clone().fill_(wrong))
        scored = plain(step, batch, number)
        seen.append(held(step))
        return scored

    monkeypatch.setattr(step_module.TrainStep, "__call__", spoiling)
    # The map alone reads the numbers.
    alone = ("model.numbers.tokens=0", "model.numbers.trunk=false")
    config = tiny(NEWTON, *alone, "train.guard.nonfinite=skip")
    assert train(config, tmp_path, data_root=data_root)["training"]["skipped_steps"] == 1
    for one, other in zip(seen[at], seen[at + 1], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(seen[at + 1], seen[at + 2], strict=True):
        assert not torch.equal(one, other) and torch.isfinite(other).all()


def test_what_does_not_go_with_it_is_refused(tiny):
    model = SimpleNamespace(shortcut=SimpleNamespace(linear=nn.Linear(2, 1, bias=False), gain=1.0))
    with pytest.raises(UnsupportedError, match='shortcut_rule must be "gradient" on several ranks'):
        newton.newton_map(tiny(NEWTON), model, (1.0,), ranks=2)
    with pytest.raises(ConfigError, match='shortcut_rule must be "gradient" without a shortcut'):
        tiny(NEWTON, "model.numbers.shortcut=false")
    with pytest.raises(ConfigError, match='shortcut_prior must come with shortcut_rule = "newton"'):
        tiny("model.numbers.shortcut_prior=1.0")
    with pytest.raises(ConfigError, match=r"lr_factors\.shortcut\.linear must be left out with"):
        tiny(NEWTON, 'train.dense.lr_factors={"shortcut.linear"=2.0}')
    none = SimpleNamespace(shortcut=None)
    with pytest.raises(ConfigError, match=r"without a linear map .* got .* no numbers to read"):
        newton.newton_map(tiny(NEWTON), none, (1.0,), ranks=1)
    users = tiny(NEWTON, "model.user_model.width=4", "model.stream.target_tokens=0")
    with pytest.raises(ConfigError, match=r"without a linear map .* got .* a model of users"):
        newton.newton_map(users, none, (1.0,), ranks=1)
    assert newton.newton_map(tiny(), model, (1.0,), ranks=2) is None
