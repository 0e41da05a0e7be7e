"""Processes that a command has started: with the command, they end."""

import subprocess
import sys
import threading
import time

import pytest

from gem.children import Children, threads_of

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_stopped_command_stops_its_processes_and_begins_no_others():
    children, begun, started = Children(), [], threading.Event()

    def work(number):
        process = subprocess.Popen(SLEEP)
        begun.append(process)
        started.set()
        with children.running(process):
            process.wait()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), threads_of(children, 2) as pool:
        for number in range(4):
            pool.submit(work, number)
        started.wait(20)
        raise KeyboardInterrupt
    assert time.monotonic() - began < 50
    assert 1 <= len(begun) <= 2
    assert all(process.returncode == -15 for process in begun)


def test_after_an_error_the_others_end_by_themselves():
    children, ended = Children(), []

    def work(number):
        process = subprocess.Popen([sys.executable, "-c", ""])
        with children.running(process):
            ended.append(process.wait())

    with pytest.raises(ValueError, match="elsewhere"), threads_of(children, 2) as pool:
        for number in range(3):
            pool.submit(work, number)
        raise ValueError("elsewhere")
    assert ended == [0, 0, 0]
