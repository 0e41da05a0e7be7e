"""The operator ``pooled_attention``: schema, fakes, autograd, FLOP formulas, function."""

import logging
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from gem_attention.checks import (
    check_activation,
    check_dtypes,
    check_heads,
    check_layout,
    check_scale,
    refuse_second_derivative,
)
from gem_attention.choosing import choose_implementation, demand_lengths, readable_rows
from gem_attention.contract import GdpaActivation
from gem_attention.kernels.pooled_attention.cost import (
    pooled_attention_backward_cost,
    pooled_attention_cost,
)
from gem_attention.kernels.pooled_attention.reference import (
    pooled_attention_backward_reference,
    pooled_attention_reference,
)
from gem_attention.rooms import has_room, open_room
from gem_jagged.batch import Layout
from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.impl import Impl

_NAME = "pooled_attention"
# From a tile of seeds on, Hopper's kernels of jagged batches are faster forward too.
_MANY_SEEDS = 128
_log = logging.getLogger(__name__)
_announced: set[tuple[Any, ...]] = set()


def _per_head(activations: str) -> tuple[str, ...] | None:
    return None if activations == "softmax" else tuple(activations.split(","))


# Lengths are a CPU tensor whatever the device of the others, for the reference; the kernels follow
# the offsets alone, and where only these are known the lengths are None.
# activations: "softmax", or one name for all heads or one a head, joined by commas.
# k_tokens: keys of all sequences.
@torch.library.custom_op("gem_attention::pooled_attention", mutates_args=())
def _forward(
    seeds_PHK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    k_offsets_O: Tensor,
    k_lengths_B: Tensor | None,
    activations: str,
    scale: float,
    deterministic: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    k_tokens: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    if choose_implementation(_NAME, impl, seeds_PHK, v_SGV) == "triton":
        operands, scale, _ = _operands(seeds_PHK, k_SGK, v_SGV, activations, scale)
        kernels = _forward_kernels(*operands, activations, k_offsets_O.shape[0] - 1)
        return kernels.launch_forward(
            *operands, k_offsets_O.contiguous(), activations=activations, scale=scale
        )
    (k_lengths_B,) = demand_lengths(_NAME, k_lengths_B)
    out_BPHV = pooled_attention_reference(
        seeds_PHK, k_SGK, v_SGV, k_lengths_B, _per_head(activations), scale
    )
    return out_BPHV, _no_lse(seeds_PHK)


def _no_lse(seeds_PHK: Tensor) -> Tensor:
    return seeds_PHK.new_empty((0, *seeds_PHK.shape[:2]), dtype=torch.float32)


@_forward.register_fake
def _(
    seeds_PHK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    k_offsets_O: Tensor,
    k_lengths_B: Tensor | None,
    activations: str,
    scale: float,
    deterministic: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    k_tokens: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    (seeds, heads, _), batch = seeds_PHK.shape, k_offsets_O.shape[0] - 1
    out_BPHV = seeds_PHK.new_empty((batch, seeds, heads, v_SGV.shape[2]))
    # Kept for the backward of the kernels; the reference computes it anew.
    has_lse = activations == "softmax"
    if has_lse and choose_implementation(_NAME, impl, seeds_PHK, v_SGV) == "triton":
        return out_BPHV, seeds_PHK.new_empty((batch, seeds, heads), dtype=torch.float32)
    return out_BPHV, _no_lse(seeds_PHK)


def _gradients(
    grad_out_BPHV: Tensor,
    seeds_PHK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_BPHV: Tensor,
    lse_BPH: Tensor,
    k_offsets_O: Tensor,
    k_lengths_B: Tensor | None,
    activations: str,
    scale: float,
    deterministic: bool,  # noqa: FBT001 - as in the operators below
    k_tokens: int,
    impl: str,
    grad_v_SGV: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate; where ``grad_v_SGV`` is given, the kernels may write the gradient there."""
    if choose_implementation(_NAME, impl, seeds_PHK, v_SGV) == "triton":
        operands, scale, sign = _operands(seeds_PHK, k_SGK, v_SGV, activations, scale)
        kernels = _backward_kernels(*operands, activations)
        given: dict[str, Any] = {
            "deterministic": deterministic or torch.are_deterministic_algorithms_enabled()
        }
        if hasattr(kernels, "writes_into"):
            given["grad_v_SGV"] = grad_v_SGV
        grad_seeds_PHK, grad_k_SGK, made_SGV = kernels.launch_backward(
            grad_out_BPHV.contiguous(),
            *operands,
            out_BPHV.contiguous(),
            lse_BPH.contiguous(),
            k_offsets_O.contiguous(),
            activations=activations,
            scale=scale,
            **given,
        )
        return -grad_seeds_PHK if sign < 0 else grad_seeds_PHK, grad_k_SGK, made_SGV
    (k_lengths_B,) = demand_lengths(_NAME, k_lengths_B)
    return pooled_attention_backward_reference(
        grad_out_BPHV,
        seeds_PHK,
        k_SGK,
        v_SGV,
        out_BPHV,
        k_lengths_B,
        _per_head(activations),
        scale,
    )


@torch.library.custom_op("gem_attention::pooled_attention_backward", mutates_args=())
def _backward(
    grad_out_BPHV: Tensor,
    seeds_PHK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_BPHV: Tensor,
    lse_BPH: Tensor,
    k_offsets_O: Tensor,
    k_lengths_B: Tensor | None,
    activations: str,
    scale: float,
    deterministic: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    k_tokens: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(
        *(grad_out_BPHV, seeds_PHK, k_SGK, v_SGV, out_BPHV, lse_BPH, k_offsets_O, k_lengths_B),
        *(activations, scale, deterministic, k_tokens, impl),
    )


@torch.library.custom_op(
    "gem_attention::pooled_attention_backward_into", mutates_args=("grad_v_SGV",)
)
def _backward_into(
    grad_v_SGV: Tensor,
    grad_out_BPHV: Tensor,
    seeds_PHK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_BPHV: Tensor,
    lse_BPH: Tensor,
    k_offsets_O: Tensor,
    k_lengths_B: Tensor | None,
    activations: str,
    scale: float,
    deterministic: bool,  # noqa: FBT001
    k_tokens: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    grad_seeds_PHK, grad_k_SGK, made_SGV = _gradients(
        *(grad_out_BPHV, seeds_PHK, k_SGK, v_SGV, out_BPHV, lse_BPH, k_offsets_O, k_lengths_B),
        *(activations, scale, deterministic, k_tokens, impl),
        grad_v_SGV=grad_v_SGV,
    )
    if made_SGV is not grad_v_SGV:
        grad_v_SGV.copy_(made_SGV)
    return grad_seeds_PHK, grad_k_SGK


@_backward_into.register_fake
def _(
    grad_v_SGV: Tensor, grad_out_BPHV: Tensor, seeds_PHK: Tensor, k_SGK: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return seeds_PHK.new_empty(seeds_PHK.shape), k_SGK.new_empty(k_SGK.shape)


@_backward.register_fake
def _(
    grad_out_BPHV: Tensor, seeds_PHK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        seeds_PHK.new_empty(seeds_PHK.shape),
        k_SGK.new_empty(k_SGK.shape),
        v_SGV.new_empty(v_SGV.shape),
    )


def _operands(
    seeds_PHK: Tensor, k_SGK: Tensor, v_SGV: Tensor, activations: str, scale: float
) -> tuple[tuple[Tensor, Tensor, Tensor], float, int]:
    """Return what the kernels can read, the scale, and the sign that moved into the seeds.

    Softmax takes the maximum before it scales.
    """
    sign = -1 if scale < 0 and activations == "softmax" else 1
    seeds_PHK = -seeds_PHK if sign < 0 else seeds_PHK
    operands = (readable_rows(seeds_PHK), readable_rows(k_SGK), readable_rows(v_SGV))
    return operands, sign * scale, sign


def _forward_kernels(
    seeds_PHK: Tensor, k_SGK: Tensor, v_SGV: Tensor, activations: str, batch: int
) -> ModuleType:
    from gem_attention import repeated
    from gem_attention.kernels.pooled_attention import kernel

    taken = kernel.takes_forward(seeds_PHK, k_SGK, activations)
    if taken and k_SGK.is_cuda and seeds_PHK.shape[0] >= _MANY_SEEDS:
        from gem_attention.hopper.launching import takes_repeated

        taken = not takes_repeated(seeds_PHK, k_SGK, v_SGV, batch=batch)
    return _announce("forward", kernel if taken else repeated, seeds_PHK, v_SGV)


def _backward_kernels(
    seeds_PHK: Tensor, k_SGK: Tensor, v_SGV: Tensor, activations: str
) -> ModuleType:
    from gem_attention import repeated
    from gem_attention.kernels.pooled_attention import kernel

    taken = kernel.takes_backward(seeds_PHK, k_SGK, v_SGV, activations)
    return _announce("backward", kernel if taken else repeated, seeds_PHK, v_SGV)


def _announce(direction: str, chosen: ModuleType, seeds_PHK: Tensor, v_SGV: Tensor) -> ModuleType:
    """Say once which launchers run."""
    seeds, _, width = seeds_PHK.shape
    what = (seeds_PHK.device.type, seeds_PHK.dtype, seeds, width, v_SGV.shape[2])
    key = (direction, chosen.__name__, *what)
    if key not in _announced:
        _announced.add(key)
        name = chosen.__name__.rpartition(".")[2]
        _log.info("%s %s: %s runs on %s for %s, P=%d, K=%d, V=%d", _NAME, direction, name, *what)
    return chosen


def _writes_into(
    seeds_PHK: Tensor, k_SGK: Tensor, v_SGV: Tensor, k_offsets_O: Tensor, *rest: Any
) -> bool:
    """Tell whether a room serves: copying into it here is slower than where it is found."""
    activations, _, deterministic, _, impl = rest
    if choose_implementation(_NAME, impl, seeds_PHK, v_SGV) != "triton":
        return True
    from gem_attention import repeated
    from gem_attention.kernels.pooled_attention import kernel

    if kernel.takes_backward(seeds_PHK, k_SGK, v_SGV, activations):
        return False
    return repeated.writes_into(
        *(seeds_PHK, k_SGK, v_SGV, k_offsets_O.shape[0] - 1, activations),
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:5])
    ctx.rest = inputs[5:]


def _differentiate(
    ctx: Any, grad_out_BPHV: Tensor | None, _grad_lse_BPH: Tensor | None
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if grad_out_BPHV is None:
        grad_out_BPHV = torch.zeros_like(saved[3])
    given = (grad_out_BPHV, *saved, *ctx.rest)
    wanted = has_room(saved[2]) and _writes_into(*saved[:3], saved[5], *ctx.rest)
    grad_v_SGV = open_room(saved[2]) if wanted else None
    if grad_v_SGV is None:
        gradients = torch.ops.gem_attention.pooled_attention_backward(*given)
    else:
        into = torch.ops.gem_attention.pooled_attention_backward_into
        gradients = (*into(grad_v_SGV, *given), grad_v_SGV)
    return (*gradients, *([None] * 7))


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(refuse_second_derivative(_NAME))


def _sizes(
    seeds_PHK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *, batch: int, k_tokens: int
) -> dict[str, int]:
    return {
        "batch": batch,
        "seeds": seeds_PHK.shape[0],
        "k_tokens": k_tokens,
        "heads": seeds_PHK.shape[1],
        "kv_heads": k_SGK.shape[1],
        "head_width": seeds_PHK.shape[2],
        "value_width": v_SGV.shape[2],
        "element_bytes": seeds_PHK.element_size(),
    }


def _forward_cost(seeds_PHK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *rest: Any) -> Cost:
    batch = rest[0].shape[0] - 1  # of the offsets: the lengths may be None
    sizes = _sizes(seeds_PHK, k_SGK, v_SGV, batch=batch, k_tokens=rest[-2])
    return pooled_attention_cost(**sizes)


def _backward_cost(
    grad_out_BPHV: Tensor, seeds_PHK: Tensor, k_SGK: Tensor, v_SGV: Tensor, *rest: Any
) -> Cost:
    batch = grad_out_BPHV.shape[0]
    sizes = _sizes(seeds_PHK, k_SGK, v_SGV, batch=batch, k_tokens=rest[-2])
    return pooled_attention_backward_cost(**sizes)


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)
register_flops(_backward_into, lambda _grad_v, *rest: _backward_cost(*rest))


def pooled_attention(
    seeds_PHK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    k_layout: Layout,
    *,
    activation: Literal["softmax"] | GdpaActivation | tuple[GdpaActivation, ...] = "softmax",
    scale: float | None = None,
    deterministic: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """Pool each sequence with the same queries, the seeds.

        out[b, p] = Σ_s w_s v[s],   w = softmax_s(scale · seeds[p]·k[s]) or f of it,   s in b

    Args:
        seeds_PHK: queries of every sequence, float32, float64, bfloat16 or float16, any strides.
        k_SGK: keys, same dtype; query head h reads key head h // (H / G), and G divides H.
        v_SGV: values, same dtype.
        k_layout: where each sequence's keys begin. Rows behind its last sequence are not read.
        activation: softmax, or an activation of ``generalized_attention``, or a tuple of these
            with one name for each query head.
        scale: factor of the scores; None for 1/sqrt(K).
        deterministic: take a backward whose bits are the same in every run, also where a faster
            one exists; ``torch.use_deterministic_algorithms`` asks for the same.
        impl: who computes it; see ``gem_opkit.impl``. The kernels take float32, bfloat16 and
            float16 and widths up to 256; ``auto`` gives the rest to the reference.

    Returns:
        out_BPHV in the dtype of the seeds; 0 for an empty sequence. The gradient of the seeds is
        summed over the batch.

    Raises:
        ShapeError: shapes, heads, a layout or a tuple that do not fit together.
        DtypeError, DeviceError: operands of different or unknown dtypes, or devices; a scale or a
            layout of another type.
        ConfigError: a scale that is not finite.
        UnsupportedError: an unknown activation, an ``impl`` that cannot run here, and what
            ``jagged_flash_attention`` refuses of differentiation.

    Numerics: scores, weights and sums in float32 (float64 for float64). The kernels round weights
        and their gradients to the dtype of the seeds before the second product, float32 not at all
        (no TF32); the reference rounds once, at the end. The tanh of silu, gelu and fast_gelu is as
        in ``generalized_attention``. Forward bits are the same in every run, those of the backward
        up to 64 rows (seeds times query heads that share a key head), beyond with
        ``deterministic``; of the reference on a CPU always, with the same number of threads. What
        is not finite in a key or value spoils its own sequence and the gradient of the seeds.
    Cost: 2·H·P·S·(K + V) FLOPs forward and 2·H·P·S·(3K + 2V) backward; keys and values are read
        once forward and once backward. More than 64 rows are repeated for every sequence backward,
        but for what the Hopper kernels take.
    Source: Lee et al. 2019 (arXiv:1810.00825); Meta's GEM training article for shared seeds.
    """
    sizes = check_shapes(_NAME, seeds_PHK=seeds_PHK, k_SGK=k_SGK, v_SGV=v_SGV)
    check_heads(_NAME, sizes)
    check_dtypes(_NAME, seeds_PHK=seeds_PHK, k_SGK=k_SGK, v_SGV=v_SGV)
    check_autograd(_NAME, seeds_PHK=seeds_PHK, k_SGK=k_SGK, v_SGV=v_SGV)
    check_layout(_NAME, k_SGK, k_layout, name="k_SGK", layout_name="k_layout")
    if activation == "softmax":
        activations = "softmax"
    else:
        activations = check_activation(_NAME, activation, seeds_PHK.shape[1])
    return pooled_attention_by_offsets(
        seeds_PHK,
        k_SGK,
        v_SGV,
        k_layout.offsets_O,
        k_layout.lengths,
        activations=activations,
        scale=check_scale(_NAME, scale, seeds_PHK.shape[2]),
        deterministic=deterministic,
        k_tokens=k_layout.total_tokens,
        impl=choose_implementation(_NAME, impl, seeds_PHK, v_SGV),
    )


def pooled_attention_by_offsets(
    seeds_PHK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    k_offsets_O: Tensor,
    k_lengths_B: Tensor | None,
    *,
    activations: str,
    scale: float,
    deterministic: bool,
    k_tokens: int,
    impl: str,
) -> Tensor:
    """Call the operator with operands that were checked; ``flash_compat`` has no host lengths.

    Args:
        seeds_PHK: as in ``pooled_attention``.
        k_SGK: as there.
        v_SGV: as there.
        k_offsets_O: first key of each sequence.
        k_lengths_B: keys of each sequence in host memory; None where only the offsets are known.
        activations: ``"softmax"``, or what ``check_activation`` returned.
        scale: factor of the scores, a finite number.
        deterministic: as there.
        k_tokens: keys of all sequences, for the FLOP count; 0 where they are not known.
        impl: what ``choose_implementation`` returned.

    Returns:
        out_BPHV.
    """
    out_BPHV, _ = torch.ops.gem_attention.pooled_attention(
        seeds_PHK,
        k_SGK,
        v_SGV,
        k_offsets_O,
        k_lengths_B,
        activations,
        scale,
        deterministic,
        k_tokens,
        impl,
    )
    return out_BPHV
