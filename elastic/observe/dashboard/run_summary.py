"""What a page opens with: is the run well, what happened, what did it cost and save, what should be
changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from elastic.observe import run_tables
from elastic.observe.accounting.accounts import Account
from elastic.observe.dashboard.drawn_cluster import cluster
from elastic.observe.dashboard.finish_forecast import forecast
from elastic.observe.dashboard.followed_run import FollowedRun
from elastic.observe.diagnosis import doctor
from elastic.observe.reporting.savings import against_on_demand
from elastic.observe.run_view import View

# of the checks of a run: needs every step that was ever done, which is not kept here
UNDONE = "steps trained again"
LEAST_S = 120.0  # of a run, before its shares tell anything


def snapshot(run: FollowedRun) -> dict[str, Any]:
    """All of a run but its series, decisions and the pages of its generations."""
    with run.lock:
        view, books = run.view, run.books.so_far()
        ahead = forecast(run.curve, view.state)
        ended = view.ended
        found = {
            **_standing(run, view),
            "account": _account(books),
            "saved": saved(run, books),
            "forecast": None if ended or ahead is None else ahead.plain(),
            "advice": advice(run, books),
            "cluster": cluster(view),
            "generations": run.generations.plain(list(books.transitions), view.started_at_s),
            "communication": _communication(run, books),
        }
    return found


def _standing(run: FollowedRun, view: View) -> dict[str, Any]:
    state, plan, cut = view.state, view.state.plan, view.cut_off
    alive = Counter(view.status(node) for node in view.nodes.values())
    phase = "not begun" if run.empty else run_tables.phase(view, bool(run.holder))
    phase = "reading" if run.reading else phase
    return {
        "run": run.name,
        "uri": run.run.uri,
        "job": view.job.name,
        "version": run.version,
        "trouble": run.trouble,
        "reading": run.reading,
        "holder": run.holder,
        "phase": phase,
        "ended": view.ended,
        "outcome_reason": state.outcome_reason,
        "reason": view.reason,
        "epoch": state.epoch,
        "step": view.step,
        "steps": view.steps,
        "train_loss": run.curve.last("train_loss"),
        "evaluations": {str(step): found for step, found in list(view.evaluations.items())[-50:]},
        "tokens_per_s": view.tokens_per_s(),
        "step_time_s": view.step_time_s(),
        "unit": view.unit,
        "started_at_s": view.started_at_s,
        "at_s": round(view.at_s - view.started_at_s, 3),
        "wall_clock": view.started_at_s > 1e9,  # else a simulator's
        "generation": plan.generation if plan is not None else 0,
        "layout": str(plan.layout) if plan is not None else "",
        "n_ranks": len(plan.ranks) if plan is not None else 0,
        "nodes": dict(alive),
        "pools": [
            {
                "name": pool.name,
                "market": pool.market_type,
                "kind": pool.accelerator_type,
                "gpus": pool.gpus_per_node,
                "alive": state.alive_by_pool.get(pool.name, 0),
                "most": pool.max_nodes,
                "usd_per_node_h": pool.usd_per_node_h,
            }
            for pool in state.pools
        ],
        "usd": state.usd,
        "usd_per_h": state.usd_per_h if run.holder and not view.ended else 0.0,
        "budget_usd": view.job.budget_usd,
        "deadline_h": view.job.deadline_h,
        "n_notes": len(view.notes),
        "saved_step": view.saved_step,
        "copies_failed": view.copies_failed,
        "storage_away_s": round(view.at_s - state.away.since_s, 1) if state.away else None,
        "cut_off": (
            {"hosts": cut.hosts, "since_s": round(cut.since_s - view.started_at_s, 3)}
            if cut is not None and not view.ended
            else None
        ),
    }


def _account(books: Account) -> dict[str, Any]:
    rows = [
        {
            "name": name, "seconds": round(books.seconds[name], 3),
            "gpu_seconds": round(gpu_s, 3), "usd": round(books.usd[name], 6),
        }
        for name, gpu_s in books.gpu_seconds.items()
    ]  # fmt: skip
    return {"categories": rows, "totals": asdict(books.totals)}


def saved(run: FollowedRun, books: Account) -> dict[str, Any]:
    """As `elastic report` has it; `why`: there is nothing to compare."""
    found = against_on_demand(books, run.history)
    if isinstance(found, str):
        return {"usd": None, "why": found}
    return {"usd": found.saved_usd, "on_demand_usd": found.usd, "prices": list(found.prices)}


def advice(run: FollowedRun, books: Account) -> list[dict[str, str]]:
    """What should be looked at or changed: troubles, and what the run is bound by, the most that
    can be won first."""
    view, totals = run.view, books.totals
    found = [
        {"verdict": check.verdict, "what": check.name, "found": check.found, "hint": check.hint}
        for check in doctor.run_troubles(view)
        if check.verdict != "ok" and check.name != UNDONE
    ]
    if totals.wall_s > LEAST_S:
        bound = run.sources.verdicts(run.evidence.found(books), run.run.storage)
        found += [
            {
                "verdict": "look", "what": one.bound, "found": one.number + one.won,
                "hint": one.advice,
            }
            for one in bound
        ]  # fmt: skip
    ahead = None if view.ended else forecast(run.curve, view.state)
    until_s = run_tables.paid_until_s(view, bool(run.holder) or run.reading)
    if until_s is not None:
        said = f"nobody drives the run: they may be paid until {run_tables.clock(until_s)}"
        hint = "start the run again, which resumes it, or take the cluster down"
        found.append({"verdict": "look", "what": "nodes", "found": said, "hint": hint})
    limit = view.job.budget_usd
    if ahead is not None and limit and ahead.usd.high > limit:
        said = f"{ahead.usd.mid:.2f} dollars expected, {limit:.2f} may be spent"
        found.append(
            {
                "verdict": "bad" if ahead.usd.mid > limit else "look", "what": "budget",
                "found": said, "hint": "the run stops at its budget: raise it, or take fewer nodes",
            }
        )  # fmt: skip
    hours = view.job.deadline_h
    if ahead is not None and hours:
        end_h = (view.at_s - view.started_at_s + ahead.rest_s.high) / 3600
        if end_h > hours:
            said = f"done after {end_h:.1f} h in the worse case, the deadline is at {hours:.1f} h"
            hint = "more nodes: raise max_nodes of a pool, or add one"
            found.append({"verdict": "look", "what": "deadline", "found": said, "hint": hint})
    return sorted(found, key=lambda one: one["verdict"] != "bad")


def _communication(run: FollowedRun, books: Account) -> dict[str, Any]:
    """Of the running plan: seconds of a step as a profile of the run has them, or the cost model,
    what steps took, what each axis sends in a step and in how many steps it did, and bytes that the
    last transition moved inside nodes and between them."""
    view, state = run.view, run.view.state
    plan = state.plan
    if plan is None:
        return {"parts": {}, "axes": []}
    seen = run.evidence.found(books)
    traced = run.sources.traced(seen, plan, run.run.storage)
    parts = traced or run.sources.parts(seen, plan)
    last, move = state.last_step, plan.move
    facts = run.evidence.generations.get(plan.generation)
    links = move.links if move is not None else ()
    return {
        "parts": {name: float(f"{seconds:.4g}") for name, seconds in parts.items() if seconds > 0},
        "traced": bool(traced),
        "axes": [one.plain() for one in run.sources.axes(seen, plan, run.run.storage)],
        "n_steps": facts.n_seen if facts is not None else 0,
        "expected_step_s": plan.predicted_step_time_s or None,
        "model_step_s": plan.model_step_s or None,
        "measured_step_s": view.step_time_s(),
        "data_s": last.data_s if last is not None else None,
        "copy_s": last.copy_s if last is not None else None,
        "moved_bytes": move.n_bytes if move is not None else None,
        "moved_in_node_bytes": sum(n for a, b, n in links if a == b),
        "moved_between_bytes": sum(n for a, b, n in links if a != b),
    }
