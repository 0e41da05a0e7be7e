"""``normed_linear`` on Hopper, in Gluon: row statistics beside a matrix product, applied behind it.

One CTA a multiprocessor, persistent. 128 tokens lie in shared memory, whole, while all tiles of
weights pass by, so that tokens come from memory once and from the cache never again. A producer
warp loads with TMA. Two consumer warpgroups take tiles of 128 results in turn, in the order of the
producer's ring: while one scales and stores its tile the other multiplies. The second consumer, for
which nothing is there yet when a new range of tokens begins, forms the sums of their squares
meanwhile, and leaves them in shared memory.
"""

from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_TOKENS, _RESULTS, _DEPTH = 128, 128, 64
# Kilobytes of shared memory beside tokens and weights: two halves of a tile of results, statistics.
_SHARED, _BESIDE = 227, 34
_MOST_STAGES = 4
# Registers of a thread at launch; the warps then trade them: 240 a consumer, 24 the producer.
_REGISTERS = 168


def supports(x_TD: Tensor, weight_FD: Tensor) -> bool:
    """Say whether the kernel of this file takes a call.

    Args:
        x_TD: tokens.
        weight_FD: weights with their gain, dtype of x.

    Returns:
        True for bf16 and fp16 on compute capability 9.0, tokens of 64, 128, … 512 elements, and
        rows of both, and of the results, that begin at multiples of 16 bytes.
    """
    tensors = (x_TD, weight_FD)
    return (
        x_TD.is_cuda
        and x_TD.dtype in _DTYPES
        and torch.cuda.get_device_capability(x_TD.device) == (9, 0)
        and x_TD.shape[1] % _DEPTH == 0
        and 0 < x_TD.shape[1] <= 8 * _DEPTH
        and weight_FD.shape[0] % 8 == 0
        and max(x_TD.shape[0], weight_FD.shape[0]) < 2**30
        and all(t.stride(1) == 1 and t.stride(0) % 8 == 0 for t in tensors)
        and all(t.data_ptr() % 16 == 0 for t in tensors)
    )


@gluon.jit
def _statistics(smems, bars, turn, first, rows, token, stride, CENTRED: gl.constexpr):
    """Return sums of squares and of elements of 128 tokens; differences where CENTRED."""
    x_smem = smems[0]
    x_full = bars[0]
    SLICES: gl.constexpr = x_smem.shape[0]
    TOKENS: gl.constexpr = x_smem.shape[1]
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, x_smem.shape[2], 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, PART)
    square_t = gl.zeros([TOKENS], gl.float32, ROWS)
    sum_t = gl.zeros([TOKENS], gl.float32, ROWS)
    first_t = gl.zeros([TOKENS], gl.float32, ROWS)
    if CENTRED:
        t = token + gl.arange(0, TOKENS, ROWS)
        first_t = gl.load(first + t.to(gl.int64) * stride, mask=t < rows, other=0.0).to(gl.float32)
    for k in gl.static_range(SLICES):
        mbarrier.wait(x_full.index(k), turn & 1)
        wide_td = x_smem.index(k).load(PART).to(gl.float32)
        if CENTRED:
            wide_td = wide_td - first_t[:, None]
            sum_t += gl.sum(wide_td, 1)
        square_t += gl.sum(wide_td * wide_td, 1)
    return square_t, sum_t, first_t


@gluon.jit
def _tell(smems, bars, turn, first, sizes, token, CENTRED: gl.constexpr):
    """Leave the means and one over the deviations of 128 tokens in shared memory."""
    rows, width, _, stride, eps = sizes
    square_t, sum_t, first_t = _statistics(smems, bars, turn, first, rows, token, stride, CENTRED)
    variance_t = square_t / width
    place = 2 * (turn & 1)
    if CENTRED:
        shift_t = sum_t / width
        variance_t = gl.maximum(variance_t - shift_t * shift_t, 0.0)
        smems[3].index(place + 1).store(first_t + shift_t)
    smems[3].index(place).store(gl.rsqrt(variance_t + eps))


@gluon.jit
def _multiply(smems, bars, turn, step, last, WHICH: gl.constexpr, ACC: gl.constexpr):
    """Return a tile of x Gᵀ when statistics are there; tokens are given back after the last."""
    x_smem, w_smem, _, _ = smems
    x_full, x_empty, w_full, w_empty, told, passed = bars
    SLICES: gl.constexpr = x_smem.shape[0]
    STAGES: gl.constexpr = w_smem.shape[0]
    TOKENS: gl.constexpr = x_smem.shape[1]
    RESULTS: gl.constexpr = w_smem.shape[1]
    acc_tf = gl.zeros([TOKENS, RESULTS], gl.float32, ACC)
    # A barrier tells even turns of a stage from odd ones and no more. So a consumer looks at the
    # ring only when the other has seen all its weights arrive.
    mbarrier.wait(passed.index(1 - WHICH), (step // (2 * SLICES) + 1 - WHICH) & 1)
    for k in gl.static_range(SLICES):
        stage = (step + k) % STAGES
        mbarrier.wait(x_full.index(k), turn & 1)
        mbarrier.wait(w_full.index(stage), ((step + k) // STAGES) & 1)
        w_df = w_smem.index(stage).permute((1, 0))
        acc_tf = warpgroup_mma(x_smem.index(k), w_df, acc_tf, use_acc=k > 0, is_async=True)
        if k > 0:
            acc_tf = warpgroup_mma_wait(num_outstanding=1, deps=(acc_tf,))
            mbarrier.arrive(w_empty.index((step + k - 1) % STAGES), count=1)
            mbarrier.arrive(x_empty.index(k - 1), count=1, pred=last)
    mbarrier.arrive(passed.index(WHICH), count=1)
    acc_tf = warpgroup_mma_wait(num_outstanding=0, deps=(acc_tf,))
    mbarrier.arrive(w_empty.index((step + SLICES - 1) % STAGES), count=1)
    # Of the first tile the statistics may still be under way. Those of the next tokens cannot be
    # told before this is passed, because they need the slice that is given back behind it.
    mbarrier.wait(told, turn & 1)
    mbarrier.arrive(x_empty.index(SLICES - 1), count=1, pred=last)
    return acc_tf


@gluon.jit
def _leave(acc_tf, scales, sums, y_desc, y_tile, place, out_width, CENTRED: gl.constexpr):
    """Scale a tile and store it, half by half."""
    TOKENS: gl.constexpr = acc_tf.shape[0]
    RESULTS: gl.constexpr = acc_tf.shape[1]
    rstd_t, mean_t = scales
    token, result = place
    if CENTRED:
        COLUMNS: gl.constexpr = gl.SliceLayout(0, acc_tf.type.layout)
        f = result + gl.arange(0, RESULTS, COLUMNS)
        sums_f = gl.load(sums + f, mask=f < out_width, other=0.0)
        acc_tf = acc_tf - mean_t[:, None] * sums_f[None, :]
    y_tf = (acc_tf * rstd_t[:, None]).to(y_desc.dtype)
    halves = y_tf.reshape([TOKENS, 2, RESULTS // 2]).permute((0, 2, 1)).split()
    for i in gl.static_range(2):
        tma.store_wait(0)
        y_tile.store(halves[i])
        fence_async_shared()
        tma.async_copy_shared_to_global(y_desc, [token, result + i * (RESULTS // 2)], y_tile)


@gluon.jit
def _consume(mine, WHICH: gl.constexpr, CENTRED: gl.constexpr):
    """Take every other tile of results."""
    y_desc, sums, first, smems, bars, sizes = mine
    rows, _, out_width, _, _ = sizes
    SLICES: gl.constexpr = smems[0].shape[0]
    TOKENS: gl.constexpr = smems[0].shape[1]
    RESULTS: gl.constexpr = smems[1].shape[1]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RESULTS, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    y_tile = smems[2].index(WHICH)
    pairs = gl.cdiv(out_width, 2 * RESULTS)
    step = WHICH * SLICES
    for block in range(gl.program_id(0), gl.cdiv(rows, TOKENS), gl.num_programs(0)):
        turn = block // gl.num_programs(0)
        if WHICH == 1:
            _tell(smems, bars, turn, first, sizes, block * TOKENS, CENTRED)
            mbarrier.arrive(bars[4], count=1)
        for i in range(pairs):
            acc_tf = _multiply(smems, bars, turn, step, i == pairs - 1, WHICH, ACC)
            rstd_t = smems[3].index(2 * (turn & 1)).load(ROWS)
            mean_t = rstd_t
            if CENTRED:
                mean_t = smems[3].index(2 * (turn & 1) + 1).load(ROWS)
            place = (block * TOKENS, (2 * i + WHICH) * RESULTS)
            _leave(acc_tf, (rstd_t, mean_t), sums, y_desc, y_tile, place, out_width, CENTRED)
            step += 2 * SLICES
    tma.store_wait(0)


@gluon.jit
def _produce(given):
    """Load tokens slice by slice as they are given back, and the weights of one tile after another.

    Tiles are as many for both consumers; one that lies behind the last result is read as 0.
    """
    x_desc, w_desc, smems, bars, sizes = given
    x_smem, w_smem, _, _ = smems
    x_full, x_empty, w_full, w_empty, _, _ = bars
    rows, _, out_width, _, _ = sizes
    SLICES: gl.constexpr = x_smem.shape[0]
    TOKENS: gl.constexpr = x_smem.shape[1]
    DEPTH: gl.constexpr = x_smem.shape[2]
    STAGES: gl.constexpr = w_smem.shape[0]
    RESULTS: gl.constexpr = w_smem.shape[1]
    tiles = 2 * gl.cdiv(out_width, 2 * RESULTS)
    step = 0
    for block in range(gl.program_id(0), gl.cdiv(rows, TOKENS), gl.num_programs(0)):
        turn = block // gl.num_programs(0)
        for tile in range(tiles):
            for k in range(SLICES):
                if tile == 0:
                    mbarrier.wait(x_empty.index(k), (turn & 1) ^ 1)
                    mbarrier.expect(x_full.index(k), TOKENS * DEPTH * 2)
                    place = [block * TOKENS, k * DEPTH]
                    tma.async_copy_global_to_shared(x_desc, place, x_full.index(k), x_smem.index(k))
                stage = step % STAGES
                mbarrier.wait(w_empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(w_full.index(stage), RESULTS * DEPTH * 2)
                place = [tile * RESULTS, k * DEPTH]
                tma.async_copy_global_to_shared(
                    w_desc, place, w_full.index(stage), w_smem.index(stage)
                )
                step += 1


@gluon.jit(do_not_specialize=["rows"])
def normed_linear_hopper_kernel(
    x_desc,
    w_desc,
    y_desc,
    sums,
    first,
    rows,
    width,
    out_width,
    stride_x_t,
    eps,
    SLICES: gl.constexpr,
    TOKENS: gl.constexpr,
    RESULTS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    CENTRED: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Write y. ``first`` is the first column of the tokens, ``sums`` of each row of the weights."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    x_smem = gl.allocate_shared_memory(DTYPE, [SLICES, TOKENS, DEPTH], LAYOUT)
    w_smem = gl.allocate_shared_memory(DTYPE, [STAGES, RESULTS, DEPTH], LAYOUT)
    y_smem = gl.allocate_shared_memory(DTYPE, [2, TOKENS, RESULTS // 2], LAYOUT)
    s_smem = gl.allocate_shared_memory(gl.float32, [4, TOKENS], FLAT)
    x_full = gl.allocate_shared_memory(gl.int64, [SLICES, 1], BARRIER)
    x_empty = gl.allocate_shared_memory(gl.int64, [SLICES, 1], BARRIER)
    w_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    w_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    told = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for k in gl.static_range(SLICES):
        mbarrier.init(x_full.index(k), count=1)
        mbarrier.init(x_empty.index(k), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(w_empty.index(i), count=1)
    passed = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(told, count=1)
    for i in gl.static_range(2):
        mbarrier.init(passed.index(i), count=1)
    bars = (x_full, x_empty, w_full, w_empty, told, passed)
    smems = (x_smem, w_smem, y_smem, s_smem)
    sizes = (rows, width, out_width, stride_x_t, eps)
    mine = (y_desc, sums, first, smems, bars, sizes)
    gl.warp_specialize(
        [
            (_consume, (mine, 0, CENTRED)),
            (_consume, (mine, 1, CENTRED)),
            (_produce, ((x_desc, w_desc, smems, bars, sizes),)),
        ],
        [4, 1],
        [240, 24],
    )


def tile_constants(width: int) -> dict[str, int]:
    """Return the sizes of a program.

    Args:
        width: elements of a token, as ``supports`` takes it.

    Returns:
        constants by name, without CENTRED and DTYPE; as many stages as fit beside the tokens.
    """
    slices = width // _DEPTH
    stage = _RESULTS * _DEPTH * 2 // 1024
    room = _SHARED - _BESIDE - slices * (_TOKENS * _DEPTH * 2 // 1024)
    return {
        "SLICES": slices,
        "TOKENS": _TOKENS,
        "RESULTS": _RESULTS,
        "DEPTH": _DEPTH,
        "STAGES": min(_MOST_STAGES, room // stage),
    }


def launch_forward(x_TD: Tensor, weight_FD: Tensor, sums_F: Tensor | None, *, eps: float) -> Tensor:
    """Return y_TF in the dtype of x, every row written; arguments as in ``kernel.py``."""
    (rows, width), out_width = x_TD.shape, weight_FD.shape[0]
    y_TF = x_TD.new_empty((rows, out_width))
    if y_TF.numel() == 0:
        return y_TF
    blocks = ([_TOKENS, _DEPTH], [_RESULTS, _DEPTH], [_TOKENS, _RESULTS // 2])
    programs = min(_multiprocessors(x_TD.device.index or 0), triton.cdiv(rows, _TOKENS))
    with torch.cuda.device_of(x_TD):
        normed_linear_hopper_kernel[(programs,)](
            *map(_described, (x_TD, weight_FD, y_TF), blocks),
            weight_FD if sums_F is None else sums_F,
            x_TD,
            rows,
            width,
            out_width,
            x_TD.stride(0),
            eps,
            **tile_constants(width),
            CENTRED=sums_F is not None,
            DTYPE=_DTYPES[x_TD.dtype],
            num_warps=4,
            maxnreg=_REGISTERS,
        )
    return y_TF


def _described(x: Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


@lru_cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
