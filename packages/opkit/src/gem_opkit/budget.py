"""Comparing results: the error budget for kernels, and equality up to rounding for the rest.

No test chooses a tolerance. A kernel may be at most twice as wrong as an honest low-precision
reference, plus a rounding band, both measured against fp64:

    err(kernel, fp64) <= 2 * (err(low-precision reference, fp64) + rounding band)

It holds for the largest and for the root-mean-square error of every output and gradient. Where
the exact value is not finite (a logsumexp of no keys is -inf), the kernel must have it too, and
nowhere else.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gem_opkit.errors import ConfigError


class CheckFailure(AssertionError):
    """A check of the test kit did not hold."""


@dataclass(frozen=True, slots=True)
class Run:
    """Outputs and gradients of one call.

    Attributes:
        outputs: every tensor of the result, detached, in order.
        gradients: one for each differentiable input, then one for each parameter where the
            callable is a module; None where none arrived.
        labels: what each gradient belongs to, for messages.
        input_scale: largest absolute value among the floating inputs.
        upstream_scale: largest absolute value among the gradients that were fed in.
    """

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    labels: list[str]
    input_scale: float
    upstream_scale: float


def tensors_in(result: Any) -> Iterator[Tensor]:
    """Walk through tuples, lists, dicts and dataclasses and yield their tensors in order.

    Args:
        result: whatever an operator or a module returned.

    Yields:
        each tensor.
    """
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for part in result:
            yield from tensors_in(part)
    elif isinstance(result, dict):
        for part in result.values():
            yield from tensors_in(part)
    elif is_dataclass(result) and not isinstance(result, type):
        for field in fields(result):
            yield from tensors_in(getattr(result, field.name))


def fresh(
    inputs: Sequence[Any], *, dtype: torch.dtype | None = None, device: str | None = None
) -> tuple[Any, ...]:
    """Copy the inputs of a call, so that a run cannot disturb the next one.

    Args:
        inputs: positional arguments. Tensors are cloned and keep ``requires_grad``; objects with
            a ``to`` method are moved where ``device`` is given; the rest is passed on.
        dtype: cast tensors of 16, 32 or 64 bit floats to it; other tensors keep their dtype.
        device: where to put them; None leaves them.

    Returns:
        the copies, all of them leaves.
    """
    return tuple(_fresh(value, dtype, device) for value in inputs)


def _fresh(value: Any, dtype: torch.dtype | None, device: str | None) -> Any:
    if not isinstance(value, Tensor):
        moves = device is not None and not isinstance(value, type) and hasattr(value, "to")
        return value.to(device) if moves else value
    copy = value.detach().clone()
    if device is not None:
        copy = copy.to(device)
    if dtype is not None and _is_wide_float(value):
        copy = copy.to(dtype)
    return copy.requires_grad_(value.requires_grad)


def _is_wide_float(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def upstream_like(output: Tensor, *, seed: int = 0) -> Tensor:
    """Make a gradient to feed into an output, the same values for every dtype and device.

    Args:
        output: the tensor whose shape, dtype and device it takes.
        seed: another seed gives other values.

    Returns:
        standard normal values, rounded to bf16 so that every dtype holds them exactly.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(output.shape, generator=generator).to(torch.bfloat16)
    return values.to(dtype=output.dtype, device=output.device)


def run_with_gradients(fn: Callable[..., Any], inputs: Sequence[Any], *, what: str = "") -> Run:
    """Call a function forward and backward.

    Args:
        fn: operator or module; called with ``*inputs``.
        inputs: positional arguments; the tensors that require a gradient are differentiated, and
            the parameters of a module too.
        what: prefix of the message of a failure.

    Returns:
        outputs and gradients.

    Raises:
        CheckFailure: an input requires a gradient, but no output depends on it by autograd.
    """
    leaves = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    labels = [
        f"gradient of input {index}"
        for index, value in enumerate(inputs)
        if isinstance(value, Tensor) and value.requires_grad
    ]
    if isinstance(fn, nn.Module):
        for name, parameter in fn.named_parameters():
            leaves.append(parameter)
            labels.append(f"gradient of {name}")
    outputs = list(tensors_in(fn(*inputs)))
    roots = [output for output in outputs if output.requires_grad]
    upstream = [upstream_like(root, seed=index) for index, root in enumerate(roots)]
    gradients: list[Tensor | None] = []
    if leaves:
        if not roots:
            raise CheckFailure(
                f"{what}inputs require gradients, but no output carries one back to them"
            )
        gradients = list(torch.autograd.grad(roots, leaves, upstream, allow_unused=True))
    floats = [value for value in inputs if isinstance(value, Tensor) and _is_wide_float(value)]
    return Run(
        outputs=[output.detach() for output in outputs],
        gradients=gradients,
        labels=labels,
        input_scale=_largest(floats),
        upstream_scale=_largest(upstream),
    )


def _largest(tensors: Sequence[Tensor]) -> float:
    finite = [t.detach().double()[torch.isfinite(t.detach())] for t in tensors]
    return max((float(t.abs().max()) for t in finite if t.numel()), default=0.0)


def rounding_band(dtype: torch.dtype, exact: Tensor, *, noise_scale: float = 0.0) -> float:
    """Return the error that one rounding of the largest value may make.

    Args:
        dtype: the lowest precision that the result passes through.
        exact: the exact values, fp64.
        noise_scale: size of terms that may cancel (the upstream gradient, the inputs). They are
            rounded in fp32 inside (fp64 for fp64), which leaves noise even where the exact value
            is 0.

    Returns:
        eps(dtype) * max|exact| + eps(inside) * noise_scale.
    """
    inside = torch.float64 if dtype is torch.float64 else torch.float32
    return torch.finfo(dtype).eps * _largest([exact]) + torch.finfo(inside).eps * noise_scale


def check_budget(
    kernel: Tensor,
    low_precision: Tensor,
    exact: Tensor,
    *,
    what: str = "output",
    noise_scale: float = 0.0,
    band_dtype: torch.dtype | None = None,
) -> None:
    """Hold one tensor of a kernel to the error budget of this module.

    Args:
        kernel: what the kernel computed.
        low_precision: what an honest reference computed from the same inputs in the same dtypes.
        exact: the same mathematics from the same (rounded) inputs in fp64.
        what: name of the tensor, for the message.
        noise_scale: see ``rounding_band``.
        band_dtype: lowest precision inside the kernel, where it is lower than the dtype of
            ``low_precision`` (an fp8 matmul with bf16 output).

    Raises:
        CheckFailure: shape, dtype or finiteness differs, or the error is over budget.
    """
    _same_form(kernel, low_precision, what)
    _same_shape(kernel, exact, what)
    if not kernel.dtype.is_floating_point:
        if not torch.equal(kernel.cpu(), exact.cpu().to(kernel.dtype)):
            raise CheckFailure(f"{what}: integers differ from the reference")
        return
    if kernel.numel() == 0:
        return
    finite = _same_non_finite(kernel, exact, what)
    exact = exact.double()
    kernel_error = _errors(kernel, exact, finite)
    reference_error = _errors(low_precision, exact, finite & torch.isfinite(low_precision))
    band = rounding_band(band_dtype or low_precision.dtype, exact, noise_scale=noise_scale)
    # A wrong value among many right ones shows in the largest error, many slightly wrong values
    # in the mean. One rounding is at most half a band, so the band of the mean never needs more
    # than that unless the values are all about equally large.
    rms_exact = float(exact[finite].square().mean().sqrt()) if bool(finite.any()) else 0.0
    largest = _largest([exact])
    rms_band = band * max(rms_exact / largest, 0.5) if largest else band
    for kind, error, reference, allowance in (
        ("largest error", kernel_error[0], reference_error[0], band),
        ("rms error", kernel_error[1], reference_error[1], rms_band),
    ):
        if not error <= 2 * (reference + allowance):
            raise CheckFailure(
                f"{what}: {kind} of the kernel {error:.3e} is over the budget "
                f"2 * (reference {reference:.3e} + band {allowance:.3e}); "
                f"largest exact value {largest:.3e}"
            )


def check_run_budget(
    kernel: Run,
    low_precision: Run,
    exact: Run,
    *,
    what: str = "",
    band_dtype: torch.dtype | None = None,
) -> None:
    """Hold every output and every gradient of a call to the error budget.

    Args:
        kernel: the run of the kernel.
        low_precision: the run of the reference on the same inputs.
        exact: the run of the reference on the same inputs in fp64.
        what: prefix of messages.
        band_dtype: see ``check_budget``.

    Raises:
        CheckFailure: as ``check_budget``, or a different number of results.
    """
    triples = _aligned(what, kernel, low_precision, exact)
    for label, parts, noise_scale in triples:
        check_budget(*parts, what=f"{what}{label}", noise_scale=noise_scale, band_dtype=band_dtype)


def check_equal_up_to_rounding(
    actual: Tensor, expected: Tensor, *, what: str = "output", noise_scale: float = 0.0
) -> None:
    """Compare two results of the same mathematics in the same precision.

    For what only reorders sums: compiled against eager, alone against in a batch. 16 rounding
    bands cover sums of some hundred terms; of bf16 and fp16, which are summed in fp32 and rounded
    once, 2 bands.

    Args:
        actual: first result.
        expected: second result.
        what: name of the tensor, for the message.
        noise_scale: see ``rounding_band``.

    Raises:
        CheckFailure: they differ in shape, dtype, finiteness or value.
    """
    _same_form(actual, expected, what)
    if not actual.dtype.is_floating_point:
        if not torch.equal(actual, expected):
            raise CheckFailure(f"{what}: values differ")
        return
    if actual.numel() == 0:
        return
    finite = _same_non_finite(actual, expected, what)
    error = _errors(actual, expected.double(), finite)[0]
    bands = 2 if actual.element_size() <= 2 else 16
    allowed = bands * rounding_band(actual.dtype, expected, noise_scale=noise_scale)
    if not error <= allowed:
        raise CheckFailure(
            f"{what}: differs by {error:.3e}; rounding explains {allowed:.3e}; "
            f"largest value {_largest([expected]):.3e}"
        )


def check_runs_equal(actual: Run, expected: Run, *, what: str = "") -> None:
    """Compare two runs, every output and every gradient, up to rounding.

    Args:
        actual: first run.
        expected: second run.
        what: prefix of messages.

    Raises:
        CheckFailure: as ``check_equal_up_to_rounding``, or a different number of results.
    """
    for label, parts, noise_scale in _aligned(what, actual, expected):
        check_equal_up_to_rounding(*parts, what=f"{what}{label}", noise_scale=noise_scale)


def _aligned(what: str, *runs: Run) -> Iterator[tuple[str, tuple[Tensor, ...], float]]:
    counts = [(len(run.outputs), len(run.gradients)) for run in runs]
    if len(set(counts)) != 1:
        raise CheckFailure(f"{what}numbers of (outputs, gradients) differ: {counts}")
    last = runs[-1]
    for index, outputs in enumerate(zip(*(run.outputs for run in runs), strict=True)):
        yield f"output {index}", outputs, last.input_scale
    for label, gradients in zip(
        last.labels, zip(*(run.gradients for run in runs), strict=True), strict=True
    ):
        present = [gradient is not None for gradient in gradients]
        if not any(present):
            continue
        if not all(present):
            raise CheckFailure(f"{what}{label}: missing in some runs: {present}")
        yield label, gradients, last.upstream_scale


def _same_form(actual: Tensor, expected: Tensor, what: str) -> None:
    _same_shape(actual, expected, what)
    if actual.dtype != expected.dtype:
        raise CheckFailure(f"{what}: dtype {actual.dtype}, expected {expected.dtype}")


def _same_shape(actual: Tensor, expected: Tensor, what: str) -> None:
    if actual.shape != expected.shape:
        raise CheckFailure(f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")


def _same_non_finite(actual: Tensor, expected: Tensor, what: str) -> Tensor:
    """Check that inf and nan stand in the same places; return where values are finite."""
    finite = torch.isfinite(expected)
    bad = torch.isfinite(actual) != finite
    if bool(bad.any()):
        first = tuple(int(i) for i in bad.nonzero()[0])
        raise CheckFailure(
            f"{what}: {int(bad.sum())} of {bad.numel()} values are not finite where they should "
            f"be, or the reverse; first at {first}: {float(actual[first])}, "
            f"expected {float(expected[first])}"
        )
    a, e = actual[~finite].double(), expected[~finite].double()
    if not torch.equal(a.nan_to_num(nan=0.5), e.nan_to_num(nan=0.5)):
        raise CheckFailure(f"{what}: inf or nan differ from the reference")
    return finite


def _errors(actual: Tensor, exact: Tensor, where: Tensor) -> tuple[float, float]:
    difference = (actual.double() - exact)[where]
    if difference.numel() == 0:
        return 0.0, 0.0
    return float(difference.abs().max()), float(difference.square().mean().sqrt())


def differentiable(inputs: Sequence[Any], check: str) -> list[Tensor]:
    """Return the inputs that require a gradient.

    Args:
        inputs: positional arguments of a call.
        check: name of the check, for the message.

    Returns:
        the tensors, at least one.

    Raises:
        ConfigError: there is none, so that the check could not fail.
    """
    leaves = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    if not leaves:
        raise ConfigError(
            f"{check}: inputs must hold a tensor that requires a gradient; got none; "
            f"mark the differentiable ones with requires_grad=True"
        )
    return leaves
