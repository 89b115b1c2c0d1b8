"""A Layout drawn small: a row per pipeline stage, a cell per data-parallel rank, the tp ranks of a
cell side by side."""

from __future__ import annotations

from string import ascii_uppercase

from elastic.types import Plan
from elastic.types.grid import stage_ranks, stages_at


def letters(nodes: list[str]) -> dict[str, str]:
    """node id -> A, B, C ... in the order given; beyond 26 A1, B1 ..."""
    return {
        node: ascii_uppercase[i % 26] + (str(i // 26) if i >= 26 else "")
        for i, node in enumerate(nodes)
    }


def draw(plan: Plan, names: dict[str, str]) -> list[str]:
    """Lines such as `stage 0  [A0 A1] [B0 B1]`; `names` are the letters of the nodes."""
    layout = plan.layout
    lines = []
    for stage in range(layout.pp):
        workers = [plan.ranks[rank] for rank in stage_ranks(layout, stage)]
        labels = [f"{names.get(worker.node_id, '?')}{worker.local_rank}" for worker in workers]
        cells = [labels[i : i + layout.tp] for i in range(0, len(labels), layout.tp)]
        layers = "+".join(
            str(plan.layers[i]) for i in stages_at(layout, stage) if i < len(plan.layers)
        )
        blocks = f"  {layers} blocks" if layout.pp > 1 and layers else ""
        head = f"stage {stage}  " if layout.pp > 1 else ""
        lines.append(head + " ".join(f"[{' '.join(cell)}]" for cell in cells) + blocks)
    return lines
