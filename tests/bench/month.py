"""What a month of one step a second leaves behind: the real driver loop, state and journal over
simulated nodes, with a notice or a kill every two hours, copies, and the digits of real steps. The
policy decides when anything but a step happened, and once a minute.

By day: `journal_mb` on the disk, `resume_s` (a fresh process reads what a new driver needs and
folds it), `driver_mb` of memory of the driver. At the end: `why_s`, `ledger_s` of the commands, and
`why_mb`, `ledger_mb` of memory that they take.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import report
from trial import Clock, Failed

from elastic.driver import drive
from elastic.ledger import parts
from elastic.ledger.run_folder import RunFolder
from elastic.policy.decide import decide
from elastic.policy.state.fold import State
from elastic.sim.scripted_faults import Delays, Fault
from elastic.sim.sim_backend import SimBackend
from elastic.storage import LocalStorage
from elastic.types import (
    Decision,
    DriverStarted,
    Event,
    Job,
    ModelProfile,
    OptimizerSpec,
    Pool,
    StepDone,
    TensorSpec,
)

DAY_S, T0_S = 86_400.0, 1_795_000_000.0
DAYS, SMOKE_DAYS = (1.0, 10.0, 30.0), (0.01, 0.02)
SMOKE_PART_BYTES = 100_000
WORKERS = 6
FAULT_EVERY_S, LOOK_EVERY_S = 7200.0, 60.0
MOST_S = 7200.0
MODEL = ModelProfile(
    4,
    1_000_000,
    (TensorSpec("w", (1000, 1000), "float32", 0, 1),),
    (OptimizerSpec(("exp_avg", "exp_avg_sq"), ("step",)),),
)
OF_STEPS = {
    "step", "best_step", "last_step", "last_step_at_s", "losses", "digests", "step_time_s",
    "worker_step_s", "usd", "billed_at_s", "node_s", "history", "retries", "unseen", "pauses_s",
}  # fmt: skip
WATCHED = [f.name for f in fields(State) if f.name not in OF_STEPS]

RESUME = """
import sys, time
from elastic.driver import restored
from elastic.ledger.run_folder import RunFolder
from elastic.storage import LocalStorage
from pathlib import Path
began_s = time.monotonic()
place = RunFolder(LocalStorage(sys.argv[1]), Path(sys.argv[1]))
state = restored(place.take_over()[0])
print(time.monotonic() - began_s, state.step)
"""
COMMAND = """
import contextlib, io, resource, sys
from elastic.cli.command_line import main
with contextlib.redirect_stdout(io.StringIO()):
    code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, code)
"""


class Real(SimBackend):
    """Steps with the digits of real ones, at times that are no round numbers."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.chance, self._now_s = random.Random(0), T0_S

    def _tell(self, event: Event, delay_s: float = 0.0) -> None:
        chance = self.chance
        if isinstance(event, StepDone):
            self._now_s = round(self._now_s + chance.random() / 100, 4)
            event = replace(
                event, step_time_s=round(event.step_time_s + chance.gauss(0, 0.01), 6),
                data_s=round(chance.random() / 1e3, 6), train_loss=2 + chance.gauss(0, 0.1),
                grad_norm=float(f"{chance.gauss(1, 0.05):.7g}"),
                digest=f"{chance.getrandbits(52):013x}", imbalance=round(1 + chance.random() / 10,
                4),
            )  # fmt: skip
        super()._tell(event, delay_s)


@dataclass
class Looks:
    """The policy, asked when anything but a step happened, when it wants to be, and once a
    minute."""

    place: RunFolder
    days: tuple[float, ...]
    clock: Clock
    found: dict[str, dict[str, float]] = field(default_factory=dict)
    began_s: float | None = None
    seen: State | None = None
    said: Decision = Decision()
    at_s: float = 0.0

    def __call__(self, state: State, now_s: float) -> Decision:
        began_s = self.began_s = now_s if self.began_s is None else self.began_s
        if (
            len(self.found) < len(self.days)
            and now_s - began_s >= self.days[len(self.found)] * DAY_S
        ):
            self.clock.look(f"day {self.days[len(self.found)]}")
            day = f"{self.days[len(self.found)]:g}"
            self.found[day] = self.measured(state)
            print(f"month: day {day}: {self.found[day]}", file=sys.stderr, flush=True)
        calm = self.seen is not None and all(
            getattr(state, name) is getattr(self.seen, name) for name in WATCHED
        )
        due = now_s - self.at_s >= LOOK_EVERY_S or (
            self.said.wake_at_s is not None and now_s >= self.said.wake_at_s
        )
        if not calm or due or self.said.actions:
            self.said, self.at_s = decide(state, now_s), now_s
        self.seen = state
        return self.said

    def measured(self, state: State) -> dict[str, float]:
        # a copy: a driver that takes over rewrites the file that this one appends to
        with tempfile.TemporaryDirectory(dir=self.place.folder.parent) as copied:
            shutil.copytree(self.place.folder, copied, dirs_exist_ok=True)
            took_s, step = map(float, ran(RESUME, copied))
        if not state.step - 100 <= step <= state.step:
            raise Failed(f"resumed at step {step:.0f} of {state.step}")
        return {
            "journal_mb": round(size_mb(self.place.folder), 2),
            "packed_mb": round(size_mb(self.place.folder / parts.PREFIX), 2),
            "resume_s": round(took_s, 2),
            "driver_mb": round(
                int(Path("/proc/self/statm").read_text().split()[1])
                * os.sysconf("SC_PAGE_SIZE")
                / 1e6,
                1,
            ),
        }


def size_mb(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def ran(code: str, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Failed(f"{words}: {done.stderr[-500:]}")
    return done.stdout.split()


def month(folder: Path, days: tuple[float, ...], clock: Clock) -> dict[str, Any]:
    place = RunFolder(LocalStorage(folder / "run"), folder / "run")
    pools = (Pool("spot", "CPU", 1, "spot", 0.9, 0, WORKERS),)
    job = {
        "name": "month", "steps": int(days[-1] * DAY_S), "global_batch": 60, "seed": 0,
        "layout": "auto", "min_workers": 1, "peer_every": 10, "durable_every": 600,
        "budget_usd": None,
    }  # fmt: skip
    n = int(days[-1] * DAY_S / min(FAULT_EVERY_S, days[-1] * DAY_S / 4))
    every_s = days[-1] * DAY_S / n
    faults = [
        Fault(T0_S + every_s * (i + 0.5), "notice" if i % 2 else "loss", i, 30.0) for i in range(n)
    ]
    looks = Looks(place, days, clock)
    journal = place.open_journal(1, place.take_over()[1])
    state = drive(
        Real(pools, Job.from_plain(job), faults, delays=Delays(work_s=WORKERS)),
        journal,
        DriverStarted("run", 1, job, pools, MODEL),
        decide=looks,
    )
    if state.phase != "succeeded":
        raise Failed(f"{state.phase}: {state.outcome_reason}")
    if len(looks.found) < len(days):  # it was faster than a step a second
        looks.found[f"{days[-1]:g}"] = looks.measured(state)
    found: dict[str, Any] = {
        "by_day": looks.found,
        "parts": len(list((place.folder / parts.PREFIX).glob("*.xz"))),
    }
    for verb in ("why", "ledger"):
        clock.look(verb)
        began_s = time.monotonic()
        memory_mb, code = ran(COMMAND, verb, str(place.folder))
        if code != "0":
            raise Failed(f"elastic {verb}: exit code {code}")
        found |= {f"{verb}_s": round(time.monotonic() - began_s, 1), f"{verb}_mb": int(memory_mb)}
    return found | {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}


def measure(clock: Clock, smoke: bool, days: tuple[float, ...]) -> dict[str, Any]:
    if smoke:
        parts.PART_BYTES = SMOKE_PART_BYTES
    with tempfile.TemporaryDirectory(prefix="elastic-month-") as folder:
        return month(Path(folder), days, clock)


def main() -> int:
    made = report.parser(__doc__)
    made.add_argument(
        "--days",
        type=float,
        nargs="+",
        help=f"when it is measured (default {' '.join(map(str, DAYS))})",
    )
    made.add_argument(
        "--most-s",
        type=float,
        default=MOST_S,
        help=f"bound of the whole bench (default {MOST_S:.0f})",
    )
    given = made.parse_args()
    days = tuple(given.days or (SMOKE_DAYS if given.smoke else DAYS))
    return report.finish("month", given, lambda clock: measure(clock, given.smoke, days))


if __name__ == "__main__":
    sys.exit(main())
