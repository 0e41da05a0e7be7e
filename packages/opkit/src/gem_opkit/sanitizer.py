"""Judge the report of compute-sanitizer's racecheck: ``python -m gem_opkit.sanitizer REPORT``.

Two kinds of reports are no races, because racecheck does not count what stands between the two
sides, and are told from any other by their places in the source.

**Dispatch.** A Gluon kernel whose warps do different things (``gl.warp_specialize``) starts with
code of the compiler's: some warps write to shared memory which branch each of the others is to
take, all meet at a hardware barrier, and the others read it. The barrier is one of all warps of the
block, named by a number. Places: the first line of the kernel, and the line of the call.

**Handing over.** A warp that loads operands leaves numbers for those who await them: it waits for
an mbarrier "empty", stores by a function ``tell``, and only then asks for the operands, whose
arrival ends a phase of an mbarrier "full"; the others wait for that before they read by a function
``told``. All lanes store the same to the same place and one of them arrives; racecheck, which sees
mbarriers in part, reports the pair. Places: a store in ``tell`` and a load in ``told``. Nothing is
told apart so unless every call of these two keeps the order. That machine code keeps it too, and
that all have read before one of them gives back what they share, is to be read there.
"""

import argparse
import ast
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from gem_opkit.errors import ConfigError, refusal

_RACE = re.compile(r"^=+ (?:Error|Warning): Race reported between (.*)$")
_OTHER_SIDE = re.compile(r"^=+ +and (.*)$")
_ACCESS = re.compile(
    r"(?P<kind>Read|Write) access at (?P<kernel>\w+)\+\S+ in (?P<file>[^:]+):(?P<line>\d+)"
)
_END = re.compile(r"^=+ RACECHECK SUMMARY: ")
# By kind of access: the function that hands over, and its method.
_HANDING = {"Write": ("tell", "store"), "Read": ("told", "load")}
# Modules whose functions of the same names are of global memory.
_GLOBAL = ("gl", "tl")


@dataclass(frozen=True, slots=True)
class Race:
    """Accesses to one place in shared memory that racecheck found in no order.

    Attributes:
        accesses: as the report names them: kind, kernel, file and line.
    """

    accesses: tuple[str, ...]


def races_in(report: str) -> list[Race]:
    """Read the races of a report.

    Args:
        report: what ``compute-sanitizer --tool racecheck`` has written.

    Returns:
        the races, in the order of the report.

    Raises:
        ConfigError: the report has no summary: the run was cut short, and nothing follows from it.
    """
    lines = report.splitlines()
    if not any(_END.match(line) for line in lines):
        raise ConfigError(
            refusal(
                "races_in",
                "report",
                must="end with the summary of racecheck",
                got=f"{len(lines)} lines without one",
                fix="let the run come to its end",
            )
        )
    found: list[list[str]] = []
    for line in lines:
        if race := _RACE.match(line):
            found.append([race[1]])
        elif found and (side := _OTHER_SIDE.match(line)):
            found[-1].append(side[1])
    return [Race(tuple(accesses)) for accesses in found]


def is_dispatch(race: Race, sources: Collection[Path]) -> bool:
    """Tell whether a race is that of the compiler's code in front of ``gl.warp_specialize``.

    Args:
        race: as reported.
        sources: files in which kernels are written.

    Returns:
        whether each access stands on the first line of a kernel or on that of the call.
    """
    return all(_is_dispatch_access(access, sources) for access in race.accesses)


def _is_dispatch_access(access: str, sources: Collection[Path]) -> bool:
    place = _ACCESS.match(access)
    if place is None:
        return False
    for file in sources:
        if file.name != place["file"]:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == place["kernel"]:
                calls = [s.lineno for s in ast.walk(node) if isinstance(s, ast.stmt) and _sends(s)]
                if int(place["line"]) in (node.lineno, *calls):
                    return True
    return False


def _sends(statement: ast.stmt) -> bool:
    """Tell whether a statement is a call of ``gl.warp_specialize``, or a choice between such."""
    if isinstance(statement, ast.If):
        return all(_sends(s) for s in (*statement.body, *statement.orelse))
    call = statement.value if isinstance(statement, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "warp_specialize"
    )


def is_handing_over(race: Race, sources: Collection[Path]) -> bool:
    """Tell whether a race is between numbers left for awaiting warps and the reading of these.

    Args:
        race: as reported.
        sources: files in which kernels are written.

    Returns:
        whether its accesses are stores in ``tell`` and loads in ``told``, all of one kernel, and
        every call of the two in the sources keeps the order.
    """
    places = [_ACCESS.match(access) for access in race.accesses]
    known = [place for place in places if place is not None]
    homes = {_home_of(place, sources) for place in known}
    home = homes.pop() if len(homes) == 1 else None
    return (
        home is not None
        and len(known) == len(places)
        and len({place["kernel"] for place in known}) == 1
        and {place["kind"] for place in known} == set(_HANDING)
        and all(_keeps_order(file, home) for file in sources)
    )


def _home_of(place: re.Match[str], sources: Collection[Path]) -> Path | None:
    """Return the file whose ``tell`` or ``told``, and nothing else so named, has an access."""
    function, method = _HANDING[place["kind"]]
    having = [
        (node.name, file)
        for file in sources
        if file.name == place["file"]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and call.lineno == int(place["line"])
        if isinstance(call.func, ast.Attribute) and call.func.attr == method
        if not (isinstance(call.func.value, ast.Name) and call.func.value.id in _GLOBAL)
    ]
    return having[0][1] if [name for name, _ in having] == [function] else None


def _keeps_order(file: Path, home: Path) -> bool:
    """Tell whether each ``tell`` stands between "empty" and "full", each ``told`` after "full"."""
    text = file.read_text(encoding="utf-8")
    functions = [function for function, _ in _HANDING.values()]
    if not any(function in text for function in functions):
        return True
    tree = ast.parse(text)
    mine = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        if node.module and home.with_suffix("").as_posix().endswith(node.module.replace(".", "/"))
        for name in node.names
        if name.name in functions
    }
    if file == home:
        mine = set(functions)
    calls = {
        id(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        if ast.unparse(node.func) in {*mine, *(f"{home.stem}.{name}" for name in functions)}
    }
    return calls <= set(_in_order(tree))


def _in_order(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        block = getattr(node, "body", None)
        if not isinstance(block, list):
            continue
        awaited = ""
        for statement, following in zip(block, [*block[1:], ast.Pass()], strict=True):
            value = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
            name = _called(value)
            if (name == "told" and "full" in awaited) or (
                name == "tell" and "empty" in awaited and "full" in ast.unparse(following)
            ):
                yield id(value)
            # What is only computed meanwhile changes nothing.
            if not isinstance(statement, ast.Assign):
                awaited = ast.unparse(statement) if name == "wait" else ""


def _called(node: ast.AST | None) -> str:
    """Return the last part of the name of what an expression calls, or nothing."""
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


def main() -> None:
    """Print what a report has beside these two kinds, and exit with 1 if it has anything."""
    parser = argparse.ArgumentParser(
        prog="python -m gem_opkit.sanitizer",
        description="Judge a report of compute-sanitizer's racecheck.",
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("--sources", type=Path, default=Path("packages"))
    given = parser.parse_args()
    sources = sorted(given.sources.rglob("*.py"))
    races = races_in(given.report.read_text(encoding="utf-8"))
    dispatch = [race for race in races if is_dispatch(race, sources)]
    handing = [race for race in races if race not in dispatch and is_handing_over(race, sources)]
    others = [race for race in races if race not in dispatch and race not in handing]
    for race in others:
        sys.stdout.write("race: " + "; ".join(race.accesses) + "\n")
    sys.stdout.write(
        f"{len(others)} races; {len(dispatch)} more are the dispatch of warps, "
        f"{len(handing)} numbers handed over\n"
    )
    sys.exit(1 if others else 0)


if __name__ == "__main__":
    main()
