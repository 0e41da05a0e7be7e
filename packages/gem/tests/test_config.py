"""Recipes: every error names its key, and what is resolved can be read back."""

import subprocess
import sys

import pytest

from gem.config import RunConfig, load_recipe, parse_recipe, shipped_recipes
from gem_opkit.errors import ConfigError

RECIPE = """
[data]
dataset = "synthetic"
[data.streams.clicks]
max_events = 10
[[data.statistics]]
kind = "count"
name = "clicks_of_item"
label = "click"
[model]
kind = "gem"
[model.streams.clicks]
width = 32
[train]
batch_examples = 64
"""


def parse(*overrides, text=RECIPE, seed=None) -> RunConfig:
    return parse_recipe(text, name="tiny", origin="recipe tiny", overrides=overrides, seed=seed)


def refused(*overrides, text=RECIPE) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*overrides, text=text)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_resolve_and_read_back(name):
    config = load_recipe(name)
    assert config.name == name
    assert config.description
    again = parse_recipe(config.to_toml(), name="other", origin="config.toml")
    assert again == config


def test_overrides_are_toml_values():
    config = parse(
        "train.dense.lr=3e-4",
        "train.dense.lr_factors={shortcut = 5.0}",
        'model.layers=["interaction"]',
        "data.statistics.0.label=conversion",
        "data.source=/some/where else",
        "train.schedule.tables=true",
        seed=7,
    )
    assert config.train.dense.lr == 3e-4
    assert config.train.dense.lr_factors == {"shortcut": 5.0}
    assert config.model.layers == ("interaction",)
    assert config.data.statistics[0].label == "conversion"
    assert config.data.source == "/some/where else"
    assert config.train.schedule.tables is True
    assert config.seed == 7


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("train.batchsize=3", "train.batch_examples"),
        ("train.dense.learning_rate=1", "train.dense.lr"),
        ("train.checkpoints_every=3", "train.checkpoint_every_steps"),
        ("model.stream.widht=3", "model.stream.width"),
        ("model.streams.clicks.widht=3", "model.streams.clicks.width"),
        ("data.statistics.0.labl='x'", "data.statistics.0.label"),
        ("lr=3", "train.dense.lr"),
        ("batch_example=3", "train.batch_examples"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(override, nearest):
    key = override.partition("=")[0]
    assert f"unknown key '{key}'; did you mean '{nearest}'?" in refused(override)


def test_a_key_of_another_kind_of_model_is_not_its_own_remedy():
    message = refused("model.dropout=0.1", "model={kind='din'}", "model.dropout=0.1")
    assert "unknown key 'model.dropout'; did you mean '" in message
    assert "mean 'model.dropout'" not in message


@pytest.mark.parametrize("path", ["data.inputs", "data.streams.clicks.fields"])
def test_a_name_given_twice_is_refused(path):
    assert f"{path} must name each thing once; got 'a' twice; remove one" in refused(
        f'{path}=["b", "a", "a"]'
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.batch_examples=many", ["'train.batch_examples'", "integer", "'many' (string)"]),
        ("train.batch_examples='512'", ["'train.batch_examples'", "integer", "'512' (string)"]),
        ("train.batch_examples=-1", ["'train.batch_examples'", "greater than 0", "-1 (integer)"]),
        ("train.dense=3", ["'train.dense'", "a table", "3 (integer)"]),
        ("train.dense.lr=inf", ["'train.dense.lr'", "finite", "inf (float)"]),
        ("seed=true", ["'seed'", "integer", "True (boolean)"]),
        ("model.kind=gen", ["'model.kind'", "'gem', 'din'", "'gen'"]),
        ("model.experts.count=[1]", ["'model.experts.count'", "integer", "[1] (array)"]),
    ],
)
def test_a_wrong_value_names_key_expected_and_got(override, words):
    message = refused(override)
    assert all(word in message for word in words), message


def test_a_rule_between_keys_names_them():
    message = refused("train.window_steps=30")
    assert message.startswith("recipe tiny: train: window_steps must be a multiple of")
    assert "parallel" in refused("parallel.table_replicate=2")


@pytest.mark.parametrize("value", ["true", "'x'", "0", "-2"])
def test_an_axis_with_a_wrong_value_keeps_its_own_message(value):
    assert "'parallel.shard'" in refused(f"parallel.shard={value}")


def test_settings_of_a_stream_that_is_not_read_are_refused():
    text = RECIPE.replace("[model.streams.clicks]", "[model.streams.click]")
    assert "model.streams.click must be a stream that data.streams reads" in refused(text=text)
    assert "model.streams.clicks.max_events must be at most data.streams.clicks.max_events=10" in (
        refused("model.streams.clicks.max_events=11")
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.batch_examples", "must look like a.b=value"),
        ("train.batch_examples.x=1", "train.batch_examples is none; got 64"),
        ("data.statistics.3.label='x'", "index of its 1 entries; got '3'; use 0 to 0"),
        ("data.statistics.².label='x'", "index of its 1 entries; got '²'; use 0 to 0"),
        ("parallel.shard=" + "9" * 5000, "key 'parallel.shard' must be a valid integer"),
        ("parallel.shard=" + "[" * 5000, "key 'parallel.shard' must be a valid integer"),
    ],
)
def test_a_malformed_override_is_refused(override, words):
    assert words in refused(override)


def test_a_missing_key_is_named():
    assert "key 'data.dataset' must be given" in refused(text='[data]\n[model]\nkind = "din"\n')


def test_not_toml_names_the_line():
    assert "line 2" in refused(text="[train]\nlr = = 3\n")


def test_an_unknown_recipe_lists_the_shipped_ones():
    with pytest.raises(ConfigError, match="did you mean synthetic-debug") as caught:
        load_recipe("synthetic-debugg")
    assert all(name in str(caught.value) for name in shipped_recipes())


def test_a_recipe_on_a_base_joins_tables_and_replaces_other_kinds(tmp_path):
    (tmp_path / "low.toml").write_text(RECIPE)
    high = tmp_path / "high.toml"
    high.write_text(
        f'base = "{tmp_path}/low.toml"\n[data.streams.clicks]\nmax_events = 5\n'
        '[model]\nkind = "din"\nwidth = 8\n'
    )
    config = load_recipe(str(high))
    assert config.name == "high"
    assert config.data.dataset == "synthetic"
    assert config.data.streams["clicks"].max_events == 5
    assert (config.model.kind, config.model.width) == ("din", 8)
    assert config.train.batch_examples == 64


def test_bases_in_a_circle_are_refused(tmp_path):
    path = tmp_path / "self.toml"
    path.write_text(f'base = "{path}"\n')
    with pytest.raises(ConfigError, match="base must name a recipe, at most 4"):
        load_recipe(str(path))


def test_differences_name_keys_and_both_values():
    changed = parse("train.dense.lr=0.5", "train.keep_checkpoints=9")
    assert parse().differences(changed, ignored=frozenset({"train.keep_checkpoints"})) == [
        "train.dense.lr: 0.001 here, 0.5 there"
    ]


def test_reading_a_recipe_loads_no_torch():
    program = (
        "import sys; from gem.config import load_recipe; load_recipe('synthetic-debug');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


BASE = 'base = "below.toml"\nseed = 5\n'


def test_path_of_a_base_begins_at_the_file(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "below.toml").write_text(RECIPE)
    (tmp_path / "own" / "above.toml").write_text(BASE)
    monkeypatch.chdir(tmp_path)
    config = load_recipe("own/above.toml")
    assert (config.seed, config.train.batch_examples, config.name) == (5, 64, "above")


def test_mark_that_editors_put_first_is_no_fault(tmp_path):
    (tmp_path / "marked.toml").write_text(RECIPE, encoding="utf-8-sig")
    assert load_recipe(str(tmp_path / "marked.toml")).train.batch_examples == 64


def test_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "picture.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"picture.toml: file must be TOML in UTF-8; got"):
        load_recipe(str(tmp_path / "picture.toml"))


def test_name_of_a_file_becomes_a_name_for_folders(tmp_path):
    (tmp_path / "my recipe (2).toml").write_text(RECIPE)
    assert load_recipe(str(tmp_path / "my recipe (2).toml")).name == "my-recipe-2"


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("model=3", "must be a table; got 3"),
        ("data.statistics={}", "must be an array; got {}"),
        ("model.layers=[]", "must have at least 1 entries"),
        ("data.folder=3", "must be a string; got 3"),
        ("name=../x", "must match ^"),
    ],
)
def test_rules_are_said_in_the_words_of_toml(override, rule):
    assert rule in refused(override)


def test_raw_files_and_a_made_data_set_exclude_each_other():
    assert "remove one of the two" in refused("data.folder=a", "data.source=b")


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        (f"train.passes={2**63}", "key 'train.passes' must fit in 64 bits"),
        (f"data.max_rows=-{10**30}", "key 'data.max_rows' must fit in 64 bits"),
        ("train.dense.lr=1e39", "key 'train.dense.lr' must be 0 or lie between"),
        ("train.dense.lr=1e7", "key 'train.dense.lr' must be less than or equal to"),
        ("data.statistics.0.x=[1e-39]", "key 'data.statistics.0.x.0' must be 0 or lie between"),
        ("train.threads=100000", "key 'train.threads' must be less than or equal to 1024"),
        ("data.streams.clicks.max_events=99999999", "'data.streams.clicks.max_events' must be"),
    ],
)
def test_numbers_that_no_tensor_holds_are_refused(override, rule):
    with pytest.raises(ConfigError) as fault:
        parse(override)
    assert str(fault.value).startswith("recipe tiny: ") and rule in str(fault.value)
