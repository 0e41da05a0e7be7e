"""The operator ``rotary_heads``: schema, kernels, fakes, autograd, FLOP formulas, function."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_attention.contract import Rotary
from gem_attention.kernels.rotary_heads.cost import rotary_heads_backward_cost, rotary_heads_cost
from gem_attention.kernels.rotary_heads.reference import (
    rotary_heads_backward_reference,
    rotary_heads_reference,
)
from gem_attention.rooms import Room
from gem_attention.rotary import check_gaps, turn_rates
from gem_jagged.batch import Layout
from gem_jagged.offsets import positions
from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.errors import ConfigError, DtypeError, ShapeError, UnsupportedError, refusal
from gem_opkit.impl import Impl, resolve_impl

_NAME = "rotary_heads"
_HAS_TRITON = True


@torch.library.custom_op("gem_attention::rotary_heads", mutates_args=())
def _forward(
    qkv: Tensor,
    position_T: Tensor | None,
    gap_T: Tensor | None,
    rates: Tensor,
    heads: int,
    key_heads: int,
    normed: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    copies_values: bool,  # noqa: FBT001
    time_scale_s: float,
    eps: float,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    given: dict[str, Any] = {"normed": normed, "copies_values": copies_values}
    given |= {"time_scale_s": time_scale_s, "eps": eps}
    args = (qkv, position_T, gap_T, rates, heads, key_heads)
    if resolve_impl(impl, qkv.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_attention.kernels.rotary_heads.kernel import launch_forward

        return launch_forward(*args, **given)
    return rotary_heads_reference(*args, **given)


@_forward.register_fake
def _(
    qkv: Tensor,
    position_T: Tensor | None,
    gap_T: Tensor | None,
    rates: Tensor,
    heads: int,
    key_heads: int,
    normed: bool,  # noqa: FBT001
    copies_values: bool,  # noqa: FBT001
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, width = qkv.shape[0], qkv.shape[2]
    return (
        qkv.new_empty(tokens, heads, width),
        qkv.new_empty(tokens, key_heads, width),
        qkv.new_empty(tokens if copies_values else 0, key_heads, width),
    )


@torch.library.custom_op("gem_attention::rotary_heads_backward", mutates_args=())
def _backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv: Tensor,
    position_T: Tensor | None,
    gap_T: Tensor | None,
    rates: Tensor,
    normed: bool,  # noqa: FBT001
    time_scale_s: float,
    eps: float,
    impl: str,
) -> Tensor:
    given = {"normed": normed, "time_scale_s": time_scale_s, "eps": eps}
    args = (grad_q, grad_k, grad_v, qkv, position_T, gap_T, rates)
    if resolve_impl(impl, qkv.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_attention.kernels.rotary_heads.kernel import launch_backward

        return launch_backward(*args, **given)
    return rotary_heads_backward_reference(*args, **given)


@_backward.register_fake
def _(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, qkv: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


@torch.library.custom_op("gem_attention::rotary_heads_backward_beside", mutates_args=("grad",))
def _backward_beside(
    grad: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    qkv: Tensor,
    position_T: Tensor | None,
    gap_T: Tensor | None,
    rates: Tensor,
    normed: bool,  # noqa: FBT001
    time_scale_s: float,
    eps: float,
    impl: str,
) -> None:
    """Write the gradient of queries and keys beside that of the values, which ``grad`` holds."""
    given = {"normed": normed, "time_scale_s": time_scale_s, "eps": eps}
    rest = (qkv, position_T, gap_T, rates)
    values = grad_q.shape[1] + grad_k.shape[1]
    if resolve_impl(impl, qkv.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_attention.kernels.rotary_heads.kernel import launch_backward

        launch_backward(grad_q, grad_k, grad[:, values:], *rest, **given, beside=grad)
        return
    made = rotary_heads_backward_reference(grad_q, grad_k, grad[:, values:], *rest, **given)
    grad[:, :values] = made[:, :values]


@_backward_beside.register_fake
def _(grad: Tensor, *_: Any) -> None:
    return None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, position_T, gap_T, rates, _, _, normed, ctx.copies_values, *rest = inputs
    ctx.given = (normed, *rest)
    ctx.save_for_backward(qkv, position_T, gap_T, rates)


def _differentiate(
    ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
) -> tuple[Tensor | None, ...]:
    if not ctx.copies_values:
        grad_v = torch.zeros_like(grad_k)
    grad = torch.ops.gem_attention.rotary_heads_backward(
        grad_q, grad_k, grad_v, *ctx.saved_tensors, *ctx.given
    )
    return grad, *[None] * 10


_forward.register_autograd(_differentiate, setup_context=_save)


class _HeadsBesideValues(torch.autograd.Function):
    """Queries and keys of the operator, and values where they lie; one gradient for all.

    An operator may not return a view of what it is given, and a slice beside it would have a
    gradient of its own, as large as the projection. The gradient of the values is written where it
    belongs by those operators that know of rooms (``gem_attention.rooms``), or copied there.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, room: Room, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        position_T, gap_T, rates, heads, key_heads, normed, *rest = given
        q, k, _ = torch.ops.gem_attention.rotary_heads(
            *(qkv, position_T, gap_T, rates, heads, key_heads, normed),
            False,  # noqa: FBT003 - values are not copied
            *rest,
        )
        ctx.save_for_backward(qkv, position_T, gap_T, rates)
        ctx.given = (normed, *rest)
        ctx.room = room
        return q, k, qkv[:, heads + key_heads :]

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator's own type
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        given = (*ctx.saved_tensors, *ctx.given)
        grad = ctx.room.found(grads[2])
        if grad is None:
            grad = torch.ops.gem_attention.rotary_heads_backward(*grads, *given)
        else:
            torch.ops.gem_attention.rotary_heads_backward_beside(grad, *grads[:2], *given)
        return grad, *[None] * 10


def _forward_cost(
    qkv: Tensor,
    position_T: Any,
    gap_T: Any,
    rates: Any,
    heads: int,
    key_heads: int,
    normed: bool,  # noqa: FBT001
    copies_values: bool,  # noqa: FBT001
    *_: Any,
) -> Cost:
    return rotary_heads_cost(
        total_tokens=qkv.shape[0],
        heads=heads,
        key_heads=key_heads,
        width=qkv.shape[2],
        element_bytes=qkv.element_size(),
        copies_values=copies_values,
    )


def _backward_cost(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv: Tensor,
    position_T: Any,
    gap_T: Any,
    rates: Any,
    normed: bool,  # noqa: FBT001
    *_: Any,
) -> Cost:
    return rotary_heads_backward_cost(
        total_tokens=qkv.shape[0],
        heads=grad_q.shape[1],
        key_heads=grad_k.shape[1],
        width=qkv.shape[2],
        element_bytes=qkv.element_size(),
        normed=normed,
    )


def _beside_cost(grad: Tensor, grad_q: Tensor, grad_k: Tensor, *rest: Any) -> Cost:
    return _backward_cost(grad_q, grad_k, grad, *rest)


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)
register_flops(_backward_beside, _beside_cost)


def rotary_heads(
    qkv: Tensor,
    layout: Layout,
    *,
    heads: int,
    key_heads: int,
    normed: bool = True,
    copies_values: bool = True,
    rotary: Rotary = "position",
    gap_seconds_T: Tensor | None = None,
    rote_time_scale_s: float = 60.0,
    eps: float = 1e-6,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection into heads; normalise and turn queries and keys, in one pass.

    The same as ``rms_normalize`` and ``apply_rotary`` on the slices, without anything of their size
    in between: angles are made inside from position and time gap.

    Args:
        qkv: (T, heads + 2 · key_heads, K): queries, keys and values of each token, in this order;
            fp32, fp64, bf16 or fp16, K even.
        layout: where each sequence begins.
        heads: query heads H; 0 for keys and values alone.
        key_heads: key and value heads G.
        normed: divide each query and key by its root mean square.
        copies_values: write the values anew; False returns them as a view of ``qkv``, which moves
            two passes less. Inside ``torch.compile`` they are copied.
        rotary: ``"none"``, ``"position"`` or ``"rote"``, as in the spec of attention.
        gap_seconds_T: seconds from each token to the request, at least 0; for ``"rote"`` alone.
        rote_time_scale_s: gaps well below it hardly turn, above 0.
        eps: added to the mean square, above 0.
        impl: who computes it; see ``gem_opkit.impl``. The kernel takes no fp64: ``auto`` gives it
            to the reference.

    Returns:
        q_THK, k_TGK and v_TGK in the dtype of the projection, each contiguous but for values that
        are not copied. The gradient of the projection is one tensor either way.

    Raises:
        ShapeError: another number of heads or tokens, or an odd width of a head.
        DtypeError: a projection that is not floating point.
        ConfigError: ``"rote"`` without gaps, an unknown rotation, an eps or a time scale that is
            not above 0.
        DeviceError: gaps on another device.
        UnsupportedError: gaps that require a gradient; fp64 with ``impl="triton"``; an ``impl``
            that cannot run here.

    Numerics: angles, norm and rotation in fp32 (fp64 for fp64), rounded once; the backward forms
        the norm again from the projection.
    Cost: reads all heads and writes them; backward reads their gradients, and queries and keys, and
        writes one gradient.
    Source: Su et al. 2021 (arXiv:2104.09864); the Kunlun article for the time gaps.
    """
    check_shapes(_NAME, gap_seconds_T=gap_seconds_T)
    _check(qkv, layout, heads, key_heads, eps)
    if rotary not in ("none", "position", "rote"):
        _refuse("rotary", "be none, position or rote", rotary)
    if rotary == "rote" and gap_seconds_T is None:
        _refuse("gap_seconds_T", 'be given with rotary="rote"', None)
    if gap_seconds_T is not None:
        if len(gap_seconds_T) != len(qkv):
            raise ShapeError(
                refusal(
                    _NAME,
                    "gap_seconds_T",
                    must=f"have one gap for each of {len(qkv)} tokens",
                    got=len(gap_seconds_T),
                    fix="pass the gaps of these tokens",
                )
            )
        check_gaps(_NAME, gap_seconds_T, rote_time_scale_s, like="qkv", device=qkv.device)
    check_autograd(_NAME, qkv=qkv)
    # Asked before anything is resolved, because the log says what is resolved.
    is_double = qkv.dtype == torch.float64
    if is_double and impl == "triton":
        raise UnsupportedError(
            refusal(
                _NAME,
                "impl",
                must='be "reference" or "auto" for fp64',
                got="a Triton kernel",
                fix="use fp32, or the reference",
            )
        )
    chosen = resolve_impl(impl, qkv.device, _NAME, has_triton=_HAS_TRITON and not is_double)
    wide = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    rates = turn_rates(_NAME, qkv.shape[2], device=qkv.device, dtype=wide)
    position_T = None if rotary == "none" else positions(layout.offsets_O, qkv.shape[0])
    gap_T = (
        gap_seconds_T.detach().contiguous()
        if rotary == "rote" and gap_seconds_T is not None
        else None
    )
    given = (qkv, position_T, gap_T, rates, heads, key_heads, normed)
    rest = (rote_time_scale_s, eps, chosen)
    if not copies_values and not torch.compiler.is_compiling():
        room = Room((qkv.shape[0], qkv.shape[1], qkv.shape[2]), heads + key_heads)
        q, k, v = _HeadsBesideValues.apply(qkv, room, *given[1:], *rest)
        room.give(v)
        return q, k, v
    return torch.ops.gem_attention.rotary_heads(
        *given,
        True,  # noqa: FBT003 - values are copied
        *rest,
    )


def _check(qkv: Tensor, layout: Layout, heads: int, key_heads: int, eps: float) -> None:
    tokens, each = layout.total_tokens, heads + 2 * key_heads
    if heads < 0 or key_heads < 1 or qkv.ndim != 3 or qkv.shape[:2] != (tokens, each):
        raise ShapeError(
            refusal(
                _NAME,
                "qkv",
                must=f"have {tokens} tokens of {heads} + 2 · {key_heads} heads",
                got=tuple(qkv.shape),
                fix="give queries, keys and values of each token side by side",
            )
        )
    if not qkv.dtype.is_floating_point:
        raise DtypeError(
            refusal(_NAME, "qkv", must="be floating point", got=qkv.dtype, fix="convert it")
        )
    if not eps > 0:
        _refuse("eps", "be above 0", eps)


def _refuse(name: str, must: str, got: object) -> None:
    raise ConfigError(refusal(_NAME, name, must=must, got=got, fix="correct the argument"))
