"""Published models as presets: they train, they learn, and a comparison is a config diff."""

import pytest

from gem.config import load_recipe, parse_recipe
from gem.model.model_presets import shipped_presets
from gem.train.loop import train
from gem_opkit.errors import ConfigError

WANTED = {"dcnv2", "dhen", "din", "dlrm", "interformer", "transformer", "wukong"}
# What belongs to the recipe, whatever model is put in.
KEPT = ("width", "embeddings", "numbers", "heads", "leave_out", "summary_hidden", "activation")


def test_the_published_models_are_there():
    assert set(shipped_presets()) == WANTED


@pytest.mark.parametrize("name", sorted(WANTED))
def test_a_preset_changes_the_structure_and_nothing_else(name):
    plain = load_recipe("synthetic-debug")
    other = load_recipe("synthetic-debug", [f"model.preset={name}"])
    for key in KEPT:
        assert getattr(other.model, key) == getattr(plain.model, key)
    changed = [line.split(":")[0] for line in plain.differences(other)]
    assert changed and all(key.startswith("model.") for key in changed)
    assert parse_recipe(other.to_toml(), name="x", origin="x") == other  # written out whole


def test_keys_lie_in_their_order():
    text = 'base = "synthetic-debug"\n[model]\npreset = "wukong"\n[model.experts]\ncount = 3\n'
    model = parse_recipe(text, name="x", origin="x").model
    assert (model.experts.count, model.experts.partition) == (3, "all")  # own, the preset's
    assert model.experts.fm_tokens == 4  # the base's
    early = load_recipe("synthetic-debug", ["model.width=8", "model.preset=dlrm"])
    late = load_recipe("synthetic-debug", ["model.preset=dlrm", "model.width=8"])
    assert early == late
    over = load_recipe("synthetic-debug", ["model.experts.count=2", "model.preset=dlrm"]).model
    assert (over.experts.count, over.experts.kinds) == (2, ("dot",))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.preset=wukng", r"model\.preset must be one of dcnv2, .*got 'wukng'"),
        ("model.preset=3", r"model\.preset must be one of .*got 3"),
    ],
)
def test_an_unknown_preset_is_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe("synthetic-debug", [setting])
    with pytest.raises(ConfigError, match=r"model\.preset must be one of"):
        parse_recipe('[model]\npreset = "x"\n', name="x", origin="x")


@pytest.mark.parametrize("name", sorted(WANTED))
def test_each_trains_on_generated_data(name, tiny, data_root, tmp_path):
    config = tiny(
        *(f"model.preset={name}", "train.checkpoint_every_steps=1000"),
        *("model.heads.base_rates.click=0.3", "model.heads.base_rates.conversion=0.2"),
    )
    summary = train(config, tmp_path, data_root=data_root)
    assert summary["steps"] == 10
    assert all(0.5 < found["ne"] < 1.1 for found in summary["progressive"].values())
    assert summary["efficiency"]["flops_per_example"] > 0
