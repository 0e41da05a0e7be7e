"""A generated click log with a known signal, for tests, profiles and first runs.

Histories have Zipf lengths and items Zipf popularity. Every user prefers one item category, which
no static feature tells: only the history does. The true probabilities of both tasks stand beside
the labels in columns that `dataset.toml` does not declare, so that no model can read them and a
test can compute the best normalized entropy there is.

    logit P(click) = b + quality(item) + bias(user) + age effect(user)
                     + MATCH · [category(item) = preferred(user)] + STORIES · [domain is stories]
    logit P(conversion | click) = c + BUY_MATCH · [the same match] - PRICE · price(item)
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gem.data.columns import part_files
from gem.data.dataset import DatasetWriter
from gem.data.features import DatasetSpec
from gem.data.synthetic_dataset import (
    AGE_GROUPS,
    COUNTRIES,
    FEEDBACK_CLICK,
    FEEDBACK_SKIP,
    POSITIONS,
    TAGS,
    content_names,
    feature_names,
    synthetic_dataset,
)
from gem.data.synthetic_spec import SyntheticSpec

MATCH, STORIES, BUY_MATCH, PRICE = 1.5, 0.4, 1.0, 0.5
AGE_EFFECTS = np.array([0.0, -0.3, -0.1, 0.0, 0.1, 0.2, 0.3])  # by age group, 0 is not used
CONTENT_NOISE = 0.5
START_MS = 1_700_000_000_000
BACKLOG_MS = 90 * 86_400_000
CHUNK_ROWS = 65_536
TRUTH = {"click": "true_click_probability", "conversion": "true_conversion_probability"}


def write_synthetic(folder: Path, options: SyntheticSpec) -> DatasetSpec:
    """Generate the data set.

    Args:
        folder: where it shall lie; nothing may be there.
        options: sizes, seed and rates.

    Returns:
        its contract, as written to `dataset.toml`.

    Raises:
        DataError: something is there already.

    Cost: memory for the users, the items and one chunk of rows; equal options give equal values.
    """
    world = _World(options)
    spec = synthetic_dataset(options)
    with DatasetWriter(folder) as writer:
        writer.entity("user", world.user_columns())
        writer.entity("item", world.item_columns())
        world.write_backlog(writer)
        world.write_log(writer)
        writer.finish(spec)
    return spec


def true_probabilities(folder: Path) -> dict[str, np.ndarray]:
    """The probabilities from which the labels of a generated data set were drawn.

    Args:
        folder: of the data set.

    Returns:
        task -> float64, one a row of the examples. That of the conversion is given a click.
    """
    files = part_files(Path(folder) / "examples")
    tables = [pq.read_table(file, columns=list(TRUTH.values())) for file in files]
    table = pa.concat_tables(tables)
    return {task: table.column(name).to_numpy() for task, name in TRUTH.items()}


class _World:
    """The fixed facts of a generated world, and the log drawn from them."""

    def __init__(self, options: SyntheticSpec) -> None:
        self.options = options
        random = np.random.default_rng([options.seed, 0])
        users, items = options.users, options.items
        # Drawn whatever the law is: what follows it must not depend on the law.
        backlog = _zipf(random, users, options.length_alpha, options.max_backlog_events)
        if options.length_law == "uniform" and options.max_backlog_events:
            longest = options.max_backlog_events
            backlog = np.random.default_rng([options.seed, 5]).integers(1, longest + 1, users)
        self.backlog = backlog
        self.preferred = random.integers(0, options.categories, users)
        self.age = random.integers(1, AGE_GROUPS + 1, users)
        self.country = random.integers(1, COUNTRIES + 1, users)
        self.bias = random.normal(0.0, 0.3, users)
        self.category = random.integers(0, options.categories, items)
        self.quality = random.normal(0.0, 0.5, items)
        self.price = random.gamma(2.0, 1.0, items)
        self.tag_counts = random.integers(0, 4, items)
        self.tags = random.integers(1, TAGS + 1, int(self.tag_counts.sum()))
        popularity = np.arange(1, items + 1) ** -options.id_alpha
        # Popular items get scattered ids, so that a row number does not tell popularity.
        self.item_of_rank = random.permutation(items)
        self.popularity_cdf = np.cumsum(popularity / popularity.sum())
        frequency = np.arange(1, options.feature_values + 1) ** -options.id_alpha
        self.feature_cdf = np.cumsum(frequency / frequency.sum())
        self.missing = {
            name: random.random(count) < options.missing_frac
            for name, count in (("age", users), ("country", users), ("category", items))
        } | {"price": random.random(items) < options.missing_frac}
        self._calibrate(np.random.default_rng([options.seed, 1]))

    def _calibrate(self, random: np.random.Generator) -> None:
        """Choose both intercepts so that the mean rates come out as asked."""
        self.click_bias = self.conversion_bias = 0.0
        user = random.integers(0, self.options.users, 20_000)
        item, domain = self._draw_items(random, 20_000), random.integers(0, 2, 20_000)
        click, conversion = self._logits(user, item, domain)
        self.click_bias = _intercept(click, np.ones(len(user)), self.options.click_rate)
        clicked = _sigmoid(click + self.click_bias)
        self.conversion_bias = _intercept(conversion, clicked, self.options.conversion_rate)

    def _draw_items(self, random: np.random.Generator, count: int) -> np.ndarray:
        ranks = np.searchsorted(self.popularity_cdf, random.random(count))
        return self.item_of_rank[np.minimum(ranks, self.options.items - 1)]

    def _logits(
        self, user: np.ndarray, item: np.ndarray, domain: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        match = self.category[item] == self.preferred[user]
        click = self.click_bias + self.quality[item] + self.bias[user]
        click = click + AGE_EFFECTS[self.age[user]] + MATCH * match + STORIES * domain
        return click, self.conversion_bias + BUY_MATCH * match - PRICE * self.price[item]

    def _ids(self, index: np.ndarray) -> np.ndarray:
        if not self.options.hashed_ids:
            return index + 1  # row 0 stands for an unknown id
        # An odd multiplier permutes the 64-bit numbers: different indices stay different.
        return ((index.astype(np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)

    def user_columns(self) -> dict[str, pa.Array]:
        """Static features of the users."""
        return {
            "user_id": pa.array(self._ids(np.arange(self.options.users))),
            "age_group": pa.array(self.age, mask=self.missing["age"]),
            "country": pa.array(self.country, mask=self.missing["country"]),
        }

    def item_columns(self) -> dict[str, pa.Array]:
        """Static features of the items."""
        offsets = np.concatenate([[0], np.cumsum(self.tag_counts)]).astype(np.int32)
        return {
            "item_id": pa.array(self._ids(np.arange(self.options.items))),
            "category": pa.array(self.category + 1, mask=self.missing["category"]),
            "tags": pa.ListArray.from_arrays(pa.array(offsets), pa.array(self.tags)),
            "price": pa.array(self.price, mask=self.missing["price"]),
        } | self._content_columns()

    def _content_columns(self) -> dict[str, pa.Array]:
        """Vectors of the items, from random numbers of their own: category, quality and noise."""
        names = content_names(self.options)
        random = np.random.default_rng([self.options.seed, 6])
        centres = random.normal(size=(self.options.categories, len(names)))
        better = random.normal(size=len(names))
        vectors = centres[self.category] + np.outer(self.quality, better)
        vectors += CONTENT_NOISE * random.normal(size=vectors.shape)
        columns = vectors.astype(np.float32).T
        return {name: pa.array(column) for name, column in zip(names, columns, strict=True)}

    def write_backlog(self, writer: DatasetWriter) -> None:
        """Write what the users did before the first example, some users at a time."""
        # Without a single event the streams would have no file, and no columns.
        _write_events(writer, *(np.empty(0, np.int64) for _ in range(5)))
        bounds = np.concatenate([[0], np.cumsum(self.backlog)])
        first = chunk = 0
        while first < self.options.users:
            end = int(np.searchsorted(bounds, bounds[first] + CHUNK_ROWS))
            end = min(max(end, first + 1), self.options.users)
            user = np.repeat(np.arange(first, end), self.backlog[first:end])
            random = np.random.default_rng([self.options.seed, 2, chunk])
            item, domain = self._draw_items(random, len(user)), random.integers(0, 2, len(user))
            clicked = random.random(len(user)) < _sigmoid(self._logits(user, item, domain)[0])
            time = START_MS - 1 - random.integers(0, BACKLOG_MS // 1000, len(user)) * 1000
            order = np.lexsort((time, user))
            delay = random.integers(1, 30, len(user)) * 1000
            # A click belongs before the first example, too.
            click_time = np.minimum(time + delay, START_MS - 1)
            _write_events(
                writer,
                self._ids(user[order]),
                time[order],
                self._ids(item[order]),
                clicked[order],
                click_time[order],
            )
            first, chunk = end, chunk + 1

    def _feature_columns(self, chunk: int, count: int) -> dict[str, np.ndarray]:
        """The inputs without a signal, from random numbers of their own."""
        random = np.random.default_rng([self.options.seed, 4, chunk])
        columns = {}
        for name in feature_names(self.options):
            drawn = np.searchsorted(self.feature_cdf, random.random(count))
            columns[name] = self._ids(np.minimum(drawn, self.options.feature_values - 1))
        return columns

    def write_log(self, writer: DatasetWriter) -> None:
        """Write the examples, and the events that they become, a chunk at a time."""
        time_ms = START_MS
        for chunk, start in enumerate(range(0, self.options.rows, CHUNK_ROWS)):
            count = min(CHUNK_ROWS, self.options.rows - start)
            random = np.random.default_rng([self.options.seed, 3, chunk])
            user = random.integers(0, self.options.users, count)
            item, domain = self._draw_items(random, count), random.integers(0, 2, count)
            # Whole seconds: several examples often share their time.
            gaps = random.exponential(2.0, count).astype(np.int64) * 1000
            time = time_ms + np.cumsum(gaps)
            time_ms = int(time[-1])
            click_logit, conversion_logit = self._logits(user, item, domain)
            click, conversion = _sigmoid(click_logit), _sigmoid(conversion_logit)
            clicked = random.random(count) < click
            converted = random.random(count) < conversion
            writer.examples(
                {
                    "user_id": self._ids(user),
                    "item_id": self._ids(item),
                    "time_ms": time,
                    "position": random.integers(1, POSITIONS + 1, count),
                    "domain": domain,
                    "click": clicked.astype(np.float32),
                    "conversion": pa.array(converted.astype(np.float32), mask=~clicked),
                    TRUTH["click"]: click,
                    TRUTH["conversion"]: conversion,
                }
                | self._feature_columns(chunk, count)
            )
            delay = random.integers(1, 30, count) * 1000
            _write_events(writer, self._ids(user), time, self._ids(item), clicked, time + delay)


def _write_events(
    writer: DatasetWriter,
    user: np.ndarray,
    time: np.ndarray,
    item: np.ndarray,
    clicked: np.ndarray,
    click_time: np.ndarray,
) -> None:
    feedback = np.where(clicked, FEEDBACK_CLICK, FEEDBACK_SKIP).astype(np.int64)
    writer.events(
        "impressions", {"user_id": user, "time_ms": time, "item_id": item, "feedback": feedback}
    )
    kept = clicked.astype(bool)
    dwell = ((click_time - time) / 1000.0)[kept]
    writer.events(
        "clicks",
        {
            "user_id": user[kept],
            "time_ms": click_time[kept],
            "item_id": item[kept],
            "seconds_to_click": dwell,
        },
    )


def _zipf(random: np.random.Generator, count: int, alpha: float, longest: int) -> np.ndarray:
    """Lengths 1 .. longest with P(k) proportional to k ** -alpha; all 0 where longest is 0."""
    if longest == 0:
        return np.zeros(count, np.int64)
    weights = np.arange(1, longest + 1) ** -alpha
    cdf = np.cumsum(weights / weights.sum())
    return np.minimum(np.searchsorted(cdf, random.random(count)), longest - 1) + 1


def _intercept(logits: np.ndarray, weights: np.ndarray, rate: float) -> float:
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = np.average(_sigmoid(logits + middle), weights=weights)
        low, high = (middle, high) if mean < rate else (low, middle)
    return (low + high) / 2


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-logits))
