"""Signals: noted once, then as usual."""

import os
import signal

import pytest

from gem.train import interrupt
from gem.train.interrupt import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.signal_number == 0
        os.kill(os.getpid(), number)
        assert stop.signal_number == number
    assert signal.getsignal(number) is before


def test_only_a_second_keypress_ends_at_once(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
    with StopRequest() as stop:
        for now[0] in (10.0, 10.4):  # the same Ctrl-C, from the terminal and from torchrun
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.signal_number == signal.SIGINT
        now[0] = 12.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
