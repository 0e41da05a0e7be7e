import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from gem.data import synthetic
from gem.data.check import check
from gem.data.dataset import Dataset
from gem.data.features import DataSpec
from gem.data.prepare import default_folder, notice, prepare, provide
from gem.data.reader import open_reader
from gem.data.synthetic import true_probabilities
from gem.data.synthetic_spec import SyntheticSpec
from gem_opkit.errors import ConfigError, DataError

SMALL = SyntheticSpec(rows=4000, users=300, items=80, max_backlog_events=64, categories=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("synthetic") / "data"
    prepare("synthetic", out, options=SMALL)
    return out


def columns(folder, *names):
    return [column.values for column in Dataset.open(folder).examples(names).values()]


def log_loss(labels, p):
    return -np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p))


def test_data_set_is_sound(folder):
    report = check(folder)
    assert report.problems == ()
    missing = {part.part: part.missing for part in report.parts}
    assert set(missing["entities/user"]) == {"age_group", "country"}
    assert set(missing["entities/item"]) == {"category", "price"}


def test_equal_options_give_equal_data_and_other_seeds_do_not(tmp_path, folder):
    prepare("synthetic", tmp_path / "same", options=SMALL)
    prepare("synthetic", tmp_path / "other", options=SMALL.model_copy(update={"seed": 1}))
    names = ("user_id", "item_id", "time_ms", "click")
    assert all(
        np.array_equal(a, b)
        for a, b in zip(columns(folder, *names), columns(tmp_path / "same", *names), strict=True)
    )
    assert not np.array_equal(columns(folder, "click")[0], columns(tmp_path / "other", "click")[0])


def test_labels_are_drawn_from_the_true_probabilities(folder):
    truth = true_probabilities(folder)
    click, conversion = columns(folder, "click", "conversion")
    error = np.sqrt(np.sum(truth["click"] * (1 - truth["click"])))
    assert abs(click.sum() - truth["click"].sum()) < 4 * error
    assert abs(click.mean() - SMALL.click_rate) < 0.06
    clicked = click == 1
    assert np.array_equal(~np.isnan(conversion), clicked)
    p = truth["conversion"][clicked]
    assert abs(conversion[clicked].sum() - p.sum()) < 4 * np.sqrt(np.sum(p * (1 - p)))


def test_signal_is_there_to_be_learnt(folder):
    """The truth beats the base rate clearly, and its own shuffling does not."""
    truth = true_probabilities(folder)["click"]
    (click,) = columns(folder, "click")
    base = log_loss(click, np.full(len(click), click.mean()))
    assert log_loss(click, truth) / base < 0.95
    assert log_loss(click, np.random.default_rng(0).permutation(truth)) / base > 1.0


def test_history_tells_what_no_static_feature_does(folder):
    """Past clicks on the candidate's category go with the click."""
    feedback = {"stream": "impressions", "field": "feedback", "positive": [2], "negative": [1]}
    data = DataSpec.model_validate(
        {
            "dataset": "synthetic",
            "inputs": [],
            "streams": {},
            "statistics": [
                {"kind": "rate", "name": "item", "keys": ["item_id"], "label": "click"},
                {
                    "kind": "history",
                    "name": "same_category",
                    "feedback": feedback,
                    "base": "item",
                    "weights": [{"kind": "same", "field": "category"}],
                },
            ],
        }
    )
    (batch,) = open_reader(folder, data, batch_size=4000).batches("train")
    statistic, click = batch.numbers_BD[:, 1].numpy(), batch.labels_BA[:, 0].numpy()
    assert np.corrcoef(statistic, click)[0, 1] > 0.1


def test_truth_is_no_input(folder):
    with pytest.raises(ConfigError, match="got 'true_click_probability'"):
        Dataset.open(folder).examples(["true_click_probability"])


def test_lengths_and_items_follow_their_zipf_laws(tmp_path):
    options = SyntheticSpec(rows=20_000, users=4000, items=300, max_backlog_events=100)
    prepare("synthetic", tmp_path / "data", options=options)
    events = Dataset.open(tmp_path / "data").events("impressions")
    backlog = events["time_ms"].values < synthetic.START_MS
    lengths = np.bincount(events["user_id"].values[backlog], minlength=4001)[1:]
    law = np.arange(1, 101) ** -1.2
    law /= law.sum()
    assert lengths.min() >= 1
    assert lengths.max() <= 100
    for length in (1, 2, 3):
        assert (lengths == length).mean() == pytest.approx(law[length - 1], abs=0.03)
    (items,) = columns(tmp_path / "data", "item_id")
    counts = np.sort(np.bincount(items))[::-1]
    slope = np.log(counts[0] / counts[31]) / np.log(32)
    assert slope == pytest.approx(1.05, abs=0.15)


def test_some_examples_share_their_time(folder):
    (times,) = columns(folder, "time_ms")
    assert (np.diff(times) >= 0).all()
    assert (np.diff(times) == 0).any()


def test_log_is_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "CHUNK_ROWS", 100)
    options = SyntheticSpec(rows=250, users=40, items=10, max_backlog_events=30)
    prepare("synthetic", tmp_path / "data", options=options)
    assert check(tmp_path / "data").problems == ()
    (times,) = columns(tmp_path / "data", "time_ms")
    assert len(times) == 250
    assert (np.diff(times) >= 0).all()


def test_hashed_ids(tmp_path):
    options = SyntheticSpec(rows=300, users=50, items=20, hashed_ids=True, max_backlog_events=20)
    prepare("synthetic", tmp_path / "data", options=options)
    users, items = columns(tmp_path / "data", "user_id", "item_id")
    assert np.abs(users).max() > 2**32
    assert len(np.unique(items)) <= 20
    (batch,) = open_reader(
        tmp_path / "data", DataSpec(dataset="synthetic"), batch_size=300
    ).batches("train")
    assert batch.event_tokens > 0
    assert len(batch.ids["category"].values.unique()) > 2  # entities are found by hashed ids


def test_world_without_a_past(tmp_path):
    options = SyntheticSpec(rows=50, users=50, max_backlog_events=0)
    prepare("synthetic", tmp_path / "data", options=options)
    (batch,) = open_reader(tmp_path / "data", DataSpec(dataset="synthetic"), batch_size=50).batches(
        "train"
    )
    assert batch.streams["impressions"].numbers.lengths[0] == 0


def test_options_are_checked():
    with pytest.raises(ValidationError, match="valid_frac \\+ test_frac must be below 1"):
        SyntheticSpec(valid_frac=0.5, test_frac=0.5)


def test_preparing_again_changes_nothing(folder):
    before = (folder / "dataset.toml").stat().st_mtime_ns
    spec = prepare("synthetic", folder, options=SMALL)
    assert spec == Dataset.open(folder).spec
    assert (folder / "dataset.toml").stat().st_mtime_ns == before


def test_other_options_do_not_overwrite(folder):
    with pytest.raises(DataError, match=r"made with rows = 10; got one made with rows = 4000"):
        prepare("synthetic", folder, options=SMALL.model_copy(update={"rows": 10}))
    with pytest.raises(DataError, match=r"hold 'movielens-100k'; got .* which holds 'synthetic'"):
        prepare("movielens-100k", folder)


def test_arguments_that_do_not_belong_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="got 'sintetic'; did you mean 'synthetic'"):
        prepare("sintetic", tmp_path)
    with pytest.raises(ConfigError, match="options belong to 'synthetic'"):
        prepare("movielens-100k", tmp_path, options=SMALL)
    with pytest.raises(ConfigError, match="takes no source"):
        prepare("synthetic", tmp_path, source=tmp_path)


def test_default_folder_tells_options_apart(tmp_path):
    plain = DataSpec(dataset="synthetic")
    assert default_folder(plain, tmp_path) == tmp_path / "synthetic"
    assert default_folder(plain.model_copy(update={"folder": "x/y"}), tmp_path).parts == ("x", "y")
    folders = {
        default_folder(DataSpec(dataset="synthetic", synthetic=options), tmp_path)
        for options in (SyntheticSpec(), SMALL, SMALL.model_copy(update={"seed": 3}))
    }
    assert len(folders) == 3


def test_notice_of_free_data(folder):
    assert "no restrictions" in notice(Dataset.open(folder).spec)


def test_named_folder_holds_a_data_set_of_any_name(folder, tmp_path):
    """A log of one's own: nothing is made, and the name must be the one in the folder."""
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    path = own / "dataset.toml"
    path.write_text(path.read_text().replace('name = "synthetic"', 'name = "shop"', 1))
    assert provide(DataSpec(dataset="shop", folder=str(own)), tmp_path).name == "shop"
    with pytest.raises(
        DataError, match=r"data.dataset must be 'shop', the name of the data set in data.folder"
    ):
        provide(DataSpec(dataset="shops", folder=str(own)), tmp_path)


def test_a_name_that_nothing_is_made_by_is_told_in_the_recipes_words(tmp_path):
    with pytest.raises(
        ConfigError, match=r"data.dataset must be one of .* data.folder; got"
    ) as told:
        provide(DataSpec(dataset="own-log"), tmp_path)
    assert "there are" not in str(told.value), "the names are listed once"
    with pytest.raises(ConfigError, match="name must be one of") as told:
        prepare("own-log", tmp_path)
    assert str(told.value).count("kuairand") == 1


def test_mistyped_folder_is_not_filled(tmp_path):
    wrong = tmp_path / "wrong"
    with pytest.raises(DataError, match=r"folder must hold a dataset.toml; got .*wrong"):
        provide(DataSpec(dataset="synthetic", folder=str(wrong)), tmp_path)
    assert not wrong.exists()


def test_without_a_folder_the_data_set_is_made_by_name(tmp_path):
    data = DataSpec(dataset="synthetic", synthetic=SMALL)
    assert provide(data, tmp_path).examples.rows == SMALL.rows
    assert (default_folder(data, tmp_path) / "dataset.toml").is_file()
    with pytest.raises(
        ConfigError, match=r"data.folder and data.dataset to a data set of your own"
    ):
        provide(DataSpec(dataset="shop"), tmp_path)


def test_data_set_that_is_older_than_an_option_is_taken(tmp_path):
    small = SMALL.model_copy(update={"rows": 20, "users": 5, "items": 5})
    prepare("synthetic", tmp_path / "data", options=small)
    # The contract says nothing of options that were not used, as one from before they were there.
    assert "length_law" not in (tmp_path / "data" / "dataset.toml").read_text(encoding="utf-8")
    prepare("synthetic", tmp_path / "data", options=small)
    with pytest.raises(DataError, match=r"length_law = uniform; got one made with .* = zipf"):
        prepare(
            "synthetic",
            tmp_path / "data",
            options=small.model_copy(update={"length_law": "uniform"}),
        )


def test_uniform_histories_and_inputs_without_a_signal(tmp_path):
    options = SMALL.model_copy(
        update={"length_law": "uniform", "features": 2, "feature_values": 7, "rows": 300}
    )
    prepare("synthetic", tmp_path / "data", options=options)
    prepare("synthetic", tmp_path / "zipf", options=SMALL.model_copy(update={"rows": 300}))
    found = columns(tmp_path / "data", "feature_00", "feature_01")
    assert all(values.min() >= 1 and values.max() <= 7 for values in found)
    assert not np.array_equal(*found)
    users = Dataset.open(tmp_path / "data").events("impressions", ["user_id"])["user_id"].values
    lengths = np.bincount(users, minlength=options.users + 1)[1:]
    assert lengths.mean() == pytest.approx(32.5 + 1, rel=0.1)  # and one event an example
    # What is drawn beside does not change what was there before.
    names = ("user_id", "time_ms", "domain")
    for ours, theirs in zip(
        columns(tmp_path / "data", *names), columns(tmp_path / "zipf", *names), strict=True
    ):
        assert np.array_equal(ours, theirs)


def test_vectors_of_items_tell_their_category_and_change_nothing_else(tmp_path):
    options = SMALL.model_copy(update={"content_width": 6})
    prepare("synthetic", tmp_path / "with", options=options)
    prepare("synthetic", tmp_path / "without", options=SMALL)
    read = {n: pq.read_table(tmp_path / n / "entities" / "item") for n in ("with", "without")}
    names = [f"content_{place:02d}" for place in range(6)]
    assert set(read["with"].column_names) - set(read["without"].column_names) == set(names)
    vectors = np.stack([read["with"].column(name).to_numpy() for name in names], axis=1)
    category = read["with"].column("category").to_numpy(zero_copy_only=False)
    known = ~np.isnan(category.astype(float))
    # Items of a category lie nearer to its own mean than to that of the others.
    own, groups = category[known].astype(int), np.unique(category[known].astype(int))
    means = np.stack([vectors[known][own == group].mean(0) for group in groups])
    nearest = groups[((vectors[known][:, None] - means) ** 2).sum(-1).argmin(1)]
    assert (nearest == own).mean() > 0.9
    examples = [pq.read_table(tmp_path / name / "examples") for name in ("with", "without")]
    assert examples[0].equals(examples[1])


def test_an_event_carries_the_vector_of_its_item(tmp_path):
    options = SMALL.model_copy(update={"content_width": 2})
    prepare("synthetic", tmp_path / "data", options=options)
    fields = ("item_id", "content_00", "content_01")
    data = DataSpec(dataset="synthetic", streams={"clicks": {"max_events": 5, "fields": fields}})
    reader = open_reader(tmp_path / "data", data, batch_size=200)
    items = pq.read_table(tmp_path / "data" / "entities" / "item")
    vectors = np.stack([items.column(name).to_numpy() for name in fields[1:]], axis=1)
    of = dict(zip(items.column("item_id").to_pylist(), vectors, strict=True))
    clicks = next(iter(reader.batches("train"))).streams["clicks"]
    assert reader.schema.streams[0].numbers == fields[1:]
    want = np.stack([of[item] for item in clicks.ids["item_id"].values.tolist()])
    np.testing.assert_allclose(clicks.numbers.values.numpy(), want, rtol=1e-6)
    assert len(want) > 100
