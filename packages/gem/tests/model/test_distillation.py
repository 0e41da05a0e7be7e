"""Distillation: the auxiliary head and the adapter, and that neither is served."""

from dataclasses import replace

import pytest
import torch
from batches import SCHEMA, ragged_batch
from torch.nn import functional as F

from gem.data.schema import VectorInput
from gem.model.build import build_model
from gem.model.heads import auxiliary_loss
from gem.model.spec import GemSpec
from gem_opkit.errors import ConfigError, DataError

TAUGHT = SCHEMA.model_copy(update={"teacher": True})
SMALL = {
    "width": 8,
    "summary_tokens": 2,
    "summary_hidden": 8,
    "embeddings": {"embedding_dim": 4, "init_std": 0.5},
    "stream": {"width": 8, "seeds": 2, "summary_tokens": 2},
    "experts": {"fm_tokens": 2, "linear_tokens": 2, "rank": 2, "mlp_widths": [8]},
    "heads": {"trunk_widths": [8], "init_gain": 1.0},
}


def student(*, schema=TAUGHT, **settings):
    torch.manual_seed(5)
    return build_model(GemSpec.model_validate({**SMALL, "distillation": settings}), schema)


def taught_batch():
    batch = ragged_batch(seed=1)
    teacher_BA = torch.linspace(-2.0, 2.0, 12).view(6, 2)
    teacher_BA[2, 0] = float("nan")
    teacher_BA[4] = float("nan")
    mask_BA = torch.ones(6, 2, dtype=torch.bool)
    mask_BA[0, 1] = False
    return replace(
        batch,
        teacher_BA=teacher_BA,
        label_mask_BA=mask_BA,
        weights_B=torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0, 1.0]),
    )


def read_by_heads(model, batch):
    seen = []
    hook = model.heads.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.eval()(batch)
    hook.remove()
    model.train()
    return seen[0].detach()


def test_the_losses_are_cross_entropies_of_what_the_teacher_said():
    model, batch = student(adapter=False, weight=3.0).train(), taught_batch()
    _, sums_K = model(batch)
    logits_BA = model.distillation.head(read_by_heads(model, batch))
    want = [0.0, 0.0]
    for row in range(6):
        for task in range(2):
            said = batch.teacher_BA[row, task]
            if not said.isnan():
                loss = F.binary_cross_entropy_with_logits(logits_BA[row, task], said.sigmoid())
                want[task] += 3.0 * float(loss * batch.weights_B[row])
    assert sums_K[:2].tolist() == pytest.approx(want, rel=1e-5)
    assert sums_K[2:].tolist() == [0.0, 0.0]
    assert model.auxiliary_known(batch)[:2].tolist() == [4.5, 5.5]
    assert model.auxiliary_known(batch)[2:].tolist() == [4.5, 4.5]


def test_the_adapter_begins_with_the_teacher_and_learns_from_labels_alone():
    model, batch = student().train(), taught_batch()
    _, sums_K = model(batch)
    fits_BA = F.binary_cross_entropy_with_logits(
        batch.teacher_BA.nan_to_num(), batch.labels_BA, reduction="none"
    )
    counted = ~batch.teacher_BA.isnan() & batch.label_mask_BA
    want = (fits_BA * counted * batch.weights_B.unsqueeze(1)).sum(0)
    torch.testing.assert_close(sums_K[2:], want)
    sums_K[2:].sum().backward()
    moved = {
        name
        for name, weight in model.named_parameters()
        if weight.grad is not None and weight.grad.to_dense().abs().max() > 0
    }
    assert moved == {"distillation.correct.weight"}  # what is behind it begins at 0


def test_the_head_learns_what_the_adapter_says():
    model, batch = student().train(), taught_batch()
    with torch.no_grad():
        model.distillation.correct.weight.normal_()
    x_BD = read_by_heads(model, batch)
    own = model.distillation
    said = batch.teacher_BA.nan_to_num()
    corrected = said + own.correct(torch.relu(own.adapter(torch.cat([said, x_BD], dim=1))))
    loss_BA = F.binary_cross_entropy_with_logits(
        own.head(x_BD), corrected.sigmoid(), reduction="none"
    )
    weight_BA = ~batch.teacher_BA.isnan() * batch.weights_B.unsqueeze(1)
    _, sums_K = model(batch)
    torch.testing.assert_close(sums_K[:2], (loss_BA * weight_BA).sum(0))


def test_what_is_served_knows_neither_head_nor_teacher():
    model, batch = student().eval(), taught_batch()
    before = model(batch)
    with torch.no_grad():
        for weight in model.distillation.parameters():
            weight.normal_()
    assert torch.equal(model(replace(batch, teacher_BA=None)), before)


def test_the_teacher_reaches_the_layers_through_the_auxiliary_head():
    model, batch = student().train(), taught_batch()
    _, sums_K = model(batch)
    auxiliary_loss(sums_K, model.auxiliary_known(batch)).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert any(name.startswith("layers.") for name in grads)
    assert not any(name.startswith("heads.") for name in grads)


def test_training_without_the_teachers_logits_is_refused():
    model = student().train()
    with pytest.raises(DataError, match=r"batch\.teacher_BA must be there in training"):
        model(replace(taught_batch(), teacher_BA=None))


def test_a_section_without_its_other_half_is_refused():
    with pytest.raises(ConfigError, match="must come with a teacher's predictions"):
        student(schema=SCHEMA)
    with pytest.raises(ConfigError, match=r"distillation must say what becomes of"):
        build_model(GemSpec.model_validate(SMALL), TAUGHT)


READING = SCHEMA.model_copy(update={"vectors": (VectorInput(name="upstream", width=3),)})


def test_a_cached_embedding_is_a_token_and_none_is_a_learned_one():
    torch.manual_seed(0)
    model = build_model(GemSpec.model_validate(SMALL), READING).eval()
    batch = ragged_batch(seed=1)
    vectors = torch.tensor([[0.3, -1.0, 2.0, 1.0]] * 3 + [[0.0, 0.0, 0.0, 0.0]] * 3)
    given = replace(batch, vectors_BV=vectors)
    before = model(given)
    with torch.no_grad():
        model.features.vectors[0].missing.fill_(2.0)
    after = model(given)
    assert torch.equal(before[:3], after[:3])  # whoever has one does not read the other
    assert not torch.allclose(before[3:], after[3:])
    other = replace(batch, vectors_BV=vectors * torch.tensor([2.0, 1.0, 1.0, 1.0]))
    assert not torch.allclose(model(other)[:3], after[:3])
    assert torch.equal(model(other)[3:], after[3:])


@pytest.mark.parametrize("columns", [None, 3, 8])
def test_a_batch_without_its_embeddings_is_refused(columns):
    model = build_model(GemSpec.model_validate(SMALL), READING).eval()
    given = None if columns is None else torch.zeros(6, columns)
    with pytest.raises(DataError, match=r"batch\.vectors_BV must have 4 columns"):
        model(replace(ragged_batch(seed=1), vectors_BV=given))


def test_embeddings_that_no_input_names_are_refused():
    model = build_model(GemSpec.model_validate(SMALL), SCHEMA).eval()
    with pytest.raises(DataError, match=r"batch\.vectors_BV must have 0 columns"):
        model(replace(ragged_batch(seed=1), vectors_BV=torch.zeros(6, 4)))
