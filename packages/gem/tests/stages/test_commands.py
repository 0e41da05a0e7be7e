"""The command line of what models give to one another."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from gem.cli import app
from gem.data.dataset import Dataset
from gem.data.prepare import default_folder, prepare
from gem.faults import Asked
from gem.train.loop import train
from gem_opkit.errors import ConfigError

USER = ("data.statistics=[]", "model.stream.target_tokens=0", "model.user_model.width=4")


def gem(*words):
    done = CliRunner().invoke(app, [str(word) for word in words], obj=Asked())
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("cli")
    # In the run's own config, as the command line knows no other place of data sets.
    plain = tiny()
    folder = default_folder(plain.data, root)
    prepare("synthetic", folder, options=plain.data.synthetic)
    train(tiny(*USER, f'data.folder="{folder}"'), root / "run")
    train(tiny(f'data.folder="{folder}"'), root / "ranker")
    return root / "run"


def test_embeddings_of_a_model_of_users(run, tmp_path):
    out = tmp_path / "e"
    done = gem("predict", run, "--embeddings", "--every", "0.01", "--out", out, "--json")
    told = json.loads(done.stdout)
    assert told == json.loads((out / "embeddings.json").read_text())
    assert told["width"] == 4
    assert told["every_hours"] == 0.01
    # Of one of its checkpoints likewise.
    newest = run / "checkpoints" / "step-10"
    with pytest.raises(ConfigError, match="must be continued as it was begun"):
        gem("predict", newest, "--embeddings", "--every", "0.02", "--out", out)


def test_without_embeddings_a_model_of_users_predicts_rows(run, tmp_path):
    done = gem("predict", run, "--out", tmp_path / "p", "--json")
    assert json.loads(done.stdout)["splits"] == {"valid": 40, "test": 40}


def test_progressive_predictions_are_of_all_splits(run, tmp_path):
    done = gem("predict", run.parent / "ranker", "--progressive", "--out", tmp_path / "p", "--json")
    told = json.loads(done.stdout)
    assert set(told["splits"]) == {"train", "valid", "test"}
    assert 0 < told["splits"]["train"] < 320


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--embeddings", "--split", "test"), "--split and --progressive must be left out"),
        (("--embeddings", "--progressive"), "--split and --progressive must be left out"),
        (("--every", "1"), "--every must come with --embeddings"),
        (("--until", "1"), "--until must come with --embeddings"),
        (("--data", "here"), "--data must come with --embeddings"),
        (("--refresh-on", "a.b=1"), "--refresh-on must come with --embeddings"),
    ],
)
def test_what_does_not_go_together_is_refused(run, tmp_path, words, said):
    with pytest.raises(ConfigError, match=said):
        gem("predict", run, "--out", tmp_path / "new", *words)
    assert not (tmp_path / "new").exists()


def test_a_slice(run, tmp_path):
    folder = next(run.parent.glob("synthetic*"))
    shutil.copytree(folder, tmp_path / "whole")
    out = tmp_path / "slice"
    done = gem(
        *("data", "slice", tmp_path / "whole", "--where", "position=1,2", "--where", "position=3"),
        *("--out", out, "--json"),
    )
    kept = Dataset.open(out).examples(["position"])["position"].values
    whole = Dataset.open(folder).examples(["position"])["position"].values
    assert json.loads(done.stdout)["examples"] == len(kept) == sum(p in (1, 2, 3) for p in whole)
    for wrong in ("position", "position=", "position=one", "position=1;2"):
        with pytest.raises(ConfigError, match="must look like COLUMN=ID,ID"):
            gem("data", "slice", folder, "--where", wrong, "--out", tmp_path / "new")
