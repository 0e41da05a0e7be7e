"""What ends a command early, as one line: what, where, what was expected, what came, what to do.

A user's mistake, a full disk or a missing permission is one line on stderr and exit code 2; with
``gem --debug`` the traceback stands above it. Anything else is a bug and keeps its traceback. Under
``torchrun`` the line also goes to the launcher, which repeats it at the end of its own report.
"""

import contextlib
import difflib
import errno
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import typer

from gem.quick_exit import NotedInterrupt
from gem_opkit.errors import ConfigError, GemError, refusal

# typer brings its own copy of click's errors in some versions and click itself in others.
_UsageFault: Any = typer.BadParameter.__mro__[2]

_INTERRUPTED = 128 + signal.SIGINT
_OTHER_PLACE = "choose another place"
_FREE_SPACE = "free space there and try again; gem train continues with --resume"
_CHECK_PATH = "check the path"
# errno -> what the path must be, and what to do.
_SYSTEM_RULES: dict[int, tuple[str, str]] = {
    errno.ENOENT: ("exist", _CHECK_PATH),
    errno.EACCES: ("be open to this user", f"change its permissions or {_OTHER_PLACE}"),
    errno.EPERM: ("be open to this user", f"change its permissions or {_OTHER_PLACE}"),
    errno.EROFS: ("be writable", _OTHER_PLACE),
    errno.ENOSPC: ("lie on a disk with free space", _FREE_SPACE),
    errno.EDQUOT: ("lie on a disk with free space", _FREE_SPACE),
    errno.EFBIG: ("be as long as it has to be", "lift the limit on file sizes (ulimit -f)"),
    errno.EEXIST: ("not be there yet", f"remove it or {_OTHER_PLACE}"),
    errno.ENOTDIR: ("lie in a folder, not below a file", _CHECK_PATH),
    errno.EISDIR: ("be a file, not a folder", _CHECK_PATH),
    errno.ELOOP: ("not be a circle of links", _CHECK_PATH),
    errno.ENAMETOOLONG: ("have a name that the disk can hold", "shorten it"),
    errno.EMFILE: ("be opened", "raise the limit on open files (ulimit -n)"),
    errno.EIO: ("be readable and writable", "check the disk"),
}
# What the back ends of torch.distributed say when the rank at the other end is gone.
_PEER_GONE = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ECONNRESET"),
    "remote process exited",
)
_NO_MEMORY = (
    *("can't allocate memory", "out of memory", "bad_alloc", "malloc of size"),
    # Of what no machine could hold.
    *("Storage size calculation overflowed", "Maximum allowed dimension exceeded"),
    "array is too big",
)


@dataclass
class Asked:
    """What the command line was asked for, as far as its faults need to know.

    Attributes:
        debug: show the traceback above an error.
        command: the command that runs, as in ``gem train``.
    """

    debug: bool = False
    command: str = "gem"


def run_app(app: typer.Typer) -> NoReturn:
    """Run the command line and end the process as its outcome says.

    Args:
        app: the commands. The callback of its top level gets an `Asked` as the context's object.

    Raises:
        SystemExit: always: 0, the command's own code, 2 for a user's error, 130 for Ctrl-C.
    """
    with NotedInterrupt() as interrupt:
        _run(app, Asked(), interrupt)


def _run(app: typer.Typer, asked: Asked, interrupt: NotedInterrupt) -> NoReturn:
    try:
        _check_text(sys.argv[1:])
        code = app(prog_name="gem", standalone_mode=False, obj=asked)
        sys.stdout.flush()
        if code == _INTERRUPTED:  # typer's own end of a KeyboardInterrupt; older ones raise Abort
            raise KeyboardInterrupt
    except (KeyboardInterrupt, typer.Abort):
        _end_interrupted()
    except BrokenPipeError:  # whoever read the output has gone, as in `gem doctor | head -3`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except Exception as fault:
        if interrupt.came:
            _end_interrupted()
        if type(fault).__name__ == "NoArgsIsHelpError":  # typer has printed the help by now
            raise SystemExit(2) from None
        line = one_line(fault, asked.command)
        if line is None:
            raise
        if asked.debug:
            traceback.print_exc()
        _say(line, secondary=_is_peer_gone(fault))
        raise SystemExit(2) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _end_interrupted() -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        typer.echo("interrupted", err=True)
    raise SystemExit(_INTERRUPTED) from None


def one_line(fault: Exception, command: str = "gem") -> str | None:
    """The line that a fault is told in.

    Args:
        fault: what was raised.
        command: where, for faults that do not say so themselves.

    Returns:
        One line, or None where the fault is a bug.
    """
    from pydantic import ValidationError

    if isinstance(fault, _UsageFault):
        text = _usage_line(fault)
    elif isinstance(fault, GemError | ValidationError):
        text = str(fault)
    elif isinstance(fault, OSError):
        text = _system_line(fault, command)
    elif isinstance(fault, UnicodeEncodeError) and "surrogates" in fault.reason:
        text = _no_text(command, fault.object)
    elif _is_out_of_memory(fault):
        text = refusal(
            command,
            "memory",
            must="hold the model, its optimizers and a batch",
            got=f"{type(fault).__name__}: {str(fault).strip().partition(chr(10))[0]}",
            fix="lower train.batch_examples, the rows of the tables or the widths of the model",
        )
    elif _is_peer_gone(fault):
        text = refusal(
            command,
            "every rank",
            must="go on to the end",
            got="the end of another one",
            fix="see the error of the rank that ended first",
        )
    else:
        return None
    # Whatever the message holds: pydantic's has several lines, and so may a path.
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def _check_text(words: Sequence[str]) -> None:
    """Refuse bytes that are no text before a run is trained that cannot write its files there."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(_no_text("gem", word)) from None


def _no_text(where: str, word: str) -> str:
    return refusal(
        where,
        "paths and other words",
        must="be text in UTF-8, as Parquet takes no other names",
        got=ascii(word),
        fix="rename that file or folder",
    )


def _say(line: str, *, secondary: bool) -> None:
    rank = int(os.environ.get("RANK", "0"))
    text = f"error: {f'rank {rank}: ' if rank else ''}{line}"
    if secondary:
        # The rank that failed first speaks, and the launcher ends this one before it does.
        time.sleep(2.0)
    elif rank and "torch" not in sys.modules:
        # Before ranks meet, each finds the same fault: rank 0 tells it, and the launcher ends this
        # one, unless it is the only one to have found it.
        time.sleep(10.0)
    _tell_launcher(text)
    typer.echo(text, err=True)


def _tell_launcher(text: str) -> None:
    """Leave the line where torchrun looks for the cause of a rank's failure."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def _is_out_of_memory(fault: Exception) -> bool:
    """Python's own, or that of torch's allocators, which the CPU one has no class for."""
    if isinstance(fault, MemoryError):
        return True
    kinds = RuntimeError, ValueError
    return isinstance(fault, kinds) and any(word in str(fault) for word in _NO_MEMORY)


def _is_peer_gone(fault: Exception) -> bool:
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    return (
        not alone
        and isinstance(fault, RuntimeError)
        and not isinstance(fault, GemError)
        and any(word in str(fault) for word in _PEER_GONE)
    )


def _system_line(fault: OSError, command: str) -> str:
    must, fix = _SYSTEM_RULES.get(fault.errno or 0, ("be usable", _CHECK_PATH))
    if fault.errno == errno.EEXIST and fault.filename and Path(fault.filename).is_file():
        must = "be a folder"
    name = "a file that it writes" if fault.filename is None else str(fault.filename)
    got = fault.strerror or str(fault) or type(fault).__name__
    return refusal(command, name, must=must, got=got[:1].lower() + got[1:], fix=fix)


def _usage_line(fault: Any) -> str:
    """What is wrong with the words of a command, in the form of all errors."""
    context: Any = fault.ctx
    where = "gem" if context is None else context.command_path
    name, must = "arguments", "be as the help says"
    got = " ".join(fault.format_message().split()).rstrip(".")
    got, fix = got[:1].lower() + got[1:], f"see {where} --help"
    match type(fault).__name__:
        case "MissingParameter":
            name, must, got = got.split("'")[1], "be given", "nothing"
        case "NoSuchOption" if context is not None:
            known = [word for param in context.command.get_params(context) for word in param.opts]
            known = [word for word in known if word.startswith("--")]
            close = difflib.get_close_matches(fault.option_name, known, n=1, cutoff=0.5)
            name, must, got = "OPTION", f"be one of {', '.join(known)}", fault.option_name
            fix = f"did you mean {close[0]}?" if close else fix
            if got == "--debug":
                fix = "put it first: gem --debug" + where.removeprefix("gem")
    return refusal(where, name, must=must, got=got.removeprefix("got "), fix=fix)
