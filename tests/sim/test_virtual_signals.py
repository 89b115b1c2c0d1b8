"""Signals while a run is simulated."""

from __future__ import annotations

import os
import signal

import pytest
from support.sim.tiny_driver import Tiny, start

from elastic.driver import drive
from elastic.ledger.journal import MemoryJournal


def test_on_a_virtual_clock_signals_are_the_callers() -> None:
    """A simulated run that a Ctrl-C stopped would be told as one that the market ended."""

    class Simulated(Tiny):
        virtual = True

    noted: list[int] = []
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: lambda number, frame: noted.append(number),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        backend = Simulated(at_step={2: lambda: os.kill(os.getpid(), signal.SIGINT)})
        with pytest.raises(KeyboardInterrupt):
            drive(backend, MemoryJournal(), start())
        assert backend.step == 2 and backend.closed == 1
        backend = Simulated(at_step={2: lambda: os.kill(os.getpid(), signal.SIGTERM)})
        assert drive(backend, MemoryJournal(), start()).phase == "succeeded"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert noted == [signal.SIGTERM]
