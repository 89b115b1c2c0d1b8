"""profile_run(): ranks of a live run trace some steps while it trains; where their time went."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic.api import control
from elastic.errors import ElasticError, InfeasiblePlan
from elastic.ledger.lease import holder
from elastic.ledger.run_folder import RunFolder
from elastic.observe import find_runs
from elastic.observe.profiles.profile_bars import planned_parts, profile_lines
from elastic.observe.profiles.profile_files import FOLDER, RankParts, mean_parts, read_profile
from elastic.policy.plans import expected_parts
from elastic.policy.state.fold import State
from elastic.types import Plan

LOOK_S, LOOK_SHARE = 0.5, 0.1  # between two looks, and of the time that looking may take


@dataclass(frozen=True)
class RunProfileRequest:
    """`ranks`: numbers with commas, `all`, or `node`, the first of each node."""

    steps: int = 5
    ranks: str = "node"


@dataclass(frozen=True)
class RunProfile:
    """`error`: why it ended before all ranks had written theirs; '' = they have. `planned`: what
    the planner expects of a step under that plan; None = nothing."""

    run: str
    profile_id: str
    folder: str
    ranks: tuple[RankParts, ...]
    plan: Plan | None
    planned: dict[str, Any] | None = None
    error: str = ""

    def plain(self) -> dict[str, Any]:
        n = len(self.ranks) or 1
        return {
            "run": self.run, "profile_id": self.profile_id, "folder": self.folder,
            "error": self.error, "layout": str(self.plan.layout) if self.plan else "",
            "generation": self.plan.generation if self.plan else 0,
            "ranks": [one.plain() for one in self.ranks],
            "total": {
                "step_s": sum(one.step_s for one in self.ranks) / n,
                "parts": mean_parts(self.ranks),
            },
            "planned": self.planned,
        }  # fmt: skip

    def lines(self, width: int = 100) -> list[str]:
        said = (
            [f"run {self.run}: profile {self.profile_id} ended early: {self.error}"]
            if self.error
            else []
        )
        return [*said, *(profile_lines(self.plain(), width) if self.ranks else [])]


def new_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def profile_run(
    run: RunFolder,
    wishes: RunProfileRequest | None = None,
    *,
    say: Callable[[str], None] = lambda text: None,
) -> RunProfile:
    """Waits until the ranks have written their traces. Raises SpecError where the run cannot be
    profiled now, ElasticError where it ends meanwhile."""
    wishes = wishes or RunProfileRequest()
    profile_id = control.profile(run.storage, new_id(), steps=wishes.steps, ranks=wishes.ranks)
    say(f"run {run.name} is asked for profile {profile_id}; it trains on")
    while True:
        began_s = time.monotonic()
        state = find_runs.now(run).state
        if profile_id in state.profiles:
            return profile_of(run, state, profile_id)
        if not holder(run.storage):
            raise ElasticError(
                f"run '{run.name}' has ended at step {state.step}, before profile {profile_id} was "
                "whole"
            )
        time.sleep(max(LOOK_S, (time.monotonic() - began_s) / LOOK_SHARE))


def profile_of(run: RunFolder, state: State, profile_id: str) -> RunProfile:
    """One that has ended, from the files of its ranks."""
    plan = state.plan or state.plans.get(state.generation)
    return RunProfile(
        run.name,
        profile_id,
        run.storage.uri_of(f"{FOLDER}/{profile_id}"),
        tuple(read_profile(run.storage, profile_id)),
        plan,
        planned_of(state, plan) if plan is not None else None,
        state.profiles.get(profile_id, ""),
    )


def planned_of(state: State, plan: Plan) -> dict[str, Any] | None:
    """What the cost model says of a step of the plan; None where it says nothing of its parts."""
    try:
        choice = expected_parts(state, plan)
    except InfeasiblePlan:
        return None
    if not choice.parts:
        return None
    return {
        "step_s": choice.model_step_s,
        "parts": planned_parts(choice.parts),
        "hardware_known": choice.hardware_known,
    }
