"""The operator ``tensor_norms``: schema, kernels, fake, FLOP formula, function."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_opkit.cost import Cost, register_flops
from gem_opkit.errors import DeviceError, DtypeError, ShapeError, UnsupportedError, refusal
from gem_opkit.impl import Impl, resolve_impl
from gem_precision.kernels.tensor_norms.cost import tensor_norms_cost
from gem_precision.kernels.tensor_norms.reference import tensor_norms_reference

_NAME = "tensor_norms"
_HAS_TRITON = True
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op("gem_precision::tensor_norms", mutates_args=())
def _norms(tensors: Sequence[Tensor], impl: str) -> Tensor:
    if resolve_impl(impl, tensors[0].device, _NAME, has_triton=_HAS_TRITON) == "triton":
        from gem_precision.kernels.tensor_norms.kernel import launch

        return launch(tensors)
    return tensor_norms_reference(tensors)


@_norms.register_fake
def _(tensors: Sequence[Tensor], impl: str) -> Tensor:
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return tensors[0].new_empty(len(tensors), dtype=wide)


def _cost(tensors: Sequence[Tensor], *_: object) -> Cost:
    total = Cost(flops=0, bytes=0)
    for tensor in tensors:
        total = total + tensor_norms_cost(
            elements=tensor.numel(), element_bytes=tensor.element_size()
        )
    return total


register_flops(_norms, _cost)


def tensor_norms(tensors: Sequence[Tensor], *, impl: Impl = "auto") -> Tensor:
    """Return the L2 norm of each of several tensors, such as the gradients of a step.

        norm[i] = sqrt(Σ x²) over all elements x of tensor i

    Args:
        tensors: at least one; fp32, bf16, fp16 or fp64, contiguous, any shapes, on one device. They
            are not differentiated.
        impl: who computes it; see ``gem_opkit.impl``. The kernels take no fp64: ``auto`` gives it
            to the reference.

    Returns:
        norms, (len(tensors),), fp32, or fp64 where one of the tensors is; 0 for a tensor without
        elements. No host waits for them.

    Raises:
        ShapeError: no tensor.
        DtypeError: a tensor that is not of floating point.
        DeviceError: tensors on different devices.
        UnsupportedError: tensors that are not contiguous or require a gradient, fp64 with
            ``impl="triton"``, or an ``impl`` that cannot run here.

    Numerics: squares are added in fp32, in an order that the sizes alone decide: the same bits in
        every run. The norm is inf where squares exceed fp32.
    Cost: reads every element once.
    """
    if not tensors:
        raise ShapeError(
            refusal(_NAME, "tensors", must="hold at least one", got=0, fix="leave the call out")
        )
    for i, tensor in enumerate(tensors):
        _check(f"tensors[{i}]", tensor, tensors[0])
    is_double = any(t.dtype == torch.float64 for t in tensors)
    if is_double and impl == "triton":
        raise UnsupportedError(
            refusal(
                _NAME,
                "tensors",
                must="be narrower than float64 for a Triton kernel",
                got=torch.float64,
                fix='use impl="reference"',
            )
        )
    has_triton = _HAS_TRITON and not is_double
    chosen = resolve_impl(impl, tensors[0].device, _NAME, has_triton=has_triton)
    return torch.ops.gem_precision.tensor_norms([t.detach() for t in tensors], chosen)


def _check(name: str, tensor: Tensor, first: Tensor) -> None:
    if tensor.dtype not in (*_DTYPES, torch.float64):
        raise DtypeError(
            refusal(_NAME, name, must="be floating point", got=tensor.dtype, fix="convert it")
        )
    if tensor.device != first.device:
        raise DeviceError(
            refusal(_NAME, name, must=f"be on {first.device}", got=tensor.device, fix="move it")
        )
    if not tensor.is_contiguous():
        raise UnsupportedError(
            refusal(_NAME, name, must="be contiguous", got=tensor.stride(), fix="copy it")
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            refusal(
                _NAME,
                name,
                must="require no gradient",
                got="one that requires it",
                fix="detach it, or use torch.linalg.vector_norm",
            )
        )
