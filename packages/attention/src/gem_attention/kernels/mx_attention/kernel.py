"""Launching ``mx_attention``: operands quantised, then attention on their bytes or numbers.

Native on GPUs of compute capability 10.x, whose tensor cores multiply MXFP8 with its scales.
Elsewhere the kernels read the numbers that the bytes mean, as bf16, which holds them, and multiply
these: the right numbers, slower than attention in bf16. They round by integers: where code takes
the bytes of the GPU's cast apart in registers, ptxas reads the second of two from a register that
nobody wrote. The device code is in ``gem_attention.portable.scaled``.
"""

import torch
import triton
from torch import Tensor

from gem_attention.portable.scaled.backward.kernel import (
    mx_attention_backward_keys_kernel,
    mx_attention_backward_queries_kernel,
)
from gem_attention.portable.scaled.kernel import (
    mx_attention_forward_kernel,
    mx_quantize_sequences_kernel,
)
from gem_attention.tiles import Window, key_tiles, query_tiles
from gem_precision.device import BITS, has_cast
from gem_precision.elements import BLOCK

_LOG2E = 1.4426950408889634
# Rows of a tile of queries and keys, and warps: of the instruction, and of products in bf16.
_NATIVE_TILE = (128, 8)
_EMULATED_TILE = (64, 4)


def is_native(device: torch.device) -> bool:
    """Tell whether tensor cores of the device multiply MXFP8 with its scales."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


def quantize_sequences(
    x: Tensor, offsets_O: Tensor, *, scaling: str, seed: int | None = None, decoded: bool,
    rows: bool, columns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Quantise the tokens of packed sequences, each by itself, in either orientation.

    Args:
        x: (T, H, width), fp32, bf16 or fp16.
        offsets_O: first token of each sequence.
        scaling: rule of the scales.
        seed: of rounding by chance, or None.
        decoded: write the numbers, in bf16 (fp32 in the interpreter), in place of bytes.
        rows: blocks along the width.
        columns: blocks along tokens.

    Returns:
        elements and scales along the width, (T, H, width) and (T, H, ⌈width/32⌉), then along
        tokens, (T, H, width) and (T // 32 + B, H, width). Rows behind the last sequence, and
        what is not asked for, are not written; with ``decoded`` there are no scales.
    """
    tokens, heads, width = x.shape
    batch = offsets_O.shape[0] - 1
    blocks = triton.cdiv(width, BLOCK)
    # Triton's interpreter gets products of bf16 wrong.
    wide = torch.bfloat16 if x.is_cuda else torch.float32

    def empty(is_asked: bool, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape if is_asked else (1,), dtype=dtype, device=x.device)

    kind = wide if decoded else torch.uint8
    made = (
        empty(rows, kind, tokens, heads, width),
        empty(rows and not decoded, torch.uint8, tokens, heads, blocks),
        empty(columns, kind, tokens, heads, width),
        empty(columns and not decoded, torch.uint8, tokens // BLOCK + batch, heads, width),
    )
    if tokens == 0:
        return made
    if x.stride(2) != 1:
        x = x.contiguous()
    tiles = query_tiles(
        offsets_O, offsets_O, q_tokens=tokens, k_tokens=tokens, block_tokens=BLOCK
    )  # fmt: skip
    mx_quantize_sequences_kernel[(tiles.capacity * heads,)](
        x.view(BITS[x.dtype]), *made, tiles.entries, tiles.count, offsets_O, tokens, batch,
        *x.stride()[:2], seed or 0, HEADS=heads, WIDTH=width,
        BLOCK_W=max(BLOCK, triton.next_power_of_2(width)), BLOCKS=blocks, ROWS=rows,
        COLUMNS=columns, RCEIL=scaling == "mxfp8_rceil", CAST=has_cast(x) and not decoded,
        CHANCE=seed is not None, DECODED=decoded, num_warps=4,
    )  # fmt: skip
    return made


class _Call:
    """What the launches of one call share."""

    def __init__(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        offsets: tuple[Tensor, Tensor],
        window: Window,
        scale: float,
        *,
        scaling: str,
        native: bool | None,
    ) -> None:
        q_THK, k_SGK, v_SGV = operands
        left, right = window
        self.native = is_native(q_THK.device) if native is None else native
        self.scaling = scaling
        self.offsets = offsets
        self.scale, self.factor = scale, scale * _LOG2E
        self.heads, self.kv_heads = q_THK.shape[1], k_SGK.shape[1]
        tokens = (q_THK.shape[0], k_SGK.shape[0])
        self.counts = (*tokens, offsets[0].shape[0] - 1, left or 0, right or 0)
        self.block, self.warps = _NATIVE_TILE if self.native else _EMULATED_TILE
        width, value_width = q_THK.shape[2], v_SGV.shape[2]
        self.constants = {
            "HEADS": self.heads,
            "GROUP": self.heads // self.kv_heads,
            "WIDTH": width,
            "VALUE_WIDTH": value_width,
            "BLOCK_K": max(BLOCK, triton.next_power_of_2(width)),
            "BLOCK_V": max(BLOCK, triton.next_power_of_2(value_width)),
            "BLOCKS": triton.cdiv(width, BLOCK),
            "HAS_LEFT": left is not None,
            "HAS_RIGHT": right is not None,
            "RCEIL": scaling == "mxfp8_rceil",
            "CAST": self.native and has_cast(q_THK),
            "NATIVE": self.native,
            "BLOCK_T": self.block,
            "BLOCK_S": self.block,
            "num_warps": self.warps,
            "num_stages": 2,
        }
        self.lists = {
            "q_offsets_O": offsets[0],
            "k_offsets_O": offsets[1],
            "q_tokens": tokens[0],
            "k_tokens": tokens[1],
            "block_tokens": self.block,
            "window": window,
        }

    def quantised(
        self, x: Tensor, side: int, *, rows: bool = False, columns: bool = False,
        seed: int | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Quantise one side; elements and scales of what is asked for, elements as kernels read."""
        made = quantize_sequences(
            x, self.offsets[side], scaling=self.scaling, seed=seed, decoded=not self.native,
            rows=rows, columns=columns,
        )  # fmt: skip
        pairs = [*(made[:2] if rows else ()), *(made[2:] if columns else ())]
        if self.native:
            pairs[::2] = [elements.view(torch.float8_e4m3fn) for elements in pairs[::2]]
        return pairs


def launch_forward(
    operands: tuple[Tensor, Tensor, Tensor],
    offsets: tuple[Tensor, Tensor],
    window: Window,
    scale: float,
    *,
    scaling: str,
    native: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend; return out_THV in the dtype of q and lse2_TH in fp32, every row of both written.

    ``native`` is what the device has, but for tests.
    """
    q_THK, k_SGK, v_SGV = operands
    out_THV = q_THK.new_empty((*q_THK.shape[:2], v_SGV.shape[2]))
    lse2_TH = q_THK.new_empty(q_THK.shape[:2], dtype=torch.float32)
    if q_THK.shape[0] == 0:
        return out_THV, lse2_TH
    call = _Call(operands, offsets, window, scale, scaling=scaling, native=native)
    with torch.cuda.device_of(q_THK):
        read = [
            *call.quantised(q_THK, 0, rows=True),
            *call.quantised(k_SGK, 1, rows=True),
            *call.quantised(v_SGV, 1, columns=True),
        ]
        tiles = query_tiles(**call.lists)
        mx_attention_forward_kernel[(tiles.capacity * call.heads,)](
            *read, out_THV, lse2_TH, tiles.entries, tiles.count, *offsets, *call.counts,
            call.factor, **call.constants,
        )  # fmt: skip
    return out_THV, lse2_TH


def launch_backward(
    grad_out_THV: Tensor,
    operands: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    offsets: tuple[Tensor, Tensor],
    window: Window,
    scale: float,
    *,
    scaling: str,
    seed: int | None,
    native: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, every row written; the same bits in every run."""
    q_THK, k_SGK, v_SGV = operands
    grad_q_THK, grad_k_SGK, grad_v_SGV = (x.new_empty(x.shape) for x in operands)
    out_THV, lse2_TH = results
    call = _Call(operands, offsets, window, scale, scaling=scaling, native=native)
    # Rows that see no key: +inf makes their probabilities 0.
    lse2_TH = torch.where(lse2_TH == -torch.inf, torch.inf, lse2_TH)
    delta_TH = (grad_out_THV.float() * out_THV.float()).sum(-1)
    constants = {
        **call.constants,
        "VALUE_BLOCKS": triton.cdiv(v_SGV.shape[2], BLOCK),
        "CHANCE": seed is not None,
    }
    numbers = (*offsets, *call.counts, scale, call.factor, seed or 0)
    with torch.cuda.device_of(q_THK):
        q = call.quantised(q_THK, 0, rows=True, columns=True)
        k = call.quantised(k_SGK, 1, rows=True, columns=True)
        v = call.quantised(v_SGV, 1, rows=True)
        grad = call.quantised(grad_out_THV, 0, rows=True, columns=True, seed=seed)
        if q_THK.shape[0]:
            tiles = query_tiles(**call.lists)
            mx_attention_backward_queries_kernel[(tiles.capacity * call.heads,)](
                *q[:2], *k, *v, *grad[:2], lse2_TH, delta_TH, grad_q_THK, tiles.entries,
                tiles.count, *numbers, **constants,
            )  # fmt: skip
        if k_SGK.shape[0]:
            tiles = key_tiles(**call.lists)
            mx_attention_backward_keys_kernel[(tiles.capacity * call.kv_heads,)](
                *q, *k[:2], *v, *grad, lse2_TH, delta_TH, grad_k_SGK, grad_v_SGV, tiles.entries,
                tiles.count, *numbers, **constants,
            )  # fmt: skip
    return grad_q_THK, grad_k_SGK, grad_v_SGV
