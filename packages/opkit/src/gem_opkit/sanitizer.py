"""Judge the report of compute-sanitizer's racecheck: ``python -m gem_opkit.sanitizer REPORT``.

A Gluon kernel whose warps do different things (``gl.warp_specialize``) starts with code of the
compiler's: some warps write to shared memory which branch each of the others is to take, all meet
at a hardware barrier, and the others read it. The barrier is one of all warps of the block, named
by a number; racecheck does not count it and reports a race between the two. It is told from any
other by its places: the first line of the kernel, and the line of the call.
"""

import argparse
import ast
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gem_opkit.errors import ConfigError, refusal

_RACE = re.compile(r"^=+ (?:Error|Warning): Race reported between (.*)$")
_OTHER_SIDE = re.compile(r"^=+ +and (.*)$")
_ACCESS = re.compile(
    r"(?:Read|Write) access at (?P<kernel>\w+)\+\S+ in (?P<file>[^:]+):(?P<line>\d+)"
)
_END = re.compile(r"^=+ RACECHECK SUMMARY: ")


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


def main() -> None:
    """Print what a report has beside the dispatch of warps, and exit with 1 if it has anything."""
    parser = argparse.ArgumentParser(
        prog="python -m gem_opkit.sanitizer",
        description="Judge a report of compute-sanitizer's racecheck.",
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("--sources", type=Path, default=Path("packages"))
    given = parser.parse_args()
    sources = sorted(given.sources.rglob("*.py"))
    races = races_in(given.report.read_text(encoding="utf-8"))
    others = [race for race in races if not is_dispatch(race, sources)]
    for race in others:
        sys.stdout.write("race: " + "; ".join(race.accesses) + "\n")
    sys.stdout.write(
        f"{len(others)} races; {len(races) - len(others)} more are the dispatch of warps\n"
    )
    sys.exit(1 if others else 0)


if __name__ == "__main__":
    main()
