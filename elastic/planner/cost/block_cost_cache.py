"""What a search asks for under many layouts, computed once: costs of a block and of the head, what
of a step hangs on no microbatch, and the bytes of the state."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from elastic.planner.cost import compute, memory
from elastic.planner.cost.compute import BlockTimes
from elastic.planner.cost.memory import Step
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.step_cost import BlockCost, Cost, LayoutCost, Site, optimizer_s, step_cost
from elastic.types import Layout
from elastic.types.replacing import replace


@dataclass
class BlockCostCache:
    """Of one model."""

    work: ModelCost
    _blocks: dict[Hashable, BlockTimes] = field(default_factory=dict)
    _ends: dict[Hashable, float] = field(default_factory=dict)
    _costs: dict[Hashable, BlockCost] = field(default_factory=dict)
    _wholes: dict[Hashable, LayoutCost] = field(default_factory=dict)
    _states: dict[Hashable, float] = field(default_factory=dict)
    _lone: dict[Hashable, float] = field(default_factory=dict)
    _floors: dict[Hashable, float] = field(default_factory=dict)
    _sites: dict[int, Site] = field(default_factory=dict)  # held, so that no two have one id

    def block_s(self, site: Site, layout: Layout, n_rows: int) -> BlockTimes:
        key = (id(site), layout.tp, layout.cp, layout.ep, n_rows, layout.activation_checkpointing)
        if key not in self._blocks:
            sample = self.work.sample
            assert sample is not None
            self._sites[id(site)] = site
            self._blocks[key] = compute.block_s(
                site.chip, sample, layout, n_rows=n_rows, n_blocks=self.work.n_blocks
            )
        return self._blocks[key]

    def ends_s(self, site: Site, layout: Layout, n_rows: int) -> float:
        key = id(site), layout.tp, layout.cp, layout.ep, n_rows
        if key not in self._ends:
            sample = self.work.sample
            assert sample is not None
            self._sites[id(site)] = site
            self._ends[key] = compute.ends_s(site.chip, sample, layout, n_rows=n_rows)
        return self._ends[key]

    def loads(self, site: Site, layout: Layout, n_rows: int) -> tuple[float, ...]:
        """What each block takes, in mean ones; () = all are alike."""
        sample = self.work.sample
        if sample is None or not sample.block_flop:
            return ()
        return self.block_s(site, layout, n_rows).loads(self.work)

    def ends(self, site: Site, layout: Layout, n_rows: int) -> float:
        """The head, in mean blocks."""
        sample = self.work.sample
        if sample is None or not sample.flop:
            return 0.0
        one = self.block_s(site, layout, n_rows).busy
        return self.ends_s(site, layout, n_rows) / one if one else 0.0

    def step_cost(self, site: Site, layout: Layout, step: Step) -> Cost:
        axes = id(site), layout.cp, layout.tp, layout.ep, step.dtype
        of_block = axes, step.n_rows, layout.activation_checkpointing
        block = self._costs.get(of_block)
        if block is None:
            passes = self.block_s(site, layout, step.n_rows)
            block = BlockCost.of(site, self.work, layout, step=step, passes=passes)
            self._costs[of_block] = block
        of_whole = (
            axes, layout.pp, layout.dp_replicate, layout.dp_shard, layout.zero_stage,
            layout.offload,
        )  # fmt: skip
        whole = self._wholes.get(of_whole)
        if whole is None:
            whole = self._wholes[of_whole] = LayoutCost.of(site, self.work, layout, step=step)
        return step_cost(site, self.work, layout, step=step, block=block, whole=whole)

    def state_bytes(self, layout: Layout, dtype: str, depth: int | None = None) -> float:
        """As memory.state_bytes."""
        key = (
            layout.pp, layout.dp_shard, layout.cp, layout.tp, layout.ep, layout.zero_stage,
            layout.offload, dtype, depth,
        )  # fmt: skip
        if key not in self._states:
            self._states[key] = memory.state_bytes(self.work, layout, dtype, depth=depth)
        return self._states[key]

    def floor_s(self, site: Site, layout: Layout, n_rows: int) -> float:
        """Of a sample in one block, forward and backward: at no number of samples up to `n_rows`
        less. Tiles are taken to fill the GPU, the last ones too, so that more samples never take
        more each."""
        key = (id(site), layout.tp, layout.cp, layout.ep, n_rows)
        if key not in self._floors:
            sample, chip = self.work.sample, site.chip
            assert sample is not None
            self._sites[id(site)] = site
            full = replace(chip, kernels=replace(chip.kernels, tail=0.0))
            one = compute.block_s(
                full,
                sample,
                replace(layout, activation_checkpointing="none"),
                n_rows=n_rows,
                n_blocks=self.work.n_blocks,
            )
            self._floors[key] = (one.forward + one.backward) / n_rows
        return self._floors[key]

    def lone_s(self, site: Site, step: Step, n_gpus: int) -> float:
        """Of a step on GPUs that have the whole model each and never wait for each other;
        microbatches of one size."""
        key = id(site), step.n_rows
        if key not in self._lone:
            alone = Layout()
            one = self.block_s(site, alone, step.n_rows)
            ends = self.ends_s(site, alone, step.n_rows)
            self._lone[key] = (
                self.work.n_blocks * (one.forward + one.backward) + ends
            ) / step.n_rows
        return self._lone[key] * step.global_batch / n_gpus + optimizer_s(
            site, self.work, Layout(dp_shard=n_gpus)
        )
