"""The server: answers, refusals in one line, and an end that leaves nobody without one."""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from gem.serving.limits import QueueLimits, ServeSpec
from gem.serving.ranker import Ranker
from gem.serving.request import RequestLimits

NOW = 1_800_000_000_000
_GOOD = {"user": 3, "time_ms": NOW, "candidates": {"item_id": [1, 2, 3]}}


def serving(ranker, spec, **how):
    """A client of a running application; FastAPI is an extra, which a GPU machine may lack."""
    from fastapi.testclient import TestClient

    from gem.serving.server import make_app

    return TestClient(make_app(ranker, spec), **how)


def _body(**changes) -> bytes:
    return json.dumps({**_GOOD, **changes}).encode()


@pytest.fixture(scope="module")
def ranker(served):
    return Ranker.load(served.artefact, limits=RequestLimits(max_candidates=50))


@pytest.fixture
def client(ranker):
    with serving(ranker, ServeSpec(max_body_bytes=20_000)) as client:
        yield client


def test_a_score_is_the_rankers(client, ranker):
    answer = client.post("/score", json=_GOOD)
    assert (answer.status_code, answer.json()) == (
        200,
        json.loads(ranker.score(_GOOD).model_dump_json()),
    )


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "JSON"),
        (json.dumps({**_GOOD, "domain": "nowhere"}).encode(), 422, "domain must be"),
        (json.dumps({**_GOOD, "candidates": {"item_id": [1] * 60}}).encode(), 413, "50 candidates"),
        (
            json.dumps({**_GOOD, "candidates": {"item_id": [1] * 10**6}}).encode(),
            413,
            "20000 bytes",
        ),
    ],
    ids=["no json", "no sense", "many candidates", "a million candidates"],
)
def test_refusals_are_one_line(client, body, status, said):
    answer = client.post("/score", content=body)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert said in answer.json()["error"]
    assert client.post("/score", json=_GOOD).status_code == 200


def test_a_body_without_a_length_is_cut_off_at_the_limit(client):
    def pieces():
        yield from (b" " * 1_000 for _ in range(100))

    answer = client.post("/score", content=pieces())
    assert answer.status_code == 413


def test_a_body_that_does_not_come_is_not_waited_for(ranker):
    async def asked() -> list[dict]:
        from gem.serving.server import make_app

        said: list[dict] = []

        async def receive() -> dict:
            await asyncio.sleep(20)
            raise AssertionError("it waits")

        async def send(message: dict) -> None:
            said.append(message)

        scope = {"type": "http", "method": "POST", "path": "/score", "raw_path": b"/score"}
        scope |= {"headers": [], "query_string": b"", "http_version": "1.1", "root_path": ""}
        await make_app(ranker, ServeSpec(body_s=0.05))(scope, receive, send)
        return said

    said = asyncio.run(asked())
    assert said[0]["status"] == 408
    assert b"body must come within 0.05 seconds" in said[1]["body"]


def test_who_leaves_before_the_body_is_there_is_no_fault_of_the_server(ranker):
    async def asked() -> list[dict]:
        from gem.serving.server import make_app

        said: list[dict] = []

        async def receive() -> dict:
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            said.append(message)

        scope = {"type": "http", "method": "POST", "path": "/score", "raw_path": b"/score"}
        scope |= {"headers": [], "query_string": b"", "http_version": "1.1", "root_path": ""}
        await make_app(ranker, ServeSpec())(scope, receive, send)  # a fault would be raised here
        return said

    assert asyncio.run(asked())[0]["status"] == 400


def test_a_fault_of_the_server_is_one_line_and_it_goes_on(ranker, monkeypatch):
    def broken(requests):
        raise MemoryError("of a device, with an address")

    with monkeypatch.context() as patched:
        patched.setattr(ranker, "score_many", broken)
        with serving(ranker, ServeSpec(), raise_server_exceptions=False) as client:
            answer = client.post("/score", json=_GOOD)
            assert answer.status_code == 500
            assert answer.json()["error"].count("MemoryError") == 1
            assert "address" not in answer.text
            health = client.get("/health")
            assert (health.status_code, health.json()["failed"]) == (200, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_that_cannot_score_any_more_says_so(ranker, monkeypatch):
    def ends(requests):
        raise SystemExit(3)

    with monkeypatch.context() as patched:
        patched.setattr(ranker, "score_many", ends)
        with serving(ranker, ServeSpec()) as client:
            for _ in range(2):  # who waited, and who comes later
                answer = client.post("/score", json=_GOOD)
                assert answer.status_code == 503
                assert "no scoring any more, since a SystemExit" in answer.json()["error"]
            health = client.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "failed")


def test_it_says_what_it_is_and_how_it_is(client, ranker):
    counts = {"waiting": 0, "scored": 0, "refused": 0, "failed": 0}
    assert client.get("/health").json() == {"status": "ok"} | counts
    about = client.get("/metadata").json()
    assert about["fingerprint"] == ranker.manifest.fingerprint
    assert about["limits"]["max_candidates"] == 50
    assert set(about["told_apart"]) == {"clicks", "impressions"}
    assert "candidates" in client.get("/schema").json()["required"]
    assert client.get("/none").status_code == 404
    assert client.get("/score").status_code == 405


def test_a_full_line_is_429_at_once(ranker, monkeypatch):
    go, began, score = threading.Event(), threading.Event(), ranker.score_many

    def slow(requests):
        began.set()
        assert go.wait(20)
        return score(requests)

    monkeypatch.setattr(ranker, "score_many", slow)
    spec = ServeSpec(queue=QueueLimits(max_waiting=2, max_batch=1))
    with serving(ranker, spec) as client:
        found: list[int] = []

        def ask() -> None:
            found.append(client.post("/score", json=_GOOD).status_code)

        first = threading.Thread(target=ask)
        first.start()
        assert began.wait(20)
        others = [threading.Thread(target=ask) for _ in range(6)]
        for other in others:
            other.start()
        while found.count(429) < 4:  # two wait, and nothing was answered yet
            threading.Event().wait(0.01)
        assert 200 not in found
        assert client.get("/health").json()["refused"] == 4
        go.set()
        for one in (first, *others):
            one.join(20)
    assert sorted(found) == [200] * 3 + [429] * 4


def test_without_the_extra_it_says_what_to_install(served):
    program = "import sys; sys.modules['fastapi'] = None; from gem.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "serve", str(served.artefact)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 2
    assert "gem serve: the extra serve must be installed; got no package fastapi" in done.stderr
    assert "pip install 'gem-trainer[serve]'" in done.stderr


def test_the_command_serves_and_ends_with_the_answers_under_way(served):
    command = [sys.executable, "-m", "gem", "serve", str(served.artefact), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        line = ""
        while not line.startswith("serving "):
            line = server.stderr.readline()
            assert line, "it ended before it served"
        port = int(line.rsplit(":", 1)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", "/score", json.dumps(_GOOD))
        answer = connection.getresponse()
        assert answer.status == 200
        assert len(json.loads(answer.read())["scores"]["click"]) == 3
        taken = subprocess.run(
            [*command[:-1], str(port)], capture_output=True, text=True, check=False, env=environment
        )
        assert taken.returncode == 2
        assert "gem serve: --port must be free" in taken.stderr
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
