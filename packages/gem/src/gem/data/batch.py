"""The tensors of one training batch, as the reader hands them to the model.

Frozen dataclasses, so that they can be built and passed inside a compiled graph. Names and order
of everything are in the `BatchSchema` beside them.
"""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from gem_jagged.batch import Jagged


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """One event sequence for every example of the batch, oldest event first.

    All members share one layout: the same offsets, lengths and longest length.

    Attributes:
        ids: per id field, a Jagged of int64 ids (T,).
        numbers: Jagged of continuous fields (T, C), float32; C may be 0.
        gap_seconds: Jagged of the time from the event to the example (T,), float32, >= 0.
    """

    ids: Mapping[str, Jagged]
    numbers: Jagged
    gap_seconds: Jagged

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "StreamBatch":
        """The same stream on another device; host lengths stay on the host.

        Args:
            device: where to.
            non_blocking: do not wait for the copies; useful from pinned memory.

        Returns:
            the moved stream; tensors that are there already are not copied.
        """
        return StreamBatch(
            ids={k: v.to(device, non_blocking=non_blocking) for k, v in self.ids.items()},
            numbers=self.numbers.to(device, non_blocking=non_blocking),
            gap_seconds=self.gap_seconds.to(device, non_blocking=non_blocking),
        )

    def pinned(self) -> "StreamBatch":
        """The same stream in page-locked host memory."""
        return StreamBatch(
            ids={name: _pinned(ids) for name, ids in self.ids.items()},
            numbers=_pinned(self.numbers),
            gap_seconds=_pinned(self.gap_seconds),
        )


def _pinned(jagged: Jagged) -> Jagged:
    return Jagged(
        jagged.values.pin_memory(),
        jagged.offsets_O.pin_memory(),
        jagged.lengths,
        jagged.max_length,
    )


@dataclass(frozen=True, slots=True)
class StepWork:
    """How even the work of a step is, by the lengths of its histories: the greatest over the mean.

    Attributes:
        ranks_before: of all ranks, if each took the rows that follow one another; None where
            this one has not looked at the rows of all.
        ranks: of all ranks, as the rows were dealt; None likewise.
        parts_before: of this rank's micro-batches, if its rows kept their order.
        parts: of its micro-batches, as its rows were dealt; 1 where it has one.
        moved_frac: share of the step's base batches that changed ranks.
    """

    ranks_before: float | None
    ranks: float | None
    parts_before: float
    parts: float
    moved_frac: float

    def to_array(self) -> np.ndarray:
        """The numbers in their order, float64, for a way between processes; NaN for None."""
        return np.asarray([math.nan if x is None else x for x in astuple(self)], np.float64)

    @classmethod
    def from_array(cls, numbers: np.ndarray) -> "StepWork":
        """Undo `to_array`.

        Args:
            numbers: what it gave.
        """
        before, after, *others = (None if math.isnan(x) else x for x in numbers.tolist())
        return cls(before, after, *(x or 0.0 for x in others))


@dataclass(frozen=True, slots=True)
class ExampleBatch:
    """B examples of a log, joined with their histories.

    Attributes:
        streams: per stream name, its events.
        ids: per non-sequence categorical input, a Jagged of int64 ids; one id an example unless
            the input is multi-valued, missing values already filled.
        numbers_BD: continuous inputs, float32, finite, in the schema's order; D may be 0.
        labels_BA: labels, float32, in [0, 1]; 0 where unknown.
        label_mask_BA: True where the label is known.
        weights_B: example weights, float32, >= 0.
        domains_B: index into the schema's domains, int64.
        user_B: id of the user, int64 (for grouped metrics and predictions; not a model input).
        row_B: position of the example in the log, int64 (not a model input).
        work: how even the step is that this is a rank's part of; None where nothing was dealt.
        vectors_BV: cached embeddings of the users, float32; for each of the schema its numbers,
            then 1 where it is known, else zeros alone. None where the schema has none.
        teacher_BA: logits of a teacher, float32, NaN where it said nothing; for training alone.
            None where the schema has no teacher.
    """

    streams: Mapping[str, StreamBatch]
    ids: Mapping[str, Jagged]
    numbers_BD: Tensor
    labels_BA: Tensor
    label_mask_BA: Tensor
    weights_B: Tensor
    domains_B: Tensor
    user_B: Tensor
    row_B: Tensor
    work: StepWork | None = None
    vectors_BV: Tensor | None = None
    teacher_BA: Tensor | None = None

    @property
    def examples(self) -> int:
        """Number of examples."""
        return self.labels_BA.shape[0]

    @property
    def event_tokens(self) -> int:
        """Number of events over all streams, from host memory."""
        return sum(stream.numbers.total_tokens for stream in self.streams.values())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "ExampleBatch":
        """The same batch on another device; host lengths stay on the host.

        Args:
            device: where to.
            non_blocking: do not wait for the copies; useful from pinned memory.

        Returns:
            the moved batch; tensors that are there already are not copied.
        """
        moved = {
            field.name: getattr(self, field.name).to(device, non_blocking=non_blocking)
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return replace(
            self,
            streams={k: v.to(device, non_blocking=non_blocking) for k, v in self.streams.items()},
            ids={k: v.to(device, non_blocking=non_blocking) for k, v in self.ids.items()},
            **moved,
        )

    def pinned(self) -> "ExampleBatch":
        """The same batch in page-locked host memory, from which a device copies by itself."""
        own = {
            field.name: getattr(self, field.name).pin_memory()
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return replace(
            self,
            streams={name: stream.pinned() for name, stream in self.streams.items()},
            ids={name: _pinned(ids) for name, ids in self.ids.items()},
            **own,
        )
