"""End this process when another rank has died without a word, in place of waiting for it.

A collective waits for every rank. That a process has ended its launcher sees, and gloo its peers;
that a host has lost its power, or a process stands still, nobody sees before the time limit of the
collective, which has to be long: one rank may prepare data for minutes while the others wait. So
each rank gives a sign of life through the store of the job, from a thread of its own, and the first
one looks at all of them. A rank that waits on a GPU for one that was killed is not told so by NCCL,
and heeds no signal of the launcher: where both are on one machine, the process is looked up, too.
Left out: what to do about it. The launcher starts the job again.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from gem_opkit.errors import refusal
from gem_parallel.whereabouts import has_ended, own_whereabouts

_LONGEST_BEAT_S = 5.0
_BEATS_A_LIMIT = 6
_PREFIX = "gem/alive/"
_GONE = "gem/gone"
_LEFT = b"left"


class Watch:
    """What one rank knows of the others. One call of `look` is one beat.

    Args:
        store: of the job; its keys are those of this start of the job alone.
        rank: of this process.
        size: ranks of the job.
        limit_s: silence after which a rank counts as dead, seconds.

    Attributes:
        beat_s: seconds from one look to the next.
        others_are_gone: whether nobody is left who could be told.
    """

    def __init__(self, store: Any, rank: int, size: int, limit_s: float) -> None:
        self.beat_s = min(_LONGEST_BEAT_S, limit_s / _BEATS_A_LIMIT)
        self._store, self._rank, self._limit_s = store, rank, limit_s
        # The first rank watches all, the others watch it and believe what it says.
        self._watched = [r for r in (range(size) if rank == 0 else (0,)) if r != rank]
        self._signs: dict[int, bytes] = {}
        self._silent_s = dict.fromkeys(self._watched, 0.0)
        self._store_silent_s = 0.0
        self._beats = 0
        self._sign = f"{socket.gethostname()} {own_whereabouts()}"
        self.others_are_gone = False

    def look(self, elapsed_s: float) -> str | None:
        """Give a sign of life and look for those of others.

        Args:
            elapsed_s: since the last look. More than two beats count as two: a machine that slept
                has not heard anybody meanwhile.

        Returns:
            Who is missing, once somebody is; None as long as all is well.
        """
        elapsed_s = min(elapsed_s, 2.0 * self.beat_s)
        try:
            found = self._ask(elapsed_s)
        except RuntimeError as fault:  # all errors of torch's stores are of this kind
            self._store_silent_s += elapsed_s
            if self._store_silent_s < self._limit_s:
                return None
            first = str(fault).partition("\n")[0]
            return f"no answer from the store of the job for {self._limit_s:.0f} s ({first})"
        self._store_silent_s = 0.0
        return found

    def _ask(self, elapsed_s: float) -> str | None:
        store = self._store
        self._beats += 1
        store.set(f"{_PREFIX}{self._rank}", f"{self._beats} {self._sign}")
        if store.check([_GONE]):
            return store.get(_GONE).decode()
        # To get a key that nobody has set would wait for it.
        keys = {rank: f"{_PREFIX}{rank}" for rank in self._watched}
        there = [r for r in self._watched if r in self._signs or store.check([keys[r]])]
        now = dict(zip(there, store.multi_get([keys[r] for r in there]), strict=True))
        for rank in self._watched:
            sign = now.get(rank, b"")
            heard = sign == _LEFT or sign != self._signs.get(rank, b"")
            self._silent_s[rank] = 0.0 if heard else self._silent_s[rank] + elapsed_s
        self._signs |= now
        ended = [r for r in self._watched if self._has_ended(r)]
        silent = [r for r in self._watched if self._silent_s[r] >= self._limit_s]
        if not ended and not silent:
            return None
        self.others_are_gone = len(ended) == len(self._watched) and self._rank == 0
        if ended:
            found = f"the end of the process of {self._name(ended)}"
        else:
            found = f"no sign of {self._name(silent)} for {self._limit_s:.0f} s"
        store.set(_GONE, found)
        return found

    def _has_ended(self, rank: int) -> bool:
        """Whether a rank's process is gone that has not said that it leaves."""
        sign = self._signs.get(rank, b"")
        if sign == _LEFT or not has_ended(sign.decode().rpartition(" ")[2]):
            return False
        # It may have left since: that is said before the process ends.
        return self._store.get(f"{_PREFIX}{rank}") != _LEFT

    def _name(self, ranks: list[int]) -> str:
        words = self._signs.get(ranks[0], b"").decode().split(" ")
        place = f" on host {words[1]}" if len(words) > 1 else ""
        more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        return f"rank {ranks[0]}{place}{more}"

    def leave(self) -> None:
        """Say that this rank ends and is not to be waited for."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{_PREFIX}{self._rank}", _LEFT.decode())


@contextmanager
def watched(
    store: Any,
    rank: int,
    size: int,
    limit_s: float,
    *,
    end: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Watch the other ranks for the length of a ``with`` block.

    Args:
        store: of the job. A connection of its own is made: the ranks' collectives are set up
            through the other one, and wait there.
        rank: of this process.
        size: ranks of the job.
        limit_s: silence after which a rank counts as dead, seconds; 0: nobody watches.
        end: called with the line to say, once a rank is missing; by default it is printed, left
            where ``torchrun`` looks for it, and the process ends.

    Yields:
        nothing; meanwhile a thread of this process looks at the others.
    """
    if limit_s == 0:
        yield
        return
    own = store.clone()
    own.set_timeout(timedelta(seconds=limit_s))
    watch, over = Watch(own, rank, size, limit_s), threading.Event()

    def beat() -> None:
        before = time.monotonic()
        missing = watch.look(0.0)
        while missing is None:
            if over.wait(watch.beat_s):
                return
            now = time.monotonic()
            missing, before = watch.look(now - before), now
        if rank == 0 and not watch.others_are_gone:
            # The store may end with this process, and the others have yet to read it.
            over.wait(2.0 * watch.beat_s)
        if not over.is_set():
            (end or _end_process)(_line(rank, missing))

    thread = threading.Thread(target=beat, name="gem-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        watch.leave()


def _line(rank: int, missing: str) -> str:
    said = refusal(
        "process_group",
        "every rank",
        must="go on to the end",
        got=missing,
        fix="look at that host; gem train goes on with --resume",
    )
    return f"error: {f'rank {rank}: ' if rank else ''}{said}"


def _end_process(line: str) -> None:
    """Say why, to the user and to the launcher, and end: the main thread waits and cannot."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
        if path:
            extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))
    os._exit(1)
