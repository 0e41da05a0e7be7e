"""Tokens: what each input contributes, and that batching the work changes nothing."""

import pytest
import torch
from batches import SCHEMA, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem.data.batch import StreamBatch
from gem.data.schema import BatchSchema, StreamInput
from gem.model.spec import EmbeddingSpec, GemSpec, NumbersSpec
from gem.model.tokenize import (
    Columns,
    EventTokens,
    FeatureTokens,
    gap_basis,
    hat_basis,
    latest_events,
)
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError

WIDTH, EMBEDDING = 8, 5


def gem_spec(**changes):
    return GemSpec(width=WIDTH, embeddings=EmbeddingSpec(embedding_dim=EMBEDDING), **changes)


def embeddings(rows=3, width=EMBEDDING):
    return {source.name: torch.randn(rows, width) for source in SCHEMA.ids}


def test_hat_basis_interpolates():
    x = torch.linspace(-2.0, 3.0, 101, dtype=torch.float64)
    basis = hat_basis(x, low=-2.0, high=3.0, knots=6)
    assert torch.all(basis >= 0)
    assert (basis > 1e-12).sum(-1).max() <= 2
    torch.testing.assert_close(basis.sum(-1), torch.ones_like(x))
    # Values at the knots, interpolated: a linear function comes back exactly.
    knots = torch.linspace(-2.0, 3.0, 6, dtype=torch.float64)
    torch.testing.assert_close(basis @ knots, x)


def test_hat_basis_clamps():
    far = hat_basis(torch.tensor([-1e9, 1e9]), low=0.0, high=1.0, knots=3)
    assert far.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]


def test_gap_basis_tells_seconds_from_years():
    gaps = torch.tensor([0.0, 60.0, 3600.0, 86_400.0, 365 * 86_400.0, 1e12])
    basis = gap_basis(gaps, 8)
    assert basis.shape == (6, 8)
    assert basis[0].tolist() == [1.0] + [0.0] * 7
    torch.testing.assert_close(basis[4], basis[5])
    assert torch.unique(basis[:5], dim=0).shape[0] == 5


def test_features_are_tokens_in_the_order_of_the_schema():
    spec = gem_spec(numbers=NumbersSpec(tokens=2, buckets=4))
    tokens = FeatureTokens(spec, SCHEMA)
    embedded, numbers_BD = embeddings(), torch.randn(3, 3)
    x_BND = tokens(embedded, numbers_BD)
    assert x_BND.shape == (3, tokens.tokens, WIDTH)
    assert tokens.tokens == 3 + 2 + 3
    for place, source in enumerate(SCHEMA.ids):
        alone = embedded[source.name] @ tokens.projection[place]
        torch.testing.assert_close(x_BND[:, place], alone)
    linear = numbers_BD @ tokens.linear.weight.t()
    torch.testing.assert_close(x_BND[:, 3:5].flatten(1), linear)
    for place in range(3):
        basis = hat_basis(numbers_BD[:, place], low=-3.0, high=3.0, knots=4)
        torch.testing.assert_close(x_BND[:, 5 + place], basis @ tokens.bucketed[place])


def test_tables_as_wide_as_tokens_are_not_projected():
    spec = GemSpec(width=WIDTH, embeddings=EmbeddingSpec(embedding_dim=WIDTH))
    tokens = FeatureTokens(spec, SCHEMA)
    embedded = embeddings(width=WIDTH)
    x_BND = tokens(embedded, torch.randn(3, 3))
    assert tokens.projection is None
    torch.testing.assert_close(x_BND[:, 1], embedded["item"], rtol=0, atol=0)


def test_token_norm_gives_unit_tokens():
    x_BND = FeatureTokens(gem_spec(token_norm=True), SCHEMA)(embeddings(), torch.randn(3, 3))
    torch.testing.assert_close(x_BND.square().mean(-1), torch.ones(3, x_BND.shape[1]))


def test_token_dropout_takes_whole_id_tokens_and_no_numbers():
    tokens = FeatureTokens(gem_spec(token_dropout=0.5), SCHEMA)
    embedded, numbers_BD = embeddings(rows=200), torch.randn(200, 3)
    x_BND = tokens(embedded, numbers_BD)
    gone = x_BND.abs().sum(-1) == 0
    assert gone[:, 3:].sum() == 0
    assert 0.4 < gone[:, :3].float().mean() < 0.6
    whole = tokens.eval()(embedded, numbers_BD)
    torch.testing.assert_close(x_BND[:, :3][~gone[:, :3]], 2 * whole[:, :3][~gone[:, :3]])


def test_schema_without_tokens_is_refused():
    empty = BatchSchema(labels=("click",), numbers=("age",))
    with pytest.raises(ConfigError, match="FeatureTokens: schema must have id features"):
        FeatureTokens(gem_spec(numbers=NumbersSpec(tokens=0)), empty)


@pytest.mark.parametrize("hidden", [0, 16])
def test_event_is_made_of_ids_numbers_and_gap(hidden):
    stream = SCHEMA.streams[0]
    events = EventTokens(
        stream,
        WIDTH,
        columns=stream.numbers,
        embedding_dim=EMBEDDING,
        gap_buckets=4,
        hidden=hidden,
    )
    embedded = {name: torch.randn(7, EMBEDDING) for name in events.features}
    numbers_TD, gap_T = torch.randn(7, 1), torch.rand(7) * 1e5
    assert events.features == ("clicks.item", "clicks.action")
    whole = events(embedded, numbers_TD, gap_T)
    parts = torch.cat([*embedded.values(), numbers_TD, gap_basis(gap_T, 4)], dim=1)
    torch.testing.assert_close(whole, events.mix(parts))
    for name in events.features:
        assert not torch.equal(
            whole, events({**embedded, name: 0 * embedded[name]}, numbers_TD, gap_T)
        )
    assert not torch.equal(whole, events(embedded, numbers_TD + 1, gap_T))
    assert not torch.equal(whole, events(embedded, numbers_TD, gap_T * 10))


def test_event_without_parts_is_refused():
    with pytest.raises(ConfigError, match="stream empty must have an id field"):
        EventTokens(
            StreamInput(name="empty", ids=(), max_events=3),
            WIDTH,
            columns=(),
            embedding_dim=EMBEDDING,
            gap_buckets=0,
        )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 10))
def test_latest_events_are_the_last_of_each_history(lengths, max_events):
    total = sum(lengths)
    field = Jagged.from_lengths(torch.arange(total), lengths)
    stream = StreamBatch(
        ids={"item": field},
        numbers=field.with_values(torch.arange(total).float().unsqueeze(1)),
        gap_seconds=field.with_values(torch.arange(total).float() * 2),
    )
    cut = latest_events(stream, max_events)
    want = [part[-max_events:].tolist() for part in field.to_list()]
    assert [part.tolist() for part in cut.ids["item"].checked("values").to_list()] == want
    packed = [value for part in want for value in part]
    assert cut.numbers.values.squeeze(1).tolist() == packed
    assert cut.gap_seconds.values.tolist() == [2 * value for value in packed]


def test_latest_events_of_short_histories_copies_nothing():
    stream = random_batch({"clicks": [3, 0], "views": [1, 1]}).streams["clicks"]
    assert latest_events(stream, 3) is stream
    assert latest_events(stream, None) is stream


def test_columns_go_by_name():
    x = torch.arange(6.0).view(2, 3)
    assert Columns(("a", "b", "c"), ("c", "a"))(x).tolist() == [[2.0, 0.0], [5.0, 3.0]]
    assert Columns(("a", "b", "c"), ())(x).shape == (2, 0)
    assert Columns(("a", "b", "c"), ("a", "b", "c"))(x) is x
