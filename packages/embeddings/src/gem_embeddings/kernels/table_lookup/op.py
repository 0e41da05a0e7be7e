"""The operator ``table_lookup``: schema, kernels, fake, autograd, FLOP formulas, functions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gem_embeddings.kernels.checks import check_bags, check_lookup, check_out_dtype
from gem_embeddings.kernels.table_lookup.cost import (
    table_lookup_backward_cost,
    table_lookup_cost,
    table_lookup_id_weights_backward_cost,
)
from gem_embeddings.kernels.table_lookup.reference import (
    sums_dtype,
    table_lookup_backward_reference,
    table_lookup_id_weights_backward_reference,
    table_lookup_reference,
)
from gem_embeddings.table_layout import POOLINGS, SLOT, TableLayout
from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.impl import Impl, resolve_impl

_NAME = "table_lookup"
_HAS_TRITON = True


@torch.library.custom_op("gem_embeddings::table_lookup", mutates_args=())
def _forward(
    weights_N: Tensor,
    ids_I: Tensor,
    bags_O: Tensor,
    id_weights_I: Tensor | None,
    slots: Sequence[int],
    counts: Sequence[int],
    longest: int,
    out_dtype: torch.dtype,
    impl: str,
) -> Tensor:
    check_bags(_NAME, bags_O, slots, counts)
    args = (weights_N, ids_I, bags_O, id_weights_I, slots, counts)
    if resolve_impl(impl, weights_N.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_embeddings.kernels.table_lookup.kernel import launch_forward

        return launch_forward(*args, longest, out_dtype)
    return table_lookup_reference(*args, out_dtype)


def _sizes(bags_O: Tensor, slots: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int]]:
    """Output rows and width of each feature."""
    batch = (bags_O.shape[0] - 1) // max(1, len(counts))
    return [
        (count if POOLINGS[slots[SLOT * i + 4]] == "none" else batch, slots[SLOT * i + 3])
        for i, count in enumerate(counts)
    ]


@_forward.register_fake
def _(
    weights_N: Tensor,
    ids_I: Tensor,
    bags_O: Tensor,
    id_weights_I: Tensor | None,
    slots: Sequence[int],
    counts: Sequence[int],
    longest: int,
    out_dtype: torch.dtype,
    impl: str,
) -> Tensor:
    total = sum(vectors * width for vectors, width in _sizes(bags_O, slots, counts))
    return weights_N.new_empty(total, dtype=out_dtype)


@torch.library.custom_op("gem_embeddings::table_lookup_backward", mutates_args=())
def _backward(
    grad: Tensor,
    ids_I: Tensor,
    bags_O: Tensor,
    id_weights_I: Tensor | None,
    slots: Sequence[int],
    counts: Sequence[int],
    like_N: Tensor,
    impl: str,
) -> Tensor:
    args = (grad, ids_I, bags_O, id_weights_I, slots, counts, like_N)
    if resolve_impl(impl, grad.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_embeddings.kernels.table_lookup.kernel import launch_backward

        return launch_backward(*args)
    return table_lookup_backward_reference(*args)


@_backward.register_fake
def _(
    grad: Tensor,
    ids_I: Tensor,
    bags_O: Tensor,
    id_weights_I: Tensor | None,
    slots: Sequence[int],
    counts: Sequence[int],
    like_N: Tensor,
    impl: str,
) -> Tensor:
    return torch.empty_like(like_N, memory_format=torch.contiguous_format)


@torch.library.custom_op("gem_embeddings::table_lookup_id_weights_backward", mutates_args=())
def _id_weights_backward(
    grad: Tensor,
    weights_N: Tensor,
    ids_I: Tensor,
    bags_O: Tensor,
    slots: Sequence[int],
    counts: Sequence[int],
    impl: str,
) -> Tensor:
    args = (grad, weights_N, ids_I, bags_O, slots, counts)
    if resolve_impl(impl, grad.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_embeddings.kernels.table_lookup.kernel import launch_id_weights_backward

        return launch_id_weights_backward(*args)
    return table_lookup_id_weights_backward_reference(*args)


@_id_weights_backward.register_fake
def _(
    grad: Tensor,
    weights_N: Tensor,
    ids_I: Tensor,
    bags_O: Tensor,
    slots: Sequence[int],
    counts: Sequence[int],
    impl: str,
) -> Tensor:
    return weights_N.new_empty(ids_I.shape[0], dtype=sums_dtype(weights_N))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights_N, ids_I, bags_O, id_weights_I, slots, counts, _, _, impl = inputs
    ctx.save_for_backward(weights_N, ids_I, bags_O, id_weights_I)
    ctx.slots, ctx.counts, ctx.impl = list(slots), list(counts), impl


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weights_N, ids_I, bags_O, id_weights_I = ctx.saved_tensors
    ops, rest = torch.ops.gem_embeddings, (ctx.slots, ctx.counts)
    grad = grad.contiguous()
    grad_weights = grad_id_weights = None
    if ctx.needs_input_grad[0]:
        grad_weights = ops.table_lookup_backward(
            grad, ids_I, bags_O, id_weights_I, *rest, weights_N, ctx.impl
        )
    if ctx.needs_input_grad[3]:
        grad_id_weights = ops.table_lookup_id_weights_backward(
            grad, weights_N, ids_I, bags_O, *rest, ctx.impl
        ).to(id_weights_I.dtype)
    return grad_weights, None, None, grad_id_weights, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _numbers(bags_O: Tensor, slots: Sequence[int], counts: Sequence[int]) -> dict[str, Any]:
    # How many rows differ is not known on the host: all of them, at most.
    sizes = _sizes(bags_O, slots, counts)
    return {
        "ids": list(counts),
        "vectors": [vectors for vectors, _ in sizes],
        "rows": list(counts),
        "widths": [width for _, width in sizes],
    }


def _forward_cost(
    weights_N: Tensor,
    ids_I: Tensor,
    bags_O: Tensor,
    id_weights_I: Tensor | None,
    slots: Sequence[int],
    counts: Sequence[int],
    *_: Any,
) -> Cost:
    return table_lookup_cost(
        **_numbers(bags_O, slots, counts),
        row_bytes=weights_N.element_size(),
        weighted=id_weights_I is not None,
    )


def _backward_cost(
    grad: Tensor,
    ids_I: Tensor,
    bags_O: Tensor,
    id_weights_I: Tensor | None,
    slots: Sequence[int],
    counts: Sequence[int],
    *_: Any,
) -> Cost:
    return table_lookup_backward_cost(
        **_numbers(bags_O, slots, counts), weighted=id_weights_I is not None
    )


def _id_weights_backward_cost(
    grad: Tensor,
    weights_N: Tensor,
    ids_I: Tensor,
    bags_O: Tensor,
    slots: Sequence[int],
    counts: Sequence[int],
    *_: Any,
) -> Cost:
    return table_lookup_id_weights_backward_cost(**_numbers(bags_O, slots, counts))


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)
register_flops(_id_weights_backward, _id_weights_backward_cost)


def table_lookup(
    weights_N: Tensor,
    ids_I: Tensor,
    bags_O: Tensor,
    layout: TableLayout,
    *,
    counts: Sequence[int],
    id_weights_I: Tensor | None = None,
    longest: int | None = None,
    out_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, list[Tensor]]:
    """Look up all features of tables that lie in one flat buffer, in one launch.

        sum:  out[b] = Σ w_i · row(id_i)         over the ids i of bag b
        mean: out[b] = that, divided by the number of ids of b
        none: out[i] = w_i · row(id_i)

    An empty bag gives 0. An id below 0 or beyond its table is read as zeros, gets no gradient, and
    counts in a mean.

    Args:
        weights_N: the tables, one dim, contiguous; fp32, fp16, bf16 or fp64.
        ids_I: ids of all features, feature after feature, int32 or int64; each is a row of its
            feature's table.
        bags_O: first id of each bag, counted over all features, and the end: F·B + 1, int32 or
            int64. B is the same for all features. Not read for features without pooling.
        layout: where the tables lie, and who looks them up.
        counts: ids of each feature, on the host.
        id_weights_I: weight of each id, floating point; None for 1.
        longest: the most ids that any pooled bag has, where the host knows it: saves a pass that
            shares out long bags. A longer bag would be cut short.
        out_dtype: of the output; fp32 where not given, fp64 for tables of fp64.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        the flat output, and a view of it for each feature: (B, E), or (I, E) without pooling.
        Differentiable by ``weights_N``, with a dense gradient, and by ``id_weights_I``. Large
        tables are trained by ``table_update``, which makes no gradient of their size.

    Raises:
        ShapeError: ids, bags, counts, weights or a buffer whose sizes do not fit together; on a
            CPU also bags that do not share out the ids of their feature.
        DtypeError: ids that are not whole numbers, or a dtype that is not taken.
        DeviceError: tensors on different devices.
        UnsupportedError: an ``impl`` that cannot run here.

    Numerics: sums in fp32 (fp64 for fp64) in an order that depends on the place in the bag alone;
        only the reference on CUDA adds in no fixed order.
    Cost: reads 8 bytes an id and each different row once, writes the output; see ``cost.py``.
    Source: pooled lookups of table-batched embeddings as torchrec defines them.
    """
    check_lookup(_NAME, weights_N, ids_I, bags_O, layout, counts, id_weights_I)
    if out_dtype is None:
        out_dtype = sums_dtype(weights_N)
    check_out_dtype(_NAME, out_dtype)
    check_autograd(_NAME, weights_N=weights_N, id_weights_I=id_weights_I)
    chosen = resolve_impl(impl, weights_N.device, _NAME, has_triton=_HAS_TRITON)
    total = ids_I.shape[0] if longest is None else longest
    flat = torch.ops.gem_embeddings.table_lookup(
        weights_N, ids_I, bags_O, id_weights_I, layout.slots, counts, total, out_dtype, chosen
    )
    batch = (bags_O.shape[0] - 1) // max(1, len(counts))
    shapes = layout.output_shapes(batch, counts)
    parts = flat.split([rows * width for rows, width in shapes])
    return flat, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def id_weight_gradient(
    grad: Tensor,
    weights_N: Tensor,
    ids_I: Tensor,
    bags_O: Tensor,
    layout: TableLayout,
    *,
    counts: Sequence[int],
    impl: Impl = "auto",
) -> Tensor:
    """Differentiate a lookup by the weights of its ids, before the rows are moved.

        grad w_i = row(id_i) · grad[b] / n_b     with b the bag of i, and n_b what it is divided by

    Args:
        grad: flat gradient of the output of ``table_lookup``.
        weights_N: the tables as they were looked up.
        ids_I: as in ``table_lookup``.
        bags_O: as in ``table_lookup``.
        layout: as in ``table_lookup``.
        counts: as in ``table_lookup``.
        impl: who computes it.

    Returns:
        gradient of each weight, fp32 (fp64 for tables of fp64); 0 for an id read as zeros.

    Raises:
        ShapeError: sizes that do not fit together.
        DtypeError: a dtype that is not taken.
        DeviceError: tensors on different devices.
        UnsupportedError: an ``impl`` that cannot run here.

    Cost: reads rows and gradients once; 2 FLOPs for each element of an id.
    """
    check_lookup("id_weight_gradient", weights_N, ids_I, bags_O, layout, counts, None, grad=grad)
    chosen = resolve_impl(impl, weights_N.device, _NAME, has_triton=_HAS_TRITON)
    result: Tensor = torch.ops.gem_embeddings.table_lookup_id_weights_backward(
        grad.contiguous(), weights_N, ids_I, bags_O, layout.slots, counts, chosen
    )
    return result
