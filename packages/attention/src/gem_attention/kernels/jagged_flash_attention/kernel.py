"""Softmax attention over jagged batches in plain Triton, for any GPU and for the interpreter.

A program works on one tile of a tile list (``gem_attention.tiles``) and one head. Three ranges of
keys (or, for the gradients of keys, of queries) follow from the window: tiles that it cuts at the
left, tiles that every row sees whole, tiles that it or the end of the sequence cuts at the right.
Only the first and the last are masked; masking every tile costs a seventh.

The backward is split: one kernel sums the gradient of q over keys, another those of k and v over
queries, in a fixed order and without atomics, so that its bits are the same in every run. Where
sequences have at most 64 queries and see every key, one pass over the keys gives all three
(``jagged_flash_attention_backward_short_kernel``), because there only memory counts.

Scores are kept in units of log2 with the factor folded into the scale, which saves a product for
each; those of float32 stay NATURAL, which saves roundings. A key that is not visible scores -inf,
so nothing depends on how low the visible ones are. Rows that see no key have lse2 = +inf in the
backward, which makes their probabilities 0.

This file launches the kernels; the device code is in ``gem_attention.portable``.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import triton
from torch import Tensor

from gem_attention.portable.backward.kernel import (
    jagged_flash_attention_backward_keys_kernel,
    jagged_flash_attention_backward_queries_kernel,
    jagged_flash_attention_delta_kernel,
)
from gem_attention.portable.forward.kernel import jagged_flash_attention_forward_kernel
from gem_attention.portable.short.kernel import jagged_flash_attention_backward_short_kernel
from gem_attention.tiles import Window, key_tiles, query_tiles
from gem_attention.tiling.sizes import (
    CANDIDATES,
    SINGLE_CANDIDATES,
    default_config,
    short_config,
    short_rows,
)
from gem_opkit.tuning import LaunchConfig, choose, device_key, length_bucket

_LOG2E = 1.4426950408889634


def launch_forward(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    *,
    window: Window,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend; return out_THV in the dtype of q and lse_TH in fp32, every row of both written."""
    tokens, heads, _ = q_THK.shape
    out_THV = q_THK.new_empty((tokens, heads, v_SGV.shape[2]))
    lse_TH = q_THK.new_empty((tokens, heads), dtype=torch.float32)
    if tokens == 0:
        return out_THV, lse_TH
    call = _Call(q_THK, k_SGK, v_SGV, q_offsets_O, k_offsets_O, window, scale)

    def run(config: LaunchConfig) -> None:
        tiles = query_tiles(**call.lists, block_tokens=config.block_rows)
        jagged_flash_attention_forward_kernel[(tiles.capacity * heads,)](
            q_THK,
            k_SGK,
            v_SGV,
            out_THV,
            lse_TH,
            tiles.entries,
            tiles.count,
            q_offsets_O,
            k_offsets_O,
            *call.counts,
            call.factor,
            *call.strides,
            HEADS=heads,
            **call.constants,
            BLOCK_T=config.block_rows,
            BLOCK_S=config.block_columns,
            STAGES=config.stages,
            num_warps=config.warps,
            num_stages=config.stages,
        )

    with torch.cuda.device_of(q_THK):
        run(call.config("forward", q_THK, run))
    return out_THV, lse_TH


def launch_backward(
    grad_out_THV: Tensor,
    grad_lse_TH: Tensor | None,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    q_offsets_O: Tensor,
    k_offsets_O: Tensor,
    *,
    window: Window,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; always deterministic, every row written."""
    grad_q_THK, grad_k_SGK, grad_v_SGV = (x.new_empty(x.shape) for x in (q_THK, k_SGK, v_SGV))
    call = _Call(q_THK, k_SGK, v_SGV, q_offsets_O, k_offsets_O, window, scale)
    tokens = q_THK.shape[0]
    with torch.cuda.device_of(q_THK):
        lse2_HT, delta_HT = _launch_delta(grad_out_THV, grad_lse_TH, out_THV, lse_TH)
        given = (q_THK, k_SGK, v_SGV, grad_out_THV, lse2_HT, delta_HT)
        short = 0
        if call.group == 1 and window == (None, None):
            short = short_rows(tokens, call.batch, width=call.width)
        queries = partial(_launch_queries, call, given, grad_q_THK, short)
        keys = partial(_launch_keys, call, given, grad_k_SGK, grad_v_SGV, short)
        if short:
            gradients = (grad_q_THK, grad_k_SGK, grad_v_SGV)
            _launch_short(call, given, gradients, short_config(short, q_THK.element_size()))
        if tokens:
            queries(call.config("backward_queries", q_THK, queries))
        if k_SGK.shape[0]:
            keys(call.config("backward_keys", k_SGK, keys))
    return grad_q_THK, grad_k_SGK, grad_v_SGV


class _Call:
    """What the launches of one call share."""

    def __init__(self, q_THK, k_SGK, v_SGV, q_offsets_O, k_offsets_O, window, scale):
        left, right = window
        self.batch = q_offsets_O.shape[0] - 1
        self.heads, self.kv_heads = q_THK.shape[1], k_SGK.shape[1]
        self.group = self.heads // self.kv_heads
        blocks = [max(16, triton.next_power_of_2(x.shape[2])) for x in (k_SGK, v_SGV)]
        self.width = max(blocks)
        self.scale = scale
        self.factor = scale if q_THK.dtype == torch.float32 else scale * _LOG2E
        self.windowed = left is not None or right is not None
        self.counts = (q_THK.shape[0], k_SGK.shape[0], self.batch, left or 0, right or 0)
        self.strides = (*q_THK.stride()[:2], *k_SGK.stride()[:2], *v_SGV.stride()[:2])
        self.offsets = (q_offsets_O, k_offsets_O)
        self.widths = {
            "WIDTH": k_SGK.shape[2],
            "VALUE_WIDTH": v_SGV.shape[2],
            "BLOCK_K": blocks[0],
            "BLOCK_V": blocks[1],
            "NATURAL": q_THK.dtype == torch.float32,
        }
        self.constants = self.widths | {
            "GROUP": self.group,
            "HAS_LEFT": left is not None,
            "HAS_RIGHT": right is not None,
        }
        self.lists = {
            "q_offsets_O": q_offsets_O,
            "k_offsets_O": k_offsets_O,
            "q_tokens": q_THK.shape[0],
            "k_tokens": k_SGK.shape[0],
            "window": window,
        }

    def config(
        self, kernel: str, tiled: Tensor, run: Callable[[LaunchConfig], None]
    ) -> LaunchConfig:
        """Choose tile sizes by the bucket of the shorter side; a window makes long ones short."""
        mean = length_bucket(min(self.counts[:2]), self.batch)
        if self.windowed:
            mean = mean or 512
        size = tiled.element_size()
        widths = f"{self.widths['BLOCK_K']}x{self.widths['BLOCK_V']}"
        pattern = "window" if self.windowed else "full"
        dtype = str(tiled.dtype).removeprefix("torch.")
        return choose(
            f"jagged_flash_attention.{kernel}.{dtype}.{widths}.{mean or 'long'}.{pattern}",
            default_config(kernel, width=self.width, element_bytes=size, mean=mean),
            device=_device(tiled),
            candidates=SINGLE_CANDIDATES if size == 4 else CANDIDATES,
            time_ms=partial(_time_ms, run),
        )


_devices: dict[int | None, str] = {}


def _device(tensor: Tensor) -> str:
    index = tensor.device.index if tensor.is_cuda else None
    if index not in _devices:
        _devices[index] = device_key(index)
    return _devices[index]


def _time_ms(run: Callable[[LaunchConfig], None], config: LaunchConfig) -> float:
    if torch.cuda.is_available():
        return triton.testing.do_bench(partial(run, config), warmup=5, rep=20, return_mode="median")
    begin = time.perf_counter()
    run(config)
    return 1e3 * (time.perf_counter() - begin)


def _launch_delta(grad_out_THV, grad_lse_TH, out_THV, lse_TH):
    tokens, heads, value_width = out_THV.shape
    lse2_HT, delta_HT = out_THV.new_empty((2, heads, tokens), dtype=torch.float32)
    block_t = 32
    if tokens:
        grad_lse = lse_TH if grad_lse_TH is None else grad_lse_TH
        jagged_flash_attention_delta_kernel[(triton.cdiv(tokens, block_t) * heads,)](
            out_THV,
            grad_out_THV,
            lse_TH,
            grad_lse,
            lse2_HT,
            delta_HT,
            tokens,
            *grad_out_THV.stride()[:2],
            *grad_lse.stride(),
            HEADS=heads,
            VALUE_WIDTH=value_width,
            BLOCK_V=max(16, triton.next_power_of_2(value_width)),
            NATURAL=out_THV.dtype == torch.float32,
            BLOCK_T=block_t,
            HAS_GRAD_LSE=grad_lse_TH is not None,
            num_warps=4,
        )
    return lse2_HT, delta_HT


def _launch_queries(call, given, grad_q_THK, short, config):
    tiles = query_tiles(**call.lists, block_tokens=config.block_rows)
    jagged_flash_attention_backward_queries_kernel[(tiles.capacity * call.heads,)](
        *given,
        grad_q_THK,
        tiles.entries,
        tiles.count,
        *call.offsets,
        *call.counts,
        call.scale,
        call.factor,
        *call.strides,
        *given[3].stride()[:2],
        HEADS=call.heads,
        **call.constants,
        BLOCK_T=config.block_rows,
        BLOCK_S=config.block_columns,
        SHORT_T=short,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _launch_keys(call, given, grad_k_SGK, grad_v_SGV, short, config):
    tiles = key_tiles(**call.lists, block_tokens=config.block_rows)
    jagged_flash_attention_backward_keys_kernel[(tiles.capacity * call.kv_heads,)](
        *given,
        grad_k_SGK,
        grad_v_SGV,
        tiles.entries,
        tiles.count,
        *call.offsets,
        *call.counts,
        call.scale,
        call.factor,
        *call.strides,
        *given[3].stride()[:2],
        KV_HEADS=call.kv_heads,
        **call.constants,
        BLOCK_T=config.block_columns,
        BLOCK_S=config.block_rows,
        SHORT_T=short,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _launch_short(call, given, gradients, config):
    tiles = query_tiles(**call.lists, block_tokens=config.block_rows)
    jagged_flash_attention_backward_short_kernel[(tiles.capacity * call.heads,)](
        *given,
        *gradients,
        tiles.entries,
        tiles.count,
        *call.offsets,
        *call.counts[:3],
        call.scale,
        call.factor,
        *call.strides,
        *given[3].stride()[:2],
        HEADS=call.heads,
        **call.widths,
        BLOCK_T=config.block_rows,
        BLOCK_S=config.block_columns,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
    )
