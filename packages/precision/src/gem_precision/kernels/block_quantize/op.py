"""The operator ``block_quantize``: schema, kernels, fake, FLOP formula, functions.

Bytes have no derivative, so neither has an autograd formula.
"""

from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from gem_opkit.cost import Cost, register_flops
from gem_opkit.dims import check_shapes
from gem_opkit.errors import ConfigError, DeviceError, DtypeError, ShapeError, refusal
from gem_opkit.impl import Impl, resolve_impl
from gem_precision.codes import widened
from gem_precision.contract import Fp8Block
from gem_precision.elements import WIDE_BLOCK
from gem_precision.kernels.block_quantize.cost import block_quantize_cost
from gem_precision.kernels.block_quantize.reference import block_quantize_reference

_NAME = "block_quantize"
_HAS_TRITON = True
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A matrix in block FP8: a byte of E4M3 an element, and an fp32 scale a block.

    Attributes:
        elements_TD: uint8, in the layout of the matrix; ``elements_TD.view(torch.float8_e4m3fn)``
            are the numbers before scaling.
        scales: fp32 powers of two, NaN where the block holds NaN or an infinity. In blocks of 1x128
            (⌈D/128⌉, T), blocks outermost, as products read them; of 128x128 (⌈T/128⌉, ⌈D/128⌉).
        block: what shares a scale.
    """

    elements_TD: Tensor
    scales: Tensor
    block: Fp8Block


@torch.library.custom_op("gem_precision::block_quantize", mutates_args=())
def _quantize(x_TD: Tensor, block: str, turned: str, impl: str) -> tuple[Tensor, Tensor, Tensor]:
    if resolve_impl(impl, x_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_precision.kernels.block_quantize.kernel import launch_rows, launch_squares

        if block == "128x128":
            return launch_squares(x_TD, turned=turned)
        return *launch_rows(x_TD), x_TD.new_empty((0, 0), dtype=torch.uint8)
    return block_quantize_reference(x_TD, block=block, turned=turned)


@_quantize.register_fake
def _(x_TD: Tensor, block: str, turned: str, impl: str) -> tuple[Tensor, Tensor, Tensor]:
    def empty(*shape: int) -> Tensor:
        return x_TD.new_empty(shape, dtype=torch.uint8)

    rows, width = x_TD.shape
    return (
        empty(0, 0) if turned == "only" else empty(rows, width),
        x_TD.new_empty(_scales_shape(x_TD, block), dtype=torch.float32),
        empty(0, 0) if turned == "no" else empty(width, rows),
    )


def _scales_shape(matrix_TD: Tensor, block: str) -> tuple[int, int]:
    rows, width = matrix_TD.shape
    strips, blocks_d = -(-rows // WIDE_BLOCK), -(-width // WIDE_BLOCK)
    return (strips, blocks_d) if block == "128x128" else (blocks_d, rows)


def _cost(x_TD: Tensor, block: str, turned: str, *_: Any) -> Cost:
    rows, width = x_TD.shape
    size, copies = x_TD.element_size(), 2 if turned == "both" else 1
    return block_quantize_cost(
        rows=rows, width=width, element_bytes=size, block=block, copies=copies
    )


register_flops(_quantize, _cost)


def block_quantize(x_TD: Tensor, *, block: Fp8Block = "1x128", impl: Impl = "auto") -> BlockMatrix:
    """Quantise a matrix to block FP8.

        scale = 2^k of each block, the least with |x| / scale <= 448,   element = E4M3(x / scale)

    Args:
        x_TD: fp32, bf16 or fp16; any strides. No gradient flows through.
        block: ``"1x128"`` for activations and gradients, ``"128x128"`` for weights.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        bytes and scales. Ragged edges are blocks of their own, filled up with zeros.

    Raises:
        ShapeError: not a matrix.
        DtypeError: another dtype; fp64 would be rounded twice.
        ConfigError: an unknown block.
        UnsupportedError: an ``impl`` that cannot run here.

    Numerics: docs/numerics.md; byte for byte the same on every device and by every ``impl``.
    Cost: reads x once; writes a byte an element and four a block.
    Source: DeepSeek-V3 (arXiv:2412.19437).
    """
    elements_TD, scales, _ = _quantized("block_quantize", x_TD, block, "no", impl)
    return BlockMatrix(elements_TD, scales, block)


def block_quantize_both(x_TD: Tensor, *, impl: Impl = "auto") -> tuple[BlockMatrix, BlockMatrix]:
    """Quantise a matrix in squares of 128x128 and write its transposed copy in the same pass.

    Args:
        x_TD: as ``block_quantize``.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        the matrix, and the transposed one, of the same bytes and scales.

    Raises:
        ShapeError, DtypeError, UnsupportedError: as ``block_quantize``.

    Numerics: as ``block_quantize``.
    Cost: reads x once; writes two bytes an element and four a block.
    Source: as ``block_quantize``.
    """
    found = _quantized("block_quantize_both", x_TD, "128x128", "both", impl)
    elements_TD, scales, turned_DT = found
    return (
        BlockMatrix(elements_TD, scales, "128x128"),
        BlockMatrix(turned_DT, scales.T.contiguous(), "128x128"),
    )


def block_dequantize(matrix: BlockMatrix) -> Tensor:
    """Return the numbers that a matrix in block FP8 holds, in plain torch.

    Args:
        matrix: what ``block_quantize`` returned, or such bytes and scales that came from elsewhere.

    Returns:
        fp32, (T, D).

    Raises:
        ConfigError: an unknown block.
        ShapeError: elements that are no matrix, or scales of another shape than theirs.
        DtypeError: elements that are not uint8, or scales that are not fp32.
        DeviceError: elements and scales on different devices.

    Numerics: exact.
    Cost: for tests and emulation: several passes.
    Source: as ``block_quantize``.
    """
    _check_matrix("block_dequantize", matrix)
    if matrix.block == "128x128":
        return widened(matrix.elements_TD, matrix.scales, WIDE_BLOCK)
    return widened(matrix.elements_TD, matrix.scales.T, 1)


def block_quantize_untraced(x_TD: Tensor, *, impl: Impl = "auto") -> BlockMatrix:
    """Quantise in squares of 128x128 as ``block_quantize`` does, without the operator around it.

    For hooks that nothing traces, compiles or counts, and that run once a weight and gather: of the
    time of a call the operator is most where a weight is small.

    Args:
        x_TD: fp32, bf16 or fp16, a matrix.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        bytes and scales, those of ``block_quantize``.

    Raises:
        ShapeError, DtypeError, UnsupportedError: as ``block_quantize``.

    Numerics, cost, source: as ``block_quantize``.
    """
    op = "block_quantize_untraced"
    fits = x_TD.is_cuda and x_TD.ndim == 2 and x_TD.dtype in _DTYPES
    if fits and resolve_impl(impl, x_TD.device, op, has_triton=_HAS_TRITON) == "triton":
        from gem_precision.kernels.block_quantize.kernel import launch_squares

        elements_TD, scales, _ = launch_squares(x_TD.detach(), turned="no")
        return BlockMatrix(elements_TD, scales, "128x128")
    return block_quantize(x_TD, block="128x128", impl=impl)


def block_dequantize_into(out_TD: Tensor, matrix: BlockMatrix, *, impl: Impl = "auto") -> None:
    """Write the numbers that a matrix in blocks of 128x128 holds into another one, in one pass.

    Args:
        out_TD: fp32, bf16 or fp16, of the matrix's shape; rows may lie apart, elements of a row are
            neighbours. Overwritten; no gradient flows through.
        matrix: what ``block_quantize`` returned, or such bytes and scales that came from elsewhere.
        impl: who computes it; see ``gem_opkit.impl``.

    Raises:
        ShapeError: another shape, or scales of another shape than that of the blocks.
        DtypeError: another dtype, of ``out_TD`` or of the matrix.
        DeviceError: tensors on different devices.
        ConfigError: blocks of 1x128.
        UnsupportedError: an ``impl`` that cannot run here.

    Numerics: as ``block_dequantize``, rounded once to the format of ``out_TD``; bf16 holds every
        such number that is not below 2^-126.
    Cost: reads a byte an element and four a block, writes ``out_TD`` once.
    Source: as ``block_quantize``.
    """
    op = "block_dequantize_into"
    if out_TD.dtype not in _DTYPES:
        raise DtypeError(
            refusal(op, "out_TD", must="be fp32, bf16 or fp16", got=out_TD.dtype, fix="convert it")
        )
    if matrix.block != "128x128":
        raise ConfigError(
            refusal(
                op, "matrix", must="have blocks of 128x128", got=matrix.block,
                fix="take block_dequantize",
            )
        )  # fmt: skip
    _check_matrix(op, matrix)
    if out_TD.shape != matrix.elements_TD.shape or out_TD.stride(1) != 1:
        raise ShapeError(
            refusal(
                op, "out_TD",
                must=f"be {tuple(matrix.elements_TD.shape)} with whole rows",
                got=f"{tuple(out_TD.shape)} with strides {out_TD.stride()}",
                fix="pass a matrix of that shape",
            )
        )  # fmt: skip
    if out_TD.device != matrix.elements_TD.device:
        raise DeviceError(
            refusal(op, "out_TD", must=f"be on {matrix.elements_TD.device}", got=out_TD.device,
                    fix="move it")
        )  # fmt: skip
    if resolve_impl(impl, out_TD.device, op, has_triton=_HAS_TRITON) == "triton":
        from gem_precision.kernels.block_quantize.kernel import launch_widen

        elements_TD, scales = matrix.elements_TD.contiguous(), matrix.scales.contiguous()
        launch_widen(elements_TD, scales, out_TD.detach())
    else:
        out_TD.detach().copy_(block_dequantize(matrix))


def _quantized(
    op: str, x_TD: Tensor, block: str, turned: str, impl: Impl
) -> tuple[Tensor, Tensor, Tensor]:
    check_shapes(op, x_TD=x_TD)
    if x_TD.dtype not in _DTYPES:
        raise DtypeError(
            refusal(op, "x_TD", must="be fp32, bf16 or fp16", got=x_TD.dtype, fix="convert it")
        )
    _check_block(op, block)
    chosen = resolve_impl(impl, x_TD.device, op, has_triton=_HAS_TRITON)
    return torch.ops.gem_precision.block_quantize(x_TD.detach(), block, turned, chosen)


def _check_block(op: str, block: str) -> None:
    if block not in get_args(Fp8Block):
        known = ", ".join(get_args(Fp8Block))
        raise ConfigError(
            refusal(op, "block", must=f"be one of {known}", got=block, fix="take one of these")
        )


def _check_matrix(op: str, matrix: BlockMatrix) -> None:
    """Refuse bytes and scales that do not fit together: a kernel would read past the scales."""
    elements_TD, scales = matrix.elements_TD, matrix.scales
    # By hand: this runs in the hooks of every gather.
    if elements_TD.ndim != 2:
        raise ShapeError(
            refusal(op, "elements_TD", must="be a matrix", got=tuple(elements_TD.shape),
                    fix="use block_quantize")
        )  # fmt: skip
    _check_block(op, matrix.block)
    for name, tensor, dtype in (
        ("elements_TD", elements_TD, torch.uint8),
        ("scales", scales, torch.float32),
    ):
        if tensor.dtype != dtype:
            raise DtypeError(
                refusal(op, name, must=f"be {dtype}", got=tensor.dtype, fix="use block_quantize")
            )
    expected = _scales_shape(elements_TD, matrix.block)
    if tuple(scales.shape) != expected:
        raise ShapeError(
            refusal(op, "scales", must=f"have the shape {expected}", got=tuple(scales.shape),
                    fix=f"elements are {tuple(elements_TD.shape)} in blocks of {matrix.block}")
        )  # fmt: skip
    if scales.device != elements_TD.device:
        raise DeviceError(
            refusal(op, "scales", must=f"be on {elements_TD.device}", got=scales.device,
                    fix="move them")
        )  # fmt: skip
