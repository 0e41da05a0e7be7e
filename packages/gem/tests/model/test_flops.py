"""FLOPs from plain integers against torch's counter over the real modules."""

from dataclasses import replace

import pytest
import torch
from batches import PLAIN, SCHEMA, ragged_batch, random_batch
from pydantic import TypeAdapter
from torch.utils.flop_counter import FlopCounterMode

from gem.data.schema import VectorInput
from gem.model.build import build_model
from gem.model.flops import PassFlops, batch_flops, total_flops, training_flops
from gem.model.heads import multi_task_loss
from gem.model.spec import GemSpec, ModelSpec

GEM = {
    "kind": "gem",
    "width": 16,
    "summary_tokens": 2,
    "summary_hidden": 8,
    "embeddings": {"embedding_dim": 8},
    "stream": {"width": 8, "summary_tokens": 2, "seeds": 4, "window_tokens": 3},
    "streams": {"clicks": {"width": 16}},
    "experts": {"fm_tokens": 2, "linear_tokens": 3, "rank": 3, "mlp_widths": [8]},
    "heads": {"trunk_widths": [8]},
}
DIN = {"kind": "din", "width": 8, "attention_widths": [4], "embeddings": {"embedding_dim": 4}}
SPECS = [
    GEM,
    {**GEM, "layers": ["transformer", "interaction"]},
    {**GEM, "transformer_gate": False},
    {
        **GEM,
        "layers": ["transformer", "interaction", "transformer", "interaction"],
        "stream": {"width": 8, "window_tokens": 1, "full_layers": [2]},
    },
    {**GEM, "streams": {"clicks": {"layers": [0]}, "views": {"layers": []}}},
    {**GEM, "stream": {"width": 8, "pattern": "full", "target_tokens": 3, "qk_norm": False}},
    {**GEM, "stream": {"width": 8, "pattern": "block", "block_tokens": 4, "summary_tokens": 0}},
    {**GEM, "stream": {"width": 8, "max_events": 3, "token_hidden": 5, "target_tokens": 0}},
    {**GEM, "embeddings": {"embedding_dim": 16}, "numbers": {"tokens": 2, "buckets": 3}},
    {**GEM, "experts": {"count": 3, "projection": "attentive", "mlp_widths": [8, 4]}},
    {**GEM, "experts": {"partition": "all", "residual": False}},
    {**GEM, "heads": {"task_widths": [4, 3], "domain_outputs": False}},
    {**GEM, "numbers": {"trunk": False, "shortcut": False}},
    {**GEM, "leave_out": ["user", "age", "rate", "count", "clicks.action"]},
    {
        **GEM,
        "layers": ["both", "transformer", "both"],
        "stream": {"width": 8, "pooling": "pma", "full_layers": [0], "ffn_hidden": 5},
    },
    {
        **GEM,
        "layers": ["interaction", "interaction"],
        "stream": {"width": 8, "ffn": "none", "pooling": "mean", "recent_tokens": 3, "layers": [0]},
        "streams": {"clicks": {"summary_tokens": 1, "target_tokens": 0}},
        "experts": {"count": 4, "kinds": ["cross", "dot", "mlp", "attention"], "mlp_widths": [8]},
    },
    {
        **GEM,
        "stream": {"width": 8, "target_attention": "din", "target_hidden": 6, "summary_tokens": 0},
        "experts": {"count": 1, "kinds": ["cross"], "cross_layers": 3, "residual": False},
    },
    DIN,
    {**DIN, "shortcut": True, "gap_buckets": 0, "leave_out": ["age", "clicks.action"]},
    {**DIN, "leave_out": ["age", "rate", "count", "views.item"]},
]


def read(given):
    return TypeAdapter(ModelSpec).validate_python(given)


def counted(spec, schema, batch):
    """What torch's counter sees in a forward and in a whole step."""
    model = build_model(spec, schema)
    with FlopCounterMode(display=False) as counter:
        found = model(batch)
        logits_BA, sum_K = found if isinstance(found, tuple) else (found, None)
        forward = counter.get_total_flops()
        loss = multi_task_loss(logits_BA, batch, (1.0,) * len(schema.labels))
        (loss if sum_K is None else loss + sum_K.sum()).backward()
        total = counter.get_total_flops()
    return PassFlops(forward, total - forward)


@pytest.mark.parametrize("given", SPECS, ids=str)
def test_equals_torch_s_counter(given):
    spec = read(given)
    batch = ragged_batch(7)
    assert batch_flops(spec, SCHEMA, batch) == counted(spec, SCHEMA, batch)


USER_STREAM = {"width": 8, "summary_tokens": 2, "seeds": 4, "target_tokens": 0}
OWNED = {"of_user": ("user", "age"), "of_item": ("item", "genre")}


@pytest.mark.parametrize(
    ("changes", "inputs"),
    [
        ({"stream": USER_STREAM, "streams": {}, "user_model": {"width": 5}}, OWNED),
        ({"distillation": {"hidden_widths": [6, 5], "adapter_hidden": 7}}, {"teacher": True}),
        ({"distillation": {"adapter": False}}, {"teacher": True}),
        ({}, {"vectors": (VectorInput(name="a", width=3), VectorInput(name="b", width=6))}),
    ],
    ids=["user model", "distillation", "no adapter", "cached embeddings"],
)
def test_what_models_give_one_another_is_counted(changes, inputs):
    spec, schema = read({**GEM, **changes}), SCHEMA.model_copy(update=inputs)
    batch = ragged_batch(7)
    vectors_BV, teacher_BA = torch.ones(7, 11), torch.zeros(7, 2)
    batch = replace(
        batch,
        vectors_BV=vectors_BV if schema.vectors else None,
        teacher_BA=teacher_BA if schema.teacher else None,
    )
    assert batch_flops(spec, schema, batch) == counted(spec, schema, batch)


@pytest.mark.parametrize(
    "lengths",
    [
        {"clicks": [0, 0, 0], "views": [0, 0, 0]},
        {"clicks": [0, 5, 0], "views": [1, 0, 30]},
        {"clicks": [3], "views": [2]},
    ],
    ids=str,
)
@pytest.mark.parametrize("given", [GEM, DIN], ids=["gem", "din"])
def test_empty_histories_cost_nothing(given, lengths):
    spec, batch = read(given), random_batch(lengths)
    assert batch_flops(spec, SCHEMA, batch) == counted(spec, SCHEMA, batch)


@pytest.mark.parametrize("given", [GEM, DIN], ids=["gem", "din"])
def test_schema_without_streams(given):
    spec = read({key: value for key, value in given.items() if key != "streams"})
    batch = ragged_batch(4, schema=PLAIN)
    assert batch_flops(spec, PLAIN, batch) == counted(spec, PLAIN, batch)


def test_parts_are_submodules_and_add_up():
    spec, batch = read(GEM), ragged_batch(7)
    lengths = {n: s.numbers.lengths.tolist() for n, s in batch.streams.items()}
    parts = training_flops(spec, SCHEMA, examples=7, lengths=lengths)
    model = build_model(spec, SCHEMA)
    for name in parts:
        model.get_submodule(name)
    assert total_flops(parts.values()) == batch_flops(spec, SCHEMA, batch)
    assert all(part.forward > 0 for part in parts.values())


def test_by_hand_on_a_tiny_model():
    # One example, one feature token of width 4, three events: every product written out.
    schema = SCHEMA.model_copy(
        update={
            "streams": SCHEMA.streams[1:],
            "ids": SCHEMA.ids[1:2],
            "numbers": (),
            "labels": ("click",),
            "domains": ("all",),
        }
    )
    spec = read(
        {
            **{"kind": "gem", "width": 4, "layers": ["both"], "transformer_gate": False},
            **{"summary_tokens": 1, "summary_hidden": 2, "embeddings": {"embedding_dim": 4}},
            "stream": {
                **{"width": 4, "heads": 1, "pattern": "window", "window_tokens": 1},
                **{"pooling": "mean", "summary_tokens": 1, "target_tokens": 0, "gap_buckets": 0},
            },
            "experts": {
                **{"count": 1, "kinds": ["dot"], "fm_tokens": 1, "linear_tokens": 1},
                **{"mlp_widths": [3], "partition": "all", "residual": False},
            },
            "heads": {"trunk_widths": []},
        }
    )
    parts = training_flops(spec, schema, examples=1, lengths={"views": [3]})
    forward = {name: part.forward for name, part in parts.items()}
    pairs = 2 + 3 + 2  # events next to each other, and each itself
    attention = 2 * 3 * (4 * 12 + 4 * 4) + 2 * pairs * (4 + 4)
    gdpa = 2 * 4 * 8 + 2 * 3 * (4 + 4)  # K and V of one summary token, three queries
    mean = 3 * 4 + 4  # an addition a number of an event, a division a number of the mean
    assert forward == {
        "features": 0,
        "events.stream_views": 2 * 3 * 4 * 4,
        "layers.0.summary": 2 * 4 * 1 + 2 * (4 * 2 + 2 * 4),
        "layers.0.streams.stream_views": attention + gdpa + mean,
        # Two tokens: the item, and the mean of the events. All four products, the one pair's MLP.
        "layers.0.experts": 2 * 2 * 2 * 4 + 2 * (1 * 3 + 3 * 8),
        "heads": 2 * (3 * 4) * 1,
        "shortcut": 0,
    }
    batch = random_batch({"views": [3]}, schema=schema)
    assert batch_flops(spec, schema, batch) == counted(spec, schema, batch)


def test_wide_window_counts_pairs_not_squares():
    # Tokens far apart do not see each other and are not credited.
    window = {"width": 8, "pattern": "window", "window_tokens": 2}
    narrow = read({**GEM, "stream": window, "streams": {}})
    full = read({**GEM, "stream": {"width": 8, "pattern": "full"}, "streams": {}})
    lengths = {"clicks": [1000], "views": [0]}
    name = "layers.1.streams.stream_clicks"
    cheap = training_flops(narrow, SCHEMA, examples=1, lengths=lengths)[name]
    dear = training_flops(full, SCHEMA, examples=1, lengths=lengths)[name]
    pairs = 1000 * 5 - 2 * 3
    assert dear.forward - cheap.forward == 4 * 8 * (1000**2 - pairs)


def test_flops_are_linear_in_examples():
    spec = read(GEM)
    assert isinstance(spec, GemSpec)
    once = total_flops(
        training_flops(
            spec, SCHEMA, examples=2, lengths={"clicks": [3, 0], "views": [7, 2]}
        ).values()
    )
    twice = total_flops(
        training_flops(
            spec, SCHEMA, examples=4, lengths={"clicks": [3, 0] * 2, "views": [7, 2] * 2}
        ).values()
    )
    assert twice.forward == pytest.approx(2 * once.forward, rel=0.02)
