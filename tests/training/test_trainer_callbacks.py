"""Interrupts of a training: the first ends it in order, the second at once, and handlers are put back."""

import signal
import threading

import pytest

from support_tokens.training import StopAtInterrupt


def test_an_interrupt_outside_of_the_main_thread_is_left_to_the_caller():
    handlers = []

    def enter():
        with StopAtInterrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [before]


def test_a_second_interrupt_stops_at_once():
    before = signal.getsignal(signal.SIGINT)
    with StopAtInterrupt() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.interrupted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
