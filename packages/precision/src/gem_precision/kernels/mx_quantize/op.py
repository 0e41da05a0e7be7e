"""The operator ``mx_quantize`` and its inverse: schema, kernels, fakes, FLOP formulas, functions.

Bytes have no derivative, so neither has an autograd formula.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from gem_opkit.cost import Cost, register_flops
from gem_opkit.dims import check_shapes
from gem_opkit.errors import ConfigError, DeviceError, DtypeError, ShapeError, refusal
from gem_opkit.impl import Impl, resolve_impl
from gem_precision.contract import MxBlock, MxDirection, MxElement, MxScaling
from gem_precision.elements import BLOCK
from gem_precision.kernels.mx_quantize.cost import mx_dequantize_cost, mx_quantize_cost
from gem_precision.kernels.mx_quantize.reference import (
    mx_dequantize_reference,
    mx_quantize_reference,
)

_HAS_TRITON = True
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class MxMatrix:
    """A matrix in MXFP8: a byte an element, and a power of two for each block.

    Attributes:
        elements_TD: uint8, in the layout of the matrix; ``elements_TD.view(torch.float8_e4m3fn)``
            or ``torch.float8_e5m2`` are the same bytes as numbers before scaling.
        scales: uint8, E8M0: code s means 2^(s − 127), 255 means NaN. (T, ⌈D/32⌉) by rows,
            (⌈T/32⌉, D) by columns, (⌈T/32⌉, ⌈D/32⌉) for squares.
        element: format of an element.
        along: ``"rows"``, ``"columns"`` or ``"square"``: how a block lies.
    """

    elements_TD: Tensor
    scales: Tensor
    element: MxElement
    along: str


@torch.library.custom_op("gem_precision::mx_quantize", mutates_args=())
def _quantize(
    x_TD: Tensor, scaling: str, element: str, along: str, seed: int | None, impl: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given: dict[str, Any] = {"scaling": scaling, "element": element, "along": along, "seed": seed}
    if resolve_impl(impl, x_TD.device, "mx_quantize", has_triton=_HAS_TRITON) == "triton":
        from gem_precision.kernels.mx_quantize.kernel import launch_quantize

        return launch_quantize(x_TD, **given)
    return mx_quantize_reference(x_TD, **given)


@_quantize.register_fake
def _(
    x_TD: Tensor, scaling: str, element: str, along: str, seed: int | None, impl: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def empty(*shape: int) -> Tensor:
        return x_TD.new_empty(shape, dtype=torch.uint8)

    rows, width = x_TD.shape
    by_rows = along != "columns"
    by_columns = along in ("columns", "both")
    return (
        empty(rows, width) if by_rows else empty(0, 0),
        empty(*_scales_shape(x_TD, "rows" if along == "both" else along))
        if by_rows
        else empty(0, 0),
        empty(rows, width) if by_columns else empty(0, 0),
        empty(*_scales_shape(x_TD, "columns")) if by_columns else empty(0, 0),
    )


@torch.library.custom_op("gem_precision::mx_dequantize", mutates_args=())
def _dequantize(
    elements_TD: Tensor, scales: Tensor, element: str, along: str, dtype: torch.dtype, impl: str
) -> Tensor:
    given: dict[str, Any] = {"element": element, "along": along, "dtype": dtype}
    if resolve_impl(impl, elements_TD.device, "mx_dequantize", has_triton=_HAS_TRITON) == "triton":
        from gem_precision.kernels.mx_quantize.kernel import launch_dequantize

        return launch_dequantize(elements_TD, scales, **given)
    return mx_dequantize_reference(elements_TD, scales, **given)


@_dequantize.register_fake
def _(
    elements_TD: Tensor, scales: Tensor, element: str, along: str, dtype: torch.dtype, impl: str
) -> Tensor:
    return elements_TD.new_empty(elements_TD.shape, dtype=dtype)


def _scales_shape(matrix_TD: Tensor, along: str) -> tuple[int, int]:
    rows, width = matrix_TD.shape
    strips, blocks = -(-rows // BLOCK), -(-width // BLOCK)
    return {"rows": (rows, blocks), "columns": (strips, width), "square": (strips, blocks)}[along]


def _quantize_cost(x_TD: Tensor, scaling: str, element: str, along: str, *_: Any) -> Cost:
    rows, width = x_TD.shape
    size = x_TD.element_size()
    return mx_quantize_cost(rows=rows, width=width, element_bytes=size, along=along)


def _dequantize_cost(
    elements_TD: Tensor, scales: Tensor, element: str, along: str, dtype: torch.dtype, *_: Any
) -> Cost:
    rows, width = elements_TD.shape
    size = dtype.itemsize
    return mx_dequantize_cost(rows=rows, width=width, along=along, element_bytes=size)


register_flops(_quantize, _quantize_cost)
register_flops(_dequantize, _dequantize_cost)


def mx_quantize(
    x_TD: Tensor,
    *,
    scaling: MxScaling = "mxfp8_rceil",
    element: MxElement = "e4m3",
    block: MxBlock = "1x32",
    along: MxDirection = "rows",
    seed: int | None = None,
    impl: Impl = "auto",
) -> MxMatrix:
    """Quantise a matrix to MXFP8 in one orientation, or once for both.

        scale = 2^(s − 127) of each block,   element = round(x / scale), cut to the largest

    A product needs both of its matrices in blocks along the dim that it sums over: ``"rows"`` where
    that is the last dim, ``"columns"`` where it is the first. A square block serves both.

    Args:
        x_TD: fp32, bf16 or fp16; any strides. It is taken as it is: no gradient flows through.
        scaling: ``"mxfp8_rceil"`` rounds the scale up, so that nothing is cut; ``"mxfp8_floor"``
            is the rule of the OCP, which cuts what is above the largest element.
        element: ``"e4m3"``, up to 448, or ``"e5m2"``, up to 57,344.
        block: ``"1x32"``, or ``"32x32"`` for squares.
        along: the dim in which blocks of 1x32 lie; a square has none, and takes ``"rows"``.
        seed: 64 bits from which elements are rounded up or down by chance, so that each is right on
            average; the same seed gives the same bytes. None rounds to the nearest.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        bytes and scales. Ragged edges are blocks of their own, filled up with zeros.

    Raises:
        ShapeError: not a matrix.
        DtypeError: another dtype; fp64 would be rounded twice.
        ConfigError: an unknown word, or ``along="columns"`` with squares.
        UnsupportedError: an ``impl`` that cannot run here.

    Numerics: docs/numerics.md, byte for byte the same on every device and by every ``impl``. Of a
        block that holds NaN or an infinity nothing is kept: scale 255, every element NaN.
    Cost: reads x once; writes a byte an element and a byte a block.
    Source: OCP Microscaling Formats 1.0; Mishra et al. 2025 (arXiv:2506.08027) for rounding up.
    """
    _check_words("mx_quantize", scaling=scaling, element=element, block=block, along=along)
    if block == "32x32" and along != "rows":
        raise ConfigError(
            refusal("mx_quantize", "along", must='be "rows" for blocks of 32x32', got=along,
                    fix="leave it out: a square serves both orientations")
        )  # fmt: skip
    where = "square" if block == "32x32" else along
    found = _quantized("mx_quantize", x_TD, scaling, element, where, seed, impl)
    pair = found[2:] if where == "columns" else found[:2]
    return MxMatrix(pair[0], pair[1], element, where)


def mx_quantize_both(
    x_TD: Tensor,
    *,
    scaling: MxScaling = "mxfp8_rceil",
    element: MxElement = "e4m3",
    seed: int | None = None,
    impl: Impl = "auto",
) -> tuple[MxMatrix, MxMatrix]:
    """Quantise a matrix in blocks of 1x32, by rows and by columns, in one pass.

    Args:
        x_TD: as ``mx_quantize``.
        scaling: as ``mx_quantize``.
        element: as ``mx_quantize``.
        seed: as ``mx_quantize``; the two orientations draw different words.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        the matrix by rows, and by columns; the bytes of two calls of ``mx_quantize``.

    Raises:
        ShapeError, DtypeError, ConfigError, UnsupportedError: as ``mx_quantize``.

    Numerics: as ``mx_quantize``; both come from x, neither from the other.
    Cost: reads x once; writes two bytes an element, and a byte a block of each orientation.
    Source: as ``mx_quantize``.
    """
    _check_words("mx_quantize_both", scaling=scaling, element=element)
    found = _quantized("mx_quantize_both", x_TD, scaling, element, "both", seed, impl)
    by_rows = MxMatrix(found[0], found[1], element, "rows")
    return by_rows, MxMatrix(found[2], found[3], element, "columns")


def mx_dequantize(
    matrix: MxMatrix, *, dtype: torch.dtype = torch.float32, impl: Impl = "auto"
) -> Tensor:
    """Return the numbers that an MXFP8 matrix holds.

    Args:
        matrix: what ``mx_quantize`` returned, or bytes and scales from elsewhere.
        dtype: fp32, bf16 or fp16: of the result, which no wider copy precedes.
        impl: who computes it; see ``gem_opkit.impl``.

    Returns:
        (T, D), contiguous.

    Raises:
        ShapeError: elements that are no matrix, or scales of another shape than theirs.
        DtypeError: bytes that are not uint8, or another dtype of the result.
        DeviceError: elements and scales on different devices.
        ConfigError: an unknown word.
        UnsupportedError: an ``impl`` that cannot run here.

    Numerics: exact in fp32, and in bf16 from 2^-133 up; else rounded once to the nearest even. What
        is beyond the dtype becomes its largest finite number. A scale of 255 and an
        element that is NaN give NaN; an infinite E5M2 element, which ``mx_quantize`` never writes,
        stays infinite.
    Cost: reads bytes and scales once, writes the result once.
    Source: OCP Microscaling Formats 1.0.
    """
    op = "mx_dequantize"
    elements_TD, scales = matrix.elements_TD, matrix.scales
    check_shapes(op, elements_TD=elements_TD)
    _check_words(op, element=matrix.element)
    if matrix.along not in ("rows", "columns", "square"):
        raise ConfigError(
            refusal(op, "along", must='be "rows", "columns" or "square"', got=matrix.along,
                    fix="say how the blocks of the scales lie")
        )  # fmt: skip
    for name, tensor in (("elements_TD", elements_TD), ("scales", scales)):
        if tensor.dtype != torch.uint8:
            raise DtypeError(
                refusal(op, name, must="be uint8", got=tensor.dtype, fix="use view(torch.uint8)")
            )
    if dtype not in _DTYPES:
        raise DtypeError(
            refusal(op, "dtype", must="be fp32, bf16 or fp16", got=dtype, fix="convert the result")
        )
    expected = _scales_shape(elements_TD, matrix.along)
    if tuple(scales.shape) != expected:
        raise ShapeError(
            refusal(op, "scales", must=f"have the shape {expected}", got=tuple(scales.shape),
                    fix=f"elements are {tuple(elements_TD.shape)}, blocks lie by {matrix.along}")
        )  # fmt: skip
    if scales.device != elements_TD.device:
        raise DeviceError(
            refusal(op, "scales", must=f"be on {elements_TD.device}", got=scales.device,
                    fix="move them")
        )  # fmt: skip
    chosen = resolve_impl(impl, elements_TD.device, op, has_triton=_HAS_TRITON)
    return torch.ops.gem_precision.mx_dequantize(
        elements_TD, scales, matrix.element, matrix.along, dtype, chosen
    )


def _quantized(
    op: str, x_TD: Tensor, scaling: str, element: str, along: str, seed: int | None, impl: Impl
) -> Sequence[Tensor]:
    check_shapes(op, x_TD=x_TD)
    if x_TD.dtype not in _DTYPES:
        raise DtypeError(
            refusal(op, "x_TD", must="be fp32, bf16 or fp16", got=x_TD.dtype, fix="convert it")
        )
    chosen = resolve_impl(impl, x_TD.device, op, has_triton=_HAS_TRITON)
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise ConfigError(
            refusal(op, "seed", must="be an integer of 64 bits", got=seed, fix="take a smaller one")
        )
    return torch.ops.gem_precision.mx_quantize(x_TD.detach(), scaling, element, along, seed, chosen)


_WORDS = {
    "scaling": get_args(MxScaling),
    "element": get_args(MxElement),
    "block": get_args(MxBlock),
    "along": get_args(MxDirection),
}


def _check_words(op: str, **given: str) -> None:
    for name, word in given.items():
        if word not in _WORDS[name]:
            known = ", ".join(_WORDS[name])
            raise ConfigError(
                refusal(op, name, must=f"be one of {known}", got=word, fix="take one of these")
            )
