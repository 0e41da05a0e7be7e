"""What a run writes while it goes on: `metrics.jsonl` and its curves. Only the first rank writes.

A resumed run first cuts off what lies after its checkpoint, and the rows of the evaluation at the
end, which it does again. So each row stands there once. Loads no torch before it writes.
"""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gem.train.whole_file import write_whole
from gem_opkit.errors import DataError, refusal

if TYPE_CHECKING:
    from gem.config import RunConfig

METRICS_FILE = "metrics.jsonl"
_NO_CURVES = ("step", "tables")


class RunLog:
    """Appends rows to `metrics.jsonl` and scalars to TensorBoard, and to wandb where wanted.

    Args:
        folder: the run's folder.
        step: steps already done; rows of later steps are cut off.
        stays: says of a row of that step whether it is of what has been done; none: all are.
        config: says whether wandb is wanted; none: it is not.
        enabled: False on all ranks but the first: nothing is written then.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        *,
        enabled: bool,
        stays: Callable[[dict[str, Any]], bool] = lambda _: True,
        config: "RunConfig | None" = None,
    ) -> None:
        self._file = self._board = self._wandb = None
        if not enabled:
            return
        from gem.train.curves import Curves

        self._path = folder / METRICS_FILE
        kept = [
            row
            for row in _rows(self._path)
            if _of_training(row) and (row["step"] < step or (row["step"] == step and stays(row)))
        ]
        write_whole(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        # Without a buffer, of which a full disk would take a part now and refuse the rest later.
        self._file = self._path.open("ab", buffering=0)
        self._board = Curves(folder / "tensorboard", purge_step=step + 1 if step else None)
        if config is not None and config.train.wandb is not None:
            from gem.train.wandb_log import WandbLog

            self._wandb = WandbLog(config, folder)

    def write(self, row: dict[str, Any]) -> None:
        """Write a row, and every number in it to TensorBoard under its path.

        The counts of tables are left out there: five curves a table would bury all others.

        Args:
            row: JSON values; holds ``step``.

        Raises:
            OSError: the disk refuses the row in the file; it is not there then.
        """
        if self._file is None or self._board is None:
            return
        self._append(self._file, json.dumps(row).encode() + b"\n")
        prefix = ""
        if "split" in row:
            prefix = f"{'interim' if row.get('interim') else 'final'}/{row['split']}/"
        shown = {key: value for key, value in row.items() if key not in _NO_CURVES}
        numbers = {prefix + path: value for path, value in _numbers(shown)}
        self._board.write(row["step"], numbers)
        if self._wandb is not None:
            self._wandb.write(row["step"], numbers)

    def _append(self, file: io.FileIO, line: bytes) -> None:
        end = file.tell()
        try:
            while line:
                line = line[file.write(line) :]
        except OSError as fault:
            with contextlib.suppress(OSError):
                file.truncate(end)
            fault.filename = str(self._path)
            raise

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
        if self._wandb is not None:
            self._wandb.close()


def _of_training(row: dict[str, Any]) -> bool:
    return "split" not in row or bool(row.get("interim"))


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
