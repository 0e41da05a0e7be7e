"""Fixed tests 4 and 5 of every operator that has a ``kernel.py``.

4 ``check_interpreted_kernel`` runs the Triton kernel on the CPU in the interpreter, 5
``check_kernel_on_gpu`` on a CUDA device. Both compare the operator's kernel with the autograd of
its plain reference under the error budget, and both count launches: a kernel that was replaced
by something else in silence is a failure.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gem_opkit.budget import (
    CheckFailure,
    Run,
    check_run_budget,
    differentiable,
    fresh,
    run_with_gradients,
    tensors_in,
    upstream_like,
)
from gem_opkit.errors import ConfigError
from gem_opkit.poison import poisoned_empty


@dataclass(slots=True)
class Launches:
    """Number of Triton kernels started inside a block of ``count_launches``."""

    count: int = 0


@contextmanager
def count_launches() -> Iterator[Launches]:
    """Count the launches of Triton kernels, compiled or interpreted.

    Yields:
        the running count.
    """
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    launches = Launches()
    originals = [(GridExecutor, "__call__"), (JITFunction, "run")]
    saved = [(owner, name, owner.__dict__[name]) for owner, name in originals]

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            launches.count += 1
            return original(self, *args, **kwargs)

        return call

    try:
        for owner, name, original in saved:
            setattr(owner, name, counting(original))
        yield launches
    finally:
        for owner, name, original in saved:
            setattr(owner, name, original)


def check_interpreted_kernel(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Any],
) -> None:
    """Fixed test 4: the Triton kernel in the interpreter, forward and every gradient, in fp32.

    Args:
        fn: the public operator; called with ``*inputs, impl="triton"``.
        reference: ``<op>_reference``: plain torch, called with ``*inputs`` and differentiated by
            autograd, so that the written backward meets something independent.
        inputs: positional arguments on the CPU; floats are fp32 (the interpreter is silently
            wrong in bf16). Use few, large blocks: its cost is per program.

    Raises:
        CheckFailure: over budget, or no kernel was launched forward or backward.
        ConfigError: the interpreter is off, or an input is not fp32.

    Example:
        ``check_interpreted_kernel(jagged_mean, jagged_mean_oracle, (values_TD, layout))``
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "check_interpreted_kernel: TRITON_INTERPRET must be 1; "
            f"got {os.environ.get('TRITON_INTERPRET')!r}; mark the test 'interpreter' and run "
            "with -p gem_opkit.testing"
        )
    _demand_interpreted_triton()
    for index, value in enumerate(inputs):
        if isinstance(value, Tensor) and value.dtype in (
            torch.bfloat16,
            torch.float16,
            torch.float64,
        ):
            raise ConfigError(
                f"check_interpreted_kernel: input {index} must be fp32; got {value.dtype}; "
                "other precisions are for the GPU"
            )
    _check_against_reference(fn, reference, inputs, what="")


def _demand_interpreted_triton() -> None:
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    # tl.zeros is decorated like a kernel; it shows what the variable was at triton's import.
    if isinstance(tl.zeros, JITFunction):
        raise ConfigError(
            "check_interpreted_kernel: TRITON_INTERPRET must be 1 before triton is imported; "
            "it was imported earlier; run with -p gem_opkit.testing or set it in the environment"
        )


def check_kernel_on_gpu(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    band_dtype: torch.dtype | None = None,
) -> None:
    """Fixed test 5: the Triton kernel on a CUDA device, forward and every gradient.

    The budget makes fp32 tight (no TF32) and lets bf16 and fp8 be as wrong as their rounding
    makes an honest reference. Afterwards one call runs under
    ``torch.cuda.set_sync_debug_mode("error")``: no operator reads a device tensor on the host.

    Args:
        fn: the public operator; called with ``*inputs, impl="triton"``.
        reference: ``<op>_reference``, as in ``check_interpreted_kernel``.
        inputs: positional arguments, moved to the device; floats are cast to each dtype.
        dtypes: precisions of the inputs.
        band_dtype: lowest precision inside the kernel, where it is lower than its inputs.

    Raises:
        CheckFailure: over budget, no kernel launched, or a synchronisation with the device.

    Example:
        ``check_kernel_on_gpu(jagged_mean, jagged_mean_oracle, (values_TD, layout))``
    """
    tf32 = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for dtype in dtypes:
            cast = fresh(inputs, dtype=dtype, device="cuda")
            _check_against_reference(fn, reference, cast, what=f"{dtype}: ", band_dtype=band_dtype)
            _check_no_sync(fn, cast, what=f"{dtype}: ")
    finally:
        torch.set_float32_matmul_precision(tf32)


def _check_against_reference(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    what: str,
    band_dtype: torch.dtype | None = None,
) -> None:
    exact = run_with_gradients(reference, fresh(inputs, dtype=torch.float64))
    for index, output in enumerate(exact.outputs):
        if output.dtype.is_floating_point and output.dtype is not torch.float64:
            raise CheckFailure(
                f"{what}output {index} of the reference is {output.dtype} for fp64 inputs; "
                "it must compute and return fp64 there, it is the exact value of the budget"
            )
    low = run_with_gradients(reference, fresh(inputs))
    with poisoned_empty("all"):
        kernel = _run_kernel(fn, fresh(inputs), what=what)
    check_run_budget(kernel, low, exact, what=what, band_dtype=band_dtype)


def _run_kernel(fn: Callable[..., Any], inputs: Sequence[Any], *, what: str) -> Run:
    """Run forward and backward and demand a launch in each."""
    forward_launches = 0

    with count_launches() as launches:

        def launched(*args: Any) -> Any:
            nonlocal forward_launches
            result = fn(*args, impl="triton")
            forward_launches = launches.count
            return result

        run = run_with_gradients(launched, inputs)
    if forward_launches == 0:
        raise CheckFailure(f'{what}impl="triton" launched no Triton kernel forward')
    if run.gradients and launches.count == forward_launches:
        raise CheckFailure(f'{what}impl="triton" launched no Triton kernel backward')
    return run


def _check_no_sync(fn: Callable[..., Any], inputs: Sequence[Any], *, what: str) -> None:
    args = fresh(inputs)
    needs_gradient = any(isinstance(a, Tensor) and a.requires_grad for a in args)
    leaves = differentiable(args, "check_kernel_on_gpu") if needs_gradient else []
    upstream = [
        upstream_like(out) for out in tensors_in(fn(*args, impl="triton")) if out.requires_grad
    ]
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = tensors_in(fn(*args, impl="triton"))
        roots = [out for out in outputs if out.requires_grad]
        if leaves:
            torch.autograd.grad(roots, leaves, upstream, allow_unused=True)
    except RuntimeError as error:
        raise CheckFailure(f"{what}synchronised with the device: {error}") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
