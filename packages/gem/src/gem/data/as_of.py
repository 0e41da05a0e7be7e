"""Users at any time, and items, without an example: what a model of users is asked about."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from gem.data.batch import ExampleBatch
from gem.data.entity_table import Ids, take_ids
from gem.data.features import NumberTransform
from gem.data.grown import past_digest
from gem.data.schema import BatchSchema, IdInput
from gem.data.sources import Sources
from gem.data.stream_reader import StreamReader
from gem.data.transforms import apply_transforms
from gem_jagged.batch import Jagged
from gem_opkit.errors import ConfigError, refusal


class AsOfReader:
    """Joins users with their events as of given times. Made by `Reader.as_of`.

    Args:
        sources: of the data set.
        schema: what the batches of its examples hold; an id beyond the rows of its table, as one
            that came later has, counts as missing.
        streams: readers of its streams.
        transforms: of continuous inputs, by name.
    """

    def __init__(
        self,
        sources: Sources,
        schema: BatchSchema,
        streams: Mapping[str, StreamReader],
        transforms: Mapping[str, NumberTransform],
    ) -> None:
        self._sources, self._schema = sources, schema
        self._streams, self._transforms = streams, transforms

    def users(self, users: np.ndarray, times_ms: np.ndarray) -> ExampleBatch:
        """Read users.

        Args:
            users: int64 (B,); one that nobody knows has the fills and an empty history.
            times_ms: int64 (B,); what was known strictly before.

        Returns:
            a batch with the inputs of the users and their events; ids of candidates are absent,
            other numbers 0, labels unknown.
        """
        schema, count = self._schema, len(users)
        key = self._sources.dataset.spec.examples.user
        numbers = np.zeros((count, len(schema.numbers)), np.float32)
        for place, name in enumerate(schema.numbers):
            if name in schema.of_user:
                table_rows = self._entity_rows(name, users, times_ms)
                numbers[:, place] = self._sources.entity_numbers(name)[table_rows]
        owned = [place for place, name in enumerate(schema.numbers) if name in schema.of_user]
        block = numbers[:, owned]
        apply_transforms(block, [schema.numbers[place] for place in owned], self._transforms)
        numbers[:, owned] = block
        streams = {}
        for name, stream in self._streams.items():
            arrays = stream.arrays_at(users, times_ms, self._transforms)
            events = stream.batch(arrays, None, self._transforms)
            streams[name] = replace(events, ids=self._known_of(name, events.ids))
        none_BA = torch.zeros(count, len(schema.labels))
        return ExampleBatch(
            streams=streams,
            ids={
                source.name: _known(
                    source,
                    _jagged(self._ids(source.name, key, users, times_ms)),
                    self._sources.fill_of(source.name),
                )
                for source in schema.ids
                if source.name in schema.of_user
            },
            numbers_BD=torch.from_numpy(numbers),
            labels_BA=none_BA,
            label_mask_BA=none_BA.bool(),
            weights_B=torch.ones(count),
            domains_B=torch.zeros(count, dtype=torch.int64),
            user_B=torch.from_numpy(users),
            row_B=torch.full((count,), -1, dtype=torch.int64),
        )

    def items(self) -> tuple[np.ndarray, dict[str, Jagged]]:
        """Read all items, as they are known at the end of the log.

        Returns:
            their keys, int64 (R,), and the inputs that belong to an item.

        Raises:
            ConfigError: nothing says which items there are.
        """
        spec = self._sources.dataset.spec
        item = spec.examples.item
        entity = next((e for e in spec.entities if e.key == item), None)
        if item is None or (entity is None and self._sources.id_info(item).id_space != "row"):
            raise ConfigError(
                refusal(
                    "gem data",
                    "items",
                    must="be known: an entity of them, or ids that are rows of a table",
                    got=f"neither in {spec.name}",
                    fix="declare an entity whose key is the item",
                )
            )
        if entity is not None:
            keys = self._sources.dataset.entity(entity.name, [])[item].values
        else:
            keys = np.arange(self._sources.id_info(item).rows)
        ends = np.full(len(keys), np.iinfo(np.int64).max)
        names = [source.name for source in self._schema.ids if source.name in self._schema.of_item]
        return keys, {name: _jagged(self._ids(name, item, keys, ends)) for name in names}

    def news(self) -> tuple[np.ndarray, np.ndarray]:
        """When what is known of each user changes, over all streams that are read.

        Returns:
            users and times, int64 (N,): whoever asks strictly later sees the change.
        """
        found = [stream.news() for stream in self._streams.values()]
        nothing = np.zeros(0, np.int64)
        users = np.concatenate([nothing, *(users for users, _ in found)])
        return users, np.concatenate([nothing, *(times for _, times in found)])

    def events_with(
        self, stream: str, field: str, values: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Events that hold certain ids in a field, and when that is known.

        Args:
            stream: that the recipe reads.
            field: an id field of it.
            values: ids.

        Returns:
            as `StreamReader.events_with`.

        Raises:
            ConfigError: the recipe reads no such stream or field.
        """
        if stream not in self._streams:
            raise ConfigError(
                refusal(
                    "gem predict",
                    "--refresh-on",
                    must=f"name a stream that the recipe reads ({', '.join(self._streams)})",
                    got=repr(stream),
                    fix="correct the name",
                )
            )
        return self._streams[stream].events_with(field, values)

    def past_digest(self, until_ms: int) -> str:
        """Hash what the log says of its users before a time (`gem.data.grown.past_digest`).

        Args:
            until_ms: what came before it counts.
        """
        return past_digest(self._sources.dataset, until_ms)

    def last_ms(self) -> int:
        """Time of the last example of the log."""
        return int(self._sources.times[-1])

    def _known_of(self, stream: str, ids: Mapping[str, Jagged]) -> dict[str, Jagged]:
        inputs = next(each for each in self._schema.streams if each.name == stream).ids
        declared = self._sources.dataset.spec.stream(stream).ids
        fills = {field.name: field.fill for field in declared}
        return {
            source.name: _known(
                source,
                ids[source.name],
                fills.get(source.name, self._sources.fill_of(source.name)),
            )
            for source in inputs
        }

    def _ids(self, name: str, key: str, keys: np.ndarray, times_ms: np.ndarray) -> Ids:
        if name == key:
            return Ids(keys)
        rows = self._entity_rows(name, keys, times_ms)
        return take_ids(self._sources.entity_ids(name), rows)

    def _entity_rows(self, name: str, keys: np.ndarray, times_ms: np.ndarray) -> np.ndarray:
        held = self._sources.entity_field(name)
        if held is None:
            raise TypeError(f"AsOfReader: {name} belongs to no entity")
        return self._sources.entity_table(held[0]).rows_of(keys, times_ms)


def _known(source: IdInput, ids: Jagged, fill: int) -> Jagged:
    """Ids that a model has rows for; those of what it has never seen count as missing."""
    if source.id_space != "row":
        return ids
    later = ids.values >= source.num_embeddings
    return replace(ids, values=ids.values.masked_fill(later, fill)) if later.any() else ids


def _jagged(ids: Ids) -> Jagged:
    lengths = np.ones(len(ids.values), np.int64) if ids.offsets is None else np.diff(ids.offsets)
    return Jagged.from_lengths(torch.from_numpy(ids.values), torch.from_numpy(lengths))
