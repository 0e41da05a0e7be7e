"""Launching ``pooled_attention`` in plain Triton, on any GPU and in the interpreter.

The device code is in ``gem_attention.portable.pooled``. Nothing here reads a device tensor: grids
and room come from the numbers of tokens, sequences and seeds, and what is in them from the offsets
on the device, so that a captured CUDA graph may be replayed with other lengths.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gem_attention.portable.launching.kernel import may_be_fast
from gem_attention.portable.pooled.backward.kernel import (
    pooled_attention_backward_kernel,
    pooled_attention_sum_kernel,
)
from gem_attention.portable.pooled.kernel import (
    pooled_attention_forward_kernel,
    pooled_attention_merge_kernel,
)
from gem_attention.portable.ragged.descriptor import describes, ragged
from gem_attention.tiles import TileList, query_tiles
from gem_opkit.tuning import LaunchConfig

# Most elements of seeds that a program of the backward holds, and most rows of them.
_MOST_HELD, _MOST_HELD_SINGLE, _MOST_ROWS = 8192, 2048, 64
# Programs of the forward that run at once on a multiprocessor, about.
_FORWARD_PROGRAMS = 3
_LOG2E = 1.4426950408889634
# Fewest keys of a chunk, and fewest for each row of seeds.
LEAST_SPLIT, SPLIT_ROWS = 256, 64
_MOST_SPLIT = 2**20


def takes_forward(seeds_PHK: Tensor, k_SGK: Tensor, activations: str) -> bool:
    """Say whether the forward here takes a call.

    Args:
        seeds_PHK: queries of every sequence.
        k_SGK: keys.
        activations: ``"softmax"`` or names.

    Returns:
        False where heads share keys but not their activation.
    """
    return not _mixes(seeds_PHK, k_SGK, activations)


def takes_backward(seeds_PHK: Tensor, k_SGK: Tensor, v_SGV: Tensor, activations: str) -> bool:
    """Say whether the backward here takes a call.

    Args:
        seeds_PHK: queries of every sequence.
        k_SGK: keys.
        v_SGV: values.
        activations: ``"softmax"`` or names.

    Returns:
        True where a program can hold all seeds of the heads that share keys, and these heads have
        one activation.
    """
    rows = seeds_PHK.shape[0] * (seeds_PHK.shape[1] // k_SGK.shape[1])
    rows = max(_power_of_two(rows), 16)
    width = max(_power_of_two(x.shape[2]) for x in (k_SGK, v_SGV))
    most = _MOST_HELD_SINGLE if k_SGK.dtype == torch.float32 else _MOST_HELD
    return rows <= _MOST_ROWS and rows * width <= most and not _mixes(seeds_PHK, k_SGK, activations)


def _mixes(seeds_PHK: Tensor, k_SGK: Tensor, activations: str) -> bool:
    """Whether heads that share keys have activations of their own."""
    return seeds_PHK.shape[1] > k_SGK.shape[1] and len(set(activations.split(","))) > 1


def launch_forward(
    seeds_PHK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    k_offsets_O: Tensor,
    *,
    activations: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Pool; return out_BPHV, and lse_BPH, which has no elements but for softmax; all written."""
    call = _Call(seeds_PHK, k_SGK, v_SGV, k_offsets_O, activations, scale)
    shape = (call.batch, call.seeds, call.heads)
    out_BPHV = seeds_PHK.new_empty((*shape, v_SGV.shape[2]))
    if activations != "softmax":
        shape = (0, *shape[1:])
    lse_BPH = seeds_PHK.new_empty(shape, dtype=torch.float32)
    if out_BPHV.numel() == 0:
        return out_BPHV, lse_BPH
    if call.k_tokens == 0:
        return out_BPHV.zero_(), lse_BPH.fill_(float("-inf"))
    config = call.forward_config()
    row_tiles = -(-call.rows // config.block_rows)
    split = call.forward_split(row_tiles)
    tiles = call.chunks(split)
    places = max(2 * call.k_tokens // split, 1)
    parts = seeds_PHK.new_empty(
        (places * call.kv_heads * call.rows, v_SGV.shape[2] + 2), dtype=torch.float32
    )
    part, top, total = parts.view(-1).split(
        [parts.shape[0] * v_SGV.shape[2], parts.shape[0], parts.shape[0]]
    )
    with torch.cuda.device_of(k_SGK):
        keys, values = call.tiles_of(config, k_SGK, v_SGV)
        pooled_attention_forward_kernel[(tiles.capacity * call.kv_heads * row_tiles,)](
            seeds_PHK,
            keys,
            values,
            out_BPHV,
            lse_BPH,
            part,
            top,
            total,
            tiles.entries,
            tiles.count,
            k_offsets_O,
            *call.counts,
            tiles.block_tokens,
            call.factor,
            *call.strides,
            **call.constants,
            BLOCK_T=config.block_rows,
            BLOCK_S=config.block_columns,
            RAGGED=call.ragged,
            STAGES=config.stages,
            num_warps=config.warps,
            num_stages=config.stages,
        )
        merged = {
            name: value
            for name, value in call.constants.items()
            if name not in ("WIDTH", "BLOCK_K", "FAST")
        }
        pooled_attention_merge_kernel[(call.batch * call.kv_heads * row_tiles,)](
            out_BPHV,
            lse_BPH,
            part,
            top,
            total,
            k_offsets_O,
            *call.counts,
            tiles.block_tokens,
            **merged,
            BLOCK_T=config.block_rows,
            num_warps=config.warps,
        )
    return out_BPHV, lse_BPH


def launch_backward(
    grad_out_BPHV: Tensor,
    seeds_PHK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_BPHV: Tensor,
    lse_BPH: Tensor,
    k_offsets_O: Tensor,
    *,
    activations: str,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the seeds, k and v; every row written, the same bits in every run."""
    del deterministic
    call = _Call(seeds_PHK, k_SGK, v_SGV, k_offsets_O, activations, scale)
    grad_k_SGK, grad_v_SGV = (x.new_empty(x.shape) for x in (k_SGK, v_SGV))
    grad_seeds_PHK = seeds_PHK.new_empty(seeds_PHK.shape)
    if call.k_tokens == 0 or call.seeds == 0:
        return grad_seeds_PHK.zero_(), grad_k_SGK.zero_(), grad_v_SGV.zero_()
    config = call.backward_config()
    programs = call.backward_programs(config.block_rows)
    tiles = call.chunks(call.backward_split(programs))
    lanes = max(min(programs // call.kv_heads, tiles.capacity), 1)
    part = seeds_PHK.new_empty(lanes * seeds_PHK.numel(), dtype=torch.float32)
    with torch.cuda.device_of(k_SGK):
        keys, values, grad_keys, grad_values = call.tiles_of(
            config, k_SGK, v_SGV, grad_k_SGK, grad_v_SGV
        )
        pooled_attention_backward_kernel[(lanes * call.kv_heads,)](
            seeds_PHK,
            keys,
            values,
            grad_out_BPHV,
            out_BPHV,
            lse_BPH,
            part,
            grad_keys,
            grad_values,
            tiles.entries,
            tiles.count,
            k_offsets_O,
            *call.counts,
            tiles.block_tokens,
            scale,
            call.factor,
            *call.strides,
            **call.constants,
            BLOCK_T=config.block_rows,
            BLOCK_S=config.block_columns,
            RAGGED=call.ragged,
            STAGES=config.stages,
            num_warps=config.warps,
            num_stages=config.stages,
        )
        pooled_attention_sum_kernel[(-(-seeds_PHK.numel() // 128),)](
            part,
            grad_seeds_PHK,
            lanes,
            call.rows,
            scale,
            KV_HEADS=call.kv_heads,
            GROUP=call.group,
            WIDTH=seeds_PHK.shape[2],
            BLOCK_L=32,
            BLOCK_E=128,
            num_warps=4,
        )
    return grad_seeds_PHK, grad_k_SGK, grad_v_SGV


class _Call:
    """What the launches of one call share."""

    def __init__(self, seeds_PHK, k_SGK, v_SGV, k_offsets_O, activations, scale):
        self.seeds, self.heads, width = seeds_PHK.shape
        self.k_tokens, self.kv_heads, _ = k_SGK.shape
        self.batch = k_offsets_O.shape[0] - 1
        self.group = self.heads // self.kv_heads
        self.rows = self.seeds * self.group
        self.single = seeds_PHK.dtype == torch.float32
        self.factor = scale * _LOG2E if activations == "softmax" and not self.single else scale
        self.offsets_O = k_offsets_O
        blocks = [max(16, _power_of_two(x.shape[2])) for x in (k_SGK, v_SGV)]
        self.width = max(blocks)
        self.ragged = describes(k_SGK, v_SGV)
        self.programs = _FORWARD_PROGRAMS * _multiprocessors(k_SGK.device)
        self.counts = (self.k_tokens, self.batch, self.seeds)
        self.strides = (*seeds_PHK.stride()[:2], *k_SGK.stride()[:2], *v_SGV.stride()[:2])
        self.constants = {
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "WIDTH": width,
            "VALUE_WIDTH": v_SGV.shape[2],
            "BLOCK_K": blocks[0],
            "BLOCK_V": blocks[1],
            "NATURAL": self.single,
            "ACTIVATIONS": activations,
            "FAST": may_be_fast(k_SGK),
        }

    def tiles_of(self, config: LaunchConfig, *tensors: Tensor) -> tuple[Any, ...]:
        """Return descriptors of packed tensors where TMA reads them, else the tensors."""
        if not self.ragged:
            return tensors
        return tuple(ragged(x, config.block_columns) for x in tensors)

    def forward_config(self) -> LaunchConfig:
        """Choose tiles of the forward."""
        rows = max(_power_of_two(self.rows), 16)
        if self.single:
            side = 32 if self.width <= 128 else 16
            return LaunchConfig(min(rows, side), side, 4, 1)
        if self.width > 128:
            return LaunchConfig(min(rows, 32), 32, 4, 3)
        if self.ragged and rows > 64:
            return LaunchConfig(128, 64, 8, 3)
        if self.constants["ACTIVATIONS"] == "softmax" and rows == 32:
            rows = 64  # half of it empty, but on wgmma
        return LaunchConfig(min(rows, 64), 64, 4, 3)

    def forward_split(self, row_tiles: int) -> int:
        """Return the most keys of a chunk: at least what falls to a program, at most twice that."""
        share = self.k_tokens * self.kv_heads * row_tiles // self.programs
        # Parts are written and read again: with so many keys that is 3 % of what a chunk reads.
        least = max(LEAST_SPLIT, SPLIT_ROWS * self.rows)
        return min(_power_of_two(max(share, least)), _MOST_SPLIT)

    def backward_config(self) -> LaunchConfig:
        """Choose tiles of the backward, which holds all rows at once."""
        rows = max(_power_of_two(self.rows), 16)
        return LaunchConfig(rows, 32, 4, 1 if self.single else 3)

    def backward_programs(self, rows: int) -> int:
        """Return how many programs of the backward run at once.

        One more on each multiprocessor would run after the others, and take as long again.
        """
        held = rows * self.width
        each = 1 if rows == 64 else 2
        if held <= 4096 and not self.single:
            each = (3 if held <= 2048 else 2) + self.ragged
        return each * self.programs // _FORWARD_PROGRAMS

    def backward_split(self, programs: int) -> int:
        """Return the most keys of a chunk: so few that sums of whole chunks come out even."""
        share = self.k_tokens * self.kv_heads // (4 * programs)
        return min(max(_power_of_two(share + 1) // 2, LEAST_SPLIT), _MOST_SPLIT)

    def chunks(self, split: int) -> TileList:
        """List the chunks of keys, those of the longest sequences first."""
        return query_tiles(
            self.offsets_O,
            self.offsets_O,
            q_tokens=self.k_tokens,
            k_tokens=self.k_tokens,
            block_tokens=split,
        )


def _power_of_two(least: int) -> int:
    """Return the power of two from ``least`` on; Triton's own costs the host five times as long."""
    return 1 << max(least - 1, 0).bit_length()


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # enough for the interpreter to go back and forth
    return torch.cuda.get_device_properties(device).multi_processor_count
