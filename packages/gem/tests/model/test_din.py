"""DIN: what its attention computes, and the edges that the hybrid is held to as well."""

from dataclasses import replace

import pytest
import torch
from batches import PLAIN, SCHEMA, ragged_batch, random_batch, take_rows

from gem.model.build import build_model
from gem.model.din import TargetAttention
from gem.model.heads import multi_task_loss
from gem.model.spec import DinSpec
from gem_jagged.batch import Layout
from gem_opkit.errors import ConfigError

SMALL = {
    "width": 6,
    "attention_widths": [5],
    "embeddings": {"embedding_dim": 4, "init_std": 0.5},
    "heads": {"trunk_widths": [8], "init_gain": 1.0},
}


def model_of(schema=SCHEMA, **changes):
    torch.manual_seed(0)
    return build_model(DinSpec.model_validate({**SMALL, **changes}), schema)


@pytest.mark.parametrize("mean", [False, True])
def test_attention_is_the_weighted_sum_of_each_history(mean):
    attention = TargetAttention(4, (5,), activation="relu", mean=mean)
    layout = Layout.from_lengths([2, 0, 3])
    x_TD, candidate_BD = torch.randn(5, 4), torch.randn(3, 4)
    pooled_BD = attention(x_TD, layout, candidate_BD)
    for row, events in enumerate(x_TD.split([2, 0, 3])):
        want = torch.zeros(4)
        for event in events:
            candidate = candidate_BD[row]
            pair = torch.cat([event, candidate, event - candidate, event * candidate])
            want = want + attention.mlp(pair) * event
        want = want / max(len(events), 1) if mean else want
        torch.testing.assert_close(pooled_BD[row], want)


@pytest.mark.parametrize(
    "lengths",
    [
        {"clicks": [3, 1, 5], "views": [2, 2, 1]},
        {"clicks": [0, 1, 5], "views": [0, 2, 1]},
        {"clicks": [0, 0, 0], "views": [0, 0, 0]},
        {"clicks": [4], "views": [0]},
        {"clicks": [], "views": []},
    ],
    ids=["nothing-empty", "first-empty", "all-empty", "one-example", "no-examples"],
)
def test_empty_things_forward_and_backward(lengths):
    model, batch = model_of(), random_batch(lengths)
    logits_BA = model(batch)
    assert logits_BA.dtype == torch.float32
    loss = multi_task_loss(logits_BA, batch, (1.0, 1.0))
    loss.backward()
    assert torch.isfinite(loss)
    for name, p in model.named_parameters():
        if p.grad is not None:
            gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
            assert torch.isfinite(gradient).all(), name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shortcut": True},
        {"gap_buckets": 0},
        {"pooling": "mean"},
        {"leave_out": ["user", "age", "clicks.action"]},
    ],
    ids=str,
)
def test_every_parameter_gets_a_gradient(changes):
    model, batch = model_of(**changes), ragged_batch(8)
    multi_task_loss(model(batch), batch, (1.0, 1.0)).backward()
    idle = [
        name
        for name, p in model.named_parameters()
        if p.grad is None or not p.grad.to_dense().abs().sum() > 0
    ]
    assert idle == []


def test_alone_equals_in_batch():
    model, batch = model_of(), ragged_batch(6)
    whole = model(batch)
    for row in range(6):
        alone = model(take_rows(batch, [row]))
        torch.testing.assert_close(alone[0], whole[row], rtol=1e-4, atol=1e-5)


def test_every_input_reaches_the_logits():
    model, batch = model_of(), random_batch({"clicks": [4, 3], "views": [5, 2]})
    base = model(batch)
    changed = {"domain": replace(batch, domains_B=1 - batch.domains_B)}
    for column in range(3):
        numbers_BD = batch.numbers_BD.clone()
        numbers_BD[:, column] += 1
        changed[f"number {column}"] = replace(batch, numbers_BD=numbers_BD)
    for name, ids in batch.ids.items():
        other = ids.with_values((ids.values + 1) % 8)
        changed[name] = replace(batch, ids={**batch.ids, name: other})
    for name, stream in batch.streams.items():
        for field, ids in stream.ids.items():
            other = {**stream.ids, field: ids.with_values((ids.values + 1) % 4)}
            moved = replace(stream, ids=other)
            streams = {**batch.streams, name: moved}
            changed[f"{name}.{field}"] = replace(batch, streams=streams)
        gaps = stream.gap_seconds.with_values(stream.gap_seconds.values * 100)
        streams = {**batch.streams, name: replace(stream, gap_seconds=gaps)}
        changed[f"{name}.gap"] = replace(batch, streams=streams)
    for what, other in changed.items():
        assert not torch.allclose(model(other), base, rtol=0, atol=1e-7), what


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 5},
        {"attention_widths": [4]},
        {"embeddings": {"embedding_dim": 5}},
        {"gap_buckets": 3},
        {"pooling": "mean"},
        {"activation": "gelu"},
        {"heads": {"trunk_widths": [7]}},
        {"leave_out": ["age"]},
    ],
    ids=str,
)
def test_each_setting_changes_the_prediction(changes):
    batch = ragged_batch(8)
    assert not torch.allclose(model_of(**changes)(batch), model_of()(batch), rtol=0, atol=1e-7)


def test_shortcut_learns_and_starts_at_zero():
    batch = ragged_batch(8)
    model = model_of(shortcut=True)
    torch.testing.assert_close(model(batch), model_of()(batch))
    torch.nn.init.ones_(model.shortcut.linear.weight)
    want = model_of()(batch) + batch.numbers_BD.sum(1, keepdim=True)
    torch.testing.assert_close(model(batch), want)


def test_without_streams_it_needs_no_candidate():
    schema = PLAIN.model_copy(update={"item": None})
    assert model_of(schema)(ragged_batch(4, schema=schema)).shape == (4, 2)
    with pytest.raises(ConfigError, match=r"schema\.item must name one of the id features"):
        model_of(SCHEMA.model_copy(update={"item": None}))
