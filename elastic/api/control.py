"""Orders to a run (stop, drill, profile), left in its inbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from elastic.api.running.start_checks import check_market
from elastic.catalog.bounded_yaml import yaml_of
from elastic.config.drill import NODE_WORD, NODE_WORDS, ON_NODES, DrillSpec
from elastic.config.job import drill_entry
from elastic.errors import SpecError
from elastic.ledger.lease import holder, newest
from elastic.ledger.run_folder import RunFolder
from elastic.observe import find_runs
from elastic.observe.run_view import View
from elastic.policy.profiling import ranks_of, too_late
from elastic.storage import Storage
from elastic.worker.hosting.inbox import profile_order


def stop(run: Storage, reason: str) -> bool:
    """Ask a run to save its state and stop. False: nobody drives it now; the next driver that is
    started again without a person obeys. Raises SpecError where the run has ended."""
    view, who = find_runs.now(place := RunFolder.of(run)), holder(run)
    if view.ended and not who:
        raise SpecError(_not_running(place, view))
    find_runs.order(run, {"stop": reason})
    return bool(who)


def drill(run: Storage, words: Sequence[str]) -> dict[str, Any]:
    """Let something happen to a live run: words such as 'kill=any'. Returns the entry. Raises
    SpecError."""
    data: dict[str, Any] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign:
            raise SpecError(f"drill: '{word}' must be key=value, as in kill=any")
        data[key] = (
            (value.split(",") if "," in value else value)
            if key in ON_NODES
            else yaml_of(value, f"drill: {key}")
        )
    entry = drill_entry(data)
    _held(run)
    _check_nodes(find_runs.now(RunFolder.of(run)), entry)
    find_runs.order(run, {"drill": entry.plain()})
    return entry.plain()


def profile(run: Storage, profile_id: str, *, steps: int, ranks: str) -> str:
    """Let ranks of a live run trace their next steps. Returns the id. Raises SpecError where they
    cannot, or another profile is under way."""
    asked = profile_order({"profile_id": profile_id, "steps": steps, "ranks": ranks})
    _held(run)
    state = find_runs.now(place := RunFolder.of(run)).state
    why = ""
    if state.job.restarted:
        why = "its script is restarted for each change, so elastic knows nothing of its steps"
    elif state.profiling is not None:
        known = state.profiling.asked.profile_id
        why = f"profile {known} is under way; ask again when it has ended"
    elif state.plan is not None:
        why = ranks_of(ranks, state.plan)[1] or too_late(state, steps)
    if why:
        raise SpecError(f"profile: run '{place.name}': {why}")
    find_runs.order(run, {"profile": asdict(asked)})
    return asked.profile_id


def _check_nodes(view: View, entry: DrillSpec) -> None:
    """Raises SpecError for nodes and pools that the journal does not know."""
    standing = [node.node_id for node in view.nodes.values() if node.status != "lost"]
    for name in entry.nodes():
        check_market(name, tuple(view.pools.values()), "drill")
        if not (name in standing or name == "partner" or NODE_WORD.fullmatch(name)):
            there = ", ".join(standing) or "none"
            raise SpecError(
                f"drill: '{name}' is no node; standing are {there}; or give {NODE_WORDS}"
            )
    if entry.add is not None and entry.add not in view.pools:
        raise SpecError(
            f"drill: there is no pool '{entry.add}'; the pools are {', '.join(view.pools)}"
        )


def _held(run: Storage) -> None:
    """Raises SpecError where nobody drives the run."""
    view, who = find_runs.now(place := RunFolder.of(run)), holder(run)
    if not who:
        raise SpecError(_not_running(place, view))
    sign = newest(run)
    if sign is not None and sign.epoch > view.state.epoch:
        raise SpecError(
            f"run '{place.name}': {who} is starting, and its journal has no line of it yet; try "
            "again when `elastic status` shows it"
        )


def _not_running(place: RunFolder, view: View) -> str:
    return f"run '{place.name}' is not running ({view.phase} at step {view.step})"
