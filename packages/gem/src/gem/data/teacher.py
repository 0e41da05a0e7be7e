"""A teacher's logged predictions, joined with the rows of a data set by user, item and time.

The rows need not be those that the teacher predicted: a part of them, or another log that shares
impressions, will do. A row of which the teacher said nothing has NaN.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gem.data.given_spec import TeacherRead
from gem_opkit.errors import DataError, refusal

_WHERE = "data.teacher.folder"
_PREDICTIONS, _MANIFEST = "predictions.parquet", "predictions.json"
# A probability of 0 or 1 in float32 is a large logit, not an infinite one.
_LEAST = 1e-7


class Teacher:
    """The predictions of a folder, in memory.

    Attributes:
        fingerprint: of the model that made them.

    Args:
        read: which folder.
        tasks: labels of the data set; the teacher predicts at least one of them.

    Raises:
        DataError: no such folder, a file that cannot be read, one without items or of another
            model, or no task in common.
    """

    def __init__(self, read: TeacherRead, tasks: Sequence[str]) -> None:
        folder = Path(read.folder)
        self.fingerprint = teacher_fingerprint(folder)
        if read.fingerprint not in (None, self.fingerprint):
            raise _refused(
                f"be of the model {str(read.fingerprint)[:12]}",
                f"predictions of {self.fingerprint[:12]} in {folder}",
            )
        path = folder / _PREDICTIONS
        try:
            there = pq.read_schema(path).names
            shared = [task for task in tasks if f"p_{task}" in there]
            if not shared:
                raise _refused(f"predict one of {', '.join(tasks)}", f"{path} without any of them")
            keys = ("user", "item", "time_ms")
            table = pq.read_table(path, columns=[*keys, *(f"p_{task}" for task in shared)])
            self._keys = [np.asarray(table[name].combine_chunks(), np.int64) for name in keys]
        except (pa.ArrowException, KeyError, OSError) as fault:
            what = str(fault).partition("\n")[0]
            raise _refused(f"hold {_PREDICTIONS} with user, item and time_ms", what) from None
        self._logits = np.full((len(table), len(tasks)), np.nan, np.float32)
        for place, task in enumerate(tasks):
            if task in shared:
                p = np.asarray(table[f"p_{task}"].combine_chunks(), np.float64)
                p = np.clip(p, _LEAST, 1.0 - _LEAST)
                self._logits[:, place] = np.log(p) - np.log1p(-p)
        hashed = _hash(*self._keys)
        self._order = np.argsort(hashed, kind="stable")
        self._hashed = hashed[self._order]

    def logits(self, users: np.ndarray, items: np.ndarray, times_ms: np.ndarray) -> np.ndarray:
        """What the teacher said of some rows.

        Args:
            users: user of each row, int64 (B,).
            items: its candidate, likewise.
            times_ms: its time, likewise.

        Returns:
            float32 (B, A), NaN where it said nothing; of several predictions the first.
        """
        found = np.full((len(users), self._logits.shape[1]), np.nan, np.float32)
        if not len(self._hashed):
            return found
        place = np.searchsorted(self._hashed, _hash(users, items, times_ms))
        place = self._order[np.minimum(place, len(self._hashed) - 1)]
        same = np.ones(len(users), bool)
        for own, wanted in zip(self._keys, (users, items, times_ms), strict=True):
            same &= own[place] == wanted
        found[same] = self._logits[place[same]]
        return found


def teacher_fingerprint(folder: Path) -> str:
    """Read which model made the predictions of a folder.

    Args:
        folder: that `gem predict` wrote.

    Raises:
        DataError: it did not, or an earlier version of it.
    """
    try:
        found = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        raise _refused(f"hold a {_MANIFEST} that names its model", folder) from None
    return str(found)


def _hash(*columns: np.ndarray) -> np.ndarray:
    """One number of several; equal rows have equal ones, and what is found is compared."""
    mixed = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        mixed ^= column.astype(np.uint64)
        # The finaliser of SplitMix64.
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed


def _refused(must: str, got: object) -> DataError:
    return DataError(
        refusal("gem data", _WHERE, must=must, got=got, fix="write it again with gem predict")
    )
