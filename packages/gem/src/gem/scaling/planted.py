"""Examples with a planted signal, drawn on the device that trains on them.

Every example has a user of its own with hidden tastes, and nothing tells them but what the user did
with other items. Tastes have several directions of falling weight, so that a longer history, a
wider embedding and a wider model each go on learning where a smaller one has stopped.

    logit P(click) = b + quality(item) + SIGNAL · Σ_k taste_k(user) · trait_k(item)
    taste_k ~ N(0, 1/(k+1)),   trait_k ~ N(0, 1),   k = 0 .. latents - 1

The events of a history are clicks and skips of other items by the same law. An item may carry a
content vector, which is its traits with noise. Left out: time (events are alike), files, readers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gem.data.batch import ExampleBatch, StreamBatch
from gem.data.schema import BatchSchema
from gem.data.synthetic_dataset import FEEDBACK_CLICK, FEEDBACK_SKIP
from gem.scaling.spec import PlantedSpec
from gem_jagged.batch import Jagged, Layout
from gem_opkit.errors import ConfigError, refusal

ITEM, FEEDBACK, CONTENT, CLICK = "item_id", "feedback", "content_", "click"
_QUALITY = 0.5
_EVENT_S = 3600.0
# Seeds of what is drawn apart: labels do not depend on how long a history the model may read.
_EXAMPLES, _HISTORIES = 1, 2


@dataclass(frozen=True, slots=True)
class Drawn:
    """A batch and the probabilities that its labels were drawn from.

    Attributes:
        batch: on the device.
        rates_B: float32.
    """

    batch: ExampleBatch
    rates_B: Tensor


class PlantedWorld:
    """The facts of a world, and batches drawn from it.

    Args:
        spec: sizes and strength of the signal.
        schema: of the batches: the item, content of items, and at most one stream, whose fields
            are the item, the feedback and content.
        device: where batches are drawn.

    Raises:
        ConfigError: an input that the world does not have.
    """

    def __init__(self, spec: PlantedSpec, schema: BatchSchema, device: torch.device) -> None:
        self._spec, self._schema, self._device = spec, schema, device
        self._check(schema)
        draw = torch.Generator().manual_seed(spec.seed)
        traits_IK = torch.randn(spec.items, spec.latents, generator=draw)
        noise_IK = torch.randn(spec.items, spec.latents, generator=draw)
        quality_I = _QUALITY * torch.randn(spec.items, generator=draw)
        popularity = torch.arange(1, spec.items + 1, dtype=torch.float64) ** -spec.id_alpha
        self._popular = (popularity.cumsum(0) / popularity.sum()).float().to(device)
        self._traits_IK = traits_IK.to(device)
        self._quality_I = quality_I.to(device)
        self._content_IK = (traits_IK + spec.content_noise * noise_IK).to(device)
        weight = torch.arange(1, spec.latents + 1, dtype=torch.float32) ** -0.5
        self._spread_K = weight.to(device)
        self._intercept = self._calibrated()

    def batch(self, number: int, examples: int) -> Drawn:
        """Draw a batch; the same number and size give the same one on a kind of device.

        Args:
            number: of the batch, from 0 up.
            examples: in it.

        Returns:
            it, with its rates.
        """
        draw = self._generator(number, _EXAMPLES)
        taste_BK = self._tastes(examples, draw)
        item_B = self._items(examples, draw)
        rates_B = (self._logits(taste_BK, item_B) + self._intercept).sigmoid()
        click_B = (torch.rand(examples, generator=draw, device=self._device) < rates_B).float()
        lengths = self.lengths(number, examples)
        one = Layout.constant(examples, 1, device=self._device)
        batch = ExampleBatch(
            streams={
                stream.name: self._history(taste_BK, lengths, number)
                for stream in self._schema.streams
            },
            ids={source.name: Jagged.from_layout(item_B + 1, one) for source in self._schema.ids},
            numbers_BD=self._content(item_B, self._schema.numbers),
            labels_BA=click_B[:, None],
            label_mask_BA=torch.ones(examples, 1, dtype=torch.bool, device=self._device),
            weights_B=torch.ones(examples, device=self._device),
            domains_B=torch.zeros(examples, dtype=torch.int64, device=self._device),
            user_B=torch.arange(examples, device=self._device),
            row_B=torch.arange(examples, device=self._device) + number * examples,
        )
        return Drawn(batch, rates_B)

    def lengths(self, number: int, examples: int) -> Tensor:
        """How many events each example of a batch has.

        Args:
            number: of the batch.
            examples: in it.

        Returns:
            as `history_lengths`.
        """
        return history_lengths(self._spec, self._schema, number, examples)

    def _history(self, taste_BK: Tensor, lengths: Tensor, number: int) -> StreamBatch:
        draw, (stream,) = self._generator(number, _HISTORIES), self._schema.streams
        layout = Layout.from_lengths(lengths, device=self._device)
        total = layout.total_tokens
        who_T = torch.repeat_interleave(
            torch.arange(len(lengths), device=self._device),
            layout.offsets_O.diff(),
            output_size=total,
        )
        before_T = layout.offsets_O[who_T + 1] - torch.arange(total, device=self._device)
        item_T = self._items(total, draw)
        rate_T = (self._logits(taste_BK[who_T], item_T) + self._intercept).sigmoid()
        clicked_T = torch.rand(total, generator=draw, device=self._device) < rate_T
        fields = {
            ITEM: item_T + 1,
            FEEDBACK: torch.where(clicked_T, FEEDBACK_CLICK, FEEDBACK_SKIP),
        }
        return StreamBatch(
            ids={s.name: Jagged.from_layout(fields[s.name], layout) for s in stream.ids},
            numbers=Jagged.from_layout(self._content(item_T, stream.numbers), layout),
            gap_seconds=Jagged.from_layout(_EVENT_S * before_T.float(), layout),
        )

    def _logits(self, taste: Tensor, item: Tensor) -> Tensor:
        scores = (taste * self._traits_IK[item]).sum(1)
        return self._spec.signal * scores + self._quality_I[item]

    def _content(self, item: Tensor, names: tuple[str, ...]) -> Tensor:
        return self._content_IK[:, : len(names)][item]  # in order from 0, as `_check` demands

    def _tastes(self, count: int, draw: torch.Generator) -> Tensor:
        drawn = torch.randn(count, self._spec.latents, generator=draw, device=self._device)
        return drawn * self._spread_K

    def _items(self, count: int, draw: torch.Generator) -> Tensor:
        drawn = torch.rand(count, generator=draw, device=self._device)
        return torch.searchsorted(self._popular, drawn).clamp_max(self._spec.items - 1)

    def _generator(self, number: int, what: int) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(_seed(self._spec, number, what))

    def _calibrated(self) -> float:
        """The intercept that makes the mean rate what was asked for."""
        draw, count = self._generator(0, 0), 200_000
        logits = self._logits(self._tastes(count, draw), self._items(count, draw)).double()
        low, high = -20.0, 20.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if float((logits + middle).sigmoid().mean()) < self._spec.click_rate
                else (low, middle)
            )
        return low

    def _check(self, schema: BatchSchema) -> None:
        known = {ITEM, FEEDBACK, *(f"{CONTENT}{k:02d}" for k in range(self._spec.latents))}
        asked = [source.name for source in schema.ids]
        asked += schema.numbers
        for stream in schema.streams:
            asked += [*(source.name for source in stream.ids), *stream.numbers]
        for numbers in (schema.numbers, *(stream.numbers for stream in schema.streams)):
            in_order = tuple(f"{CONTENT}{k:02d}" for k in range(len(numbers)))
            asked += [] if numbers == in_order else [f"{', '.join(numbers)} in this order"]
        wrong = [*sorted({*asked} - known), *(["several streams"] * (len(schema.streams) > 1))]
        if schema.labels != (CLICK,):
            wrong.append(f"labels {', '.join(schema.labels)}")
        if wrong:
            raise ConfigError(
                refusal(
                    "gem scaling",
                    "recipe",
                    must=f"read {ITEM}, {FEEDBACK} of events and {CONTENT}00 and so on, in one "
                    f"stream at most, to tell {CLICK}",
                    got=", ".join(wrong),
                    fix="leave the rest out of data.inputs and of the stream's fields",
                )
            )


def history_lengths(spec: PlantedSpec, schema: BatchSchema, number: int, examples: int) -> Tensor:
    """How many events each example of a batch has, cut at what the stream reads.

    Args:
        spec: the world.
        schema: of the batches.
        number: of the batch.
        examples: in it.

    Returns:
        int64, on the host; uniform from 1 to the world's longest history before the cut.
    """
    on_host = torch.Generator().manual_seed(_seed(spec, number, _EXAMPLES))
    whole = torch.randint(1, spec.max_events + 1, (examples,), generator=on_host)
    most = [stream.max_events for stream in schema.streams]
    return whole.clamp_max(most[0]) if most else whole


def _seed(spec: PlantedSpec, number: int, what: int) -> int:
    return (spec.seed << 40) + (number << 4) + what
