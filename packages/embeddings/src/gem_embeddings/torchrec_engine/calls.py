"""One call of the engine: what is kept of it between its halves."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gem_embeddings.engine import StartedLookup
from gem_embeddings.torchrec_engine.batches import Asked
from gem_embeddings.torchrec_engine.placing import OP
from gem_opkit.errors import ConfigError, refusal


class Started(StartedLookup):
    """A started call of this engine."""

    def __init__(self, asked: dict[str, Asked]) -> None:
        self.asked = asked
        self.contexts: list[Any] = []
        self.arriving: list[Any] = []
        self.replicated: StartedLookup | None = None
        self.used = False


def checked_started(started: StartedLookup, weights: Mapping[str, Tensor] | None) -> Started:
    """Refuse a lookup that is not of this engine, or was given twice, or weights too late.

    Args:
        started: what ``forward`` got in place of ids.
        weights: what it got besides.

    Returns:
        the lookup.

    Raises:
        ConfigError: one of the three.
    """
    if weights is not None:
        raise ConfigError(
            refusal(
                OP,
                "weights",
                must="be given to start, with the ids",
                got="weights in forward",
                fix="leave them out here",
            )
        )
    if not isinstance(started, Started) or started.used:
        raise ConfigError(
            refusal(
                OP,
                "ids",
                must="be a batch, or what start of this engine returned, once",
                got="a lookup that was used" if isinstance(started, Started) else started,
                fix="start the batch anew",
            )
        )
    return started
