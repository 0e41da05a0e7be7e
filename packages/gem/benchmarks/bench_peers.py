"""Other people's models on our inputs, beside ours: same rows, same metrics, paired bootstrap.

    nox -s peers [-- --protocol P --peer NAME --seeds 1 2 3]

Writes the inputs of a protocol's recipe as flat columns, trains each peer in an environment of its
own (`nox -s peers` makes them), trains our recipe with the same seeds, and puts one row for each
peer, task and kind of inputs into ``results/cpu/quality.jsonl``. All metrics are computed here,
from predictions, by the code that measures ours. Rows of the same case replace older ones.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_quality import METRICS, RESULTS, paired_bootstrap, row_losses, run_recipe, test_rows
from flat_inputs import META_FILE, History, export_inputs
from rich.console import Console

from gem.config import RunConfig, load_recipe
from gem.train.metrics import MetricBlock
from gem.train.progress import Display
from gem.train.run import DATA_ROOT
from gem_opkit.bench import provenance, write_rows

ROOT = Path(__file__).resolve().parents[3]
RUNNERS = Path(__file__).resolve().parent / "peers"
VARIANTS = {"statistics": "as shipped", "raw": "without statistics"}
# How often a model may see the training rows: neural peers one epoch, or until the valid rows get
# no better; ours one pass, or as often as was best there. Others see them as often as they like.
PASSES = {"one": "", "any": ", any number of passes"}


@dataclass(frozen=True, slots=True)
class Protocol:
    """Rows and inputs that all models get.

    Attributes:
        recipe: ours, which says what is read; the best of ours on the valid rows.
        raw: overrides that take the streaming statistics away.
        histories: event sequences for the peers; a model attends to the first.
        repeated: kind of inputs -> overrides that were best on the valid rows under any number of
            passes (docs/quality.md).
    """

    recipe: str
    raw: tuple[str, ...]
    histories: tuple[History, ...]
    repeated: dict[str, tuple[str, ...]]

    def settings(self, variant: str, passes: str) -> list[str]:
        """Overrides of our recipe for a kind of inputs and a number of passes."""
        own = self.raw if variant == "raw" else ()
        return [*own, *(self.repeated.get(variant, ()) if passes == "any" else ())]


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody else's model.

    Attributes:
        title: what people call it.
        script: its runner in ``peers/``.
        environment: name of its environment.
        variants: kinds of inputs that it is trained on.
        counts_epochs: whether it sees the training rows once, or more often where that is allowed.
    """

    title: str
    script: str
    environment: str
    variants: tuple[str, ...] = tuple(VARIANTS)
    counts_epochs: bool = False


TWICE = ("train.passes=2", "train.later_passes=reset_tables")
PROTOCOLS = {
    "ml100k-time": Protocol(
        "ml100k-cross",
        ("data.statistics=[]", "data.transforms={}"),
        (History("ratings", "item_id", "past_label"),),
        {"raw": TWICE},
    ),
    "kuairand-days": Protocol(
        "kuairand-days",
        ("data.statistics=[]",),
        (History("impressions", "video_id", "feedback"), History("long_views", "video_id")),
        {"statistics": TWICE, "raw": TWICE},
    ),
}

# Trees cannot read a history; without statistics they would see next to nothing.
PEERS = {
    "lightgbm": Peer("LightGBM", "trees_lightgbm.py", "lightgbm", ("statistics",)),
    "hist-gradient-boosting": Peer(
        "HistGradientBoosting (scikit-learn)", "trees_sklearn.py", "sklearn", ("statistics",)
    ),
    "logistic-regression": Peer(
        "logistic regression (scikit-learn)", "logistic_regression.py", "sklearn"
    ),
    "dcnv2": Peer("DCNv2 (Torch-RecHub)", "dcnv2_rechub.py", "rechub", counts_epochs=True),
    "din": Peer("DIN (DeepCTR-Torch)", "din_deepctr.py", "deepctr", counts_epochs=True),
}


def peer_inputs(recipe: str, settings: Sequence[str]) -> RunConfig:
    """Our recipe as peers read it.

    Args:
        recipe: name of ours.
        settings: overrides, as ``gem train --set``.

    Returns:
        The recipe without a running scale: peers get numbers as they are, and scale them by the
        training rows, of which a stream knows only the past.
    """
    config = load_recipe(recipe, settings)
    data = config.data.model_copy(update={"running_scale": None})
    return config.model_copy(update={"data": data})


def predictions_file(
    peer: Peer,
    inputs: Path,
    task: str,
    variant: str,
    seeds: Sequence[int],
    *,
    passes: str = "one",
) -> Path:
    """Where the predictions of a peer lie.

    Args:
        peer: whom.
        inputs: folder of the flat inputs.
        task: label.
        variant: kind of inputs.
        seeds: of its fits.
        passes: how often it may see the rows, if it counts its epochs.

    Returns:
        a file beside the inputs, another one for other inputs, seeds or code: predictions of an
        older recipe must not be taken for those of this one.
    """
    code = [RUNNERS / peer.script, RUNNERS / "inputs.py", RUNNERS / "runner.py"]
    parts = [(inputs / META_FILE).read_bytes(), json.dumps(list(seeds)).encode()]
    parts += [file.read_bytes() for file in (*code, RUNNERS / f"{peer.environment}.txt")]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]
    often = "any-" if peer.counts_epochs and passes == "any" else ""
    return inputs.parent / f"{Path(peer.script).stem}-{variant}-{task}-{often}{digest}.npz"


def train_peer(
    peer: Peer, inputs: Path, task: str, variant: str, chosen: argparse.Namespace
) -> dict[str, Any]:
    """Run a peer in its environment, unless its predictions lie there already.

    Args:
        peer: whom.
        inputs: folder of the flat inputs.
        task: label.
        variant: kind of inputs.
        chosen: the command line.

    Returns:
        ``valid`` and ``test``, float32 (seeds, rows) each, and ``report``.

    Raises:
        SystemExit: the environment is missing, or the peer failed.
    """
    python = chosen.environments / f"peers-{peer.environment}" / "bin" / "python"
    if not python.exists():
        raise SystemExit(
            f"bench_peers: --environments must hold peers-{peer.environment}; got "
            f"{chosen.environments}; run: nox -s peers"
        )
    out = predictions_file(peer, inputs, task, variant, chosen.seeds, passes=chosen.passes)
    if not out.exists() or chosen.again:
        command = [str(python), str(RUNNERS / peer.script), "--inputs", str(inputs)]
        command += ["--task", task, "--variant", variant, "--out", str(out)]
        command += ["--seeds", *map(str, chosen.seeds), "--passes", chosen.passes]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        # One thread, as ours has.
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"bench_peers: {peer.title} failed:\n{done.stderr[-3000:]}")
    with np.load(out, allow_pickle=False) as found:
        return {
            "valid": found["valid"],
            "test": found["test"],
            "report": json.loads(str(found["report"])),
        }


def measure(split: dict[str, np.ndarray], place: int, p: np.ndarray) -> dict[str, Any]:
    """Metrics of predictions, by the code that measures our runs.

    Args:
        split: rows of the flat inputs.
        place: of the task among the labels.
        p: predictions of the rows where the label is known.

    Returns:
        NE, AUC, GAUC, log loss and calibration.
    """
    label = split["labels"][:, place]
    known = ~np.isnan(label)
    block = MetricBlock(("task",), ("all",))
    block.update(
        p[:, None],
        label[known, None],
        np.ones((len(p), 1), np.bool_),
        np.zeros(len(p), np.int64),
        split["user"][known],
    )
    found = block.report()["task"]
    return {key: found[key] for key in (*METRICS, "examples", "positives")}


def compare(
    peer: Peer,
    found: dict[str, Any],
    columns: dict[str, dict[str, np.ndarray]],
    place: int,
    ours: list[dict[str, np.ndarray]],
) -> dict[str, Any]:
    """What a row of results says of a peer.

    Args:
        peer: whom.
        found: what `train_peer` returned.
        columns: flat inputs of the splits valid and test.
        place: of the task among the labels.
        ours: test rows of our runs.

    Returns:
        metrics of each seed, their mean and spread, and the comparison with ours.
    """
    per_seed = {
        split: [measure(columns[split], place, p) for p in found[split]]
        for split in ("valid", "test")
    }
    label = columns["test"]["labels"][:, place]
    known = ~np.isnan(label)
    rows = columns["test"]["row"][known]
    theirs = [row_losses(rows, label[known], p) for p in found["test"]]
    return {
        "model": peer.title,
        "mean": {split: _over(runs, statistics.fmean) for split, runs in per_seed.items()},
        "half_range": {split: _over(runs, _half_range) for split, runs in per_seed.items()},
        **per_seed,
        # Positive: the peer's NE is the higher one, so ours is better.
        "against_ours": paired_bootstrap(theirs, ours),
        **found["report"],
    }


def _over(runs: list[dict[str, Any]], fold: Any) -> dict[str, float]:
    return {key: fold([run[key] for run in runs]) for key in METRICS}


def _half_range(values: list[float]) -> float:
    return (max(values) - min(values)) / 2


def run_protocol(name: str, chosen: argparse.Namespace, display: Display) -> list[dict[str, Any]]:
    """All peers of one protocol.

    Args:
        name: of the protocol.
        chosen: the command line.
        display: of our own training.

    Returns:
        rows of results.
    """
    protocol = PROTOCOLS[name]
    inputs = chosen.out / name / "inputs"
    display.stage(f"{name}: inputs as flat columns")
    config = peer_inputs(protocol.recipe, chosen.settings)
    meta = export_inputs(config, protocol.histories, inputs, data_root=chosen.data)
    columns = {split: dict(np.load(inputs / f"{split}.npz")) for split in ("valid", "test")}
    ours = {}
    kinds = {v for peer in chosen.peers for v in PEERS[peer].variants} & {*chosen.variants}
    for variant in sorted(kinds):
        settings = [*chosen.settings, *protocol.settings(variant, chosen.passes)]
        runs = _runs_of_ours(protocol, variant, chosen)
        for seed in chosen.seeds:
            display.stage(f"{name}: ours {VARIANTS[variant]}, seed {seed}")
            folder = run_recipe(protocol.recipe, seed, settings, runs, display)[1]
            ours.setdefault(variant, []).append(folder)
    rows = []
    for task in chosen.tasks or meta["labels"]:
        reference = {v: [test_rows(folder, task) for folder in f] for v, f in ours.items()}
        for peer_name in chosen.peers:
            peer = PEERS[peer_name]
            for variant in (v for v in peer.variants if v in ours):
                display.stage(f"{name}, {task}: {peer.title}, inputs {VARIANTS[variant]}")
                found = train_peer(peer, inputs, task, variant, chosen)
                row = {
                    "bench": "quality",
                    "case": f"{name}, {task}: {peer.title}, inputs {VARIANTS[variant]}"
                    + PASSES[chosen.passes],
                    "passes": chosen.passes,
                    "protocol": name,
                    "ours": protocol.recipe,
                    "task": task,
                    "inputs": VARIANTS[variant],
                    "seeds": chosen.seeds,
                    "device": "cpu",
                    **compare(peer, found, columns, meta["labels"].index(task), reference[variant]),
                }
                # The versions of the row are those of our side.
                row["peer_versions"] = row.pop("versions")
                rows.append(row)
                mean, gap = row["mean"]["test"], row["against_ours"]
                display.stage(
                    f"AUC {mean['auc']:.4f}, NE {mean['ne']:.4f}, NE minus ours "
                    f"{gap['ne_difference']:+.4f} ({gap['low_95']:+.4f} .. {gap['high_95']:+.4f}), "
                    f"{row['fit_s']:.0f} s a fit"
                )
    return rows


def _runs_of_ours(protocol: Protocol, variant: str, chosen: argparse.Namespace) -> Path:
    """Folder of our runs of one kind; runs of equal settings lie in one."""
    repeated = chosen.passes == "any" and protocol.repeated.get(variant)
    kind = ("-raw" if variant == "raw" else "") + ("-any" if repeated else "")
    return chosen.ours.with_name(chosen.ours.name + kind)


def main() -> None:
    """Train, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--protocol", nargs="+", choices=list(PROTOCOLS), dest="protocols")
    parser.add_argument("--peer", nargs="+", choices=list(PEERS), dest="peers")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--passes", choices=list(PASSES), default="one", help="over the rows")
    parser.add_argument("--inputs", nargs="+", choices=list(VARIANTS), dest="variants")
    parser.add_argument("--task", nargs="+", dest="tasks", help="labels; default all")
    parser.add_argument("--again", action="store_true", help="train peers that are trained already")
    parser.add_argument("--out", type=Path, default=Path("runs/peers"), help="inputs, predictions")
    parser.add_argument(
        "--ours",
        type=Path,
        default=Path("runs/quality"),
        help="runs of ours; NAME-raw: without statistics, as bench_quality.py may have left them; "
        "NAME-any: several passes",
    )
    parser.add_argument("--data", type=Path, default=DATA_ROOT, help="prepared data sets")
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".nox", help="folder of peers-NAME"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    chosen.peers = chosen.peers or list(PEERS)
    chosen.variants = chosen.variants or list(VARIANTS)
    console = Console()
    display = Display(console)
    for protocol in chosen.protocols or list(PROTOCOLS):
        origin = provenance()
        # A row with settings is a case of its own and must not replace the shipped recipe's.
        suffix = f" with {', '.join(chosen.settings)}" if chosen.settings else ""
        rows = [
            {**row, "case": row["case"] + suffix, "settings": chosen.settings, **origin}
            for row in run_protocol(protocol, chosen, display)
        ]
        json.dumps(rows, allow_nan=False)  # refuse to write what is not a number
        write_rows(chosen.results, rows)
        console.print(f"{len(rows)} rows in {chosen.results}")


if __name__ == "__main__":
    main()
