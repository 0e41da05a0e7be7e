"""What a run writes while it goes on: `metrics.jsonl` and TensorBoard. Only the first rank writes.

A resumed run first cuts off what lies after its checkpoint, and the rows of an evaluation, which
it does again. So each row stands there once.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from gem_opkit.errors import DataError, refusal

METRICS_FILE = "metrics.jsonl"


class RunLog:
    """Appends rows to `metrics.jsonl` and scalars to TensorBoard.

    Args:
        folder: the run's folder.
        step: steps already done; rows of later steps are cut off.
        enabled: False on all ranks but the first: nothing is written then.
    """

    def __init__(self, folder: Path, step: int, *, enabled: bool) -> None:
        self._file = self._board = None
        if not enabled:
            return
        from torch.utils.tensorboard import SummaryWriter

        path = folder / METRICS_FILE
        kept = [row for row in _rows(path) if row["step"] <= step and "split" not in row]
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        partial.rename(path)
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(
            str(folder / "tensorboard"), purge_step=step + 1 if step else None
        )

    def write(self, row: dict[str, Any]) -> None:
        """Write a row, and every number in it to TensorBoard under its path.

        Args:
            row: JSON values; holds ``step``.
        """
        if self._file is None or self._board is None:
            return
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for path, value in _numbers(row):
            if path != "step":
                self._board.add_scalar(path, value, row["step"])

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, without a last one that was cut short."""
    if not path.exists():
        return []
    content = path.read_bytes()
    rows = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            row = json.loads(line)
            if not isinstance(row["step"], int):
                raise TypeError
        except (ValueError, TypeError, KeyError) as fault:
            raise DataError(
                refusal(
                    "gem train --resume",
                    f"{path} line {number}",
                    must="be a JSON object with a whole step",
                    got=repr(line[:40]),
                    fix="remove that line",
                )
            ) from fault
        rows.append(row)
    return rows


def _numbers(value: Any, path: str = "") -> list[tuple[str, float]]:
    if isinstance(value, dict):
        slash = "/" if path else ""
        return [pair for k, v in value.items() for pair in _numbers(v, f"{path}{slash}{k}")]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [(path, float(value))]
    return []
