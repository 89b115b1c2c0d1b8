"""What is known of a script that Ray Train starts over at each change of capacity, and what
follows.

The groups of the script are the run's generations. `log` holds what is to be written to the
journal, `orders` what supervisors are to be told, both in order; the driver takes them out.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from elastic.cluster.ray_train.script_bill import counted
from elastic.cluster.ray_train.script_messages import (
    Ended,
    Formed,
    Hello,
    ScriptMessage,
    ScriptOrder,
    ScriptOutput,
)
from elastic.cluster.ray_train.script_output import StepReader, error_part
from elastic.policy.state.event_handlers import billed
from elastic.policy.state.fold import State
from elastic.types import (
    Abort,
    Cause,
    Decision,
    EnterPlan,
    Event,
    FailureKind,
    GroupRan,
    Layout,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    Notice,
    NoticeWithdrawn,
    Outcome,
    Plan,
    PlanEntered,
    Pool,
    Quiesce,
    Resume,
    StepDone,
    Stop,
    WorkerFailed,
    WorkerId,
)  # fmt: skip

VERDICT_S = 4.0  # after a rank's error: is a node gone, or is it the script's own?
SILENT_S = 2.0  # a supervisor that has not spoken for so long is gone
GRACE_S, GRACE_LOSS_S = 30.0, 3.0  # from SIGTERM to SIGKILL
GROWTH_S = 1.0  # more nodes may come right behind the first one
RAN_EVERY_S = 5.0
SETTLED_S = 60.0  # a group that has run so long was not ended by what ended the one before
FIRST_STEP_S = 60.0  # a group whose script printed steps before, and none now
START_S = 300.0  # default of the time in which a group has to meet
MOST_KILLED = 3  # groups in a row that were ended by a signal from outside


def some(n: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{n} {noun}" + ("" if n == 1 else "s")


@dataclass(frozen=True)
class Needs:
    """Of the job."""

    pools: tuple[Pool, ...]
    min_workers: int = 1
    max_workers: int = 1
    start_s: float = START_S


@dataclass
class ScriptRank:
    """A rank of the newest group."""

    worker: WorkerId
    pid: int
    code: int | None = None
    asked: bool = False
    tail: str = ""
    at_s: float = 0.0


@dataclass
class ScriptStart:
    """One start of the script. `ending`: why it is being ended, '' = it is not."""

    name: int
    began_s: float
    world: int
    seats: dict[int, ScriptRank] = field(default_factory=dict)
    formed_s: float | None = None
    entered_s: float | None = None
    failing_s: float | None = None
    ending: Literal["", "notice", "growth", "stop"] = ""
    over: bool = False
    steps: list[int] = field(default_factory=list)
    told_s: float = 0.0  # the last step or GroupRan
    reader: StepReader = field(default_factory=StepReader)

    @property
    def whole(self) -> bool:
        return len(self.seats) == self.world

    @property
    def all_ended(self) -> bool:
        return self.whole and all(seat.code is not None for seat in self.seats.values())

    @property
    def ended_well(self) -> bool:
        return self.all_ended and all(
            seat.code == 0 and not seat.asked for seat in self.seats.values()
        )

    def on(self, node_id: str) -> bool:
        return any(seat.worker.node_id == node_id for seat in self.seats.values())


@dataclass
class ScriptState:
    needs: Needs
    nodes: dict[str, Node] = field(default_factory=dict)
    leaving: dict[str, float] = field(default_factory=dict)  # node id -> deadline
    generation: int = 0
    resumed: bool = False  # an earlier driver ran it already
    # of all drivers: nodes, prices, dollars, budget and deadline
    bill: State = field(default_factory=State)
    plan: Plan | None = None
    group: ScriptStart | None = None
    restart: bool = False  # the group has ended: nodes are to be released, then `go`
    last_step: int = 0
    gap: int = 1  # steps between two lines
    killed: int = 0
    grown_s: float | None = None
    stop_reason: str = ""
    stop_by_s: float = 0.0
    expected_s: float = 0.0  # since when a group is expected
    outcome: Outcome | None = None
    reason: str = ""
    bad_input: bool = False
    log: list[tuple[float, Event] | Decision] = field(default_factory=list)
    orders: list[ScriptOrder] = field(default_factory=list)

    # ---------------------------------------------------------------------------------------- nodes

    def node(self, event: Event, at_s: float) -> None:
        """Something about a node was found out."""
        self.log.append((at_s, event))
        self.bill = counted(self.bill, event, at_s)
        match event:
            case NodeReady(node):
                self.nodes[node.node_id] = node
                # there is nothing to prepare: each group starts processes
                self.log.append((at_s, NodePrepared(node.node_id)))
                self.grown_s = at_s
            case Notice(node_id, deadline_s):
                self.leaving[node_id] = deadline_s
                self._noticed(node_id, deadline_s, at_s)
            case NoticeWithdrawn(node_id):
                self.leaving.pop(node_id, None)
            case NodeLost(node_id):
                self.nodes.pop(node_id, None)
                self.leaving.pop(node_id, None)
                if self.group is not None and not self.group.over and self.group.on(node_id):
                    self._broken(f"node {node_id} is lost", at_s)
                elif self.plan is not None and node_id in self.plan.workers_per_node:
                    self.plan = None  # of a group that has not started yet
            case _:
                pass

    def pay(self, now_s: float) -> None:
        """The bill continues; the script is stopped where it has reached the budget, or the
        deadline is over."""
        self.bill = billed(self.bill, now_s)
        if self.bill.stop is not None:
            self.ask_stop(self.bill.stop.reason, now_s)

    def _noticed(self, node_id: str, deadline_s: float, at_s: float) -> None:
        group = self.group
        if group is None or group.over or group.ending or not group.on(node_id):
            return
        group.ending = "notice"
        text = (
            f"node {node_id} goes in {max(0.0, deadline_s - at_s):.0f} s: every rank that has a "
            "handler for SIGTERM gets it, then Ray Train starts the script on the nodes that "
            "stay; one without a handler runs until the node goes"
        )
        self.orders.append(
            ScriptOrder(group.name, "end", max(1.0, deadline_s - at_s - 1.0), listeners=True)
        )
        self.log.append(Decision((Quiesce(self.generation),), text))

    @property
    def staying(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.node_id not in self.leaving]

    def workers(self) -> list[WorkerId]:
        """Where Ray Train will place the next group, as far as one can tell."""
        places = [WorkerId(node.node_id, k) for node in self.staying for k in range(node.gpus)]
        return places[: self.needs.max_workers]

    # ---------------------------------------------------------------------------------------- words

    def heard(self, word: ScriptMessage, node_id: str = "") -> None:
        """From a supervisor; `node_id`: that of a Hello. Words of an older group do not count."""
        if isinstance(word, Hello):
            self._hello(word, node_id)
            return
        group = self.group
        if group is None or word.group != group.name:
            return
        if isinstance(word, Formed):
            group.formed_s = word.at_s
            if not self.last_step:  # else its first step shows from where it continues
                self._entered(self.last_step, word.at_s)
        elif isinstance(word, ScriptOutput):
            for line in word.lines:
                self._said(line, word.at_s)
        elif isinstance(word, Ended) and word.rank in group.seats:
            seat = group.seats[word.rank]
            seat.code, seat.asked, seat.tail, seat.at_s = (
                word.code,
                word.asked,
                word.tail,
                word.at_s,
            )
            if word.code and not word.asked and group.failing_s is None:
                group.failing_s = word.at_s

    def _hello(self, word: Hello, node_id: str) -> None:
        if self.group is not None and word.group < self.group.name:
            return
        if self.group is None or word.group > self.group.name:
            self._broken("Ray Train has started another group", word.at_s)
            self.restart = False
            self.group = ScriptStart(word.group, word.at_s, word.world)
        self.group.seats[word.rank] = ScriptRank(WorkerId(node_id, word.local_rank), word.pid)
        if self.group.whole:
            seats = self.group.seats
            self._placed(tuple(seats[rank].worker for rank in range(word.world)))

    def _placed(self, ranks: tuple[WorkerId, ...]) -> None:
        if self.plan is not None and self.plan.ranks == ranks:
            return
        if self.plan is None:
            self.generation += 1
        cause: Cause = (
            self.plan.cause
            if self.plan is not None
            else ("loss" if self.generation > 1 else "start")
        )
        self._plan(ranks, cause, f"Ray Train has placed the script on {some(len(ranks), 'worker')}")

    def _said(self, line: str, at_s: float) -> None:
        group = self.group
        found = group.reader.read(line) if group is not None and not group.over else None
        if found is None or group is None:
            return
        step, train_loss = found
        if group.steps and step <= group.steps[-1]:
            return
        if group.steps:
            self.gap = step - group.steps[-1]
        if group.entered_s is None:
            self._entered(max(0, min(step - self.gap, self.last_step)), at_s)
        done = StepDone(self.generation, step, train_loss, 0, max(0.0, at_s - group.told_s))
        self.log.append((at_s, done))
        group.steps.append(step)
        group.told_s, self.last_step, self.killed = at_s, step, 0

    def _entered(self, step: int, at_s: float) -> None:
        assert self.group is not None
        self.group.entered_s = self.group.told_s = at_s
        self.log.append((at_s, PlanEntered(self.generation, step)))

    # --------------------------------------------------------------------------------- what follows

    def look(self, now_s: float, silent_s: Mapping[tuple[int, int], float]) -> None:
        """`silent_s`: how long each (group, rank) has not spoken."""
        group = self.group
        if self.outcome is not None:
            return
        if group is None or group.over:
            self._without_group(now_s)
            return
        self.expected_s = now_s
        self._progress(group, now_s)
        if self.stop_reason and now_s > self.stop_by_s:
            self.end(
                "stopped", f"{self.stop_reason}; some ranks had not ended after {GRACE_S:.0f} s"
            )
        elif group.ended_well and not self.stop_reason:
            self.log.append((now_s, GroupRan(self.generation)))
            self.end("succeeded", f"the script has ended on all {group.world} ranks")
        elif group.ending:
            self._end_orderly(group)
        elif group.failing_s is not None or self._silent(group, silent_s):
            self._failing(group, now_s, silent_s)
        elif group.formed_s is None and now_s - group.began_s > self.needs.start_s:
            self._never_met(group)
        elif self.grown_s is not None and now_s - self.grown_s >= GROWTH_S:
            self._grow(group)

    def _progress(self, group: ScriptStart, now_s: float) -> None:
        if (
            group.formed_s is not None
            and group.entered_s is None
            and now_s - group.formed_s > FIRST_STEP_S
        ):
            self._entered(self.last_step, now_s)
        if now_s - group.told_s >= RAN_EVERY_S and group.failing_s is None:
            self._ran(group, now_s)
        if group.entered_s is not None and now_s - group.entered_s > SETTLED_S:
            self.killed = 0

    def _ran(self, group: ScriptStart, now_s: float) -> None:
        """Of a script that prints no steps; while it saves because it was asked to end, it does not
        train."""
        saves = group.ending and any(seat.asked for seat in group.seats.values())
        if group.entered_s is None or group.steps or saves:
            return
        group.told_s = now_s
        self.log.append((now_s, GroupRan(self.generation)))

    def _without_group(self, now_s: float) -> None:
        if self.stop_reason:
            self.end("stopped", self.stop_reason)
        elif self.plan is None:
            self.expected_s = now_s
            if self.group is not None:
                self.expect("loss")
        elif now_s - self.expected_s > (most_s := max(START_S, self.needs.start_s)):
            text = (
                f"Ray Train has not started the script on {len(self.plan.ranks)} workers for "
                f"{most_s:.0f} s"
            )
            self.end(
                "failed", f"{text}; see its logs, or give it more time by max_silence_s in job.yaml"
            )

    def _end_orderly(self, group: ScriptStart) -> None:
        if not group.all_ended:
            return
        group.over = True
        if group.ending == "stop":
            self.orders.append(ScriptOrder(group.name, "leave"))
            self.end("stopped", self.stop_reason)
            return
        self.restart = True
        self.expect("growth" if group.ending == "growth" else "notice")

    @staticmethod
    def _silent(group: ScriptStart, silent_s: Mapping[tuple[int, int], float]) -> list[int]:
        here = [rank for rank, seat in group.seats.items() if seat.code is None]
        return [rank for rank in here if silent_s.get((group.name, rank), 0.0) > SILENT_S]

    def _failing(
        self, group: ScriptStart, now_s: float, silent_s: Mapping[tuple[int, int], float]
    ) -> None:
        """A rank has failed, or a supervisor is silent. The loss of a node is told by `node`; till
        then one waits a little."""
        since_s = group.failing_s = now_s if group.failing_s is None else group.failing_s
        if now_s - since_s < VERDICT_S:
            return
        silent = self._silent(group, silent_s)
        failed = sorted(
            (seat for seat in group.seats.values() if seat.code), key=lambda seat: seat.at_s
        )
        if silent:
            self._broken(
                f"the Ray Train workers of ranks {', '.join(map(str, silent))} are gone", since_s
            )
        elif failed and failed[0].code == -signal.SIGKILL and self.killed < MOST_KILLED:
            self.killed += 1
            self._broken(
                f"the script's process on {failed[0].worker} was killed from outside", since_s
            )
        elif failed:
            rank = next(rank for rank, seat in group.seats.items() if seat is failed[0])
            code = failed[0].code or 0
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            last = error_part(failed[0].tail).strip().splitlines()[-1:] or ["it wrote nothing"]
            kind: FailureKind = "process" if code == -signal.SIGKILL else "program"
            why = last[0].strip()
            self.log.append(
                (
                    now_s,
                    WorkerFailed(
                        failed[0].worker, self.generation, kind, f"rank {rank} ({how}): {why}"
                    ),
                )
            )
            self.end(
                "failed",
                f"the script itself failed on rank {rank} ({how}), no node was lost: {why}",
            )
        else:
            group.failing_s = None  # it speaks again

    def _never_met(self, group: ScriptStart) -> None:
        self.bad_input = True
        self.end(
            "failed",
            f"the script did not start its process group on {group.world} ranks within "
            f"{self.needs.start_s:.0f} s: it must call torch.distributed.init_process_group() "
            "with the environment that torchrun sets (RANK, MASTER_ADDR ...); a slow start needs "
            "a larger max_silence_s in job.yaml",
        )

    def _grow(self, group: ScriptStart) -> None:
        after = len(self.workers())
        if group.formed_s is None:
            return
        self.grown_s = None
        if after <= group.world:
            return
        group.ending = "growth"
        text = (
            f"{after} workers instead of {group.world}: each gets SIGTERM, then Ray Train starts "
            "the script on all"
        )
        self.orders.append(ScriptOrder(group.name, "end", GRACE_S))
        self.log.append(Decision((Quiesce(self.generation),), text))

    def _broken(self, why: str, at_s: float) -> None:
        """The group cannot continue since `at_s`; what is left of it is ended."""
        group = self.group
        if group is None or group.over:
            return
        self._ran(group, at_s if group.failing_s is None else group.failing_s)
        group.over = True
        self.orders.append(ScriptOrder(group.name, "end", GRACE_LOSS_S))
        self.log.append(Decision((Abort(self.generation),), why))
        self.plan = None
        self.restart = True
        if not self.stop_reason:
            self.expect("notice" if group.ending == "notice" else "loss")

    def expect(self, cause: Cause) -> None:
        """The next group, where the nodes are enough for it."""
        workers, least = self.workers(), self.needs.min_workers
        if len(workers) < least:
            if self.plan is not None or not self.reason.startswith("waiting"):
                self.reason = f"waiting: {some(len(workers), 'worker')} of min_workers={least}"
                self.log.append(Decision((), self.reason))
            self.plan = None
            return
        self.generation += 1
        self.reason = ""
        again = (
            ""
            if cause == "start" and not self.resumed
            else " anew; it resumes from its own checkpoint"
        )
        self._plan(
            tuple(workers),
            cause,
            f"Ray Train starts the script on {some(len(workers), 'worker')}{again}",
        )

    def _plan(self, ranks: Sequence[WorkerId], cause: Cause, text: str) -> None:
        fresh = self.generation == 1 and not self.resumed
        nodes = {worker.node_id for worker in ranks}
        prices = {pool.name: pool.usd_per_node_h for pool in self.bill.pools}
        usd_per_h = sum(
            prices.get(node.pool, 0.0) for node in self.nodes.values() if node.node_id in nodes
        )
        self.plan = Plan(
            self.generation, Layout(dp_replicate=len(ranks)), tuple(ranks), (), (),
            resume=Resume("fresh" if fresh else "durable"), cause=cause, usd_per_h=usd_per_h,
        )  # fmt: skip
        self.log.append(Decision((EnterPlan(self.plan),), text))

    # -------------------------------------------------------------------------- orders from outside

    def go(self) -> None:
        """Nodes are released and counted again: Ray Train may start the next group."""
        self.restart = False
        if self.group is not None:
            self.orders.append(ScriptOrder(self.group.name, "go"))

    def ask_stop(self, reason: str, now_s: float) -> None:
        """The script gets SIGTERM and may save."""
        if self.stop_reason or self.outcome is not None:
            return
        self.stop_reason, self.stop_by_s = reason, now_s + GRACE_S + SILENT_S
        group = self.group
        if group is not None and not group.over:
            group.ending = "stop"
            self.orders.append(ScriptOrder(group.name, "end", GRACE_S))
            self.log.append(
                Decision(
                    (Quiesce(self.generation),),
                    f"asked to stop ({reason}): every rank gets SIGTERM",
                )
            )

    def end(self, outcome: Outcome, reason: str) -> None:
        self.outcome, self.reason = outcome, reason
        if outcome != "succeeded" and self.group is not None:
            self.orders.append(ScriptOrder(self.group.name, "leave"))
        self.log.append(Decision((Stop(outcome, reason),), reason))

    def first_error(self) -> str:
        """The end of what the rank that failed first wrote."""
        seats = self.group.seats.values() if self.group is not None else ()
        failed = sorted(
            (seat for seat in seats if seat.code and not seat.asked), key=lambda seat: seat.at_s
        )
        return error_part(failed[0].tail) if failed else ""


def lines_of(
    log: Iterable[tuple[float, Event] | Decision],
) -> list[tuple[list[tuple[float, Event]], Decision | None]]:
    """What `ScriptState.log` holds as journal lines: the events up to each decision, and it."""
    lines: list[tuple[list[tuple[float, Event]], Decision | None]] = []
    events: list[tuple[float, Event]] = []
    for entry in log:
        if isinstance(entry, Decision):
            lines.append((events, entry))
            events = []
        else:
            events.append(entry)
    return [*lines, (events, None)] if events else lines
