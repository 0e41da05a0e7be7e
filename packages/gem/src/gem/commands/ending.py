"""How a command ends early, and what it says of going on."""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import typer


class Terminated(BaseException):
    """SIGTERM came while a run was set up, or in a command that does not train."""


@contextmanager
def terminate_by_exception() -> Iterator[None]:
    """Turn SIGTERM into an exception, as Python does with SIGINT; the training loop has its own."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def terminated_cleanly(left: str = "nothing was written") -> Iterator[None]:
    """Have SIGTERM undo what is half written and end with a word and its own exit code."""
    try:
        with terminate_by_exception():
            yield
    except Terminated:
        if os.environ.get("RANK", "0") == "0":
            typer.echo(f"terminated; {left}", err=True)
        raise SystemExit(128 + signal.SIGTERM) from None


def refuse_ranks(where: str, given: str, fix: str) -> None:
    """Refuse several ranks where each would do, and write, the same."""
    from gem_opkit.errors import UnsupportedError, refusal

    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UnsupportedError(
            refusal(where, given, must="run in one process", got=f"{ranks} ranks", fix=fix)
        )


def end_early(what: str, reason: int, more: Sequence[str] = ("--resume",)) -> NoReturn:
    """Say how to go on. Only a person's Ctrl-C is no success: all that was done is kept."""
    words = [w for w in sys.argv[1:] if w not in more]
    command = shlex.join([*this_program(), *words, *more])
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"{what}. Continue with:\n\n    {command}\n", err=True)
    raise SystemExit(128 + reason if reason == signal.SIGINT else 0)


def this_program() -> list[str]:
    """The words that start this program again: in this environment, on as many ranks."""
    python, found = Path(sys.executable), shutil.which("python")
    # As paths, not as files: the Python of every virtual environment links to the same file.
    if found is not None and Path(found).absolute() == python.absolute():
        word = "python"
    elif python.is_relative_to(Path.cwd()):
        word = str(python.relative_to(Path.cwd()))
    else:
        word = str(python)
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks == "1":
        return [word, "-m", "gem"]
    hosts = os.environ.get("GROUP_WORLD_SIZE", "1")
    launch = ["torch.distributed.run", *(["--nnodes", hosts] if hosts != "1" else [])]
    # Where the hosts met is known to the launcher alone.
    here = os.environ.get("LOCAL_WORLD_SIZE", ranks)
    return [word, "-m", *launch, "--nproc-per-node", here, "-m", "gem"]
