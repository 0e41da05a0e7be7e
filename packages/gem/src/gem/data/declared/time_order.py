"""Rows into the order of their times, in bounded memory; rows of equal time keep their order.

Rows are spread over files, each for a span of time that holds about as many rows as fit in memory,
and sorted file by file. Rows that are in order already go straight through.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

ROWS_AT_ONCE = 1 << 20
_CHUNK_ROWS = 65_536


def in_time_order(
    chunks: Iterator[pa.Table], time: str, times: np.ndarray, work: Path
) -> Iterator[pa.Table]:
    """Sort rows by time.

    Args:
        chunks: all rows, in pieces of equal schema.
        time: the column of times, int64.
        times: the times of all rows, in the same order.
        work: folder for the files, not there yet; gone afterwards.

    Yields:
        the same rows in order.

    Cost: memory for ROWS_AT_ONCE rows and two copies of `times`; rows out of order are written once
    more. More rows than that of one time are held at once, whatever their number.
    """
    if not (times[1:] < times[:-1]).any():
        yield from chunks
        return
    cuts = np.unique(np.sort(times)[ROWS_AT_ONCE::ROWS_AT_ONCE])
    work.mkdir(parents=True)
    try:
        for path in _spread(chunks, time, cuts, work):
            with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
                table = reader.read_all()
                keys = table.column(time).to_numpy()
                table = table.take(pa.array(np.argsort(keys, kind="stable")))
            for start in range(0, table.num_rows, _CHUNK_ROWS):
                yield table.slice(start, _CHUNK_ROWS)
            path.unlink()
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _spread(chunks: Iterator[pa.Table], time: str, cuts: np.ndarray, work: Path) -> list[Path]:
    """One file for each span between two cuts, in order."""
    writers: dict[int, pa.ipc.RecordBatchFileWriter] = {}
    paths = [work / f"span-{span:05}.arrow" for span in range(len(cuts) + 1)]
    try:
        for chunk in chunks:
            spans = np.searchsorted(cuts, chunk.column(time).to_numpy(), side="right")
            for span in np.unique(spans):
                if span not in writers:
                    writers[span] = pa.ipc.new_file(str(paths[span]), chunk.schema)
                rows = np.flatnonzero(spans == span)
                writers[span].write_table(chunk.take(pa.array(rows)))
    finally:
        for writer in writers.values():
            writer.close()
    return [path for path in paths if path.exists()]
