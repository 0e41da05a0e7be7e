"""Predictions of a run: whole, in order, and exactly what the metrics are of."""

import io
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from sklearn.metrics import log_loss, roc_auc_score

from gem.data.dataset import Dataset
from gem.data.prepare import default_folder
from gem.data.schema import BatchSchema
from gem.train.averages import averaged_weights
from gem.train.evaluate import ParquetRows, Predictions, PredictionsFile
from gem.train.held_out import evaluate_folder
from gem.train.loop import train
from gem.train.predict import MANIFEST_FILE, predict
from gem.train.progress import Display
from gem.train.run import PREDICTIONS_FILE
from gem.train.run_folder import CHECKPOINTS
from gem.train.saved_run import saved_run
from gem_opkit.errors import ConfigError, DataError

TASKS = ("click", "conversion")


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory, data_root):
    folder = tmp_path_factory.mktemp("finished") / "run"
    # Without the shortcut, the heads alone make the logits.
    config = tiny("model.numbers.shortcut=false")
    return folder, train(config, folder, data_root=data_root)


@pytest.fixture(scope="module")
def predicted(finished, data_root):
    out = finished[0].parent / "predicted"
    manifest = predict(finished[0], out, embeddings=True, data_root=data_root)
    return out, manifest, pq.read_table(out / PREDICTIONS_FILE)


def test_the_folder_says_what_it_holds(finished, predicted):
    out, manifest, table = predicted
    assert {path.name for path in out.iterdir()} == {PREDICTIONS_FILE, MANIFEST_FILE}
    assert json.loads((out / MANIFEST_FILE).read_text()) == manifest
    assert manifest["checkpoint"] == str(finished[0] / CHECKPOINTS / "step-10")
    assert (manifest["steps"], manifest["total_steps"], manifest["finished"]) == (10, 10, True)
    assert manifest["averaged_weights"] is True
    assert manifest["splits"] == {"valid": 40, "test": 40}
    assert table.column_names == [
        *("split", "row", "user", "item", "time_ms", "domain"),
        *(f"{what}_{task}" for task in TASKS for what in ("p", "label", "known")),
        "embedding",
    ]
    assert {path.name for path in out.parent.iterdir()} == {"run", "predicted"}


def test_rows_are_those_of_the_log(tiny, predicted, data_root):
    table = predicted[2]
    dataset = Dataset.open(default_folder(tiny().data, data_root))
    spec = dataset.spec.examples
    log = dataset.examples([spec.user, spec.item, spec.time, *TASKS])
    rows = np.array(table["row"])
    assert rows.tolist() == list(range(320, 400))
    assert table["split"].to_pylist() == ["valid"] * 40 + ["test"] * 40
    for column, name in (("user", spec.user), ("item", spec.item), ("time_ms", spec.time)):
        assert np.array_equal(np.array(table[column]), log[name].values[rows]), column
    for task in TASKS:
        label = log[task].values[rows]
        assert np.array_equal(np.array(table[f"known_{task}"]), ~np.isnan(label))
        stored = np.array(table[f"label_{task}"].to_pylist(), np.float32)
        assert np.array_equal(stored, label, equal_nan=True)


def test_metrics_recomputed_from_the_file_are_those_of_the_summary(finished, predicted):
    _, manifest, table = predicted
    summary = finished[1]
    assert manifest["metrics"] == {split: summary[split] for split in ("valid", "test")}
    column = {name: np.asarray(table[name].to_pylist()) for name in table.column_names}
    for split in ("valid", "test"):
        for task in TASKS:
            here = (column["split"] == split) & column[f"known_{task}"]
            parts = {"all": (summary[split][task], here)}
            for name, found in summary[split][task]["domains"].items():
                parts[name] = (found, here & (column["domain"] == name))
            for found, part in parts.values():
                p, y = (column[f"{kind}_{task}"][part].astype(float) for kind in ("p", "label"))
                check(found, p, y)


def check(found, p, y):
    assert (found["examples"], found["positives"]) == (len(p), int(y.sum()))
    assert found["logloss"] == pytest.approx(log_loss(y, p, labels=[0, 1]), rel=1e-12)
    if 0 < y.sum() < len(y):
        assert found["auc"] == pytest.approx(roc_auc_score(y, p), abs=1e-12)
        base = log_loss(y, np.full(len(y), y.mean(dtype=float)))
        assert found["ne"] == pytest.approx(log_loss(y, p) / base, rel=1e-9)
        assert found["calibration"] == pytest.approx(p.sum() / y.sum(dtype=float), rel=1e-12)
    else:
        assert found["auc"] is found["ne"] is None


def test_embeddings_are_what_the_heads_read(finished, predicted, data_root):
    """The heads of the checkpoint, on the stored vectors, give the stored probabilities."""
    _, manifest, table = predicted
    width = manifest["embedding_dim"]
    assert table["embedding"].type == pa.list_(pa.float32(), width)
    flat = table["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    domain = [manifest["domains"].index(name) for name in table["domain"].to_pylist()]
    with (
        saved_run(finished[0], command="test", display=None, data_root=data_root) as saved,
        averaged_weights(saved.run.step.model, saved.run.step.ema),
        torch.no_grad(),
    ):
        heads = saved.run.step.model.eval().get_submodule("heads")
        logits_BA = heads(torch.from_numpy(flat.reshape(-1, width)), torch.tensor(domain))
    p_BA = np.stack([np.array(table[f"p_{task}"]) for task in TASKS], axis=1)
    assert np.unique(flat.reshape(-1, width), axis=0).shape[0] > 70  # of 80 examples
    np.testing.assert_allclose(torch.sigmoid(logits_BA).numpy(), p_BA, rtol=0, atol=1e-6)


def test_without_embeddings_the_same_rows_come_without_them(finished, predicted, data_root):
    out = finished[0].parent / "plain"
    manifest = predict(finished[0], out, data_root=data_root)
    assert manifest["embedding_dim"] is None
    assert pq.read_table(out / PREDICTIONS_FILE).equals(predicted[2].drop_columns(["embedding"]))


def test_an_unfinished_run_says_so(finished, data_root, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    for step in ("step-9", "step-10"):
        shutil.rmtree(run / CHECKPOINTS / step)
    said = io.StringIO()
    display = Display(Console(file=said, width=300))
    manifest = predict(run, tmp_path / "out", display=display, data_root=data_root)
    assert (manifest["steps"], manifest["total_steps"], manifest["finished"]) == (6, 10, False)
    assert "step-6: step 6 of 10, the run is not finished" in said.getvalue()
    found = evaluate_folder(run, data_root=data_root)
    assert (found["steps"], found["total_steps"]) == (6, 10)
    assert found["checkpoint"].endswith("step-6")
    assert {split: found[split] for split in ("valid", "test")} == manifest["metrics"]
    assert found["test"] != finished[1]["test"]
    # The same checkpoint of the finished run, by its name.
    older = evaluate_folder(finished[0] / CHECKPOINTS / "step-6", data_root=data_root)
    assert older["test"] == found["test"]


def test_training_rows_on_request(finished, data_root, tmp_path):
    manifest = predict(finished[0], tmp_path / "out", splits=["train"], data_root=data_root)
    assert manifest["splits"] == {"train": 320}
    table = pq.read_table(tmp_path / "out" / PREDICTIONS_FILE)
    assert table["row"].to_pylist() == list(range(320))


def test_what_it_refuses(finished, data_root, tmp_path):
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes").touch()
    with pytest.raises(ConfigError, match=r"--out must be a new or an empty folder; got .*used"):
        predict(finished[0], used, data_root=data_root)
    with pytest.raises(ConfigError, match=r"one of train, valid, test; got 'vlid'; did you mean"):
        predict(finished[0], tmp_path / "out", splits=["vlid"], data_root=data_root)
    with pytest.raises(ConfigError, match=r"RUN must be the folder of a run"):
        predict(tmp_path, tmp_path / "out", data_root=data_root)
    empty = tmp_path / "run"
    shutil.copytree(finished[0], empty, ignore=shutil.ignore_patterns("step-*"))
    with pytest.raises(DataError, match=r"gem predict: RUN must have a complete checkpoint"):
        predict(empty, tmp_path / "out", data_root=data_root)
    assert not (tmp_path / "out").exists()


def test_a_fault_leaves_no_half_of_a_folder(finished, data_root, tmp_path, monkeypatch):
    written = ParquetRows.write

    def full_disk(self, table):
        if self.rows:
            raise OSError(28, "No space left on device")
        written(self, table)

    monkeypatch.setattr(ParquetRows, "write", full_disk)
    with pytest.raises(OSError, match="No space left"):
        predict(finished[0], tmp_path / "out", data_root=data_root)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    # And what a killed process left behind is in nobody's way.
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / PREDICTIONS_FILE).write_bytes(b"PAR1")
    predict(finished[0], tmp_path / "out", data_root=data_root)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_an_empty_folder_that_is_there_stays_the_same_folder(finished, data_root, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    before = out.stat().st_ino
    predict(finished[0], out, splits=["test"], data_root=data_root)
    assert out.stat().st_ino == before
    assert {path.name for path in out.iterdir()} == {PREDICTIONS_FILE, MANIFEST_FILE}


def test_no_more_than_a_row_group_waits_in_memory(tmp_path):
    rows = ParquetRows(tmp_path / "rows.parquet", group_bytes=4000)
    most = 0
    for start in range(0, 10_000, 100):
        rows.write(pa.table({"row": pa.array(np.arange(start, start + 100))}))
        most = max(most, sum(table.num_rows for table in rows._waiting))
    rows.close()
    assert most < 500
    file = pq.ParquetFile(tmp_path / "rows.parquet")
    assert file.metadata.num_row_groups == 20
    assert file.read()["row"].to_pylist() == list(range(10_000))


def test_the_predictions_of_a_run_stay_whole_when_new_ones_fail(tmp_path):
    path = tmp_path / PREDICTIONS_FILE
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), PredictionsFile(path, BatchSchema(labels=("click",))) as file:
        batch = [np.zeros(2, np.int64) for _ in range(3)]
        file.write("test", Predictions(*batch, *[np.zeros((2, 1), np.float32) for _ in range(2)]))
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert {p.name for p in tmp_path.iterdir()} == {PREDICTIONS_FILE}
