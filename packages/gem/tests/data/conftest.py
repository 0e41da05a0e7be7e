"""Small data sets whose every value a test can see."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from gem.data.dataset import DatasetWriter
from gem.data.features import DatasetSpec

# For the modules beside the tests: batch_rows.
sys.path.insert(0, str(Path(__file__).parent))

ITEMS, USERS, TAGS = 6, 5, 70  # more than 64 tags: their sets take two words


def tiny_spec(rows, splits, hashed=False):
    space = "hash" if hashed else "row"
    return DatasetSpec.model_validate(
        {
            "name": "tiny",
            "tables": [
                {"name": "user", "num_embeddings": USERS, "id_space": space},
                {"name": "item", "num_embeddings": ITEMS, "id_space": space},
                {"name": "feedback", "num_embeddings": 3},
                {"name": "tag", "num_embeddings": TAGS},
                {"name": "brand", "num_embeddings": 3},
                {"name": "place", "num_embeddings": 4},
            ],
            "entities": [
                {
                    "name": "item",
                    "key": "item_id",
                    "ids": [
                        {"name": "tags", "table": "tag", "multi": True},
                        {"name": "brand", "table": "brand"},
                    ],
                    "numbers": [{"name": "price", "fill": -1.0}],
                }
            ],
            "streams": [
                {
                    "name": "views",
                    "ids": [
                        {"name": "item_id", "table": "item"},
                        {
                            "name": "feedback",
                            "table": "feedback",
                            "visible_after_ms": 2000,
                            "unknown": 0,
                        },
                    ],
                    "numbers": [
                        {
                            "name": "dwell",
                            "fill": 0.5,
                            "visible_after_ms": 1000,
                            "unknown": -2.0,
                        }
                    ],
                }
            ],
            "examples": {
                "rows": rows,
                "item": "item_id",
                "ids": [
                    {"name": "user_id", "table": "user"},
                    {"name": "item_id", "table": "item"},
                    {"name": "place", "table": "place", "fill": 3},
                ],
                "numbers": [{"name": "bid", "fill": 7.0}],
                "labels": [{"name": "click"}, {"name": "buy"}],
                "domain": "domain",
                "weight": "weight",
            },
            "domains": ["feed", "stories"],
            "splits": splits,
        }
    )


def write_tiny(folder, examples, events, items=None, train=None, hashed=False):
    """Write a data set of rows given as lists; None is a null.

    examples: (user, item, seconds, click, buy) each; events: (user, item, seconds, feedback) each.
    """
    rows = len(examples)
    train = rows if train is None else train
    splits = [
        {"name": "train", "start": 0, "stop": train},
        {"name": "test", "start": train, "stop": rows},
    ]
    user, item, time, click, buy = list(zip(*examples, strict=True)) or [[]] * 5
    event_columns = list(zip(*events, strict=True)) or [[], [], [], []]
    if items is None:
        items = [(i, [i + 1, 60 + i], i % 3, float(i)) for i in range(ITEMS)]
    ids, tags, brands, prices = (list(c) for c in zip(*items, strict=True))
    with DatasetWriter(folder) as writer:
        writer.examples(
            {
                "user_id": pa.array(user, pa.int64()),
                "item_id": pa.array(item, pa.int64()),
                "time_ms": pa.array([int(t * 1000) for t in time], pa.int64()),
                "place": pa.array(
                    [row % 3 if row % 5 else None for row in range(rows)], pa.int64()
                ),
                "bid": pa.array([row / 8 if row % 4 else None for row in range(rows)]),
                "click": pa.array(click, pa.float32()),
                "buy": pa.array(buy, pa.float32()),
                "domain": pa.array([row % 2 for row in range(rows)], pa.int64()),
                "weight": pa.array([1.0 + row % 2 for row in range(rows)], pa.float32()),
            }
        )
        writer.events(
            "views",
            {
                "user_id": pa.array(event_columns[0], pa.int64()),
                "item_id": pa.array(event_columns[1], pa.int64()),
                "time_ms": pa.array([int(t * 1000) for t in event_columns[2]], pa.int64()),
                "feedback": pa.array(event_columns[3], pa.int64()),
                "dwell": pa.array(
                    [t / 4 if t % 3 else None for t in event_columns[2]], pa.float32()
                ),
            },
        )
        writer.entity(
            "item",
            {
                "item_id": pa.array(ids, pa.int64()),
                "tags": pa.array(tags, pa.list_(pa.int64())),
                "brand": pa.array(brands, pa.int64()),
                "price": pa.array(prices, pa.float32()),
            },
        )
        writer.finish(tiny_spec(rows, splits, hashed))
    return folder


def random_log(seed, rows=40, span=30):
    """Examples in time order with many equal times, and events of the same users."""
    random = np.random.default_rng(seed)
    times = np.sort(random.integers(0, span, rows))
    examples = [
        (
            int(random.integers(0, USERS)),
            int(random.integers(0, ITEMS)),
            int(t),
            None if random.random() < 0.1 else float(random.integers(0, 2)),
            None,
        )
        for t in times
    ]
    events = [(u, i, t, 1 if c in (None, 0.0) else 2) for u, i, t, c, _ in examples]
    events += [
        (
            int(random.integers(0, USERS)),
            int(random.integers(0, ITEMS)),
            int(random.integers(-10, span)),
            int(random.integers(0, 3)),
        )
        for _ in range(rows)
    ]
    random.shuffle(events)
    return examples, [tuple(int(v) for v in event) for event in events]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Writes a tiny data set into a fresh folder: `tiny(examples, events, ...)`."""
    root = tmp_path_factory.mktemp("tiny")
    count = itertools.count()

    def make(examples, events, **options):
        return write_tiny(root / f"data-{next(count)}", examples, events, **options)

    return make


@pytest.fixture(scope="session")
def logs():
    """`random_log`."""
    return random_log
