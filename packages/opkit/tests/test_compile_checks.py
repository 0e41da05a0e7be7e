import pytest

from gem_opkit.compile_checks import KernelVariant, compile_kernels
from gem_opkit.errors import ConfigError
from gem_opkit.testing import CheckFailure, check_refuses

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def _scale_kernel(x_ptr, y_ptr, stride_x, factor, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + tl.program_id(0) * stride_x + i) * factor)

@triton.jit
def _broken_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), no_such_name)
"""
ARGUMENTS = {"x_ptr": "*fp32", "y_ptr": "*fp32", "stride_x": "i32", "factor": "fp32"}


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "sample_kernels.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    return "sample_kernels"


def test_kernels_compile_for_both_architectures(module):
    aligned = KernelVariant("_scale_kernel", ARGUMENTS, {"BLOCK": 1024})
    odd = KernelVariant("_scale_kernel", ARGUMENTS, {"BLOCK": 1024}, warps=8, aligned=())
    reports = compile_kernels(module, [aligned, odd])
    assert [(report.variant, report.capability) for report in reports] == [
        (aligned, 90),
        (aligned, 100),
        (odd, 90),
        (odd, 100),
    ]
    for report in reports:
        assert f".target sm_{report.capability}" in report.ptx
        assert 0 < report.registers <= 255
        assert report.stack_bytes == 0
        # 16-byte accesses only where the addresses are known to allow them.
        assert ("ld.global.v4" in report.ptx) == (report.variant is aligned)


def test_what_does_not_compile_is_a_failure(module):
    for variant, message in [
        (KernelVariant("_broken_kernel", {"x_ptr": "*fp32"}, {"BLOCK": 16}), "no_such_name"),
        (KernelVariant("_scale_kernel", {"x_ptr": "*fp32"}, {"BLOCK": 16}), "y_ptr"),
    ]:
        with pytest.raises(CheckFailure, match=message):
            compile_kernels(module, [variant], capabilities=(90,))
    check_refuses([(lambda: compile_kernels(module, []), ConfigError, "variants must not be")])
