"""`gem serve`: a ranker behind HTTP. Needs the extra ``gem-trainer[serve]``.

    POST /score      a request in, an answer out        GET /health     200 while it takes requests
    GET  /metadata   model, inputs and limits           GET /schema     JSON schema of a request

Errors are ``{"error": "<one line>"}``: 400 for what is no JSON, 408 for a body that does not come,
409 for an embedding of another model, 413 for what is too large, 422 for what makes no sense, 429
where the line is full, 500 for a fault of the server, 503 while it ends or once it cannot score.
"""

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from gem.serving.limits import ServeSpec
from gem.serving.queue import Overloaded, ScoreQueue
from gem.serving.ranker import Ranker
from gem.serving.request import RequestError, ScoreRequest
from gem_opkit.errors import ConfigError, UnsupportedError, refusal

try:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response
    from starlette.requests import ClientDisconnect
except ImportError as _missing:
    raise UnsupportedError(
        refusal(
            "gem serve",
            "the extra serve",
            must="be installed",
            got=f"no package {_missing.name}",
            fix="pip install 'gem-trainer[serve]'",
        )
    ) from _missing


def make_app(ranker: Ranker, spec: ServeSpec) -> FastAPI:
    """The application: routes, limits and the line before the ranker.

    Args:
        ranker: scores.
        spec: limits.

    Returns:
        the application; the line is open while it runs.
    """
    line = ScoreQueue(ranker.score_many, spec.queue)

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        with line:
            yield

    app = FastAPI(title="gem", lifespan=running, docs_url=None, redoc_url=None, openapi_url=None)
    metadata = _metadata(ranker, spec)

    # `Request` and `Response` by name: FastAPI looks the types up among the module's.
    @app.post("/score")
    async def score(request: Request) -> Response:
        try:
            async with asyncio.timeout(spec.body_s):
                body = await _body(request, spec.max_body_bytes)
            asked = ranker.parse(body)
            answer = await asyncio.wrap_future(line.put(asked))
        except TimeoutError:
            return _error(408, f"request: body must come within {spec.body_s:g} seconds; send it")
        except ClientDisconnect:
            return Response(status_code=400)  # which nobody reads, and no fault to log
        except RequestError as fault:
            return _error(fault.status, str(fault))
        except Overloaded as fault:
            return _error(429 if line.is_open else 503, str(fault), {"Retry-After": "1"})
        return Response(answer.model_dump_json(), media_type="application/json")

    @app.exception_handler(Exception)
    async def failed(_: Request, fault: Exception) -> Response:
        # The server's own log has the trace; who asks learns of what kind it was.
        return _error(
            500, f"gem serve: scoring must succeed; got {type(fault).__name__}; see its log"
        )

    @app.get("/health")
    async def health() -> Response:
        state = {"status": line.state, "waiting": line.waiting}
        counts = {"scored": line.scored, "refused": line.refused, "failed": line.failed}
        return JSONResponse(state | counts, 200 if line.is_open else 503)

    @app.get("/metadata")
    async def about() -> Response:
        return JSONResponse(metadata)

    @app.get("/schema")
    async def schema() -> Response:
        return JSONResponse(ScoreRequest.model_json_schema())

    return app


def serve(ranker: Ranker, spec: ServeSpec, *, told: Callable[[str], None] = lambda _: None) -> None:
    """Serve until SIGTERM or Ctrl-C; answers under way are given first.

    Args:
        ranker: scores.
        spec: where, and limits.
        told: gets the address, once it is listened at.

    Raises:
        ConfigError: nobody can listen there.
    """
    listening = _listen(spec)
    server = _Server(
        uvicorn.Config(
            make_app(ranker, spec),
            log_level="warning",
            limit_concurrency=spec.max_connections,
            timeout_graceful_shutdown=max(1, round(spec.grace_s)),
        )
    )
    server.told = lambda: told("http://{}:{}".format(*listening.getsockname()[:2]))
    before = None
    if threading.current_thread() is threading.main_thread():
        # The server hands SIGTERM on once all is done; by then there is nothing to end.
        before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()
        if before is not None:
            signal.signal(signal.SIGTERM, before)


class _Server(uvicorn.Server):
    """Says when it listens."""

    told: Callable[[], None]

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.told()


def _listen(spec: ServeSpec) -> socket.socket:
    try:
        return socket.create_server((spec.host, spec.port), backlog=2048)
    except OSError as fault:
        taken = fault.errno == errno.EADDRINUSE
        raise ConfigError(
            refusal(
                "gem serve",
                "--port" if taken else "--host and --port",
                must="be free" if taken else "be an address of this machine",
                got=f"{spec.host}:{spec.port} ({fault.strerror or fault})",
                fix="choose another one",
            )
        ) from fault


async def _body(request: Request, most: int) -> bytes:
    """The body of a request, of which no more is read than is allowed."""
    given = request.headers.get("content-length", "")
    if given.isdigit() and int(given) > most:
        raise _too_large(int(given), most)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise _too_large(len(body), most)
    return bytes(body)


def _too_large(got: int, most: int) -> RequestError:
    return RequestError(
        f"request: body must have at most {most} bytes; got {got} or more; send fewer candidates "
        f"or events, or raise the limit of the server",
        413,
    )


def _error(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": text}, status, headers=headers)


def _metadata(ranker: Ranker, spec: ServeSpec) -> dict[str, Any]:
    shown = ranker.manifest.model_dump(mode="json", exclude={"files", "data", "model"})
    limits = ranker.limits.model_dump() | spec.queue.model_dump()
    return shown | {
        "limits": limits | {"max_body_bytes": spec.max_body_bytes},
        "device": str(ranker.device),
        "told_apart": ranker.told_apart,
    }
