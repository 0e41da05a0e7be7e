"""Which Triton and Gluon kernels a package has, and which of them a block of code started.

A test that calls every operator shows nothing of a kernel that none of its calls reaches. With the
two sets of this module it can tell: a kernel is a function of the package under ``triton.jit`` or
``gluon.jit`` whose name ends in ``_kernel``; the others are device functions.
"""

import ast
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gem_opkit.errors import ConfigError, refusal


def kernels_of(package: str) -> set[str]:
    """Find the kernels of a package in its sources; nothing of it is imported.

    Args:
        package: name of an importable package, ``"gem_jagged"``.

    Returns:
        full names, ``"gem_jagged.moves.kernel._pad_kernel"``.

    Raises:
        ConfigError: no such package, or no kernel in it.
    """
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else [Path(x) for x in spec.submodule_search_locations or []]
    names: set[str] = set()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            parts = (package, *file.relative_to(folder).with_suffix("").parts)
            module = ".".join(part for part in parts if part != "__init__")
            tree = ast.parse(file.read_text(encoding="utf-8"))
            functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
            names |= {f"{module}.{node.name}" for node in functions if _is_kernel(node)}
    if not names:
        raise ConfigError(
            refusal(
                "kernels_of",
                "package",
                must="be importable and hold a kernel",
                got=package,
                fix="name a kernel's function ..._kernel",
            )
        )
    return names


def _is_kernel(node: ast.FunctionDef) -> bool:
    if not node.name.endswith("_kernel"):
        return False
    decorators = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(isinstance(d, ast.Attribute) and d.attr == "jit" for d in decorators)


@contextmanager
def launched_kernels() -> Iterator[set[str]]:
    """Collect the full names of the kernels that are started inside the block.

    Yields:
        the set; it grows as the block runs. Compiled and interpreted kernels count, replays of a
        CUDA graph do not.
    """
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    names: set[str] = set()
    saved = [(GridExecutor, "__call__"), (JITFunction, "run")]
    originals = [owner.__dict__[name] for owner, name in saved]

    def collecting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            names.add(f"{self.fn.__module__}.{self.fn.__name__}")
            return original(self, *args, **kwargs)

        return call

    try:
        for (owner, name), original in zip(saved, originals, strict=True):
            setattr(owner, name, collecting(original))
        yield names
    finally:
        for (owner, name), original in zip(saved, originals, strict=True):
            setattr(owner, name, original)
