"""Waiting for labels: what is scored and trained when, and that a resume changes nothing."""

import io
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from gem.config import RunConfig
from gem.data.prepare import default_folder, provide
from gem.data.reader import open_reader
from gem.model.heads import probabilities
from gem.train import loop, scored_in_time
from gem.train.guard import Guard
from gem.train.label_delay import scored_before, waits
from gem.train.loop import train
from gem.train.progress import Display
from gem.train.run_folder import CHECKPOINTS
from gem.train.saved_run import saved_run
from gem.train.step import TrainStep
from gem_opkit.errors import ConfigError, DataError
from gem_parallel.launch import World
from gem_parallel.testing import run_ranks

WAIT = "train.label_delay=wait"
# Equal steps whatever their number is, and a checkpoint behind each.
EVERY_STEP = (
    *("train.schedule.decay=constant", "train.checkpoint_every_steps=1"),
    "train.keep_checkpoints=99",
)
BATCH, BATCHES = 32, 10
PERIODS = ("progressive", "valid", "test")


def opened(run):
    """A run, at one of its checkpoints."""
    return saved_run(run, command="gem eval", display=None, data_root=Path("runs/data"))


def by_hand(times, batch, delay, behind):
    """Steps, and what has been scored before each, by going through time.

    A label that comes at once is known to whoever comes strictly later, as everywhere.
    """
    delay = max(delay, 1)
    batches = [times[at : at + batch] for at in range(0, len(times), batch)]
    trained = [j for j, rows in enumerate(batches) if behind is None or rows[-1] + delay <= behind]
    scored = []
    for j in trained:
        waiting = [k for k, rows in enumerate(batches) if rows[0] < batches[j][-1] + delay]
        scored.append(max(len(waiting), j + 1))
    return scored


@pytest.mark.parametrize("delay", [0, 1, 7, 60, 1000])
@pytest.mark.parametrize("behind", [None, "near", "far"])
def test_the_plan_is_what_time_says(delay, behind, rng):
    for batch in (1, 3, 8):
        times = np.sort(rng.integers(0, 120, 50))
        first = {None: None, "near": int(times[-1]) + 1, "far": int(times[-1]) + 500}[behind]
        found = waits(times, batch, delay, first)
        assert found.scored_S.tolist() == by_hand(times.tolist(), batch, delay, first)
        assert found.batches == -(-len(times) // batch) and found.delay_ms == delay
        assert [scored_before(found, s) for s in range(found.steps)] == [0, *found.scored_S[:-1]][
            : found.steps
        ]
        assert scored_before(found, found.steps) == found.batches


def test_labels_that_come_at_once_are_not_known_to_rows_of_the_same_time():
    times = np.array([0, 5, 5, 5, 5, 9])
    found = waits(times, 2, 0, None)
    assert found.scored_S.tolist() == [3, 3, 3]
    assert waits(times, 2, 0, 9).steps == 2
    assert waits(times, 2, 0, 10).steps == 3


def come_after(folder, delay_ms):
    """Declare that the label of conversions is known so long after its row."""
    text = (folder / "dataset.toml").read_text()
    text, count = re.subn(
        r'(name = "conversion"\n)(?:visible_after_ms = \d+\n)?',
        rf"\g<1>visible_after_ms = {delay_ms}\n",
        text,
    )
    assert count == 1
    (folder / "dataset.toml").write_text(text)


@pytest.fixture(scope="module")
def late(tiny, data_root, tmp_path_factory):
    """The tiny data set, whose labels come so late that a few batches are open at a time."""
    config = tiny()
    provide(config.data, data_root)
    folder = tmp_path_factory.mktemp("late") / "synthetic"
    shutil.copytree(default_folder(config.data, data_root), folder)
    plain = open_reader(folder, config.data, batch_size=BATCH)
    times = plain.times_ms("train")
    delay = int(np.median(times[3 * BATCH :] - times[: -3 * BATCH]))
    come_after(folder, delay)
    return folder, times, delay, int(plain.times_ms("valid")[0])


@pytest.fixture(scope="module")
def waited(late, tiny, tmp_path_factory):
    """A run that waits, what it scored at which step, and what it said."""
    seen: list[tuple[int, int, np.ndarray]] = []
    plain = scored_in_time.add_scores

    def recorded(run, batch, p_BA, **more):
        seen.append((int(batch.row_B[0]), run.state.step, p_BA.copy()))
        plain(run, batch, p_BA, **more)

    folder = tmp_path_factory.mktemp("waited") / "run"
    said = io.StringIO()
    config = tiny(f'data.folder="{late[0]}"', WAIT, *EVERY_STEP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scored_in_time, "add_scores", recorded)
        display = Display(Console(file=said, width=300))
        summary = train(config, folder, display=display)
    return folder, summary, seen, said.getvalue()


def test_a_row_is_scored_at_its_time_by_what_was_answered_by_then(late, waited):
    _, times, delay, behind = late
    _, summary, seen, said = waited
    begins = range(0, len(times), BATCH)
    known = [int(times[min(at + BATCH, len(times)) - 1]) + delay for at in begins]
    steps = sum(moment <= behind for moment in known)
    assert 0 < steps < BATCHES and summary["steps"] == steps
    assert summary["examples"] == steps * BATCH
    assert [row for row, _, _ in seen] == list(begins)
    for row, taken, _ in seen:
        answered = sum(moment <= int(times[row]) for moment in known[:steps])
        assert taken == answered
    assert max(taken for _, taken, _ in seen) > min(taken for _, taken, _ in seen)
    assert summary["progressive"]["click"]["examples"] == len(times)
    assert f"{BATCHES - steps} of {BATCHES} batches are never trained on" in said


def test_its_predictions_are_those_of_a_run_without_the_wait_at_that_step(
    late, tiny, waited, tmp_path
):
    folder, _, seen, _ = waited
    config = tiny(f'data.folder="{late[0]}"', *EVERY_STEP)
    train(config, tmp_path / "plain")
    batches = list(open_reader(late[0], config.data, batch_size=BATCH).batches("train"))
    for place, (_, taken, p_BA) in enumerate(seen):
        if not taken or place % 3:
            continue
        with opened(tmp_path / "plain" / CHECKPOINTS / f"step-{taken}") as saved:
            step = saved.run.step
            step.model.eval()
            with torch.no_grad():
                want = probabilities(step.model(batches[place])).numpy()
            np.testing.assert_array_equal(p_BA, want)
            weights = {n: p.detach().clone() for n, p in step.model.named_parameters()}
        with opened(folder / CHECKPOINTS / f"step-{taken}") as saved:
            for name, p in saved.run.step.model.named_parameters():
                assert torch.equal(p, weights[name]), name


@pytest.mark.parametrize("back", [0, 1, 3])
def test_a_resumed_run_is_the_unbroken_one(waited, tmp_path, back):
    folder, summary, _, _ = waited
    shutil.copytree(folder, tmp_path / "run")
    for gone in range(back):
        shutil.rmtree(tmp_path / "run" / CHECKPOINTS / f"step-{summary['steps'] - gone}")
    (tmp_path / "run" / "summary.json").unlink()
    with opened(folder) as saved:
        config = saved.run.config
    again = train(config, tmp_path / "run", resume=True)
    assert {k: again[k] for k in PERIODS} == {k: summary[k] for k in PERIODS}
    assert again["steps"] == summary["steps"]


@pytest.mark.parametrize("every", [1, 99])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_run_that_a_faulty_step_stopped_scores_no_row_twice(
    late, waited, tiny, tmp_path, monkeypatch, at, every
):
    _, summary, seen, _ = waited
    saves = f"train.checkpoint_every_steps={every}"
    config = tiny(f'data.folder="{late[0]}"', WAIT, *EVERY_STEP, saves)
    with monkeypatch.context() as patch:
        judged = iter(range(BATCHES))
        plain = Guard.judge

        def judge(guard, loss, finite):
            return plain(guard, loss * float("nan") if next(judged) == at else loss, finite)

        patch.setattr(Guard, "judge", judge)
        with pytest.raises(DataError, match=f"in step {at + 1};"):
            train(config, tmp_path / "run")
    scored: list[int] = []
    add = scored_in_time.add_scores
    monkeypatch.setattr(
        scored_in_time,
        "add_scores",
        lambda run, batch, p: (scored.append(int(batch.row_B[0])), add(run, batch, p))[1],
    )
    again = train(config, tmp_path / "run", resume=True)
    assert {k: again[k] for k in PERIODS} == {k: summary[k] for k in PERIODS}
    # What was scored before the step that stopped it is in its checkpoint; without one all begins
    # anew.
    done = sum(taken <= at for _, taken, _ in seen) if at else 0
    assert scored == [row for row, _, _ in seen[done:]]


def on_a_rank(world: World, config: RunConfig, folder):
    @contextmanager
    def these_ranks(_):
        yield world

    loop.process_group = these_ranks
    return train(config, folder)


def test_two_ranks_score_and_train_alike(late, tiny, tmp_path):
    config = tiny(f'data.folder="{late[0]}"', WAIT, "model.dropout=0.0")
    one = train(config, tmp_path / "one")
    two = run_ranks(on_a_rank, 2, config, tmp_path / "two")[0]
    assert two["steps"] == one["steps"]
    for period in PERIODS:
        for task, found in one[period].items():
            assert two[period][task]["examples"] == found["examples"]
            assert two[period][task]["ne"] == pytest.approx(found["ne"], rel=1e-5)


def test_without_a_delay_every_row_is_scored_and_trained_on(late, tiny, tmp_path, monkeypatch):
    folder = tmp_path / "data"
    shutil.copytree(late[0], folder)
    come_after(folder, 0)
    taken: list[int] = []
    plain = TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", lambda s, b, k: (taken.append(k), plain(s, b, k))[1])
    # Batches between which time goes on: rows of one time do not know each other's labels.
    size, times = 48, late[1]
    edges = np.arange(size, len(times), size)
    assert (times[edges] > times[edges - 1]).all()
    settings = (
        f'data.folder="{folder}"',
        *("model.dropout=0.0", f"train.batch_examples={size}"),
    )
    one = train(tiny(*settings, WAIT), tmp_path / "wait")
    two = train(tiny(*settings), tmp_path / "none")
    batches = len(edges) + 1
    assert taken == [*range(batches), *range(batches)]
    for period in PERIODS:
        for task, found in two[period].items():
            assert one[period][task]["ne"] == pytest.approx(found["ne"], rel=1e-6)


def test_several_passes_are_refused(tiny):
    with pytest.raises(ConfigError, match='label_delay must be "none" with several passes'):
        tiny(WAIT, "train.passes=2")


def test_labels_that_come_too_late_are_refused(late, tiny, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(late[0], folder)
    come_after(folder, 99_999_999_999)
    with pytest.raises(DataError, match=r"label_delay must leave rows .*99,999,999.999|got none"):
        train(tiny(f'data.folder="{folder}"', WAIT), tmp_path / "run")
