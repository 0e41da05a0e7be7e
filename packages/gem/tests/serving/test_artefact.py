"""An artefact is whole or refused, and says whose weights it holds."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from gem import faults
from gem.cli import app
from gem.serving import export as export_module
from gem.serving.export import export
from gem.serving.manifest import MANIFEST_FILE, TABLES_FILE
from gem.serving.ranker import Ranker
from gem.train.model_fingerprint import model_fingerprint
from gem_opkit.errors import ConfigError, DataError, UnsupportedError


@pytest.fixture
def copy(served, tmp_path):
    """A copy of the artefact, to be spoilt."""
    shutil.copytree(served.artefact, tmp_path / "copy")
    return tmp_path / "copy"


def _edit(folder, **changes):
    path = folder / MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_it_holds_no_event_and_no_example(served):
    there = {str(path.relative_to(served.artefact)) for path in served.artefact.rglob("*.parquet")}
    assert all(name.startswith(("data/entities/", "data/vocabularies/")) for name in there)
    text = (served.artefact / MANIFEST_FILE).read_text()
    assert str(served.run.parent) not in text


def test_it_moves_and_scores_without_run_and_data(served, copy, data_root, monkeypatch):
    monkeypatch.chdir(copy.parent)
    row = int(served.rows[0])
    want = Ranker.load(served.artefact).score(served.maker.request([row]))
    assert Ranker.load(copy).score(served.maker.request([row])) == want


@pytest.mark.parametrize("name", ["dense.safetensors", TABLES_FILE, "data/dataset.toml"])
def test_a_file_that_changed_is_refused(copy, name):
    content = bytearray((copy / name).read_bytes())
    content[-3] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}.*must hold.*got other bytes"):
        Ranker.load(copy)


def test_a_file_that_is_gone_or_short_is_refused(copy):
    (copy / TABLES_FILE).write_bytes((copy / TABLES_FILE).read_bytes()[:100])
    with pytest.raises(DataError, match="got 100 bytes"):
        Ranker.load(copy)
    (copy / TABLES_FILE).unlink()
    with pytest.raises(DataError, match="got no such file"):
        Ranker.load(copy)


def test_weights_of_another_model_are_refused_by_the_fingerprint(copy):
    _edit(copy, fingerprint="0" * 64)
    with pytest.raises(DataError, match="must have the fingerprint 000000000000"):
        Ranker.load(copy)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 2}, "got format 2"),
        ({"gem_version": "9.9.0"}, "of gem 9.9.0"),
        ({"steps": -1}, "steps"),
        ({"more": 1}, "more"),
    ],
)
def test_other_versions_and_broken_manifests_are_refused(copy, changes, said):
    _edit(copy, **changes)
    with pytest.raises(DataError, match=said):
        Ranker.load(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_manifest_that_is_none_is_refused(copy, text):
    (copy / MANIFEST_FILE).write_text(text)
    with pytest.raises(DataError, match="must be what gem export wrote"):
        Ranker.load(copy)


def test_a_folder_without_an_artefact_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"gem export RUN --out ARTEFACT"):
        Ranker.load(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        Ranker.load(tmp_path / "none")


def test_a_folder_in_use_is_refused_and_left_alone(served, tmp_path, data_root):
    (tmp_path / "kept").write_text("kept")
    with pytest.raises(ConfigError, match="--out must be a new or an empty folder"):
        export(served.run, tmp_path, data_root=data_root)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_disk_that_refuses_leaves_nothing(served, tmp_path, data_root, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module, "_copy_data", full)
    with pytest.raises(OSError, match="No space left"):
        export(served.run, tmp_path / "artefact", data_root=data_root)
    assert list(tmp_path.iterdir()) == []


def test_averages_and_newest_weights_have_their_own_fingerprints(served, tmp_path, data_root):
    last = export(served.run, tmp_path / "last", averaged=False, data_root=data_root)
    assert (served.manifest.averaged, last.averaged) == (True, False)
    assert last.fingerprint != served.manifest.fingerprint
    again = export(served.run, tmp_path / "again", data_root=data_root)
    assert again.fingerprint == served.manifest.fingerprint


def test_a_device_that_is_not_there_is_refused(served):
    for device in ("cuda:99", "nowhere"):
        with pytest.raises((ConfigError, UnsupportedError), match="--device must be cpu"):
            Ranker.load(served.artefact, device=device)


def test_what_describes_requests_and_artefacts_loads_no_torch():
    names = ("manifest", "request", "limits", "sharing")
    program = f"import sys, {', '.join(f'gem.serving.{name}' for name in names)}\n"
    program += "sys.exit(int('torch' in sys.modules))"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_fingerprint_sees_names_shapes_dtypes_and_every_number():
    a, b = torch.arange(6.0), torch.ones(2)
    base = model_fingerprint({"a": a, "b": b})
    assert base == model_fingerprint({"b": b, "a": a.clone()})
    last = a.clone()
    last[-1] += 1e-6
    others = [
        {"a": last, "b": b},
        {"a": a.view(2, 3), "b": b},
        {"a": a.int(), "b": b},
        {"c": a, "b": b},
        {"a": a},
        {"a": a, "b": -b},
    ]
    assert len({base, *(model_fingerprint(other) for other in others)}) == 7


def test_an_export_that_fails_leaves_no_example_in_the_way(tmp_path, monkeypatch):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    monkeypatch.setattr("gem.serving.example.write_example", lambda run, out: out.touch())
    example = tmp_path / "example.json"
    words = ["export", "run", "--out", str(tmp_path / "used"), "--example", str(example)]
    done = CliRunner().invoke(app, words, obj=faults.Asked())
    assert "must be a new or an empty folder" in str(done.exception)
    assert not example.exists()
