"""Heads and loss: tasks x domains, masks, weights, and nothing known at all."""

import math
from dataclasses import replace

import pytest
import torch
from batches import PLAIN, ragged_batch, take_rows
from torch.nn import functional as F

from gem.model.heads import Shortcut, TaskHeads, known_weight, multi_task_loss
from gem.model.spec import DinSpec, GemSpec, HeadsSpec
from gem.model.structure import loss_weights
from gem_opkit.errors import ConfigError

WIDTH = 6


def heads(**changes):
    return TaskHeads(WIDTH, HeadsSpec(**changes), PLAIN, activation="relu")


@pytest.mark.parametrize("trunk_widths", [(), (5,), (5, 4)])
@pytest.mark.parametrize("task_widths", [(), (3,)])
@pytest.mark.parametrize("domain_outputs", [True, False])
def test_logit_is_that_of_the_example_s_domain(trunk_widths, task_widths, domain_outputs):
    module = heads(
        trunk_widths=trunk_widths, task_widths=task_widths, domain_outputs=domain_outputs
    )
    torch.nn.init.normal_(module.offset)
    x_BD, domains_B = torch.randn(4, WIDTH), torch.tensor([0, 1, 1, 0])
    logits_BA = module(x_BD, domains_B)
    assert logits_BA.shape == (4, 2)
    for row in range(4):
        for task in range(2):
            domain = int(domains_B[row]) if domain_outputs else 0
            hidden = module.trunk(x_BD[row])
            hidden = module.towers[task](hidden) if task_widths else hidden
            want = hidden @ module.weight[task, :, domain] + module.offset[task, domain]
            torch.testing.assert_close(logits_BA[row, task], want)


def test_offset_starts_at_the_base_rate():
    module = heads(base_rates={"conversion": 0.02}, init_gain=0.0)
    rate = torch.sigmoid(module(torch.randn(3, WIDTH), torch.tensor([0, 1, 0])))
    torch.testing.assert_close(rate, torch.tensor([[0.5, 0.02]] * 3))


def test_hidden_layers_end_in_an_activation():
    module = heads(trunk_widths=(5,))
    assert torch.all(module.trunk(torch.randn(20, WIDTH)) >= 0)


def test_unknown_task_is_refused():
    with pytest.raises(ConfigError, match=r"heads.base_rates must name tasks.*got like"):
        heads(base_rates={"like": 0.5})
    with pytest.raises(ConfigError, match=r"heads.task_weights must name tasks.*got like"):
        heads(task_weights={"like": 0.5})


def test_shortcut_starts_at_zero_and_gain_scales_it():
    numbers_BD = torch.randn(4, 3)
    assert torch.equal(Shortcut(3, 2)(numbers_BD), torch.zeros(4, 2))
    once, thrice = Shortcut(3, 2), Shortcut(3, 2, gain=3.0)
    for module in (once, thrice):
        torch.nn.init.ones_(module.linear.weight)
    torch.testing.assert_close(3 * once(numbers_BD), thrice(numbers_BD))


def loss_batch():
    batch = ragged_batch(5, schema=PLAIN)
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1], [1, 0]], dtype=torch.bool)
    return replace(batch, label_mask_BA=mask, weights_B=torch.tensor([1.0, 2.0, 1.0, 0.5, 0.0]))


def test_loss_is_the_weighted_mean_over_known_labels():
    batch, logits_BA = loss_batch(), torch.randn(5, 2)
    want = 0.0
    for task, task_weight in enumerate((1.0, 0.25)):
        total = count = 0.0
        for row in range(5):
            if batch.label_mask_BA[row, task]:
                y, z = float(batch.labels_BA[row, task]), float(logits_BA[row, task])
                p = 1.0 / (1.0 + math.exp(-z))
                weight = float(batch.weights_B[row])
                total -= weight * (y * math.log(p) + (1 - y) * math.log(1 - p))
                count += weight
        want += task_weight * total / count
    loss = multi_task_loss(logits_BA, batch, (1.0, 0.25))
    assert float(loss) == pytest.approx(want, rel=1e-5)


def test_unknown_labels_and_weightless_examples_give_no_gradient():
    batch = loss_batch()
    logits_BA = torch.randn(5, 2, requires_grad=True)
    multi_task_loss(logits_BA, batch, (1.0, 1.0)).backward()
    counted = batch.label_mask_BA & (batch.weights_B > 0).unsqueeze(1)
    assert torch.equal(logits_BA.grad != 0, counted)


@pytest.mark.parametrize("rows", [(), (2,)], ids=["no-examples", "no-labels"])
def test_nothing_known_is_zero_with_zero_gradient(rows):
    batch = take_rows(loss_batch(), rows)
    logits_BA = torch.randn(len(rows), 2, requires_grad=True)
    loss = multi_task_loss(logits_BA, batch, (1.0, 1.0))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits_BA.grad, torch.zeros(len(rows), 2))


@pytest.mark.parametrize("known_A", [None, torch.zeros(2)], ids=["own", "of-all-ranks"])
def test_nothing_known_has_zero_gradient_under_large_factors(known_A):
    """Task weights and the number of ranks multiply the loss; 0 times infinity would be NaN."""
    batch = take_rows(loss_batch(), (2,))
    logits_BA = torch.randn(1, 2, requires_grad=True)
    (64 * multi_task_loss(logits_BA, batch, (100.0, 1.0), known_A=known_A)).backward()
    assert torch.equal(logits_BA.grad, torch.zeros(1, 2))


def test_losses_of_ranks_add_up_to_the_loss_of_the_whole():
    batch, logits_BA = loss_batch(), torch.randn(5, 2)
    known_A = known_weight(batch)
    whole = multi_task_loss(logits_BA, batch, (1.0, 0.5))
    parts = sum(
        multi_task_loss(logits_BA[list(rows)], take_rows(batch, rows), (1.0, 0.5), known_A=known_A)
        for rows in ((0, 1), (2,), (), (3, 4))
    )
    torch.testing.assert_close(whole, parts)


def test_loss_equals_torch_s_where_everything_is_known():
    batch, logits_BA = ragged_batch(6, schema=PLAIN), torch.randn(6, 2)
    want = F.binary_cross_entropy_with_logits(logits_BA, batch.labels_BA)
    torch.testing.assert_close(multi_task_loss(logits_BA, batch, (0.5, 0.5)), want)


@pytest.mark.parametrize("kind", [GemSpec, DinSpec])
def test_loss_weights_follow_the_order_of_the_labels(kind):
    spec = kind(heads=HeadsSpec(task_weights={"conversion": 0.25}))
    assert loss_weights(spec, PLAIN) == (1.0, 0.25)


def test_wrong_number_of_task_weights_is_refused():
    with pytest.raises(ConfigError, match="one weight for each of 2 tasks; got 1"):
        multi_task_loss(torch.zeros(5, 2), loss_batch(), (1.0,))
