"""What a checkpoint costs: how long training stands still, and how long the disk is busy.

    python packages/gem/benchmarks/bench_checkpoint.py [--mib 64 512] [--rounds 5]

A state of one embedding table with its optimizer, of so many MiB together, is saved through the
trainer's own writer, waiting and in the background, in turn. Before it is timed, a checkpoint of
each kind is read back and compared. Beside them stands a plain copy of the state in memory: what
training has to wait for, at the least. Writes ``results/cpu/checkpoint.jsonl``.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import nn

from gem.config import RunConfig, load_recipe
from gem.train.checkpoint import TrainState, load_checkpoint, step_folder
from gem.train.checkpoint_writer import CheckpointWriter, take_snapshot
from gem.train.metrics import MetricStream
from gem_opkit.bench import provenance, write_rows
from gem_parallel.launch import World

RESULTS = Path(__file__).resolve().parents[3] / "results" / "cpu" / "checkpoint.jsonl"
_WIDTH = 64


def state_of(mib: int) -> TrainState:
    """A table and the two moments of its optimizer, of so many MiB together."""
    torch.manual_seed(1)
    rows = mib * 2**20 // (3 * 4 * _WIDTH)
    model = nn.Embedding(rows, _WIDTH)
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    model.weight.grad = None
    return TrainState(model, {"dense": optimizer}, {}, MetricStream(["click"], ["all"], 2))


def save(
    folder: Path, state: TrainState, config: RunConfig, *, background: bool
) -> tuple[float, float]:
    """Save once: seconds that training stands still, and seconds until it is on disk."""
    began = time.perf_counter()
    with CheckpointWriter(folder, keep=1, background=background) as writer:
        state.step += 1
        snapshot = take_snapshot(
            state,
            config,
            World(),
            current=state.metrics.current,
            dataset="bench",
            copy=background,
        )
        writer.write(snapshot)
        stood_s = time.perf_counter() - began
        writer.wait()
        fault = writer.take_fault()
    if fault is not None:
        raise fault
    return stood_s, time.perf_counter() - began


def copy_s(state: TrainState) -> float:
    """Seconds of a plain copy of the state."""
    tensors = [*state.model.state_dict().values()]
    for entry in state.optimizers["dense"].state.values():
        tensors += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    began = time.perf_counter()
    copies = [tensor.clone() for tensor in tensors]
    elapsed_s = time.perf_counter() - began
    del copies
    return elapsed_s


def check(folder: Path, state: TrainState, config: RunConfig, mib: int) -> None:
    """Refuse to time what does not come back as it was."""
    for background in (True, False):
        save(folder, state, config, background=background)
        other = state_of(mib)
        load_checkpoint(step_folder(folder, state.step), other, World())
        for name, value in state.model.state_dict().items():
            if not torch.equal(value, other.model.state_dict()[name]):
                raise SystemExit(f"bench_checkpoint: {name} does not come back")


def measure(mib: int, rounds: int, console: Console) -> dict[str, Any]:
    """Times of a state of so many MiB."""
    config, state = load_recipe("synthetic-debug"), state_of(mib)
    kinds: dict[str, Callable[[Path], tuple[float, float]]] = {
        "waiting": lambda folder: save(folder, state, config, background=False),
        "background": lambda folder: save(folder, state, config, background=True),
    }
    times: dict[str, list[float]] = {"copy": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        check(folder / "check", state, config, mib)
        shutil.rmtree(folder / "check")
        for _ in range(rounds):
            times["copy"].append(copy_s(state))
            for kind, run in kinds.items():
                stood_s, whole_s = run(folder / kind)
                times.setdefault(f"{kind}, stands still", []).append(stood_s)
                times.setdefault(f"{kind}, until on disk", []).append(whole_s)
    console.print({name: f"{1e3 * median(found):.1f} ms" for name, found in times.items()})
    return {
        "bench": "checkpoint",
        "case": f"state of {mib} MiB",
        "bytes": mib * 2**20,
        "rounds": rounds,
        "copy_ms": 1e3 * median(times["copy"]),
        "waiting_ms": 1e3 * median(times["waiting, stands still"]),
        "background_stall_ms": 1e3 * median(times["background, stands still"]),
        "background_ms": 1e3 * median(times["background, until on disk"]),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    console = Console()
    rows = [measure(mib, chosen.rounds, console) for mib in chosen.mib]
    origin = provenance()
    write_rows(chosen.results, [{**row, "device": "cpu", **origin} for row in rows])
    console.print(f"{len(rows)} rows in {chosen.results}")


if __name__ == "__main__":
    main()
