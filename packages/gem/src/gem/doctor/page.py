"""The table that `gem doctor` prints: what a person wants to know, worst news last and in red."""

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gem.doctor.devices import Device
from gem.doctor.examine import Diagnosis
from gem.doctor.kernels import KernelChoice
from gem.doctor.packages import Package

_COLOURS = {
    "native": "green",
    "emulated": "yellow",
    "absent": "dim",
    "unknown": "dim",
    "does not load": "red",
    "version mismatch": "red",
    "not installed": "dim",
    "none": "red",
    "reference": "",
}


def page(found: Diagnosis) -> RenderableType:
    """Everything that was found, for a terminal.

    Args:
        found: what `gem.doctor.examine.examine` returned.
    """
    # Texts hold brackets, as in gem-embeddings[torchrec], which rich would take for its markup.
    return Group(*_parts(found))


def _parts(found: Diagnosis) -> Iterator[RenderableType]:
    yield Text(f"Python {found.python} on {found.platform}", style="bold")
    packages = _table("package", "version", "for")
    for name, package in found.packages.items():
        if package.state == "loads":
            packages.add_row(name, Text(package.version or ""), Text(package.use))
        else:
            why = f"{package.use}: {package.why}" if package.why else package.use
            packages.add_row(name, _coloured(package.state), Text(why))
    yield packages
    if found.torchrec.version is not None:
        yield _together("torchrec with fbgemm", found.torchrec)
    yield _devices(found)
    yield from _operators(found)
    yield from _formats(found)
    for note in found.notes:
        yield Text(f"note: {note}", style="dim")
    for problem in found.problems:
        yield Text.assemble(("problem: ", "bold red"), problem)
    if not found.problems:
        yield Text.assemble(("all there: ", "bold green"), "gem train synthetic-debug will run")


def _together(name: str, found: Package) -> RenderableType:
    line = Text.assemble(f"{name}: ", (found.state, _COLOURS.get(found.state, "green")))
    return Padding(line.append(f" ({found.why})" if found.why else ""), (0, 0, 1, 1), expand=False)


def _devices(found: Diagnosis) -> Table:
    table = _table("device", "name", "memory", "can use")
    for label, device in found.devices.items():
        size = device.memory_bytes
        memory = Text(f"{size / 2**30:.0f} GiB" if size else "unknown")
        table.add_row(label, Text(device.name), memory, Text(_abilities(device)))
    free = found.disk.free_bytes
    room = Text(f"{free / 2**30:.0f} GiB" if free is not None else "unknown")
    table.add_row("disk of runs", Text(found.disk.folder), room, Text("free"))
    return table


def _abilities(device: Device) -> str:
    if device.capability is not None:
        major, minor = device.capability
        return f"compute capability {major}.{minor}"
    cores = "cores unknown" if device.cores is None else f"{device.cores:g} cores"
    return cores if device.threads is None else f"{cores}, torch takes {device.threads}"


def _operators(found: Diagnosis) -> Iterator[RenderableType]:
    if not found.operators:
        return
    labels = _columns(found)
    # Without a GPU, what one would run by is of interest all the same.
    table = _table("operator", *(f"on {name}" for name in labels.values()), "has")
    package = None
    for name, operator in found.operators.items():
        if operator.package != package:
            package = operator.package
            table.add_row(Text(package, style="dim"))
        runs = [_run_by(operator.devices[label], found.devices[label]) for label in labels]
        table.add_row(f"  {name}", *runs, Text(", ".join(operator.has)))
    yield table
    said = {
        (label, choice.kernel, choice.why)
        for operator in found.operators.values()
        for label, choice in operator.devices.items()
        if label in labels
    }
    for label, kernel, why in sorted(said):
        yield _footnote(f"{labels[label]}, {kernel}: {why}")


def _formats(found: Diagnosis) -> Iterator[RenderableType]:
    if not found.formats:
        return
    labels = _columns(found)
    table = _table("number format", *(f"on {name}" for name in labels.values()), "in a recipe")
    why: dict[tuple[str, str], list[str]] = {}
    for name, number_format in found.formats.items():
        states = [number_format.devices[label] for label in labels]
        if number_format.recipe is None:
            recipe = Text("")
        elif number_format.built:
            recipe = Text(number_format.recipe)
        else:
            recipe = Text(f"{number_format.recipe}: not built", style="dim")
        table.add_row(name, *(_coloured(state.state) for state in states), recipe)
        for label, state in zip(labels, states, strict=True):
            if state.state != "native":
                why.setdefault((label, state.why), []).append(name)
    yield table
    for (label, reason), names in why.items():
        yield _footnote(f"{labels[label]}, {', '.join(names)}: {reason}")


def _columns(found: Diagnosis) -> dict[str, str]:
    """The devices that need a column, and what stands above it: equal GPUs share one."""
    alike: dict[tuple[str, tuple[int, int] | None], list[str]] = {}
    for label, device in found.devices.items():
        alike.setdefault((device.name, device.capability), []).append(label)
    return {
        same[0]: same[0] if len(same) == 1 else f"{same[0]} and {len(same) - 1} more"
        for same in alike.values()
    }


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    table.columns[0].no_wrap = True
    return table


def _coloured(word: str) -> Text:
    return Text(word, style=_COLOURS.get(word, "green"))


def _run_by(choice: KernelChoice, device: Device) -> Text:
    # The reference is what a CPU is for, and a loss on a GPU.
    slow = device.kind == "cuda" and choice.kernel == "reference"
    return Text(choice.kernel, style="yellow") if slow else _coloured(choice.kernel)


def _footnote(text: str) -> RenderableType:
    return Padding(Text(text, style="dim"), (0, 0, 0, 1), expand=False)
