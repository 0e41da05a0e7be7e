"""Examples whose rates are known, drawn on the device that trains on them.

The law is that of the generated data set (`gem.data.synthetic`), but no example is stored: each has
a user of its own, who prefers one category of items. Nothing tells which but the history, whose
clicks follow the same law as the label.

    logit P(click) = b + quality(item) + bias(user) + age effect(user)
                     + MATCH · [category(item) = preferred(user)] + STORIES · [domain is stories]
    logit P(conversion | click) = c + BUY_MATCH · [the same match] - PRICE · price(item)

Left out: what a reader does, from files to streaming statistics.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gem.data.batch import ExampleBatch, StreamBatch
from gem.data.schema import BatchSchema
from gem.data.synthetic import AGE_EFFECTS, BUY_MATCH, MATCH, PRICE, STORIES
from gem.data.synthetic_dataset import AGE_GROUPS, FEEDBACK_CLICK, FEEDBACK_SKIP
from gem.data.synthetic_spec import SyntheticSpec
from gem_jagged.batch import Jagged, Layout

INPUTS = ("item_id", "age_group", "category")
EVENT_FIELDS = ("item_id", "category", "feedback")
_BIAS, _QUALITY = 0.3, 0.5  # standard deviations, as in the generated data set
_LONGEST_GAP_S = 90.0 * 86_400.0
# Prices are a sum of two exponentials of mean 1; the model reads them like the generated column.
_PRICE_MEAN, _PRICE_SCALE = 2.0, 1.5


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch and the probabilities that its labels were drawn from.

    Attributes:
        batch: on the device.
        rates_BA: float64; of a conversion, given a click.
    """

    batch: ExampleBatch
    rates_BA: Tensor


@dataclass(frozen=True, slots=True)
class _Users:
    """Who does something: an example each, or an event each."""

    preferred: Tensor
    age: Tensor
    bias: Tensor


class KnownRates:
    """The facts of a world, and batches drawn from it.

    Args:
        options: how many items and categories, the longest history, and the mean rates.
        schema: of the batches; one stream, ``impressions``.
        seed: of the world and of all batches.
        device: where batches are drawn.
    """

    def __init__(
        self, options: SyntheticSpec, schema: BatchSchema, *, seed: int, device: torch.device
    ) -> None:
        given = tuple(source.name for source in schema.ids), schema.streams[0].name
        if given != (INPUTS, "impressions") or schema.numbers != ("price",):
            raise SystemExit(f"known_rates: the recipe must read {INPUTS} and price; got {given}")
        self._options, self._schema, self._seed, self._device = options, schema, seed, device
        draw = torch.Generator().manual_seed(seed)
        items = options.items
        self._category = torch.randint(0, options.categories, (items,), generator=draw).to(device)
        self._quality = (_QUALITY * torch.randn(items, generator=draw)).double().to(device)
        halves = torch.empty(2, items).exponential_(generator=draw)
        self._price = halves.sum(0).double().to(device)
        popularity = torch.arange(1, items + 1, dtype=torch.float64) ** -options.id_alpha
        self._popular = (popularity.cumsum(0) / popularity.sum()).to(device)
        self._age_effects = torch.from_numpy(AGE_EFFECTS).to(device)
        self._click_bias = self._conversion_bias = 0.0
        self._calibrate(torch.Generator(device).manual_seed(seed))

    def batch(self, number: int, examples: int) -> Drawn:
        """Draw a batch; the same number and size give the same one on a kind of device.

        Args:
            number: of the batch, at least 0.
            examples: in it.

        Returns:
            it, with its rates.
        """
        draw = torch.Generator(self._device).manual_seed((self._seed << 32) + number)
        on_host = torch.Generator().manual_seed((self._seed << 32) + number)
        users = self._users(examples, draw)
        item_B, domain_B = self._items(examples, draw), self._flags(examples, draw)
        click, conversion = self._logits(users, item_B, domain_B)
        rates_BA = torch.stack([click, conversion], 1).sigmoid()
        labels_BA = (self._uniform(rates_BA.shape, draw) < rates_BA).float()
        known_BA = torch.stack([torch.ones_like(labels_BA[:, 0]), labels_BA[:, 0]], 1).bool()
        ids = (item_B + 1, users.age, self._category[item_B] + 1)
        layout = Layout.constant(examples, 1, device=self._device)
        batch = ExampleBatch(
            streams={"impressions": self._history(users, draw, on_host)},
            ids={
                name: Jagged.from_layout(values, layout)
                for name, values in zip(INPUTS, ids, strict=True)
            },
            numbers_BD=((self._price[item_B] - _PRICE_MEAN) / _PRICE_SCALE).float()[:, None],
            labels_BA=labels_BA * known_BA,
            label_mask_BA=known_BA,
            weights_B=torch.ones(examples, device=self._device),
            domains_B=domain_B,
            user_B=torch.arange(examples, device=self._device),
            row_B=torch.arange(examples, device=self._device) + number * examples,
        )
        return Drawn(batch, rates_BA)

    def _history(
        self, users: _Users, draw: torch.Generator, on_host: torch.Generator
    ) -> StreamBatch:
        examples = len(users.age)
        most = self._schema.streams[0].max_events
        lengths = torch.randint(1, most + 1, (examples,), generator=on_host)
        layout = Layout.from_lengths(lengths, device=self._device)
        total = layout.total_tokens
        who = torch.repeat_interleave(
            torch.arange(examples, device=self._device),
            layout.offsets_O.diff(),
            output_size=total,
        )
        events = _Users(users.preferred[who], users.age[who], users.bias[who])
        item_T, domain_T = self._items(total, draw), self._flags(total, draw)
        rate_T = self._logits(events, item_T, domain_T)[0].sigmoid()
        clicked_T = self._uniform((total,), draw) < rate_T
        feedback_T = torch.where(clicked_T, FEEDBACK_CLICK, FEEDBACK_SKIP)
        fields = (item_T + 1, self._category[item_T] + 1, feedback_T)
        # Oldest first: gaps fall within a history. Events are alike, so only the gaps are sorted.
        share_T = self._uniform((total,), draw)
        order = torch.argsort(who.double() - 0.5 * share_T)
        return StreamBatch(
            ids={
                name: Jagged.from_layout(values, layout)
                for name, values in zip(EVENT_FIELDS, fields, strict=True)
            },
            numbers=Jagged.from_layout(torch.empty(total, 0, device=self._device), layout),
            gap_seconds=Jagged.from_layout((share_T[order] * _LONGEST_GAP_S).float(), layout),
        )

    def _logits(self, users: _Users, item: Tensor, domain: Tensor) -> tuple[Tensor, Tensor]:
        match = (self._category[item] == users.preferred).double()
        click = self._click_bias + self._quality[item] + users.bias
        click = click + self._age_effects[users.age] + MATCH * match + STORIES * domain
        return click, self._conversion_bias + BUY_MATCH * match - PRICE * self._price[item]

    def _calibrate(self, draw: torch.Generator) -> None:
        """Choose both intercepts so that the mean rates come out as asked."""
        count = 200_000
        users = self._users(count, draw)
        logits = self._logits(users, self._items(count, draw), self._flags(count, draw))
        click, conversion = logits
        ones = torch.ones_like(click)
        self._click_bias = _intercept(click, ones, self._options.click_rate)
        clicked = (click + self._click_bias).sigmoid()
        self._conversion_bias = _intercept(conversion, clicked, self._options.conversion_rate)

    def _users(self, count: int, draw: torch.Generator) -> _Users:
        categories, device = self._options.categories, self._device
        return _Users(
            preferred=torch.randint(0, categories, (count,), generator=draw, device=device),
            age=torch.randint(1, AGE_GROUPS + 1, (count,), generator=draw, device=device),
            bias=_BIAS * torch.randn(count, generator=draw, device=device, dtype=torch.float64),
        )

    def _items(self, count: int, draw: torch.Generator) -> Tensor:
        ranks = torch.searchsorted(self._popular, self._uniform((count,), draw))
        return ranks.clamp(max=self._options.items - 1)

    def _flags(self, count: int, draw: torch.Generator) -> Tensor:
        return torch.randint(0, 2, (count,), generator=draw, device=self._device)

    def _uniform(self, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
        return torch.rand(shape, generator=draw, device=self._device, dtype=torch.float64)


def _intercept(logits: Tensor, weights: Tensor, rate: float) -> float:
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = float(((logits + middle).sigmoid() * weights).sum() / weights.sum())
        low, high = (middle, high) if mean < rate else (low, middle)
    if not math.isfinite(low):
        raise SystemExit("known_rates: the rate asked for cannot be reached")
    return (low + high) / 2
