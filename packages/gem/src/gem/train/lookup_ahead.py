"""Look up the rows of the next batch beside the step that trains this one.

Ids are sorted out at the beginning of a step, on a stream of their own; rows are read there once
this step has moved them, while the dense optimizer runs. So the next step finds what it would have
found by itself, to the last bit, and its forward pass does not begin with a lookup.

On several ranks the sizes of the messages, which the host has to know, are told behind the lookup
of the step before, so that no host waits for its device and all can queue work ahead of it. Once
rows have moved, ids and vectors travel beside the dense optimizer; but rows of fully sharded
tables, which are whole in a pass alone, are fetched in the forward pass.

Reading rows earlier, and mending those that this step moves, was left aside: the popular rows are
in most batches, and mending them reads them again.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gem.data.batch import ExampleBatch
from gem.model.sharded_tables import ShardedTables
from gem_embeddings.engine import StartedLookup, TableEngine


@dataclass(slots=True)
class _Coming:
    """A batch whose lookup was started."""

    batch: ExampleBatch
    started: StartedLookup
    done: torch.cuda.Event | None


class LookupAhead:
    """Lookups of the batches that come next. On a CPU nothing is ahead.

    Args:
        model: from `gem.model.build.build_model`, its tables in their engine by now.
        parts: parts that a batch is run in; with several, each looks up by itself.
        device: of the model.

    Attributes:
        on: whether expected batches are looked up ahead.
        stream: that lookups run on; None on a CPU. A batch that was made on it needs no wait before
            it is expected.
    """

    def __init__(self, model: nn.Module, *, parts: int, device: torch.device) -> None:
        self._model: Any = model  # one of two classes, both with ``table_ids``
        tables = model.get_submodule("tables")
        self._tables = tables if isinstance(tables, ShardedTables) else None
        self._engine: TableEngine | None = None
        if self._tables is not None and self._tables.engine.starts_ahead and parts == 1:
            self._engine = self._tables.engine
        self._reads = self._engine is not None and self._engine.reads_ahead
        self._fetches = self._engine is not None and self._engine.fetches_ahead
        # Where rows cannot be read ahead: a batch whose ids are still to be told.
        self._expected: ExampleBatch | None = None
        self.on = self._engine is not None and device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._coming: deque[_Coming] = deque()

    def expect(self, batch: ExampleBatch) -> None:
        """Start the lookup of a batch, of the step behind the next one.

        Args:
            batch: on the device; made on ``stream``, or on the current one.
        """
        if not self.on or self._engine is None:
            return
        if self._reads:
            self._start(batch)
        else:
            self._expected = batch

    def begin(self) -> None:
        """Tell ranks what the expected batch will ask for. To be called behind a step's own lookup.

        Every rank has to call it. Told earlier, it would lie before that one's messages.
        """
        batch, self._expected = self._expected, None
        if batch is not None:
            self._start(batch)

    def _start(self, batch: ExampleBatch) -> None:
        if self._engine is None:
            return
        with self._beside():
            started = self._engine.start_ahead(self._model.table_ids(batch))
            self._coming.append(_Coming(batch, started, self._now()))

    def use(self, batch: ExampleBatch) -> None:
        """Give the tables what was looked up for a batch, before its forward pass.

        Args:
            batch: that the step trains. One that was not expected is looked up as ever.
        """
        if not any(own.batch is batch for own in self._coming):
            return
        while (own := self._coming.popleft()).batch is not batch:
            pass
        if own.done is not None:
            current = torch.cuda.current_stream(own.batch.labels_BA.device)
            current.wait_event(own.done)
            for tensor in own.started.tensors():
                tensor.record_stream(current)
        if self._tables is not None:
            self._tables.hold(own.started)

    def read(self) -> None:
        """Read the rows of the batch that comes next. To be called once rows have moved.

        Every rank has to call it where rows have to travel.
        """
        if not self._coming or self._engine is None:
            return
        own = self._coming[0]
        if self._reads or self._fetches:
            with self._beside():
                read = self._engine.read_ahead if self._reads else self._engine.fetch_ahead
                read(own.started)
                own.done = self._now()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Run on the stream of lookups, behind what the current stream has been given by now."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def _now(self) -> torch.cuda.Event | None:
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self.stream)
        return event
