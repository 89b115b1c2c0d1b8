"""A layout on workers of several kinds: the order of ranks, the shares and the stages that end a
step first, and its time.

What the cost model says of equal GPUs of the slowest kind is the start: its computation is scaled
to what the busiest rank has to do at its own rate, what is waited for (collectives, optimizer)
stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from heapq import nlargest
from itertools import islice

from elastic.errors import InfeasiblePlan
from elastic.planner.cost import compute, memory
from elastic.planner.cost.memory import Step
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.step_cost import Site, step_cost
from elastic.planner.hetero import rank_placement
from elastic.planner.hetero.hetero_shares import most_that
from elastic.planner.hetero.hetero_split import Split, SplitTask, split
from elastic.planner.hetero.rank_placement import Slot
from elastic.types import Layout, WorkerId

COMPUTED = ("products", "attention", "moved", "recomputed", "tp", "cp", "ep")
# of the step, where the model is not known
RECOMPUTED = {"none": 0.0, "selective": 0.05, "full": 1 / 3}
BETTER = 0.01  # that another order of ranks must be than the ones before it
MOST_ORDERS = 10


@dataclass(frozen=True)
class HeteroAssignment:
    """`parts`: of a step, in multiples of a perfect split over the same workers; `pace`: seconds of
    it but for a factor that all layouts of a search have in common. `busy_s`: what the busiest rank
    computes, collectives left out, in samples x blocks by the rates' unit."""

    ranks: tuple[WorkerId, ...]
    samples: tuple[int, ...]
    layers: tuple[int, ...]
    parts: Mapping[str, float]
    pace: float
    step_s: float = 0.0
    busy_s: float = 0.0

    @property
    def idle(self) -> float:
        """Share of a step in which workers wait because others have more to do."""
        return (self.parts.get("uneven", 0.0) + self.parts.get("bubble", 0.0)) / sum(
            self.parts.values()
        )


@dataclass(eq=False)
class HeteroAssigner:
    """`site`: of the slowest kind, whose GPUs have rate `reference`. `room`: node -> bytes that
    each of its workers may take; {} = not known."""

    work: ModelCost
    site: Site
    place: rank_placement.PlacementSite
    reference: float
    room: Mapping[str, int]
    max_workers: int = 0
    most_rows: int = 0  # of a microbatch, where the job says so
    _totals: dict[int, float] = field(default_factory=dict)
    _rows: dict[tuple[Layout, int, int, int], int] = field(default_factory=dict)

    def assign(self, layout: Layout, step: Step, exact: bool = False) -> HeteroAssignment:
        """`exact`: the job names the layout, which is refused for no activations. Raises
        InfeasiblePlan."""
        best: HeteroAssignment | None = None
        errors: list[InfeasiblePlan] = []
        for slots in islice(self.place.arrangements(layout, self.max_workers), MOST_ORDERS):
            try:
                found = self._assigned(layout, step, slots, exact=exact)
            except InfeasiblePlan as error:
                errors.append(error)
                continue
            if best is None or found.pace < best.pace * (1 - BETTER):
                best = found
        if best is None:
            raise errors[0]
        return best

    def _assigned(
        self, layout: Layout, step: Step, slots: tuple[Slot, ...], *, exact: bool
    ) -> HeteroAssignment:
        inner, dp, m = layout.tp * layout.cp, layout.dp, step.n_microbatches
        speeds = tuple(
            tuple(slots[p * dp + d].rate * inner for p in range(layout.pp)) for d in range(dp)
        )
        task = SplitTask(layout, self.work.n_blocks, step.global_batch, m, self.ends(layout, step))
        try:
            made = split(
                self._bound(task, step, slots) if self.room or self.most_rows else task, speeds
            )
        except InfeasiblePlan:
            if not exact:
                raise
            made = split(task, speeds)
        total = sum(slot.rate for slot in slots) * inner
        parts, seconds = self.parts(layout, step, made, total=total)
        ranks = tuple(worker for slot in slots for worker in slot.workers)
        # a model without blocks costs as much as one of one block, and has none to be dealt out
        layers = made.layers if self.work.model.n_blocks else (0,) * len(made.layers)
        return HeteroAssignment(
            ranks, made.samples, layers, parts, sum(parts.values()) / total, seconds, made.busy_s
        )

    # -------------------------------------------------------------------------------------- time

    def floor(self, layout: Layout, step: Step) -> float:
        """What `pace` is at least: nobody waits for others, on the fastest workers."""
        if layout.world_size not in self._totals:
            fastest = nlargest(layout.world_size, self.place.rates.values())
            self._totals[layout.world_size] = sum(fastest)
        total = self._totals[layout.world_size]
        ideal = step.global_batch * (self.work.n_blocks + self.ends(layout, step)) / total
        return (
            sum(self.parts(layout, step, Split((), (), ideal, ideal), total=total)[0].values())
            / total
        )

    def ends(self, layout: Layout, step: Step) -> float:
        """The head, in blocks."""
        sample = self.work.sample
        if sample is None or not sample.flop:
            return 0.0
        one = compute.block_s(
            self.site.chip, sample, layout, n_rows=step.n_rows, n_blocks=self.work.n_blocks
        ).busy
        return (
            compute.ends_s(self.site.chip, sample, layout, n_rows=step.n_rows) / one if one else 0.0
        )

    def parts(
        self, layout: Layout, step: Step, made: Split, *, total: float
    ) -> tuple[dict[str, float], float]:
        """In multiples of a perfect split over workers of these rates in `total`, and the seconds
        of the step in all (0 = the model is not known)."""
        sample, m = self.work.sample, step.n_microbatches
        ends = self.ends(layout, step)
        ideal = step.global_batch * (self.work.n_blocks + ends) / total
        waits = {"uneven": max(0.0, made.stage_s - ideal), "bubble": made.busy_s - made.stage_s}
        if sample is None or not sample.flop:
            times = (1 + RECOMPUTED[layout.activation_checkpointing]) / ideal
            found = {"busy": ideal * times} | {name: some * times for name, some in waits.items()}
            return found | {"guessed": sum(found.values()) * (guessed(layout) - 1)}, 0.0
        base = step_cost(self.site, self.work, layout, step=step)
        computed = sum(base.parts[name] for name in COMPUTED)
        mean = (
            step.n_rows
            * m
            * (self.work.n_blocks + ends)
            / layout.pp
            / (layout.tp * layout.cp * self.reference)
        )
        times = computed / mean  # seconds of what takes 1 at that rate
        took = {
            name: s * ideal / mean if name in COMPUTED else s
            for name, s in base.parts.items()
            if name != "jitter"
        }
        took |= {name: some * times for name, some in waits.items()}
        took["bubble"] += (layout.pp - 1) * base.parts["pp"] / m * layout.pp / layout.n_stages
        took["jitter"] = (
            sum(took.values())
            * base.parts["jitter"]
            / max(1e-12, base.step_s - base.parts["jitter"])
        )
        chip = self.site.chip
        perfect_s = base.flop / (total / self.reference) / chip.gpu.peak(chip.dtype)
        return {name: s / perfect_s for name, s in took.items()}, sum(took.values())

    # -------------------------------------------------------------------------------------- memory

    def _bound(self, task: SplitTask, step: Step, slots: tuple[Slot, ...]) -> SplitTask:
        layout, dp = task.layout, task.layout.dp
        rooms = [
            tuple(self.room.get(slots[p * dp + d].node_id, 0) for p in range(layout.pp))
            for d in range(dp)
        ]
        kinds = set(rooms)
        least = [
            min((room for room in there if room), default=0) for there in zip(*kinds, strict=True)
        ]
        blocks = (
            tuple(self._most_blocks(layout, step, room) for room in least)
            if layout.pp > 1
            else None
        )

        def rows(totals: tuple[int, ...]) -> list[int]:
            most = {
                there: min(
                    self._most_rows(layout, step, room, n_blocks=n)
                    for room, n in zip(there, totals, strict=True)
                )
                for there in kinds
            }
            return [most[there] for there in rooms]

        return replace(task, most_blocks=blocks, most_rows=rows)

    def _most_blocks(self, layout: Layout, step: Step, room: int) -> int:
        return most_that(
            lambda n: not room or memory.stage_bytes(self.work, layout, step, n_blocks=n) <= room,
            self.work.n_blocks,
        )

    def _most_rows(self, layout: Layout, step: Step, room: int, *, n_blocks: int) -> int:
        """Samples at once."""
        key = layout, step.n_microbatches, room, n_blocks
        if key not in self._rows:
            m = step.n_microbatches

            def fits(n_rows: int) -> bool:
                more = replace(step, largest_share=n_rows * m)
                return (
                    not room
                    or memory.stage_bytes(self.work, layout, more, n_blocks=n_blocks) <= room
                )

            limit = step.global_batch // m
            # replicas without stages have more of them
            if self.most_rows and (layout.dp_replicate == 1 or layout.pp > 1):
                limit = min(limit, self.most_rows)
            self._rows[key] = most_that(fits, limit)
        return self._rows[key]


def guessed(layout: Layout) -> float:
    """Of collectives, where the model is not known: 15 % for each doubling of tp, 2 % for each of
    the data-parallel ranks."""
    tp_doublings, dp_doublings = (
        (layout.tp * layout.cp).bit_length() - 1,
        layout.dp.bit_length() - 1,
    )
    return (1 + 0.15 * tp_doublings) * (1 + 0.02 * dp_doublings)
