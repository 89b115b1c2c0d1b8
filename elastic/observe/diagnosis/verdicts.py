"""What a run is bound by, the number that says so, and the next thing to try. Pure: evidence in,
verdicts out, in the order of what would be won.

`share` is the part of the run's time (in which a driver ran it) that goes if the cause goes: never
more than was spent on it, and what the run would do instead is not guessed. Causes below WORTH are
not worth a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from elastic.observe.diagnosis.evidence import Evidence
from elastic.text import n_of, size
from elastic.types import Job

Bound = Literal[
    "compute", "memory bandwidth", "network", "storage", "data", "imbalance", "pipeline bubble",
    "heat or power", "waiting for capacity", "idle nodes", "copies", "changes of capacity",
    "start-up", "evaluation", "time between steps",
]  # fmt: skip
WORTH = 0.05
MANY_WORKERS = 4  # of the loader: more seldom help


@dataclass(frozen=True)
class RunVerdict:
    """`share`, `usd`: what would be won at most (0 = nothing that a setting would win). `number`:
    what it is read from; `advice`: a key of job.yaml or a command."""

    bound: Bound
    share: float
    usd: float
    number: str
    advice: str

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"share": round(self.share, 4), "usd": round(self.usd, 6)}

    @property
    def won(self) -> str:
        """What would be, behind a word; '' = nothing to speak of."""
        return f" (up to {percent(self.share)} of the time)" if self.share >= 0.005 else ""

    @property
    def line(self) -> str:
        """All of it."""
        return f"{self.bound}{self.won}: {self.number}; next: {self.advice}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def of_time(seen: Evidence) -> Iterator[RunVerdict]:
    """From the ledger's categories: what is spent outside of the steps themselves."""
    # a script that is restarted saves and reads by itself: that is a part of its restarts
    of_state = (_changes,) if seen.state.job.restarted else (_storage, _copies, _changes)
    for rule in (_data, *of_state, _start_up, _capacity, _idle, _evaluation, _between):
        verdict = rule(seen)
        if verdict is not None and verdict.share >= WORTH:
            yield verdict


def _data(seen: Evidence) -> RunVerdict:
    share, job = seen.share("data_loading"), seen.state.job
    number = f"steps waited {percent(share)} of the run for samples (data_loading)"
    if seen.main is not None and seen.main.timed is not None and seen.main.timed.data_s:
        waits = seen.main.timed.data_s
        rank = max(range(len(waits)), key=lambda k: waits[k])
        number += f"; rank {rank} on {seen.main.plan.ranks[rank].node_id} waits {waits[rank]:.3f} s"
        number += " a step"
    return RunVerdict("data", share, seen.usd("data_loading"), number, _more_loading(job))


def _more_loading(job: Job) -> str:
    if job.data.loader_workers < MANY_WORKERS:
        return f"data.loader_workers: {max(2, 2 * job.data.loader_workers)} in job.yaml"
    if job.data.cache is None:
        return "data.cache: a folder on a disk of the node (docs/data.md)"
    return f"data.prefetch_steps: {2 * job.data.prefetch_steps}, or smaller files on a nearer disk"


def _storage(seen: Evidence) -> RunVerdict:
    names = ("checkpoint_save", "checkpoint_restore")
    share, kept = seen.share(*names), seen.checkpoints
    rate = f"{size(kept.n_bytes / kept.seconds)}/s" if kept.seconds else "an unknown rate"
    number = (
        f"saving took {percent(seen.share(names[0]))} of the run, restoring "
        f"{percent(seen.share(names[1]))}; {n_of(kept.stored, 'checkpoint')} written at {rate}"
    )
    if kept.skipped:
        number += f", {kept.skipped} skipped because the one before was still being written"
    if seen.share(names[1]) > seen.share(names[0]):
        advice = "replica_every: auto keeps the state in a peer's memory, which needs no reading"
    elif seen.state.job.durable_every != "auto":
        advice = "checkpoint_every: auto in job.yaml, or storage nearer to the nodes"
    else:
        advice = "elastic doctor --storage URI measures it; storage in the nodes' own region"
    return RunVerdict("storage", share, seen.usd(*names), number, advice)


def _copies(seen: Evidence) -> RunVerdict:
    slowed = min(seen.replica_slowed_s, max(0.0, seen.account.seconds["productive"]))
    slowed_share = slowed / seen.wall_s if seen.wall_s > 0 else 0.0
    waited, job = seen.share("copy"), seen.state.job
    number = (
        f"steps waited {percent(waited)} of the run for peer replicas and ran "
        f"{percent(slowed_share)} longer beside them"
    )
    advice = (
        "replica_every: auto in job.yaml"
        if job.peer_every != "auto"
        else f"copy_link_share: {job.copy_link_share / 2:g} in job.yaml, or a faster network"
    )
    productive_s = seen.account.seconds["productive"]
    part = slowed / productive_s if productive_s > 0 else 0.0
    usd = seen.usd("copy") + seen.usd("productive") * part
    return RunVerdict("copies", waited + slowed_share, usd, number, advice)


def _changes(seen: Evidence) -> RunVerdict:
    names = ("reshard", "wasted_progress")
    changes = [one for one in seen.account.transitions if one.cause != "start"]
    if seen.state.job.restarted:
        anew = sum(not one.at_step and one.steps_lost > 0 for one in changes)
        return _restarts(seen, len(changes), anew)
    lost, again = sum(one.cause == "loss" for one in changes), sum(t.steps_lost for t in changes)
    number = (
        f"{n_of(len(changes), 'change')} of the layout ({lost} after a loss without notice) took "
        f"{percent(seen.share(names[0]))} of the run, {n_of(again, 'step')} trained again "
        f"{percent(seen.share(names[1]))}"
    )
    from_disk = sum(t.steps_lost for t in changes if t.source == "durable")
    if seen.share(names[1]) <= seen.share(names[0]):
        advice = "on_demand_floor: copy in job.yaml, or a pool that is reclaimed less often"
    elif 2 * from_disk > again:
        advice = "peer_replicas: 2 or a smaller checkpoint_every in job.yaml: nodes were lost "
        advice += "together with the holders of their replicas"
    else:
        advice = "a smaller replica_every in job.yaml: fewer steps are lost with a node"
    return RunVerdict("changes of capacity", seen.share(*names), seen.usd(*names), number, advice)


def _restarts(seen: Evidence, n_changes: int, n_anew: int) -> RunVerdict:
    """Of a script that each change starts anew: keys about replicas and checkpoints are not its
    own. `n_anew`: changes after which it began at its first step again."""
    names = ("reshard", "checkpoint_restore", "wasted_progress")
    number = (
        f"{n_of(n_changes, 'restart')} of the script took {percent(seen.share(*names[:2]))} of the "
        f"run, steps trained again {percent(seen.share(names[2]))}"
    )
    advice = "elastic.loop around its loop: then it is changed live, not restarted (docs/loop.md)"
    if n_anew:
        number += f"; {n_anew} of them began at step 0 again"
        advice = f"resume from its newest checkpoint, as docs/script.md shows; or {advice}"
    return RunVerdict("changes of capacity", seen.share(*names), seen.usd(*names), number, advice)


def _start_up(seen: Evidence) -> RunVerdict:
    share = seen.share("program_startup")
    number = f"{percent(share)} of the run passed until machines, workers and first steps were "
    number += "ready"
    advice = "an image that holds all packages and data (docs/clusters.md); longer runs"
    return RunVerdict("start-up", share, seen.usd("program_startup"), number, advice)


def _capacity(seen: Evidence) -> RunVerdict:
    name = "waiting_for_capacity"
    number = (
        f"{percent(seen.share(name))} of the run passed without enough nodes to train "
        f"(min_workers: {seen.state.job.min_workers})"
    )
    advice = (
        "another pool, or an on-demand pool with on_demand_floor, in job.yaml"
        if seen.state.job.min_workers <= 1
        else f"a min_workers below {seen.state.job.min_workers}, or another pool, in job.yaml"
    )
    return RunVerdict("waiting for capacity", seen.share(name), seen.usd(name), number, advice)


def _idle(seen: Evidence) -> RunVerdict:
    share = seen.share("idle_remainder")
    number = f"ready nodes without a part in the layout took {percent(share)} of the run"
    largest = seen.main.plan.layout.world_size if seen.main is not None else 1
    advice = (
        "layout: auto in job.yaml, which divides any number of workers"
        if seen.state.job.layout != "auto"
        else f"max_workers: {largest} in job.yaml: what is not used is not kept"
    )
    return RunVerdict("idle nodes", share, seen.usd("idle_remainder"), number, advice)


def _evaluation(seen: Evidence) -> RunVerdict:
    share, every = seen.share("evaluation"), seen.state.job.eval_every
    number = f"validation took {percent(share)} of the run, every {n_of(every, 'step')}"
    advice = f"eval_every: {2 * every}, or fewer eval_samples, in job.yaml"
    return RunVerdict("evaluation", share, seen.usd("evaluation"), number, advice)


def _between(seen: Evidence) -> RunVerdict:
    share = seen.share("between_steps")
    number = f"{percent(share)} of the run lies between the end of a step and the next one"
    advice = "a larger global_batch, or fewer workers than cores on each machine (docs/ledger.md)"
    return RunVerdict("time between steps", share, seen.usd("between_steps"), number, advice)
