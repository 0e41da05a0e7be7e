"""The hybrid model: edges, independence of examples, and that each setting does what it says."""

import math
from dataclasses import replace

import pytest
import torch
from batches import SCHEMA, ragged_batch, random_batch, take_rows

from gem.data.batch import ExampleBatch
from gem.model.build import build_model
from gem.model.heads import multi_task_loss
from gem.model.spec import GemSpec
from gem.model.structure import reduce_schema
from gem_opkit.errors import ConfigError, DataError

SMALL = {
    "width": 16,
    "layers": ["interaction", "transformer", "interaction"],
    "summary_tokens": 2,
    "summary_hidden": 8,
    "embeddings": {"embedding_dim": 8, "init_std": 0.5},
    "stream": {
        "width": 12,
        "heads": 2,
        "summary_tokens": 2,
        "seeds": 4,
        "target_tokens": 1,
        "window_tokens": 3,
    },
    "streams": {"clicks": {"width": 16, "gap_buckets": 4}},
    "experts": {"count": 2, "fm_tokens": 2, "linear_tokens": 3, "rank": 3, "mlp_widths": [8]},
    "heads": {"trunk_widths": [8], "init_gain": 1.0},
}


def merged(base, changes):
    out = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if nested else value
    return out


def model_of(changes=None, *, schema=SCHEMA, seed=0):
    torch.manual_seed(seed)
    return build_model(GemSpec.model_validate(merged(SMALL, changes or {})), schema)


def backward(model, batch):
    loss = multi_task_loss(model(batch), batch, (1.0, 1.0))
    loss.backward()
    return loss


def gradients(model):
    return {
        name: None if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad
        for name, p in model.named_parameters()
    }


def test_logits_are_fp32_one_for_each_task():
    logits_BA = model_of()(ragged_batch(6))
    assert logits_BA.shape == (6, 2)
    assert logits_BA.dtype == torch.float32
    assert torch.isfinite(logits_BA).all()


EDGES = {
    "nothing-empty": {"clicks": [3, 1, 5], "views": [2, 2, 1]},
    "first-empty": {"clicks": [0, 1, 5], "views": [0, 2, 1]},
    "last-empty": {"clicks": [3, 1, 0], "views": [2, 2, 0]},
    "one-stream-empty": {"clicks": [0, 0, 0], "views": [2, 2, 0]},
    "all-empty": {"clicks": [0, 0, 0], "views": [0, 0, 0]},
    "one-example": {"clicks": [4], "views": [0]},
    "longest": {"clicks": [20, 0], "views": [30, 30]},
    "no-examples": {"clicks": [], "views": []},
}


@pytest.mark.parametrize("lengths", EDGES.values(), ids=EDGES.keys())
@pytest.mark.parametrize("pattern", ["window", "block", "full"])
def test_empty_things_forward_and_backward(lengths, pattern):
    model = model_of({"stream": {"pattern": pattern, "block_tokens": 4}})
    batch = random_batch(lengths)
    loss = backward(model, batch)
    assert torch.isfinite(loss)
    for name, gradient in gradients(model).items():
        assert gradient is None or torch.isfinite(gradient).all(), name


@pytest.mark.parametrize(
    "fields",
    [("streams",), ("ids",), ("numbers",), ("streams", "ids"), ("streams", "numbers")],
    ids=str,
)
def test_schema_without_some_kinds_of_input(fields):
    schema = SCHEMA.model_copy(update=dict.fromkeys(fields, ()))
    changes = {}
    if "ids" in fields:
        changes = {"stream": {"target_tokens": 0}, "numbers": {"tokens": 2}}
    base = {key: value for key, value in SMALL.items() if key != "streams"}
    model = build_model(GemSpec.model_validate(merged(base, changes)), schema)
    batch = ragged_batch(5, schema=schema)
    assert torch.isfinite(backward(model, batch))
    missing = [name for name, gradient in gradients(model).items() if gradient is None]
    assert missing == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layers": ["interaction"]},
        {"layers": ["transformer", "interaction"]},
        {"transformer_gate": False},
        {"streams": {"views": {"layers": [0]}}},
        {"streams": {"views": {"layers": []}}},
        {"stream": {"target_tokens": 0}},
        {"stream": {"summary_tokens": 0}},
        {"stream": {"token_hidden": 8, "gap_buckets": 0, "rotary": "position"}},
        {"stream": {"gdpa_activation": ["gelu", "silu"]}},
        {"numbers": {"tokens": 0, "buckets": 3, "trunk": False, "shortcut": False}},
        {"experts": {"partition": "all", "projection": "attentive", "residual": False}},
        {"heads": {"task_widths": [4], "domain_outputs": False}},
        {"embeddings": {"embedding_dim": 16}, "token_norm": True},
        {"leave_out": ["user", "age", "clicks.action", "clicks.price"]},
        {"layers": ["both", "both"], "transformer_gate": False},
        {"layers": ["transformer", "both"]},
        {"stream": {"ffn": "none", "pooling": "mean"}, "layers": ["interaction", "interaction"]},
        {"stream": {"ffn": "none"}, "streams": {"clicks": {"ffn": "gdpa"}}},
        {"stream": {"pooling": "pma", "recent_tokens": 2, "ffn_hidden": 6}},
        {"stream": {"target_attention": "din", "summary_tokens": 0}},
        {"experts": {"count": 4, "kinds": ["cross", "dot", "mlp", "attention"]}},
        {"experts": {"count": 1, "kinds": ["dot"], "residual": False}},
    ],
    ids=str,
)
def test_every_parameter_gets_a_gradient(changes):
    model = model_of(changes)
    # Two steps of a plain optimizer: parameters behind a zero at the start move in the second.
    for seed in (0, 1):
        model.zero_grad()
        backward(model, ragged_batch(8, seed=seed))
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad.to_dense() if p.grad.is_sparse else p.grad)
    idle = [
        name
        for name, gradient in gradients(model).items()
        if gradient is None or not gradient.abs().sum() > 0
    ]
    assert idle == []


@pytest.mark.parametrize("pattern", ["window", "block", "full"])
def test_alone_equals_in_batch(pattern):
    model = model_of({"stream": {"pattern": pattern, "block_tokens": 4}}).eval()
    batch = ragged_batch(6)
    whole = model(batch)
    for row in range(6):
        alone = model(take_rows(batch, [row]))
        torch.testing.assert_close(alone[0], whole[row], rtol=1e-4, atol=1e-5)


def test_order_of_rows_does_not_matter():
    model, batch = model_of().eval(), ragged_batch(6)
    order = [3, 0, 5, 1, 4, 2]
    shuffled = model(take_rows(batch, order))
    torch.testing.assert_close(shuffled, model(batch)[order], rtol=1e-4, atol=1e-5)


def test_user_and_row_numbers_are_not_inputs():
    model, batch = model_of().eval(), ragged_batch(6)
    other = replace(batch, user_B=batch.user_B + 7, row_B=batch.row_B * 3)
    assert torch.equal(model(batch), model(other))


def test_labels_are_not_inputs():
    model, batch = model_of(), ragged_batch(6)
    other = replace(batch, labels_BA=1 - batch.labels_BA, weights_B=batch.weights_B * 2)
    assert torch.equal(model(batch), model(other))


def with_events(batch: ExampleBatch, name: str, **changes) -> ExampleBatch:
    stream = replace(batch.streams[name], **changes)
    return replace(batch, streams={**batch.streams, name: stream})


def test_every_input_reaches_the_logits():
    model, batch = model_of().eval(), random_batch({"clicks": [4, 3], "views": [5, 2]})
    torch.nn.init.normal_(model.shortcut.linear.weight)
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
            changed[f"{name}.{field}"] = with_events(batch, name, ids=other)
        gaps = stream.gap_seconds.with_values(stream.gap_seconds.values * 100)
        changed[f"{name}.gap"] = with_events(batch, name, gap_seconds=gaps)
    numbers = batch.streams["clicks"].numbers
    changed["clicks.price"] = with_events(
        batch, "clicks", numbers=numbers.with_values(numbers.values + 1)
    )
    for what, other in changed.items():
        assert not torch.allclose(model(other), base, rtol=0, atol=1e-7), what


def test_no_dropout_is_deterministic():
    model, batch = model_of(), ragged_batch(6)
    assert torch.equal(model(batch), model(batch))
    first, second = model_of(), model_of()
    backward(first, batch)
    backward(second, batch)
    for name, gradient in gradients(first).items():
        assert torch.equal(gradient, gradients(second)[name]), name


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.5},
        {"token_dropout": 0.5},
        {"stream": {"dropout": 0.5}},
        {"heads": {"dropout": 0.5}},
    ],
    ids=str,
)
def test_dropout_acts_in_training_only(changes):
    model, batch = model_of(changes), ragged_batch(6)
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))
    torch.testing.assert_close(model(batch), model_of()(batch))


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 32},
        {"layers": ["interaction"]},
        {"summary_tokens": 3},
        {"summary_hidden": 9},
        {"transformer_gate": False},
        {"token_norm": True},
        {"activation": "gelu"},
        {"leave_out": ["user"]},
        {"leave_out": ["age"]},
        {"leave_out": ["clicks.price"]},
        {"embeddings": {"embedding_dim": 16}},
        {"embeddings": {"init_std": 0.1}},
        {"embeddings": {"pooling": "sum"}},
        {"numbers": {"tokens": 2}},
        {"numbers": {"buckets": 4}},
        {"numbers": {"trunk": False}},
        {"stream": {"heads": 1}, "streams": {}},
        {"stream": {"layers": [0]}, "streams": {}},
        {"stream": {"max_events": 2}, "streams": {}},
        {"stream": {"summary_tokens": 3}, "streams": {}},
        {"stream": {"seeds": 5}, "streams": {}},
        {"stream": {"kron_rank": 3}, "streams": {}},
        {"stream": {"target_tokens": 0}, "streams": {}},
        {"stream": {"pattern": "full"}, "streams": {}},
        {"stream": {"pattern": "block", "block_tokens": 3}, "streams": {}},
        {"stream": {"window_tokens": 1}, "streams": {}},
        {"stream": {"gdpa_activation": "silu"}, "streams": {}},
        {"stream": {"gdpa_scale": "inverse_sqrt_width"}, "streams": {}},
        {"stream": {"qk_norm": False}, "streams": {}},
        {"stream": {"rotary": "none"}, "streams": {}},
        {"stream": {"rotary": "position"}, "streams": {}},
        {"stream": {"rote_time_scale_s": 1e4}, "streams": {}},
        {"stream": {"gap_buckets": 3}, "streams": {}},
        {"stream": {"token_hidden": 8}, "streams": {}},
        {"stream": {"ffn": "none"}, "streams": {}},
        {"stream": {"pooling": "pma"}, "streams": {}},
        {"stream": {"pooling": "mean"}, "streams": {}},
        {"stream": {"recent_tokens": 1}, "streams": {}},
        {"stream": {"ffn_hidden": 8}, "streams": {}},
        {"stream": {"target_attention": "din"}, "streams": {}},
        {"layers": ["interaction", "both", "interaction"]},
        {"experts": {"count": 2, "kinds": ["cross"]}},
        {"experts": {"count": 2, "kinds": ["wukong", "dot"]}},
        {"experts": {"count": 2, "kinds": ["mlp", "attention"]}},
        {"experts": {"count": 3}},
        {"experts": {"partition": "contiguous"}},
        {"experts": {"partition": "all"}},
        {"experts": {"fm_tokens": 3}},
        {"experts": {"linear_tokens": 2}},
        {"experts": {"rank": 4}},
        {"experts": {"block_norm": "swish_rms"}},
        {"experts": {"projection": "attentive"}},
        {"experts": {"mlp_widths": [8, 8]}},
        {"experts": {"residual": False}},
        {"heads": {"trunk_widths": [9]}},
        {"heads": {"task_widths": [4]}},
        {"heads": {"domain_outputs": False}},
        {"heads": {"init_gain": 2.0}},
        {"heads": {"base_rates": {"click": 0.1}}},
    ],
    ids=str,
)
def test_each_setting_changes_the_prediction(changes):
    # The same parameters where shapes agree, since both draw from the same seed; every setting
    # must then show in the logits.
    batch = ragged_batch(8)
    base = {} if "streams" not in changes else {"streams": {}}
    base_spec = {key: value for key, value in SMALL.items() if key not in base}
    torch.manual_seed(0)
    before = build_model(GemSpec.model_validate(base_spec), SCHEMA)(batch)
    torch.manual_seed(0)
    changed = {key: value for key, value in changes.items() if key != "streams"}
    after = build_model(GemSpec.model_validate(merged(base_spec, changed)), SCHEMA)(batch)
    assert not torch.allclose(before, after, rtol=0, atol=1e-7)


def test_left_out_inputs_do_not_reach_the_model():
    left_out = ["user", "rate", "clicks.action", "clicks.price"]
    model = model_of({"leave_out": left_out}).eval()
    batch = ragged_batch(6)
    clicks = batch.streams["clicks"]
    other = replace(batch, numbers_BD=batch.numbers_BD + torch.tensor([0.0, 5.0, 0.0]))
    other = replace(other, ids={k: v for k, v in batch.ids.items() if k != "user"})
    other = with_events(
        other,
        "clicks",
        ids={"item": clicks.ids["item"]},
        numbers=clicks.numbers.with_values(clicks.numbers.values * 3),
    )
    assert torch.equal(model(batch), model(other))
    with pytest.raises(ConfigError, match=r"leave_out must name inputs.*got uesr"):
        model_of({"leave_out": ["uesr"]})


def test_a_star_leaves_out_all_inputs_that_it_fits():
    named = model_of({"leave_out": ["age", "rate", "clicks.action", "clicks.price"]})
    starred = model_of({"leave_out": ["*a*e", "clicks.*[ep]*"], "stream": {"gap_buckets": 8}})
    assert starred.schema.numbers == ("count",)  # age and rate are gone, and so is no other
    assert starred.schema.streams[0].numbers == named.schema.streams[0].numbers == ()
    odd = SCHEMA.model_copy(update={"numbers": ("a[1]", "a1")})
    assert reduce_schema(odd, ("a[1]",)).numbers == ("a1",)  # a name means itself first
    with pytest.raises(ConfigError, match=r"leave_out must name inputs.*got \*price"):
        model_of({"leave_out": ["*price"]})  # fields of events are named with their stream


def test_stream_without_layers_is_not_read():
    model = model_of({"streams": {"views": {"layers": []}}})
    batch = ragged_batch(6)
    only_clicks = replace(batch, streams={"clicks": batch.streams["clicks"]})
    assert torch.equal(model(batch), model(only_clicks))
    with pytest.raises(DataError, match=r"batch\.streams must have the stream views; got clicks"):
        model_of()(only_clicks)


def test_max_events_reads_the_latest_only():
    model = model_of({"stream": {"max_events": 2}, "streams": {"clicks": {"max_events": 3}}})
    batch = random_batch({"clicks": [5, 2], "views": [4, 0]})
    shorter = random_batch({"clicks": [3, 2], "views": [2, 0]})
    clicks, views = batch.streams["clicks"], batch.streams["views"]
    short = {}
    for name, stream, kept in (("clicks", clicks, (2, 3, 4, 5, 6)), ("views", views, (2, 3))):
        index, layout = torch.tensor(kept), shorter.streams[name].numbers.layout
        cut = lambda field, i=index, lay=layout: type(field).from_layout(field.values[i], lay)  # noqa: E731
        short[name] = replace(
            stream,
            ids={field: cut(value) for field, value in stream.ids.items()},
            numbers=cut(stream.numbers),
            gap_seconds=cut(stream.gap_seconds),
        )
    torch.testing.assert_close(model(batch), model(replace(batch, streams=short)))


def test_summary_is_used_again_in_transformer_layers():
    model = model_of().eval()
    seen = []
    for layer in model.layers:
        layer.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    model(ragged_batch(6))
    assert torch.equal(seen[0], seen[1])
    assert not torch.allclose(seen[1], seen[2])


def layer_inputs(model, batch):
    """What each layer of the model is called with."""
    seen = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: seen.append(args)) for layer in model.layers
    ]
    model(batch)
    for hook in hooks:
        hook.remove()
    return seen


def test_information_flows_both_ways_in_every_layer():
    model = model_of().eval()
    batch = random_batch({"clicks": [4, 3], "views": [5, 2]})
    for layer, (x_BND, states, candidate_BD) in zip(
        model.layers, layer_inputs(model, batch), strict=True
    ):
        tokens, after = layer(x_BND, states, candidate_BD)
        _, after_other_tokens = layer(x_BND + 1.0, states, candidate_BD)
        assert not torch.allclose(after_other_tokens["views"].x_TD, after["views"].x_TD)
        views = states["views"]
        # In a transformer layer the events speak through the summary that they left before.
        summary_BPD = None if views.summary_BPD is None else views.summary_BPD + 1.0
        moved = replace(views, x_TD=views.x_TD * 2.0 + 1.0, summary_BPD=summary_BPD)
        tokens_other_events, _ = layer(x_BND, {**states, "views": moved}, candidate_BD)
        assert not torch.allclose(tokens_other_events, tokens)


def test_empty_history_adds_nothing():
    # Examples without events and with the same features agree, whatever is beside them.
    model = model_of().eval()
    batch = random_batch({"clicks": [0, 5], "views": [0, 7]})
    alone = random_batch({"clicks": [0], "views": [0]})
    first = take_rows(batch, [0])
    same = replace(alone, ids=first.ids, numbers_BD=first.numbers_BD, domains_B=first.domains_B)
    torch.testing.assert_close(model(batch)[0], model(same)[0], rtol=1e-4, atol=1e-5)


def test_candidate_steers_target_tokens():
    model = model_of().eval()
    batch = random_batch({"clicks": [6, 6], "views": [3, 3]})
    x_BND, states, candidate_BD = layer_inputs(model, batch)[0]
    _, before = model.layers[0](x_BND, states, candidate_BD)
    _, after = model.layers[0](x_BND, states, candidate_BD + torch.randn_like(candidate_BD))
    for name in ("clicks", "views"):
        changed = (before[name].summary_BPD != after[name].summary_BPD).any(-1).any(0)
        # Two tokens of seed pooling, then one that the candidate asks for.
        assert changed.tolist() == [False, False, True], name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"streams": {"clcks": {}}}, "streams must name streams of the data set .clicks, views."),
        ({"leave_out": ["item"]}, "target_tokens of stream clicks must be 0"),
        ({"heads": {"base_rates": {"buy": 0.5}}}, "heads.base_rates must name tasks"),
    ],
    ids=str,
)
def test_spec_that_the_data_cannot_serve_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        model_of(changes)


def test_batch_that_breaks_the_schema_is_refused():
    model, batch = model_of(), ragged_batch(4)
    without = {name: ids for name, ids in batch.ids.items() if name != "item"}
    with pytest.raises(DataError, match=r"batch\.ids must have the feature item"):
        model(replace(batch, ids=without))
    double = {**batch.ids, "item": batch.ids["genre"]}
    with pytest.raises(DataError, match="must have one id for each of 4 examples"):
        model(replace(batch, ids=double))


def test_overfits_a_hundred_users():
    lengths = torch.randint(0, 9, (100,)).tolist()
    schema = SCHEMA.model_copy(update={"labels": ("click",), "domains": ("all",)})
    batch = random_batch({"clicks": lengths, "views": lengths[::-1]}, schema=schema)
    model = model_of({"heads": {"init_gain": 0.0, "trunk_widths": [32]}}, schema=schema)
    dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
    adam = torch.optim.Adam(dense, lr=5e-3)
    tables = torch.optim.SparseAdam(model.tables.parameters(), lr=5e-3)
    losses = []
    for _ in range(25):
        adam.zero_grad()
        tables.zero_grad()
        loss = multi_task_loss(model(batch), batch, (1.0,))
        loss.backward()
        adam.step()
        tables.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(2.0), rel=1e-5)
    assert losses[-1] < losses[0] / 10


def test_bf16_autocast_gives_fp32_logits_close_to_fp32():
    model, batch = model_of().eval(), ragged_batch(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_BA = model(batch)
    assert logits_BA.dtype == torch.float32
    torch.testing.assert_close(logits_BA, model(batch), rtol=0.1, atol=0.1)
