"""Keys of this start of the job alone, in a store that may be as old as the first one.

``torchrun`` starts a job again with the store of the first start, in which the keys of the dead
ranks still stand: a rank that reads the address of a dead one waits for it. How often a job was
started each host counts for itself. So the first rank draws a number that was never used, and
answers every rank that asks; what a rank asks by is drawn by that process and never asked again.
"""

import secrets
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore

from gem_opkit.errors import ConfigError, refusal

_POLL_S = 0.05
_STARTS, _HELLO = "gem/starts", "gem/hello/"


def store_of_this_start(store: Any, rank: int, size: int, limit: timedelta) -> PrefixStore:
    """Meet the other ranks. All of them have to call this.

    Args:
        store: of the job, which earlier starts may have used.
        rank: of this process.
        size: ranks of the job.
        limit: longest wait for the others.

    Returns:
        the store, in a part of it that no other start uses.

    Raises:
        ConfigError: ranks are missing when the time is up.
    """
    number = _answer(store, size, limit) if rank == 0 else _ask(store, rank, limit)
    return PrefixStore(f"gem/start-{number}", store)


def _ask(store: Any, rank: int, limit: timedelta) -> int:
    word = secrets.token_hex(16)
    store.set(f"{_HELLO}{rank}", word)
    try:
        store.wait([f"gem/welcome/{word}"], limit)
    except RuntimeError as fault:  # all errors of torch's stores are of this kind
        raise ConfigError(
            refusal(
                "process_group",
                "the first rank",
                must=f"answer rank {rank} within {limit.total_seconds():.0f} s",
                got=str(fault).partition("\n")[0],
                fix="look at the first host, and at ranks that have not come",
            )
        ) from fault
    number = int(store.get(f"gem/welcome/{word}"))
    store.add(_arrived(number), 1)
    return number


def _answer(store: Any, size: int, limit: timedelta) -> int:
    number = store.add(_STARTS, 1)
    end = time.monotonic() + limit.total_seconds()
    keys = {rank: f"{_HELLO}{rank}" for rank in range(1, size)}
    there: set[int] = set()
    answered: set[bytes] = set()
    # Those of an earlier start are answered too: nobody reads that.
    while store.add(_arrived(number), 0) < size - 1:
        there |= {rank for rank, key in keys.items() if rank not in there and store.check([key])}
        words = store.multi_get([keys[rank] for rank in there]) if there else []
        for word in set(words) - answered:
            store.set(f"gem/welcome/{word.decode()}", str(number))
            answered.add(word)
        if time.monotonic() > end:
            raise ConfigError(
                refusal(
                    "process_group",
                    "every rank",
                    must=f"come within {limit.total_seconds():.0f} s",
                    got=f"{store.add(_arrived(number), 0) + 1} of {size}",
                    fix="look at the hosts that are missing",
                )
            )
        time.sleep(_POLL_S)
    return number


def _arrived(number: int) -> str:
    return f"gem/arrived/{number}"
