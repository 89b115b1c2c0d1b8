"""Faults at a chosen collective inside the body of a script's loop: the same faults, trapped in the
script's thread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.worker.faults import Fault, Trap

from elastic.worker.loop.loop import Run
from elastic.worker.loop.loop_model import LoopModel
from elastic.worker.session.session import Session


def arm_loop(session: Session, fault: Fault) -> None:
    """From the first call of run.model after `fault.step` steps up to the run.step() that follows;
    one fault per process."""
    call, step = LoopModel.__call__, Run.step
    traps: list[Trap] = []

    def first_call(model: LoopModel, *args: Any, **kwargs: Any) -> Any:
        assert session.place is not None and session.place.script is not None
        if session.place.script.run.step_index == fault.step and not traps:
            traps.append(Trap(fault))
            traps[0].__enter__()
        return call(model, *args, **kwargs)

    def done(run: Run, *args: Any, **kwargs: Any) -> None:
        if traps:
            traps[0].__exit__(None, None, None)
            LoopModel.__call__, Run.step = call, step  # type: ignore[method-assign]
            if fault.path:
                Path(fault.path).write_text(json.dumps(traps[0].names))
        step(run, *args, **kwargs)

    LoopModel.__call__, Run.step = first_call, done  # type: ignore[method-assign]


Session.arm_loop = arm_loop  # type: ignore[attr-defined]
