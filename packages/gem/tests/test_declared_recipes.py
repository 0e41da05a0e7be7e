"""The recipes of public data that nobody may hand on: they train and resume on hand-made files."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "data"))

from raw_samples import SAMPLES, write_sample

from gem.config import load_recipe, shipped_recipes
from gem.data.declared.load import load_declaration
from gem.data.prepare import prepare
from gem.train.loop import train

NAMES = [n for n in shipped_recipes() if load_recipe(n).data.dataset in SAMPLES]


@pytest.mark.parametrize("recipe", NAMES)
def test_recipe_trains_and_resumes_on_a_sample(recipe, tmp_path):
    name = load_recipe(recipe).data.dataset
    source = write_sample(name, tmp_path / "raw", rows=420)
    prepare(name, tmp_path / "data", source=source)
    settings = [f"data.folder={tmp_path / 'data'}", "train.batch_examples=64", "train.passes=1"]
    settings += ["train.checkpoint_every_steps=2", "train.log_every_steps=1"]
    tables = load_declaration(name)[0].hash_rows
    settings += [f"data.hash_rows.{table}=100" for table in tables]  # fewer rows: less to write
    config = load_recipe(recipe, [*settings, "train.window_steps=1"])
    whole = train(config, tmp_path / "whole")
    assert all(np.isfinite(found["ne"]) for found in whole["progressive"].values())
    assert whole["steps"] >= 4
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / f"step-{whole['steps']}")
    again = train(config, tmp_path / "broken", resume=True)
    for period in ("progressive", "valid", "test"):
        assert again[period] == whole[period]
