"""Launching ``normed_attention`` on Hopper: TMA, asynchronous wgmma, specialised warps.

Of one head the kernels do all, norms included. Of several they stand between norms of whole rows
and add the residual: the forward turns q into a, the backward the gradient of a into that of q.
The device code is in ``gem_attention.hopper.normed``. Nothing here reads a device tensor.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gem_attention.hopper.launching import DTYPES, REGISTERS, ROWS, programs, ragged
from gem_attention.hopper.normed.backward.kernel_sm90 import SIDE, normed_backward_kernel
from gem_attention.hopper.normed.forward.kernel_sm90 import normed_forward_kernel
from gem_attention.kernels.normed_attention.kernel import Call
from gem_attention.portable.ragged.descriptor import MOST_ROWS, packs, ragged_view
from gem_attention.tiles import key_tiles, query_tiles

WIDTH, KEYS = 128, 128  # of a head, and of a sequence at most
STRETCH, SLOTS = 512, 2
STAGES = {True: 2, False: 3}  # by whether the norms are in the kernel, which then reads dO too


def supports(x_TD: Tensor, k_SGK: Tensor, *, most_keys: int, activations: str) -> bool:
    """Say whether the kernels of this file take a call.

    Args:
        x_TD: tokens.
        k_SGK: keys.
        most_keys: of a sequence.
        activations: one name for all heads, or one a head joined by commas.

    Returns:
        True for bf16 and fp16 on compute capability 9.0, heads of 128, as many key heads, one
        activation, and at most 128 keys a sequence.
    """
    return (
        x_TD.device.type == "cuda"
        and x_TD.dtype == k_SGK.dtype
        and x_TD.dtype in DTYPES
        and torch.cuda.get_device_capability(x_TD.device) == (9, 0)
        and k_SGK.shape[2] == WIDTH
        and x_TD.shape[1] == k_SGK.shape[1] * WIDTH
        and most_keys <= KEYS
        and len(set(activations.split(","))) == 1
        and max(x_TD.shape[0], k_SGK.shape[0]) < MOST_ROWS
    )


def launch_forward(call: Call, *, norms: bool, keep: bool) -> tuple[Tensor, Tensor]:
    """Attend, with the residual, and with both norms where there is one head.

    Args:
        call: operands; without ``norms`` its tokens are q.
        norms: whether the kernel does the norms.
        keep: whether a is to be written.

    Returns:
        out_TD and a_TD, which the second norm divides, in the dtype of x, every row written; no
        rows of out without ``norms``, and none of a without ``keep``.
    """
    x_TD, k_SGK = call[:2]
    tokens, row = x_TD.shape
    out_TD, a_TD = x_TD.new_empty((tokens * norms, row)), x_TD.new_empty((tokens * keep, row))
    if tokens == 0:
        return out_TD, a_TD
    if call.scale < 0:
        # A factor that is taken out of the weights must not turn their signs.
        call = call._replace(k_SGK=-k_SGK, scale=-call.scale)
    sizes = _sizes(call, norms=norms)
    # A descriptor that is not read, where one result is not written.
    results = (a_TD if keep else out_TD, out_TD if norms else a_TD)
    with torch.cuda.device_of(x_TD):
        tiles = query_tiles(**call.lists, block_tokens=STRETCH)
        normed_forward_kernel[(programs(x_TD.device, tiles.capacity * sizes["HEADS"]),)](
            ragged(_by_head(x_TD), ROWS),
            *(ragged(t, KEYS) for t in _keys(call)),
            *(ragged(_by_head(t), ROWS) for t in results),
            *_lists(tiles, call),
            STRETCH=STRETCH,
            SLOTS=SLOTS,
            KEEPS=keep,
            **sizes,
        )
    return out_TD, a_TD


def launch_backward(
    grad_TD: Tensor, kept_TD: Tensor, call: Call, *, norms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate ``launch_forward``.

    Args:
        grad_TD: gradient of out; without ``norms`` of a.
        kept_TD: a, contiguous; not read without ``norms``.
        call: that of the forward.
        norms: as there.

    Returns:
        gradients of the call's tokens, of k and of v, every row written; the same bits in every
        run.
    """
    x_TD, k_SGK, v_SGK = call[:3]
    grad_x_TD, grad_k_SGK, grad_v_SGK = (t.new_empty(t.shape) for t in (x_TD, k_SGK, v_SGK))
    if x_TD.shape[0] == 0:
        return grad_x_TD, grad_k_SGK.zero_(), grad_v_SGK.zero_()
    # a and dO with norms; without them the gradient of a, and one that is not read.
    others = (kept_TD, grad_TD) if norms else (grad_TD, grad_TD)
    results = [_by_head(grad_x_TD)]
    results += [grad_k_SGK, grad_v_SGK] if k_SGK.shape[0] else results * 2
    sizes = _sizes(call, norms=norms)
    with torch.cuda.device_of(x_TD):
        tiles = key_tiles(**call.lists, block_tokens=KEYS)
        items = (tiles.capacity + call.counts[2] + 1) * sizes["HEADS"]
        normed_backward_kernel[(programs(x_TD.device, items),)](
            *(ragged(_by_head(t), ROWS) for t in (x_TD, *others)),
            *(ragged(t, KEYS) for t in _keys(call)),
            *map(_columns, results),
            *_lists(tiles, call),
            STAGES=STAGES[norms],
            **sizes,
        )
    return grad_x_TD, grad_k_SGK, grad_v_SGK


def _sizes(call: Call, *, norms: bool) -> dict[str, Any]:
    return {
        "ROWS": ROWS,
        "KEYS": KEYS,
        "WIDTH": WIDTH,
        "HEADS": call.x_TD.shape[1] // WIDTH,
        "DTYPE": DTYPES[call.x_TD.dtype],
        "NORMS": norms,
        "ACTIVATION": call.activation.split(",")[0],
        "num_warps": 4,
        "maxnreg": REGISTERS,
    }


def _lists(tiles: Any, call: Call) -> tuple[Any, ...]:
    tokens, k_tokens, batch = call.counts
    places = (call.q_offsets_O, call.k_offsets_O)
    return tiles.entries, tiles.count, *places, batch, tokens, k_tokens, call.scale, *call.eps


def _by_head(x_TD: Tensor) -> Tensor:
    return _packed(x_TD.unflatten(1, (-1, WIDTH)))


def _keys(call: Call) -> tuple[Tensor, Tensor]:
    """Return keys and values, or tokens in place of none: TMA reads no empty tensor."""
    if call.k_SGK.shape[0] == 0:
        return _by_head(call.x_TD), _by_head(call.x_TD)
    return _packed(call.k_SGK), _packed(call.v_SGK)


def _packed(x: Tensor) -> Tensor:
    return x if packs(x) else x.contiguous()


def _columns(x: Tensor) -> TensorDescriptor:
    """Describe a result for pieces of 64 rows and columns within one sequence."""
    shape, strides, _block = ragged_view(x, SIDE.value)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(x, shape, strides, [1, 1, SIDE.value, SIDE.value], layout)
