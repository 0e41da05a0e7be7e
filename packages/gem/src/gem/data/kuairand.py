"""KuaiRand-Pure as a data set: six days of impressions of a feed of short videos.

Labels: `is_click`, and `long_view` of the clicked impressions. Rows are in order of time, then
user, then video; days are those of UTC+8. 25 to 28 April 2022 train, 29 April is valid, 30 April
is test; what lies before is history only, what lies after is left out.

What a user did with an impression is known a minute later (`FEEDBACK_DELAY_MS`). Whatever the raw
files hold of the same row's outcome, or of a whole period, is never an input.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa

from gem.data.dataset import DatasetWriter
from gem.data.features import DatasetSpec
from gem.data.kuairand_files import (
    DAYS_SEQUENCES,
    USERS_FILE,
    VIDEOS_FILE,
    RawFiles,
    days,
    integers,
    log_days,
    need_columns,
    numbers,
    read_raw_files,
    words,
)
from gem.data.made_from import refuse_changed, sources_text
from gem_opkit.errors import DataError, refusal

DAY_MS = 86_400_000
UTC8_MS = 8 * 3_600_000
FEEDBACK_DELAY_MS = 60_000
FIRST_DAY, VALID_DAY, TEST_DAY = (
    int(np.datetime64(day).astype(np.int64)) for day in ("2022-04-25", "2022-04-29", "2022-04-30")
)
FEEDBACK = ("unknown", "skip", "click", "long view")  # by id
UNKNOWN, SKIP, CLICK, LONG_VIEW = range(4)
USER_IDS = (
    "user_active_degree",
    "is_live_streamer",
    "is_video_author",
    "follow_user_num_range",
    "fans_user_num_range",
    "friend_user_num_range",
    "register_days_range",
    *(f"onehot_feat{place}" for place in range(18)),
)
USER_NUMBERS = ("follow_user_num", "fans_user_num", "friend_user_num", "register_days")
VIDEO_IDS = ("author_id", "tag", "video_type", "upload_type", "music_id", "music_type")
VIDEO_NUMBERS = ("video_duration", "server_width", "server_height")
# Too many to name each, and their names mean nothing.
_OPAQUE = ("author_id", "music_id")

TERMS = (
    "KuaiRand-Pure is shared by its authors under CC BY-SA 4.0: name them, and share what is made "
    "of the data alike. It is the log of a video feed, not of ads."
)
CITATION = (
    "Chongming Gao, Shijun Li, Yuan Zhang, Jiawei Chen, Biao Li, Wenqiang Lei, Peng Jiang and "
    "Xiangnan He. 2022. KuaiRand: An Unbiased Sequential Recommendation Dataset with Randomly "
    "Exposed Videos. CIKM '22, 3953-3957. https://doi.org/10.1145/3511808.3557624"
)


def write_kuairand(folder: Path, *, source: Path | None = None) -> DatasetSpec:
    """Make the data set from its raw files.

    Args:
        folder: where it shall lie; nothing may be there.
        source: folder of the raw files, in the official or the six-day layout; None: the one that
            GEM_KUAIRAND names.

    Returns:
        its contract, with the owner's terms and the citation.

    Raises:
        DataError: as `gem.data.kuairand_files.read_raw_files`, or the log lacks the six days.
    """
    raw = read_raw_files(source)
    names = ("video_id", "upload_dt", *VIDEO_IDS, *VIDEO_NUMBERS)
    need_columns(raw.folder / VIDEOS_FILE, raw.videos, names)
    log = _sorted_log(raw)
    day = (log["time_ms"] + UTC8_MS) // DAY_MS
    shown = (day >= FIRST_DAY) & (day <= TEST_DAY)
    splits = [int((shown & (day < end)).sum()) for end in (VALID_DAY, TEST_DAY, TEST_DAY + 1)]
    if not splits[0]:
        raise DataError(
            refusal(
                "kuairand",
                "the log",
                must="have impressions from 25 to 28 April 2022 (UTC+8)",
                got=f"none in {len(day)} rows",
                fix="take the files as they are published",
            )
        )
    past = {name: column[day <= TEST_DAY] for name, column in log.items()}
    with DatasetWriter(folder) as writer:
        sizes = {"user": _write_users(writer, raw), "video": _write_videos(writer, raw)}
        _write_examples(writer, {name: column[shown] for name, column in log.items()})
        _write_streams(writer, raw, past)
        _write_seen_before(writer, raw, past, day[day <= TEST_DAY])
        spec = _spec(raw, past, sizes, splits)
        refuse_changed(raw.sources)
        writer.sources(sources_text(raw.sources))
        writer.finish(spec)
    return spec


def _sorted_log(raw: RawFiles) -> dict[str, np.ndarray]:
    log = dict(raw.log)
    log["freshness_days"] = _days_since_upload(raw)
    order = np.lexsort((log["video_id"], log["user_id"], log["time_ms"]))
    return {name: column[order] for name, column in log.items()}


def _days_since_upload(raw: RawFiles) -> np.ndarray:
    """From the day of the upload to the day of the impression as the log names it, float64."""
    videos = integers(raw.folder / VIDEOS_FILE, raw.videos, "video_id")
    uploaded = days(raw.folder / VIDEOS_FILE, raw.videos, "upload_dt")
    # The last one stands for videos that the file lacks.
    order, known = np.argsort(videos), np.append(uploaded, np.nan)
    place = np.searchsorted(videos, raw.log["video_id"], sorter=order)
    row = np.append(order, len(videos))[np.minimum(place, len(videos))]
    there = np.append(videos, -1)[row] == raw.log["video_id"]
    return log_days(raw.folder, raw.log["date"]) - known[np.where(there, row, len(videos))]


# -- parts -------------------------------------------------------------------------------------
def _vocabulary(values: list[str]) -> list[str]:
    """Sorted distinct values behind the missing one, whose id is 0."""
    return ["unknown value", *sorted(set(values) - {""})]


def _encoded(values: list[str], vocabulary: list[str]) -> np.ndarray:
    ids = {value: place for place, value in enumerate(vocabulary) if place}
    return np.array([ids.get(value, 0) for value in values], np.int64)


def _write_features(
    writer: DatasetWriter,
    entity: str,
    path: Path,
    table: pa.Table,
    fields: tuple[tuple[str, ...], tuple[str, ...]],
) -> dict[str, list[str]]:
    key = f"{entity}_id"
    columns: dict[str, np.ndarray | pa.Array] = {key: integers(path, table, key)}
    vocabularies = {}
    for name in fields[0]:
        values = words(table, name)
        vocabularies[name] = _vocabulary(values)
        columns[name] = _encoded(values, vocabularies[name])
    for name in fields[1]:
        columns[name] = numbers(path, table, name)
    writer.entity(entity, columns)
    return vocabularies


def _write_users(writer: DatasetWriter, raw: RawFiles) -> dict[str, list[str]]:
    path = raw.folder / USERS_FILE
    need_columns(path, raw.users, ("user_id", *USER_IDS, *USER_NUMBERS))
    return _write_features(writer, "user", path, raw.users, (USER_IDS, USER_NUMBERS))


def _write_videos(writer: DatasetWriter, raw: RawFiles) -> dict[str, list[str]]:
    path = raw.folder / VIDEOS_FILE
    return _write_features(writer, "video", path, raw.videos, (VIDEO_IDS, VIDEO_NUMBERS))


def _write_examples(writer: DatasetWriter, log: dict[str, np.ndarray]) -> None:
    clicked = log["is_click"] == 1
    writer.examples(
        {
            **{name: log[name] for name in ("user_id", "video_id", "time_ms", "tab")},
            "duration_ms": log["duration_ms"].astype(np.float32),
            "freshness_days": log["freshness_days"].astype(np.float32),
            "is_click": log["is_click"].astype(np.float32),
            "long_view": pa.array(log["long_view"].astype(np.float32), mask=~clicked),
            # Of the rows without a click, too; for people, not declared, never read.
            "long_view_of_all": log["long_view"],
        }
    )


def _write_streams(writer: DatasetWriter, raw: RawFiles, log: dict[str, np.ndarray]) -> None:
    """Impressions of all users by user, time and video; what they watched before comes first."""
    token = np.where(log["long_view"] == 1, LONG_VIEW, CLICK)
    token = np.where(log["is_click"] == 1, token, SKIP)
    order = np.lexsort((log["video_id"], log["time_ms"], log["user_id"]))
    timed = [log["user_id"][order], log["time_ms"][order], log["video_id"][order], token[order]]
    for stream, column in (("impressions", "watch_seq"), ("long_views", "long_watch_seq")):
        users, times, videos = _sequences(raw, column)
        parts = [[users, times, videos, np.full(len(users), UNKNOWN)]]
        if stream == "impressions":
            parts.append(timed)
        user, time, video, feedback = (np.concatenate(of) for of in zip(*parts, strict=True))
        untimed = np.arange(len(user)) < len(users)
        columns = {"user_id": user, "time_ms": time, "video_id": video, "feedback": feedback}
        columns["untimed"] = untimed.astype(np.int64)
        # By user, so that the join needs no copy; a stable sort keeps the order within a user.
        order = np.argsort(user, kind="stable")
        writer.events(stream, {name: values[order] for name, values in columns.items()})


def _sequences(raw: RawFiles, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """User, last known time and video of every stored event."""
    table = raw.sequences
    if table is None:
        none = np.empty(0, np.int64)
        return none, none, none
    path = raw.folder / DAYS_SEQUENCES
    lists = table.column(name).combine_chunks()
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    users = np.repeat(integers(path, table, "user_id"), lengths)
    times = np.repeat(integers(path, table, "last_time_ms"), lengths)
    return users, times, lists.flatten().cast(pa.int64()).to_numpy(zero_copy_only=False)


def _write_seen_before(
    writer: DatasetWriter, raw: RawFiles, log: dict[str, np.ndarray], day: np.ndarray
) -> None:
    """How many videos each user had seen before the first day, known once the last was seen."""
    if raw.sequences is not None:
        path = raw.folder / DAYS_SEQUENCES
        users, counts, last_ms = (
            integers(path, raw.sequences, name)
            for name in ("user_id", "history_len", "last_time_ms")
        )
    else:
        early = day < FIRST_DAY
        users, counts = np.unique(log["user_id"][early], return_counts=True)
        last_ms = np.zeros(len(users), np.int64)
        np.maximum.at(last_ms, np.searchsorted(users, log["user_id"][early]), log["time_ms"][early])
    writer.entity(
        "seen_before",
        # Nothing that happens at the time of an example is known to it.
        {"user_id": users, "valid_from_ms": last_ms + 1, "history_len": counts.astype(np.float32)},
    )


# -- contract ----------------------------------------------------------------------------------
def _spec(
    raw: RawFiles,
    log: dict[str, np.ndarray],
    vocabularies: dict[str, dict[str, list[str]]],
    splits: list[int],
) -> DatasetSpec:
    def rows(name: str, *columns: np.ndarray) -> int:
        return 1 + max(int(column.max(initial=0)) for column in (log[name], *columns))

    watched = [_sequences(raw, name)[2] for name in ("watch_seq", "long_watch_seq")]
    users = integers(raw.folder / USERS_FILE, raw.users, "user_id")
    early = _sequences(raw, "watch_seq")[0]
    videos = integers(raw.folder / VIDEOS_FILE, raw.videos, "video_id")
    tables: list[dict[str, object]] = [
        {"name": "user", "num_embeddings": rows("user_id", users, early)},
        {"name": "video", "num_embeddings": rows("video_id", videos, *watched)},
        {"name": "tab", "num_embeddings": rows("tab")},
        {"name": "feedback", "num_embeddings": len(FEEDBACK), "values": FEEDBACK},
    ]
    for name, values in (vocabularies["user"] | vocabularies["video"]).items():
        table: dict[str, object] = {"name": name, "num_embeddings": len(values)}
        tables.append(table if name in _OPAQUE else table | {"values": values})
    video_field = {"name": "video_id", "table": "video"}
    feedback_field = {
        "name": "feedback",
        "table": "feedback",
        "fill": UNKNOWN,
        "visible_after_ms": FEEDBACK_DELAY_MS,
        "unknown": UNKNOWN,
    }
    return DatasetSpec.model_validate(
        {
            "name": "kuairand",
            "description": "Impressions of a feed of short videos from 25 to 30 April 2022: was it "
            "clicked, and if so, watched for long.",
            "terms": TERMS,
            "citation": CITATION,
            "tables": tables,
            "entities": [
                {
                    "name": "user",
                    "key": "user_id",
                    "ids": [{"name": name, "table": name} for name in USER_IDS],
                    "numbers": [{"name": name} for name in USER_NUMBERS],
                },
                {
                    "name": "seen_before",
                    "key": "user_id",
                    "valid_from": "valid_from_ms",
                    "numbers": [{"name": "history_len"}],
                },
                {
                    "name": "video",
                    "key": "video_id",
                    "ids": [{"name": name, "table": name} for name in VIDEO_IDS],
                    "numbers": [{"name": name} for name in VIDEO_NUMBERS],
                },
            ],
            "streams": [
                {
                    "name": "impressions",
                    "untimed": "untimed",
                    "ids": [video_field, feedback_field],
                },
                {
                    "name": "long_views",
                    "untimed": "untimed",
                    "also": {"stream": "impressions", "field": "feedback", "values": [LONG_VIEW]},
                    # Which of them are impressions: all others are unknown for ever.
                    "ids": [video_field, feedback_field],
                },
            ],
            "examples": {
                "rows": splits[2],
                "item": "video_id",
                "ids": [
                    {"name": "user_id", "table": "user"},
                    {"name": "video_id", "table": "video"},
                    {"name": "tab", "table": "tab"},
                ],
                "numbers": [
                    {"name": "duration_ms", "unit": "ms"},
                    {"name": "freshness_days", "unit": "days"},
                ],
                "labels": [
                    {
                        "name": "is_click",
                        "description": "the video was clicked",
                        "visible_after_ms": FEEDBACK_DELAY_MS,
                    },
                    {
                        "name": "long_view",
                        "description": "it was watched for long; known of clicked videos only",
                        "visible_after_ms": FEEDBACK_DELAY_MS,
                    },
                ],
            },
            "splits": [
                {"name": "train", "start": 0, "stop": splits[0]},
                {"name": "valid", "start": splits[0], "stop": splits[1]},
                {"name": "test", "start": splits[1], "stop": splits[2]},
            ],
            "options": {"layout": raw.layout},
        }
    )
