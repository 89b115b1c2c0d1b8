"""A script that is restarted, told as events on a clock of its own. What is ordered of nodes and
workers is obeyed at once; when a group meets, and when it ends after SIGTERM, a test says. `lines`
is the journal, as the driver would write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from elastic.api.running.restarted_script import GATES
from elastic.driver import LINE_EVERY_S, restored
from elastic.ledger.journal import Line, parse_line, write_line
from elastic.observe.accounting.accounts import Account, account
from elastic.policy.decide import decide
from elastic.policy.state.fold import ENDED, State, fold
from elastic.types import (
    Abort,
    Action,
    Decided,
    Decision,
    DriverStarted,
    EnterPlan,
    Event,
    GroupRan,
    ModelProfile,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    Plan,
    PlanEntered,
    Pool,
    Prepare,
    Quiesced,
    ReleaseNode,
    ScriptEnded,
    StepDone,
    Stop,
    WorkerFailed,
    WorkerId,
)

POOLS = (Pool("spot", max_nodes=4, usd_per_node_h=3600.0),)  # a dollar a second
LOOK_S, LONG_S = 0.5, 100.0
RAN_EVERY_S = 5.0


class ScriptStory:
    """`before`: the journal of earlier drivers, which are not attached to unless `attached`."""

    def __init__(
        self,
        *nodes: str,
        before: Sequence[Line] = (),
        at_s: float = 0.0,
        pools: tuple[Pool, ...] = POOLS,
        paid_until_s: float | None = None,
        attached: bool = False,
        gates: Mapping[str, Any] = GATES,
        **job: object,
    ) -> None:
        self.now_s, self.lines, self.said = at_s, list(before), ""
        self.state = restored(before) or State()
        given = {"script": "train.py", "cwd": "/", "restarted": True, "max_workers": 4, **job}
        start = DriverStarted(
            "run", 1, given, pools, ModelProfile(0, 0, ()), attached=attached,
            paid_until_s=paid_until_s, **gates,
        )  # fmt: skip
        self.plan: Plan | None = None
        self.answers: list[Event] = []
        self.wake_at_s = inf
        self.ran_s: float | None = None  # a group without steps runs; when it was told last
        self.hear(start, *(NodeReady(Node(name, "spot")) for name in nodes))
        if nodes:
            self.hear()
            self.wait(10.0)  # for nodes that were asked for and do not come

    # ------------------------------------------------------------------------------- what happens

    def hear(self, *events: Event) -> Decision:
        """One tick of the driver."""
        told = [(self.now_s, event) for event in (*self.answers, *events)]
        self.answers = []
        for _, event in told:
            self.state = fold(self.state, event, self.now_s)
        decision = decide(self.state, self.now_s)
        self.state = fold(self.state, Decided(decision), self.now_s)
        due = bool(self.lines) and self.now_s - self.lines[-1].at_s >= LINE_EVERY_S
        if told or decision.actions or decision.reason != self.said or due:
            self.lines.append(Line(self.now_s, 1, tuple(told), decision))
            self.said = decision.reason
        for action in decision.actions:
            self._obey(action)
        self.wake_at_s = inf if decision.wake_at_s is None else decision.wake_at_s
        if self.answers:
            self.wake_at_s = self.now_s
        return decision

    def _obey(self, action: Action) -> None:
        match action:
            case Prepare(node_id):
                self.answers.append(NodePrepared(node_id))
            case EnterPlan(plan):
                self.plan, self.ran_s = plan, None
            case Abort(generation):
                self.ran_s = None
                gone = self.state.dead
                there = self.plan.ranks if self.plan is not None else ()
                self.answers += [
                    Quiesced(w, generation, 0) for w in there if w not in gone and self.has(w)
                ]
            case ReleaseNode(node_id):
                self.answers.append(NodeLost(node_id, "released"))
            case _:
                pass

    def has(self, worker: WorkerId) -> bool:
        node = self.state.nodes.get(worker.node_id)
        return node is not None and node.status != "lost"

    def wait(self, seconds: float) -> None:
        until_s, look_s = self.now_s + seconds, LOOK_S if seconds <= LONG_S else 10 * LOOK_S
        while self.now_s < until_s - 1e-9 and self.state.phase not in ENDED:
            self.now_s = max(self.now_s + 1e-3, min(self.now_s + look_s, self.wake_at_s))
            ran = self.ran_s is not None and self.now_s - self.ran_s >= RAN_EVERY_S
            self.hear(*self._ran() if ran else ())

    def _ran(self) -> list[Event]:
        assert self.plan is not None
        self.ran_s = self.now_s
        return [GroupRan(self.plan.generation)]

    def meet(self, step: int = 0, *, steps: bool = True) -> Plan:
        """The group that was ordered meets and continues after `step`; it prints steps, or none."""
        assert self.plan is not None
        self.hear(PlanEntered(self.plan.generation, step))
        self.ran_s = None if steps else self.now_s
        return self.plan

    def step(self, step: int, *, of_s: float = 1.0) -> None:
        assert self.plan is not None
        self.hear(StepDone(self.plan.generation, step, 5 - step / 10, 0, of_s))

    def leave(self, *nodes: str) -> None:
        """The group's processes there (default: all) end after SIGTERM."""
        assert self.plan is not None
        gone = [w for w in self.plan.ranks if self.has(w) and (not nodes or w.node_id in nodes)]
        self.hear(*(Quiesced(worker, self.plan.generation, 0) for worker in gone))

    def fail(self, node: str, error: str, kind: str = "program") -> None:
        assert self.plan is not None
        more = self._ran() if self.ran_s is not None else []
        self.ran_s = None
        failed = WorkerFailed(WorkerId(node, 0), self.plan.generation, kind, error)  # type: ignore[arg-type]
        self.hear(*more, failed)

    def end(self) -> None:
        """The script ends well on all ranks."""
        assert self.plan is not None
        ended = [ScriptEnded(worker, self.plan.generation) for worker in self.plan.ranks]
        self.hear(GroupRan(self.plan.generation), *ended)

    # ---------------------------------------------------------------------------- what came of it

    def account(self) -> Account:
        return account([parse_line(write_line(line)) for line in self.lines])

    def decisions(self, kind: type[Action]) -> list[Decision]:
        found = [line.decision for line in self.lines if line.decision is not None]
        return [one for one in found if any(isinstance(action, kind) for action in one.actions)]

    def orders(self, kind: type[Action]) -> list[Action]:
        every = [action for one in self.decisions(kind) for action in one.actions]
        return [action for action in every if isinstance(action, kind)]

    @property
    def plans(self) -> list[Plan]:
        return [one.plan for one in self.orders(EnterPlan) if isinstance(one, EnterPlan)]

    @property
    def stop(self) -> Stop:
        (found,) = self.orders(Stop)
        assert isinstance(found, Stop)
        return found


def three(**job: object) -> ScriptStory:
    """Three nodes, one group, which is to meet."""
    story = ScriptStory("n0", "n1", "n2", **job)  # type: ignore[arg-type]
    assert story.plans and story.plans[0].nodes == ("n0", "n1", "n2")
    return story


def grown() -> ScriptStory:
    story = three()
    story.wait(6)
    story.meet()
    story.wait(40)
    story.hear(NodeReady(Node("n3", "spot")))
    story.wait(3)
    return story
