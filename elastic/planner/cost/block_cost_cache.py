"""Costs of a block, kept: a search asks for the same ones under many layouts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elastic.planner.cost import compute
from elastic.planner.cost.compute import BlockTimes
from elastic.planner.cost.memory import Step
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.step_cost import Site, optimizer_s
from elastic.types import Layout


@dataclass
class BlockCostCache:
    """Of one model."""

    work: ModelCost
    _blocks: dict[tuple[int, int, int, int, int, str], BlockTimes] = field(default_factory=dict)
    _lone: dict[tuple[int, int], float] = field(default_factory=dict)
    _floors: dict[tuple[int, int, int, int, int], float] = field(default_factory=dict)
    _sites: list[Site] = field(default_factory=list)  # held, so that no two have one id

    def block_s(self, site: Site, layout: Layout, n_rows: int) -> BlockTimes:
        key = (id(site), layout.tp, layout.cp, layout.ep, n_rows, layout.activation_checkpointing)
        if key not in self._blocks:
            sample = self.work.sample
            assert sample is not None
            self._sites.append(site)
            self._blocks[key] = compute.block_s(
                site.chip, sample, layout, n_rows=n_rows, n_blocks=self.work.n_blocks
            )
        return self._blocks[key]

    def floor_s(self, site: Site, layout: Layout, n_rows: int) -> float:
        """Of a sample in one block, forward and backward: at no number of samples up to `n_rows`
        less. Tiles are taken to fill the GPU, the last ones too, so that more samples never take
        more each."""
        key = (id(site), layout.tp, layout.cp, layout.ep, n_rows)
        if key not in self._floors:
            sample, chip = self.work.sample, site.chip
            assert sample is not None
            self._sites.append(site)
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
            sample = self.work.sample
            assert sample is not None
            alone = Layout()
            one = self.block_s(site, alone, step.n_rows)
            ends = compute.ends_s(site.chip, sample, alone, n_rows=step.n_rows)
            self._lone[key] = (
                self.work.n_blocks * (one.forward + one.backward) + ends
            ) / step.n_rows
        return self._lone[key] * step.global_batch / n_gpus + optimizer_s(
            site, self.work, Layout(dp_shard=n_gpus)
        )
