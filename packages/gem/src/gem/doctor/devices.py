"""The devices of a machine, and the disk that runs go to, as `gem doctor` reports them."""

import contextlib
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gem.doctor.formats import FormatState, cpu_formats, cuda_formats
from gem.doctor.guard import major_minor, tried

_LEAST_MEMORY_BYTES = 3 * 2**30
_LEAST_DISK_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """A device that a run can use.

    Attributes:
        kind: cpu or cuda.
        name: what the system calls it.
        capability: compute capability of a GPU; None for a CPU.
        memory_bytes: of a GPU its own, of a CPU what this process may use; None: unknown.
        threads: CPU threads that torch takes by default; None for a GPU, or where torch is broken.
        cores: CPU cores that this process may use; None for a GPU.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    capability: tuple[int, int] | None
    memory_bytes: int | None
    threads: int | None = None
    cores: float | None = None


@dataclass(frozen=True, slots=True)
class Disk:
    """Where runs are written.

    Attributes:
        folder: of the runs, or the nearest one above it that exists.
        free_bytes: free there; None: unknown.
        writable: whether this user may write there.
    """

    folder: str
    free_bytes: int | None
    writable: bool


def find_devices(
    torch: Any, cuda: str | None, version: str | None, problems: list[str]
) -> tuple[dict[str, Device], dict[str, dict[str, FormatState]]]:
    """Every device, and what it does with each number format.

    Args:
        torch: the module; None where it does not load.
        cuda: version of CUDA that it was built with.
        version: its version.
        problems: gets a line for what cannot be looked at.

    Returns:
        label -> device, and label -> format -> state. The CPU is always among them.
    """
    there = torch is not None
    threads = tried(lambda: int(torch.get_num_threads()), None, [], "") if there else None
    devices = {"cpu": Device("cpu", _cpu_name(), None, _memory_bytes(), threads, _cores())}
    formats = {"cpu": cpu_formats(_cpu_flags(torch))}
    count = tried(lambda: int(torch.cuda.device_count()), 0, problems, "GPUs") if there else 0
    for index in range(count):
        label = f"cuda:{index}"
        found: Any = tried(
            lambda i=index: torch.cuda.get_device_properties(i), None, problems, label
        )
        if found is None:
            continue
        capability = (int(found.major), int(found.minor))
        devices[label] = Device("cuda", str(found.name), capability, int(found.total_memory))
        formats[label] = cuda_formats(
            capability, major_minor(cuda) or (0, 0), major_minor(version) or (0, 0)
        )
    return devices, formats


def _cpu_flags(torch: Any) -> list[str] | None:
    """Features of the processor: as torch knows them, else as Linux lists them."""
    with contextlib.suppress(Exception):  # newer than the oldest torch that is supported
        return [name for name, there in torch.cpu.get_capabilities().items() if there is True]
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return line.partition(":")[2].split()
    return None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cores() -> float | None:
    """CPU cores that this process may use; a container may give a part of one."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _cgroup("cpu.max")
    if quota is not None and len(quota) == 2 and quota[0].isdigit() and there is not None:
        return min(float(there), int(quota[0]) / int(quota[1]))
    return None if there is None else float(there)


def _memory_bytes() -> int | None:
    names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    sizes = [os.sysconf(name) for name in names if name in os.sysconf_names]
    there = sizes[0] * sizes[1] if len(sizes) == 2 else None
    limit = _cgroup("memory.max")
    if limit is not None and limit[0].isdigit():
        return int(limit[0]) if there is None else min(there, int(limit[0]))
    return there


def _cgroup(name: str) -> list[str] | None:
    """The words of a limit of this container, where Linux has one."""
    with contextlib.suppress(OSError):
        return (Path("/sys/fs/cgroup") / name).read_text(encoding="utf-8").split() or None
    return None


def find_disk(folder: Path) -> Disk:
    """Look at the disk of a folder.

    Args:
        folder: of the runs; need not exist.
    """
    place = folder.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    free = None
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(place).free
    return Disk(str(place), free, os.access(place, os.W_OK))


def resource_problems(cpu: Device, disk: Disk) -> list[str]:
    """Say what is too small for the demo.

    Args:
        cpu: its memory counts.
        disk: where runs go.
    """
    found = []
    if cpu.memory_bytes is not None and cpu.memory_bytes < _LEAST_MEMORY_BYTES:
        size = cpu.memory_bytes / 2**30
        found.append(f"this machine has {size:.1f} GiB of memory; the demo needs 3 GiB")
    if disk.free_bytes is not None and disk.free_bytes < _LEAST_DISK_BYTES:
        found.append(
            f"{disk.free_bytes / 2**30:.1f} GiB are free in {disk.folder}; runs need 1 GiB"
        )
    if not disk.writable:
        found.append(f"{disk.folder} is not writable; runs go there: choose another --out")
    return found
