"""`gem predict --embeddings` of a model of users: embeddings in time, and their refresh.

Time is cut into ticks. At the end of a tick every user of whom something new is known is embedded
as of then; certain events refresh at once. The model is the newest checkpoint that has learned
from nothing later. All of that follows from the log, so a folder that is continued holds the same
bytes as one that is made in one go, and users without news are not touched.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from gem import __version__
from gem.data.embedding_files import (
    MANIFEST,
    EmbeddingRows,
    Manifest,
    read_manifest,
    write_manifest,
    write_part,
)
from gem.data.whole_folder import is_free
from gem.model.gem import GemModel
from gem.model.spec import GemSpec
from gem.model.transfer_spec import UserModelSpec
from gem.train.averages import averaged_weights
from gem.train.model_fingerprint import fingerprint_of
from gem.train.progress import Display
from gem.train.run import DATA_ROOT, Run
from gem.train.saved_run import saved_run
from gem.train.snapshots import Loaded, Snapshot, newest_before, snapshots
from gem_opkit.errors import ConfigError, DataError, UnsupportedError, refusal

_COMMAND = "gem predict"
_BATCH = 512
HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Refresh:
    """When embeddings are made.

    Attributes:
        every_hours: time between ticks, which begin at midnight of UTC.
        trigger: events that refresh at once, ``STREAM.FIELD=ID,ID``; None for none.
        until_ms: no tick later than this, nor than the last example; None: all until then. What
            is known at the end of a log need not be all that comes before a later tick.
    """

    every_hours: float = 24.0
    trigger: str | None = None
    until_ms: int | None = None

    @property
    def every_ms(self) -> int:
        """Milliseconds between ticks."""
        return round(self.every_hours * HOUR_MS)


def is_user_model(model: object) -> bool:
    """Whether a recipe's model is one of users.

    Args:
        model: its section.
    """
    return isinstance(model, GemSpec) and model.user_model is not None


def embed_users(
    run: Path,
    out: Path,
    refresh: Refresh | None = None,
    *,
    grown: Path | None = None,
    display: Display | None = None,
    data_root: Path = DATA_ROOT,
) -> Manifest:
    """Write the embeddings of all users, or continue a folder of them.

    Args:
        run: folder of a run of a model of users.
        out: new or empty, or a folder of this very model, which is continued.
        refresh: when embeddings are made; None for once a day.
        grown: folder of a data set that is the run's own with more behind it, to be read in its
            place; None: the run's own. Of what only the other one holds, the run knows no ids.
        display: shows the progress; none: silent.
        data_root: as in `gem.train.loop.train`.

    Returns:
        the manifest of the folder.

    Raises:
        ConfigError: another kind of model, a folder in use, of another model or with other ticks.
        UnsupportedError: several ranks, or a run of several passes.
        DataError: no complete checkpoint, or the data set is missing or another one; or `grown` is
            not that one with more behind it.
    """
    refresh = Refresh() if refresh is None else refresh
    if refresh.every_ms < 1:
        raise ConfigError(
            refusal(
                _COMMAND,
                "--every",
                must="be at least a millisecond, in hours",
                got=refresh.every_hours,
                fix="give such as 24",
            )
        )
    with saved_run(run, command=_COMMAND, display=display, data_root=data_root) as saved:
        opened = saved.run
        spec = _checked(opened)
        model = opened.step.model
        assert_gem(model)
        with averaged_weights(model, opened.step.ema):
            fingerprint = fingerprint_of(model)
        there = _continued(out, fingerprint, refresh)
        found = snapshots(opened, _COMMAND)
        work = _Work(opened, found, refresh, out, fingerprint, grown)
        return work.write(there, spec.width)


def assert_gem(model: torch.nn.Module) -> GemModel:
    """Give the model its type.

    Args:
        model: of a run whose recipe is of kind gem.
    """
    if not isinstance(model, GemModel):
        raise TypeError(f"{_COMMAND}: a model of users is a GemModel; got {type(model).__name__}")
    return model


def _checked(run: Run) -> UserModelSpec:
    spec = run.config.model
    if not isinstance(spec, GemSpec) or spec.user_model is None:
        raise ConfigError(
            refusal(
                _COMMAND,
                "RUN",
                must="be of a model of users (model.user_model)",
                got=f"recipe {run.config.name}",
                fix="train one, such as synthetic-user",
            )
        )
    if run.world.size > 1:
        raise UnsupportedError(
            refusal(
                _COMMAND,
                "--embeddings",
                must="run in one process",
                got=f"{run.world.size} ranks",
                fix="leave torchrun out",
            )
        )
    return spec.user_model


def _continued(out: Path, fingerprint: str, refresh: Refresh) -> Manifest | None:
    """The manifest of a folder that is continued; None for a new one."""
    if not (out / MANIFEST).is_file():
        begun = out.is_dir() and all(e.name.startswith(("part-", ".")) for e in out.iterdir())
        if not is_free(out) and not begun:
            raise ConfigError(
                refusal(
                    _COMMAND,
                    "--out",
                    must="be new, empty, or a folder of embeddings",
                    got=out,
                    fix="choose another --out",
                )
            )
        return None
    there = read_manifest(out, "--out")
    for name, own, stored in (
        ("fingerprint of the model", fingerprint, there.fingerprint),
        ("--every", refresh.every_hours, there.every_hours),
        ("--refresh-on", refresh.trigger, there.trigger),
    ):
        if own != stored:
            raise ConfigError(
                refusal(
                    _COMMAND,
                    "--out",
                    must="be continued as it was begun, by the same model",
                    got=f"{name} {own} and in {out} {stored}",
                    fix="choose another --out",
                )
            )
    return there


class _Work:
    """The ticks of a folder, in order."""

    def __init__(
        self,
        run: Run,
        found: list[Snapshot],
        refresh: Refresh,
        out: Path,
        fingerprint: str,
        grown: Path | None,
    ) -> None:
        self._run, self._snapshots, self._refresh = run, found, refresh
        self._out, self._fingerprint = out, fingerprint
        self._model = assert_gem(run.step.model)
        self._reader = run.reader.as_of(grown)
        self._grown = grown is not None
        self._loaded = Loaded(run, run.state.step)
        self._triggered: tuple[np.ndarray, np.ndarray] | None = None
        if refresh.trigger is not None:
            self._triggered = self._reader.events_with(*_trigger(refresh.trigger))

    def write(self, there: Manifest | None, width: int) -> Manifest:
        reader, refresh = self._run.reader, self._refresh
        first, last = _span(self._run)
        if self._grown:
            last = self._reader.last_ms()
        every = refresh.every_ms
        begin = _tick(max(first, self._snapshots[0].from_ms) - 1, every)
        until = last if refresh.until_ms is None else min(last, refresh.until_ms)
        done = begin - every if there is None else there.until_ms
        end = until // every * every
        if there is None and end < begin:
            raise ConfigError(
                refusal(
                    _COMMAND,
                    "--until",
                    must=f"be at least {begin}, the first tick at which a checkpoint may be asked",
                    got=until,
                    fix="keep earlier checkpoints (train.checkpoint_every_steps and "
                    "train.keep_checkpoints), set a smaller --every, or a later --until",
                )
            )
        begin = begin if there is None else there.begin_ms
        if there is not None:
            self._check_past(there)
        self._out.mkdir(parents=True, exist_ok=True)
        parts = [] if there is None else list(there.parts)
        users, times, ticks = self._asked(begin, done, max(end, done))
        edges = np.flatnonzero(np.diff(ticks, prepend=-1, append=-1))
        display = self._run.display
        bar = display.bar("embed", len(edges) - 1 if len(ticks) else 0)
        with bar:
            for place, (low, high) in enumerate(pairwise(edges), start=1):
                rows = self._embedded(users[low:high], times[low:high])
                parts.append(write_part(self._out, int(ticks[low]), rows, self._fingerprint))
                bar.update(place)
        manifest = Manifest(
            fingerprint=self._fingerprint,
            version=__version__,
            recipe=self._run.config.name,
            dataset=reader.dataset.name,
            width=width,
            every_hours=refresh.every_hours,
            trigger=refresh.trigger,
            begin_ms=begin,
            until_ms=max(end, done),
            past=self._reader.past_digest(max(end, done)),
            parts=tuple(parts),
        )
        write_manifest(self._out, manifest)
        self._tell(manifest, len(users))
        return manifest

    def _check_past(self, there: Manifest) -> None:
        if there.past in (None, self._reader.past_digest(there.until_ms)):
            return
        raise DataError(
            refusal(
                _COMMAND,
                "--out",
                must="be continued over a log that says the same of all that it was made of",
                got=f"another past before {there.until_ms} ms than {self._out} was made of",
                fix="give --data the log that has grown on, or choose another --out",
            )
        )

    def _asked(self, begin: int, done: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Users, times as of which they are embedded, and ends of the ticks; in time order."""
        every = self._refresh.every_ms
        who, when = self._reader.news()
        as_of = np.maximum(_ticks(when, every), begin)
        if self._triggered is not None:
            more, known = self._triggered
            later = known + 1 >= begin
            who = np.concatenate([who, more[later]])
            as_of = np.concatenate([as_of, known[later] + 1])
        tick = np.maximum(_ticks(as_of - 1, every), begin)
        kept = (tick > done) & (tick <= end)
        pairs = np.unique(np.stack([tick[kept], as_of[kept], who[kept]], axis=1), axis=0)
        return pairs[:, 2].copy(), pairs[:, 1].copy(), pairs[:, 0].copy()

    def _embedded(self, users: np.ndarray, times: np.ndarray) -> EmbeddingRows:
        which = np.array([newest_before(self._snapshots, int(t)).step for t in np.unique(times)])
        steps = which[np.searchsorted(np.unique(times), times)]
        values = []
        for step in np.unique(steps):
            snapshot = next(each for each in self._snapshots if each.step == step)
            self._loaded.put(snapshot)
            values.append(self._vectors(users[steps == step], times[steps == step]))
        # Later times have later checkpoints, so the order is that of the rows.
        return EmbeddingRows(users, times, np.concatenate(values))

    def _vectors(self, users: np.ndarray, times: np.ndarray) -> np.ndarray:
        model, step = self._model, self._run.step
        training = model.training
        model.eval()
        found = []
        try:
            with torch.no_grad(), averaged_weights(model, step.ema):
                for low in range(0, len(users), _BATCH):
                    rows = slice(low, low + _BATCH)
                    batch = self._reader.users(users[rows], times[rows])
                    with step.precision():
                        vectors_BU = model.user_vectors(batch.to(self._run.world.device))
                    found.append(vectors_BU.float().cpu().numpy())
        finally:
            model.train(training)
        return np.concatenate(found)

    def _tell(self, manifest: Manifest, rows: int) -> None:
        users = sum(part.users for part in manifest.parts)
        self._run.display.stage(
            f"{rows:,} embeddings are new in {self._out}, which holds "
            f"{sum(part.rows for part in manifest.parts):,} in {len(manifest.parts)} parts "
            f"({users:,} refreshed users, a user once a part); model {manifest.fingerprint[:12]}"
        )


def _span(run: Run) -> tuple[int, int]:
    """Times of the first and the last example over all splits."""
    found = [run.reader.times_ms(s.name) for s in run.reader.dataset.splits]
    there = [times for times in found if len(times)]
    return min(int(times[0]) for times in there), max(int(times[-1]) for times in there)


def _tick(time_ms: int, every: int) -> int:
    """The first tick later than a time."""
    return (time_ms // every + 1) * every


def _ticks(times_ms: np.ndarray, every: int) -> np.ndarray:
    return (times_ms // every + 1) * every


def _trigger(text: str) -> tuple[str, str, list[int]]:
    name, equals, values = text.partition("=")
    stream, dot, field = name.partition(".")
    ids = [value.strip() for value in values.split(",")]
    if not equals or not dot or not all(re.fullmatch("-?[0-9]{1,18}", i) for i in ids):
        raise ConfigError(
            refusal(
                _COMMAND,
                "--refresh-on",
                must="look like STREAM.FIELD=ID,ID",
                got=repr(text),
                fix="give such as impressions.feedback=2",
            )
        )
    return stream.strip(), field.strip(), [int(i) for i in ids]
