"""Cut a batch into parts that are run one after the other: gradient accumulation.

The parts are views; only offsets are made anew, from the lengths in host memory, so that nothing
waits for a device.
"""

from collections.abc import Iterator
from dataclasses import fields, replace

from torch import Tensor

from gem.data.batch import ExampleBatch, StreamBatch
from gem_jagged.batch import Jagged, Layout


def micro_batches(batch: ExampleBatch, parts: int) -> Iterator[ExampleBatch]:
    """Cut a batch by its examples.

    Args:
        batch: of one rank.
        parts: how many, above 0. Examples are spread as evenly as can be; with fewer examples than
            parts some have none.

    Yields:
        The parts in order; together they are the batch. With one part it is the batch itself.
    """
    if parts == 1:
        yield batch
        return
    for part in range(parts):
        low, high = (batch.examples * edge // parts for edge in (part, part + 1))
        yield _rows(batch, low, high)


def _rows(batch: ExampleBatch, low: int, high: int) -> ExampleBatch:
    own = {
        field.name: getattr(batch, field.name)[low:high]
        for field in fields(batch)
        if isinstance(getattr(batch, field.name), Tensor)
    }
    return replace(
        batch,
        streams={name: _stream_rows(stream, low, high) for name, stream in batch.streams.items()},
        ids={name: _jagged_rows(ids, low, high) for name, ids in batch.ids.items()},
        **own,
    )


def _stream_rows(stream: StreamBatch, low: int, high: int) -> StreamBatch:
    numbers = _jagged_rows(stream.numbers, low, high)
    first = int(stream.numbers.lengths[:low].sum())
    tokens = slice(first, first + numbers.total_tokens)
    # All members of a stream share one layout, and go on doing so.
    return StreamBatch(
        ids={name: numbers.with_values(ids.values[tokens]) for name, ids in stream.ids.items()},
        numbers=numbers,
        gap_seconds=numbers.with_values(stream.gap_seconds.values[tokens]),
    )


def _jagged_rows(jagged: Jagged, low: int, high: int) -> Jagged:
    first = int(jagged.lengths[:low].sum())
    layout = Layout.from_lengths(
        jagged.lengths[low:high], device=jagged.values.device, dtype=jagged.offsets_O.dtype
    )
    return Jagged.from_layout(jagged.values[first : first + layout.total_tokens], layout)
