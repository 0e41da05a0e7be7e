"""Launching the plain attention kernels: what softmax and activations share.

``Call`` holds what the launches of one call have in common. The operators' own ``kernel.py`` say
which kernels run, and with which results.
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
)
from gem_attention.portable.forward.kernel import jagged_flash_attention_forward_kernel
from gem_attention.portable.ragged.descriptor import describes, ragged
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
SOFTMAX = "softmax"


def may_be_fast(x: Tensor) -> bool:
    """Say whether activations may take tanh from the special-function unit.

    Args:
        x: queries, keys or values; any shape.

    Returns:
        True for bf16 and fp16 on an NVIDIA GPU: the instruction is NVIDIA's, and too coarse for
        results in float32.
    """
    return x.dtype != torch.float32 and x.is_cuda and torch.version.hip is None


class Call:
    """What the launches of one call share.

    Attributes:
        batch: number of sequences.
        heads: query heads.
        kv_heads: key/value heads.
        group: query heads that read one key head.
        width: the wider one of the padded head widths.
        scale: factor of the scores.
        factor: the same in the units that the kernels keep scores in.
        windowed: whether a side of the window is bounded.
        counts: queries, keys, sequences, and the sides of the window.
        strides: of queries, keys and values by token and head.
        offsets: of queries and keys.
        widths: constants of the kernels that do not depend on the window.
        constants: constants of the kernels.
        lists: arguments of the tile lists.
    """

    def __init__(
        self,
        operator: str,
        q_THK: Tensor,
        k_SGK: Tensor,
        v_SGV: Tensor,
        q_offsets_O: Tensor,
        k_offsets_O: Tensor,
        window: Window,
        scale: float,
        *,
        activations: str = SOFTMAX,
    ) -> None:
        left, right = window
        self._operator = operator
        self.batch = q_offsets_O.shape[0] - 1
        self.heads, self.kv_heads = q_THK.shape[1], k_SGK.shape[1]
        self.group = self.heads // self.kv_heads
        blocks = [max(16, triton.next_power_of_2(x.shape[2])) for x in (k_SGK, v_SGV)]
        self.width = max(blocks)
        self.scale = scale
        single = q_THK.dtype == torch.float32
        self.factor = scale if single or activations != SOFTMAX else scale * _LOG2E
        self.windowed = left is not None or right is not None
        self.counts = (q_THK.shape[0], k_SGK.shape[0], self.batch, left or 0, right or 0)
        self.strides = (*q_THK.stride()[:2], *k_SGK.stride()[:2], *v_SGV.stride()[:2])
        self.offsets = (q_offsets_O, k_offsets_O)
        self.widths = {
            "WIDTH": k_SGK.shape[2],
            "VALUE_WIDTH": v_SGV.shape[2],
            "BLOCK_K": blocks[0],
            "BLOCK_V": blocks[1],
            "NATURAL": single,
        }
        self.constants = self.widths | {
            "GROUP": self.group,
            "HAS_LEFT": left is not None,
            "HAS_RIGHT": right is not None,
            "ACTIVATIONS": activations,
            "FAST": may_be_fast(q_THK),
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
            f"{self._operator}.{kernel}.{dtype}.{widths}.{mean or 'long'}.{pattern}",
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


def run_forward(
    call: Call,
    given: tuple[Tensor, Tensor, Tensor],
    out_THV: Tensor,
    lse_TH: Tensor,
    config: LaunchConfig,
) -> None:
    """Write the output of every query row, and with softmax the logsumexp."""
    tiles = query_tiles(**call.lists, block_tokens=config.block_rows)
    jagged_flash_attention_forward_kernel[(tiles.capacity * call.heads,)](
        *given,
        out_THV,
        lse_TH,
        tiles.entries,
        tiles.count,
        *call.offsets,
        *call.counts,
        call.factor,
        *call.strides,
        HEADS=call.heads,
        **call.constants,
        BLOCK_T=config.block_rows,
        BLOCK_S=config.block_columns,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def run_backward(
    call: Call,
    given: tuple[Tensor, ...],
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write every row of the gradients of q, k and v.

    Args:
        call: what the launches share.
        given: q, k, v, the gradient of out, and what softmax needs: lse2_HT and delta_HT in fp32.
            Without softmax nothing is read there.
        gradients: of q, k and v, contiguous.
    """
    q_THK, k_SGK, *_ = given
    grad_q_THK, grad_k_SGK, grad_v_SGV = gradients
    short = 0
    if call.group == 1 and not call.windowed:
        short = short_rows(q_THK.shape[0], call.batch, width=call.width)
    queries = partial(_run_queries, call, given, grad_q_THK, short)
    keys = partial(_run_keys, call, given, grad_k_SGK, grad_v_SGV, short)
    if short:
        _run_short(call, given, gradients, short_config(short, q_THK.element_size()))
    if q_THK.shape[0]:
        queries(call.config("backward_queries", q_THK, queries))
    if k_SGK.shape[0]:
        keys(call.config("backward_keys", k_SGK, keys))


def _run_queries(
    call: Call,
    given: tuple[Tensor, ...],
    grad_q_THK: Tensor,
    short: int,
    config: LaunchConfig,
) -> None:
    """Write the gradient of q; ``given`` as in ``run_backward``."""
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


def _run_keys(
    call: Call,
    given: tuple[Tensor, ...],
    grad_k_SGK: Tensor,
    grad_v_SGV: Tensor,
    short: int,
    config: LaunchConfig,
) -> None:
    """Write the gradients of k and v."""
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


def _run_short(
    call: Call,
    given: tuple[Tensor, ...],
    gradients: tuple[Tensor, Tensor, Tensor],
    config: LaunchConfig,
) -> None:
    """Write all gradients of the sequences of at most ``config.block_rows`` queries."""
    tiles = query_tiles(**call.lists, block_tokens=config.block_rows)
    q_THK, k_SGK, v_SGV, *others = given
    grad_q_THK, *grads = gradients
    # With 64 rows the room for stores by TMA leaves a multiprocessor one program instead of two.
    by_tma = config.block_rows == 32 and describes(k_SGK, v_SGV)
    keys = (k_SGK, v_SGV, *grads)
    if by_tma:
        keys = tuple(ragged(x, config.block_columns) for x in keys)
    jagged_flash_attention_backward_short_kernel[(tiles.capacity * call.heads,)](
        q_THK,
        *keys[:2],
        *others,
        grad_q_THK,
        *keys[2:],
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
        ACTIVATIONS=call.constants["ACTIVATIONS"],
        FAST=call.constants["FAST"],
        BLOCK_T=config.block_rows,
        BLOCK_S=config.block_columns,
        RAGGED=by_tma,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
    )
