"""Runs under faults in processes of this machine: `elastic run` on its embedded cluster, again
where its driver was killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from support.e2e.runs import MARK
from support.e2e.shell import Shell, last_line
from support.e2e.soak import Before, Seen
from support.places import PROGRAMS
from support.reference import train_alone
from support.sim.scenario import scenario
from support.storage.faulty_proxy import Fault as RequestFault
from support.storage.faulty_proxy import FaultyProxy
from support.storage.s3_server import BUCKET, running_s3
from support.storage.small_disk import mounted
from support.waiting import until

from elastic.cluster.ray import processes as of_machine
from elastic.data.order import digest, digest_text, sample_ids
from elastic.driver import restored
from elastic.ledger.journal import Line, read
from elastic.program import load_program
from elastic.scenarios.check import TOLERANCE
from elastic.scenarios.judge import Undisturbed, wrong
from elastic.sim.scripted_faults import Fault
from elastic.types import DrillAsked

STEPS, BATCH, SEED = 80, 12, 3
FAULTS_MOST = 4
FIRST_STEP, LAST_STEP = 10, 64
RUN_MOST_S = 420.0
LOOK_S = 0.05
DRILLS = {
    "notice": "notice", "loss": "kill", "return": "kill", "hang": "hang", "stall": "stall",
    "throttle": "slow", "device": "device_error", "add": "add", "wrong_numbers": "corrupt",
}  # fmt: skip
ONCE = (
    "hang",
    "stall",
    "driver",
    "freeze",
    "storage",
    "full",
    "damage",
    "device",
    "wrong_numbers",
)  # they take long, or hurt much
OUTSIDE = ("process", "driver", "freeze", "storage", "full", "damage")
PROGRAM = """from dataclasses import replace
import torch
from elastic.program import load_program
from elastic.scenarios.check import TOLERANCE
from elastic.scenarios.judge import Undisturbed, wrong
slow, base = load_program({slow!r}), load_program({base!r})
def optimizer(named):
    return torch.optim.{optimizer}
program = replace(base, loss=slow.loss, optimizer=optimizer)
"""
OPTIMIZERS = (
    "AdamW([p for _, p in named], lr=1e-3)",
    "SGD([p for _, p in named], lr=0.02, momentum=0.9)",
    "Adam([p for _, p in named], lr=1e-3, amsgrad=True)",
)
LAYOUTS: list[Any] = [
    {3: "dp_shard=3", 2: "dp_shard=2", 1: "dp_shard=1"},
    {3: "dp_replicate=3", 2: "tp=2", 1: "dp_shard=1"},
    {3: "dp_shard=3", 2: "pp=2", 1: "dp_shard=1"},
    "auto",
]


@dataclass
class Case:
    """A job and what happens to it; `at_s` of a fault is the step after which it does."""

    job: dict[str, Any]
    program: str
    remote: bool
    faults: list[Fault]


def case(seed: int) -> Case:
    """The faults are those of the virtual clock's run of that seed, as far as processes can have
    them."""
    chance = random.Random(seed)
    remote, layout = chance.random() < 0.4, chance.choice(LAYOUTS)
    job: dict[str, Any] = {
        "steps": STEPS, "global_batch": BATCH, "seed": SEED, "clip_grad_norm": 1.0,
        "layout": layout, "peer_every": chance.choice([0, 1, 4, "auto"]),
        "durable_every": chance.choice([5, 10, 15]), "eval_every": 0, "program": "program.py",
        "min_workers": 1, "check_numbers_every": chance.choice([0, 5]), "pools": [{"name": "spot",
        "market_type": "spot", "gpus_per_node": 1, "max_nodes": 3, "notice_s": 12}],
    }  # fmt: skip
    base = PROGRAMS / chance.choice(["tiny.py", "tiny_packed.py", "tiny_tied.py"])
    program = PROGRAM.format(
        slow=str(PROGRAMS / "tiny_slow.py"), base=str(base), optimizer=chance.choice(OPTIMIZERS)
    )
    refused = {"storage"} if not remote else {"full", "damage"}
    refused |= set() if job["check_numbers_every"] and layout == LAYOUTS[1] else {"wrong_numbers"}
    possible = [fault for fault in scenario(seed)[2] if fault.kind in {*DRILLS, *OUTSIDE} - refused]
    chance.shuffle(possible)
    chosen: list[Fault] = []
    for fault in possible:
        again = any(fault.kind == other.kind for other in chosen)
        if len(chosen) < FAULTS_MOST and not (again and fault.kind in ONCE):
            chosen.append(fault)
    return Case(
        job,
        program,
        remote,
        [_in_steps(fault) for fault in sorted(chosen, key=lambda one: one.at_s)],
    )


def _in_steps(fault: Fault) -> Fault:
    part = min(1.0, max(0.0, fault.at_s - 5.0) / 85.0)
    return replace(
        fault,
        at_s=float(round(FIRST_STEP + part * (LAST_STEP - FIRST_STEP))),
        lasts_s=min(fault.lasts_s, 18.0),
    )


def drills_of(fault: Fault) -> list[dict[str, Any]]:
    """A pool has a node less after each that is taken: another one is added."""
    kind = DRILLS[fault.kind]
    entry: dict[str, Any] = {
        "at_step": int(fault.at_s),
        kind: "spot" if kind == "add" else ("any", "rank0", "any")[fault.which % 3],
    }
    if kind == "notice":
        entry["deadline_s"] = max(0.2, fault.lasts_s)
    if kind == "slow":
        entry["factor"] = min(3.0, fault.amount)
    return (
        [entry, {"at_step": entry["at_step"], "add": "spot"}]
        if kind in ("notice", "kill")
        else [entry]
    )


@dataclass
class Played:
    seed: int
    happened: list[Fault] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    said: str = ""


@dataclass
class Scene:
    """A run that continues, and its surroundings."""

    shell: Shell
    storage: Path | None  # None = object storage
    proxy: FaultyProxy | None
    process: subprocess.Popen[str]
    seen: Seen
    until_s: dict[str, float] = field(default_factory=dict)  # when what has begun ends

    def begin(self, fault: Fault) -> None:
        now_s = time.monotonic()
        if fault.kind == "process":
            pids = [pid for pids in self.seen.pids.values() for pid in pids]
            of_machine.send([pids[fault.which % len(pids)]] if pids else [])
        elif fault.kind == "driver":
            self.process.kill()
        elif fault.kind == "freeze":
            self.process.send_signal(signal.SIGSTOP)
        elif fault.kind == "storage" and self.proxy is not None:
            self.proxy.faults.append(RequestFault("hang", "", times=1 << 30))
        elif fault.kind == "full" and self.storage is not None:
            fill(self.storage)
        elif fault.kind == "damage" and self.storage is not None:
            damage(self.storage, fault.lasting)
            self.process.kill()
        if fault.kind in ("freeze", "storage", "full"):
            self.until_s[fault.kind] = now_s + fault.lasts_s

    def end(self, all_of_it: bool = False) -> None:
        for kind in [
            kind for kind, at_s in self.until_s.items() if all_of_it or time.monotonic() >= at_s
        ]:
            del self.until_s[kind]
            if kind == "freeze":
                self.process.send_signal(signal.SIGCONT)
            elif kind == "storage" and self.proxy is not None:
                self.proxy.faults.clear()
            elif self.storage is not None:
                (self.storage / "waste").unlink(missing_ok=True)


def fill(disk: Path) -> None:
    """To the last byte."""
    with (disk / "waste").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


def damage(storage: Path, marker: bool) -> None:
    """Of the newest checkpoint, where there is an older one: a byte of its largest file is wrong,
    or its marker is gone."""
    found = sorted(storage.glob("chaos/checkpoints/*/commit.json"))
    if len(found) < 2:
        return
    if marker:
        found[-1].unlink()
        return
    largest = max(
        (path for path in found[-1].parent.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    largest.write_bytes(bytes(data))


def play(seed: int) -> Played:
    """The whole run, and what is wrong with it or left of it."""
    one, played = case(seed), Played(seed)
    root = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    temp = Path(tempfile.mkdtemp(prefix="chaos-temp-", dir="/tmp"))
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    before = Before.now(mark, temp)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, temp, ignore_errors=True)
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        environment = {
            MARK: mark,
            "TMPDIR": str(temp),
            "TORCHINDUCTOR_CACHE_DIR": str(root / "torch"),
        }
        shell = Shell(root, environment)
        storage = stack.enter_context(
            _disk(root / "disk", any(fault.kind == "full" for fault in one.faults))
        )
        proxy = None
        if one.remote:
            proxy = stack.enter_context(FaultyProxy(stack.enter_context(running_s3())))
            environment["AWS_ENDPOINT_URL_S3"] = proxy.url
        (root / "chaos").mkdir()
        (root / "chaos" / "program.py").write_text(one.program)
        drills = [
            entry for fault in one.faults if fault.kind in DRILLS for entry in drills_of(fault)
        ]
        shell.job(
            "chaos",
            **one.job,
            drill=drills,
            storage=f"s3://{BUCKET}/{seed}" if one.remote else str(storage),
        )
        _to_the_end(one, played, shell, None if one.remote else storage, proxy)
        if not played.wrong:
            played.wrong = wrong(played.lines, undisturbed(root / "chaos" / "program.py"))
        with suppress(AssertionError):
            until(lambda: not before.left_on_machine(), "the end of all that was started", 60)
        played.wrong += before.left_on_machine()
    return played


@contextmanager
def _disk(at: Path, small: bool) -> Iterator[Path]:
    if small and os.geteuid() == 0:
        with mounted(at, "120m") as disk:
            yield disk
    else:
        at.mkdir()
        yield at


def _to_the_end(
    one: Case, played: Played, shell: Shell, storage: Path | None, proxy: FaultyProxy | None
) -> None:
    """Fills in the journal, what happened, and what the command said that is wrong."""
    journal = (
        (storage if storage is not None else shell.root / "elastic_runs")
        / "chaos"
        / "journal.jsonl"
    )
    words = ("run", "chaos", "--run-name", "chaos", "--json", "--no-budget")
    left = [
        fault
        for fault in one.faults
        if fault.kind in OUTSIDE and (fault.kind != "full" or os.geteuid() == 0)
    ]
    scene = Scene(shell, storage, proxy, shell.start(*words), Seen(journal))
    ends_s = time.monotonic() + RUN_MOST_S
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                out, err = scene.process.communicate(timeout=LOOK_S)
                if scene.process.returncode != -signal.SIGKILL:
                    break
                scene.end(all_of_it=True)
                scene.process, scene.seen = shell.start(*words), Seen(journal)
            if time.monotonic() > ends_s:
                played.wrong.append(f"no end within {RUN_MOST_S:.0f} s, at step {scene.seen.step}")
                return
            scene.seen.look()
            scene.end()
            while left and scene.seen.step >= left[0].at_s and scene.process.poll() is None:
                played.happened.append(left[0])
                scene.begin(left.pop(0))
    finally:
        scene.end(all_of_it=True)
        shell.end()
        played.lines = read(journal) if journal.is_file() else []
    played.said = err
    asked = {
        e.drill.get("at_step")
        for line in played.lines
        for _, e in line.events
        if isinstance(e, DrillAsked)
    }
    played.happened += [
        fault for fault in one.faults if fault.kind in DRILLS and fault.at_s in asked
    ]
    if scene.process.returncode:
        state = restored(played.lines)
        reason = state.outcome_reason if state is not None else err.strip()[-500:]
        played.wrong.append(f"exit code {scene.process.returncode}: {reason}")
        return
    if last_line(out)["samples_exact"] is False:
        played.wrong.append("its samples are not exact")
    if "Traceback" in err:
        played.wrong.append(f"a traceback: {err[err.index('Traceback') :][:800]}")


def undisturbed(program: Path) -> Undisturbed:
    """The same job in one process, without elastic."""
    loaded = load_program(program)
    losses = train_alone(
        loaded, {"seed": SEED, "global_batch": BATCH, "clip_grad_norm": 1.0}, STEPS
    )
    n_samples = len(loaded.dataset())  # type: ignore[arg-type]
    digests = [
        digest_text(digest(sample_ids(n_samples, BATCH, SEED, step=step))) for step in range(STEPS)
    ]
    return Undisturbed(losses, digests, TOLERANCE)
