"""The operator ``normed_attention``: schema, fakes, autograd, FLOP formulas, function."""

from typing import Any

import torch
from torch import Tensor

# It registers the operator that stands between the norms of several heads.
import gem_attention.kernels.generalized_attention.op  # noqa: F401
from gem_attention.checks import (
    check_activation,
    check_batches,
    check_can_count,
    check_dtypes,
    check_heads,
    check_layout,
    check_scale,
    refuse_second_derivative,
)
from gem_attention.choosing import choose_implementation, demand_lengths, readable_rows
from gem_attention.contract import GdpaActivation
from gem_attention.kernels.normed_attention.cost import (
    normed_attention_backward_cost,
    normed_attention_cost,
)
from gem_attention.kernels.normed_attention.reference import (
    normed_attention_backward_reference,
    normed_attention_reference,
)
from gem_attention.patterns import visible_pairs as count_visible_pairs
from gem_jagged.batch import Layout
from gem_opkit.cost import Cost, register_flops
from gem_opkit.derivatives import check_autograd
from gem_opkit.dims import check_shapes
from gem_opkit.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    ShapeError,
    UnsupportedError,
    refusal,
)
from gem_opkit.impl import Impl, resolve_impl
from gem_precision.ops import layer_norm, rms_norm

_NAME = "normed_attention"
# What the portable kernel of one head holds: keys of a sequence, and width of a row.
_MOST_KEYS, _WIDEST = 128, 128
# Width of a head, and of all heads of a row.
_WIDEST_HEAD, _WIDEST_ROW = 256, 16_384


def normed_attention_takes(x_TD: Tensor, k_SGK: Tensor) -> bool:
    """Say whether the kernels take a call, given a device that runs them.

    Args:
        x_TD: tokens.
        k_SGK: keys.

    Returns:
        True for tokens and keys of one dtype of 16 bits (in Triton's interpreter of float32 or
        float16, because it gets bfloat16 wrong) with heads of at most 256 columns and rows of at
        most 16,384.
    """
    dtypes = (torch.bfloat16, torch.float16) if x_TD.is_cuda else (torch.float32, torch.float16)
    return (
        x_TD.dtype == k_SGK.dtype
        and k_SGK.dtype in dtypes
        and k_SGK.shape[2] <= _WIDEST_HEAD
        and x_TD.shape[1] <= _WIDEST_ROW
    )


def _runs_on_hopper(x_TD: Tensor, k_SGK: Tensor, most_keys: int, activations: str) -> bool:
    if x_TD.device.type != "cuda":
        return False
    from gem_attention.kernels.normed_attention import kernel_sm90

    return kernel_sm90.supports(x_TD, k_SGK, most_keys=most_keys, activations=activations)


def _kept(x_TD: Tensor, k_SGK: Tensor, rest: tuple[Any, ...]) -> tuple[int, int]:
    """Return how many rows are kept of LayerNorm(x), and of what the second norm reads.

    ``rest`` are further arguments of the operator; its last eight are most_keys, activations,
    scale, eps, out_eps, keep, visible_pairs and impl.
    """
    most_keys, activations, *_, keep, _, impl = rest[-8:]
    if not keep or impl != "triton":
        return 0, 0
    tokens = x_TD.shape[0]
    one = x_TD.shape[1] == k_SGK.shape[2]
    if one and _runs_on_hopper(x_TD, k_SGK, most_keys, activations):
        return 0, tokens
    return tokens, tokens


def _choose(impl: str, x_TD: Tensor, k_SGK: Tensor) -> str:
    """Resolve ``impl``; what the kernels do not take is refused, or goes to the reference."""
    if normed_attention_takes(x_TD, k_SGK):
        return choose_implementation(_NAME, impl, k_SGK, k_SGK)
    if impl == "triton":
        raise UnsupportedError(
            refusal(
                _NAME,
                'impl="triton"',
                must=f"have heads of at most {_WIDEST_HEAD} columns in rows of at most "
                f"{_WIDEST_ROW}, and tokens and keys of one dtype: bfloat16 or float16 on a GPU, "
                "float32 or float16 in the interpreter",
                got=f"{x_TD.shape[1]} columns in heads of {k_SGK.shape[2]}, {x_TD.dtype} and "
                f"{k_SGK.dtype}",
                fix='use impl="reference", or layer_norm, generalized_attention and rms_norm',
            )
        )
    return resolve_impl(impl, x_TD.device, _NAME, has_triton=False)


def _readable(x_TD: Tensor) -> Tensor:
    return readable_rows(x_TD.unsqueeze(1)).squeeze(1)


def _normalised(x_TD: Tensor, eps: float) -> Tensor:
    return layer_norm(x_TD, eps=eps, impl="triton")


def _by_head(x_TD: Tensor, k_SGK: Tensor) -> Tensor:
    width = k_SGK.shape[2]
    return x_TD.view(x_TD.shape[0], x_TD.shape[1] // width, width)


# Lengths are CPU tensors whatever the device of the others, for the reference; the kernels follow
# the offsets, and the most keys of a sequence, which the host knows. With ``keep`` they return
# besides the output what their backward wants: LayerNorm(x), and what was read for it; on Hopper in
# place of the latter the sum of both, and of one head this sum alone.
@torch.library.custom_op("gem_attention::normed_attention", mutates_args=())
def _forward(
    x_TD: Tensor,
    k_SGK: Tensor,
    v_SGK: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    q_lengths_B: Tensor | None,
    k_lengths_B: Tensor | None,
    most_keys: int,
    activations: str,
    scale: float,
    eps: float,
    out_eps: float,
    keep: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    visible_pairs: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    nothing = x_TD.new_empty((0, x_TD.shape[1]))
    if _choose(impl, x_TD, k_SGK) == "triton":
        from gem_attention.kernels.normed_attention import kernel

        x_TD, k_SGK, v_SGK = _readable(x_TD), readable_rows(k_SGK), readable_rows(v_SGK)
        places = (q_offsets_O.contiguous(), k_offsets_O.contiguous())
        numbers = (most_keys, activations, scale, (eps, out_eps))
        call = kernel.Call(x_TD, k_SGK, v_SGK, *places, *numbers)
        one = x_TD.shape[1] == k_SGK.shape[2]
        if _runs_on_hopper(x_TD, k_SGK, most_keys, activations):
            from gem_attention.kernels.normed_attention import kernel_sm90

            if one:
                out_TD, a_TD = kernel_sm90.launch_forward(call, norms=True, keep=keep)
                return out_TD, nothing, a_TD
            q_TD = _normalised(x_TD, eps)
            call = call._replace(x_TD=q_TD)
            _, a_TD = kernel_sm90.launch_forward(call, norms=False, keep=True)
            out_TD = rms_norm(a_TD, after=x_TD, eps=out_eps, impl="triton")
            return (out_TD, q_TD, a_TD) if keep else (out_TD, nothing, nothing.clone())
        if one and not keep and k_SGK.shape[2] <= _WIDEST and most_keys <= _MOST_KEYS:
            return kernel.launch_forward(call), nothing, nothing.clone()
        q_TD = _normalised(x_TD, eps)
        read_THK = torch.ops.gem_attention.generalized_attention(
            _by_head(q_TD, k_SGK), k_SGK, v_SGK, *places, q_lengths_B, k_lengths_B,
            activations=activations, scale=scale, deterministic=False, visible_pairs=visible_pairs,
            impl=impl, left_tokens=None, right_tokens=None,
        )  # fmt: skip
        read_TD = read_THK.flatten(1)
        out_TD = kernel.launch_out(x_TD, read_TD, eps=(eps, out_eps))
        return (out_TD, q_TD, read_TD) if keep else (out_TD, nothing, nothing.clone())
    q_lengths_B, k_lengths_B = demand_lengths(_NAME, q_lengths_B, k_lengths_B)
    names = tuple(activations.split(","))
    out_TD = normed_attention_reference(
        x_TD, k_SGK, v_SGK, (q_lengths_B, k_lengths_B), names, scale, (eps, out_eps)
    )
    return out_TD, nothing, nothing.clone()


@_forward.register_fake
def _(x_TD: Tensor, k_SGK: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = _kept(x_TD, k_SGK, rest)
    q_TD, read_TD = (x_TD.new_empty((each, x_TD.shape[1])) for each in rows)
    return x_TD.new_empty(x_TD.shape), q_TD, read_TD


@torch.library.custom_op("gem_attention::normed_attention_backward", mutates_args=())
def _backward(
    grad_out_TD: Tensor,
    x_TD: Tensor,
    k_SGK: Tensor,
    v_SGK: Tensor,
    q_TD: Tensor,
    read_TD: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    q_lengths_B: Tensor | None,
    k_lengths_B: Tensor | None,
    most_keys: int,
    activations: str,
    scale: float,
    eps: float,
    out_eps: float,
    visible_pairs: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if _choose(impl, x_TD, k_SGK) == "triton":
        from gem_attention.kernels.normed_attention import kernel

        grad_out_TD, x_TD = _readable(grad_out_TD), _readable(x_TD)
        k_SGK, v_SGK = readable_rows(k_SGK), readable_rows(v_SGK)
        places = (q_offsets_O.contiguous(), k_offsets_O.contiguous())
        norm = {"swish": False, "impl": impl}
        if _runs_on_hopper(x_TD, k_SGK, most_keys, activations):
            from gem_attention.kernels.normed_attention import kernel_sm90

            numbers = (most_keys, activations, scale, (eps, out_eps))
            call = kernel.Call(x_TD, k_SGK, v_SGK, *places, *numbers)
            if x_TD.shape[1] == k_SGK.shape[2]:
                return kernel_sm90.launch_backward(grad_out_TD, read_TD, call, norms=True)
            grad_a_TD, _ = torch.ops.gem_precision.row_norm_backward(
                grad_out_TD, read_TD, None, None, centred=False, eps=out_eps, **norm
            )
            call = call._replace(x_TD=q_TD)
            grad_q_TD, grad_k_SGK, grad_v_SGK = kernel_sm90.launch_backward(
                grad_a_TD, read_TD, call, norms=False
            )
            grad_x_TD, _ = torch.ops.gem_precision.row_norm_backward(
                grad_q_TD, x_TD, None, None, centred=True, eps=eps, added=grad_out_TD, **norm
            )
            return grad_x_TD, grad_k_SGK, grad_v_SGK
        grad_a_TD, _ = torch.ops.gem_precision.row_norm_backward(
            grad_out_TD, read_TD, q_TD, None, centred=False, eps=out_eps, **norm
        )
        operands = (_by_head(grad_a_TD, k_SGK), _by_head(q_TD, k_SGK), k_SGK, v_SGK)
        grad_q_THK, *gradients = torch.ops.gem_attention.generalized_attention_backward(
            *operands, *places, q_lengths_B, k_lengths_B,
            activations=activations, scale=scale, deterministic=False, visible_pairs=visible_pairs,
            impl=impl, left_tokens=None, right_tokens=None,
        )  # fmt: skip
        grad_q_TD = grad_q_THK.flatten(1)
        grad_x_TD = kernel.launch_finish(grad_out_TD, grad_q_TD, grad_a_TD, x_TD, eps=eps)
        return grad_x_TD, *gradients
    q_lengths_B, k_lengths_B = demand_lengths(_NAME, q_lengths_B, k_lengths_B)
    names = tuple(activations.split(","))
    return normed_attention_backward_reference(
        grad_out_TD, x_TD, k_SGK, v_SGK, (q_lengths_B, k_lengths_B), names, scale, (eps, out_eps)
    )


@_backward.register_fake
def _(
    grad_out_TD: Tensor, x_TD: Tensor, k_SGK: Tensor, v_SGK: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x_TD.new_empty(x_TD.shape),
        k_SGK.new_empty(k_SGK.shape),
        v_SGK.new_empty(v_SGK.shape),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    # What is kept has no gradient of its own, and none is made for it.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:3], *output[1:], *inputs[3:7])
    *before, _, visible_pairs, impl = inputs[7:]
    ctx.rest = (*before, visible_pairs, impl)


def _differentiate(ctx: Any, grad_out_TD: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad_out_TD is None:
        return (None,) * 15
    gradients = torch.ops.gem_attention.normed_attention_backward(
        grad_out_TD, *ctx.saved_tensors, *ctx.rest
    )
    return (*gradients, *([None] * 12))


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(refuse_second_derivative(_NAME))


def _sizes(x_TD: Tensor, k_SGK: Tensor, *, visible_pairs: int) -> dict[str, Any]:
    return {
        "visible_pairs": visible_pairs,
        "tokens": x_TD.shape[0],
        "k_tokens": k_SGK.shape[0],
        "heads": x_TD.shape[1] // k_SGK.shape[2],
        "kv_heads": k_SGK.shape[1],
        "head_width": k_SGK.shape[2],
        "token_bytes": x_TD.element_size(),
        "key_bytes": k_SGK.element_size(),
    }


# torch's counter gives tensors to a formula as they are.
def _forward_cost(x_TD: Tensor, k_SGK: Tensor, *rest: Any) -> Cost:
    sizes = _sizes(x_TD, k_SGK, visible_pairs=rest[-2])
    keeps = sum(rows > 0 for rows in _kept(x_TD, k_SGK, rest))
    return normed_attention_cost(**sizes, keeps=keeps)


def _backward_cost(
    _grad_out: Tensor,
    x_TD: Tensor,
    k_SGK: Tensor,
    _v: Tensor,
    q_TD: Tensor,
    read_TD: Tensor,
    *rest: Any,
) -> Cost:
    sizes = _sizes(x_TD, k_SGK, visible_pairs=rest[-2])
    kept = sum(0 < x_TD.shape[0] == t.shape[0] for t in (q_TD, read_TD))
    return normed_attention_backward_cost(**sizes, kept=kept)


register_flops(_forward, _forward_cost)
register_flops(_backward, _backward_cost)


def normed_attention(
    x_TD: Tensor,
    k_SGK: Tensor,
    v_SGK: Tensor,
    layout: Layout,
    k_layout: Layout,
    *,
    activation: GdpaActivation | tuple[GdpaActivation, ...] = "gelu",
    scale: float | None = None,
    eps: float = 1e-6,
    out_eps: float = 1e-6,
    visible_pairs: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Normalise tokens, let them read keys without softmax, and normalise again, with residuals.

        q = LayerNorm(x)      a[t] = Σ_s f(scale · q[t]·k[s]) v[s] + q[t]      out = RmsNorm(a) + x

    Both norms run over the whole row, without gain; the sum runs by heads of width K over the keys
    of the same sequence.

    Args:
        x_TD: tokens, float32, float64, bfloat16 or float16, any strides; D a multiple of K.
        k_SGK: keys, any of these dtypes; query head h reads key head h // (H / G), and G divides
            H = D/K.
        v_SGK: values, dtype and width of the keys.
        layout: where each sequence's tokens begin. Rows behind its last one see no key.
        k_layout: where its keys begin.
        activation: as in ``generalized_attention``.
        scale: factor of the scores; None for 1/sqrt(K).
        eps: added to the variance of x, above 0.
        out_eps: added to the mean square of a, above 0.
        visible_pairs: pairs of token and key of one sequence, for the FLOP count; None counts them
            from host lengths. Inside ``torch.compile`` it must be given.
        impl: who computes it; see ``gem_opkit.impl``. The kernels take bfloat16 or float16, the
            same for all operands, with heads of at most 256 columns in rows of at most 16,384;
            ``auto`` gives the rest to the reference.

    Returns:
        out_TD in the dtype of x.

    Raises:
        ShapeError: shapes, heads or layouts that do not fit together.
        DtypeError, DeviceError: operands of unknown dtypes or different devices; keys and values of
            two dtypes; a scale or a layout of another type.
        ConfigError: a scale that is not finite, or an eps that is not above 0.
        UnsupportedError: an unknown activation, an ``impl`` that cannot run here, uncounted pairs
            in a graph, and what ``generalized_attention`` refuses of differentiation.

    Numerics: norms, scores, weights and sums in float32 (float64 where any operand is). The kernels
        round q, the weights and their gradients, a and its gradient to the dtype of the keys; where
        a call is several kernels, also what is read, and the gradient of q by attention. The
        reference rounds once, at the end. Activations as in ``generalized_attention``. Bits are the
        same in every run with at most 128 keys or torch's deterministic algorithms; of the
        reference on a CPU with the same number of threads.
    Cost: 4·H·pairs·K FLOPs forward and 10·H·pairs·K backward (12 by the reference). On Hopper with
        heads of 128, as many key heads, one activation and at most 128 keys a sequence, one head is
        one kernel each way: it reads x and writes the output and a, backward reads x, a and the
        gradient and writes one; of several heads q is kept besides, and there are seven passes
        over the tokens forward and ten backward. Else q and what is read are kept, with seven
        passes and twelve, where one operator after the other has eight and sixteen; a forward
        alone of one head of at most 128 columns and 128 keys is one kernel everywhere.
    Source: Meta's article on norm fusion (FlashNormAttention).
    """
    sizes = check_shapes(_NAME, x_TD=x_TD, k_SGK=k_SGK, v_SGK=v_SGK)
    if sizes["K"] == 0 or sizes["D"] == 0 or sizes["D"] % sizes["K"]:
        raise ShapeError(
            refusal(
                _NAME,
                "x_TD",
                must=f"have a width D that heads of {sizes['K']} fill",
                got=sizes["D"],
                fix="its rows are the queries of all heads, side by side",
            )
        )
    heads = sizes["D"] // sizes["K"]
    check_heads(_NAME, sizes | {"H": heads})
    check_dtypes(_NAME, k_SGK=k_SGK, v_SGK=v_SGK)
    check_dtypes(_NAME, x_TD=x_TD)
    if x_TD.device != k_SGK.device:
        raise DeviceError(
            refusal(_NAME, "k_SGK", must=f"be on {x_TD.device} like x_TD", got=k_SGK.device,
                    fix="move it")
        )  # fmt: skip
    check_autograd(_NAME, x_TD=x_TD, k_SGK=k_SGK, v_SGK=v_SGK)
    check_layout(_NAME, x_TD, layout, name="x_TD", layout_name="layout")
    check_layout(_NAME, k_SGK, k_layout, name="k_SGK", layout_name="k_layout")
    check_batches(_NAME, layout, k_layout)
    activations = check_activation(_NAME, activation, heads)
    for name, value in (("eps", eps), ("out_eps", out_eps)):
        if isinstance(value, bool) or not isinstance(value, float):
            raise DtypeError(refusal(_NAME, name, must="be a float", got=value, fix="pass 1e-6"))
        if not value > 0:
            raise ConfigError(
                refusal(
                    _NAME,
                    name,
                    must="be above 0",
                    got=value,
                    fix="it keeps a row of zeros finite",
                )
            )
    if visible_pairs is None:
        check_can_count(_NAME)
        visible_pairs = count_visible_pairs(layout.lengths, k_layout.lengths, None, None)
    most_keys = k_layout.max_length
    chosen = _choose(impl, x_TD, k_SGK)
    given = (x_TD, k_SGK, v_SGK)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    out_TD, _, _ = torch.ops.gem_attention.normed_attention(
        x_TD,
        k_SGK,
        v_SGK,
        layout.offsets_O,
        k_layout.offsets_O,
        layout.lengths,
        k_layout.lengths,
        most_keys,
        activations,
        check_scale(_NAME, scale, k_SGK.shape[2]),
        eps,
        out_eps,
        keep,
        visible_pairs,
        chosen,
    )
    return out_TD
