"""Raw files of public data sets as their owners lay them out, made by hand: nothing is real.

Each function writes the files of a small log into a folder; `rows` of them, drawn with a fixed seed
after the few written out, so that a recipe has something to train on.
"""

import csv
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

START_S = 1_511_600_000  # 25 November 2017


def draw(rows, seed=0):
    """Users, items, rising seconds and coin flips of a log."""
    random = np.random.default_rng(seed)
    seconds = START_S + np.cumsum(random.integers(1, 120, rows))
    return (
        random.integers(1, 21, rows),
        random.integers(1, 31, rows),
        seconds,
        random.random(rows) < 0.4,
    )


def write_lines(path, lines, encoding="utf-8"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(("\n".join(lines) + "\n").encode(encoding))


def write_csv(path, heading, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(heading)
        writer.writerows(rows)


def criteo(folder, rows=0):
    """`train.txt`: label, 13 counts, 26 categories, tabs between them, no heading."""
    full = ["1", *(str(place) for place in range(13)), *(f"{place:08x}" for place in range(26))]
    empty = ["0", "-1", *[""] * 12, "00000001", *[""] * 25]
    lines = ["\t".join(full), "\t".join(empty)]
    users, items, _, clicked = draw(rows)
    for user, item, click in zip(users, items, clicked, strict=True):
        counts = [str(item * place) if (user + place) % 5 else "" for place in range(13)]
        values = [f"{user * 31 + item * place:08x}" if item % 7 else "" for place in range(26)]
        lines.append("\t".join([str(int(click)), *counts, *values]))
    write_lines(folder / "train.txt", lines)


def taobao_ads(folder, rows=0):
    """Four files; `raw_sample.csv` is in order of users, not of time."""
    days = 1_494_000_000  # 6 May 2017, 0:00 in China
    shown = [
        (2, days + 90_000, 1, "430548_1007", 1, 0),
        (1, days + 100, 3, "430539_1007", 0, 1),
        (1, days + 130, 1, "430548_1007", 1, 0),
        (1, days + 161, 2, "430548_1007", 1, 0),
        (1, days + 6 * 86_400 + 1, 2, "430548_1007", 0, 1),
        (2, days + 7 * 86_400 + 1, 3, "430539_1007", 1, 0),
    ]
    users, items, seconds, clicked = draw(rows)
    times = days + 200 + (seconds - START_S) * 690_000 // (rows * 61 + 1)
    for user, item, time, click in zip(users, items, times, clicked, strict=True):
        shown.append((user, item, int(time), f"43053{item % 3}", 1 - int(click), int(click)))
    shown.sort(key=lambda row: -int(row[0]))
    heading = ["user", "time_stamp", "adgroup_id", "pid", "nonclk", "clk"]
    write_csv(folder / "raw_sample.csv", heading, shown)
    ads = [[item, 6000 + item % 4, 70 + item, 9, "NULL" if item == 2 else 50 + item % 3, 9.5 * item]
           for item in range(1, 31)]  # fmt: skip
    heading = ["adgroup_id", "cate_id", "campaign_id", "customer", "brand", "price"]
    write_csv(folder / "ad_feature.csv", heading, ads)
    heading = ["userid", "cms_segid", "cms_group_id", "final_gender_code", "age_level"]
    heading += ["pvalue_level", "shopping_level", "occupation", "new_user_class_level "]
    profiles = [[user, 0, 5, 2, 3, "", 3, 0, user % 3] for user in range(1, 19)]
    write_csv(folder / "user_profile.csv", heading, profiles)
    seen = [(1, days - 86_400, "pv", 6001, 51), (1, days + 161, "cart", 6002, 52)]
    seen += [
        (int(user), int(time) - 50, "fav" if click else "pv", 6000 + int(item) % 4, 50)
        for user, item, time, click in zip(users, items, times, clicked, strict=True)
    ]
    write_csv(folder / "behavior_log.csv", ["user", "time_stamp", "btag", "cate", "brand"], seen)


def taobao_behavior(folder, rows=0):
    """`UserBehavior.csv`: user, item, category, behaviour, seconds; by user, no heading."""
    end = START_S + 8 * 86_400
    log = [
        (7, 100, 5, "pv", START_S),  # bought within a day
        (7, 101, 5, "pv", START_S + 10),  # carted after more than a day
        (7, 100, 5, "buy", START_S + 86_400),
        (7, 101, 5, "cart", START_S + 86_411),
        (7, 102, 6, "pv", 1_000),  # a time of 1970: noise
        (8, 100, 5, "fav", START_S + 20),  # of another user
        (8, 102, 6, "pv", end - 100),  # the log ends before a day has passed
    ]
    users, items, seconds, engaged = draw(rows)
    spread = START_S + 60 + (seconds - START_S) * 600_000 // (rows * 61 + 1)
    for user, item, time, later in zip(users, items, spread, engaged, strict=True):
        log.append((user, item, item % 5, "pv", int(time)))
        if later:
            log.append((user, item, item % 5, "cart", int(time) + 600))
    log.sort(key=lambda row: int(row[0]))
    write_lines(folder / "UserBehavior.csv", [",".join(map(str, row)) for row in log])


def movielens_1m(folder, rows=0):
    """The folder `ml-1m`: two colons between cells, Latin-1 in the films."""
    place = folder / "ml-1m"
    lines = ["1::2::5::978300760", "2::1::3::978300700", "1::1::4::978300761"]
    users, items, seconds, liked = draw(rows)
    lines += [
        f"{user}::{item}::{4 if like else 2}::{time}"
        for user, item, time, like in zip(users, items, seconds, liked, strict=True)
    ]
    write_lines(place / "ratings.dat", lines)
    films = ["1::Déjà vu (1995)::Animation|Children's", "2::A film, no year::Drama"]
    films += [f"{item}::Film {item} ({1960 + item})::Drama|Comedy" for item in range(3, 31)]
    write_lines(place / "movies.dat", films, "latin-1")
    people = [
        f"{user}::{'FM'[user % 2]}::{25 + user % 3}::{user % 4}::0{user}" for user in range(1, 21)
    ]
    write_lines(place / "users.dat", people)


def movielens_latest(folder, rows=0):
    """The folder `ml-latest-small`: CSV with a heading, titles in quotes."""
    place = folder / "ml-latest-small"
    ratings = [(1, 2, "4.0", 964_982_703), (1, 1, "3.5", 964_982_600)]
    users, items, seconds, liked = draw(rows)
    ratings += [
        (user, item, "4.5" if like else "2.0", time)
        for user, item, time, like in zip(users, items, seconds, liked, strict=True)
    ]
    write_csv(place / "ratings.csv", ["userId", "movieId", "rating", "timestamp"], ratings)
    films = [(1, "Film, The (1995)", "Adventure|Comedy"), (2, "Another", "(no genres listed)")]
    films += [(item, f"Film {item} ({1960 + item})", "Drama") for item in range(3, 31)]
    write_csv(place / "movies.csv", ["movieId", "title", "genres"], films)


def complete_journey(folder, rows=0):
    """Three of the package's Parquet files."""
    folder.mkdir(parents=True, exist_ok=True)
    users, items, seconds, saved = draw(rows)
    first = np.array([START_S - 60, START_S - 30, START_S - 30])
    count = rows + 3
    pq.write_table(
        pa.table(
            {
                "household_id": pa.array([900, 900, 901, *users]),
                "store_id": pa.array([330] * count),
                "basket_id": pa.array(range(count)),
                "product_id": pa.array([5, 6, 5, *items]),
                "quantity": pa.array([1] * count),
                "sales_value": pa.array([0.5] * count),
                "retail_disc": pa.array([0.0, 0.1, 0.0, *np.where(saved, 0.25, 0.0)]),
                "coupon_disc": pa.array([0.0, 0.0, 1.0, *np.where(saved & (items > 15), 0.5, 0.0)]),
                "coupon_match_disc": pa.array([0.0] * count),
                "week": pa.array([1] * count),
                "transaction_timestamp": pa.array(
                    np.concatenate([first, seconds]).astype("datetime64[s]").astype("M8[ns]")
                ),
            }
        ),
        folder / "transactions.parquet",
    )
    products = {
        "product_id": [5, 6],
        "manufacturer_id": [2, 69],
        "department": ["GROCERY", "PASTRY"],
        "brand": ["National", "Private"],
        "product_category": ["FRZN ICE", None],
        "product_type": ["ICE", None],
        "package_size": ["22 LB", None],
    }
    pq.write_table(pa.table(products), folder / "products.parquet")
    keys = ["age", "income", "home_ownership", "marital_status", "household_size"]
    keys += ["household_comp", "kids_count"]
    people = {"household_id": pa.array([900])} | {key: pa.array([f"{key} 1"]) for key in keys}
    pq.write_table(pa.table(people), folder / "demographics.parquet")


SAMPLES = {
    "criteo": criteo,
    "taobao-ads": taobao_ads,
    "taobao-behavior": taobao_behavior,
    "movielens-1m": movielens_1m,
    "movielens-latest": movielens_latest,
    "complete-journey": complete_journey,
}


def write_sample(name: str, folder: Path, rows: int = 0) -> Path:
    """The raw files of a data set in a folder."""
    SAMPLES[name](folder, rows)
    return folder
