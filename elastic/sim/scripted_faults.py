"""What a simulated cluster is made of: its delays, and the faults that a script asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from elastic.types import Plan

FaultKind = Literal[
    "notice", "withdraw", "loss", "hang", "process", "error", "corrupt", "not_finite", "drought",
    "slow", "crash", "refuse", "price", "add", "stop", "throttle", "jitter", "drift",
    "wrong_numbers", "stall", "wrong_layout", "device", "return", "partition", "storage", "full",
    "damage", "driver", "freeze", "slow_storage", "throttled", "read_only", "past", "apart",
]  # fmt: skip
Moment = Literal["inside", "waiting", "torn"]


@dataclass(frozen=True)
class Delays:
    """Seconds on the virtual clock. A step takes `work_s` divided by the number of workers.
    `changes_s`: kind of change (`change_of`) -> what entering it takes, where that is known; others
    take `restore_s` or `enter_s`."""

    boot_s: float = 5.0
    admit_s: float = 1.0  # of prepare_s, until a node that may not take part is found out
    prepare_s: float = 4.0
    enter_s: float = 0.8
    groups_s: float = 0.0  # for each process group, in the pause unless they were made ahead
    restore_s: float = 2.5
    work_s: float = 4.0
    copy_s: float = 0.05
    store_s: float = 1.2
    detect_s: float = 0.2
    confirm_s: float = 2.0
    silent_s: float = 6.0
    meet_s: float = 5.0  # after which a node that does not answer is reported, while a group meets
    quiesce_s: float = 0.1
    release_s: float = 0.5
    changes_s: Mapping[str, float] = field(default_factory=dict)

    def entering_s(self, plan: Plan) -> float:
        usual_s = self.restore_s if plan.resume.source == "durable" else self.enter_s
        return self.changes_s.get(change_of(plan), usual_s)


def change_of(plan: Plan) -> str:
    """Changes of one kind take about the same time: newcomers have things to build, survivors of a
    loss other things than those of a notice."""
    return f"{plan.cause}/{plan.resume.source}"


@dataclass(frozen=True)
class Fault:
    """What happens at `at_s`. `which` picks a node by its place among those that live (modulo their
    number), of the pool `only` where that is given.

    notice: taken `amount` seconds after its deadline (below 0: before), which is `lasts_s` from
    now; `lasting`: never. For a node that has notice, another deadline. withdraw: the notice of a
    node that has one. drought: the pool gives nothing for `lasts_s`. slow: what is asked of it in
    that time comes `amount` seconds later. crash: its nodes that come in that time are gone before
    they are prepared. refuse: they are rejected. price: it costs `amount` dollars per node-hour
    from now on. loss, hang, process: of a node, or of its first worker. error: a collective fails,
    nobody is gone. corrupt: what the newest generation took over is found wrong, unless it began
    anew. not_finite: the next step gives no number, once, or whenever it is done (`lasting`).
    throttle: a node (or its `gpu` only) computes `amount` times slower for `lasts_s`, or from now
    on (`lasting`). jitter: every rank's part of a step takes up to the part `amount` more or less,
    by chance (seed `which`), for `lasts_s` or `lasting`. drift: all GPUs get slower and faster by
    the part `amount`, once in `lasts_s` each, at different times. stall: of a node, as hang, but it
    answers. wrong_numbers: a node computes silent data corruption, found out `amount` steps later;
    `lasting`: it cannot be told which of all ranks it is. wrong_layout: from now on a layout with
    several ranks on an axis on which all so far had one computes something else.
    device: of a node's first worker (or `gpu`); its process lives on and keeps the copies in host
            memory, nothing else.
    return: of a node, which is lost and stands again under its name `lasts_s` later. partition:
            neither the driver nor its
    peers reach a node for `lasts_s`; then it is back with what it holds. apart: for so long that
    node and the next one do not reach each other, and the driver reaches both. storage: it answers
    nothing for `lasts_s`; what is read or written takes so much longer. slow_storage: each answer
    takes `amount` seconds more for `lasts_s`. throttled: it refuses nearly everything for
    `lasts_s`, which is retried. read_only: it refuses each write. past: a driver that comes in that
    time finds the journal and the checkpoints as they were when it began. full: no checkpoint is
    written for `lasts_s`. damage: the newest checkpoint cannot be read any more, where an older one
    can; `lasting`: its marker is lost, a next driver does not find it. driver: killed; another one
    comes `lasts_s` later, whose clock is `amount` seconds ahead; `lasting`: its nodes end with it;
    `moment` torn: it is on another machine, where only those lines of the journal are that storage
    has taken. freeze: the driver stalls for `lasts_s`. These two take a backend that says so
    (tests/support/chaos). `moment`, of a loss, process, device, error or partition: where the step
    was. inside: its gradients were not summed yet. waiting: every survivor waits for the commit.
    torn: every other survivor has seen it.
    """

    at_s: float
    kind: FaultKind
    which: int = 0
    lasts_s: float = 30.0
    pool: str = ""
    moment: Moment = "inside"
    lasting: bool = False
    amount: float = 0.0
    only: str = ""
    gpu: int = -1
