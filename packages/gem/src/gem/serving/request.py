"""What a ranker is asked, and what it answers: the contracts of a request. No torch.

Everything is in columns: a history is one list a field, oldest event first or not, and the
candidates are one list an input. That is a fifth of the bytes of one object an event, and it is
what the arrays are made of.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, StrictInt, StrictStr, ValidationError

from gem_opkit.contract import Contract
from gem_opkit.errors import DataError

_Name = Annotated[str, Field(min_length=1, max_length=128)]
_Columns = dict[_Name, list[Any]]
# A time of an event and a delay add up within int64, as times of files lie within 2^62. Neither a
# text nor true is one: what is no number in a column is none here.
_TimeMs = Annotated[int, Field(gt=-(2**62), lt=2**62, strict=True)]


class RequestError(DataError):
    """A request that cannot be answered as it is.

    Attributes:
        status: of HTTP: 413 where it is too large, 409 where it is for another model, 422 where it
            makes no sense.
    """

    def __init__(self, text: str, status: int = 422) -> None:
        super().__init__(text)
        self.status = status


class GivenVector(Contract):
    """A vector that another model has made, such as a user's embedding."""

    vector: tuple[float, ...] = Field(min_length=1, max_length=65_536)
    fingerprint: str = Field(description="of the model that made it; has to be the expected one")
    valid_from_ms: _TimeMs = Field(description="it is read by requests strictly later")


class ScoreRequest(Contract):
    """One user, and the candidates to score for them.

    Ids are numbers of their table, or the texts that these stand for. null is a missing value, and
    so is an id that the table does not have; the answer says how many there were.
    """

    user: StrictInt | StrictStr | None = Field(
        default=None, description="the user; null or unknown: read as the fill of its column"
    )
    time_ms: _TimeMs | None = Field(
        default=None, description="time of the request; none: now. Events have to be before it"
    )
    domain: str | None = Field(default=None, description="none: the first domain")
    features: dict[_Name, Any] = Field(
        default_factory=dict,
        description="inputs with one value for all candidates: context, and static fields of the "
        "user in place of those of the artefact",
    )
    candidates: _Columns = Field(
        description="input -> one value a candidate; the item is needed, its static fields may be "
        "given in place of those of the artefact"
    )
    history: dict[_Name, _Columns] = Field(
        default_factory=dict, description="stream -> field -> one value an event; with time_ms"
    )
    vectors: dict[_Name, GivenVector] = Field(
        default_factory=dict, description="vectors of another model that the ranker reads"
    )


class RequestLimits(Contract):
    """How large a request may be."""

    max_candidates: int = Field(default=2_000, gt=0)
    max_events: int = Field(default=20_000, gt=0, description="of a stream of a request")
    max_values: int = Field(default=1_000, gt=0, description="ids of one multi-valued input")


class ScoreAnswer(Contract):
    """Probabilities of the candidates, in their order."""

    scores: dict[str, list[float]] = Field(description="task -> one probability a candidate")
    fingerprint: str = Field(description="of the model")
    unknown: dict[str, int] = Field(
        default_factory=dict,
        description="column -> values that its table does not have, read as missing",
    )
    missing: tuple[str, ...] = Field(
        default=(), description="columns that were not given at all, read as missing"
    )


def parse_request(given: bytes | str | Mapping[str, Any]) -> ScoreRequest:
    """Read a request.

    Args:
        given: a JSON document, or what one says as a mapping.

    Returns:
        the request; its columns have not been looked at.

    Raises:
        RequestError: it is no JSON, has an unknown field, or one of a wrong type.
    """
    try:
        if isinstance(given, Mapping):
            return ScoreRequest.model_validate(given)
        return ScoreRequest.model_validate_json(given)
    except ValidationError as fault:
        errors = fault.errors(include_url=False, include_input=False, include_context=False)
        parts = [f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in errors[:3]]
        malformed = any(e["type"] == "json_invalid" for e in errors)
        more = f" and {len(errors) - 3} more" if len(errors) > 3 else ""
        raise RequestError(
            f"request: must be a JSON object of the form that gem serve shows at /schema; got "
            f"{'; '.join(parts)}{more}; correct it",
            400 if malformed else 422,
        ) from fault


def check_size(request: ScoreRequest, limits: RequestLimits) -> None:
    """Refuse a request that is too large, before anything is made of it.

    Args:
        request: as parsed.
        limits: what is allowed.

    Raises:
        RequestError: too many candidates or events.
    """
    for name, values in request.candidates.items():
        if len(values) > limits.max_candidates:
            raise _too_many(f"candidates.{name}", len(values), limits.max_candidates, "candidates")
        _check_values(f"candidates.{name}", values, limits)
    for name, value in request.features.items():  # each candidate will have a copy of it
        _check_values(f"features.{name}", [value], limits)
    for stream, columns in request.history.items():
        for name, values in columns.items():
            if len(values) > limits.max_events:
                what = f"history.{stream}.{name}"
                raise _too_many(what, len(values), limits.max_events, "events")


def _check_values(what: str, values: list[Any], limits: RequestLimits) -> None:
    most = max((len(value) for value in values if isinstance(value, list)), default=0)
    if most > limits.max_values:
        raise _too_many(what, most, limits.max_values, "ids of a value")


def _too_many(what: str, got: int, limit: int, of: str) -> RequestError:
    return RequestError(
        f"request: {what} must hold at most {limit} {of}; got {got}; send fewer, or raise the "
        f"limit of the server",
        413,
    )
