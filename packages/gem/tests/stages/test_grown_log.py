"""A log that has grown by some days: embeddings go on over it, byte for byte, and ids stay."""

import csv
import re
import shutil

import numpy as np
import pytest

from gem.config import parse_recipe
from gem.data.dataset import Dataset
from gem.data.embedding_files import read_parts
from gem.data.grown import check_grown
from gem.data.id_meaning import difference
from gem.data.prepare import prepare
from gem.data.slice import slice_dataset
from gem.stages.embed import Refresh, embed_users
from gem.train.loop import train
from gem.train.saved_run import saved_run
from gem_opkit.errors import ConfigError, DataError

DECLARATION = """
name = "shop"

[examples]
file = "clicks.csv"
user = "user"
item = "product"
time = "time"
time_format = "s"
categories = [{ column = "device" }]
labels = [{ name = "click", column = "clicked", visible_after_s = 60.0 }]

[[streams]]
name = "impressions"
labels = ["click"]
categories = [{ column = "device" }]

[[streams]]
name = "views"
file = "views.csv"
numbers = [{ column = "seconds", scale = 30.0 }]

[entities.user]
file = "users.csv"
key = "user"
categories = [{ column = "town" }]

[splits]
valid_frac = 0.1
"""
START, HOUR = 1_760_000_400, 3600
# Rows of the log in its first hours, and altogether. Users and products of later hours sort before
# those of earlier ones, so that ids given anew would be others.
SHORT, LONG = 240, 360


def log(count):
    random = np.random.default_rng(1)
    shown, viewed = [], []
    for row in range(count):
        now = START + 30 * row
        late = "a" if row >= SHORT and row % 3 == 0 else "m"
        user = random.integers(12 if row < SHORT or late == "a" else 4)
        user, item = f"{late}{user}", f"{late}{random.integers(20)}"
        click = int(random.random() < 0.4)
        shown.append([now, user, item, ["phone", "desktop"][row % 2], click])
        if random.random() < 0.5:
            viewed.append([now + 7, user, f"m{random.integers(20)}", random.integers(2, 90)])
    return shown, viewed


def written(folder, shown, viewed, *, users=None, text=DECLARATION):
    folder.mkdir()
    users = sorted({row[1] for row in shown}) if users is None else users
    tables = {
        "clicks.csv": (["time", "user", "product", "device", "clicked"], shown),
        "views.csv": (["time", "user", "product", "seconds"], viewed),
        "users.csv": (["user", "town"], [[user, f"town {len(user)}"] for user in users]),
    }
    for name, (heading, rows) in tables.items():
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows([heading, *rows])
    path = folder / "shop.toml"
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Folders of the short log and of the long one, whose ids go on from it."""
    root = tmp_path_factory.mktemp("logs")
    shown, viewed = log(LONG)
    end = START + 30 * (SHORT - 1)
    before = [row for row in viewed if row[0] <= end]
    prepare(written(root / "raw-short", shown[:SHORT], before), root / "short")
    prepare(written(root / "raw", shown, viewed), root / "long", grown_from=root / "short")
    prepare(str(root / "raw" / "shop.toml"), root / "anew")
    return root


RECIPE = """
[data]
dataset = "shop"
folder = "FOLDER"
[model]
kind = "gem"
width = 8
layers = ["transformer", "interaction"]
[model.user_model]
width = 4
next_event_task = "click"
[model.embeddings]
embedding_dim = 4
[model.stream]
width = 8
pooling = "mean"
summary_tokens = 1
target_tokens = 0
[model.experts]
fm_tokens = 2
linear_tokens = 2
rank = 2
mlp_widths = [8]
[model.heads]
trunk_widths = [8]
[train]
batch_examples = 48
log_every_steps = 1
window_steps = 2
checkpoint_every_steps = 1
keep_checkpoints = 99
threads = 1
device = "cpu"
[train.schedule]
warmup_steps = 2
"""


@pytest.fixture(scope="module")
def run(logs):
    text = RECIPE.replace("FOLDER", str(logs / "short"))
    train(parse_recipe(text, name="users", origin="users"), logs / "run")
    return logs / "run"


TICKS = Refresh(every_hours=1 / 12, trigger="impressions.past_click=2")


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_ids_keep_their_meaning_and_later_ones_follow(logs):
    short, long = Dataset.open(logs / "short"), Dataset.open(logs / "long")
    rows = short.spec.table("item").num_embeddings
    assert long.spec.table("item").num_embeddings > rows
    check_grown(short, long)
    found = long.examples(["item_id"])["item_id"].values
    assert found[:SHORT].tolist() == short.examples(["item_id"])["item_id"].values.tolist()
    assert found.max() >= rows
    # Made without a word of the short one, its ids are others.
    with pytest.raises(DataError, match=r"anew must .*grown-from"):
        check_grown(short, Dataset.open(logs / "anew"))


def test_tables_begin_with_rows_of_a_shorter_log_where_ids_mean_the_same(run, logs, tmp_path):
    def config(data):
        text = RECIPE.replace("FOLDER", str(logs / data)).replace('next_event_task = "click"', "")
        text += f"[train.start_tables]\nrun = {str(run)!r}\n[train.tables]\nlr = 1e-12\n"
        return parse_recipe(text, name="users", origin="users")

    train(config("long"), tmp_path / "started")
    with (
        saved_run(tmp_path / "started", command="t", display=None, data_root=tmp_path) as own,
        saved_run(run, command="t", display=None, data_root=tmp_path) as other,
    ):
        mine, theirs = (dict(r.run.step.model.named_parameters()) for r in (own, other))
        for table in ("user", "item"):
            rows = theirs[f"tables.weights.{table}"]
            found = mine[f"tables.weights.{table}"]
            assert len(found) > len(rows)
            assert found[: len(rows)].allclose(rows, atol=1e-6)
            assert found[len(rows) :].abs().sum() > 0
    with pytest.raises(DataError, match=r"table (user|item) must have ids that mean the same .*'a"):
        train(config("anew"), tmp_path / "refused")


def test_ids_of_a_slice_mean_what_they_did(logs, tmp_path):
    slice_dataset(logs / "short", tmp_path / "slice", {"device": [1]})
    short, cut, anew = map(Dataset.open, (logs / "short", tmp_path / "slice", logs / "anew"))
    for table in ("user", "item", "device", "past_click"):
        assert difference(table, short, cut) is None
    assert cut.vocabulary("item") == short.vocabulary("item")
    assert "'a0' in" in difference("item", short, anew)
    # Where neither the vocabulary nor dataset.toml names them, equal declarations prove nothing.
    text = (tmp_path / "slice" / "dataset.toml").read_text()
    shutil.rmtree(tmp_path / "slice" / "vocabularies")
    (tmp_path / "slice" / "dataset.toml").write_text(re.sub(r"(?m)^values = .*\n", "", text))
    for other in (short, Dataset.open(tmp_path / "slice")):
        told = difference("item", other, Dataset.open(tmp_path / "slice"))
        assert told.startswith("nothing that tells what they mean")


def test_a_refresh_over_the_grown_log_gives_the_bytes_of_a_full_run(run, logs):
    steps, whole = logs / "steps", logs / "whole"
    first = embed_users(run, steps, TICKS)
    old = content(steps)
    second = embed_users(run, steps, TICKS, grown=logs / "long")
    full = embed_users(run, whole, TICKS, grown=logs / "long")
    assert content(steps) == content(whole)
    assert second == full
    assert second.until_ms > first.until_ms
    # What was there stays as it was; only users with news are in the new parts.
    new = content(steps)
    assert all(new[name] == old[name] for name in old if name.startswith("part-"))
    parts = second.parts[len(first.parts) :]
    rows = read_parts(steps, second.model_copy(update={"parts": parts}), "here")
    long = Dataset.open(logs / "long")
    since = first.until_ms - 60_000  # feedback that became known since is news as well
    busy = set()
    for stream in long.spec.streams:
        events = long.events(stream.name)
        busy |= set(events["user_id"].values[events["time_ms"].values >= since].tolist())
    everybody = set(long.examples(["user_id"])["user_id"].values.tolist())
    assert set(rows.users.tolist()) <= busy < everybody
    # Users that the run has never seen have an embedding of their events.
    assert rows.users.max() >= Dataset.open(logs / "short").spec.table("user").num_embeddings


def test_every_embedding_of_the_short_log_is_that_of_the_long_one(run, logs, tmp_path):
    made = embed_users(run, tmp_path / "short", TICKS)
    until = Refresh(TICKS.every_hours, TICKS.trigger, made.until_ms)
    embed_users(run, tmp_path / "long", until, grown=logs / "long")
    assert content(tmp_path / "short") == content(tmp_path / "long")


def test_a_tick_that_the_log_had_not_ended_by_is_left_for_later(run, logs, tmp_path):
    far = Refresh(TICKS.every_hours, TICKS.trigger, 1000 * (START + 30 * LONG * 10))
    embed_users(run, tmp_path / "steps", far)
    embed_users(run, tmp_path / "steps", far, grown=logs / "long")
    embed_users(run, tmp_path / "whole", TICKS, grown=logs / "long")
    assert content(tmp_path / "steps") == content(tmp_path / "whole")


@pytest.mark.parametrize("change", ["label", "event", "user", "none"])
def test_a_folder_is_continued_over_the_past_that_it_was_made_of(run, logs, tmp_path, change):
    """The run's own log is the same in both; what came after it is not."""
    out = tmp_path / "out"
    embed_users(run, out, TICKS, grown=logs / "long")
    before = content(out)
    shown, viewed = log(LONG)
    users = sorted({row[1] for row in shown})
    if change == "label":
        shown[SHORT + 20][4] = 1 - shown[SHORT + 20][4]
    elif change == "event":
        viewed = [row for row in viewed if row[0] != viewed[-20][0]]
    elif change == "user":
        users.remove(shown[SHORT][1])
    shown += [[START + 30 * (LONG + row), "m1", "m2", "phone", 1] for row in range(40)]
    name = written(tmp_path / "raw", shown, viewed, users=users)
    prepare(name, tmp_path / "longer", grown_from=logs / "long")
    if change == "none":
        embed_users(run, out, TICKS, grown=tmp_path / "longer")
        embed_users(run, tmp_path / "whole", TICKS, grown=tmp_path / "longer")
        assert content(out) == content(tmp_path / "whole")
        assert len(content(out)) > len(before)
        # And not over the shorter log any more.
        with pytest.raises(DataError, match="another past before"):
            embed_users(run, out, TICKS)
        return
    with pytest.raises(DataError, match=r"--out must be continued over a log .*another past"):
        embed_users(run, out, TICKS, grown=tmp_path / "longer")
    assert content(out) == before


def rewritten(logs, tmp_path, change):
    shown, viewed = log(LONG)
    users = sorted({row[1] for row in shown})
    shown, viewed, users, text = change(shown, viewed, users)
    name = written(tmp_path / "raw", shown, viewed, users=users, text=text)
    prepare(name, tmp_path / "long", grown_from=logs / "short")
    return tmp_path / "long"


def other_item(shown, viewed, users):
    shown[100][2] = "m0" if shown[100][2] != "m0" else "m1"
    return shown, viewed, users, DECLARATION


def other_label(shown, viewed, users):
    shown[10][4] = 1 - shown[10][4]
    return shown, viewed, users, DECLARATION


def later_arrival(shown, viewed, users):
    return shown, [[START + 5, "m1", "m2", 9], *viewed], users, DECLARATION


def lost_rows(shown, viewed, users):
    return shown[: SHORT - 5], viewed, users, DECLARATION


def fewer_users(shown, viewed, users):
    return shown, viewed, [user for user in users if user != "m3"], DECLARATION


def other_number(shown, viewed, users):
    return shown, viewed, users, DECLARATION.replace("scale = 30.0", "scale = 60.0")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (other_item, r"examples, item_id\); got .* in row 100"),
        (other_label, r"examples, click\); got .* in row 10"),
        (later_arrival, r"events of .* in stream 'views'"),
        (lost_rows, rf"at least the {SHORT} examples"),
        (fewer_users, r"all rows of .* in entity 'user'"),
        (other_number, "have the streams of .*another declaration"),
    ],
)
def test_another_past_is_refused_before_anything_is_written(run, logs, tmp_path, change, told):
    long = rewritten(logs, tmp_path, change)
    with pytest.raises(DataError, match=told):
        embed_users(run, tmp_path / "out", TICKS, grown=long)
    assert not (tmp_path / "out").exists()


def test_what_cannot_grow_is_refused(logs, tmp_path):
    with pytest.raises(ConfigError, match="--grown-from must come with a log that is declared"):
        prepare("synthetic", tmp_path / "out", grown_from=logs / "short")
    other = DECLARATION.replace('name = "shop"', 'name = "mall"')
    shown, viewed = log(LONG)
    name = written(tmp_path / "raw", shown, viewed, text=other)
    with pytest.raises(ConfigError, match="--grown-from must be a data set 'mall'"):
        prepare(name, tmp_path / "out", grown_from=logs / "short")
    with pytest.raises(DataError, match=r"must hold a dataset\.toml"):
        prepare(name, tmp_path / "out", grown_from=tmp_path / "nothing")
    assert not (tmp_path / "out").exists()
