"""Launching block attention in plain Triton, on any GPU and in the interpreter.

The device code is in ``gem_attention.portable.blocks``. Bytes are what bounds it: a block has few
products for what it reads, so nothing is read twice and nothing but results is written.

Queries and keys are rotated between load and product, and their gradients rotated back in fp32
before they are rounded. The angles are made in the kernel from the place in the block, which gives
the scores of the place in the sequence, and from the log gap: no table of cosines is read.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from gem_attention.portable.blocks.kernel import (
    block_attention_backward_kernel,
    block_attention_forward_kernel,
)
from gem_attention.portable.launching.kernel import may_be_fast
from gem_attention.portable.ragged.descriptor import describes, ragged
from gem_attention.tiles import query_tiles
from gem_attention.tiling.sizes import block_columns
from gem_opkit.errors import UnsupportedError, refusal

_LOG2E = 1.4426950408889634
# Registers of a thread that leave room for two programs of 8 warps on a multiprocessor.
_HALF_THE_REGISTERS = 128


def block_constants(
    width: int, value_width: int, block_tokens: int, *, single: bool
) -> dict[str, int]:
    """Return the sizes of a program's tiles.

    Args:
        width: head width K of queries and keys.
        value_width: head width V of values.
        block_tokens: length of a block.
        single: whether products are float32.

    Returns:
        constants of the kernels.

    Raises:
        UnsupportedError: widths that ``block_columns`` does not give tiles for.
    """
    columns = block_columns(width, value_width, block_tokens, single=single)
    if columns is None:
        raise UnsupportedError(
            refusal(
                "block_attention",
                "v_TGV",
                must=f"be {width} wide like the keys, which are read in chunks",
                got=value_width,
                fix='use impl="reference"',
            )
        )
    return {
        "WIDTH": width,
        "VALUE_WIDTH": value_width,
        "CHUNK_K": columns[0],
        "CHUNK_V": columns[1],
        "BLOCK_T": max(16, triton.next_power_of_2(block_tokens)),
    }


def block_warps(constants: dict[str, Any]) -> int:
    """Return the warps of a program; sums over a group of heads hold twice the registers.

    Args:
        constants: of the kernel.

    Returns:
        4 or 8.
    """
    wide_group = constants["GROUP"] > 1 and constants["CHUNK_K"] > 64
    return 8 if constants["BLOCK_T"] > 64 or wide_group else 4


class _Call:
    """What the launches of one call share."""

    def __init__(
        self,
        q_THK: Tensor,
        k_TGK: Tensor,
        v_TGV: Tensor,
        offsets_O: Tensor,
        turns: Tensor | None,
        log_gap_T: Tensor | None,
        block_tokens: int,
        scale: float,
        *others: Tensor,
    ) -> None:
        # Short blocks took less time by pointers: a descriptor costs as much for 32 rows as for 64.
        self.ragged = block_tokens > 32 and describes(q_THK, k_TGK, v_TGV, *others)
        tokens, self.heads, width = q_THK.shape
        self.kv_heads = k_TGK.shape[1]
        single = q_THK.dtype == torch.float32
        self.factor = scale if single else scale * _LOG2E
        self.strides = (*q_THK.stride()[:2], *k_TGK.stride()[:2], *v_TGV.stride()[:2])
        self.counts = (tokens, offsets_O.shape[0] - 1, block_tokens)
        # A pointer that is not read, where there is no rotation.
        self.angles = (offsets_O if turns is None else turns, log_gap_T)
        if log_gap_T is None:
            self.angles = (self.angles[0], offsets_O)
        self.constants = block_constants(width, v_TGV.shape[2], block_tokens, single=single) | {
            "GROUP": self.heads // self.kv_heads,
            "NATURAL": single,
            "ROTARY": turns is not None,
            "HAS_GAP": log_gap_T is not None,
            "FAST": may_be_fast(q_THK),
            "RAGGED": self.ragged,
        }
        # A window of nothing: blocks cost the same, and the list is that of one length of block.
        self.tiles = query_tiles(
            offsets_O,
            offsets_O,
            q_tokens=tokens,
            k_tokens=tokens,
            block_tokens=block_tokens,
            window=(0, 0),
        )
        self.list = (self.tiles.entries, self.tiles.count, offsets_O)

    def tiles_of(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Return the tensors, or where TMA reads and writes them their descriptors."""
        if not self.ragged:
            return tensors
        rows = self.constants["BLOCK_T"]
        return tuple(ragged(x, rows) for x in tensors)


def launch_forward(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    offsets_O: Tensor,
    turns: Tensor | None,
    log_gap_T: Tensor | None,
    *,
    block_tokens: int,
    scale: float,
) -> Tensor:
    """Attend within blocks; return out_THV in the dtype of q, every row of it written."""
    tokens, heads, _ = q_THK.shape
    out_THV = q_THK.new_empty((tokens, heads, v_TGV.shape[2]))
    if tokens == 0:
        return out_THV
    with torch.cuda.device_of(q_THK):
        call = _Call(q_THK, k_TGK, v_TGV, offsets_O, turns, log_gap_T, block_tokens, scale)
        # Turning tiles of 128 rows takes a few registers more than two programs leave each other.
        limit = call.ragged and call.constants["ROTARY"] and call.constants["BLOCK_T"] > 64
        block_attention_forward_kernel[(call.tiles.capacity * heads,)](
            *call.tiles_of(q_THK, k_TGK, v_TGV, out_THV),
            *call.angles,
            *call.list,
            *call.counts,
            call.factor,
            *call.strides,
            HEADS=heads,
            **call.constants,
            num_warps=block_warps(call.constants),
            **({"maxnreg": _HALF_THE_REGISTERS} if limit else {}),
        )
    return out_THV


def launch_backward(
    grad_out_THV: Tensor,
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    offsets_O: Tensor,
    turns: Tensor | None,
    log_gap_T: Tensor | None,
    *,
    block_tokens: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, every row written; the same bits in every run."""
    gradients = (
        q_THK.new_empty(q_THK.shape),
        k_TGK.new_empty(k_TGK.shape),
        v_TGV.new_empty(v_TGV.shape),
    )
    if q_THK.shape[0] == 0:
        return gradients
    with torch.cuda.device_of(q_THK):
        call = _Call(
            q_THK, k_TGK, v_TGV, offsets_O, turns, log_gap_T, block_tokens, scale, grad_out_THV
        )
        block_attention_backward_kernel[(call.tiles.capacity * call.kv_heads,)](
            *call.tiles_of(q_THK, k_TGK, v_TGV, grad_out_THV, *gradients),
            *call.angles,
            *call.list,
            *call.counts,
            scale,
            call.factor,
            *call.strides,
            *grad_out_THV.stride()[:2],
            KV_HEADS=call.kv_heads,
            **call.constants,
            num_warps=block_warps(call.constants),
        )
    return gradients
