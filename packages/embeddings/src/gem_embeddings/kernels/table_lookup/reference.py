"""The mathematics of ``table_lookup``, forward and backward, in plain torch.

With row(i) the row of id i in the table of its feature, zeros for an id outside it, and w_i the
weight of an id, 1 where there are none:

    sum:  out[b] = Σ w_i · row(i)               over the ids i of bag b
    mean: out[b] = that, divided by the number of ids of b
    none: out[i] = w_i · row(i)

so an empty bag gives 0, and a mean counts ids that are read as zeros. Let n_b be what bag b is
divided by, and g the gradient of the output. Then with b(i) the bag, or the output row, of id i

    grad row r:  Σ w_i · g[b(i)] / n_b(i)       over the ids i of r within range
    grad w_i:    row(i) · g[b(i)] / n_b(i)

Sums are formed in fp32, or in fp64 for tables of fp64.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gem_embeddings.table_layout import POOLINGS, SLOT
from gem_jagged.offsets import sequence_ids


@dataclass(frozen=True, slots=True)
class FeaturePart:
    """What of a call belongs to one feature.

    Attributes:
        offset: element of the weights at which the table begins.
        row_offset: number of its first row over all tables.
        rows: of the table.
        width: of the table.
        pooling: of the feature.
        ids_I: its ids.
        bags_O: first id of each of its bags, counted within the feature, and the end.
        id_weights_I: weights of its ids, or None.
        begin: first element of the flat output.
        vectors: rows of its output.
    """

    offset: int
    row_offset: int
    rows: int
    width: int
    pooling: str
    ids_I: Tensor
    bags_O: Tensor
    id_weights_I: Tensor | None
    begin: int
    vectors: int

    @property
    def inside_I(self) -> Tensor:
        """True for ids within the table."""
        return (self.ids_I >= 0) & (self.ids_I < self.rows)

    def table_RE(self, weights_N: Tensor) -> Tensor:
        """View the table."""
        end = self.offset + self.rows * self.width
        return weights_N[self.offset : end].view(self.rows, self.width)

    def output_BE(self, flat: Tensor) -> Tensor:
        """View this feature's part of a flat output or of its gradient."""
        end = self.begin + self.vectors * self.width
        return flat[self.begin : end].view(self.vectors, self.width)

    def share_B(self, dtype: torch.dtype) -> Tensor:
        """What a mean multiplies each sum by, (B, 1)."""
        return self.bags_O.diff().clamp(min=1).to(dtype).reciprocal()[:, None]

    def grad_IE(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Give each id the gradient of the vector that it went into, without its weight."""
        grad_BE = self.output_BE(grad).to(dtype)
        if self.pooling == "none":
            return grad_BE
        if self.pooling == "mean":
            grad_BE = grad_BE * self.share_B(dtype)
        return grad_BE.index_select(0, sequence_ids(self.bags_O, self.ids_I.shape[0]))


def parts_of(
    ids_I: Tensor,
    bags_O: Tensor,
    id_weights_I: Tensor | None,
    slots: Sequence[int],
    counts: Sequence[int],
) -> Iterator[FeaturePart]:
    """Take a call apart, feature by feature.

    Args:
        ids_I: ids of all features.
        bags_O: first id of each bag of all features, and the end.
        id_weights_I: weights of the ids, or None.
        slots: of the layout.
        counts: ids of each feature.

    Yields:
        the parts, in order.
    """
    batch = (bags_O.shape[0] - 1) // max(1, len(counts))
    first = begin = 0
    for index, count in enumerate(counts):
        offset, row_offset, rows, width, pooling = slots[SLOT * index : SLOT * (index + 1)]
        ids = slice(first, first + count)
        vectors = count if POOLINGS[pooling] == "none" else batch
        yield FeaturePart(
            offset=offset,
            row_offset=row_offset,
            rows=rows,
            width=width,
            pooling=POOLINGS[pooling],
            ids_I=ids_I[ids],
            bags_O=bags_O[index * batch : (index + 1) * batch + 1].to(torch.int64) - first,
            id_weights_I=None if id_weights_I is None else id_weights_I[ids],
            begin=begin,
            vectors=vectors,
        )
        first += count
        begin += vectors * width


def sums_dtype(weights_N: Tensor) -> torch.dtype:
    """Return the dtype in which sums are formed."""
    return torch.float64 if weights_N.dtype == torch.float64 else torch.float32


def _read(weights_N: Tensor, part: FeaturePart) -> Tensor:
    dtype, inside_I = sums_dtype(weights_N), part.inside_I
    if part.rows == 0:
        return weights_N.new_zeros((part.ids_I.shape[0], part.width), dtype=dtype)
    rows_I = part.ids_I.clamp(0, part.rows - 1).to(torch.int64)
    out_IE = part.table_RE(weights_N).index_select(0, rows_I).to(dtype)
    # Filled, not multiplied: a row that is not read may hold NaN.
    return out_IE.masked_fill_(~inside_I[:, None], 0)


def table_lookup_reference(
    weights_N: Tensor,
    ids_I: Tensor,
    bags_O: Tensor,
    id_weights_I: Tensor | None,
    slots: Sequence[int],
    counts: Sequence[int],
    out_dtype: torch.dtype,
) -> Tensor:
    """Look up all features; arguments as in ``parts_of``.

    Returns:
        the outputs of all features, flat and in order.
    """
    dtype, outputs = sums_dtype(weights_N), []
    for part in parts_of(ids_I, bags_O, id_weights_I, slots, counts):
        out = _read(weights_N, part)
        if part.id_weights_I is not None:
            weighted = out * part.id_weights_I.to(dtype)[:, None]
            # An id that is read as zeros adds nothing, whatever its weight is.
            out = weighted.masked_fill(~part.inside_I[:, None], 0)
        if part.pooling != "none":
            bag_I = sequence_ids(part.bags_O, part.ids_I.shape[0])
            out = out.new_zeros((part.vectors, part.width)).index_add_(0, bag_I, out)
        if part.pooling == "mean":
            out = out * part.share_B(dtype)
        outputs.append(out.to(out_dtype).flatten())
    return torch.cat(outputs) if outputs else weights_N.new_empty(0, dtype=out_dtype)


def table_lookup_backward_reference(
    grad: Tensor,
    ids_I: Tensor,
    bags_O: Tensor,
    id_weights_I: Tensor | None,
    slots: Sequence[int],
    counts: Sequence[int],
    like_N: Tensor,
) -> Tensor:
    """Return the gradient of the weights, dense and flat; arguments as in the forward.

    ``grad`` is the flat gradient of the output, ``like_N`` the weights, of which only the shape
    and the dtype are read.
    """
    dtype = sums_dtype(like_N)
    grad_N = torch.zeros(like_N.shape, dtype=dtype, device=grad.device)
    for part in parts_of(ids_I, bags_O, id_weights_I, slots, counts):
        grad_IE, inside_I = part.grad_IE(grad, dtype), part.inside_I
        if part.id_weights_I is not None:
            grad_IE = grad_IE * part.id_weights_I.to(dtype)[:, None]
        if part.rows:
            grad_IE = grad_IE.masked_fill(~inside_I[:, None], 0)
            rows_I = part.ids_I.clamp(0, part.rows - 1).to(torch.int64)
            part.table_RE(grad_N).index_add_(0, rows_I, grad_IE)
    return grad_N.to(like_N.dtype)


def table_lookup_id_weights_backward_reference(
    grad: Tensor,
    weights_N: Tensor,
    ids_I: Tensor,
    bags_O: Tensor,
    slots: Sequence[int],
    counts: Sequence[int],
) -> Tensor:
    """Return the gradient of the weight of each id, in the dtype of sums; arguments as above."""
    dtype = sums_dtype(weights_N)
    parts = [
        (_read(weights_N, part) * part.grad_IE(grad, dtype))
        .masked_fill(~part.inside_I[:, None], 0)
        .sum(dim=1)
        for part in parts_of(ids_I, bags_O, None, slots, counts)
    ]
    return torch.cat(parts) if parts else weights_N.new_empty(0, dtype=dtype)
