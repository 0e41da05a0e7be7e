"""The shipped recipes: each trains, learns, and continues where it was stopped."""

import shutil

import numpy as np
import pytest

from gem.config import load_recipe, shipped_recipes
from gem.data.dataset import Dataset
from gem.data.declared.load import shipped_declarations
from gem.data.prepare import default_folder, prepare
from gem.data.synthetic import true_probabilities
from gem.train.loop import train
from gem.train.normalized_entropy import EntropySums

STEPS = 20


@pytest.fixture(scope="session")
def folder_of(data_root):
    """Makes the data set of a config, once."""

    def make(config):
        folder = default_folder(config.data, data_root)
        prepare(config.data.dataset, folder, options=config.data.synthetic)
        return folder

    return make


def needs_files(name):
    """Whether a recipe reads data that nobody can fetch."""
    return load_recipe(name).data.dataset == "kuairand"


# Those of declared data are trained on hand-made files in test_declared_recipes.py.
DECLARED = {*shipped_declarations(), "own-log"}
# Those of a GPU's size are trained with their widths and tables cut down.
LARGE = ("h200", "h200-long")
HERE = [
    name
    for name in shipped_recipes()
    if name not in LARGE and load_recipe(name).data.dataset not in DECLARED
]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.kuairand] if needs_files(name) else [])
        for name in HERE
    ],
)
def test_twenty_steps_learn_and_resume(name, folder_of, data_root, tmp_path):
    batch = load_recipe(name).train.batch_examples
    # Of the whole log, not of the slice that the recipe is for.
    rates = ["model.heads.base_rates.is_click=0.44"] if name == "kuairand-student" else []
    config = load_recipe(
        name,
        [
            *rates,
            *(f"data.max_rows={STEPS * batch}", "train.checkpoint_every_steps=10"),
            *("train.log_every_steps=5", "train.window_steps=5", "train.threads=1"),
        ],
    )
    folder_of(config)
    whole = train(config, tmp_path / "whole", data_root=data_root)
    assert whole["steps"] == STEPS
    # The first step predicts base rates; what is learned after it shows on rows not trained on.
    assert next(iter(whole["valid"].values()))["ne"] < 0.995
    for found in whole["progressive"].values():
        assert found["ne"] < 1.05
        assert 0.8 < found["calibration"] < 1.25
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / f"step-{STEPS}")
    again = train(config, tmp_path / "broken", resume=True, data_root=data_root)
    for period in ("progressive", "valid", "test"):
        assert again[period] == whole[period]


@pytest.mark.parametrize("name", LARGE)
def test_recipes_of_a_gpus_size_train_when_cut_down(name, folder_of, data_root, tmp_path):
    tables = load_recipe(name).data.hash_rows
    config = load_recipe(
        name,
        [
            *("data.synthetic.rows=64", "data.synthetic.users=8", "data.synthetic.items=50"),
            *("data.synthetic.max_backlog_events=12", "data.synthetic.feature_values=50"),
            *(f"data.hash_rows.{table}=40" for table in tables),
            *("model.width=8", "model.stream.width=8", "model.stream.heads=2"),
            *("model.stream.seeds=4", "model.summary_tokens=4", "model.embeddings.embedding_dim=4"),
            *("model.experts.fm_tokens=2", "model.experts.linear_tokens=2", "model.experts.rank=2"),
            *("model.experts.mlp_widths=[8]", "model.heads.trunk_widths=[8]"),
            *("train.batch_examples=16", "train.log_every_steps=1", "train.window_steps=1"),
            *("train.threads=1", 'precision.default="fp32"'),
        ],
    )
    folder_of(config)
    summary = train(config, tmp_path / "run", data_root=data_root)
    assert summary["steps"] == 4  # 64 rows, of which 52 train
    assert all(np.isfinite(found["logloss"]) for found in summary["progressive"].values())


@pytest.mark.slow
def test_synthetic_metrics_lie_between_the_truth_and_the_base_rate(folder_of, data_root, tmp_path):
    config = load_recipe("synthetic-debug", ["train.threads=1"])
    folder = folder_of(config)
    summary = train(config, tmp_path, data_root=data_root)
    examples = Dataset.open(folder).examples(["click"])["click"].values
    best = EntropySums()  # of the probabilities that the clicks were drawn from
    held_out = summary["valid"]["click"]["examples"] + summary["test"]["click"]["examples"]
    best.update(
        true_probabilities(folder)["click"][-held_out:].astype(np.float32),
        examples[-held_out:].astype(np.float32),
    )
    least = best.values()[0]["ne"]
    found = [summary[split]["click"] for split in ("valid", "test")]
    reached = np.mean([values["ne"] for values in found])
    assert least < reached < 1.0
    assert all(0.9 < values["calibration"] < 1.1 for values in found)
    assert all(values["auc"] > 0.52 for values in found)
