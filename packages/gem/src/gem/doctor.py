"""`gem doctor`: what is installed and loads, what runs where, and what to do about what is missing.

Everything is looked at behind a guard: an installation that is broken in any way still gets an
answer. Modules that can end the process when they do not fit (torchrec with fbgemm) are loaded in
a process of their own. The table is in `gem.doctor_page`.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gem.doctor_devices import Device, Disk, find_devices, find_disk, resource_problems
from gem.doctor_formats import FormatFinding, format_findings
from gem.doctor_guard import major_minor, one_line, tried
from gem.doctor_kernels import OperatorFinding, operator_findings


@dataclass(frozen=True, slots=True)
class Part:
    """A package that is looked for.

    Attributes:
        distributions: names under which pip may have installed it; the first one is for advice.
        use: what it is for.
        needed: whether a first training run needs it.
    """

    distributions: tuple[str, ...]
    use: str
    needed: bool = True


# Import name -> what it is.
PARTS = {
    "torch": Part(("torch",), "everything"),
    "pydantic": Part(("pydantic",), "recipes and contracts"),
    "numpy": Part(("numpy",), "data and metrics"),
    "pyarrow": Part(("pyarrow",), "data sets"),
    "rich": Part(("rich",), "progress"),
    "typer": Part(("typer",), "the command line"),
    "tensorboard": Part(("tensorboard",), "curves of a run"),
    "gem": Part(("gem-trainer",), "data, model, training, this command"),
    "gem_opkit": Part(("gem-opkit",), "operator kit"),
    "gem_jagged": Part(("gem-jagged",), "jagged operators"),
    "gem_precision": Part(("gem-precision",), "number formats"),
    "gem_parallel": Part(("gem-parallel",), "ranks"),
    "gem_attention": Part(("gem-attention",), "attention operators"),
    "gem_embeddings": Part(("gem-embeddings",), "tables"),
    "triton": Part(("triton",), "GPU kernels; comes with a CUDA build of torch", needed=False),
    "torchrec": Part(("torchrec",), "sharded tables, extra gem-embeddings[torchrec]", needed=False),
    "fbgemm_gpu": Part(
        ("fbgemm-gpu", "fbgemm-gpu-cpu"),
        "needed by torchrec, in the version of torch",
        needed=False,
    ),
}
_LOADED_APART = ("torchrec", "fbgemm_gpu")
_LEAST_TORCH = (2, 11)
# fbgemm works with exactly one torch, and says so only by an undefined symbol. Its own table.
_FBGEMM_OF_TORCH = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9"}
_LOAD_TIMEOUT_S = 120

LoadState = Literal["loads", "does not load", "version mismatch", "not installed"]


@dataclass(frozen=True, slots=True)
class Package:
    """A package as it was found.

    Attributes:
        version: None where it is not installed.
        state: whether it loads.
        why: the fault of one that does not; otherwise empty.
        use: what it is for.
    """

    version: str | None
    state: LoadState
    why: str
    use: str


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
    packages = {name: _package(name) for name in PARTS}
    problems = [
        _advice(name, found) for name, found in packages.items() if _is_problem(name, found)
    ]
    torch, _ = _loaded("torch")
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    notes: list[str] = []
    devices, formats = find_devices(torch, cuda, packages["torch"].version, problems)
    if cuda is not None and len(devices) == 1:
        notes.append(
            f"torch is built for CUDA {cuda}, and there is no GPU: training runs on the CPU"
        )
    problems += _torch_problems(packages)
    triton = _triton(packages, devices, problems)
    operators = tried(lambda: _operators(devices, triton), {}, problems, "operators")
    torchrec = _torchrec(packages)
    place = notes if torchrec.state == "not installed" else problems
    place += _of_torchrec(torchrec)
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


# -- packages ----------------------------------------------------------------------------------
def _loaded(name: str) -> tuple[Any, str | None]:
    """A module, or None with the reason why it does not load."""
    try:
        return importlib.import_module(name), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it can be broken in any way
        return None, one_line(error)


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):  # a module that hides its own origin
        return name in sys.modules


def _package(name: str) -> Package:
    part = PARTS[name]
    if not _is_there(name):
        return Package(None, "not installed", "", part.use)
    version = _installed_version(part.distributions)
    if name in _LOADED_APART:  # judged together, in `_torchrec`
        return Package(version or "unknown", "loads", "", part.use)
    module, fault = _loaded(name)
    # A loaded module knows more than its metadata: 2.11.0+cu130 names the build.
    version = str(getattr(module, "__version__", None) or version or "unknown")
    if fault is not None:
        return Package(version, "does not load", fault, part.use)
    return Package(version, "loads", "", part.use)


def _installed_version(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        with contextlib.suppress(Exception):  # metadata can be missing or cut short
            return importlib.metadata.version(distribution)
    return None


def _is_problem(name: str, found: Package) -> bool:
    return found.state != "loads" and PARTS[name].needed


def _advice(name: str, found: Package) -> str:
    part = PARTS[name]
    distribution = part.distributions[0]
    # Ours are not on a registry: they are installed from the repository.
    fix = (
        f"install ./packages/{distribution.removeprefix('gem-')} as the README of gem-trainer says"
        if name == "gem" or name.startswith("gem_")
        else f"pip install {distribution}"
    ).replace("packages/trainer", "packages/gem")
    if found.state == "not installed":
        return f"{distribution} is not installed (needed for {part.use}); {fix}"
    again = fix.replace("install ", "install --force-reinstall ", 1)
    return f"{distribution} {found.version} does not load ({found.why}); {again}"


def _torch_problems(packages: dict[str, Package]) -> list[str]:
    version = packages["torch"].version
    least = ".".join(map(str, _LEAST_TORCH))
    if version is None or (major_minor(version) or _LEAST_TORCH) >= _LEAST_TORCH:
        return []
    return [f"torch is {version}; {least} or newer is needed: pip install -U torch"]


# -- Triton and torchrec -----------------------------------------------------------------------
def _triton(
    packages: dict[str, Package], devices: dict[str, Device], problems: list[str]
) -> Package:
    found = packages["triton"]
    on_gpu = any(device.kind == "cuda" for device in devices.values())
    if on_gpu and found.state != "loads":
        fault = found.why or "it is not installed"
        problems.append(
            f"there is a GPU, and its kernels need triton ({fault}); pip install triton in the "
            "version that torch names, or install torch again"
        )
    return Package(found.version, found.state, found.why, "")


def _torchrec(packages: dict[str, Package]) -> Package:
    """The state of torchrec with fbgemm: versions first, then a process that loads them."""
    torchrec, fbgemm = packages["torchrec"], packages["fbgemm_gpu"]
    version = f"torchrec {torchrec.version}, fbgemm-gpu {fbgemm.version}"
    if torchrec.version is None and fbgemm.version is None:
        return Package(None, "not installed", "neither torchrec nor fbgemm-gpu is there", "")
    torch = packages["torch"].version or ""
    wanted = _FBGEMM_OF_TORCH.get(".".join(torch.split(".")[:2]))
    if fbgemm.version is None or torchrec.version is None:
        missing = "torchrec" if torchrec.version is None else "fbgemm-gpu"
        there = "fbgemm-gpu" if torchrec.version is None else "torchrec"
        return Package(version, "not installed", f"{there} is there without {missing}", "")
    if wanted is not None and not fbgemm.version.startswith((f"{wanted}.", "unknown")):
        why = f"fbgemm-gpu is {fbgemm.version}, and torch {torch} needs {wanted}.*"
        return Package(version, "version mismatch", why, "")
    fault = _fault_of_loading(*_LOADED_APART[::-1])
    if fault is not None:
        return Package(version, "does not load", fault, "")
    return Package(version, "loads", "", "")


def _of_torchrec(found: Package) -> list[str]:
    fix = "install torchrec as the README of gem-embeddings says"
    if found.state == "loads":
        return []
    if found.state == "not installed":
        return [f"{found.why}: tables run on plain torch; for sharded tables {fix}"]
    return [f"{found.why}; {fix}"]


def _fault_of_loading(*names: str) -> str | None:
    """Load modules in a process of their own: one that does not fit can end its process."""
    program = "\n".join(f"import {name}" for name in names)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=env,
            capture_output=True,
            text=True,
            timeout=_LOAD_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return one_line(error)
    if done.returncode == 0:
        return None
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return said[-1] if said else f"the process that loads it ends with {done.returncode}"


def _operators(devices: dict[str, Device], triton: Package) -> dict[str, OperatorFinding]:
    fault = None if triton.state == "loads" else triton.why or "it is not installed"
    capabilities = {label: device.capability for label, device in devices.items()}
    return operator_findings(capabilities, triton_fault=fault)
