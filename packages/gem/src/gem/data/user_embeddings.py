"""Cached user embeddings, read point-in-time: the newest one strictly older than the example."""

from pathlib import Path

import numpy as np

from gem.data.embedding_files import read_manifest, read_parts
from gem.data.given_spec import UserEmbeddingRead
from gem.data.join import first_at_or_after
from gem_opkit.errors import DataError, refusal

HOUR_MS = 3_600_000.0


class UserEmbeddings:
    """The embeddings of a folder, in memory.

    Attributes:
        width: numbers of an embedding.
        fingerprint: of the model that wrote them.

    Args:
        name: under which the recipe reads them.
        read: how.

    Raises:
        DataError: no such folder, damaged files, or those of another model.

    Cost: one sort of all rows when opened; then a bisection a row.
    """

    def __init__(self, name: str, read: UserEmbeddingRead) -> None:
        where = f"data.user_embeddings.{name}.folder"
        folder = Path(read.folder)
        manifest = read_manifest(folder, where)
        if read.fingerprint not in (None, manifest.fingerprint):
            raise DataError(
                refusal(
                    "gem data",
                    where,
                    must=f"be of the model {str(read.fingerprint)[:12]}",
                    got=f"embeddings of {manifest.fingerprint[:12]} in {folder}",
                    fix="name those that the run was trained with, or train again with these",
                )
            )
        self.width, self.fingerprint = manifest.width, manifest.fingerprint
        self._max_age_ms = None if read.max_age_hours is None else read.max_age_hours * HOUR_MS
        rows = read_parts(folder, manifest, where)
        order = np.lexsort((rows.valid_from_ms, rows.users))
        users = rows.users[order]
        self._valid_from, self._values = rows.valid_from_ms[order], rows.values[order]
        self._users, starts = np.unique(users, return_index=True)
        self._starts = np.append(starts, len(users)).astype(np.int64)

    def rows_at(self, users: np.ndarray, times_ms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which embedding each example reads.

        Args:
            users: user of each example, int64 (B,).
            times_ms: time of each example, int64 (B,).

        Returns:
            place of the newest one strictly older, -1 for none, int64 (B,); and its age in hours,
            float64 (B,), 0 for none.
        """
        none = np.full(len(users), -1, np.int64)
        if not len(self._users):
            return none, np.zeros(len(users))
        place = np.minimum(np.searchsorted(self._users, users), len(self._users) - 1)
        has = self._users[place] == users
        first = self._starts[place]
        end = np.where(has, self._starts[place + 1], first)
        found = first_at_or_after(self._valid_from, first, end, times_ms) - 1
        there = has & (found >= first)
        age_ms = (times_ms - self._valid_from[np.maximum(found, 0)]).astype(np.float64)
        if self._max_age_ms is not None:
            there &= age_ms <= self._max_age_ms
        return np.where(there, found, none), np.where(there, age_ms / HOUR_MS, 0.0)

    def columns(self, users: np.ndarray, times_ms: np.ndarray) -> np.ndarray:
        """What a batch holds.

        Args:
            users: as for `rows_at`.
            times_ms: likewise.

        Returns:
            float32 (B, width + 1): the embedding and a 1, or zeros.
        """
        rows, _ = self.rows_at(users, times_ms)
        found = np.zeros((len(users), self.width + 1), np.float32)
        known = rows >= 0
        found[known, :-1] = self._values[rows[known]]
        found[:, -1] = known
        return found
