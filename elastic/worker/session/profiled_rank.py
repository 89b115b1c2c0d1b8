"""What a profile says of its rank: the worker, its coordinates, its groups by axis."""

from __future__ import annotations

from elastic.types.grid import axes_text
from elastic.worker.process_groups.groups import Groups
from elastic.worker.profile.step_profile import ProfileOutlets, StepProfile, TracedRank
from elastic.worker.profile.trace_parts import OTHERS
from elastic.worker.session.workplace import EnterOrder, Workplace

LOOP = (
    "its script computes in a thread of its own, and on a CPU torch.profiler traces the training "
    "thread alone"
)


def profile_of(place: Workplace, order: EnterOrder, groups: Groups) -> StepProfile:
    """Of a participant; one that only sends is never asked."""
    layout, rank = order.plan.layout, order.me
    at = axes_text(layout, rank) if rank < layout.world_size else ""
    of = TracedRank(
        rank, str(place.me), at, groups.device, groups.axis_names,
        "cp" if layout.cp > 1 else OTHERS,
        LOOP if place.script is not None and groups.device.type == "cpu" else "",
    )  # fmt: skip
    return StepProfile(
        of, ProfileOutlets(place.storage, place.report, place.background, place.at_phase)
    )
