"""User embeddings in time: no leak, the same bytes in one go or in several, clear refusals."""

import io
import json
import shutil
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from gem.data.dataset import Dataset
from gem.data.embedding_files import read_manifest, read_parts
from gem.data.prepare import default_folder
from gem.model.gem import GemModel
from gem.stages.embed import Refresh, embed_users
from gem.train.averages import averaged_weights
from gem.train.held_out import evaluate_folder
from gem.train.loop import train
from gem.train.predict import predict
from gem.train.progress import Display
from gem.train.run_folder import read_run_config
from gem.train.saved_run import saved_run
from gem.train.snapshots import snapshots
from gem_opkit.errors import ConfigError, DataError, UnsupportedError

USER = (
    "data.statistics=[]",
    "model.stream.target_tokens=0",
    "model.user_model.width=4",
    "model.dropout=0.0",
    "train.checkpoint_every_steps=2",
)
TICKS = Refresh(every_hours=1 / 120, trigger="impressions.feedback=2")


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory, data_root):
    folder = tmp_path_factory.mktemp("user") / "run"
    train(tiny(*USER), folder, data_root=data_root)
    return folder


@pytest.fixture(scope="module")
def whole(run, data_root):
    out = run.parent / "whole"
    return out, embed_users(run, out, TICKS, data_root=data_root)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_rows_are_in_order_and_of_one_model(whole):
    out, manifest = whole
    rows = read_parts(out, manifest, "here")
    assert len(manifest.parts) > 3
    assert len(rows.users) == sum(part.rows for part in manifest.parts)
    keys = list(zip(rows.valid_from_ms.tolist(), rows.users.tolist(), strict=True))
    assert keys == sorted(set(keys))
    every = TICKS.every_ms
    for part in manifest.parts:
        assert part.until_ms % every == 0
    assert read_manifest(out, "here") == manifest


def test_a_refresh_in_steps_gives_the_bytes_of_one_in_one_go(run, whole, tmp_path, data_root):
    out, manifest = whole
    for until in (manifest.parts[1].until_ms + 1, manifest.parts[2].until_ms, None):
        refresh = Refresh(TICKS.every_hours, TICKS.trigger, until)
        embed_users(run, tmp_path / "steps", refresh, data_root=data_root)
    assert content(tmp_path / "steps") == content(out)
    # Nothing is new: nothing changes.
    embed_users(run, tmp_path / "steps", TICKS, data_root=data_root)
    assert content(tmp_path / "steps") == content(out)


def test_only_users_with_news_are_touched(run, whole, tmp_path, data_root, monkeypatch):
    _out, manifest = whole
    begun = manifest.parts[2].until_ms
    embed_users(
        run, tmp_path / "e", Refresh(TICKS.every_hours, until_ms=begun), data_root=data_root
    )
    embedded = Counter()
    plain = GemModel.user_vectors

    def counted(model, batch):
        embedded.update(batch.user_B.tolist())
        return plain(model, batch)

    monkeypatch.setattr(GemModel, "user_vectors", counted)
    until = begun + TICKS.every_ms
    embed_users(
        run, tmp_path / "e", Refresh(TICKS.every_hours, until_ms=until), data_root=data_root
    )
    dataset = Dataset.open(default_folder(read_run_config(run).data, data_root))
    news = set()
    for stream, delays in (("impressions", (0, 60_000)), ("clicks", (0,))):
        events = dataset.events(stream)
        users, times = (events[n].values for n in ("user_id", "time_ms"))
        for delay in delays:
            # Known to whoever asks strictly later; a field is visible from its delay on.
            seen = times + max(delay - 1, 0)
            news |= set(users[(seen >= begun) & (seen < until)].tolist())
    assert set(embedded) == news
    assert 0 < len(news) < 40
    assert max(embedded.values()) == 1


def test_each_embedding_is_of_a_checkpoint_that_knew_nothing_later(run, whole, data_root):
    out, manifest = whole
    rows = read_parts(out, manifest, "here")
    times = (
        Dataset.open(default_folder(read_run_config(run).data, data_root))
        .examples(["time_ms"])["time_ms"]
        .values
    )
    picked = np.linspace(0, len(rows.users) - 1, 9).astype(int)
    used = set()
    with saved_run(run, command="test", display=None, data_root=data_root) as last:
        steps = [each.step for each in snapshots(last.run, "test")]
    for step in steps:
        checkpoint = run / "checkpoints" / f"step-{step}"
        known = int(times[min(step * 32, 320) - 1])
        after = [int(times[min(s * 32, 320) - 1]) for s in steps if s > step]
        with saved_run(checkpoint, command="test", display=None, data_root=data_root) as saved:
            opened = saved.run
            reader = opened.reader.as_of()
            for row in picked:
                as_of = int(rows.valid_from_ms[row])
                if known <= as_of and not any(later <= as_of for later in after):
                    batch = reader.users(rows.users[[row]], rows.valid_from_ms[[row]])
                    with averaged_weights(opened.step.model, opened.step.ema):
                        vector = opened.step.model.eval().user_vectors(batch)
                    np.testing.assert_allclose(
                        vector[0].detach().numpy(), rows.values[row], rtol=1e-4, atol=1e-5
                    )
                    used.add(step)
    assert len(used) > 1


def test_events_of_value_refresh_at_once(run, whole, tmp_path, data_root):
    plain = embed_users(run, tmp_path / "e", Refresh(TICKS.every_hours), data_root=data_root)
    without = read_parts(tmp_path / "e", plain, "here")
    assert not (without.valid_from_ms % TICKS.every_ms).any()
    rows = read_parts(whole[0], whole[1], "here")
    off_tick = rows.valid_from_ms % TICKS.every_ms != 0
    dataset = Dataset.open(default_folder(read_run_config(run).data, data_root))
    events = dataset.events("impressions")
    clicks = events["feedback"].values == 2
    known = set(
        zip(
            events["user_id"].values[clicks].tolist(),
            (events["time_ms"].values[clicks] + 60_000).tolist(),
            strict=True,
        )
    )
    made = set(
        zip(rows.users[off_tick].tolist(), rows.valid_from_ms[off_tick].tolist(), strict=True)
    )
    assert made
    assert made <= known
    begin, end = whole[1].begin_ms, whole[1].until_ms
    assert {k for k in known if begin <= k[1] <= end and k[1] % TICKS.every_ms} == made


def test_another_model_or_other_ticks_do_not_continue_a_folder(
    run, whole, tiny, tmp_path, data_root
):
    out, _manifest = whole
    shutil.copytree(out, tmp_path / "e")
    with pytest.raises(ConfigError, match=r"must be continued as it was begun.*--every"):
        embed_users(run, tmp_path / "e", Refresh(2.0, TICKS.trigger), data_root=data_root)
    with pytest.raises(ConfigError, match="--refresh-on None"):
        embed_users(run, tmp_path / "e", Refresh(TICKS.every_hours), data_root=data_root)
    train(tiny(*USER, seed=2), tmp_path / "other", data_root=data_root)
    with pytest.raises(ConfigError, match=r"by the same model; got fingerprint"):
        embed_users(tmp_path / "other", tmp_path / "e", TICKS, data_root=data_root)
    assert content(tmp_path / "e") == content(out)


@pytest.mark.parametrize(
    ("refresh", "said"),
    [
        (Refresh(0.0), "--every must be at least a millisecond"),
        (Refresh(1.0, "impressions.feedback"), r"must look like STREAM\.FIELD=ID,ID"),
        (Refresh(1.0, "impressions.feedback=two"), r"must look like STREAM\.FIELD=ID,ID"),
        (Refresh(1.0, "views.feedback=2"), "must name a stream that the recipe reads"),
        (Refresh(1.0, "impressions.feedbak=2"), "did you mean feedback|must name an id field"),
        (Refresh(1.0, until_ms=5), "--until must be at least"),
    ],
)
def test_what_is_asked_wrongly_is_refused(run, tmp_path, data_root, refresh, said):
    with pytest.raises(ConfigError, match=said):
        embed_users(run, tmp_path / "e", refresh, data_root=data_root)


def test_a_folder_in_use_and_another_kind_of_model_are_refused(run, tiny, tmp_path, data_root):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="must be new, empty, or a folder of embeddings"):
        embed_users(run, tmp_path / "used", TICKS, data_root=data_root)
    train(tiny(), tmp_path / "ranker", data_root=data_root)
    with pytest.raises(ConfigError, match="must be of a model of users"):
        embed_users(tmp_path / "ranker", tmp_path / "e", TICKS, data_root=data_root)
    train(tiny(*USER, "train.passes=2"), tmp_path / "two", data_root=data_root)
    with pytest.raises(UnsupportedError, match=r"train\.passes must be 1"):
        embed_users(tmp_path / "two", tmp_path / "e", TICKS, data_root=data_root)


# -- who reads them --------------------------------------------------------------------------------
def test_a_run_keeps_the_version_that_it_was_trained_with(run, whole, tiny, tmp_path, data_root):
    folder = tmp_path / "e"
    shutil.copytree(whole[0], folder)
    reading = tiny(f'data.user_embeddings.up.folder="{folder}"')
    summary = train(reading, tmp_path / "ranker", data_root=data_root)
    kept = read_run_config(tmp_path / "ranker").data.user_embeddings["up"]
    assert kept.fingerprint == whole[1].fingerprint
    facts = summary["user_embeddings"]
    assert set(facts) == {"train", "valid", "test"}
    assert 0 < facts["train"]["up"]["known_frac"] < facts["test"]["up"]["known_frac"]
    again = evaluate_folder(tmp_path / "ranker", data_root=data_root)
    assert again["test"] == summary["test"]
    # The same recipe goes on with the same embeddings, and neither goes on nor is read with others.
    train(reading, tmp_path / "ranker", resume=True, data_root=data_root)
    shutil.rmtree(folder)
    train(tiny(*USER, seed=2), tmp_path / "other", data_root=data_root)
    embed_users(tmp_path / "other", folder, TICKS, data_root=data_root)
    with pytest.raises(DataError, match=f"must be of the model {kept.fingerprint[:12]}"):
        evaluate_folder(tmp_path / "ranker", data_root=data_root)
    with pytest.raises(ConfigError, match=r"data\.user_embeddings\.up\.fingerprint"):
        train(reading, tmp_path / "ranker", resume=True, data_root=data_root)


# -- predictions for students ----------------------------------------------------------------------
def clicks(folder):
    """Row -> predicted click, of the training rows."""
    table = pq.read_table(folder / "predictions.parquet").to_pydict()
    rows = zip(table["split"], table["row"], table["p_click"], strict=True)
    return {row: p for split, row, p in rows if split == "train"}


def test_progressive_predictions_are_of_the_checkpoint_before(run, tmp_path, data_root):
    manifest = predict(
        run, tmp_path / "p", splits=("train", "test"), progressive=True, data_root=data_root
    )
    own = clicks(tmp_path / "p")
    assert manifest["progressive"]
    assert len(manifest["fingerprint"]) == 64
    assert manifest["splits"]["train"] == len(own) < 320
    assert list(own) == sorted(own)
    times = (
        Dataset.open(default_folder(read_run_config(run).data, data_root))
        .examples(["time_ms"])["time_ms"]
        .values
    )
    plain = {}
    for step in (2, 4, 6, 8):
        out = tmp_path / f"at-{step}"
        predict(run / "checkpoints" / f"step-{step}", out, splits=("train",), data_root=data_root)
        plain[step] = clicks(out)
    for row, p in own.items():
        first = row // 32 * 32  # of its batch
        may = [s for s in (2, 4, 6, 8, 10) if times[min(s * 32, 320) - 1] < times[first]]
        assert p == pytest.approx(plain[max(may)][row], rel=1e-5)
    # The test rows are of the newest, as ever.
    last = predict(run, tmp_path / "last", splits=("test",), data_root=data_root)
    assert last["metrics"]["test"] == manifest["metrics"]["test"]
    assert last["fingerprint"] == manifest["fingerprint"]


def test_a_student_learns_from_logged_predictions_and_begins_with_a_teachers_tables(
    run, tiny, tmp_path, data_root
):
    predict(run, tmp_path / "p", splits=("train",), progressive=True, data_root=data_root)
    settings = (f'data.teacher.folder="{tmp_path / "p"}"', "model.distillation={}")
    taught = train(tiny(*settings), tmp_path / "taught", data_root=data_root)
    alone = train(tiny(), tmp_path / "alone", data_root=data_root)
    assert taught["test"] != alone["test"]
    # Evaluation needs no teacher, and a run in parts is the same run.
    shutil.move(tmp_path / "p", tmp_path / "gone")
    assert evaluate_folder(tmp_path / "taught", data_root=data_root)["test"] == taught["test"]
    shutil.move(tmp_path / "gone", tmp_path / "p")
    parts = train(
        tiny(*settings, "train.accumulation_parts=3", "model.dropout=0.0"),
        tmp_path / "parts",
        data_root=data_root,
    )
    one = train(tiny(*settings, "model.dropout=0.0"), tmp_path / "one", data_root=data_root)
    for task in ("click", "conversion"):
        assert parts["test"][task]["ne"] == pytest.approx(one["test"][task]["ne"], abs=2e-4)
    started = tiny(f'train.start_tables={{run="{run}", tables=["item"]}}', "train.tables.lr=1e-12")
    said = io.StringIO()
    display = Display(Console(file=said, width=300))
    train(started, tmp_path / "started", display=display, data_root=data_root)
    assert "warning: progressive metrics are too good wherever that run has" in said.getvalue()
    with (
        saved_run(tmp_path / "started", command="t", display=None, data_root=data_root) as own,
        saved_run(run, command="t", display=None, data_root=data_root) as other,
    ):
        mine, theirs = (dict(r.run.step.model.named_parameters()) for r in (own, other))
        assert mine["tables.weights.item"].allclose(theirs["tables.weights.item"], atol=1e-6)
        assert not mine["tables.weights.user"].allclose(theirs["tables.weights.user"], atol=1e-3)


@pytest.mark.parametrize(
    ("setting", "error", "said"),
    [
        ('train.start_tables={run="nowhere"}', DataError, "be a run with a complete checkpoint"),
        ('train.start_tables={run="RUN", tables=["itme"]}', ConfigError, "did you mean"),
        (
            'train.start_tables={run="RUN", tables=["position"]}',
            DataError,
            r"tables must be in .* as well; got position",
        ),
    ],
)
def test_tables_that_cannot_begin_so_are_refused(
    run, tiny, tmp_path, data_root, setting, error, said
):
    if "position" in setting:
        other = tmp_path / "narrow"
        train(tiny(*USER, 'model.leave_out=["position"]'), other, data_root=data_root)
        setting = setting.replace("RUN", str(other))
    with pytest.raises(error, match=said):
        train(tiny(setting.replace("RUN", str(run))), tmp_path / "r", data_root=data_root)


def test_tables_of_another_width_are_refused(run, tiny, tmp_path, data_root):
    config = tiny(
        f'train.start_tables={{run="{run}", tables=["item"]}}', "model.embeddings.embedding_dim=8"
    )
    with pytest.raises(DataError, match=r"table item must have \[31, 8\] numbers"):
        train(config, tmp_path / "r", data_root=data_root)


def test_a_manifest_says_what_it_is(whole):
    raw = json.loads((whole[0] / "embeddings.json").read_text())
    assert raw["width"] == 4
    assert raw["format"] == 1
    assert raw["trigger"] == TICKS.trigger
