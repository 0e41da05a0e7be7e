"""The operator ``table_update``: schema, kernels, fake, FLOP formula, function."""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gem_embeddings.contract import OptimizerSpec, TableOptimizer
from gem_embeddings.kernels.checks import check_bags, check_lookup
from gem_embeddings.kernels.table_lookup.reference import sums_dtype
from gem_embeddings.kernels.table_update.cost import table_update_cost
from gem_embeddings.kernels.table_update.reference import table_update_reference
from gem_embeddings.rules import STATE_NAMES, is_row_wise, spec_of
from gem_embeddings.table_layout import POOLINGS, SLOT, TableLayout
from gem_opkit.cost import Cost, register_flops
from gem_opkit.errors import ConfigError, DeviceError, DtypeError, ShapeError, refusal
from gem_opkit.impl import Impl, resolve_impl

_NAME = "table_update"
_HAS_TRITON = True


@torch.library.custom_op(
    "gem_embeddings::table_update", mutates_args=("weights_N", "state_a", "state_b")
)
def _update(
    weights_N: Tensor,
    state_a: Tensor | None,
    state_b: Tensor | None,
    ids_I: Tensor,
    bags_O: Tensor,
    grad: Tensor,
    id_weights_I: Tensor | None,
    slots: Sequence[int],
    counts: Sequence[int],
    kind: str,
    lr: float,
    eps: float,
    beta1: float,
    beta2: float,
    moment_scale: float,
    grad_scale: float,
    step: int,
    seed: int | None,
    impl: str,
) -> None:
    check_bags(_NAME, bags_O, slots, counts)
    # lr is a number of its own, because a schedule may reach 0 and a spec may not.
    spec = spec_of(
        cast(TableOptimizer, kind),
        eps=eps,
        beta1=beta1,
        beta2=beta2,
        moment_scale=moment_scale,
    )
    states = [state for state in (state_a, state_b) if state is not None]
    args = (weights_N, states, ids_I, bags_O, grad, id_weights_I, slots, counts, spec)
    numbers = {"lr": lr, "grad_scale": grad_scale, "step": step, "seed": seed}
    if resolve_impl(impl, weights_N.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_embeddings.kernels.table_update.kernel import launch_update

        launch_update(*args, **numbers)
    else:
        table_update_reference(*args, **cast(Any, numbers))


@_update.register_fake
def _(
    weights_N: Tensor,
    state_a: Tensor | None,
    state_b: Tensor | None,
    ids_I: Tensor,
    bags_O: Tensor,
    grad: Tensor,
    id_weights_I: Tensor | None,
    slots: Sequence[int],
    counts: Sequence[int],
    kind: str,
    lr: float,
    eps: float,
    beta1: float,
    beta2: float,
    moment_scale: float,
    grad_scale: float,
    step: int,
    seed: int | None,
    impl: str,
) -> None:
    return None


def _cost(
    weights_N: Tensor,
    state_a: Tensor | None,
    state_b: Tensor | None,
    ids_I: Tensor,
    bags_O: Tensor,
    grad: Tensor,
    id_weights_I: Tensor | None,
    slots: Sequence[int],
    counts: Sequence[int],
    kind: str,
    *_: Any,
) -> Cost:
    batch = (bags_O.shape[0] - 1) // max(1, len(counts))
    pooled = [POOLINGS[slots[SLOT * i + 4]] != "none" for i in range(len(counts))]
    return table_update_cost(
        OptimizerSpec(kind=cast(TableOptimizer, kind)),
        ids=counts,
        vectors=[batch if p else n for p, n in zip(pooled, counts, strict=True)],
        rows=counts,
        widths=[slots[SLOT * i + 3] for i in range(len(counts))],
        row_bytes=weights_N.element_size(),
        grad_bytes=grad.element_size(),
        weighted=id_weights_I is not None,
    )


register_flops(_update, _cost)


def table_update(
    weights_N: Tensor,
    states: Sequence[Tensor],
    ids_I: Tensor,
    bags_O: Tensor,
    grad: Tensor,
    layout: TableLayout,
    *,
    counts: Sequence[int],
    spec: OptimizerSpec,
    lr: float | None = None,
    step: int = 1,
    id_weights_I: Tensor | None = None,
    grad_scale: float = 1.0,
    seed: int | None = None,
    impl: Impl = "auto",
) -> None:
    """Move the rows that ids name, in place: gradients merged by row and the optimizer in one pass.

    The gradient of a row is the sum over the ids, of all features, that name it:

        g_r = grad_scale · Σ w_i · grad[b(i)] / n_b(i)

    with n what a mean divides by, and the row then moves by the rule of ``spec``; the rules stand
    in ``gem_embeddings.rules``. Rows that no id names, and ids outside their table, change nothing.

    Args:
        weights_N: the tables, one dim, contiguous; fp32, fp16, bf16 or fp64. Changed.
        states: optimizer rows, fp32 (fp64 for tables of fp64), contiguous, changed:
            rowwise_adagrad one value a row (``layout.rows``); adagrad one, adam two, of the size of
            ``weights_N``; sgd none.
        ids_I: as in ``table_lookup``.
        bags_O: as in ``table_lookup``; not read for features without pooling.
        grad: gradient of the flat output of ``table_lookup``, floating point.
        layout: as in ``table_lookup``.
        counts: ids of each feature, on the host.
        spec: kind and hyperparameters.
        lr: learning rate of this step; that of the spec where not given.
        step: steps of the tables with this one, at least 1: adam corrects by it, stochastic
            rounding draws by it.
        id_weights_I: as in ``table_lookup``.
        grad_scale: what all gradients are multiplied by.
        seed: rows of fp16 and bf16 are rounded by chance with it; None rounds to the nearest, in
            which small updates are lost. Not read for rows of fp32.
        impl: who computes it; see ``gem_opkit.impl``.

    Raises:
        ShapeError: sizes that do not fit together; on a CPU also bags that do not share out the
            ids of their feature.
        DtypeError: a dtype that is not taken.
        DeviceError: tensors on different devices.
        ConfigError: a learning rate below 0, a step below 1, a ``grad_scale`` that is not finite,
            or a seed beyond 64 bits.
        UnsupportedError: an ``impl`` that cannot run here.

    Numerics: gradients of a row are summed in fp32 (fp64) in a fixed order, so equal calls give
        equal bits; only the reference on CUDA adds in no fixed order. The rule is computed in fp32.
    Cost: reads the gradient once, and reads and writes each different row and its state once; the
        ids are sorted on a GPU.
    Source: the fused updates of table-batched embeddings in fbgemm.
    """
    check_lookup(_NAME, weights_N, ids_I, bags_O, layout, counts, id_weights_I, grad=grad)
    _check_states(weights_N, states, layout, spec)
    lr = spec.lr if lr is None else lr
    if not 0 <= lr < math.inf:
        _refuse("lr", "be at least 0 and finite", lr)
    if step < 1:
        _refuse("step", "be at least 1", step)
    if not -math.inf < grad_scale < math.inf:
        _refuse("grad_scale", "be finite", grad_scale)
    if seed is not None and not -(2**63) <= seed < 2**63:
        _refuse("seed", "fit in 64 bits", seed)
    chosen = resolve_impl(impl, weights_N.device, _NAME, has_triton=_HAS_TRITON)
    state_a, state_b = (*states, None, None)[:2]
    torch.ops.gem_embeddings.table_update(
        weights_N,
        state_a,
        state_b,
        ids_I,
        bags_O,
        grad.contiguous(),
        id_weights_I,
        layout.slots,
        counts,
        spec.kind,
        lr,
        spec.eps,
        spec.beta1,
        spec.beta2,
        spec.moment_scale,
        grad_scale,
        step,
        seed,
        chosen,
    )


def _refuse(name: str, must: str, got: object) -> None:
    raise ConfigError(refusal(_NAME, name, must=must, got=got, fix="check the schedule"))


def _check_states(
    weights_N: Tensor, states: Sequence[Tensor], layout: TableLayout, spec: OptimizerSpec
) -> None:
    names = STATE_NAMES[spec.kind]
    if len(states) != len(names):
        words = ", ".join(names) or "no state"
        raise ShapeError(
            refusal(
                _NAME,
                "states",
                must=f"be {words} for {spec.kind}",
                got=f"{len(states)} tensors",
                fix="make them as gem_embeddings.rules.STATE_NAMES says",
            )
        )
    need = layout.rows if is_row_wise(spec.kind) else layout.elements
    for name, state in zip(names, states, strict=True):
        if state.ndim != 1 or state.shape[0] < need or not state.is_contiguous():
            raise ShapeError(
                refusal(
                    _NAME,
                    f"states {name!r}",
                    must=f"have one dim of at least {need} values in a row",
                    got=f"shape {tuple(state.shape)}, stride {state.stride()}",
                    fix="one value a row for row-wise kinds, else one an element",
                )
            )
        if state.dtype != sums_dtype(weights_N):
            raise DtypeError(
                refusal(
                    _NAME,
                    f"states {name!r}",
                    must=f"be {sums_dtype(weights_N)}",
                    got=state.dtype,
                    fix="states are fp32 whatever the rows are",
                )
            )
        if state.device != weights_N.device:
            raise DeviceError(
                refusal(
                    _NAME,
                    f"states {name!r}",
                    must=f"be on {weights_N.device} like weights_N",
                    got=state.device,
                    fix="move it",
                )
            )
