"""Evaluation while training leaves no trace in it; early stop; and both go on after a resume."""

import io
import json
import shutil
from itertools import count

import pytest
import torch
from rich.console import Console

from gem.train import checkpoint_writer, interim, loop
from gem.train.checkpoint import latest_complete, read_manifest
from gem.train.evaluate import evaluate
from gem.train.held_out import evaluate_folder
from gem.train.interrupt import Interrupted
from gem.train.loop import train
from gem.train.progress import Display
from gem.train.run_folder import CHECKPOINTS
from gem.train.run_log import METRICS_FILE
from gem_opkit.errors import ConfigError, DataError

EVERY = "train.interim.every_steps=2"
NEVER_BETTER = ("train.interim.stop_after=2", "train.interim.min_gain=9.0")
WALL_CLOCK = ("examples_per_s", "time_frac", "model_tflops_per_s", "e2e_mfu")


def rows(folder, *, interim):
    found = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in WALL_CLOCK}
        for row in found
        if bool(row.get("interim")) == interim
    ]


def end(folder, summary):
    """Everything that a run has come to, and the bits of its last checkpoint but its config."""
    newest = latest_complete(folder / CHECKPOINTS)
    results = {k: summary[k] for k in ("steps", "progressive", "valid", "test")}
    return results, next(newest.glob("*.distcp")).read_bytes(), read_manifest(newest)["counters"]


@pytest.fixture(scope="module")
def watched(tiny, tmp_path_factory, data_root):
    folder = tmp_path_factory.mktemp("watched") / "run"
    return folder, train(tiny(EVERY), folder, data_root=data_root)


def test_training_is_the_same_with_and_without(unbroken, watched):
    assert end(*watched) == end(*unbroken)
    assert rows(watched[0], interim=False) == rows(unbroken[0], interim=False)
    assert rows(unbroken[0], interim=True) == []
    found = rows(watched[0], interim=True)
    assert [row["step"] for row in found] == [2, 4, 6, 8, 10]
    assert {row["split"] for row in found} == {"valid"}
    # The last one is of the final weights, as the one at the end is.
    assert found[-1]["metrics"] == watched[1]["valid"]
    assert found[0]["metrics"] != found[1]["metrics"]
    nes = [row["metrics"]["click"]["ne"] for row in found]
    training = watched[1]["training"]
    assert (training["best_ne"], training["best_step"]) == (min(nes), 2 + 2 * nes.index(min(nes)))


def test_rows_tell_the_flops_of_their_own_steps(watched):
    """Over the time of these steps, without evaluations; together they are those of the run."""
    lines = (watched[0] / METRICS_FILE).read_text().splitlines()
    found = [row for row in map(json.loads, lines) if "split" not in row]
    seconds = [row["examples"] / row["examples_per_s"] for row in found]
    shares = [1.0 - row["time_frac"]["evaluation"] for row in found]
    assert shares[0] == 1.0 > shares[-1]
    ends = [s * share for s, share in zip(seconds, shares, strict=True)]
    spans = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    flops = sum(1e12 * row["model_tflops_per_s"] * s for row, s in zip(found, spans, strict=True))
    total = watched[1]["efficiency"]["flops_per_example"] * watched[1]["examples"]
    assert flops == pytest.approx(total, rel=1e-6)
    assert {row["e2e_mfu"] for row in found} == {None}  # a CPU has no peak in the table


def test_what_is_better_and_when_it_is_enough(tiny, data_root, tmp_path, monkeypatch):
    """By the NE of the task that is meant: unknown says nothing, better starts anew."""
    nes = iter([0.90, None, 0.88, 0.80, 0.81, 0.76])
    click = count(1)
    monkeypatch.setattr(
        interim,
        "_measure",
        lambda _: {"click": {"ne": float(next(click))}, "conversion": {"ne": next(nes)}},
    )
    settings = ["train.interim.every_steps=1", "train.interim.stop_after=2"]
    settings += ["train.interim.task=conversion", "train.interim.min_gain=0.05"]
    summary = train(tiny(*settings), tmp_path, data_root=data_root)
    training = summary["training"]
    assert (summary["steps"], training["stopped_early"]) == (6, True)
    assert (training["best_step"], training["best_ne"]) == (4, 0.80)


def test_an_evaluation_sees_no_more_batches_than_it_should(tiny, data_root, tmp_path):
    train(tiny(EVERY, "train.interim.max_batches=1"), tmp_path, data_root=data_root)
    found = rows(tmp_path, interim=True)
    assert {row["metrics"]["click"]["examples"] for row in found} == {32}
    shutil.rmtree(tmp_path / CHECKPOINTS / "step-10")
    shutil.rmtree(tmp_path / CHECKPOINTS / "step-9")
    whole = evaluate_folder(tmp_path, data_root=data_root)
    assert (whole["steps"], whole["valid"]["click"]["examples"]) == (6, 40)


def test_an_early_stop_keeps_the_best_and_is_an_end(tiny, data_root, tmp_path):
    config = tiny(EVERY, *NEVER_BETTER, "train.keep_checkpoints=1")
    summary = train(config, tmp_path, data_root=data_root)
    assert summary["steps"] == 6
    training = summary["training"]
    assert (training["stopped_early"], training["best_step"]) == (True, 2)
    assert training["best_ne"] == rows(tmp_path, interim=True)[0]["metrics"]["click"]["ne"]
    assert {p.name for p in (tmp_path / CHECKPOINTS).iterdir()} == {"step-2", "step-6"}
    again = train(config, tmp_path, resume=True, data_root=data_root)
    assert end(tmp_path, again) == end(tmp_path, summary)
    best = evaluate_folder(tmp_path / CHECKPOINTS / "step-2", data_root=data_root)
    assert best["valid"]["click"]["ne"] == training["best_ne"]


def test_an_early_stop_between_two_rows_loses_no_step(tiny, data_root, tmp_path):
    config = tiny("train.interim.every_steps=3", *NEVER_BETTER)
    summary = train(config, tmp_path, data_root=data_root)
    assert (summary["steps"], summary["progressive"]["click"]["examples"]) == (9, 288)
    found = rows(tmp_path, interim=False)
    assert [row["step"] for row in found] == [2, 4, 6, 8, 9, 9, 9]  # the last two are at the end
    assert found[4]["lifetime"]["click"]["ne"] == summary["progressive"]["click"]["ne"]
    again = train(config, tmp_path, resume=True, data_root=data_root)
    assert end(tmp_path, again) == end(tmp_path, summary)
    assert rows(tmp_path, interim=False) == found


def test_after_the_last_step_there_is_nothing_to_stop(tiny, data_root, tmp_path):
    settings = ["train.interim.every_steps=5", "train.interim.stop_after=1"]
    settings += ["train.interim.min_gain=9.0", "train.log_every_steps=4"]
    summary = train(tiny(*settings), tmp_path, data_root=data_root)
    assert summary["steps"] == 10
    assert not summary["training"]["stopped_early"]
    found = rows(tmp_path, interim=False)
    assert [row["step"] for row in found] == [4, 8, 10, 10, 10]
    assert found[2]["loss"] is not None


def test_a_rank_without_counters_can_stop_early_after_a_resume(
    tiny, data_root, tmp_path, monkeypatch
):
    """What a checkpoint holds of the steps since the last row is with the first rank alone."""
    config = tiny("train.interim.every_steps=3", *NEVER_BETTER)
    monkeypatch.setattr(interim, "asked_to_stop", lambda run: 15 * (run.state.step == 9))
    monkeypatch.setattr(loop, "_agreed", lambda run, _: 15 * (run.state.step == 9))
    with pytest.raises(Interrupted, match="after step 9"):
        train(config, tmp_path, data_root=data_root)
    monkeypatch.undo()
    load = loop.continue_run

    def as_another_rank(run):
        load(run)
        run.state.counters = {}

    monkeypatch.setattr(loop, "continue_run", as_another_rank)
    summary = train(config, tmp_path, resume=True, data_root=data_root)
    assert (summary["steps"], summary["training"]["stopped_early"]) == (9, True)


def test_a_best_one_that_was_not_written_is_not_promised(tiny, data_root, tmp_path, monkeypatch):
    write, count = checkpoint_writer.write_snapshot, [0]

    def first_one_fails(*args, **settings):
        count[0] += 1
        if count[0] == 1:
            raise DataError("no room")
        return write(*args, **settings)

    monkeypatch.setattr(checkpoint_writer, "write_snapshot", first_one_fails)
    config = tiny(EVERY, *NEVER_BETTER, "train.checkpoint_failure=go_on")
    display = Display(Console(file=(printed := io.StringIO()), width=10_000))
    train(config, tmp_path, display=display, data_root=data_root)
    assert "warning: no checkpoint this time, training goes on: no room" in printed.getvalue()
    assert "was after step 2, of which there is no checkpoint" in printed.getvalue()


def test_a_resumed_run_stops_where_the_unbroken_one_does(tiny, data_root, tmp_path):
    settings = (EVERY, *NEVER_BETTER, "train.accumulation_parts=2", "train.guard.spike_factor=9.0")
    config = tiny(*settings, "train.checkpoint_every_steps=1")
    whole = tmp_path / "whole"
    summary = train(config, whole, data_root=data_root)
    for step in (3, 4):
        part = tmp_path / str(step)
        shutil.copytree(whole, part)
        for later in range(step + 1, 7):
            shutil.rmtree(part / CHECKPOINTS / f"step-{later}")
        again = train(config, part, resume=True, data_root=data_root)
        assert end(part, again) == end(whole, summary)
        assert rows(part, interim=True) == rows(whole, interim=True)
        assert rows(part, interim=False) == rows(whole, interim=False)


def test_an_evaluation_that_was_broken_off_is_done_again(
    tiny, watched, data_root, tmp_path, monkeypatch
):
    """A signal in the middle of it: the run stops there, and goes on as if nothing had been."""
    asked = []

    def stop(run):
        asked.append(run.state.step)
        return 15 if run.state.step == 6 else 0

    monkeypatch.setattr(interim, "asked_to_stop", stop)
    monkeypatch.setattr(loop, "_agreed", lambda run, _: 15 if run.state.step == 6 else 0)
    for resume in (False, True):  # and once more: it is still due then
        with pytest.raises(Interrupted, match="after step 6"):
            train(tiny(EVERY), tmp_path, resume=resume, data_root=data_root)
    monkeypatch.undo()
    assert asked.count(6) == 2
    assert [row["step"] for row in rows(tmp_path, interim=True)] == [2, 4]
    # Another process did it and was killed before it could save: its row is written once all the
    # same.
    log = tmp_path / METRICS_FILE
    done = (watched[0] / METRICS_FILE).read_text().splitlines(keepends=True)
    log.write_text(log.read_text() + "".join(r for r in done if '"step": 6, "interim"' in r))
    assert [row["step"] for row in rows(tmp_path, interim=True)] == [2, 4, 6]
    again = train(tiny(EVERY), tmp_path, resume=True, data_root=data_root)
    assert end(tmp_path, again) == end(*watched)
    assert rows(tmp_path, interim=True) == rows(watched[0], interim=True)


def test_buffers_and_random_numbers_are_put_back(monkeypatch, tiny, unbroken, data_root, tmp_path):
    """Even if the model drew random numbers and counted in its evaluations."""

    def careless(model, *args, **settings):
        torch.rand(7)
        with torch.no_grad():
            for buffer in model.buffers():
                buffer.add_(1)
        block = evaluate(model, *args, **settings)
        torch.rand(7)
        return block

    monkeypatch.setattr(interim, "score", careless)
    summary = train(tiny(EVERY), tmp_path, data_root=data_root)
    assert end(tmp_path, summary) == end(*unbroken)


def test_what_cannot_be_evaluated_is_refused_at_once(tiny, data_root, tmp_path):
    with pytest.raises(
        ConfigError, match=r"interim\.stop_after must come with interim\.every_steps"
    ):
        tiny("train.interim.stop_after=2")
    with pytest.raises(ConfigError, match=r"'validd'"):
        train(tiny(EVERY, "train.interim.split=validd"), tmp_path, data_root=data_root)
    with pytest.raises(ConfigError, match=r"interim.task must be one of click, conversion; got"):
        train(tiny(EVERY, "train.interim.task=clik"), tmp_path, data_root=data_root)
    empty = "data.synthetic.valid_frac=0.0"
    with pytest.raises(DataError, match=r"interim\.split must have rows to evaluate; got none"):
        train(tiny(EVERY, empty), tmp_path, data_root=data_root)
    assert list(tmp_path.iterdir()) == []
