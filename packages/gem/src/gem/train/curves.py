"""Curves for TensorBoard: one event file a process, a record a row of the log.

Written through TensorBoard's own record writer, in the loop's thread: its `SummaryWriter` writes in
a thread whose faults show as a traceback and come up later, somewhere else.
"""

import contextlib
import importlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


class Curves:
    """Appends scalars to an event file.

    A disk that refuses ends the curves, with one warning, and not the run: the rows are in
    ``metrics.jsonl`` as well.

    Args:
        folder: of event files.
        purge_step: what earlier files hold from this step on is void; None: nothing is.
    """

    def __init__(self, folder: Path, *, purge_step: int | None = None) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        # Their classes are made when they are loaded, so no checker sees them.
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer: RecordWriter | None = None
        self._folder = folder
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        copies = sum(path.name.startswith(f"{name}.") for path in folder.iterdir())
        with self._disk_may_refuse():
            # Without a buffer, which would be written once more when the file is closed.
            self._writer = RecordWriter((folder / f"{name}.{copies}").open("xb", buffering=0))
            self._write(file_version="brain.Event:2")
            if purge_step is not None:
                log = self._events.SessionLog
                self._write(step=purge_step, session_log=log(status=log.START))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Append numbers.

        Args:
            step: of the run.
            numbers: name -> value.
        """
        summary = self._summaries.Summary
        values = [summary.Value(tag=name, simple_value=x) for name, x in numbers.items()]
        with self._disk_may_refuse():
            self._write(step=step, summary=summary(value=values))

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None

    def _write(self, **fields: Any) -> None:
        if self._writer is not None:
            event = self._events.Event(wall_time=time.time(), **fields)
            self._writer.write(event.SerializeToString())

    @contextlib.contextmanager
    def _disk_may_refuse(self) -> Iterator[None]:
        try:
            yield
        except OSError as fault:
            self.close()
            _log.warning("%s takes no more curves (%s): the run goes on", self._folder, fault)
