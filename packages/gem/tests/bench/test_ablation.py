"""`gem bench ablation`: what is trained, that it goes on, and what the table says."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from gem.bench import ablation
from gem.bench.ablation import Ablation, compared, run_ablation, seeds_of, table, write_ablation
from gem.bench.variants import Variant, chosen, read_variants, variants_of
from gem.cli import app
from gem.config import load_recipe, shipped_recipes
from gem.model.spec import GemSpec
from gem.report.paired import paired_bootstrap, row_losses
from gem.train.interrupt import Interrupted, StopRequest
from gem_opkit.errors import ConfigError, DataError, UnsupportedError


def test_every_element_of_the_model_is_switched():
    elements = {v.element for v in variants_of(load_recipe("synthetic-debug"))}
    assert elements >= {
        *("GDPA-PFFN", "pooling", "self-attention", "computation skip", "rotation"),
        *("per-stream settings", "experts", "layers", "target attention", "domain heads"),
        *("published model",),
    }
    carries = load_recipe("synthetic-debug", ["data.synthetic.content_width=3"])
    assert "content features" in {v.element for v in variants_of(carries)}


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_variant_of_every_recipe_is_a_model_of_its_own(name):
    recipe = load_recipe(name)
    if not isinstance(recipe.model, GemSpec):
        with pytest.raises(UnsupportedError, match='must be "gem", whose elements'):
            variants_of(recipe)
        return
    found = variants_of(recipe)
    configs = [load_recipe(name, v.settings) for v in found]
    assert configs[0] == recipe
    assert len({config.to_toml() for config in configs}) == len(found)
    assert len({v.name for v in found}) == len(found)


STREAMS_WITH_LAYERS = [
    ("model.preset=interformer",),
    ("model.preset=wukong",),
    ("model.preset=transformer", "model.stream.full_layers=[1]"),
    ('model.layers=["transformer", "interaction"]', "model.streams.clicks.layers=[1]"),
]


@pytest.mark.parametrize("settings", STREAMS_WITH_LAYERS, ids=str)
def test_streams_that_name_their_layers_take_part_in_the_last_one(settings):
    found = variants_of(load_recipe("synthetic-debug", settings))
    (alone,) = (v for v in found if v.name == "last layer alone")
    model = load_recipe("synthetic-debug", [*settings, *alone.settings]).model
    assert len(model.layers) == 1
    assert all(own.layers in (None, (0,)) for own in (model.stream, *model.streams.values()))


def test_a_variant_that_the_recipe_does_not_allow_is_named_before_any_run(tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "train", None)
    recipe = tmp_path / "mine.toml"
    layers = "[model.streams.clicks]\nlayers = [2]\n"
    recipe.write_text('base = "synthetic-debug"\n[model]\nlayers = ["interaction", "interaction", '
                      '"interaction"]\n' + layers)  # fmt: skip
    picked = tuple(chosen(variants_of(load_recipe(str(recipe))), ["dlrm"]))
    asked = Ablation(str(recipe), picked, (), (1,), tmp_path / "runs")
    with pytest.raises(ConfigError, match=r"variant 'dlrm': .*--only trains others"):
        run_ablation(asked, lambda line: None)


def test_names_and_elements_choose():
    found = variants_of(load_recipe("synthetic-debug"))
    picked = chosen(found, ["pooling", "wukong"])
    assert [v.name for v in picked] == [
        *("base", "pma pooling", "mean pooling", "two latest events as tokens", "wukong")
    ]
    assert chosen(found, []) == found
    with pytest.raises(ConfigError, match=r"--only must name variants or elements .*got poolng"):
        chosen(found, ["poolng"])


@pytest.mark.parametrize(
    "text",
    ["", "x = 1\n", "[variants]\n", "[variants]\na = 3\n", '[variants]\nbase = ["a.b=1"]\n', "["],
)
def test_a_file_of_other_content_is_refused(text, tmp_path):
    path = tmp_path / "variants.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"must be a table of names|must be TOML"):
        read_variants(path)
    with pytest.raises(ConfigError, match="--variants must be a file"):
        read_variants(tmp_path / "none.toml")


@pytest.mark.parametrize("names", [("a b", "A-b"), ("Base!",), ("+",)])
def test_names_of_one_folder_are_refused(names, tmp_path):
    path = tmp_path / "variants.toml"
    path.write_text("[variants]\n" + "".join(f'"{name}" = []\n' for name in names))
    with pytest.raises(ConfigError, match="must have names that differ in letters or digits"):
        read_variants(path)


@pytest.mark.parametrize("name", ["a | b", "a\\nb"])
def test_a_name_that_would_break_the_table_is_refused(name, tmp_path):
    path = tmp_path / "variants.toml"
    path.write_text(f'[variants]\n"{name}" = []\n')
    with pytest.raises(ConfigError, match="must have names in one line"):
        read_variants(path)


@pytest.mark.parametrize(
    ("value", "sign", "text"),
    [
        (0.8, False, ".8000"),
        (10.25, False, "10.2500"),
        (-0.1, True, "-.1000"),
        (0.0, True, "+.0000"),
    ],
)
def test_a_figure_loses_its_leading_zero_and_no_other(value, sign, text):
    assert ablation._figure(value, sign=sign) == text


def test_one_run_at_a_time_hears_ctrl_c(trained, monkeypatch, tmp_path):
    asked, _, _ = trained
    ran: list[Path] = []

    def interrupted(config, folder, **_):
        ran.append(folder)
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGINT)
            raise Interrupted(stop.reason(), 1)

    monkeypatch.setattr(ablation, "train", interrupted)
    with pytest.raises(Interrupted, match="stopped by signal 2 after step 1"):
        run_ablation(replace(asked, out=tmp_path), lambda line: None)
    assert len(ran) == 1


@pytest.mark.parametrize("text", ["", "1,1", "1,x", "-1", "1;2"])
def test_other_seeds_are_refused(text):
    with pytest.raises(ConfigError, match="--seeds must be different whole numbers"):
        seeds_of(text)
    assert seeds_of("3, 1") == (3, 1)


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory, data_root):
    """Two variants, two seeds, trained through the function that the command calls."""
    folder = tmp_path_factory.mktemp("ablation")
    recipe = folder / "tiny.toml"
    recipe.write_text(tiny().to_toml())
    path = folder / "variants.toml"
    path.write_text('[variants]\n"without GDPA" = ["model.stream.ffn=none"]\n')
    asked = Ablation(
        str(recipe),
        tuple(read_variants(path)),
        ("train.checkpoint_every_steps=1000",),
        (1, 2),
        folder / "runs",
        data_root=data_root,
    )
    told: list[str] = []
    rows = run_ablation(asked, told.append)
    return asked, rows, told


def test_rows_are_means_of_the_runs(trained):
    asked, rows, told = trained
    assert told[0] == "4 runs, 4 of them to be trained" and len(told) == 5
    assert [(r["variant"], r["task"]) for r in rows] == [
        (variant, task) for variant in ("base", "without GDPA") for task in ("click", "conversion")
    ]
    for row, variant in zip(rows[::2], asked.variants, strict=True):
        runs = [asked.folder(variant, seed) / "summary.json" for seed in (1, 2)]
        summaries = [json.loads(path.read_text()) for path in runs]
        nes = [s["test"]["click"]["ne"] for s in summaries]
        assert row["test"]["ne"] == pytest.approx(sum(nes) / 2)
        assert row["test_half_range"]["ne"] == pytest.approx(abs(nes[0] - nes[1]) / 2)
        assert row["flops_per_example"] == summaries[0]["efficiency"]["flops_per_example"]
    base, other = rows[0], rows[2]
    assert base["ne_minus_base"] is None
    gap = other["ne_minus_base"]
    assert gap["low_95"] < gap["ne_difference"] < gap["high_95"]
    assert gap["ne_difference"] == pytest.approx(other["test"]["ne"] - base["test"]["ne"], abs=1e-6)
    assert other["flops_per_example"] < base["flops_per_example"]


def test_finished_runs_are_kept_and_other_settings_refused(trained, monkeypatch):
    asked, rows, _ = trained
    monkeypatch.setattr(ablation, "train", None)  # nothing is trained again
    told: list[str] = []
    assert run_ablation(asked, told.append) == rows
    assert told == ["4 runs, 0 of them to be trained"]
    more = Ablation(asked.recipe, asked.variants, ("train.dense.lr=0.5",), asked.seeds, asked.out)
    # Compared as they lie there, their rows would name settings that nobody trained with.
    for make in (run_ablation, compared):
        with pytest.raises(ConfigError, match=r"must equal .*train\.dense\.lr"):
            make(more, told.append)


class Process:
    """Stands for a process that has ended with a code, and has said something."""

    def __init__(self, returncode, said=""):
        self.returncode, self.said = returncode, said

    def communicate(self):
        return None, self.said


def test_several_at_a_time_are_processes_of_their_own(trained, monkeypatch, tmp_path, data_root):
    asked, _, _ = trained
    several = replace(asked, out=tmp_path, jobs=2)
    commands: list[list[str]] = []

    def process(command, **_):
        commands.append(command)
        folder = Path(command[command.index("--out") + 1])
        if folder == several.folder(several.variants[1], 2):
            return Process(2, "error: out of luck")
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text("{}")
        return Process(0)

    monkeypatch.setattr(ablation.subprocess, "Popen", process)
    message = r"without GDPA, seed 2 must train to its end; got exit code 2: error: out of luck"
    with pytest.raises(DataError, match=message):
        run_ablation(several, lambda line: None)
    assert len(commands) == 4
    words = next(c for c in commands if c[c.index("--out") + 1].endswith("without-gdpa/seed-1"))
    assert words[1:5] == ["-m", "gem", "train", asked.recipe] and words[-1] == "--resume"
    assert {"train.predictions=true", "model.stream.ffn=none", *asked.settings} < set(words)


def test_what_is_not_finished_is_left_out(trained):
    asked, rows, _ = trained
    missing = Variant("not there", "", ())
    some = Ablation(asked.recipe, (*asked.variants, missing), asked.settings, (1, 2), asked.out)
    told: list[str] = []
    assert compared(some, told.append) == rows
    assert told == ["not there: left out, 2 of 2 runs not finished"]
    none = Ablation(asked.recipe, asked.variants, asked.settings, (1, 2, 3), asked.out)
    with pytest.raises(DataError, match="the recipe itself must be trained with every seed"):
        compared(none, told.append)


def test_the_table_shows_the_rows(trained, tmp_path):
    _, rows, _ = trained
    text = table(rows)
    lines = [line for line in text.splitlines() if line.startswith("| without")]
    gap, ne = rows[2]["ne_minus_base"], rows[2]["test"]["ne"]
    assert f"{ne:.4f}".lstrip("0") in lines[0]
    verdict = "worse" if gap["low_95"] > 0 else "better" if gap["high_95"] < 0 else "neither"
    assert f"| {verdict} |" in lines[0]
    write_ablation(rows, tmp_path, tmp_path / "results")
    assert (tmp_path / "ablation.md").read_text() == text
    (kept,) = (tmp_path / "results").rglob("ablation.jsonl")
    found = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [row["case"] for row in found] == [row["case"] for row in rows]
    assert found[0]["versions"]["torch"]


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (None, "must hold labelled rows of task 'conversion' in split 'test'; got none"),
        (1.0, "must hold positive and negative rows"),
    ],
)
def test_a_task_that_cannot_be_compared_leaves_the_others_their_table(
    trained, tmp_path, kept, reason
):
    asked, rows, _ = trained
    shutil.copytree(asked.out, tmp_path / "runs")
    for path in (tmp_path / "runs").rglob("predictions.parquet"):
        found = pq.read_table(path)
        wrong = np.array(found["task"]) == "conversion"
        labels = np.where(wrong, np.nan if kept is None else kept, np.array(found["label"]))
        column = pa.array(labels, pa.float32(), from_pandas=True)
        pq.write_table(found.set_column(found.column_names.index("label"), "label", column), path)
    told: list[str] = []
    found = compared(replace(asked, out=tmp_path / "runs"), told.append)
    assert [row["variant"] for row in found] == [row["variant"] for row in rows]
    for row, before in zip(found, rows, strict=True):
        if row["task"] == "click" or row["variant"] == "base":
            assert row["ne_minus_base"] == before["ne_minus_base"] and "not_compared" not in row
        else:
            assert row["ne_minus_base"] is None and reason in row["not_compared"]
    assert len(told) == 1 and told[0].startswith("conversion: nothing compared: ")
    lines = table(found).splitlines()
    (line,) = (x for x in lines[lines.index("conversion:") :] if x.startswith("| without GDPA"))
    assert "| n/a |  |" in line
    assert any(x.startswith("Not compared: ") and reason in x for x in lines)


def test_processes_of_their_own_are_no_ranks(monkeypatch, tmp_path):
    """They would take the place of the rank that began them."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ["bench", "ablation", "synthetic-debug", "--jobs", "2", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words, obj=SimpleNamespace())
    assert isinstance(done.exception, UnsupportedError)
    assert "--jobs must run in one process; got 2 ranks" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_the_command_lists_what_it_would_train():
    done = CliRunner().invoke(
        app, ["bench", "ablation", "synthetic-debug", "--list"], obj=SimpleNamespace()
    )
    assert done.exit_code == 0
    assert "without GDPA-PFFN: model.stream.ffn=none" in done.stdout
    assert "wukong: model.preset=wukong" in done.stdout


def test_the_bootstrap_is_the_resampling_of_rows(rng):
    # Row by row with another way of counting, on the same picks.
    label = (rng.random(300) < 0.3).astype(float)
    p, q = rng.uniform(0.1, 0.9, 300), rng.uniform(0.1, 0.9, 300)
    first, second = (row_losses(np.arange(300), label, x) for x in (p, q))
    found = paired_bootstrap([first], [second], seed=3)
    picks = np.random.default_rng(3)
    gaps = []
    for _ in range(100):
        for picked in picks.integers(0, 300, (100, 300), dtype=np.int32):
            rate = label[picked].mean()
            entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
            gaps.append((first["loss"][picked] - second["loss"][picked]).mean() / entropy)
    assert found["low_95"] == pytest.approx(np.quantile(gaps, 0.025))
    assert found["high_95"] == pytest.approx(np.quantile(gaps, 0.975))
    assert found["first_better_frac"] == np.mean(np.array(gaps) < 0)
    with pytest.raises(DataError, match="must be on the same rows"):
        paired_bootstrap([first], [row_losses(np.arange(1, 301), label, q)])
    ones = row_losses(np.arange(300), np.ones(300), p)
    with pytest.raises(DataError, match="must hold positive and negative rows"):
        paired_bootstrap([ones], [ones])
