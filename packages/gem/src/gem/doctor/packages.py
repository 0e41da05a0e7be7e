"""The packages that are looked for, whether they load, and what to do about one that does not.

Modules that can end the process when they do not fit (torchrec with fbgemm) are loaded in a
process of their own.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Literal

from gem.doctor.guard import major_minor, one_line


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
    "jinja2": Part(("jinja2",), "the page of a run"),
    "safetensors": Part(("safetensors",), "exported weights"),
    "gem": Part(("gem-trainer",), "data, model, training, this command"),
    "gem_opkit": Part(("gem-opkit",), "operator kit"),
    "gem_jagged": Part(("gem-jagged",), "jagged operators"),
    "gem_precision": Part(("gem-precision",), "number formats"),
    "gem_parallel": Part(("gem-parallel",), "ranks"),
    "gem_attention": Part(("gem-attention",), "attention operators"),
    "gem_embeddings": Part(("gem-embeddings",), "tables"),
    "triton": Part(("triton",), "GPU kernels; comes with a CUDA build of torch", needed=False),
    "wandb": Part(("wandb",), "curves on Weights & Biases, extra gem-trainer[wandb]", needed=False),
    "torchrec": Part(("torchrec",), "sharded tables, extra gem-embeddings[torchrec]", needed=False),
    "fbgemm_gpu": Part(
        ("fbgemm-gpu", "fbgemm-gpu-cpu"),
        "needed by torchrec, in the version of torch",
        needed=False,
    ),
}
_LOADED_APART = ("torchrec", "fbgemm_gpu")
_LEAST_TORCH = (2, 11)
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


def loaded(name: str) -> tuple[Any, str | None]:
    """Load a module that may be broken.

    Args:
        name: to import.

    Returns:
        the module and None; or None and the reason why it does not load, in one line.
    """
    try:
        return importlib.import_module(name), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it can be broken in any way
        return None, one_line(error)


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):  # a module that hides its own origin
        return name in sys.modules


def find_package(name: str) -> Package:
    """Look for a package, and load it unless that can end the process.

    Args:
        name: one of `PARTS`.
    """
    part = PARTS[name]
    if not _is_there(name):
        return Package(None, "not installed", "", part.use)
    version = _installed_version(part.distributions)
    if name in _LOADED_APART:  # judged together, in `find_torchrec`
        return Package(version or "unknown", "loads", "", part.use)
    module, fault = loaded(name)
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


def package_problems(packages: dict[str, Package]) -> list[str]:
    """Say which packages a first training run misses, and what to do.

    Args:
        packages: import name -> package, of all `PARTS`.
    """
    lacking = {
        name: found
        for name, found in packages.items()
        if found.state != "loads" and PARTS[name].needed
    }
    return [_advice(name, found) for name, found in lacking.items()] + _torch_problems(packages)


def _advice(name: str, found: Package) -> str:
    part = PARTS[name]
    distribution = part.distributions[0]
    # Ours are not on a registry: they are installed from the repository.
    fix = (
        f"install ./packages/{name.removeprefix('gem_')} as the README of gem-trainer says"
        if name == "gem" or name.startswith("gem_")
        else f"pip install {distribution}"
    )
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


def triton_problems(triton: Package) -> list[str]:
    """Say what Triton lacks on a machine with a GPU.

    Args:
        triton: as it was found.
    """
    if triton.state == "loads":
        return []
    fault = triton.why or "it is not installed"
    return [
        f"there is a GPU, and its kernels need triton ({fault}); pip install triton in the "
        "version that torch names, or install torch again"
    ]


def find_torchrec(packages: dict[str, Package]) -> Package:
    """Judge torchrec with fbgemm: versions first, then a process that loads them.

    Args:
        packages: import name -> package; ``torch``, ``torchrec`` and ``fbgemm_gpu`` are read.

    Returns:
        Both as one package, whose version names both and whose ``use`` is empty.
    """
    torchrec, fbgemm = packages["torchrec"], packages["fbgemm_gpu"]
    version = f"torchrec {torchrec.version}, fbgemm-gpu {fbgemm.version}"
    if torchrec.version is None and fbgemm.version is None:
        return Package(None, "not installed", "neither torchrec nor fbgemm-gpu is there", "")
    if fbgemm.version is None or torchrec.version is None:
        missing = "torchrec" if torchrec.version is None else "fbgemm-gpu"
        there = "fbgemm-gpu" if torchrec.version is None else "torchrec"
        return Package(version, "not installed", f"{there} is there without {missing}", "")
    why = _misfit(*(packages[name].version for name in ("torch", "fbgemm_gpu", "torchrec")))
    if why:
        return Package(version, "version mismatch", why, "")
    fault = _fault_of_loading(*_LOADED_APART[::-1])
    if fault is not None:
        return Package(version, "does not load", fault, "")
    return Package(version, "loads", "", "")


def _misfit(torch: str | None, fbgemm: str | None, torchrec: str | None) -> str:
    """Ask the table of gem-embeddings, which is there unless its own line says that it is not."""
    table, _ = loaded("gem_embeddings.torchrec_engine.versions")
    if table is None or torch is None:
        return ""
    fbgemm, torchrec = (None if v == "unknown" else v for v in (fbgemm, torchrec))
    return table.misfit(torch, fbgemm, torchrec)


def torchrec_lines(found: Package) -> list[str]:
    """Say what is lacking of torchrec, and what to do.

    Args:
        found: what `find_torchrec` returned.
    """
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
