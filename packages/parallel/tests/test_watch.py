"""A rank that gives no sign of life ends the others, and nothing else does."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from gem_parallel.watch import Watch
from gem_parallel.whereabouts import has_ended, own_whereabouts

# Two ranks in a collective; the second one stands still in the first step. Its sockets stay open.
STANDS_STILL = """
import os, signal, torch, torch.distributed as dist
from gem_parallel.launch import process_group
with process_group("cpu") as world:
    dist.all_reduce(torch.ones(1))
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))
"""
HOST = socket.gethostname()


def watches(limit_s=30.0, size=3):
    store = dist.HashStore()
    return [Watch(store, rank, size, limit_s) for rank in range(size)]


def beats(some, count, elapsed_s=5.0):
    return [[watch.look(elapsed_s) for watch in some] for _ in range(count)][-1]


def test_ranks_that_live_are_left_alone():
    assert beats(watches(), 30) == [None] * 3


def test_a_silent_rank_is_named_to_all_after_the_limit():
    first, second, third = watches()
    beats([first, second, third], 3)
    # Its last sign came after the first one's last look, and was new to the next.
    assert beats([first, second], 6) == [None, None]
    assert beats([first, second], 1) == [f"no sign of rank 2 on host {HOST} for 30 s"] * 2
    assert third.look(5.0) == f"no sign of rank 2 on host {HOST} for 30 s"


def test_the_first_rank_is_watched_by_all_others():
    _, second, third = some = watches()
    beats(some, 2)
    assert beats([second, third], 5) == [None, None]
    assert beats([second, third], 1) == [f"no sign of rank 0 on host {HOST} for 30 s"] * 2


def test_a_rank_that_was_never_heard_counts_too_and_more_are_counted():
    first, _, _ = watches()
    assert beats([first], 5) == [None]
    assert beats([first], 1) == ["no sign of rank 1 and 1 more for 30 s"]


def test_a_rank_that_has_left_is_not_missed():
    first, second, third = some = watches()
    beats(some, 2)
    third.leave()
    second.leave()
    assert beats([first], 20) == [None]


def test_time_in_which_this_machine_slept_does_not_count():
    first, second, _ = some = watches()
    beats(some, 2)
    assert first.look(10_000.0) is None
    assert beats([first, second], 3) == [None, None]


@pytest.fixture
def neighbour():
    """Another process of this machine, and what it says of itself."""
    words = "import sys, gem_parallel.whereabouts as w; print(w.own_whereabouts(), flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{words}; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield process, process.stdout.readline().strip()
    process.kill()
    process.communicate()


def test_a_process_that_was_killed_is_gone_before_anybody_takes_note(neighbour):
    process, word = neighbour
    assert not has_ended(word)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert has_ended(word)
    process.wait()
    assert has_ended(word)


def test_what_cannot_be_looked_up_is_not_gone():
    boot, space, _, began = own_whereabouts().split("/")
    assert not has_ended(own_whereabouts())
    assert not has_ended("-")
    assert not has_ended("")
    for elsewhere in (f"other/{space}", f"{boot}/pid:[1]"):
        assert not has_ended(f"{elsewhere}/999999999/{began}")
    # The same number, given to a process that began later.
    assert has_ended(f"{boot}/{space}/{os.getpid()}/1")


def test_a_killed_rank_of_this_machine_is_told_at_the_next_look(neighbour):
    process, word = neighbour
    first, second, third = some = watches()
    third._sign = f"{HOST} {word}"
    assert beats(some, 2) == [None] * 3
    process.kill()
    process.wait()
    line = f"the end of the process of rank 2 on host {HOST}"
    assert beats([first, second], 1) == [line, line]
    assert not first.others_are_gone


def test_a_rank_that_left_before_its_process_ended_is_not_missed(neighbour):
    process, word = neighbour
    first, second = some = watches(size=2)
    second._sign = f"{HOST} {word}"
    beats(some, 2)
    process.kill()
    process.wait()
    second.leave()
    assert beats([first], 20) == [None]
    # Without its farewell it would have been: nobody else is left to be told.
    second._store.set("gem/alive/1", f"9 {second._sign}")
    assert beats([first], 1) == [f"the end of the process of rank 1 on host {HOST}"]
    assert first.others_are_gone


class GoneStore:
    def set(self, key, value):
        raise RuntimeError("Broken pipe\nat some place")


def test_a_store_that_does_not_answer_ends_the_wait():
    watch = Watch(GoneStore(), 1, 2, 30.0)
    assert beats([watch], 5) == [None]
    assert beats([watch], 1) == ["no answer from the store of the job for 30 s (Broken pipe)"]


@pytest.fixture
def ranks(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    script = tmp_path / "stands_still.py"
    script.write_text(STANDS_STILL)
    shared = {
        **os.environ,
        **{"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port},
        "GEM_RANK_SILENCE_S": "2",
    }
    some = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**shared, "RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(tmp_path / str(rank))},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    yield some
    for process in some:
        process.kill()
        process.communicate()


def test_a_process_that_stands_still_ends_the_other_one_with_a_line(ranks, tmp_path):
    stopped = False
    while not stopped:  # until the second rank has stopped itself
        _, status = os.waitpid(ranks[1].pid, os.WUNTRACED)
        stopped = os.WIFSTOPPED(status)
    began = time.monotonic()
    _, err = ranks[0].communicate(timeout=60)
    assert time.monotonic() - began < 10  # two seconds, and some beats
    assert ranks[0].returncode == 1
    line = (
        f"error: process_group: every rank must go on to the end; got no sign of rank 1 on host "
        f"{HOST} for 2 s; look at that host; gem train goes on with --resume"
    )
    assert line in err.splitlines()
    assert line in (tmp_path / "0").read_text()
    os.kill(ranks[1].pid, signal.SIGKILL)
