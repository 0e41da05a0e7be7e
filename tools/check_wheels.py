"""Prove what an environment holds of our packages: ``check_wheels.py --ours A B --others C D``.

Run it with ``python -I`` in an environment that has only wheels, so that no folder of the
checkout is on the path. Import names are given, not package folders.
"""

import argparse
import importlib
import importlib.util
import sys
import sysconfig
from pathlib import Path


def faults(ours: list[str], others: list[str]) -> list[str]:
    """Return what is wrong, one sentence each.

    Args:
        ours: import names that must be importable from site-packages, with types.
        others: import names that must not be found.

    Returns:
        the faults; empty when all is well.
    """
    site = Path(sysconfig.get_path("purelib")).resolve()
    found = []
    for name in ours:
        folder = Path(str(importlib.import_module(name).__file__)).resolve().parent
        if folder.parent != site:
            found.append(f"{name} comes from {folder}, not from site-packages")
        if not (folder / "py.typed").exists():
            found.append(f"{name} has no py.typed in its wheel")
    found += [
        f"{name} is importable, but is not declared"
        for name in others
        if importlib.util.find_spec(name) is not None
    ]
    return found


def main() -> int:
    """Check the names of the command line; say what is wrong on standard error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ours", nargs="+", required=True)
    parser.add_argument("--others", nargs="*", default=[])
    arguments = parser.parse_args()
    problems = faults(arguments.ours, arguments.others)
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
