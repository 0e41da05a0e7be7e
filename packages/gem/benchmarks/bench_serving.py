"""How fast a ranker answers, alone and behind HTTP, and what it does under ten times its load.

    taskset -c 0,1 python packages/gem/benchmarks/bench_serving.py [--only model|http]

A request has 500 candidates and a history of 1,000 events. Cases `model`: the ranker called in this
process, with what candidates share computed once and with a history for each candidate, for a
recipe whose stream side does not know the candidate (`serving.toml` beside this file) and for the
same recipe with the gates and GDPA of the default hybrid. Cases `http`: `gem serve` in a process of
its own on the same cores; one client that asks again once it is answered, then clients that ask at
ten times that rate, whatever comes back. Weights are those of a few steps: their values cost no
time. Writes ``results/cpu/serving.jsonl``.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from gem.config import load_recipe
from gem.serving.export import export
from gem.serving.ranker import Ranker
from gem.train.loop import train
from gem_opkit.bench import provenance, write_rows

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[2] / "results" / "cpu" / "serving.jsonl"
CANDIDATES, EVENTS, NOW_MS = 500, 1_000, 1_800_000_000_000
_STEPS_ROWS = 32
# The default hybrid: events read the candidate through the gate and through GDPA.
_TOLD_APART = ("model.transformer_gate=true", 'model.stream.ffn="gdpa"')


def request(seed: int, candidates: int = CANDIDATES, events: int = EVENTS) -> bytes:
    """A request as JSON: ids from the whole catalogue, events of the last weeks."""
    random = np.random.default_rng(seed)
    times = np.sort(NOW_MS - random.integers(1, 10**9, events))
    return json.dumps(
        {
            "user": int(random.integers(1, 200)),
            "time_ms": NOW_MS,
            "domain": "feed",
            "features": {"position": 1},
            "candidates": {"item_id": random.integers(1, 10_001, candidates).tolist()},
            "history": {
                "impressions": {
                    "time_ms": times.tolist(),
                    "item_id": random.integers(1, 10_001, events).tolist(),
                    "feedback": random.integers(1, 3, events).tolist(),
                }
            },
        }
    ).encode()


def artefact(root: Path, name: str, settings: tuple[str, ...] = ()) -> Path:
    """Train a recipe for a few steps and export it."""
    few = (f"data.max_rows={_STEPS_ROWS}", "train.batch_examples=16")
    config = load_recipe(str(HERE / "serving.toml"), (*settings, *few))
    train(config, root / f"{name}-run", data_root=root / "data")
    export(root / f"{name}-run", root / name, data_root=root / "data")
    return root / name


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, p99 and the rest of some times, in ms."""
    times = np.sort(np.asarray(seconds)) * 1e3
    return {
        "ms": float(np.median(times)),
        "p99_ms": float(np.quantile(times, 0.99, method="higher")),
        "fastest_ms": float(times[0]),
        "calls": len(times),
    }


def model_cases(root: Path, calls: int, threads: int) -> Iterator[dict[str, Any]]:
    """The ranker by itself."""
    for name, settings in (("shared", ()), ("told apart", _TOLD_APART)):
        folder = artefact(root, name.replace(" ", "-"), settings)
        for precision in ("fp32", "bf16") if name == "shared" else ("fp32",):
            found: dict[bool, dict[str, float]] = {}
            for share in (True, False):
                ranker = Ranker.load(folder, precision=precision, share=share, threads=threads)
                # Where each candidate has a history of its own a call takes seconds.
                many = calls if share and name == "shared" else 2
                bodies = [request(seed) for seed in range(many + 1)]
                times = []
                for body in bodies:
                    began = time.perf_counter()
                    ranker.score(body)
                    times.append(time.perf_counter() - began)
                found[share] = summary(times[1:])
            yield {
                "case": f"model, {name}, {precision}",
                "precision": precision,
                **found[True],
                "apart_ms": found[False]["ms"],
                "apart_calls": found[False]["calls"],
                "gain": found[False]["ms"] / found[True]["ms"],
            }


def http_cases(
    root: Path, calls: int, threads: int, limits: tuple[str, ...], load_s: float
) -> Iterator[dict[str, Any]]:
    """`gem serve` on localhost."""
    folder = artefact(root, "http")
    words = [word for limit in limits for word in ("--limit", limit)]
    command = [sys.executable, "-m", "gem", "serve", str(folder), "--port", "0"]
    command += ["--threads", str(threads), "--precision", "fp32", *words]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        told, said = [], ""
        while server.stderr and not said.startswith("serving "):
            said = server.stderr.readline()
            told.append(said)
            if not said:
                raise SystemExit(f"bench_serving: gem serve ended: {''.join(told)}")
        at = said.rsplit(" ", 1)[-1].strip()
        yield from asyncio.run(_ask(at, calls, load_s))
    finally:
        server.terminate()
        server.wait(30)


async def _ask(at: str, calls: int, load_s: float) -> list[dict[str, Any]]:
    import httpx

    bodies = [request(seed) for seed in range(32)]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=at, timeout=120, limits=limits) as client:
        alone = []
        for call in range(calls + 3):
            began = time.perf_counter()
            answer = await client.post("/score", content=bodies[call % len(bodies)])
            alone.append(time.perf_counter() - began)
            answer.raise_for_status()
        rate = 1.0 / float(np.median(alone[3:]))
        rows = [{"case": "http, one client", "requests_per_s": rate, **summary(alone[3:])}]
        outcomes: Counter[str] = Counter()
        answered: list[float] = []
        refused: list[float] = []

        async def one(number: int) -> None:
            began = time.perf_counter()
            try:
                answer = await client.post("/score", content=bodies[number % len(bodies)])
            except httpx.HTTPError as fault:
                outcomes[type(fault).__name__] += 1
                return
            took = time.perf_counter() - began
            outcomes[str(answer.status_code)] += 1
            (answered if answer.status_code == 200 else refused).append(took)

        asked = max(20, round(10 * rate * load_s))
        began, tasks = time.perf_counter(), []
        for number in range(asked):
            late = began + number / (10 * rate) - time.perf_counter()
            await asyncio.sleep(max(late, 0))
            tasks.append(asyncio.create_task(one(number)))
        await asyncio.gather(*tasks)
        health = (await client.get("/health")).json()
        after = await client.post("/score", content=bodies[0])
    seconds = time.perf_counter() - began
    row = {"case": "http, ten times the load", "asked": asked, "asked_per_s": 10 * rate}
    row |= {"outcomes": dict(outcomes), "answered_per_s": len(answered) / seconds}
    row |= {f"answered_{name}": value for name, value in summary(answered).items()}
    row |= {f"refused_{name}": value for name, value in summary(refused or [0.0]).items()}
    return [*rows, row | {"health_after": health["status"], "status_after": after.status_code}]


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("model", "http"))
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--load-s", type=float, default=10.0)
    parser.add_argument("--limit", action="append", default=["max_waiting=8", "max_batch=2"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(len(cores))
    console, rows = Console(width=200), []
    with tempfile.TemporaryDirectory() as root:
        folder, threads = Path(root), len(cores)
        cases = {
            "model": model_cases(folder, chosen.calls, threads),
            "http": http_cases(folder, chosen.calls, threads, tuple(chosen.limit), chosen.load_s),
        }
        origin = {"device": "cpu", **provenance()}
        shape = {"cores": len(cores), "cpu": _cpu(), "candidates": CANDIDATES, "events": EVENTS}
        for name, case in cases.items():
            for row in case if chosen.only in (None, name) else ():
                console.print(row)
                rows.append(row)
                write_rows(chosen.results, [{"bench": "serving", **row, **shape, **origin}])
    console.print(f"{len(rows)} rows in {chosen.results}")


if __name__ == "__main__":
    main()
