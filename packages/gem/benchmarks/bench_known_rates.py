"""What 8-bit products do to what a model learns, on many examples whose rates are known.

    python packages/gem/benchmarks/bench_known_rates.py [--precisions A B] [--seeds 1 2] [--set K=V]

Trains the model of ``known_rates.toml`` by the trainer's own step, once for each precision and
seed. Runs of one seed have the same initial weights and the same batches, which `known_rates` draws
on the device. Every batch is scored before it is learned from (progressive), and a million further
examples afterwards (held out). A loss is taken twice: of the labels, and as its expectation under
the rates that the labels were drawn from, which leaves out the chance of the labels.

A row compares one precision with bf16: the difference of NE as a share of it, and its 95 % interval
over the seeds (`known_rates_compare`). ``bf16_again`` is bf16 from weights that are one unit in the
last place larger: its row is what chance alone makes, and what a difference has to be held against.

A process trains one precision; several share a device, and all precisions of a seed run before the
next seed. Rows go to ``results/<device>/known_rates.jsonl`` whenever a seed is complete, and
replace those of the same case; a run that the time does not suffice for counts for nothing.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
import torch
from known_rates_compare import PAIRS, row, told
from known_rates_run import AGAIN, BASE, PRECISIONS, Asked, Run, run
from rich.console import Console

from gem.config import load_recipe
from gem.data.synthetic_spec import SyntheticSpec
from gem_opkit.bench import device_folder, provenance, write_rows

RECIPE = Path(__file__).with_name("known_rates.toml")
RESULTS = Path(__file__).resolve().parents[3] / "results"
DEFAULT = (BASE, AGAIN, "fp8_block", "mxfp8_rceil", "mxfp8_floor", "mixed")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def _take_card(cards: "Queue[str]") -> None:
    """Bind a new process to a GPU, before it looks for one."""
    card = cards.get()
    if card:
        os.environ[_VISIBLE] = card


def _cards(wanted: int, processes: int) -> list[str]:
    """A GPU for each process, in turn; empty where there is one to choose from."""
    if wanted == 1:
        return [""] * processes
    given = os.environ.get(_VISIBLE)
    names = given.split(",") if given else [str(n) for n in range(torch.cuda.device_count())]
    if len(names) < wanted:
        raise SystemExit(f"bench_known_rates: --cards {wanted}, but there are {len(names)} GPUs")
    return [names[n % wanted] for n in range(processes)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default=str(RECIPE))
    parser.add_argument("--precisions", nargs="+", default=list(DEFAULT))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--examples", type=int, default=None, help="default data.synthetic.rows")
    parser.add_argument("--held-out", type=int, default=1 << 20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cards", type=int, default=1, help="GPUs that the runs are dealt to")
    parser.add_argument("--processes", type=int, default=8, help="runs at once")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds; then runs end early")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--curves", type=Path, default=None, help="folder for sums of each batch")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    unknown = set(chosen.precisions) - set(PRECISIONS)
    if unknown:
        parser.error(f"--precisions: unknown {sorted(unknown)}; known: {', '.join(PRECISIONS)}")
    if BASE not in chosen.precisions:
        parser.error(f"--precisions: must hold {BASE}, which the others are compared with")
    return chosen


def main() -> None:
    """Train, compare, write."""
    chosen = _arguments()
    console = Console(width=160)
    config = load_recipe(chosen.recipe, chosen.settings)
    examples = chosen.examples or (config.data.synthetic or SyntheticSpec()).rows
    ends_at = time.time() + chosen.limit
    every = [
        Asked(
            precision=precision,
            seed=seed,
            recipe=chosen.recipe,
            settings=tuple(chosen.settings),
            examples=examples,
            held_out=chosen.held_out,
            device=chosen.device,
            ends_at=ends_at,
        )
        for seed in chosen.seeds
        for precision in chosen.precisions
    ]
    # Forked processes could not use the GPU.
    context = multiprocessing.get_context("spawn")
    cards: Queue[str] = context.Queue()
    for card in _cards(chosen.cards, chosen.processes):
        cards.put(card)
    runs: dict[str, dict[int, Run]] = {}
    missing: list[str] = []
    with ProcessPoolExecutor(
        chosen.processes, mp_context=context, initializer=_take_card, initargs=(cards,)
    ) as pool:
        futures = {pool.submit(run, asked): asked for asked in every}
        for future in as_completed(futures):
            asked, fault = futures[future], future.exception()
            name = f"{asked.precision}, seed {asked.seed}"
            done = None if fault is not None else future.result()
            if done is None:  # one of several: the others go on
                missing.append(name)
                console.print(f"{name}: " + (f"FAILED, {fault!r}" if fault else "no time left"))
                continue
            runs.setdefault(asked.precision, {})[asked.seed] = done
            console.print(_told(name, done), highlight=False)
            if chosen.curves is not None:
                chosen.curves.mkdir(parents=True, exist_ok=True)
                path = chosen.curves / f"{asked.precision}-{asked.seed}.npz"
                np.savez(path, progressive=done.progressive, held_out=done.held_out)
            if all(asked.seed in runs.get(each, ()) for each in chosen.precisions):
                # At once: what comes later may be cut off.
                write(runs, asked, chosen.out, console)
    if missing:
        raise SystemExit(f"bench_known_rates: not done: {'; '.join(sorted(missing))}")


def write(runs: Mapping[str, Mapping[int, Run]], asked: Asked, out: Path, console: Console) -> None:
    """Rows of all seeds that are complete."""
    whole = set.intersection(*(set(of_seed) for of_seed in runs.values()))
    complete = {name: {s: r for s, r in of.items() if s in whole} for name, of in runs.items()}
    one = complete[BASE][asked.seed]
    rows = [
        made
        for name in complete.keys() & PAIRS.keys()
        for task in range(len(one.tasks))
        if (made := row(name, task, complete, asked)) is not None
    ]
    for each in rows:
        console.print(told(each), highlight=False)
    rows = [{**each, **provenance()} for each in rows]
    json.dumps(rows, allow_nan=False)  # refuse to write what is not a number
    path = out / device_folder(one.device) / "known_rates.jsonl"
    write_rows(path, rows)
    console.print(f"{len(rows)} rows in {path}")


def _told(name: str, done: Run) -> str:
    return (
        f"{name}: {len(done.progressive):,} batches of {done.batch_examples:,} in "
        f"{done.seconds:.0f} s, the first step after {done.first_step_s:.0f} s, "
        f"{done.peak_gb:.1f} GB; {done.layers}"
    )


if __name__ == "__main__":
    main()
