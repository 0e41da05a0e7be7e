"""Launching ``normed_attention`` in plain Triton.

A forward alone of one head and few keys is one kernel (``gem_attention.portable.normed.single``).
Else attention's own kernels stand between rows of all heads
(``gem_attention.portable.normed.heads``); ``op.py`` joins them. On Hopper ``kernel_sm90`` takes
what it can.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from gem_attention.portable.launching.kernel import may_be_fast
from gem_attention.portable.normed.heads.kernel import (
    normed_heads_finish_kernel,
    normed_heads_out_kernel,
)
from gem_attention.portable.normed.single.kernel import normed_attention_forward_kernel
from gem_attention.tiles import query_tiles

# One head: tokens of a program, and of a step.
_STRETCH, _STEP, _STEP_SINGLE = 512, 64, 16
_WARPS, _STAGES = 4, 2
# Several heads: elements of a program that has whole rows, and of a warp of it.
_TILE_ELEMENTS, _WARP_ELEMENTS = 1024, 512


class Call(NamedTuple):
    """Operands of a launch.

    Attributes:
        x_TD: tokens, contiguous rows.
        k_SGK: keys, contiguous heads.
        v_SGK: values, contiguous heads.
        q_offsets_O: first token of each sequence.
        k_offsets_O: first key of each sequence.
        most_keys: of a sequence.
        activation: one name; ``kernel_sm90`` takes one a head, all the same, too.
        scale: factor of the scores.
        eps: of the first and the second norm.
    """

    x_TD: Tensor
    k_SGK: Tensor
    v_SGK: Tensor
    q_offsets_O: Tensor
    k_offsets_O: Tensor
    most_keys: int
    activation: str
    scale: float
    eps: tuple[float, float]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens, keys and sequences."""
        return self.x_TD.shape[0], self.k_SGK.shape[0], self.q_offsets_O.shape[0] - 1

    @property
    def lists(self) -> dict[str, Any]:
        """Arguments of the tile lists."""
        return {
            "q_offsets_O": self.q_offsets_O,
            "k_offsets_O": self.k_offsets_O,
            "q_tokens": self.x_TD.shape[0],
            "k_tokens": self.k_SGK.shape[0],
        }


def normed_constants(
    width: int, most_keys: int, activation: str, *, single: bool
) -> dict[str, Any]:
    """Return the constants of the kernel of one head.

    Args:
        width: of a row.
        most_keys: of a sequence.
        activation: one name.
        single: whether products are float32.

    Returns:
        constants by name, without FAST and STRETCH.
    """
    return {
        "WIDTH": width,
        "BLOCK_D": _block(width),
        "ACTIVATION": activation,
        "BLOCK_T": _STEP_SINGLE if single else _STEP,
        "BLOCK_S": _block(most_keys),
        "STAGES": _STAGES,
    }


def rows_constants(width: int) -> dict[str, int]:
    """Return the constants of a kernel that has whole rows of all heads.

    Args:
        width: of a row.

    Returns:
        constants by name, with the number of warps.
    """
    block = _block(width)
    tile = max(block, _TILE_ELEMENTS)
    return {
        "WIDTH": width,
        "BLOCK_D": block,
        "ROWS": tile // block,
        "num_warps": min(16, tile // _WARP_ELEMENTS),
    }


def _block(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def launch_forward(call: Call) -> Tensor:
    """Return out_TD of tokens of one head, in the dtype of x, every row written."""
    x_TD, k_SGK, v_SGK = call[:3]
    tokens, width = x_TD.shape
    single = k_SGK.dtype == torch.float32
    out_TD = x_TD.new_empty((tokens, width))
    if tokens == 0:
        return out_TD
    with torch.cuda.device_of(x_TD):
        tiles = query_tiles(**call.lists, block_tokens=_STRETCH)
        normed_attention_forward_kernel[(tiles.capacity,)](
            x_TD,
            k_SGK,
            v_SGK,
            out_TD,
            tiles.entries,
            tiles.count,
            call.q_offsets_O,
            call.k_offsets_O,
            *call.counts,
            call.scale,
            *call.eps,
            x_TD.stride(0),
            k_SGK.stride(0),
            v_SGK.stride(0),
            **normed_constants(width, call.most_keys, call.activation, single=single),
            FAST=may_be_fast(k_SGK),
            STRETCH=_STRETCH,
            num_warps=_WARPS,
        )
    return out_TD


def launch_out(x_TD: Tensor, read_TD: Tensor, *, eps: tuple[float, float]) -> Tensor:
    """Return RmsNorm(read + LayerNorm(x)) + x in the dtype of x, every row written.

    Args:
        x_TD: tokens, contiguous rows.
        read_TD: what attention has read for them, contiguous.
        eps: of the first and the second norm.
    """
    rows, width = x_TD.shape
    out_TD = x_TD.new_empty((rows, width))
    if rows == 0:
        return out_TD
    constants = rows_constants(width)
    with torch.cuda.device_of(x_TD):
        normed_heads_out_kernel[(triton.cdiv(rows, constants["ROWS"]),)](
            x_TD, read_TD, out_TD, rows, *eps, x_TD.stride(0), **constants
        )
    return out_TD


def launch_finish(
    grad_TD: Tensor, grad_q_TD: Tensor, grad_a_TD: Tensor, x_TD: Tensor, *, eps: float
) -> Tensor:
    """Return the gradient of x: through the first norm, and beside it by the last residual.

    Args:
        grad_TD: gradient of the output, contiguous rows.
        grad_q_TD: that of q by attention, contiguous.
        grad_a_TD: that of a, which is q's by the residual, contiguous.
        x_TD: tokens, contiguous rows.
        eps: of the first norm.

    Returns:
        the gradient in the dtype of x, every row written.
    """
    rows, width = x_TD.shape
    grad_x_TD = x_TD.new_empty((rows, width))
    if rows == 0:
        return grad_x_TD
    constants = rows_constants(width)
    with torch.cuda.device_of(x_TD):
        normed_heads_finish_kernel[(triton.cdiv(rows, constants["ROWS"]),)](
            x_TD,
            grad_q_TD,
            grad_a_TD,
            grad_TD,
            grad_x_TD,
            rows,
            eps,
            x_TD.stride(0),
            grad_TD.stride(0),
            **constants,
        )
    return grad_x_TD
