"""Is this machine fit to run? With a journal: what went wrong in that run, and what it is bound
by."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.observe import run_tables
from elastic.observe.diagnosis import machine_checks
from elastic.observe.diagnosis.doctor_check import DoctorCheck, HostView, Mark
from elastic.observe.diagnosis.gpu_setup import gpu_checks
from elastic.observe.diagnosis.verdicts import RunVerdict, percent
from elastic.observe.run_view import View

TROUBLES = {
    "NodeLost": "nodes lost", "WorkerFailed": "worker failures", "Silent": "silent workers",
    "PlanFailed": "failed plans", "DigestChecked": "content that differs",
    "CopyFailed": "checkpoints not made", "CopyDamaged": "damaged copies",
    "RequestFailed": "requests without a node", "WrongNumbers": "silent data corruption",
    "NodesMute": "driver's host cut off",
}  # fmt: skip


def machine(storage: str = ".") -> list[DoctorCheck]:
    """All checks of this machine; starts nothing and changes nothing, but that a few megabytes go
    to the storage and are removed again."""
    here = HostView()
    return [
        machine_checks.python(),
        machine_checks.package(here, "torch"),
        machine_checks.package(here, "ray"),
        machine_checks.requirements(here),
        *gpu_checks(here),
        *machine_checks.cpus(here),
        machine_checks.memory(here),
        machine_checks.shm(here),
        *machine_checks.limits(here),
        machine_checks.clock(),
        machine_checks.ports(),
        *machine_checks.storage(storage),
        machine_checks.open_clusters(),
    ]


def run_troubles(view: View) -> list[DoctorCheck]:
    """What a journal shows that a person should know."""
    checks = [
        DoctorCheck(
            "phase",
            f"{view.phase} at step {view.progress}",
            "bad" if view.phase == "failed" else "ok",
            "",
        )
    ]
    if spent := run_tables.spent_early(view):
        checks.append(DoctorCheck("budget", spent, "look", run_tables.MORE_BUDGET))
    for kind, name in TROUBLES.items():
        notes = [note for note in view.notes if note.kind == kind]
        if kind == "NodeLost":
            notes = [note for note in notes if " was released" not in note.text]
        if kind == "WorkerFailed":  # the others are echoes of another one's end
            notes = [note for note in notes if "(collective)" not in note.text] or notes
        if kind == "NodesMute":  # what began and has ended is one time
            now = notes[-1:] if view.cut_off else []
            notes = [
                note for note in notes[: len(notes) - len(now)] if " had answered " in note.text
            ] + now
        if notes:
            verdict: Mark = "bad" if kind == "DigestChecked" else "look"
            checks.append(
                DoctorCheck(
                    name,
                    f"{len(notes)}, the last at step {notes[-1].step}: {notes[-1].text}",
                    verdict,
                )
            )
    lost = len(view.points) - len(view.curve())
    if lost:
        checks.append(
            DoctorCheck(
                "steps trained again",
                str(lost),
                "look",
                "elastic ledger shows their price (wasted_progress)",
            )
        )
    # a script keeps its own copies
    if view.saved_step is None and view.step and not view.job.restarted:
        checks.append(
            DoctorCheck(
                "checkpoint",
                "none",
                "look",
                "set checkpoint_every, or the loss of all nodes ends the run",
            )
        )
    return checks


def bounds(found: Sequence[RunVerdict]) -> list[DoctorCheck]:
    """What the run is bound by, with what to try next."""
    return [
        DoctorCheck(
            f"bound by {one.bound}" + (f", {percent(one.share)}" if one.share >= 0.005 else ""),
            one.number,
            "look" if one.share > 0 else "ok",
            one.advice,
        )
        for one in found
    ]
