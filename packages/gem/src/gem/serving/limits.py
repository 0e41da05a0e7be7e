"""How much a server takes on: the size of a request, the line before the ranker. No torch."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field, ValidationError

from gem.data.names import suggestion
from gem.serving.request import RequestLimits
from gem_opkit.contract import Contract
from gem_opkit.errors import ConfigError, refusal


class QueueLimits(Contract):
    """How requests wait."""

    max_waiting: int = Field(default=64, gt=0, description="requests in line; more are refused")
    max_batch: int = Field(default=8, gt=0, description="requests that are scored together")
    max_wait_ms: float = Field(
        default=0.0, ge=0, le=60_000, description="how long a request waits for others to join it"
    )


class ServeSpec(Contract):
    """How a ranker is served."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, lt=65_536, description="0: any free one")
    max_body_bytes: int = Field(default=4 << 20, gt=0)
    body_s: float = Field(default=10.0, gt=0, description="how long a body may take to come")
    max_connections: int = Field(default=1_024, gt=0, description="more get 503 at once")
    queue: QueueLimits = QueueLimits()
    grace_s: float = Field(
        default=10.0, ge=0, description="how long an ending server waits for answers under way"
    )


def limits_named(words: Sequence[str], *, host: str, port: int) -> tuple[RequestLimits, ServeSpec]:
    """The limits that a command line names.

    Args:
        words: ``NAME=VALUE`` each.
        host: to listen at.
        port: likewise.

    Returns:
        the limits of a request, and how it is served; defaults where nothing is named.

    Raises:
        ConfigError: an unknown name, or a value out of range.
    """
    of_request, of_line = RequestLimits.model_fields, QueueLimits.model_fields
    known = [*of_request, "max_body_bytes", *of_line]
    given: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise ConfigError(
                refusal(
                    "gem serve",
                    "--limit",
                    must=f"be NAME=VALUE, with one of {', '.join(known)}",
                    got=repr(word) + suggestion(name, known),
                    fix="correct it",
                )
            )
        given[name] = value
    try:
        sizes = RequestLimits.model_validate({n: v for n, v in given.items() if n in of_request})
        queue = QueueLimits.model_validate({n: v for n, v in given.items() if n in of_line})
        body = {"max_body_bytes": given["max_body_bytes"]} if "max_body_bytes" in given else {}
        spec = ServeSpec.model_validate({"host": host, "port": port, "queue": queue, **body})
    except ValidationError as fault:
        first = fault.errors(include_url=False)[0]
        raise ConfigError(
            refusal(
                "gem serve",
                f"--limit {first['loc'][-1]}",
                must="be a number in its range",
                got=f"{first['input']!r} ({first['msg']})",
                fix="correct it",
            )
        ) from fault
    return sizes, spec
