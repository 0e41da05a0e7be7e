"""The mathematics of ``table_update`` in plain torch.

The gradient of a row is the sum over the ids of all features that name it, as in the backward of
``table_lookup``, times a scale of the caller's. Each row with an id within range then moves once,
by the rule of ``gem_embeddings.rules``; no other row does. Rows of 16 bits are computed in fp32 and
rounded by chance where a seed is given, with the words of ``row_words``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_embeddings.contract import OptimizerSpec
from gem_embeddings.kernels.table_lookup.reference import parts_of, sums_dtype
from gem_embeddings.lookup import unique_rows
from gem_embeddings.rules import is_row_wise, row_steps
from gem_opkit.stochastic import philox_words, round_stochastically


def row_words(seed: int, step: int, rows_I: Tensor, width: int) -> Tensor:
    """Draw the word by which each element of a row is rounded.

    Args:
        seed: of the tables.
        step: of the update, so that each draws anew.
        rows_I: numbers of the rows over all tables, int64.
        width: elements of a row.

    Returns:
        words_IE in [0, 2³²), int64.
    """
    group = torch.arange((width + 3) // 4, device=rows_I.device)[None, :]
    rows_I = rows_I[:, None]
    words = philox_words(seed, rows_I, rows_I >> 32, group, torch.full_like(rows_I, step))
    return torch.stack(words, dim=-1).flatten(1)[:, :width]


def table_update_reference(  # noqa: PLR0913 - the arguments of the operator
    weights_N: Tensor,
    states: Sequence[Tensor],
    ids_I: Tensor,
    bags_O: Tensor,
    grad: Tensor,
    id_weights_I: Tensor | None,
    slots: Sequence[int],
    counts: Sequence[int],
    spec: OptimizerSpec,
    *,
    lr: float,
    grad_scale: float,
    step: int,
    seed: int | None,
) -> None:
    """Move the rows that ids name; arguments as in the public function, ``slots`` of the layout."""
    dtype = sums_dtype(weights_N)
    tables: dict[int, list[tuple[Tensor, Tensor]]] = {}
    places = {}
    for part in parts_of(ids_I, bags_O, id_weights_I, slots, counts):
        inside_I = part.inside_I
        grad_IE = part.grad_IE(grad, dtype)
        if part.id_weights_I is not None:
            grad_IE = grad_IE * part.id_weights_I.to(dtype)[:, None]
        found = (part.ids_I[inside_I].to(torch.int64), grad_IE[inside_I])
        tables.setdefault(part.row_offset, []).append(found)
        if part.rows:
            places[part.row_offset] = part
    for row_offset, part in places.items():
        rows = torch.cat([found for found, _ in tables[row_offset]])
        if rows.shape[0] == 0:
            continue
        different_I, places_I = unique_rows(rows, part.rows)
        values_IE = torch.cat([values for _, values in tables[row_offset]])
        sums_IE = values_IE.new_zeros((different_I.shape[0], part.width))
        sums_IE.index_add_(0, places_I, values_IE).mul_(grad_scale)
        _move(
            weights_N, states, part.offset, row_offset, part.rows, different_I, sums_IE, spec,
            lr=lr, step=step, seed=seed,
        )  # fmt: skip


def _move(  # noqa: PLR0913 - the arguments of the operator
    weights_N: Tensor,
    states: Sequence[Tensor],
    offset: int,
    row_offset: int,
    rows: int,
    different_I: Tensor,
    grad_IE: Tensor,
    spec: OptimizerSpec,
    *,
    lr: float,
    step: int,
    seed: int | None,
) -> None:
    width = grad_IE.shape[1]
    end = offset + rows * width

    def of_rows(flat: Tensor) -> Tensor:
        return flat[offset:end].view(rows, width)

    if is_row_wise(spec.kind):
        kept = [state[row_offset : row_offset + rows] for state in states]
    else:
        kept = [of_rows(state) for state in states]
    moved = [state.index_select(0, different_I) for state in kept]
    change_IE = row_steps(spec, grad_IE, moved, lr=lr, step=step)
    for state, new in zip(kept, moved, strict=True):
        state.index_copy_(0, different_I, new)
    weight_RE = of_rows(weights_N)
    new_IE = weight_RE.index_select(0, different_I).to(grad_IE.dtype) + change_IE
    if seed is not None and weights_N.dtype in (torch.float16, torch.bfloat16):
        words_IE = row_words(seed, step, row_offset + different_I, width)
        new_IE = round_stochastically(new_IE, words_IE, weights_N.dtype)
    weight_RE.index_copy_(0, different_I, new_IE.to(weights_N.dtype))
