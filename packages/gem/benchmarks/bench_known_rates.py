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

The first 1.3 million examples come in small batches: what has to be learned first, which category a
user prefers, is learned within them, and until then two runs differ by when they come to it.

A process trains all precisions of a seed, a step each in turn; several share a device. Rows go to
``results/<device>/known_rates.jsonl`` whenever a seed is complete, and replace those of the same
case. Where ``--limit`` ends all seeds early, their rows say how many examples they have seen; the
last ``--spare`` seeds end as soon as they would be too late, so that the others have the device.
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


def batches_of(examples: int, first: int, small: int, large: int) -> tuple[int, ...]:
    """Examples of each batch: the first ones in small batches, all others in large ones.

    Args:
        examples: in all; what is left of a whole batch is left out.
        first: of these in small batches.
        small: size of those.
        large: size of the others.

    Returns:
        the sizes, in order.
    """
    early = min(first, examples) // small
    return (small,) * early + (large,) * ((examples - early * small) // large)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default=str(RECIPE))
    parser.add_argument("--precisions", nargs="+", default=list(DEFAULT))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--examples", type=int, default=None, help="default data.synthetic.rows")
    parser.add_argument("--first", type=int, default=1_310_720, help="examples in small batches")
    parser.add_argument("--first-batch", type=int, default=8_192, help="their size")
    parser.add_argument("--held-out", type=int, default=1 << 20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cards", type=int, default=1, help="GPUs that the seeds are dealt to")
    parser.add_argument("--processes", type=int, default=4, help="seeds at once")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds; then seeds end early")
    parser.add_argument("--spare", type=int, default=0, help="last seeds that give way if need be")
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
    large = config.train.batch_examples
    given = {
        "precisions": tuple(chosen.precisions),
        "recipe": chosen.recipe,
        "settings": tuple(chosen.settings),
        "batches": batches_of(examples, chosen.first, chosen.first_batch, large),
        "held_out": chosen.held_out // large,
        "device": chosen.device,
        "ends_at": time.time() + chosen.limit,
    }
    surely = len(chosen.seeds) - chosen.spare
    every = [
        Asked(seed=seed, **given, gives_way=place >= surely)
        for place, seed in enumerate(chosen.seeds)
    ]
    # Forked processes could not use the GPU.
    context = multiprocessing.get_context("spawn")
    cards: Queue[str] = context.Queue()
    for card in _cards(chosen.cards, chosen.processes):
        cards.put(card)
    runs: dict[str, dict[int, Run]] = {}
    failed: list[int] = []
    with ProcessPoolExecutor(
        chosen.processes, mp_context=context, initializer=_take_card, initargs=(cards,)
    ) as pool:
        futures = {pool.submit(run, asked): asked for asked in every}
        for future in as_completed(futures):
            asked, fault = futures[future], future.exception()
            done = None if fault is not None else future.result()
            if not done or not done[BASE].batches:  # one of several: the others go on
                failed.append(asked.seed)
                why = "no time left" if fault is None else f"FAILED, {fault!r}"
                console.print(f"seed {asked.seed}: {why}")
                continue
            console.print(_told(asked, done[BASE]), highlight=False)
            for name, own in done.items():
                runs.setdefault(name, {})[asked.seed] = own
                if chosen.curves is not None:
                    chosen.curves.mkdir(parents=True, exist_ok=True)
                    path = chosen.curves / f"{name}-{asked.seed}.npz"
                    np.savez(path, progressive=own.progressive, held_out=own.held_out)
            write(runs, asked, chosen.out, console)  # at once: what comes later may be cut off
    if failed:
        raise SystemExit(f"bench_known_rates: not done: seeds {failed}")


def write(runs: Mapping[str, Mapping[int, Run]], asked: Asked, out: Path, console: Console) -> None:
    """Rows of the seeds that are there; of those that were cut off only where all were."""
    of_base = runs[BASE]
    whole = {s for s, done in of_base.items() if done.batches == asked.batches} or set(of_base)
    runs = {name: {s: r for s, r in own.items() if s in whole} for name, own in runs.items()}
    one = runs[BASE][min(whole)]
    rows = [
        made
        for name in PAIRS
        for task in range(len(one.tasks))
        if (made := row(name, task, runs, asked)) is not None
    ]
    for each in rows:
        console.print(told(each), highlight=False)
    rows = [{**each, **provenance()} for each in rows]
    json.dumps(rows, allow_nan=False)  # refuse to write what is not a number
    path = out / device_folder(one.device) / "known_rates.jsonl"
    write_rows(path, rows)
    console.print(f"{len(rows)} rows in {path}")


def _told(asked: Asked, done: Run) -> str:
    cut_off = "" if done.batches == asked.batches else ", CUT OFF"
    return (
        f"seed {done.seed}: {sum(done.batches):,} examples in {len(done.batches)} batches, "
        f"{len(asked.precisions)} precisions in {done.seconds:.0f} s{cut_off}"
    )


if __name__ == "__main__":
    main()
