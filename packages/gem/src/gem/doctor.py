"""`gem doctor`: what is installed, on which devices, and what to do about what is missing."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

# import name -> (distribution, what it is for, whether a first training run needs it).
_PARTS = {
    "torch": ("torch", "everything", True),
    "pydantic": ("pydantic", "recipes and contracts", True),
    "numpy": ("numpy", "data and metrics", True),
    "pyarrow": ("pyarrow", "data sets", True),
    "rich": ("rich", "progress", True),
    "typer": ("typer", "the command line", True),
    "tensorboard": ("tensorboard", "curves of a run", True),
    "gem": ("gem-trainer", "data, model, training, this command", True),
    "gem_opkit": ("gem-opkit", "operator kit", True),
    "gem_jagged": ("gem-jagged", "jagged operators", True),
    "gem_precision": ("gem-precision", "number formats", True),
    "gem_parallel": ("gem-parallel", "ranks", True),
    "gem_attention": ("gem-attention", "attention operators", True),
    "gem_embeddings": ("gem-embeddings", "tables", True),
    "triton": ("triton", "GPU kernels; comes with a CUDA build of torch", False),
    "torchrec": ("torchrec", "sharded tables, extra gem-embeddings[torchrec]", False),
    "fbgemm_gpu": ("fbgemm-gpu", "needed by torchrec, in the version of torch", False),
}
_LEAST_TORCH = (2, 11)
# fbgemm works with exactly one torch, and says so only by an undefined symbol.
_FBGEMM_OF_TORCH = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9"}
_LEAST_MEMORY_BYTES = 3 * 2**30
_LEAST_DISK_BYTES = 2**30


def examine() -> dict[str, Any]:
    """Look at this installation. Starts no training and changes nothing.

    Returns:
        ``{python, platform, packages -> name -> {version, use}, devices, memory_bytes,
        disk_free_bytes, cpus, problems}``. A problem is a text that says what to do.
    """
    packages = {name: _examine_part(name) for name in _PARTS}
    problems = [
        f"{_PARTS[name][0]} is not installed (needed for {_PARTS[name][1]}); "
        f"pip install {_PARTS[name][0]}"
        for name, part in packages.items()
        if part["version"] is None and _PARTS[name][2]
    ]
    devices = _devices(problems)
    _check_torch(packages, problems)
    memory_bytes = _memory_bytes()
    disk_bytes = shutil.disk_usage(Path.cwd()).free
    if memory_bytes is not None and memory_bytes < _LEAST_MEMORY_BYTES:
        problems.append(
            f"this machine has {memory_bytes / 2**30:.1f} GiB of memory; the demo needs 3 GiB"
        )
    if disk_bytes < _LEAST_DISK_BYTES:
        problems.append(f"{disk_bytes / 2**30:.1f} GiB are free in {Path.cwd()}; runs need 1 GiB")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "devices": devices,
        "memory_bytes": memory_bytes,
        "disk_free_bytes": disk_bytes,
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "problems": problems,
    }


def _examine_part(name: str) -> dict[str, str | None]:
    distribution, use, _ = _PARTS[name]
    version = None
    if importlib.util.find_spec(name) is not None:
        try:
            version = importlib.metadata.version(distribution)
            # A loaded module knows more than its metadata: 2.11.0+cu130 names the build.
            version = getattr(sys.modules.get(name), "__version__", version)
        except importlib.metadata.PackageNotFoundError:
            # On the path without being installed: the module may still know its version.
            module = importlib.import_module(name)
            version = getattr(module, "__version__", "unknown")
    return {"version": version, "use": use}


def _devices(problems: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"name": f"cpu ({platform.machine()})", "memory_bytes": None}]
    if importlib.util.find_spec("torch") is None:
        return found
    try:
        import torch
    except OSError as error:
        problems.append(f"torch does not load ({error}); install it again for this machine")
        return found
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append({"name": properties.name, "memory_bytes": properties.total_memory})
    if torch.version.cuda is not None and torch.cuda.device_count() == 0:
        found.append(
            {"name": f"none for the CUDA {torch.version.cuda} of torch", "memory_bytes": None}
        )
    return found


def _check_torch(packages: dict[str, dict[str, str | None]], problems: list[str]) -> None:
    version = packages["torch"]["version"]
    if version is None:
        return
    parts = version.split("+")[0].split(".")
    if tuple(int(p) for p in parts[:2]) < _LEAST_TORCH:
        least = ".".join(map(str, _LEAST_TORCH))
        problems.append(f"torch is {version}; {least} or newer is needed: pip install -U torch")
    fbgemm, wanted = packages["fbgemm_gpu"]["version"], _FBGEMM_OF_TORCH.get(".".join(parts[:2]))
    if fbgemm is not None and wanted is not None and not fbgemm.startswith(f"{wanted}."):
        problems.append(
            f"fbgemm-gpu is {fbgemm}, and torch {version} needs {wanted}.*; install torchrec as "
            "the README of gem-embeddings says"
        )


def _memory_bytes() -> int | None:
    names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    if any(name not in os.sysconf_names for name in names):
        return None
    page, pages = (os.sysconf(name) for name in names)
    return page * pages


def findings_table(found: dict[str, Any]) -> Table:
    """The findings as a table.

    Args:
        found: what `examine` returned.
    """
    # Texts hold brackets, as in gem-embeddings[torchrec], which rich would take for its markup.
    title = Text(f"Python {found['python']} on {found['platform']}", style="table.title")
    table = Table(title=title)
    table.add_column("what", overflow="fold")
    table.add_column("found", overflow="fold")
    table.add_column("for", overflow="fold")
    rows = [
        (name, part["version"] or "not installed", part["use"])
        for name, part in found["packages"].items()
    ]
    for device in found["devices"]:
        size = device["memory_bytes"]
        rows.append(("device", device["name"], f"{size / 2**30:.0f} GiB" if size else ""))
    memory = found["memory_bytes"]
    rows += [
        ("memory", f"{memory / 2**30:.1f} GiB" if memory else "unknown", ""),
        ("disk, free here", f"{found['disk_free_bytes'] / 2**30:.1f} GiB", ""),
        ("CPU cores", str(found["cpus"]), ""),
    ]
    for row in rows:
        table.add_row(*map(Text, row))
    for problem in found["problems"]:
        table.add_row(Text("problem", style="red"), Text(problem), "")
    if not found["problems"]:
        table.add_row(Text("all there", style="green"), "gem train synthetic-debug will run", "")
    return table
