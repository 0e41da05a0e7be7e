"""Kernels found in sources, and kernels seen when they start."""

import importlib
import sys
import textwrap

import pytest
import torch

from gem_opkit.errors import ConfigError
from gem_opkit.launched import kernels_of, launched_kernels
from gem_opkit.testing import check_refuses

SOURCE = """
    import triton
    import triton.language as tl


    @triton.jit
    def _twice(x):
        return 2 * x


    @triton.jit(do_not_specialize=["count"])
    def twice_kernel(x_ptr, count):
        tl.store(x_ptr, _twice(tl.load(x_ptr)))


    @triton.jit
    def never_kernel(x_ptr):
        tl.store(x_ptr, 0.0)


    def host_kernel():
        pass
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "toy_kernels" / "deep"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "kernel.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "toy_kernels"
    for name in [name for name in sys.modules if name.startswith("toy_kernels")]:
        del sys.modules[name]


def test_kernels_are_found_without_an_import(package):
    found = kernels_of(package)
    assert found == {f"toy_kernels.deep.kernel.{name}_kernel" for name in ("twice", "never")}
    assert "toy_kernels.deep.kernel" not in sys.modules


@pytest.mark.interpreter
def test_a_started_kernel_is_seen_and_only_inside_the_block(package):
    module = importlib.import_module("toy_kernels.deep.kernel")
    x = torch.ones(1)
    with launched_kernels() as started:
        module.twice_kernel[(1,)](x, 1)
    assert started == {"toy_kernels.deep.kernel.twice_kernel"}
    assert x.item() == 2
    module.never_kernel[(1,)](x)
    assert started == {"toy_kernels.deep.kernel.twice_kernel"}
    assert kernels_of(package) - started == {"toy_kernels.deep.kernel.never_kernel"}


def test_refusals():
    check_refuses(
        [
            (lambda: kernels_of("no_such_package_here"), ConfigError, "got no_such_package_here"),
            (lambda: kernels_of("json"), ConfigError, "must be importable and hold a kernel"),
        ]
    )
