"""A run told as events: folds them, decides after each tick, and keeps the decisions."""

from __future__ import annotations

from typing import Any

from elastic.policy.decide import decide
from elastic.policy.state.fold import State, fold
from elastic.types import (
    Action,
    Copy,
    CopyStored,
    Decided,
    Decision,
    DriverStarted,
    EnterPlan,
    Event,
    Holding,
    ModelProfile,
    Node,
    NodePrepared,
    NodeReady,
    OptimizerSpec,
    Plan,
    PlanEntered,
    Pool,
    Quiesced,
    StepDone,
    Stop,
    TensorSpec,
    WorkerId,
)

MODEL = ModelProfile(
    4,
    1_000_000,
    (TensorSpec("w", (1000, 1000), "float32", 0, 1),),
    (OptimizerSpec(("exp_avg", "exp_avg_sq"), ("step",)),),
    0.0,
    2,
)
SPOT = Pool("spot", "CPU", 1, "spot", 1.0, 0, 4)


def job(**changes: Any) -> dict[str, Any]:
    return {
        "name": "story", "steps": 100, "global_batch": 12, "seed": 0, "layout": "auto",
        "min_workers": 1, "max_workers": None, "peer_every": "auto", "durable_every": "auto",
        "storage": None, "budget_usd": None, "max_nodes": None,
    } | changes  # fmt: skip


class Story:
    """`tick` folds events and decides once, as the driver does. Times are on a clock of its own."""

    def __init__(
        self, pools: tuple[Pool, ...] = (SPOT,), durable: tuple[Copy, ...] = (), **changes: Any
    ) -> None:
        self.now_s = 0.0
        self.state = State()
        self.decisions: list[Decision] = []
        self.start = DriverStarted("story", 1, job(**changes), pools, MODEL, durable=durable)
        self.tick(self.start)

    def tick(self, *events: Event, after_s: float = 0.1) -> Decision:
        self.now_s += after_s
        for event in events:
            self.state = fold(self.state, event, self.now_s)
        decision = decide(self.state, self.now_s)
        self.state = fold(self.state, Decided(decision), self.now_s)
        self.decisions.append(decision)
        return decision

    def nodes(self, *names: str, pool: str = "spot", gpus: int = 1) -> Decision:
        """They come and are prepared, all at once."""
        self.tick(*(NodeReady(Node(name, pool, gpus)) for name in names))
        return self.tick(*(NodePrepared(name) for name in names))

    def running(self, *names: str, steps: int = 0, gpus: int = 1) -> Plan:
        """A generation on these nodes, `steps` steps old. Requests still open are waited for in
        vain."""
        self.nodes(*names, gpus=gpus)
        self.tick(after_s=20)
        plan = self.entered()
        self.steps(steps)
        return plan

    def entered(self) -> Plan:
        """What was ordered is entered."""
        assert self.state.target is not None, self.decisions[-1].reason
        plan = self.state.target
        self.tick(
            PlanEntered(
                plan.generation,
                self.state.step if plan.resume.source == "live" else plan.resume.step,
            )
        )
        return plan

    def steps(self, n: int, **changes: Any) -> None:
        plan = self.state.plan
        assert plan is not None
        for step in range(self.state.step + 1, self.state.step + n + 1):
            values = {
                "train_loss": 1.0,
                "tokens": 10,
                "step_time_s": 0.1,
                "digest": f"d{step}",
            } | changes
            self.tick(StepDone(plan.generation, step, **values))

    def quiesced(self, plan: Plan, held: dict[str, list[tuple[int, int, str]]]) -> Decision:
        """node -> (rank, step, kind) of what its worker 0 still holds; the last decision."""
        decision = Decision()
        for name, holdings in held.items():
            worker = WorkerId(name, 0)
            there = tuple(Holding(worker, plan.generation, r, s, kind) for r, s, kind in holdings)  # type: ignore[arg-type]
            decision = self.tick(
                Quiesced(
                    worker, plan.generation, max((s for _, s, _ in holdings), default=0), there
                )
            )
        return decision


def orders(decision: Decision, kind: type[Action]) -> list[Any]:
    return [action for action in decision.actions if isinstance(action, kind)]


def plan_of(decision: Decision) -> Plan:
    (order,) = orders(decision, EnterPlan)
    assert isinstance(order, EnterPlan)
    return order.plan


def stopped(story: Story) -> Stop:
    """The one Stop that was ordered."""
    (stop,) = [stop for decision in story.decisions for stop in orders(decision, Stop)]
    assert isinstance(stop, Stop)
    assert stop.reason
    return stop


def durable(story: Story, step: int) -> CopyStored:
    """The checkpoint of a step of its newest generation is stored."""
    plan = story.state.plan or story.state.plans[story.state.generation]
    return CopyStored(
        Copy(step, "durable", plan.generation, plan.layout, plan.layers, uri=f"u{step}"), 0.1
    )
