"""The adapter: on the real six days where they are at hand, on small files of either layout."""

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest

from gem.data import kuairand, kuairand_files
from gem.data.dataset import Dataset
from gem.data.features import DataSpec
from gem.data.prepare import notice, prepare
from gem.data.reader import open_reader
from gem.data.sources import Sources
from gem_opkit.errors import DataError

# sha256 over keys, labels and histories of each split, as `fingerprint` below forms it.
FINGERPRINTS = {
    "train": "5c6a70267b6570f9853f60225d2c85cc1cdf49b80d4872a8ed3c145a306661d4",
    "valid": "5300c9760f6e3ee15e2b7337747a8818432d49bb0a03419574b3d7371eafd898",
    "test": "2a23dd9cea74674f04c76b2302adbe89c60997db8f6f64d7daae2dcbc33bbf7e",
}
ROWS = {"train": 56_110, "valid": 15_369, "test": 20_414}
RATES = {"train": (0.438211, 0.704327), "valid": (0.445247, 0.692533), "test": (0.47198, 0.700156)}
READ = DataSpec.model_validate(
    {
        "dataset": "kuairand",
        "streams": {"impressions": {"max_events": 100}, "long_views": {"max_events": 100}},
    }
)


class Rows:
    """All rows of a split, from the batches of the reader."""

    def __init__(self, folder, split):
        self.reader = open_reader(folder, READ, batch_size=2048)
        self.batches = list(self.reader.batches(split))
        sources = Sources(Dataset.open(folder), READ)
        self.row = self.all(lambda b: b.row_B)
        self.user = self.all(lambda b: b.user_B)
        self.time = sources.times[self.row]
        self.video = self.all(lambda b: b.ids["video_id"].values)
        self.labels = self.all(lambda b: b.labels_BA)
        self.known = self.all(lambda b: b.label_mask_BA)
        numbers = self.all(lambda b: b.numbers_BD)
        self.numbers = dict(zip(self.reader.schema.numbers, numbers.T, strict=True))

    def all(self, part):
        return np.concatenate([part(batch).numpy() for batch in self.batches])

    def stream(self, name, part):
        return self.all(lambda b: part(b.streams[name]))

    def histories(self, name, *fields):
        """Per row, the tuple of field values and milliseconds ago of every event."""
        lengths = self.stream(name, lambda s: s.numbers.lengths)
        gaps = self.stream(name, lambda s: s.gap_seconds.values)
        columns = [self.stream(name, lambda s, f=f: s.ids[f].values) for f in fields]
        events = list(
            zip(*(c.tolist() for c in columns), (gaps * 1000).round().tolist(), strict=True)
        )
        ends = np.cumsum(lengths)
        return [events[e - n : e] for e, n in zip(ends, lengths, strict=True)]


@pytest.fixture(scope="session")
def six_days(tmp_path_factory):
    """The real data, prepared from the folder that GEM_KUAIRAND names."""
    folder = tmp_path_factory.mktemp("kuairand") / "data"
    prepare("kuairand", folder)
    return folder


def fingerprint(folder, split):
    """Keys, labels and histories; the batches carry the time to an event, not its time.

    The label of unclicked rows is none, so the raw one is taken from the files.
    """
    rows = Rows(folder, split)
    raw = pq.read_table(folder / "examples", columns=["long_view_of_all"])
    long_view = raw.column(0).to_numpy()[rows.row]
    assert np.array_equal(long_view[rows.known[:, 1]], rows.labels[rows.known[:, 1], 1])
    assert np.array_equal(rows.known[:, 1], rows.labels[:, 0] == 1)
    assert rows.known[:, 0].all()
    digest = hashlib.sha256()
    for column in (rows.time, rows.user, rows.video, rows.labels[:, 0], long_view):
        digest.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
    lengths = rows.stream("impressions", lambda s: s.numbers.lengths)
    join = Sources(Dataset.open(folder), READ).stream("impressions").index
    history = join.history(rows.user, rows.time, 100)
    times = join.times[history.events]
    gaps = rows.stream("impressions", lambda s: s.gap_seconds.values)
    assert np.array_equal(gaps, ((np.repeat(rows.time, lengths) - times) / 1000).astype("f4"))
    feedback = rows.stream("impressions", lambda s: s.ids["feedback"].values)
    watched = rows.stream("impressions", lambda s: s.ids["video_id"].values)
    # The protocol's tokens begin at 1.
    packed = [(lengths, watched), (lengths, feedback + 1), (lengths, times)]
    packed.append(
        (
            rows.stream("long_views", lambda s: s.numbers.lengths),
            rows.stream("long_views", lambda s: s.ids["video_id"].values),
        )
    )
    for each, values in packed:
        digest.update(each.astype("<i8").tobytes())
        digest.update(values.astype("<i8").tobytes())
    return digest.hexdigest()


@pytest.mark.kuairand
@pytest.mark.parametrize("split", FINGERPRINTS)
def test_rows_labels_and_histories_are_those_of_the_protocol(six_days, split):
    assert fingerprint(six_days, split) == FINGERPRINTS[split]


@pytest.mark.kuairand
def test_six_days_have_the_published_sizes_and_rates(six_days):
    for split, rows in ROWS.items():
        labels = Rows(six_days, split)
        assert len(labels.row) == rows
        rates = [labels.labels[labels.known[:, a], a].mean(dtype="f8") for a in (0, 1)]
        assert rates == pytest.approx(RATES[split], abs=1e-6)


@pytest.mark.kuairand
def test_days_since_upload_are_those_of_the_files(six_days):
    """The slice states them; the adapter counts them, as the official files do not."""
    log = pq.read_table(Path(os.environ[kuairand_files.SOURCE_VARIABLE]) / "impressions.parquet")
    names = ["user_id", "video_id", "time_ms", "freshness_days"]
    given = {tuple(row.values()) for row in log.select(names).to_pylist()}
    made = pq.read_table(six_days / "examples", columns=names).to_pylist()
    assert {(*list(row.values())[:3], int(row["freshness_days"])) for row in made} <= given


@pytest.mark.kuairand
def test_terms_and_citation_come_with_the_data(six_days):
    text = notice(Dataset.open(six_days).spec)
    assert "CC BY-SA 4.0" in text
    assert "10.1145/3511808.3557624" in text


# -- small files in either layout --------------------------------------------------------------
def at(day, hour=12, minute=0):
    """Milliseconds of an April day's time in China, eight hours ahead of UTC."""
    first = np.datetime64("2022-04-01").astype("M8[ms]").astype(int)
    return int(first) + (((day - 1) * 24 + hour - 8) * 60 + minute) * 60_000


# user, video, time, click, long view: 24 April is history, then four days, valid and test.
LOG = [
    (0, 0, at(24, 23), 1, 1),
    (0, 1, at(25), 1, 1),
    (0, 2, at(25, 12, 1), 0, 1),
    (0, 3, at(25, 12, 2), 1, 0),
    (1, 1, at(28), 0, 0),
    (1, 2, at(29, 0), 1, 0),
    (0, 1, at(30, 23, 59), 1, 1),
    (1, 3, at(30, 0), 0, 0),
]
AFTER = (0, 0, at(30, 23) + 2 * 3_600_000, 1, 1)  # 1 May
USERS = [
    *("user_id", "user_active_degree", "is_lowactive_period", "is_live_streamer"),
    *("is_video_author", "follow_user_num", "follow_user_num_range", "fans_user_num"),
    *("fans_user_num_range", "friend_user_num", "friend_user_num_range", "register_days"),
    *("register_days_range", *(f"onehot_feat{place}" for place in range(18))),
]
VIDEOS = [
    *("video_id", "author_id", "video_type", "upload_dt", "upload_type", "visible_status"),
    *("video_duration", "server_width", "server_height", "music_id", "music_type", "tag"),
]
OUTCOMES = ("is_like", "is_follow", "is_comment", "is_forward", "is_hate", "play_time_ms")
STAYS = ("profile_stay_time", "comment_stay_time", "is_profile_enter", "is_rand")


def log_table(rows):
    names = ["user_id", "video_id", "date", "hourmin", "time_ms", "is_click", *OUTCOMES[:5]]
    names += ["long_view", "play_time_ms", "duration_ms", *STAYS, "tab"]
    columns = {name: [0] * len(rows) for name in names}
    columns |= {
        "user_id": [row[0] for row in rows],
        "video_id": [row[1] for row in rows],
        "time_ms": [row[2] for row in rows],
        "is_click": [row[3] for row in rows],
        "long_view": [row[4] for row in rows],
        "date": [date_of(row[2]) for row in rows],
        "duration_ms": [10_000 + row[1] for row in rows],
        "tab": [row[0] + 1 for row in rows],
    }
    return pa.table({name: pa.array(columns[name], pa.int64()) for name in names})


def date_of(time_ms):
    day = np.datetime64(time_ms + 8 * 3_600_000, "ms").astype("M8[D]")
    return int(str(day).replace("-", ""))


def write_features(folder):
    folder.mkdir(parents=True, exist_ok=True)
    heading = ",".join(USERS)
    onehot = ",".join(["1.0"] * 17 + [""])
    (folder / "user_features_pure.csv").write_text(
        f'{heading}\n0,full_active,0,0,1,5,"(0,10]",7,"[1,10)",0,0,100,31-60,{onehot}\n'
        f"1,UNKNOWN,0,0,1,6,500+,,,0,0,200,730+,{onehot.replace('1.0', '1', 1)}\n"
    )
    lines = [
        f"{video},{900 + video % 2},NORMAL,2022-04-2{video},LongImport,0.0,"
        f"{'' if video == 3 else 10_000.0 + video},720.0,1280.0,5,9.0,{tag}"
        for video, tag in enumerate(["39", '"20,43"', "", "39"])
    ]
    (folder / "video_features_basic_pure.csv").write_text(
        "\n".join([",".join(VIDEOS), *lines]) + "\n"
    )


@pytest.fixture
def official(tmp_path):
    """The published folder, KuaiRand-Pure/data, with one repeated row and one after the test."""
    data = tmp_path / "KuaiRand-Pure" / "data"
    write_features(data)
    early = [(0, 3, at(20), 1, 1), (0, 3, at(21), 0, 0), (1, 0, at(21), 1, 0)]
    pcsv.write_csv(log_table(early), data / "log_standard_4_08_to_4_21_pure.csv")
    late = [*LOG[::-1], LOG[1], AFTER]
    pcsv.write_csv(log_table(late), data / "log_standard_4_22_to_5_08_pure.csv")
    # Published beside them, and not read: random exposures, and statistics of the whole period.
    pcsv.write_csv(log_table(late), data / "log_random_4_22_to_5_08_pure.csv")
    (data / "video_features_statistic_pure.csv").write_text("video_id,show_cnt\n0,1\n")
    return tmp_path / "KuaiRand-Pure"


@pytest.fixture
def days(tmp_path):
    """The six-day layout: stored histories instead of the earlier log."""
    folder = tmp_path / "six-days"
    write_features(folder)
    pq.write_table(log_table([*LOG, LOG[1]]), folder / "impressions.parquet")
    sequences = {
        "user_id": [0],
        "history_len": [7],
        "last_time_ms": [LOG[1][2]],  # of an example, which does not know of it
        "watch_seq": [[3, 3, 0]],
        "like_seq": [[]],
        "long_watch_seq": [[3]],
    }
    pq.write_table(pa.table(sequences), folder / "user_sequences.parquet")
    return folder


def ago(now, then):
    return round(float(np.float32((now - then) / 1000)) * 1000)


SKIP, CLICK, LONG = kuairand.SKIP, kuairand.CLICK, kuairand.LONG_VIEW


def test_official_layout(official, tmp_path):
    spec = prepare("kuairand", tmp_path / "out", source=official)
    assert spec.options == {"layout": "official"}
    train = Rows(tmp_path / "out", "train")
    assert train.user.tolist() == [0, 0, 0, 1]
    assert train.time.tolist() == [row[2] for row in LOG[1:5]]
    assert train.known.tolist() == [[True, True], [True, False], [True, True], [True, False]]
    assert train.labels.tolist() == [[1, 1], [0, 0], [1, 0], [0, 0]]
    early = [(3, LONG, at(20)), (3, SKIP, at(21)), (0, LONG, at(24, 23))]
    third = LOG[3][2]  # two minutes and one minute after the first two
    shown = [*early, (1, LONG, at(25)), (2, SKIP, at(25, 12, 1))]
    assert train.histories("impressions", "video_id", "feedback")[2] == [
        (video, token, ago(third, then)) for video, token, then in shown
    ]
    assert train.histories("long_views", "video_id")[2] == [
        (video, ago(third, then)) for video, token, then in shown if token == LONG
    ]
    # Users have seen so many videos before 25 April; both knew the last of them by then.
    assert train.numbers["history_len"].tolist() == [3, 3, 3, 1]
    # Upload was on 20 April plus the video's id.
    assert train.numbers["freshness_days"].tolist() == [4, 3, 2, 7]
    test = Rows(tmp_path / "out", "test")
    assert test.user.tolist() == [1, 0]
    assert len(Rows(tmp_path / "out", "valid").row) == 1


def test_six_day_layout(days, tmp_path):
    spec = prepare("kuairand", tmp_path / "out", source=days)
    assert spec.options == {"layout": "six-days"}
    train = Rows(tmp_path / "out", "train")
    assert len(train.row) == 4
    first, second = LOG[1][2], LOG[2][2]
    assert train.histories("impressions", "video_id", "feedback")[0] == [
        (0, LONG, ago(first, at(24, 23)))
    ]
    # The row a minute earlier is known, to the millisecond; the stored ones never are.
    assert train.histories("impressions", "video_id", "feedback")[1] == [
        *((video, 0, ago(second, first)) for video in (3, 3, 0)),
        (0, LONG, ago(second, at(24, 23))),
        (1, LONG, ago(second, at(25))),
    ]
    assert [video for video, _ in train.histories("long_views", "video_id")[1]] == [3, 0, 1]
    assert train.histories("impressions", "video_id", "feedback")[3] == []
    assert train.numbers["history_len"].tolist() == [0, 7, 7, 0]


def test_static_features_of_small_files(official, tmp_path):
    prepare("kuairand", tmp_path / "out", source=official)
    dataset = Dataset.open(tmp_path / "out")
    values = {table.name: table.values for table in dataset.spec.tables}
    users, videos = dataset.entity("user"), dataset.entity("video")
    degrees = [values["user_active_degree"][i] for i in users["user_active_degree"].values]
    assert degrees == ["full_active", "UNKNOWN"]
    # 1.0 and 1 are one category, an empty cell is the missing one.
    assert users["onehot_feat0"].values.tolist() == [1, 1]
    assert users["onehot_feat17"].values.tolist() == [0, 0]
    assert users["fans_user_num"].values.tolist() == [7, 0]
    assert users["fans_user_num"].missing == 1
    assert [values["tag"][i] for i in videos["tag"].values] == [
        "39",
        "20,43",
        "unknown value",
        "39",
    ]
    assert videos["author_id"].values.tolist() == [1, 2, 1, 2]
    assert videos["video_duration"].missing == 1


def test_no_outcome_of_the_row_is_declared(official, tmp_path):
    spec = prepare("kuairand", tmp_path / "out", source=official)
    declared = {*spec.input_names()}
    assert not declared & {*OUTCOMES, *STAYS, "is_click", "long_view", "watch_ratio", "show_cnt"}


def test_without_a_folder_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.delenv(kuairand_files.SOURCE_VARIABLE, raising=False)
    with pytest.raises(
        DataError, match=r"source must name the folder .* set GEM_KUAIRAND, or data"
    ):
        prepare("kuairand", tmp_path / "out")
    monkeypatch.setenv(kuairand_files.SOURCE_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"GEM_KUAIRAND must be a folder; got .*nowhere"):
        prepare("kuairand", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_changed_file_is_refused_by_name(official, tmp_path, monkeypatch):
    monkeypatch.delenv(kuairand_files.SOURCE_VARIABLE, raising=False)
    prepare("kuairand", tmp_path / "out", source=official)
    prepare("kuairand", tmp_path / "out")
    users = official / "data" / "user_features_pure.csv"
    users.write_text(users.read_text() + "\n")
    for source in (official, None):
        with pytest.raises(DataError, match=r"be made of .*user_features_pure.csv as it is now"):
            prepare("kuairand", tmp_path / "out", source=source)
    shutil.rmtree(official)
    prepare("kuairand", tmp_path / "out")


def test_the_variable_names_the_folder(days, tmp_path, monkeypatch):
    monkeypatch.setenv(kuairand_files.SOURCE_VARIABLE, str(days))
    assert prepare("kuairand", tmp_path / "out").examples.rows == 7


def spoil(folder, name, value):
    path = folder / "impressions.parquet"
    table = pq.read_table(path)
    if value is None:
        table = table.drop_columns([name])
    else:
        values = [value, *table.column(name).to_pylist()[1:]]
        table = table.set_column(table.column_names.index(name), name, [values])
    pq.write_table(table, path)


def spoil_sequences(folder, first):
    path = folder / "user_sequences.parquet"
    table = pq.read_table(path)
    place = table.column_names.index("watch_seq")
    values = pa.array(first * table.num_rows)
    pq.write_table(table.set_column(place, "watch_seq", values), path)


def nest(folder):
    path = folder / "impressions.parquet"
    table = pq.read_table(path)
    lists = pa.array([[tab] for tab in table.column("tab").to_pylist()])
    pq.write_table(table.set_column(table.column_names.index("tab"), "tab", lists), path)


def reword(folder, before, after):
    path = folder / "video_features_basic_pure.csv"
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after, 1))


def repeat_last_video(folder):
    path = folder / "video_features_basic_pure.csv"
    *_, last = path.read_text().splitlines()
    path.write_text(path.read_text() + last + "\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "user_sequences.parquet").unlink(), "without user_sequences.parquet"),
        (lambda f: (f / "impressions.parquet").write_bytes(b"PAR1"), "parquet must be readable"),
        (lambda f: spoil(f, "tab", None), "tab must be a column; got none"),
        (lambda f: spoil(f, "is_click", 2), "is_click must be 0 or 1; got 2"),
        (lambda f: spoil(f, "time_ms", 1.5), "time_ms must hold whole numbers"),
        (lambda f: spoil(f, "time_ms", 2**63 - 1), r"time_ms must lie in .*; got 9223.* in row 0"),
        (lambda f: spoil(f, "video_id", -1), r"video_id must lie in 0 .. \d+; got -1 in row 0"),
        (lambda f: spoil(f, "video_id", 2**62), r"video_id must lie in 0 .. \d+; got 4611"),
        (lambda f: spoil(f, "date", 20221301), "date must hold dates such as 20220425; got 202213"),
        (lambda f: spoil(f, "date", 20220431), "date must hold dates such as 20220425; got 202204"),
        (nest, "tab must hold plain values; got list"),
        (lambda f: spoil_sequences(f, [["x"]]), "watch_seq must hold lists of integers; got list"),
        (lambda f: spoil_sequences(f, ["x"]), "watch_seq must hold lists of integers; got string"),
        (lambda f: spoil_sequences(f, [[5, None]]), "watch_seq must hold lists without gaps"),
        (lambda f: spoil_sequences(f, [[-5]]), r"watch_seq must hold ids in 0 .. \d+; got -5"),
        (lambda f: reword(f, b"2022-", b"2022/"), "upload_dt must hold dates such as 2022-04-01"),
        (lambda f: reword(f, b"tag", b"t\xe9"), "video_features_basic_pure.csv must be readable"),
        (lambda f: reword(f, b"music_id", b"tag"), "tag must be one column; got 2"),
        (repeat_last_video, r"video_id must be unique; got \d+ twice"),
        (
            lambda f: (f / "user_features_pure.csv").write_text("user_id,x\n0,1\n"),
            "user_active_degree must be a column",
        ),
    ],
)
def test_other_files_are_refused_in_one_line(days, tmp_path, change, message):
    change(days)
    with pytest.raises(DataError, match=message) as fault:
        prepare("kuairand", tmp_path / "out", source=days)
    assert "\n" not in str(fault.value)
    assert not (tmp_path / "out").exists()


def test_a_log_of_other_days_is_refused(days, tmp_path):
    pq.write_table(log_table([AFTER]), days / "impressions.parquet")
    with pytest.raises(DataError, match=r"must have impressions from 25 to 28 April 2022"):
        prepare("kuairand", tmp_path / "out", source=days)
