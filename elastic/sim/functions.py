"""What simulated layouts compute: the probe sample's loss and the train_loss of a step. The same in
all of them, until some axes are broken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic.types import Job, Layout, Plan, Probed, WorkerFailed, agree, tolerance

AXES = ("pp", "cp", "tp", "dp")
OFF = 1.25  # times the right loss, in a layout with a broken axis
PROBE_S = 0.01


@dataclass
class Functions:
    """`broken`: axes that compute something else where they have more than one rank. `trained`:
    (generation, step) of steps that such a layout has made."""

    job: Job
    broken: set[str] = field(default_factory=set)
    trained: list[tuple[int, int]] = field(default_factory=list)

    def wrong(self, layout: Layout) -> bool:
        return any(getattr(layout, axis) > 1 for axis in self.broken)

    def break_new_axes(self, used: Iterable[Layout]) -> None:
        """Those that none of the layouts uses: what has computed the right thing continues to."""
        right = [layout for layout in used if not self.wrong(layout)]
        self.broken |= {
            axis for axis in AXES if all(getattr(layout, axis) == 1 for layout in right)
        }

    def probe(self, layout: Layout, step: int) -> float:
        return (6.0 - 4.0 * step / (step + 50)) * (OFF if self.wrong(layout) else 1.0)

    def train_loss(self, layout: Layout) -> float:
        return OFF if self.wrong(layout) else 1.0

    def step(self, plan: Plan, step: int) -> float:
        """The train_loss of a step that this plan makes."""
        if self.wrong(plan.layout):
            self.trained.append((plan.generation, step))
        return self.train_loss(plan.layout)

    def left(self, plan: Plan, step: int) -> Probed:
        """Told where a generation has stopped."""
        return Probed(plan.generation, step, self.probe(plan.layout, step), None, PROBE_S)

    def entered(
        self, plan: Plan, step: int, source: Plan | None
    ) -> tuple[Probed, list[WorkerFailed]]:
        """Told where one has entered; `source`: the plan that stopped there just before."""
        expected = plan.probe
        if plan.resume.source == "live" and source is not None:
            expected = self.probe(source.layout, step)
        loss = self.probe(plan.layout, step)
        told = Probed(plan.generation, step, loss, expected, PROBE_S)
        if expected is None or agree(loss, expected, tolerance(self.job)):
            return told, []
        text = f"the probe sample's loss is {loss:.4f}, it was {expected:.4f}"
        failed = [
            WorkerFailed(worker, plan.generation, "layout", text, 0, step) for worker in plan.ranks
        ]
        return told, failed
