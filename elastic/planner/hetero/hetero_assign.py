"""A layout on workers of several kinds: the order of ranks, the shares and the stages that end a
step first, and its time.

What the cost model says of equal GPUs of the slowest kind is the start: its computation is scaled
to what the busiest rank has to do at its own rate, what is waited for (collectives, optimizer)
stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nlargest
from itertools import islice

from elastic.errors import InfeasiblePlan
from elastic.planner.cost import memory
from elastic.planner.cost.block_cost_cache import BlockCostCache
from elastic.planner.cost.memory import Step
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.step_cost import Cost, Site
from elastic.planner.hetero import rank_placement
from elastic.planner.hetero.hetero_split import Split, SplitTask, split
from elastic.planner.hetero.rank_placement import Slot
from elastic.planner.hetero.unequal_shares import most_that
from elastic.types import Layout, WorkerId
from elastic.types.replacing import replace

COMPUTED = ("products", "attention", "moved", "recomputed", "tp", "cp", "ep")
# of the step, where the model is not known
RECOMPUTED = {"none": 0.0, "selective": 0.05, "full": 1 / 3}
BETTER = 0.01  # that another order of ranks must be than the ones before it
MOST_ORDERS = 10


@dataclass(frozen=True)
class HeteroAssignment:
    """`cost`: of a step; where the model is not known, in a unit that all layouts have in common.
    `busy_s`: what the busiest rank computes, collectives left out, in samples x blocks by the
    rates' unit."""

    ranks: tuple[WorkerId, ...]
    samples: tuple[int, ...]
    layers: tuple[int, ...]
    cost: Cost
    busy_s: float = 0.0

    @property
    def idle(self) -> float:
        """Share of a step in which workers wait because others have more to do."""
        parts = self.cost.parts
        return (parts.get("uneven", 0.0) + parts.get("bubble", 0.0)) / self.cost.step_s


@dataclass(eq=False)
class HeteroAssigner:
    """`site`: of the slowest kind, whose GPUs have rate `reference`; `slower`: than that site says
    they compute, where they were measured. `unit`: rate of a usual worker. `room`: node -> bytes
    of each of its GPUs; {} = not known. `usable`: of these what a layout may take."""

    cache: BlockCostCache
    site: Site
    place: rank_placement.PlacementSite
    reference: float
    room: Mapping[str, int]
    usable: Callable[[int, Layout], float]
    max_workers: int = 0
    most_rows: int = 0  # of a microbatch, where the job says so
    slower: float = 1.0
    unit: float = 1.0
    _totals: dict[int, float] = field(default_factory=dict)
    _rows: dict[tuple[Layout, int, int, int], int] = field(default_factory=dict)

    @property
    def work(self) -> ModelCost:
        return self.cache.work

    def assign(
        self, layout: Layout, step: Step, *, exact: bool = False, least_s: float = 0.0
    ) -> HeteroAssignment:
        """`exact`: the job names the layout, which is refused for no activations. `least_s`: what
        a step takes at least, so that no other order needs to be tried. Raises InfeasiblePlan."""
        best: HeteroAssignment | None = None
        errors: list[InfeasiblePlan] = []
        for slots in islice(self.place.arrangements(layout, self.max_workers), MOST_ORDERS):
            try:
                found = self._assigned(layout, step, slots, exact=exact)
            except InfeasiblePlan as error:
                errors.append(error)
                continue
            if best is None or found.cost.step_s < best.cost.step_s * (1 - BETTER):
                best = found
            if best.cost.step_s * (1 - BETTER) <= least_s:
                break
        if best is None:
            raise errors[0]
        return best

    def _assigned(
        self, layout: Layout, step: Step, slots: tuple[Slot, ...], *, exact: bool
    ) -> HeteroAssignment:
        inner, dp, m = layout.tp * layout.cp, layout.dp, step.n_microbatches
        stages = range(layout.pp)
        rates = [slot.rate * inner for slot in slots]
        speeds = tuple(zip(*(rates[p * dp : (p + 1) * dp] for p in stages), strict=True))
        ends = self.ends(layout, step)
        unit = max(1, self.work.model.together)
        task = SplitTask(
            layout, self.work.n_blocks, step.global_batch, m, ends, unit=unit,
            loads=self.cache.loads(self.site, layout, step.n_rows),
        )  # fmt: skip
        try:
            bound = self._bound(task, step, slots) if self.room or self.most_rows else task
            made = split(bound, speeds)
        except InfeasiblePlan:
            if not exact:
                raise
            made = split(task, speeds)
        cost = self.cost(layout, step, made, total=sum(slot.rate for slot in slots) * inner)
        ranks = tuple(worker for slot in slots for worker in slot.workers)
        # a model without blocks costs as much as one of one block, and has none to be dealt out
        layers = made.layers if self.work.model.n_blocks else (0,) * len(made.layers)
        return HeteroAssignment(ranks, made.samples, layers, cost, made.busy_s)

    # -------------------------------------------------------------------------------------- time

    def floor(self, layout: Layout, step: Step) -> float:
        """Of a step at least: nobody waits for others, on the fastest workers."""
        total = self.most(layout.world_size)
        ideal = step.global_batch * (self.work.n_blocks + self.ends(layout, step)) / total
        return self.cost(layout, step, Split((), (), ideal, ideal), total=total).step_s

    def most(self, n_workers: int) -> float:
        """Rate of the fastest of them together."""
        if n_workers not in self._totals:
            self._totals[n_workers] = sum(nlargest(n_workers, self.place.rates.values()))
        return self._totals[n_workers]

    def ends(self, layout: Layout, step: Step) -> float:
        """The head, in blocks."""
        return self.cache.ends(self.site, layout, step.n_rows)

    def cost(self, layout: Layout, step: Step, made: Split, *, total: float) -> Cost:
        """On workers of these rates in `total`."""
        sample, m = self.work.sample, step.n_microbatches
        ends = self.ends(layout, step)
        ideal = step.global_batch * (self.work.n_blocks + ends) / total
        waits = {"uneven": max(0.0, made.stage_s - ideal), "bubble": made.busy_s - made.stage_s}
        if sample is None or not sample.flop:
            parts = {"busy": 1.0} | {name: s / ideal for name, s in waits.items()}
            return guessed_cost(layout, parts, total / self.unit)
        base = self.cache.step_cost(self.site, layout, step)
        computed = self.slower * sum(base.parts[name] for name in COMPUTED)
        mean = step.n_rows * m * (self.work.n_blocks + ends)
        mean /= layout.pp * (layout.tp * layout.cp * self.reference)
        times = computed / mean  # seconds of what takes 1 at that rate
        scale = self.slower * ideal / mean
        took = {
            k: s * scale if k in COMPUTED else s for k, s in base.parts.items() if k != "jitter"
        }
        took |= {name: some * times for name, some in waits.items()}
        took["bubble"] += (layout.pp - 1) * base.parts["pp"] / m * layout.pp / layout.n_stages
        steady = max(1e-12, base.step_s - base.parts["jitter"])
        took["jitter"] = sum(took.values()) * base.parts["jitter"] / steady
        return Cost(took, base.flop)

    # -------------------------------------------------------------------------------------- memory

    def check_rows(self, layout: Layout, step: Step) -> None:
        """Whether all GPUs together may hold a microbatch: a stage of a pipeline has as many blocks
        as an even one at least. Raises InfeasiblePlan."""
        inner, n_rows = layout.tp * layout.cp, step.global_batch // step.n_microbatches
        even, holds = -(-self.work.n_blocks // layout.pp), 0
        if layout.pp > 1:
            most = int(self.usable(max(self.room.values()), layout))
            holds = layout.dp * self._most_rows(layout, step, most, n_blocks=even)
        else:
            for room, n in self._workers.items():
                usable = int(self.usable(room, layout))
                holds += n // inner * self._most_rows(layout, step, usable, n_blocks=even)
        if holds < n_rows:
            raise InfeasiblePlan(
                f"of {n_rows} samples at once the memory of {layout.dp} ranks holds {holds}"
            )

    @cached_property
    def _workers(self) -> Counter[int]:
        """By the memory that there is for each."""
        found: Counter[int] = Counter()
        for node in self.place.nodes:
            found[self.room.get(node.node_id, 0)] += node.gpus
        return found

    def _bound(self, task: SplitTask, step: Step, slots: tuple[Slot, ...]) -> SplitTask:
        layout, dp = task.layout, task.layout.dp
        room = [int(self.usable(self.room.get(slot.node_id, 0), layout)) for slot in slots]
        stages = (room[p * dp : (p + 1) * dp] for p in range(layout.pp))
        rooms = list(zip(*stages, strict=True))
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
        key = layout, step.n_microbatches, room, -step.n_rows
        if key not in self._rows:

            def fits(n: int) -> bool:
                return self._stage_bytes(layout, step, n) <= room

            n_blocks = self.work.n_blocks
            self._rows[key] = most_that(fits, n_blocks) if room else n_blocks
        return self._rows[key]

    def _most_rows(self, layout: Layout, step: Step, room: int, *, n_blocks: int) -> int:
        """Samples at once."""
        key = layout, step.n_microbatches, room, n_blocks
        if key not in self._rows:
            m = step.n_microbatches

            def needs(n_rows: int) -> int:
                more = replace(step, largest_share=n_rows * m)
                return self._stage_bytes(layout, more, n_blocks)

            limit = step.global_batch // m
            # replicas without stages have more of them
            if self.most_rows and (layout.dp_replicate == 1 or layout.pp > 1):
                limit = min(limit, self.most_rows)
            one, two = needs(1), needs(2)  # each further sample takes as much as the second
            if room and one > room:
                limit = 0
            elif room and two > one:
                limit = min(limit, (room - one) // (two - one) + 1)
            self._rows[key] = limit
        return self._rows[key]

    def _stage_bytes(self, layout: Layout, step: Step, n_blocks: int) -> int:
        """As memory.stage_bytes."""
        active = memory.activation_parts(self.work, layout, step, depth=n_blocks)
        return int(self.cache.state_bytes(layout, step.dtype, n_blocks) + sum(active.values()))


def guessed_cost(layout: Layout, parts: Mapping[str, float], total: float) -> Cost:
    """Where the model is not known. `parts`: of a perfect split over workers of these rates in
    `total`; of collectives 15 % for each doubling of tp, 2 % for each of the data-parallel
    ranks."""
    tp_doublings = (layout.tp * layout.cp).bit_length() - 1
    times = (1 + 0.15 * tp_doublings) * (1 + 0.02 * (layout.dp.bit_length() - 1))
    again = 1 + RECOMPUTED[layout.activation_checkpointing]
    found = {name: part * again / total for name, part in parts.items()}
    return Cost(found | {"guessed": sum(found.values()) * (times - 1)})
