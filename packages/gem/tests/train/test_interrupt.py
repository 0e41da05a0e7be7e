"""Signals: noted once, then as usual."""

import os
import signal

import pytest

from gem.train.interrupt import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.signal_number == 0
        os.kill(os.getpid(), number)
        assert stop.signal_number == number
    assert signal.getsignal(number) is before


def test_a_second_interrupt_ends_at_once():
    with StopRequest(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
