"""From the names in a `BatchSchema` to the embedding tables and the ids that they look up.

The hybrid model and DIN share this, so that both read the same rows of the same tables. Left
out: the tables themselves (`gem_embeddings.tables`) and their optimizer.
"""

from collections.abc import Iterable, Mapping
from typing import cast

import torch

from gem.data.batch import ExampleBatch, StreamBatch
from gem.data.schema import BatchSchema, IdInput, StreamInput
from gem.model.spec import EmbeddingSpec
from gem_embeddings.contract import IdSpace, LookupSpec, Pooling, TableSpec
from gem_embeddings.initial import fill_initial
from gem_embeddings.tables import EmbeddingTables
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, DataError, UnsupportedError, refusal


def event_feature(stream: str, field: str) -> str:
    """Name the lookup of an id field of a stream.

    Args:
        stream: the stream's name.
        field: the field's name within it.

    Returns:
        the feature name, unique over the schema.
    """
    return f"{stream}.{field}"


def table_specs(
    spec: EmbeddingSpec, schema: BatchSchema, streams: Iterable[StreamInput]
) -> tuple[list[TableSpec], list[LookupSpec]]:
    """Describe the tables of a schema, and who looks them up.

    Args:
        spec: as for `build_tables`.
        schema: as for `build_tables`.
        streams: as for `build_tables`.

    Returns:
        one table for each table name, and one lookup for each input.

    Raises:
        ConfigError, UnsupportedError: as `build_tables`.
    """
    owners: dict[str, IdInput] = {}
    lookups: list[LookupSpec] = []

    def add(feature: str, source: IdInput, pooling: Pooling) -> None:
        first = owners.setdefault(source.table, source)
        if (first.num_embeddings, first.id_space) != (source.num_embeddings, source.id_space):
            raise ConfigError(
                refusal(
                    "build_tables",
                    feature,
                    must=f"agree with {first.name} about table {source.table}: "
                    f"{first.num_embeddings} rows, id space {first.id_space}",
                    got=f"{source.num_embeddings} rows, id space {source.id_space}",
                    fix="give it a table of its own",
                )
            )
        lookups.append(LookupSpec(feature_name=feature, table_name=source.table, pooling=pooling))

    for source in schema.ids:
        add(source.name, source, spec.pooling if source.multi else "none")
    for stream in streams:
        for source in stream.ids:
            if source.multi:
                raise UnsupportedError(
                    refusal(
                        "build_tables",
                        event_feature(stream.name, source.name),
                        must="have one id an event",
                        got="a multi-valued field",
                        fix="split it into one field for each value",
                    )
                )
            add(event_feature(stream.name, source.name), source, "none")
    tables = [
        TableSpec(
            name=table,
            embedding_dim=spec.embedding_dim,
            num_embeddings=owner.num_embeddings,
            id_space=cast(IdSpace, owner.id_space),  # the schema admits no other
            out_of_range=spec.out_of_range,
            init_std=spec.init_std,
        )
        for table, owner in owners.items()
    ]
    return tables, lookups


def build_tables(
    spec: EmbeddingSpec, schema: BatchSchema, streams: Iterable[StreamInput]
) -> EmbeddingTables:
    """Make one table for each table name of the schema, and one lookup for each input.

    Args:
        spec: width, initial values and policies of the tables.
        schema: the non-sequence inputs.
        streams: the event streams that the model reads.

    Returns:
        the tables; multi-valued inputs are pooled, single ones and events are not. Where rows are
        drawn by their place they lie on the meta device until `draw_by_place` is called, and
        nothing has been drawn for them.

    Raises:
        ConfigError: inputs of one table disagree about its rows or its id space.
        UnsupportedError: a stream field with several ids an event.
    """
    tables, lookups = table_specs(spec, schema, streams)
    device = torch.device("meta") if spec.initial_rows == "by_place" else None
    return EmbeddingTables(tables=tables, lookups=lookups, device=device)


def draw_by_place(tables: EmbeddingTables, seed: int) -> None:
    """Give tables that lie on the meta device rows on the default device, as an engine draws them.

    Args:
        tables: from `build_tables`.
        seed: of the rows.
    """
    tables.to_empty(device=torch.get_default_device())
    tables.out_of_range.zero_()
    for spec, weight_RE in zip(tables.specs, tables.table_parameters(), strict=True):
        fill_initial(weight_RE, spec, seed=seed)


def batch_streams(batch: ExampleBatch, read: Iterable[StreamInput]) -> dict[str, StreamBatch]:
    """Pick the streams that the model reads.

    Args:
        batch: examples.
        read: those streams.

    Returns:
        stream name -> its events.

    Raises:
        DataError: the batch lacks one of them, or it has another number of histories than the
            batch has examples.
    """
    streams = {}
    for stream in read:
        if stream.name not in batch.streams:
            raise DataError(
                refusal(
                    "forward",
                    "batch.streams",
                    must=f"have the stream {stream.name}",
                    got=", ".join(batch.streams) or "none",
                    fix="read it, or leave it out with layers = []",
                )
            )
        streams[stream.name] = batch.streams[stream.name]
        histories = streams[stream.name].numbers.batch
        if histories != batch.examples:
            raise DataError(
                refusal(
                    "forward",
                    f"batch.streams[{stream.name}]",
                    must=f"have one history for each of {batch.examples} examples",
                    got=histories,
                    fix="an example without events has a history of length 0",
                )
            )
    return streams


def batch_ids(
    schema: BatchSchema, batch: ExampleBatch, streams: Mapping[str, StreamBatch]
) -> dict[str, Jagged]:
    """Collect every id that the model looks up, under the feature names of `build_tables`.

    Args:
        schema: the inputs that the model reads.
        batch: examples.
        streams: their events, of the streams that it reads.

    Returns:
        feature name -> ids.

    Raises:
        DataError: the batch lacks an input, or a single-valued input has not one id an example.
    """
    features: dict[str, Jagged] = {}
    for source in schema.ids:
        if source.name not in batch.ids:
            raise DataError(
                refusal(
                    "forward",
                    "batch.ids",
                    must=f"have the feature {source.name}",
                    got=", ".join(batch.ids) or "none",
                    fix="read it, or leave it out with leave_out",
                )
            )
        ids = batch.ids[source.name]
        if not source.multi and ids.total_tokens != batch.examples:
            raise DataError(
                refusal(
                    "forward",
                    f"batch.ids[{source.name}]",
                    must=f"have one id for each of {batch.examples} examples",
                    got=ids.total_tokens,
                    fix="fill missing values, or declare the input as multi-valued",
                )
            )
        features[source.name] = ids
    for stream in schema.streams:
        if stream.name in streams:
            for source in stream.ids:
                feature = event_feature(stream.name, source.name)
                features[feature] = streams[stream.name].ids[source.name]
    return features
