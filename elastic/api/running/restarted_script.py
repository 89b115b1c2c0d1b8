"""A script that does not enter `elastic.loop`: started over at each change of capacity."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic.api.planning.plan_nodes import known_of, own_of
from elastic.api.running.layout_question import LayoutCheck
from elastic.api.running.options import Options
from elastic.api.running.run import JobRun, Result
from elastic.api.running.start_checks import failed_by_itself, keys_in, paid_until_s
from elastic.config.job import JobSpec, job_of
from elastic.config.key_names import place_of
from elastic.errors import RunDone, SpecError
from elastic.ledger.journal import Line
from elastic.policy.restarts import never_met
from elastic.policy.state.fold import State
from elastic.policy.stopping import stopped_by_a_person
from elastic.program import Program
from elastic.types import DriverStarted, ModelProfile
from elastic.types.gates import newest_gates
from elastic.worker.hosting.resume_checks import check_not_failed, check_not_stopped, warn_of_clock

KEYS = (
    "name", "pools", "min_workers", "max_workers", "max_nodes", "budget_usd", "head_usd_per_h",
    "deadline_h", "storage", "drill", "max_silence_s", "purpose", "on_demand_floor",
    "waiting_usd_per_h", "orphan_lease_s", "trackers", "metrics_port",
)  # fmt: skip
GATES = newest_gates(
    forms_ahead=False,  # its processes make their groups themselves
    # its memory is its own, and so is what it stores: it does on SIGTERM, and tells of neither
    saves_in_any=False, saves_in_time=False, awaits_stop=False,
    blames_program=False,  # what it prints does not tell in which step it was killed
)  # fmt: skip
FILLED = {"steps": 1, "global_batch": 1_000_000}  # what a job must have, and nobody reads here
RESTARTED = (
    "{file} does not enter elastic.loop: this is RESTART, not live. It is started on the "
    "nodes that are there, and started anew at each change of capacity; what it resumes from is "
    "its own checkpoint, as under torchrun"
)


def run_restarting(
    file: Path, args: Sequence[str], data: Mapping[str, Any], *, where: str, options: Options
) -> Result:
    """`data`: keys of a job.yaml and of --set, unchecked; `where` is what an error about them
    begins with. Raises SpecError."""
    for key in data:
        if key not in KEYS and key in JobSpec.__pydantic_fields__:
            raise SpecError(
                f"{place_of(where, [key])}: key '{key}' has no meaning for {file.name}, which does "
                f"not enter elastic.loop; keys are {', '.join(KEYS)}"
            )
    spec = job_of(dict(data) | FILLED, file, where)
    return _ScriptRun(file, tuple(args), spec, options=options).to_the_end()


class _ScriptRun(JobRun):
    """One `elastic run --script`."""

    session = "elastic.cluster.ray_train.script_session:ScriptSession"

    def __init__(
        self, file: Path, args: tuple[str, ...], spec: JobSpec, *, options: Options
    ) -> None:
        self.file, self.args = file, args
        super().__init__(spec, options)

    def _load(self, program: Program | None) -> None:
        """What it trains is the script's own affair."""

    def _layouts(self, stack: ExitStack) -> None:
        return None

    def _check_not_done(self, state: State | None) -> None:
        if state is None:
            return
        if not state.job.restarted:
            raise SpecError(
                f"run '{self.name}' is one that is changed live, not a script's; give another "
                "--run-name"
            )
        if state.phase == "succeeded":
            raise RunDone(
                f"run '{self.name}' is done; give another --run-name, or none, to start over",
                self.name,
                state.step,
            )
        if state.job.script != str(self.file) and not self.options.allow_changed:
            raise SpecError(
                f"run '{self.name}' was started with {state.job.script}; give another --run-name, "
                "or --allow-changed"
            )

    def _start(
        self,
        epoch: int,
        before: list[Line],
        state: State | None = None,
        *,
        layouts: LayoutCheck | None = None,
    ) -> DriverStarted:
        if self.options.supervised and not self.options.allow_changed:
            check_not_failed(self.name, failed_by_itself(before))
        if self.options.started_again:
            check_not_stopped(self.name, stopped_by_a_person(state))
        if self.options.show:
            said = RESTARTED.format(file=self.file.name)
            print(f"run {self.name}: {said}", file=self._out(), flush=True)
        warn_of_clock(before, time.time())
        job = replace(
            self.spec.job(), script=str(self.file), args=self.args, cwd=str(Path.cwd()),
            restarted=True, keys_in=keys_in(self.spec, restarted=True),
        )  # fmt: skip
        kept = (*KEYS, "folder", "script", "args", "cwd", "restarted", "keys_in")
        plain = {key: value for key, value in job.plain().items() if key in kept}
        attached = self._attaches(state)
        until_s = paid_until_s(before, job.orphan_lease_s, embedded=self.address is None)
        return DriverStarted(
            self.name, epoch, plain, self.pools, ModelProfile(0, 0, ()), attached=attached,
            hardware=known_of(self.pools), pool_hardware=own_of(self.pools),
            cut=self._cut.said if self._cut is not None else "", paid_until_s=until_s,
            supervised=self.options.started_again, **GATES,
        )  # fmt: skip

    def _watch(self, stack: ExitStack, pages: ExitStack) -> None:
        from elastic.cluster.ray_train.script_checkpoints import ReportedRetention

        stack.callback(ReportedRetention(self.storage).close)
        super()._watch(stack, pages)

    def _shown(self) -> Callable[[str], None] | None:
        """A bar is drawn many times a second."""
        from elastic.cluster.ray_train.script_output import StepReader

        terminal, reader = self.terminal, StepReader()
        if terminal is None:
            return None

        def say(line: str) -> None:
            for shown in reader.shown([line], time.monotonic()):
                terminal.say(shown)

        return say

    def _extras(self, state: State, lines: Iterable[Line]) -> dict[str, Any]:
        return {}

    def _result(self, state: State) -> Result:
        if never_met(state):
            raise SpecError(f"{self.file}: {state.outcome_reason}")
        return super()._result(state)
