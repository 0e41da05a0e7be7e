"""A run from end to end: reproducible, resumable from every checkpoint, and it learns."""

import json
import re
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from same_run import final_tensors, log_rows, results
from sklearn.metrics import log_loss, roc_auc_score

from gem.data.prepare import default_folder
from gem.train import loop
from gem.train.checkpoint import latest_complete, read_manifest
from gem.train.held_out import evaluate_folder
from gem.train.interrupt import Interrupted
from gem.train.loop import train
from gem.train.normalized_entropy import binary_entropy
from gem.train.run_folder import CHECKPOINTS, check_folder, held_folder
from gem_opkit.errors import ConfigError, DataError
from gem_parallel.launch import World


def diagnostics(folder):
    """What a run leaves for its report, but for when and how fast it ran."""
    found = json.loads((folder / "diagnostics.json").read_text())
    assert found.pop("process")["starts"]
    return found


def check_same_run(folder, summary, unbroken):
    """Equal in every metric, every record, and every bit of the last checkpoint."""
    other, expected = unbroken
    assert results(summary) == results(expected)
    assert log_rows(folder) == log_rows(other)
    assert diagnostics(folder) == diagnostics(other)
    got, wanted = final_tensors(folder), final_tensors(other)
    assert got.keys() == wanted.keys()
    unequal = [name for name in got if not torch.equal(got[name], wanted[name])]
    assert unequal == []


def test_the_same_seed_gives_the_same_run(tiny, unbroken, data_root, tmp_path):
    """Also where it was to continue, and there was no checkpoint: it begins at the first step."""
    check_same_run(tmp_path, train(tiny(), tmp_path, resume=True, data_root=data_root), unbroken)


def test_another_seed_gives_another_run(tiny, unbroken, data_root, tmp_path):
    summary = train(tiny(seed=2), tmp_path, data_root=data_root)
    assert summary["test"]["click"]["ne"] != unbroken[1]["test"]["click"]["ne"]
    assert summary["examples"] == unbroken[1]["examples"]


def test_a_run_resumed_from_any_checkpoint_equals_the_unbroken_one(
    tiny, unbroken, data_root, tmp_path
):
    steps = sorted(
        int(path.name.removeprefix("step-")) for path in (unbroken[0] / CHECKPOINTS).iterdir()
    )
    assert steps == [3, 6, 9, 10]
    for step in (3, 6, 10):  # between two rows of the log, at one, and at the end
        folder = tmp_path / str(step)
        shutil.copytree(unbroken[0], folder)
        for later in steps:
            if later > step:
                shutil.rmtree(folder / CHECKPOINTS / f"step-{later}")
        summary = train(tiny(), folder, resume=True, data_root=data_root)
        check_same_run(folder, summary, unbroken)


@pytest.mark.parametrize("step", [1, 5])
def test_a_run_stopped_between_checkpoints_continues_bit_for_bit(
    tiny, unbroken, data_root, tmp_path, monkeypatch, step
):
    monkeypatch.setattr(loop, "_agreed", lambda run, _: 2 if run.state.step == step else 0)
    with pytest.raises(Interrupted, match=f"signal 2 after step {step}"):
        train(tiny(), tmp_path, data_root=data_root)
    monkeypatch.undo()
    assert latest_complete(tmp_path / CHECKPOINTS).name == f"step-{step}"
    summary = train(tiny(), tmp_path, resume=True, data_root=data_root)
    check_same_run(tmp_path, summary, unbroken)


def test_a_folder_in_use_is_refused(tiny, unbroken, data_root):
    with pytest.raises(ConfigError, match=r"--out must be a new or an empty folder.*--resume"):
        train(tiny(), unbroken[0], data_root=data_root)


def test_resuming_does_not_fill_a_folder_of_something_else(tiny, data_root, tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"--out must be new, empty or a run with its config"):
        train(tiny(), tmp_path, resume=True, data_root=data_root)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"--out must be a folder; got .*file, which is none"):
        train(tiny(), tmp_path / "file", resume=True, data_root=data_root)


def test_a_mended_config_can_use_the_folder_of_the_wrong_one(tiny, data_root, tmp_path):
    """The fault shows only when the names meet the data set; nothing may be written by then."""
    with pytest.raises(ConfigError, match="'clicsk'"):
        train(tiny("data.streams.clicsk.max_events=3"), tmp_path / "run", data_root=data_root)
    assert list((tmp_path / "run").iterdir()) == []


def test_two_runs_at_once_in_one_folder_are_refused(tiny, data_root, tmp_path):
    with (
        held_folder(tmp_path, World()),
        pytest.raises(ConfigError, match="in which no other process trains"),
    ):
        train(tiny(), tmp_path, data_root=data_root)
    with held_folder(tmp_path, World()):  # free again
        pass


def test_a_signal_during_the_last_checkpoint_is_not_lost(tiny, data_root, tmp_path, monkeypatch):
    answers = iter([0] * 2 + [15])
    monkeypatch.setattr(loop, "_agreed", lambda run, _: next(answers))
    with pytest.raises(Interrupted, match="signal 15 after step 2"):
        train(tiny("data.max_rows=64"), tmp_path, data_root=data_root)
    assert latest_complete(tmp_path / CHECKPOINTS).name == "step-2"


def test_a_data_set_without_training_rows_is_refused(tiny, data_root, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(default_folder(tiny().data, data_root), data)
    path = data / "dataset.toml"
    path.write_text(re.sub(r"(?m)^stop = \d+$", "stop = 0", path.read_text(), count=1))
    settings = [f"data.folder={data}"]
    with pytest.raises(DataError, match=r"must have rows in its split 'train'; got none of"):
        train(tiny(*settings), tmp_path / "run", data_root=data_root)


def test_resuming_under_other_settings_names_the_keys(tiny, unbroken, data_root):
    other = tiny("train.dense.lr=0.5", "model.dropout=0.0", "train.keep_checkpoints=1")
    with pytest.raises(ConfigError) as caught:
        train(other, unbroken[0], resume=True, data_root=data_root)
    message = str(caught.value)
    assert "model.dropout: 0.0 here, 0.1 there" in message
    assert "train.dense.lr: 0.5 here, 0.001 there" in message
    assert "keep_checkpoints" not in message


def test_resuming_on_other_data_is_refused(tiny, unbroken, data_root, tmp_path):
    run, data = tmp_path / "run", tmp_path / "data"
    shutil.copytree(unbroken[0], run)
    folder = default_folder(tiny().data, data)
    shutil.copytree(default_folder(tiny().data, data_root), folder)
    toml = folder / "dataset.toml"
    toml.write_text(toml.read_text() + "\n# changed\n")
    with pytest.raises(DataError, match="data set must be the one that the run began with"):
        train(tiny(), run, resume=True, data_root=data)


def test_evaluating_a_folder_gives_the_numbers_of_the_summary(unbroken, data_root):
    found = evaluate_folder(unbroken[0], data_root=data_root)
    assert found["valid"] == unbroken[1]["valid"]
    assert found["test"] == unbroken[1]["test"]
    assert found["steps"] == 10


def test_the_averaged_weights_are_what_is_evaluated(tiny, unbroken, data_root, tmp_path):
    summary = train(
        tiny("train.ema_decay=1e-9", "train.predictions=true"), tmp_path, data_root=data_root
    )
    # The averages do not touch training, only what is evaluated.
    assert summary["progressive"] == unbroken[1]["progressive"]
    assert summary["test"]["click"]["ne"] != unbroken[1]["test"]["click"]["ne"]


def test_the_run_folder_holds_what_was_promised(unbroken):
    folder, summary = unbroken
    assert {path.name for path in folder.iterdir()} == {
        *("config.toml", "metrics.jsonl", "tensorboard", "checkpoints", "summary.json"),
        *("diagnostics.json", "report.html"),
    }
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert list(summary) == [
        *("dataset", "recipe", "seed", "steps", "examples", "world_size", "device"),
        *("training", "progressive", "valid", "test", "throughput", "efficiency", "memory"),
    ]
    assert list(summary["throughput"]) == [
        *("examples_per_s", "tokens_per_s", "step_ms_median", "data_wait_frac"),
    ]
    assert list(summary["efficiency"]) == [
        *("e2e_mfu", "local_mfu", "scaling_ratio", "weak_scaling"),
        *("flops_per_example", "peak_tflops", "peak_source"),
    ]
    assert summary["efficiency"]["e2e_mfu"] is None  # a CPU has no peak in the table
    assert summary["efficiency"]["flops_per_example"] > 0
    assert summary["memory"]["peak_bytes"] > 0
    keys = ["ne", "auc", "gauc", "logloss", "calibration", "examples", "positives"]
    for split in ("progressive", "valid", "test"):
        assert list(summary[split]) == ["click", "conversion"]
        for found in summary[split].values():
            assert list(found) == [*keys, "null_reasons", "domains"]
            assert list(found["domains"]) == ["feed", "stories"]
            for domain in found["domains"].values():
                assert list(domain) == [*keys, "null_reasons"]
    assert summary["progressive"]["click"]["examples"] == summary["examples"] == 320


def test_log_rows_hold_lifetime_window_and_rates(unbroken):
    rows = log_rows(unbroken[0])
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 10, 10]
    assert [row.get("split") for row in rows[-2:]] == ["valid", "test"]
    assert [row["lifetime"]["click"]["examples"] for row in rows[:5]] == [64, 128, 192, 256, 320]
    assert [row["window"]["click"]["examples"] for row in rows[:5]] == [64, 128, 128, 128, 128]
    # Two steps of rise, then a straight line to a tenth at the last of ten steps.
    rates = [row["lr"] for row in rows[:5]]
    assert rates == pytest.approx(
        [1e-3 * f for f in (2 / 3, 1 - 0.9 / 7, 1 - 2.7 / 7, 0.3571428, 0.1)]
    )


def test_predictions_are_what_the_metrics_are_of(tiny, unbroken, data_root, tmp_path):
    summary = train(tiny("train.predictions=true"), tmp_path, data_root=data_root)
    table = pq.read_table(tmp_path / "predictions.parquet")
    assert table.column_names == ["split", "row", "user", "domain", "task", "p", "label"]
    assert len(table) == 2 * 80
    for split, rows in (("valid", range(320, 360)), ("test", range(360, 400))):
        here = picked(table, split, "click")
        assert here["row"] == list(rows)
        label, p = np.array(here["label"]), np.array(here["p"])
        found, loss = summary[split]["click"], log_loss(label, p)
        assert found["logloss"] == pytest.approx(loss, rel=1e-9)
        assert found["ne"] == pytest.approx(loss / binary_entropy(label.mean()), rel=1e-9)
        assert found["auc"] == pytest.approx(roc_auc_score(label, p), abs=1e-12)
        assert found["calibration"] == pytest.approx(p.sum() / label.sum(), rel=1e-9)
    known = sum(x is not None for x in picked(table, "test", "conversion")["label"])
    assert 0 < known == summary["test"]["conversion"]["examples"] < 40
    assert results(summary) == results(unbroken[1])


def picked(table, split, task):
    rows = [r for r in table.to_pylist() if r["split"] == split and r["task"] == task]
    return {name: [row[name] for row in rows] for name in table.column_names}


def test_without_held_out_rows_metrics_are_null_with_a_reason(tiny, data_root, tmp_path):
    empty = ["data.synthetic.valid_frac=0.0", "data.synthetic.test_frac=0.0"]
    summary = train(tiny(*empty, "data.max_rows=64"), tmp_path, data_root=data_root)
    for split in ("valid", "test"):
        found = summary[split]["click"]
        assert found["examples"] == 0
        assert found["ne"] is None
        assert found["null_reasons"]["ne"] == "no labelled examples"


def test_later_passes_are_not_progressive(tiny, data_root, tmp_path):
    settings = ["train.passes=2", "data.max_rows=96", "train.checkpoint_every_steps=4"]
    whole = train(tiny(*settings), tmp_path / "whole", data_root=data_root)
    assert (whole["steps"], whole["examples"]) == (6, 192)
    assert whole["progressive"]["click"]["examples"] == 96
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "whole", broken)
    shutil.rmtree(broken / CHECKPOINTS / "step-6")
    again = train(tiny(*settings), broken, resume=True, data_root=data_root)
    assert results(again) == results(whole)


def test_a_loss_that_is_not_finite_is_refused(tiny, data_root, tmp_path):
    with pytest.raises(
        DataError, match=r"loss must be finite; got (nan|inf) in step \d; .*dense.lr"
    ):
        train(tiny("train.tables.lr=1e37"), tmp_path, data_root=data_root)


def test_a_hundred_users_can_be_learned_by_heart(tiny, data_root, tmp_path):
    settings = [
        *("data.synthetic.users=100", "data.synthetic.rows=300", "data.synthetic.valid_frac=0.0"),
        *("data.synthetic.test_frac=0.0", "model.dropout=0.0", "train.dense.lr=1e-2"),
        *("train.tables.lr=0.2", "train.passes=22", "train.checkpoint_every_steps=10000"),
        *("train.log_every_steps=10", "train.window_steps=10", "train.batch_examples=60"),
    ]
    train(tiny(*settings), tmp_path, data_root=data_root)
    losses = [row["loss"] for row in log_rows(tmp_path) if "loss" in row]
    assert losses[-1] < losses[0] / 10


def test_only_the_newest_checkpoints_are_kept(tiny, data_root, tmp_path):
    train(tiny("train.keep_checkpoints=2"), tmp_path, data_root=data_root)
    assert {p.name for p in (tmp_path / CHECKPOINTS).iterdir()} == {"step-9", "step-10"}
    assert read_manifest(tmp_path / CHECKPOINTS / "step-10")["examples"] == 320


def test_a_config_that_was_being_written_when_its_process_was_killed_is_in_nobodys_way(
    tiny, tmp_path
):
    (tmp_path / ".config.toml.partial").write_text("seed =")
    for resume in (False, True):
        check_folder(tiny(), tmp_path, resume=resume)
    (tmp_path / "other").write_text("")
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"--out must be"):
            check_folder(tiny(), tmp_path, resume=resume)
