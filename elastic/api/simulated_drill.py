"""What a drill will do to a run on the embedded cluster, told from another run there: `elastic
simulate JOB --drill FILE --calibrate RUN`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.api.planning.model_source import Subject
from elastic.api.simulate import StepTimes, measured_by
from elastic.config.job import load_drill
from elastic.errors import SpecError
from elastic.ledger.journal import Line
from elastic.observe.reporting import report
from elastic.observe.run_view import view_of
from elastic.sim.markets.drilled_run import checked, drilled_run
from elastic.sim.scripted_faults import Delays
from elastic.types import parse_layout
from elastic.types.gates import newest_gates


@dataclass(frozen=True)
class SimulatedDrill:
    """The journal of the simulated run; `notes`: where its numbers come from."""

    lines: tuple[Line, ...]
    notes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """How it ended and when, its transitions, and where the time and the money went."""
        view = view_of(self.lines)
        ended = {"outcome": view.phase, "reason": view.reason, "steps": view.step}
        return ended | report.ledger(self.lines)[0] | {"notes": list(self.notes)}

    def text(self) -> Sequence[str]:
        view = view_of(self.lines)
        return [f"{view.phase}: {view.reason}", "", *report.ledger(self.lines)[1], "", *self.notes]


def simulate_drill(subject: Subject, *, drill: str, calibrate: str) -> SimulatedDrill:
    """Raises SpecError."""
    if not calibrate:
        raise SpecError(
            "--drill needs --calibrate RUN: how long starts, pauses and steps take on this "
            "machine only a run on it can say"
        )
    if not subject.steps:
        raise SpecError(f"{subject.name}: it has no steps; give --set steps=N")
    if subject.phases:
        raise SpecError(
            f"{subject.name}: its phases have no measured times each; simulate its drill without "
            "them: --set phases=[]"
        )
    pools = subject.pools
    entries = [entry.plain() for entry in load_drill(drill, pools[0].name if pools else "")]
    checked(entries, drill)
    measured, note = measured_by(calibrate, Delays())
    if measured.start is None:
        raise SpecError(f"{calibrate}: its journal has no driver's start; nothing is known of it")
    known = measured.start.model
    start = replace(
        measured.start,
        run=subject.name,
        epoch=1,
        job=subject.job.plain() | {"drill": []},
        pools=pools,
        model=known if known.specs == subject.model.specs else subject.model,
        durable=(),
        attached=False,
        paid_until_s=None,
        **newest_gates(forms_ahead=measured.start.forms_ahead),
    )
    workers, whole_s = max(
        (parse_layout(layout).world_size, seconds)
        for (_, layout), seconds in measured.step_s.items()
    )
    lines = drilled_run(
        start,
        entries,
        measured=measured,
        step_s=StepTimes(whole_s, workers, measured.step_s, measured.ratio),
    )
    return SimulatedDrill(tuple(lines), (note,))
