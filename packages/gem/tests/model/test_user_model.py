"""A model of users: what it may read, what it is trained by, against hand-written oracles."""

import math
from dataclasses import replace

import pytest
import torch
from batches import SCHEMA, ragged_batch, random_batch
from pydantic import ValidationError

from gem.data.schema import VectorInput
from gem.model.build import build_model
from gem.model.heads import auxiliary_loss
from gem.model.spec import GemSpec
from gem.model.structure import context_is_of_user
from gem.model.tokenize import gap_basis
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError

OWNED = SCHEMA.model_copy(update={"of_user": ("user", "age"), "of_item": ("item", "genre")})
USER = {
    "width": 8,
    "layers": ["transformer", "interaction"],
    "summary_tokens": 2,
    "summary_hidden": 8,
    "embeddings": {"embedding_dim": 4, "init_std": 0.5},
    "stream": {"width": 8, "seeds": 2, "summary_tokens": 2, "target_tokens": 0, "pattern": "full"},
    "experts": {"fm_tokens": 2, "linear_tokens": 2, "rank": 2, "mlp_widths": [8]},
    "heads": {"trunk_widths": [8]},
    "user_model": {"width": 6, "next_event_task": "click", "next_event_weight": 0.5},
}


def user_model(**changes):
    spec = GemSpec.model_validate({**USER, **changes})
    torch.manual_seed(3)
    model = build_model(spec, OWNED)
    with torch.no_grad():  # heads begin at 0, where nothing would show
        for weight in (model.heads.mixed.weight, model.heads.gap.weight):
            weight.normal_(std=0.3)
    return model


def test_the_embedding_knows_nothing_of_candidate_labels_or_moment():
    model, batch = user_model().eval(), ragged_batch(seed=1)
    other = ragged_batch(seed=2)
    swapped = replace(
        batch,
        ids={"user": batch.ids["user"], "item": other.ids["item"], "genre": other.ids["genre"]},
        numbers_BD=torch.cat([batch.numbers_BD[:, :1], other.numbers_BD[:, 1:]], dim=1),
        labels_BA=other.labels_BA,
        domains_B=other.domains_B,
    )
    before, after = model.user_vectors(batch), model.user_vectors(swapped)
    assert torch.equal(before, after)
    assert not torch.allclose(model(batch), model(swapped))
    # And it is a function of what the user is and did.
    aged = replace(batch, numbers_BD=batch.numbers_BD + torch.tensor([1.0, 0.0, 0.0]))
    assert not torch.allclose(before, model.user_vectors(aged))


def test_the_embedding_does_not_age_with_the_clock():
    model, batch = user_model().eval(), ragged_batch(seed=1)
    later = replace(
        batch,
        streams={
            name: replace(
                stream, gap_seconds=stream.gap_seconds.with_values(stream.gap_seconds.values + 5e4)
            )
            for name, stream in batch.streams.items()
        },
    )
    torch.testing.assert_close(
        model.user_vectors(batch), model.user_vectors(later), rtol=1e-3, atol=1e-4
    )


def test_users_without_candidates_are_embedded_alike():
    model, batch = user_model().eval(), ragged_batch(seed=1)
    alone = replace(batch, ids={"user": batch.ids["user"]})
    assert torch.equal(model.user_vectors(batch), model.user_vectors(alone))


def test_losses_are_those_of_a_loop():
    model, batch = user_model().train(), ragged_batch(examples=8, seed=4)
    items = torch.tensor([7, 3, 7, 9, 3, 7, 1, 0])
    batch = replace(
        batch,
        ids={**batch.ids, "item": batch.ids["item"].with_values(items)},
        weights_B=torch.linspace(0.5, 2.0, 8),
    )
    _, sums_K = model(batch)
    user = model.user_vectors(batch).double()
    item = model.item_vectors(batch.ids).double()
    want, weights = 0.0, 0.0
    for row in range(8):
        scores = []
        for other in range(8):
            if other != row and items[other] == items[row]:
                continue
            drawn = int((items == items[other]).sum())
            score = float(user[row] @ item[other]) / math.sqrt(6) - math.log(drawn)
            scores.append((other == row, score))
        top = math.log(sum(math.exp(score) for _, score in scores))
        own = next(score for is_own, score in scores if is_own)
        if batch.labels_BA[row, 0] >= 0.5:
            want += float(batch.weights_B[row]) * (top - own) * 0.5
            weights += float(batch.weights_B[row])
    assert float(sums_K[0]) == pytest.approx(want, rel=1e-4)
    known_K = model.auxiliary_known(batch)
    assert float(known_K[0]) == pytest.approx(weights)
    gap_loss, gap_weight = 0.0, 0.0
    logits = (user.float() @ model.heads.gap.weight.t()).double()
    for row in range(8):
        latest = [
            float(part[-1])
            for stream in batch.streams.values()
            if len(part := stream.gap_seconds.to_list()[row])
        ]
        if latest:
            target = gap_basis(torch.tensor([min(latest)]), 16)[0].double()
            gap_loss -= float(batch.weights_B[row] * (target @ logits[row].log_softmax(0))) * 0.1
            gap_weight += float(batch.weights_B[row])
    assert float(sums_K[1]) == pytest.approx(gap_loss, rel=1e-4)
    assert float(known_K[1]) == pytest.approx(gap_weight)
    loss = auxiliary_loss(sums_K, known_K)
    assert float(loss) == pytest.approx(want / weights + gap_loss / gap_weight, rel=1e-4)


def test_a_batch_without_positives_or_events_has_no_loss_of_either():
    model = user_model().train()
    batch = random_batch({"clicks": [0, 0], "views": [0, 0]})
    batch = replace(batch, labels_BA=torch.zeros(2, 2))
    _, sums_K = model(batch)
    known_K = model.auxiliary_known(batch)
    assert known_K.tolist() == [0.0, 0.0]
    assert float(auxiliary_loss(sums_K, known_K)) == 0.0
    auxiliary_loss(sums_K, known_K).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.isfinite(g.to_dense()).all() for g in grads)


def test_evaluation_gives_logits_alone_and_items_are_scored_by_their_product():
    model, batch = user_model().eval(), ragged_batch(seed=5)
    logits_BA = model(batch)
    assert logits_BA.shape == (6, 2)
    assert logits_BA.dtype == torch.float32
    everything = {
        "item": Jagged.from_lengths(torch.arange(50), torch.ones(50, dtype=torch.int64)),
        "genre": Jagged.from_lengths(torch.zeros(0, dtype=torch.int64), [0] * 50),
    }
    vectors_RU = model.item_vectors(everything)
    assert vectors_RU.shape == (50, 6)
    assert model.user_vectors(batch).pow(2).mean(1).allclose(torch.ones(6), atol=1e-3)


def test_scores_of_next_items_are_fp32_under_autocast_too():
    """Rounded to bf16 a score of 8 would be up to 0.03 off, in a softmax over a whole batch."""
    heads = user_model().heads
    user_BU, item_RE = torch.randn(64, 6) * 4.0, torch.randn(64, heads.item.in_features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores_BR = heads.next_scores(user_BU, item_RE)
        item_RU = heads.item(item_RE)
    assert scores_BR.dtype == torch.float32
    want = user_BU.double() @ item_RU.double().t() * 6**-0.5
    torch.testing.assert_close(scores_BR.double(), want, rtol=1e-5, atol=1e-5)


def test_layers_are_said_to_be_the_same_for_all_candidates():
    assert context_is_of_user(GemSpec.model_validate(USER))
    assert not context_is_of_user(GemSpec())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stream": {"width": 8}}, "target_tokens must be 0"),
        ({"distillation": {}}, "distillation must be left out"),
        ({"user_model": {"width": 0}}, "greater than 0"),
        ({"user_model": {"time_gap_knots": 1}}, "greater than or equal to 2"),
    ],
)
def test_what_a_model_of_users_cannot_have(changes, said):
    with pytest.raises(ValidationError, match=said):
        GemSpec.model_validate({**USER, **changes})


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (OWNED.model_copy(update={"of_user": ()}), "read inputs of the user"),
        (OWNED.model_copy(update={"item": None}), "the candidate's id"),
        (
            OWNED.model_copy(update={"vectors": (VectorInput(name="up", width=3),)}),
            "read no embeddings of users",
        ),
    ],
)
def test_data_that_a_model_of_users_cannot_read(schema, said):
    with pytest.raises(ConfigError, match=said):
        build_model(GemSpec.model_validate(USER), schema)


def test_the_task_of_next_items_has_to_be_one():
    spec = GemSpec.model_validate({**USER, "user_model": {"next_event_task": "buy"}})
    with pytest.raises(ConfigError, match=r"next_event_task must name tasks.*got buy"):
        build_model(spec, OWNED)
