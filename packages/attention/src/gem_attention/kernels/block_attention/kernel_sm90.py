"""Launching block attention on Hopper for blocks of more than 64 tokens.

Takes what the fast path takes and nothing else; ``supports`` says what that is, and ``kernel.py``
computes the rest. Nothing here reads a device tensor on the host. The device code is in
``gem_attention.hopper.blocks``.
"""

from typing import Any

import torch
from torch import Tensor

from gem_attention.hopper.blocks.kernel_sm90 import block_backward_kernel, block_forward_kernel
from gem_attention.hopper.device import LOG2_E
from gem_attention.hopper.launching import DTYPES, programs, ragged
from gem_attention.portable.ragged.descriptor import describes
from gem_attention.tiles import query_tiles

ROWS = 128  # of a tile, which holds a block
WARPS = 8
# Registers of a thread that leave room for two programs of the forward on a multiprocessor.
FORWARD_REGISTERS = 128
# Blocks up to here are quicker in the portable kernels, of which a multiprocessor holds three.
_SHORT_TOKENS = 64


def supports(
    q_THK: Tensor, k_TGK: Tensor, v_TGV: Tensor, *others: Tensor, block_tokens: int
) -> bool:
    """Say whether the kernels of this file take a call.

    Args:
        q_THK: queries.
        k_TGK: keys.
        v_TGV: values.
        others: for the backward the gradient of the output; as many key heads as query heads then.
        block_tokens: length of a block.

    Returns:
        True for bf16 and fp16 on compute capability 9.0 with blocks of 65 to 128 tokens, one head
        width of 64 or 128, heads that lie side by side, and rows that begin at multiples of 16
        bytes.
    """
    return (
        _SHORT_TOKENS < block_tokens <= ROWS
        and q_THK.shape[2] == v_TGV.shape[2]
        and (not others or q_THK.shape[1] == k_TGK.shape[1])
        and describes(q_THK, k_TGK, v_TGV, *others)
        and torch.cuda.get_device_capability(q_THK.device) == (9, 0)
    )


class _Call:
    """What forward and backward launch with."""

    def __init__(
        self,
        q_THK: Tensor,
        offsets_O: Tensor,
        turns: Tensor | None,
        log_gap_T: Tensor | None,
        block_tokens: int,
    ) -> None:
        tokens, heads, width = q_THK.shape
        # A window of nothing: blocks cost the same, and the list is that of one length of block.
        tiles = query_tiles(
            offsets_O,
            offsets_O,
            q_tokens=tokens,
            k_tokens=tokens,
            block_tokens=block_tokens,
            window=(0, 0),
        )
        # A pointer that is not read, where there is no rotation or no gap.
        angles = (turns, log_gap_T)
        self.items = tiles.capacity * heads
        self.lists = (
            *(offsets_O if x is None else x for x in angles),
            tiles.entries,
            tiles.count,
            offsets_O,
            offsets_O.shape[0] - 1,
            tokens,
            block_tokens,
        )
        self.constants: dict[str, Any] = {
            "HEADS": heads,
            "ROWS": ROWS,
            "WIDTH": width,
            "ROTARY": turns is not None,
            "HAS_GAP": log_gap_T is not None,
            "DTYPE": DTYPES[q_THK.dtype],
            "num_warps": WARPS,
        }


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
    out_THV = torch.empty(q_THK.shape, dtype=q_THK.dtype, device=q_THK.device)
    if q_THK.shape[0] == 0:
        return out_THV
    with torch.cuda.device_of(q_THK):
        call = _Call(q_THK, offsets_O, turns, log_gap_T, block_tokens)
        block_forward_kernel[(call.items,)](
            *(ragged(x, ROWS) for x in (q_THK, k_TGK, v_TGV, out_THV)),
            *call.lists,
            scale * LOG2_E.value,
            GROUP=q_THK.shape[1] // k_TGK.shape[1],
            maxnreg=FORWARD_REGISTERS,
            **call.constants,
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
    sizes = {"dtype": q_THK.dtype, "device": q_THK.device}
    grad_q_THK, grad_k_TGK, grad_v_TGV = (
        torch.empty(x.shape, **sizes) for x in (q_THK, k_TGK, v_TGV)
    )
    gradients = (grad_q_THK, grad_k_TGK, grad_v_TGV)
    if q_THK.shape[0] == 0:
        return gradients
    with torch.cuda.device_of(q_THK):
        call = _Call(q_THK, offsets_O, turns, log_gap_T, block_tokens)
        block_backward_kernel[(programs(q_THK.device, call.items),)](
            *(ragged(x, ROWS) for x in (q_THK, k_TGK, v_TGV, grad_out_THV, *gradients)),
            *call.lists,
            scale,
            scale * LOG2_E.value,
            **call.constants,
        )
    return gradients
