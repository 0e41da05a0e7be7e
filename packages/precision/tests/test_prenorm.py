"""A norm and its 8-bit linear map in one: what the two operators one after the other give."""

from functools import partial

import pytest
import torch

from gem_opkit.errors import ConfigError, DeviceError, DtypeError, ShapeError
from gem_opkit.testing import (
    check_refuses,
    check_registration,
    check_runs_equal,
    poisoned_empty,
    run_with_gradients,
)
from gem_precision.contract import LinearFormats
from gem_precision.costs import quantized_linear_cost
from gem_precision.kernels.quantized_linear.op import formats_named
from gem_precision.ops import layer_norm, mx_quantize, quantized_linear, rms_norm
from gem_precision.prenorm import normed_quantized_linear

FORMATS = [
    formats_named("mxfp8_rceil"),
    formats_named("fp8_block"),
    LinearFormats(forward="mxfp8_floor", weight_gradient="mxfp8_rceil"),
]
anywhere = pytest.mark.parametrize(
    ("impl", "device"),
    [
        ("reference", "cpu"),
        pytest.param("triton", "cpu", marks=pytest.mark.interpreter),
        pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    ],
)


@anywhere
@pytest.mark.parametrize("formats", FORMATS, ids=lambda formats: formats.forward)
def test_equals_the_norm_and_the_map_one_after_the_other(formats, impl, device):
    for shape, kind, around in (((70, 96, 40), "rms", False), ((33, 256, 128), "layer", True)):
        rows, width, columns = shape
        draw = torch.Generator().manual_seed(0)
        sizes = [(rows, width), (columns, width), *([(rows, width), (width,)] if around else [])]
        given = [
            torch.randn(size, generator=draw).to(device).requires_grad_() for size in sizes
        ]  # fmt: skip

        def one(x, w, before=None, gain=None, kind=kind):
            return normed_quantized_linear(
                x, w, formats=formats, kind=kind, before_TD=before, gain_D=gain, impl=impl
            )

        def two(x, w, before=None, gain=None, kind=kind):
            norm = rms_norm if kind == "rms" else layer_norm
            n = norm(x, before=before, gain_D=gain, impl=impl)
            return quantized_linear(n, w, formats=formats, impl=impl)

        with poisoned_empty("all"):
            found, expected = run_with_gradients(one, given), run_with_gradients(two, given)
        assert torch.equal(found.outputs[0], expected.outputs[0])
        check_runs_equal(found, expected)


def test_only_what_is_asked_for_is_computed():
    x_TD, weight_FD = torch.randn(40, 64), torch.randn(8, 64, requires_grad=True)
    y_TF = normed_quantized_linear(x_TD, weight_FD, formats=FORMATS[0])
    y_TF.sum().backward()
    assert weight_FD.grad is not None
    assert x_TD.grad is None


def test_the_product_of_bytes_is_registered():
    matrix, weight_FD = mx_quantize(torch.randn(5, 40)), torch.randn(6, 40)
    check_registration(
        torch.ops.gem_precision.product_of_bytes,
        (
            matrix.elements_TD, matrix.scales, weight_FD, "mxfp8_rceil", torch.bfloat16,
            "reference",
        ),
        cost=quantized_linear_cost(rows=5, width=40, columns=6, element_bytes=2),
    )  # fmt: skip


def test_refuses():
    x_TD, weight_FD = torch.randn(4, 64), torch.randn(8, 64)
    check_refuses(
        [
            (
                lambda: normed_quantized_linear(x_TD, weight_FD, formats=LinearFormats()),
                ConfigError,
                "formats.forward must be below bf16",
            ),
            (
                lambda: normed_quantized_linear(x_TD.double(), weight_FD, formats=FORMATS[0]),
                DtypeError,
                "x_TD must be fp32, bf16 or fp16",
            ),
            *(
                (partial(normed_quantized_linear, x_TD, other, formats=formats), kind, said)
                for formats in FORMATS[:2]
                for other, kind, said in (
                    (weight_FD[:, :32], ShapeError, "weight_FD has D=32 but x_TD has D=64"),
                    (weight_FD.double(), DtypeError, "weight_FD must be fp32, bf16 or fp16"),
                    (weight_FD.to("meta"), DeviceError, "weight_FD must be on cpu"),
                )
            ),
        ]
    )
