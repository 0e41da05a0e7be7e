"""Two stages in one command: what is trained, how gains are told, what is refused."""

import json
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from gem.config import load_recipe
from gem.report.paired import paired_bootstrap, task_losses
from gem.stages import command
from gem.stages.command import Stages, run_stages, table, write_stages
from gem.stages.embed import Refresh, embed_users
from gem.stages.spec import read_stages, shipped_stages
from gem.train.loop import train
from gem_opkit.errors import ConfigError, DataError

SMALL = (
    *("data.synthetic.rows=400", "data.synthetic.users=40", "data.synthetic.items=30"),
    *("train.batch_examples=32", "train.log_every_steps=2", "train.window_steps=4"),
    "train.device=cpu",
)
TEXT = """
seeds = [1, 2]
[upstream]
recipe = "synthetic-user"
settings = ["train.checkpoint_every_steps=2"]
base_settings = ["data.streams.clicks.max_events=1", "data.streams.impressions.max_events=1"]
every_hours = 0.01
[rankers.short]
recipe = "synthetic-debug"
settings = ["data.statistics=[]", "data.transforms={}", "data.streams.clicks.max_events=2"]
"""


@pytest.fixture
def here(monkeypatch):
    """Commands run in this process, and are counted."""
    ran = []

    def run(words, result, children):
        ran.append(shlex.join(words))
        given = dict(zip(words[2::2], words[3::2], strict=False))
        out = Path(words[words.index("--out") + 1])
        if words[0] == "train":
            texts = [after for word, after in pairwise(words) if word == "--set"]
            config = load_recipe(words[1], texts, seed=int(given["--seed"]))
            train(config, out, resume=True)
        else:
            hours = float(words[words.index("--every") + 1])
            embed_users(Path(words[1]), out, Refresh(hours))
        assert result.is_file()

    monkeypatch.setattr(command, "_run", run)
    return ran


def test_both_stages_are_trained_and_compared(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("two.toml").write_text(TEXT.replace("seeds = [1, 2]", "seeds = [1]"))
    asked = Stages(read_stages("two.toml"), SMALL, Path("out"))
    said = []
    found = run_stages(asked, said.append)
    assert {path.name for path in Path("out").iterdir()} == {
        *("upstream-1", "base-1", "embeddings-of-upstream-1", "embeddings-of-base-1"),
        *("short-without-1", "short-with-upstream-1", "short-with-base-1"),
    }
    # Each ranker reads the embeddings of its own upstream model, of this very version.
    for kind in ("upstream", "base"):
        config = load_recipe(f"out/short-with-{kind}-1/config.toml")
        read = config.data.user_embeddings["upstream"]
        manifest = json.loads(Path(f"out/embeddings-of-{kind}-1/embeddings.json").read_text())
        assert read.fingerprint == manifest["fingerprint"]
    own = found["rankers"]["short"]["tasks"]["click"]

    def ne(run):
        return json.loads(Path(f"out/{run}/summary.json").read_text())["test"]["click"]["ne"]

    upstream = ne("base-1") - ne("upstream-1")
    ranker = ne("short-with-base-1") - ne("short-with-upstream-1")
    assert own["upstream_gain"] == pytest.approx(upstream)
    assert own["ranker_gain"] == pytest.approx(ranker)
    if upstream > 0:
        assert own["transfer_ratio"] == pytest.approx(ranker / upstream)
    else:
        assert own["transfer_ratio"] is None
        assert "gains nothing" in own["why_no_ratio"]
    against = paired_bootstrap(
        [task_losses(Path("out/short-with-upstream-1"), "click")],
        [task_losses(Path("out/short-without-1"), "click")],
    )
    assert own["ne_with_minus_without"] == against
    from_base = paired_bootstrap(
        [task_losses(Path("out/short-with-upstream-1"), "click")],
        [task_losses(Path("out/short-with-base-1"), "click")],
    )
    assert own["ne_with_minus_with_base"] == from_base
    assert from_base["ne_difference"] == pytest.approx(-ranker)
    known = found["rankers"]["short"]["embeddings"][0]
    assert known["test"]["upstream"]["known_frac"] > known["train"]["upstream"]["known_frac"]
    write_stages(found, asked, Path("results"))
    rows = [json.loads(line) for line in Path("results/cpu/stages.jsonl").read_text().splitlines()]
    assert [row["case"] for row in rows] == ["two: short, click", "two: short, conversion"]
    assert f"{own['ne']['ranker_with']['mean']:.4f}" in table(found)
    # Called again, embeddings are kept and finished runs are not trained again.
    made = len(here)
    again = run_stages(asked, said.append)
    assert again["rankers"] == found["rankers"]
    assert here[made:] == []
    # A folder of other runs is not taken for these.
    with pytest.raises(ConfigError, match=r"model\.width"):
        run_stages(Stages(asked.spec, (*SMALL, "model.width=8"), asked.out), said.append)


def test_gains_without_a_smaller_model_are_counted_from_the_mean_rate():
    transfer = command._transfer
    ne = {"upstream": [0.8, 0.9], "upstream_base": [1.0, 1.0]}
    ne |= {"ranker_without": [0.7, 0.7], "ranker_with": [0.64, 0.7]}
    found = transfer(ne, has_base=False)
    assert found["upstream_gain"] == pytest.approx(0.15)
    assert found["ranker_gain"] == pytest.approx(0.03)
    assert found["transfer_ratio"] == pytest.approx(0.2)
    assert transfer({**ne, "upstream": [1.0, 1.1]}, has_base=False)["transfer_ratio"] is None
    assert transfer({**ne, "ranker_with": [None, 0.7]}, has_base=False)["transfer_ratio"] is None
    del ne["upstream"]
    assert "lacks the task" in transfer(ne, has_base=False)["why_no_ratio"]


def test_a_run_that_fails_ends_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"gem train nowhere must end with .*got exit code"):
        command._run(["train", "nowhere"], Path("x"), command.Children())


@pytest.mark.parametrize("name", sorted(shipped_stages()))
def test_shipped_stages_can_be_read(name):
    assert read_stages(name).name == name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('"synthetic-user"', '"synthetic-debug"'), "must have a section model.user_model"),
        (('"synthetic-user"', '"kuairand-user"'), "must read the data set of the upstream stage"),
        (('"synthetic-debug"', '"synthetic-user"'), "statistics|be a ranker of kind gem"),
        (('"synthetic-debug"', '"ml100k-din"'), "read the data set|kind gem"),
        (("train.checkpoint_every_steps=2", "train.passes=2"), "train in one pass"),
        (("every_hours = 0.01", "every_hours = 0"), "greater than 0"),
        (("every_hours", "every_hour"), "every_hour"),
        (("[1, 2]", "[1, 1]"), "different whole numbers"),
        (("[rankers.short]", "[ranker]"), "ranker"),
        (("max_events=2", "max_event=2"), "max_event"),
        (("[1, 2]", "[1, 2"), "must be TOML"),
    ],
)
def test_stages_that_cannot_be_trained_are_refused(tmp_path, change, said):
    text = TEXT.replace(*change)
    assert text != TEXT
    (tmp_path / "two.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_stages(str(tmp_path / "two.toml"))


def test_stages_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match="must be a TOML file or one of kuairand-stages"):
        read_stages("nowhere")
