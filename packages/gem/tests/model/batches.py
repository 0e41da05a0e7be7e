"""Hand-made schemas and batches for the tests of the model.

Nothing here touches the reader: a batch is drawn at random, or cut out of a larger one, so that
a test knows every number in it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from gem.data.batch import ExampleBatch, StreamBatch
from gem.data.schema import BatchSchema, IdInput, StreamInput
from gem_jagged.batch import Jagged, Layout

SCHEMA = BatchSchema(
    streams=(
        StreamInput(
            name="clicks",
            ids=(
                IdInput(name="item", table="item", num_embeddings=50),
                IdInput(name="action", table="action", num_embeddings=4),
            ),
            numbers=("price",),
            max_events=20,
        ),
        StreamInput(
            name="views",
            ids=(IdInput(name="item", table="item", num_embeddings=50),),
            max_events=30,
        ),
    ),
    ids=(
        IdInput(name="user", table="user", num_embeddings=1000, id_space="hash"),
        IdInput(name="item", table="item", num_embeddings=50),
        IdInput(name="genre", table="genre", num_embeddings=8, multi=True),
    ),
    numbers=("age", "rate", "count"),
    item="item",
    labels=("click", "conversion"),
    domains=("feed", "reels"),
)

PLAIN = SCHEMA.model_copy(update={"streams": ()})


def random_batch(
    lengths: dict[str, Sequence[int]],
    *,
    examples: int | None = None,
    schema: BatchSchema = SCHEMA,
    seed: int = 0,
) -> ExampleBatch:
    """Draw a batch whose histories have the given lengths, by stream name."""
    draw = torch.Generator().manual_seed(seed)
    if examples is None:
        examples = len(next(iter(lengths.values())))

    def ids(source: IdInput, count: int) -> torch.Tensor:
        if source.id_space == "hash":
            return torch.randint(-(2**62), 2**62, (count,), generator=draw)
        return torch.randint(0, source.num_embeddings, (count,), generator=draw)

    streams = {}
    for stream in schema.streams:
        layout = Layout.from_lengths(list(lengths[stream.name]))
        total = layout.total_tokens
        gaps = torch.rand(total, generator=draw) * 1e6
        streams[stream.name] = StreamBatch(
            ids={s.name: Jagged.from_layout(ids(s, total), layout) for s in stream.ids},
            numbers=Jagged.from_layout(
                torch.randn(total, len(stream.numbers), generator=draw), layout
            ),
            gap_seconds=Jagged.from_layout(gaps, layout),
        )
    features = {}
    for source in schema.ids:
        counts = (
            torch.randint(0, 4, (examples,), generator=draw)
            if source.multi
            else torch.ones(examples, dtype=torch.int64)
        )
        features[source.name] = Jagged.from_lengths(ids(source, int(counts.sum())), counts)
    tasks = len(schema.labels)
    return ExampleBatch(
        streams=streams,
        ids=features,
        numbers_BD=torch.randn(examples, len(schema.numbers), generator=draw),
        labels_BA=torch.randint(0, 2, (examples, tasks), generator=draw).float(),
        label_mask_BA=torch.ones(examples, tasks, dtype=torch.bool),
        weights_B=torch.ones(examples),
        domains_B=torch.randint(0, len(schema.domains), (examples,), generator=draw),
        user_B=torch.arange(examples),
        row_B=torch.arange(examples),
    )


def ragged_batch(examples: int = 6, *, schema: BatchSchema = SCHEMA, seed: int = 0) -> ExampleBatch:
    """Draw a batch with histories of all kinds: empty ones, one event, the longest."""
    draw = torch.Generator().manual_seed(seed + 1)
    lengths = {}
    for stream in schema.streams:
        drawn = torch.randint(0, stream.max_events + 1, (examples,), generator=draw)
        for row, length in enumerate((0, 1, stream.max_events)[:examples]):
            drawn[row] = length
        lengths[stream.name] = drawn.tolist()
    return random_batch(lengths, examples=examples, schema=schema, seed=seed)


def take_rows(batch: ExampleBatch, rows: Sequence[int]) -> ExampleBatch:
    """Cut examples out of a batch, in the given order."""

    def cut(jagged: Jagged) -> Jagged:
        parts = jagged.to_list()
        if not rows:
            return Jagged.from_lengths(jagged.values[:0], [])
        return Jagged.from_list([parts[row] for row in rows])

    index = torch.tensor(list(rows), dtype=torch.int64)
    return replace(
        batch,
        streams={
            name: StreamBatch(
                ids={field: cut(value) for field, value in stream.ids.items()},
                numbers=cut(stream.numbers),
                gap_seconds=cut(stream.gap_seconds),
            )
            for name, stream in batch.streams.items()
        },
        ids={name: cut(value) for name, value in batch.ids.items()},
        **{
            name: getattr(batch, name)[index]
            for name in (
                "numbers_BD",
                "labels_BA",
                "label_mask_BA",
                "weights_B",
                "domains_B",
                "user_B",
                "row_B",
            )
        },
    )
