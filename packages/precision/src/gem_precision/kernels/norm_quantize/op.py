"""The operator ``norm_quantize``: schema, kernels, fake, FLOP formula, functions.

Bytes have no derivative, so it has no autograd formula; ``gem_precision.prenorm`` is the layer
that computes on them and differentiates the norm.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gem_opkit.cost import Cost, register_flops
from gem_opkit.dims import check_shapes
from gem_opkit.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    UnsupportedError,
    refusal,
)
from gem_opkit.impl import Impl, resolve_impl
from gem_precision.contract import MxBlock, MxDirection, MxElement, MxScaling
from gem_precision.elements import BLOCK, WIDE_BLOCK
from gem_precision.kernels.block_quantize.op import BlockMatrix
from gem_precision.kernels.mx_quantize.op import MxMatrix
from gem_precision.kernels.norm_quantize.cost import norm_quantize_cost
from gem_precision.kernels.norm_quantize.reference import norm_quantize_reference
from gem_precision.kernels.row_norm.op import WIDEST

_NAME = "norm_quantize"
_HAS_TRITON = True
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NormKind = Literal["rms", "layer"]


@torch.library.custom_op("gem_precision::norm_quantize", mutates_args=())
def _quantize(
    x_TD: Tensor,
    before_TD: Tensor | None,
    after_TD: Tensor | None,
    gain_D: Tensor | None,
    centred: bool,  # noqa: FBT001 - a schema has no keyword-only flags here
    eps: float,
    scaling: str,
    element: str,
    along: str,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = (x_TD, before_TD, after_TD, gain_D)
    given: dict[str, Any] = {"centred": centred, "eps": eps, "scaling": scaling}
    given |= {"element": element, "along": along}
    if resolve_impl(impl, x_TD.device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_precision.kernels.norm_quantize.kernel import launch_norm_quantize

        return launch_norm_quantize(*inputs, **given)
    return norm_quantize_reference(*inputs, out_dtype=x_TD.dtype, **given)


@_quantize.register_fake
def _(
    x_TD: Tensor,
    before_TD: Tensor | None,
    after_TD: Tensor | None,
    gain_D: Tensor | None,
    centred: bool,  # noqa: FBT001
    eps: float,
    scaling: str,
    element: str,
    along: str,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def empty(*shape: int) -> Tensor:
        return x_TD.new_empty(shape, dtype=torch.uint8)

    rows, width = x_TD.shape
    if scaling == "fp8_block":
        scales = x_TD.new_empty((-(-width // WIDE_BLOCK), rows), dtype=torch.float32)
        return empty(rows, width), scales, empty(0, 0), empty(0, 0)
    strips, blocks = -(-rows // BLOCK), -(-width // BLOCK)
    by_rows, by_columns = along != "columns", along in ("columns", "both")
    return (
        empty(rows, width) if by_rows else empty(0, 0),
        empty(strips if along == "square" else rows, blocks) if by_rows else empty(0, 0),
        empty(rows, width) if by_columns else empty(0, 0),
        empty(strips, width) if by_columns else empty(0, 0),
    )


def _cost(
    x_TD: Tensor, before_TD: Any, after_TD: Any, gain_D: Any, *rest: Any
) -> Cost:  # fmt: skip
    rows, width = x_TD.shape
    return norm_quantize_cost(
        rows=rows,
        width=width,
        element_bytes=x_TD.element_size(),
        along="block" if rest[2] == "fp8_block" else rest[4],
        read=1 + (before_TD is not None) + (after_TD is not None),
        affine=gain_D is not None,
    )


register_flops(_quantize, _cost)


def norm_quantize(
    x_TD: Tensor,
    *,
    kind: NormKind = "rms",
    before_TD: Tensor | None = None,
    after_TD: Tensor | None = None,
    gain_D: Tensor | None = None,
    eps: float = 1e-6,
    scaling: MxScaling = "mxfp8_rceil",
    element: MxElement = "e4m3",
    block: MxBlock = "1x32",
    along: MxDirection = "rows",
    impl: Impl = "auto",
) -> MxMatrix:
    """Normalise rows and quantise them to MXFP8, in one pass where that gives the same bytes.

        y = norm(x + before) · gain + after      elements, scales = Q(y)

    Args:
        x_TD: fp32, bf16 or fp16. No gradient flows through.
        kind: ``"rms"`` divides a row by its root mean square, ``"layer"`` takes its mean off first.
        before_TD: added first; dtype and shape of x.
        after_TD: added last; dtype and shape of x.
        gain_D: a gain for each column, floating point.
        eps: added to the mean square or the variance, above 0.
        scaling: ``"mxfp8_rceil"`` or ``"mxfp8_floor"``, as ``mx_quantize``.
        element: ``"e4m3"`` or ``"e5m2"``.
        block: ``"1x32"``, or ``"32x32"`` for squares.
        along: the dim in which blocks of 1x32 lie; a square has none, and takes ``"rows"``.
        impl: who computes it; see ``gem_opkit.impl``. The kernels hold rows of up to 16,384
            elements; ``auto`` gives wider ones to the reference.

    Returns:
        bytes and scales.

    Raises:
        ShapeError: not a matrix, or another shape than that of x.
        DtypeError: another dtype, or residuals of another dtype than x.
        DeviceError: tensors on different devices.
        ConfigError: an unknown word, an eps that is not above 0.
        UnsupportedError: an ``impl`` that cannot run here; rows of more than 16,384 elements with
            ``impl="triton"``.

    Numerics: y is rounded to the dtype of x, so that the bytes are those of ``rms_norm`` or
        ``layer_norm`` and ``mx_quantize`` one after the other, of the same ``impl``.
    Cost: reads every input once, writes a byte an element and a byte a block; the norm itself is
        never in memory. Blocks of columns and squares read each strip of 32 rows once more, from
        the cache or, on Hopper, from shared memory. LayerNorm with blocks of columns or squares
        takes two kernels, and writes the norm, where the width is no power of two: in one, its mean
        would have another last bit.
    Source: Meta's GEM training article, for quantising inside the norm.
    """
    if block == "32x32" and along != "rows":
        raise ConfigError(
            refusal(_NAME, "along", must='be "rows" for blocks of 32x32', got=along,
                    fix="leave it out: a square serves both orientations")
        )  # fmt: skip
    _check_word(_NAME, "block", block, get_args(MxBlock))
    _check_word(_NAME, "along", along, get_args(MxDirection))
    where = "square" if block == "32x32" else along
    inputs = (x_TD, before_TD, after_TD, gain_D)
    found = _quantized(_NAME, inputs, kind, eps, (scaling, element, where), impl)
    pair = found[2:] if where == "columns" else found[:2]
    return MxMatrix(pair[0], pair[1], element, where)


def norm_quantize_both(
    x_TD: Tensor,
    *,
    kind: NormKind = "rms",
    before_TD: Tensor | None = None,
    after_TD: Tensor | None = None,
    gain_D: Tensor | None = None,
    eps: float = 1e-6,
    scaling: MxScaling = "mxfp8_rceil",
    element: MxElement = "e4m3",
    impl: Impl = "auto",
) -> tuple[MxMatrix, MxMatrix]:
    """Normalise rows and quantise them by rows and by columns.

    Args:
        x_TD: as ``norm_quantize``.
        kind: as ``norm_quantize``.
        before_TD: as ``norm_quantize``.
        after_TD: as ``norm_quantize``.
        gain_D: as ``norm_quantize``.
        eps: as ``norm_quantize``.
        scaling: as ``norm_quantize``.
        element: as ``norm_quantize``.
        impl: as ``norm_quantize``.

    Returns:
        the matrix by rows, and by columns.

    Raises:
        ShapeError, DtypeError, DeviceError, ConfigError, UnsupportedError: as ``norm_quantize``.

    Numerics: as ``norm_quantize``; both orientations come from y, neither from the other.
    Cost: as ``norm_quantize``, with two bytes an element. Rows of more than 512 elements take two
        kernels, which are faster there; on Hopper only what its own kernel does not take.
    Source: as ``norm_quantize``.
    """
    inputs = (x_TD, before_TD, after_TD, gain_D)
    found = _quantized("norm_quantize_both", inputs, kind, eps, (scaling, element, "both"), impl)
    by_rows = MxMatrix(found[0], found[1], element, "rows")
    return by_rows, MxMatrix(found[2], found[3], element, "columns")


def norm_block_quantize(
    x_TD: Tensor,
    *,
    kind: NormKind = "rms",
    before_TD: Tensor | None = None,
    after_TD: Tensor | None = None,
    gain_D: Tensor | None = None,
    eps: float = 1e-6,
    impl: Impl = "auto",
) -> BlockMatrix:
    """Normalise rows and quantise them to block FP8, in blocks of 1x128, in one pass.

    Args:
        x_TD: as ``norm_quantize``.
        kind: as ``norm_quantize``.
        before_TD: as ``norm_quantize``.
        after_TD: as ``norm_quantize``.
        gain_D: as ``norm_quantize``.
        eps: as ``norm_quantize``.
        impl: as ``norm_quantize``.

    Returns:
        bytes and scales, as ``block_quantize`` gives them.

    Raises:
        ShapeError, DtypeError, DeviceError, ConfigError, UnsupportedError: as ``norm_quantize``.

    Numerics: the bytes of the norm and ``block_quantize`` one after the other.
    Cost: reads every input once, writes a byte an element and four a block.
    Source: as ``norm_quantize``.
    """
    inputs = (x_TD, before_TD, after_TD, gain_D)
    op = "norm_block_quantize"
    elements_TD, scales, _, _ = _quantized(op, inputs, kind, eps, _WIDE, impl)
    return BlockMatrix(elements_TD, scales, "1x128")


_WIDE = ("fp8_block", "e4m3", "rows")


def _quantized(
    op: str,
    inputs: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    kind: str,
    eps: float,
    form: tuple[str, str, str],
    impl: Impl,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x_TD, before_TD, after_TD, gain_D = inputs
    check_shapes(op, x_TD=x_TD, before_TD=before_TD, after_TD=after_TD, gain_D=gain_D)
    if x_TD.dtype not in _DTYPES:
        raise DtypeError(
            refusal(op, "x_TD", must="be fp32, bf16 or fp16", got=x_TD.dtype, fix="convert it")
        )
    for name, tensor in (("before_TD", before_TD), ("after_TD", after_TD), ("gain_D", gain_D)):
        if tensor is not None:
            _check_beside(op, name, tensor, x_TD)
    _check_word(op, "kind", kind, get_args(NormKind))
    if form is not _WIDE:
        _check_word(op, "scaling", form[0], get_args(MxScaling))
        _check_word(op, "element", form[1], get_args(MxElement))
    if not eps > 0:
        raise ConfigError(
            refusal(op, "eps", must="be above 0", got=eps, fix="it keeps a row of zeros finite")
        )
    # Not one expression: of a width that a graph leaves open it would make a symbol.
    fits = True
    if x_TD.shape[1] > WIDEST:
        fits = False
    if impl == "triton" and not fits:
        raise UnsupportedError(
            refusal(op, "x_TD", must=f"have rows of at most {WIDEST} elements for a Triton kernel",
                    got=x_TD.shape[1], fix='use impl="reference"')
        )  # fmt: skip
    chosen = resolve_impl(impl, x_TD.device, op, has_triton=_HAS_TRITON and fits)
    given = [None if t is None else t.detach() for t in inputs]
    return torch.ops.gem_precision.norm_quantize(*given, kind == "layer", eps, *form, chosen)


def _check_beside(op: str, name: str, tensor: Tensor, x_TD: Tensor) -> None:
    # A gain is widened by itself; residuals of another dtype would make y another one.
    fits = tensor.dtype.is_floating_point if name == "gain_D" else tensor.dtype == x_TD.dtype
    if not fits:
        wanted = "floating point" if name == "gain_D" else f"{x_TD.dtype} like x_TD"
        raise DtypeError(
            refusal(op, name, must=f"be {wanted}", got=tensor.dtype, fix="convert it")
        )  # fmt: skip
    if tensor.device != x_TD.device:
        raise DeviceError(
            refusal(op, name, must=f"be on {x_TD.device}", got=tensor.device, fix="move it")
        )


def _check_word(op: str, name: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise ConfigError(
            refusal(op, name, must=f"be one of {', '.join(known)}", got=word,
                    fix="take one of these")
        )  # fmt: skip
