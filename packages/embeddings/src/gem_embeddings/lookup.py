"""The lookup of one table: rows out, and a sparse gradient back in which each row occurs once.

It is written as one autograd function rather than through ``F.embedding(sparse=True)`` for three
reasons. All features of a table send their gradients into one sum, so the optimizer meets each
row once. An id outside the rows that is read as zeros must leave no trace in the gradient: a row
that was not seen must not move. And the rows that were seen are found by marking, not by sorting,
where the table is small enough, which is what makes many small tables cheap on a CPU.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_jagged.offsets import sequence_ids

# Marking touches every row of the table once, sorting every id about log(ids) times: measured,
# marking is the faster one up to some sixteen rows an id.
_ROWS_PER_ID = 16


@dataclass(frozen=True, slots=True)
class FeatureLookup:
    """The ids of one feature, as rows of its table.

    Attributes:
        rows_I: row of each id, int64, in range.
        pooling: ``"sum"``, ``"mean"`` or ``"none"``.
        offsets_O: first id of each example, int64; unused without pooling.
        single: every example has exactly one id.
        outside_I: True for an id that is read as zeros; None where there is none.
    """

    rows_I: Tensor
    pooling: str
    offsets_O: Tensor
    single: bool
    outside_I: Tensor | None = None

    @property
    def shares_B(self) -> Tensor:
        """What a mean multiplies each example's sum by: 1 over its ids, 1 for none, (B, 1)."""
        return self.offsets_O.diff().clamp_(min=1).to(torch.float32).reciprocal_()[:, None]


class TableLookup(torch.autograd.Function):
    """Look up every feature of one table; see ``look_up``."""

    @staticmethod
    def forward(
        ctx: Any,
        weight_RE: Tensor,
        features: list[FeatureLookup],
        seen: Callable[[int], None] | None,
        *id_weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Compute one output for each feature."""
        ctx.set_materialize_grads(False)
        ctx.seen = seen
        ctx.poolings = [(feature.pooling, feature.single) for feature in features]
        ctx.shape = weight_RE.shape
        # The rows themselves are needed only to differentiate by the weights of ids.
        needed = any(needs for needs in ctx.needs_input_grad[3:])
        # The ids are saved as tensors, not as attributes, so that autograd finds out and refuses
        # where a loader has reused their memory before the backward pass.
        ctx.save_for_backward(
            weight_RE if needed else None,
            *id_weights,
            *(feature.rows_I for feature in features),
            *(feature.offsets_O for feature in features),
            *(feature.outside_I for feature in features),
        )
        return tuple(
            _forward(weight_RE, feature, id_weight)
            for feature, id_weight in zip(features, id_weights, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Sum the gradients of all features by row."""
        weight_RE, *saved = ctx.saved_tensors
        count = len(ctx.poolings)
        id_weights = saved[:count]
        features = [
            FeatureLookup(rows_I, pooling, offsets_O, single, outside_I)
            for (pooling, single), rows_I, offsets_O, outside_I in zip(
                ctx.poolings,
                saved[count : 2 * count],
                saved[2 * count : 3 * count],
                saved[3 * count :],
                strict=True,
            )
        ]
        rows: list[Tensor] = []
        values: list[Tensor] = []
        weight_grads: list[Tensor | None] = []
        for index, (feature, grad, id_weight) in enumerate(
            zip(features, grads, id_weights, strict=True)
        ):
            weight_grads.append(None)
            if grad is None:
                continue
            grad_IE = _spread(feature, grad)
            if ctx.needs_input_grad[3 + index]:
                looked_up_IE = _read(weight_RE, feature)
                weight_grads[-1] = (looked_up_IE * grad_IE).sum(dim=1).to(id_weight.dtype)
            if id_weight is not None:
                grad_IE = grad_IE * id_weight[:, None]
            rows_I, kept = feature.rows_I, grad_IE
            if feature.outside_I is not None:
                inside = ~feature.outside_I
                rows_I, kept = rows_I[inside], kept[inside]
            rows.append(rows_I)
            values.append(kept)
        grad_weight = None
        if ctx.needs_input_grad[0] and rows:
            grad_weight = sum_by_row(rows, values, ctx.shape)
            if ctx.seen is not None:
                ctx.seen(grad_weight._nnz())
        return grad_weight, None, None, *weight_grads


def look_up(
    weight_RE: Tensor,
    features: list[FeatureLookup],
    id_weights: list[Tensor | None],
    *,
    seen: Callable[[int], None] | None = None,
) -> tuple[Tensor, ...]:
    """Look up every feature of one table.

    Args:
        weight_RE: the table.
        features: ids of each feature.
        id_weights: weight of each id, (I,), or None, for each feature.
        seen: told by the backward pass how many different rows the gradient has, which it has to
            find anyway.

    Returns:
        for each feature pooled vectors (B, E), or without pooling one vector for each id (I, E).
        The gradient of the table is sparse, its rows ascend and differ.
    """
    return TableLookup.apply(weight_RE, features, seen, *id_weights)  # type: ignore[no-any-return]


def _read(weight_RE: Tensor, feature: FeatureLookup) -> Tensor:
    out_IE = F.embedding(feature.rows_I, weight_RE)
    if feature.outside_I is not None:
        out_IE.masked_fill_(feature.outside_I[:, None], 0)
    return out_IE


def _forward(weight_RE: Tensor, feature: FeatureLookup, id_weight: Tensor | None) -> Tensor:
    if feature.pooling == "none":
        return _read(weight_RE, feature)
    if feature.single:
        # A bag of one id is that id, whether summed or averaged.
        out_BE = _read(weight_RE, feature)
        return out_BE if id_weight is None else out_BE.mul_(id_weight[:, None])
    if feature.outside_I is not None:
        # A weight of 0 would let a row that holds NaN or infinity through.
        out_IE = _read(weight_RE, feature)
        if id_weight is not None:
            out_IE.mul_(id_weight[:, None])
        batch = feature.offsets_O.shape[0] - 1
        ids = sequence_ids(feature.offsets_O, out_IE.shape[0])
        out_BE = out_IE.new_zeros((batch, out_IE.shape[1])).index_add_(0, ids, out_IE)
    else:
        out_BE = F.embedding_bag(
            feature.rows_I,
            weight_RE,
            feature.offsets_O,
            mode="sum",
            per_sample_weights=None if id_weight is None else id_weight.to(weight_RE.dtype),
            include_last_offset=True,
        )
    return out_BE.mul_(feature.shares_B) if feature.pooling == "mean" else out_BE


def _spread(feature: FeatureLookup, grad: Tensor) -> Tensor:
    """Give each id the gradient of the vector that it went into."""
    if feature.pooling == "none" or feature.single:
        return grad
    if feature.pooling == "mean":
        grad = grad * feature.shares_B
    return grad.index_select(0, sequence_ids(feature.offsets_O, feature.rows_I.shape[0]))


def take_sparse_notice() -> None:
    """Make torch say now, unheard, what it says of a process's first sparse tensor.

    torch 2.11 warns once that it does not check such tensors, also where ``check_invariants=False``
    says so outright; the warning would come out of somebody's first backward pass.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        nothing = torch.zeros((1, 0), dtype=torch.int64)
        torch.sparse_coo_tensor(nothing, torch.zeros(0), (1,), check_invariants=False)


def unique_rows(rows_I: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Find the different rows among many.

    Args:
        rows_I: rows in [0, num_rows), int64.
        num_rows: rows of the table.

    Returns:
        the different rows, ascending, and for each of ``rows_I`` its place among them.
    """
    if num_rows > _ROWS_PER_ID * rows_I.shape[0]:
        return torch.unique(rows_I, return_inverse=True)
    different = torch.bincount(rows_I, minlength=num_rows).nonzero().squeeze(1)
    # Only the places of rows that occur are written, and only those are read.
    places = torch.zeros(num_rows, dtype=torch.int64, device=rows_I.device)
    places[different] = torch.arange(different.shape[0], device=rows_I.device)
    return different, places.index_select(0, rows_I)


def sum_by_row(rows: Sequence[Tensor], values: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Add up the gradients of equal rows; on a CPU in the order given.

    Args:
        rows: row of each gradient, (I,) int64, in any number of parts.
        values: the gradients, (I, E), in the same parts.
        shape: of the table.

    Returns:
        a coalesced sparse tensor (R, E).
    """
    different, places_I = unique_rows(
        rows[0] if len(rows) == 1 else torch.cat(list(rows)), shape[0]
    )
    sums = values[0].new_zeros((different.shape[0], shape[1]))
    # Part by part: joining the gradients first would copy the largest tensor of the step.
    for places, part in zip(places_I.split([part.shape[0] for part in rows]), values, strict=True):
        sums.index_add_(0, places, part)
    return torch.sparse_coo_tensor(
        different[None, :], sums, tuple(shape), is_coalesced=True, check_invariants=False
    )
