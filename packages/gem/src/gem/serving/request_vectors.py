"""Cached embeddings that come with a request, in place of those of a folder."""

import numpy as np

from gem.data.given_spec import UserEmbeddingRead
from gem.data.user_embeddings import HOUR_MS
from gem.serving.request import GivenVector, RequestError


class GivenEmbedding:
    """One cached embedding of the user at hand; to its reader as `UserEmbeddings` of a folder.

    Attributes:
        width: numbers of an embedding.
        fingerprint: of the model that has to have made it.

    Args:
        name: under which the model reads it.
        read: how it is read.
        width: numbers of an embedding.
    """

    def __init__(self, name: str, read: UserEmbeddingRead, width: int) -> None:
        self.width, self.fingerprint = width, read.fingerprint
        self._where, self._max_age_hours = f"vectors.{name}", read.max_age_hours
        self._vector: np.ndarray | None = None
        self._age_hours = 0.0

    def take(self, given: GivenVector | None, time_ms: int) -> bool:
        """Hold what a request gives.

        Args:
            given: the vector; None for none.
            time_ms: time of the request.

        Returns:
            whether the model reads one: it has to be strictly older than the request, and no older
            than the recipe allows.

        Raises:
            RequestError: it is of another model, of another width, or has a number that
                float32 cannot hold.
        """
        vector, age_hours = None, 0.0
        if given is not None:
            vector = self._checked(given)
            age_hours = (time_ms - given.valid_from_ms) / HOUR_MS
            oldest = self._max_age_hours
            if age_hours <= 0 or (oldest is not None and age_hours > oldest):
                vector, age_hours = None, 0.0
        self._vector, self._age_hours = vector, age_hours
        return vector is not None

    def rows_at(self, users: np.ndarray, times_ms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether there is one for each candidate (0, else -1), and its age in hours.

        Args:
            users: of the candidates, int64 (N,).
            times_ms: likewise.
        """
        place = np.full(len(users), -1 if self._vector is None else 0, np.int64)
        return place, np.full(len(users), self._age_hours)

    def columns(self, users: np.ndarray, times_ms: np.ndarray) -> np.ndarray:
        """The embedding and a 1 for each candidate, or zeros; float32 (N, width + 1).

        Args:
            users: of the candidates, int64 (N,).
            times_ms: likewise.
        """
        found = np.zeros((len(users), self.width + 1), np.float32)
        if self._vector is not None:
            found[:, :-1], found[:, -1] = self._vector, 1.0
        return found

    def _checked(self, given: GivenVector) -> np.ndarray:
        if given.fingerprint != self.fingerprint:
            raise RequestError(
                f"request: {self._where}.fingerprint must be {self.fingerprint}, of the model "
                f"whose embeddings the ranker was trained with; got {given.fingerprint[:80]!r}; "
                f"write them with that model, or export a ranker that was trained with these",
                409,
            )
        if len(given.vector) != self.width:
            raise RequestError(
                f"request: {self._where}.vector must have {self.width} numbers; got "
                f"{len(given.vector)}; send the embedding as it was written"
            )
        # What float32 cannot hold would be infinite in the model.
        wide = np.asarray(given.vector, np.float64)
        bad = ~(np.abs(wide) <= np.finfo(np.float32).max)
        if bad.any():
            place = int(np.argmax(bad))
            raise RequestError(
                f"request: {self._where}.vector[{place}] must be finite in float32; got "
                f"{given.vector[place]!r}; correct it"
            )
        return wide.astype(np.float32)
