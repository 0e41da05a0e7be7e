"""What ``gem plan`` reads loads no torch: contracts, specs and costs, in fresh processes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = {"contract.py", "cost.py", "costs.py", "spec.py", "schema.py", "features.py"}
FILES = [file for file in ROOT.glob("packages/*/src/**/*.py") if file.name in NAMES]
FILES += [
    ROOT / "packages/parallel/src/gem_parallel/topology.py",
    ROOT / "packages/parallel/src/gem_parallel/balance/imbalance.py",
    ROOT / "packages/opkit/src/gem_opkit/dims.py",
    ROOT / "packages/opkit/src/gem_opkit/errors.py",
    ROOT / "packages/opkit/src/gem_opkit/impl.py",
    ROOT / "packages/gem/src/gem/config.py",
    ROOT / "packages/gem/src/gem/train/balance_check.py",
]


def module_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[parts.index("src") + 1 :])


MODULES = sorted(map(module_name, FILES))


def loaded(modules: list[str]) -> set[str]:
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, text=True
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_a_module_that_needs_torch_is_seen():
    assert "torch" in loaded(["gem_jagged.batch"])


@pytest.mark.parametrize("package", sorted({name.partition(".")[0] for name in MODULES}))
def test_nothing_heavy_is_loaded(package: str):
    modules = [name for name in MODULES if name.partition(".")[0] == package]
    assert loaded(modules).isdisjoint({"torch", "triton"})
