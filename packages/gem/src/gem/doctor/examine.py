"""`gem doctor`: what is installed and loads, what runs where, and what to do about what is missing.

Everything is looked at behind a guard: an installation that is broken in any way still gets an
answer. The table is in `gem.doctor.page`.
"""

import platform
from dataclasses import dataclass, replace
from pathlib import Path

from gem.doctor.devices import Device, Disk, find_devices, find_disk, resource_problems
from gem.doctor.formats import FormatFinding, format_findings
from gem.doctor.guard import tried
from gem.doctor.kernels import OperatorFinding, operator_findings
from gem.doctor.packages import (
    PARTS,
    Package,
    find_package,
    find_torchrec,
    loaded,
    package_problems,
    torchrec_lines,
    triton_problems,
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was found. As JSON: these keys, and those of the classes below.

    Attributes:
        python: version.
        platform: system and its version.
        cuda: version of CUDA that torch was built with; None for a CPU build, or no torch.
        packages: import name -> package.
        devices: label, ``cpu`` or ``cuda:0`` and so on -> device.
        operators: name -> which kernel runs it on which device.
        formats: number format -> native, emulated or absent on which device.
        torchrec: torchrec and fbgemm together; ``use`` is empty.
        triton: Triton; ``use`` is empty.
        disk: where runs go.
        problems: texts that say what is wrong and what to do; none: training will run.
        notes: texts that say what is missing without being needed.
    """

    python: str
    platform: str
    cuda: str | None
    packages: dict[str, Package]
    devices: dict[str, Device]
    operators: dict[str, OperatorFinding]
    formats: dict[str, FormatFinding]
    torchrec: Package
    triton: Package
    disk: Disk
    problems: list[str]
    notes: list[str]


def examine(folder: Path = Path("runs")) -> Diagnosis:
    """Look at this installation. Starts no training and changes nothing.

    Args:
        folder: where runs go; need not exist.

    Returns:
        What was found.
    """
    packages = {name: find_package(name) for name in PARTS}
    problems = package_problems(packages)
    torch, _ = loaded("torch")
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    notes: list[str] = []
    devices, formats = find_devices(torch, cuda, packages["torch"].version, problems)
    if cuda is not None and len(devices) == 1:
        notes.append(
            f"torch is built for CUDA {cuda}, and there is no GPU: training runs on the CPU"
        )
    triton = replace(packages["triton"], use="")
    if any(device.kind == "cuda" for device in devices.values()):
        problems += triton_problems(triton)
    operators = tried(lambda: _operators(devices, triton), {}, problems, "operators")
    torchrec = find_torchrec(packages)
    place = notes if torchrec.state == "not installed" else problems
    place += torchrec_lines(torchrec)
    disk = find_disk(folder)
    problems += resource_problems(devices["cpu"], disk)
    return Diagnosis(
        python=platform.python_version(),
        platform=platform.platform(),
        cuda=cuda,
        packages=packages,
        devices=devices,
        operators=operators,
        formats=tried(lambda: format_findings(formats), {}, problems, "number formats"),
        torchrec=torchrec,
        triton=triton,
        disk=disk,
        problems=problems,
        notes=notes,
    )


def _operators(devices: dict[str, Device], triton: Package) -> dict[str, OperatorFinding]:
    fault = None if triton.state == "loads" else triton.why or "it is not installed"
    capabilities = {label: device.capability for label, device in devices.items()}
    return operator_findings(capabilities, triton_fault=fault)
