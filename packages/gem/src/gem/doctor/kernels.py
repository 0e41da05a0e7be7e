"""Which operator runs by which kernel, found by looking at the installed packages.

Nothing is listed here: every package ``gem_*`` is searched for ``kernels/<operator>/op.py``, the
operator's own word says whether it has a Triton kernel, and `gem_opkit.impl` decides. A kernel
file is never imported, so that a broken Triton breaks no answer.
"""

import importlib
import importlib.util
import pkgutil
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VARIANT = re.compile(r"(?:kernel_)?sm(\d+)\d")  # sm90, kernel_sm100.py: the major of 9.0, 10.0


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """What ``impl="auto"`` takes on one device.

    Attributes:
        impl: reference, triton, or none where the operator cannot be loaded.
        kernel: what runs: ``reference``, ``triton``, or ``triton sm90`` and kin, which stands
            for the kernel of that architecture where it takes the call, and triton where not.
        why: the reason.
    """

    impl: str
    kernel: str
    why: str


@dataclass(frozen=True, slots=True)
class OperatorFinding:
    """One operator.

    Attributes:
        package: import name of its package.
        has: what is there for it: ``reference``, ``triton``, ``triton sm90`` and kin.
        devices: label of a device -> what runs there.
    """

    package: str
    has: list[str]
    devices: dict[str, KernelChoice]


def operator_findings(
    devices: dict[str, tuple[int, int] | None], *, triton_fault: str | None
) -> dict[str, OperatorFinding]:
    """Every operator of every installed package.

    Args:
        devices: label -> compute capability of a GPU, None for a CPU.
        triton_fault: why Triton does not load; None where it does.

    Returns:
        operator -> what is known of it, by package and name.
    """
    found = {}
    for package, folder in _operator_folders():
        fault, op = None, None
        try:
            op = importlib.import_module(f"{package}.kernels.{folder.name}.op")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it can be broken in any way
            fault = f"{type(error).__name__}: {error}"
        variants = _variants(folder)
        has_triton = bool(getattr(op, "_HAS_TRITON", (folder / "kernel.py").is_file()))
        has = ["reference", *(["triton"] if has_triton else [])]
        found[folder.name] = OperatorFinding(
            package,
            [*has, *(f"triton sm{major}0" for major in variants)],
            {
                label: KernelChoice("none", "none", f"does not load: {fault}")
                if fault is not None
                else _choice(folder.name, capability, has_triton, variants, triton_fault)
                for label, capability in devices.items()
            },
        )
    return found


def _choice(
    operator: str,
    capability: tuple[int, int] | None,
    has_triton: bool,  # noqa: FBT001
    variants: list[int],
    triton_fault: str | None,
) -> KernelChoice:
    from gem_opkit.impl import resolve_impl

    device: Any = _DeviceType("cpu" if capability is None else "cuda")
    impl = resolve_impl("auto", device, operator, has_triton=has_triton)
    if impl == "reference":
        why = "plain torch on a CPU" if capability is None else "it has no Triton kernel yet"
        return KernelChoice(impl, "reference", why)
    if triton_fault is not None:
        return KernelChoice(impl, "none", f"its kernel needs Triton, and {triton_fault}")
    if capability is not None and capability[0] in variants:
        kernel = f"triton sm{capability[0]}0"
        return KernelChoice(impl, kernel, "where that kernel takes the call, else plain Triton")
    return KernelChoice(impl, "triton", "a GPU, and it has a Triton kernel")


@dataclass(frozen=True, slots=True)
class _DeviceType:
    """As much of a torch device as the decision reads: a GPU need not be there to ask."""

    type: str


def _operator_folders() -> list[tuple[str, Path]]:
    names = {module.name for module in pkgutil.iter_modules() if module.name.startswith("gem_")}
    found = []
    for package in sorted(names):
        spec = importlib.util.find_spec(package)
        places = [] if spec is None else spec.submodule_search_locations or []
        for place in places:
            found += [(package, op.parent) for op in sorted(Path(place).glob("kernels/*/op.py"))]
    return found


def _variants(folder: Path) -> list[int]:
    """Major compute capabilities that have a kernel of their own which the operator calls."""
    source = (folder / "op.py").read_text(encoding="utf-8")
    matches = [_VARIANT.fullmatch(path.stem) for path in folder.iterdir()]
    majors = {int(match[1]) for match in matches if match is not None}
    return sorted(major for major in majors if f"sm{major}0" in source)
