"""Batches drawn at random from a schema: what a step is timed and counted on without a data set.

Values mean nothing; names, shapes, dtypes and lengths are those of a reader's batch. Left out:
labels that can be predicted.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gem.data.batch import ExampleBatch, StreamBatch
from gem.data.schema import BatchSchema, IdInput
from gem.model.tables import event_feature
from gem_embeddings.contract import TableLoad
from gem_embeddings.dry_run import draw_rows
from gem_jagged.batch import Jagged, Layout
from gem_opkit.errors import ConfigError, refusal

_HASH_LIMIT = 2**62
# Of a multi-valued input: 0, 1 or 2 ids an example.
_MULTI_IDS = 3
_GAP_SECONDS = 30.0 * 86_400.0


def uniform_lengths(examples: int, most: int, draw: torch.Generator) -> list[int]:
    """Draw lengths of histories, uniform on 1 to ``most``.

    Args:
        examples: histories.
        most: longest one, events, above 0.
        draw: where the numbers come from.

    Returns:
        one length an example.
    """
    return torch.randint(1, most + 1, (examples,), generator=draw).tolist()


def random_batch(
    schema: BatchSchema,
    lengths: Mapping[str, Sequence[int]],
    draw: torch.Generator,
    loads: Mapping[str, TableLoad] | None = None,
) -> ExampleBatch:
    """Draw a batch.

    Args:
        schema: inputs, tasks and domains.
        lengths: stream -> events of each example, for every stream of the schema; all as long.
        draw: where the numbers come from, on the CPU.
        loads: name of an input, or ``stream.field``, -> popularity of its ids; those of the others
            are uniform.

    Returns:
        a batch on the CPU, every label known, every weight 1.

    Raises:
        ConfigError: a stream without lengths, or of another number of examples.
    """
    counts = {len(own) for own in lengths.values()}
    missing = [stream.name for stream in schema.streams if stream.name not in lengths]
    if missing or len(counts) != 1:
        raise ConfigError(
            refusal(
                "random_batch",
                "lengths",
                must="have one length for each example, for every stream",
                got=f"none for {', '.join(missing)}" if missing else f"{sorted(counts)} examples",
                fix="give as many for each stream of the schema",
            )
        )
    examples, popular = counts.pop(), loads or {}
    streams = {}
    for stream in schema.streams:
        layout = Layout.from_lengths(list(lengths[stream.name]))
        total = layout.total_tokens
        gaps_T = torch.rand(total, generator=draw) * _GAP_SECONDS
        numbers_TC = torch.randn(total, len(stream.numbers), generator=draw)
        streams[stream.name] = StreamBatch(
            ids={
                s.name: Jagged.from_layout(
                    _ids(s, total, draw, popular.get(event_feature(stream.name, s.name))), layout
                )
                for s in stream.ids
            },
            numbers=Jagged.from_layout(numbers_TC, layout),
            gap_seconds=Jagged.from_layout(gaps_T, layout),
        )
    tasks = len(schema.labels)
    return ExampleBatch(
        streams=streams,
        ids={s.name: _feature(s, examples, draw, popular.get(s.name)) for s in schema.ids},
        numbers_BD=torch.randn(examples, len(schema.numbers), generator=draw),
        labels_BA=torch.randint(0, 2, (examples, tasks), generator=draw).float(),
        label_mask_BA=torch.ones(examples, tasks, dtype=torch.bool),
        weights_B=torch.ones(examples),
        domains_B=torch.randint(0, len(schema.domains), (examples,), generator=draw),
        user_B=torch.arange(examples),
        row_B=torch.arange(examples),
    )


def _feature(
    source: IdInput, examples: int, draw: torch.Generator, load: TableLoad | None
) -> Jagged:
    if source.multi:
        lengths = torch.randint(0, _MULTI_IDS, (examples,), generator=draw)
    else:
        lengths = torch.ones(examples, dtype=torch.int64)
    return Jagged.from_lengths(_ids(source, int(lengths.sum()), draw, load), lengths)


def _ids(source: IdInput, count: int, draw: torch.Generator, load: TableLoad | None) -> Tensor:
    if load is not None:
        exponent = load.zipf_exponent
        rows = source.num_embeddings
        # A hash scatters rows once more, and a few of them fall together.
        return draw_rows(rows, count, draw, zipf_exponent=exponent, table_name=source.table)
    if source.id_space == "hash":
        return torch.randint(-_HASH_LIMIT, _HASH_LIMIT, (count,), generator=draw)
    return torch.randint(0, source.num_embeddings, (count,), generator=draw)
