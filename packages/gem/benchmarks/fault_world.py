"""What every fault of the campaign starts from, and what has to hold afterwards."""

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faulty_runs import Command, Ended, Strike

from gem.data.prepare import prepare
from gem.data.synthetic_spec import SyntheticSpec

PERIODS = ("progressive", "valid", "test")
STEPS, EVERY = 24, 4
OPTIONS = SyntheticSpec(rows=960, users=60, items=40, categories=4, max_backlog_events=12)
RECIPE = f"""
[data]
dataset = "synthetic"
folder = "data"
[data.streams.clicks]
max_events = 6
[data.streams.impressions]
max_events = 8
[[data.statistics]]
kind = "rate"
name = "item_rate"
keys = ["item_id"]
label = "click"
towards = 0.3
[model]
kind = "din"
[train]
batch_examples = 32
checkpoint_every_steps = {EVERY}
keep_checkpoints = 3
log_every_steps = 2
window_steps = 4
threads = 1
device = "cpu"
ema_decay = 0.9
"""
# Less than a checkpoint or the log of a run has, and more than a command prints.
DISK_BYTES = (12_288, 40_960, 262_144)
TRAIN = ("train", "recipe.toml", "--out", "run", "--json", "--resume")
WORKERS = (*TRAIN, "--set", "data.workers=1")  # and one more process for the statistics
# It went to the end by itself; it was ended, and went on; it stopped with one clear line, and went
# on once the damage was mended; an older checkpoint was taken, with a line that says so; a batch
# was left out, with a line and a count. In all but the last the metrics are those of the unbroken
# run.
EQUAL, RESUMED, STOPPED, OLDER, SKIPPED = "equal", "resumed", "stopped", "older", "skipped"
LOST = "LOST"


class LostError(Exception):
    """A fault that cost something, or that was not told in one line."""


@dataclass
class World:
    """What every fault starts from.

    Attributes:
        home: folder with `recipe.toml` and `data`; copied for each fault.
        unbroken: ranks -> the metrics of a run that nothing strikes.
        files: ranks -> file operations of such a run, on its first rank.
        half: folder of a run that was ended half way, with its checkpoints.
    """

    home: Path
    unbroken: dict[int, dict[str, Any]]
    files: dict[int, int]
    half: Path


def make_world(folder: Path) -> World:
    """Make data and recipe, and the unbroken runs to compare with.

    Args:
        folder: an empty one.

    Returns:
        the world.
    """
    home = folder / "home"
    home.mkdir()
    prepare("synthetic", home / "data", options=OPTIONS)
    (home / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    unbroken, files = {}, {}
    for ranks in (1, 2):
        place = folder / f"unbroken-{ranks}"
        shutil.copytree(home, place)
        ended = Command(place, TRAIN, ranks).run()[0]
        if ended.code != 0:
            raise LostError(f"the unbroken run ended with {ended.code}: {ended.err}")
        unbroken[ranks], files[ranks] = _metrics(place), ended.files
    half = folder / "half"
    shutil.copytree(home, half)
    Command(half, TRAIN, strike=Strike("kill", "step", STEPS - 5)).run()
    return World(home, unbroken, files, half)


def _metrics(place: Path) -> dict[str, Any]:
    summary = json.loads((place / "run" / "summary.json").read_text(encoding="utf-8"))
    return {key: summary[key] for key in ("steps", "examples", *PERIODS)}


@dataclass
class Fault:
    """One fault under way.

    Attributes:
        world: what it starts from.
        place: its own copy.
        random: draws where it strikes.
        where: in words.
        message: the line that told it.
        ranks: of the run.
        words: that train.
    """

    world: World
    place: Path
    random: random.Random
    where: str = ""
    message: str = ""
    ranks: int = 1
    words: tuple[str, ...] = TRAIN

    def begin(self, half: bool = False) -> None:  # noqa: FBT001, FBT002 - of this file alone
        """Copy the world."""
        shutil.copytree(self.world.half if half else self.world.home, self.place)

    def strike(self, strike: Strike, *, rank: int = 0) -> list[Ended]:
        """Train, and let a fault strike."""
        self.where = str(strike) + (f" of rank {rank}" if self.ranks > 1 else "")
        return Command(self.place, self.words, self.ranks, strike, rank).run()

    def train(self) -> Ended:
        """Train, or go on, without a fault; the first rank."""
        return Command(self.place, self.words, self.ranks).run()[0]

    def one_line(self, ended: Ended) -> None:
        """Hold that an error was told in one line, and keep it."""
        errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        if ended.code != 2 or len(errors) != 1 or "Traceback" in ended.err:
            raise LostError(f"no clear line, exit code {ended.code}: {ended.err[-600:]}")
        self.message = errors[0]

    def compare(self) -> None:
        """Hold the metrics of the run against those of the unbroken one."""
        found, wanted = _metrics(self.place), self.world.unbroken[self.ranks]
        differing = _first_difference(found, wanted)
        if differing:
            raise LostError(differing)

    def resume(self) -> None:
        """Go on, and hold the metrics against those of the unbroken run."""
        ended = self.train()
        if ended.code != 0:
            raise LostError(f"--resume ended with {ended.code}: {ended.err[-600:]}")
        self.compare()


def _first_difference(found: Any, wanted: Any, path: str = "") -> str:
    """Where two summaries differ, in words; empty where they do not."""
    if isinstance(found, dict) and isinstance(wanted, dict) and found.keys() == wanted.keys():
        parts = (_first_difference(found[key], wanted[key], f"{path} {key}") for key in wanted)
        return next((part for part in parts if part), "")
    return "" if found == wanted else f"{path.strip()} differs: {found} and not {wanted}"
