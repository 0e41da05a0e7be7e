"""A run in a process of its own that ends, with no warning, before it next changes the disk."""

import os
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

from gem.config import RunConfig
from gem.train import loop
from gem_parallel.launch import World

_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")


def dies(world: World, config: RunConfig, folder: Path, data_root: Path, last: int | None) -> int:
    """Train; die before the operation of that number, or return how many there are."""
    done, lock = 0, threading.Lock()  # checkpoints are written by a thread

    def hook(event: str, args: tuple) -> None:
        nonlocal done
        if changes(event, args, str(folder)):
            with lock:
                done += 1
                if done == last:
                    os._exit(99)

    loop.process_group = lambda _: nullcontext(world)
    sys.addaudithook(hook)
    loop.train(config, folder, data_root=data_root)
    return done


def changes(event: str, args: tuple, folder: str) -> bool:
    """Whether an event of ``sys.addaudithook`` changes something in a folder."""
    if event == "open":
        path, mode, flags = args
        writes = any(c in mode for c in "wax+") if isinstance(mode, str) else flags & os.O_CREAT
        return bool(writes) and str(path).startswith(folder)
    return event in _CHANGES and str(args[0]).startswith(folder)
