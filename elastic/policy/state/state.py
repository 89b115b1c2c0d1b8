"""What the driver knows: State and its parts. Built only by `fold` (fold.py)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Literal

from elastic.policy.state.breaks import Break, ReadFailures
from elastic.types import (
    Abort,
    Copy,
    CopyFailed,
    DropGroups,
    EnterPlan,
    HardwareProfile,
    Holding,
    InstancesSeen,
    Job,
    Layout,
    Losses,
    ModelProfile,
    Node,
    Plan,
    Pool,
    ProfileAsked,
    Quiesce,
    RollForward,
    SampleProfile,
    SetShares,
    StartProfile,
    StepDone,
    StorageSeen,
    WorkerId,
)  # fmt: skip
from elastic.types.gates import Gates
from elastic.types.replacing import derived

Phase = Literal["waiting", "entering", "running", "succeeded", "failed", "stopped"]
FailureCause = Literal["loss", "infrastructure", "infeasible", "rollback", "program"]
ENDED: tuple[Phase, ...] = ("succeeded", "failed", "stopped")


@dataclass(frozen=True)
class Request:
    """Nodes that were asked for and have not come yet. `failed`: no others of it will."""

    request_id: str
    pool: str
    count: int
    at_s: float
    failed: bool = False


@dataclass(frozen=True)
class Backoff:
    """A pool that said no: not asked again before `until_s`."""

    until_s: float
    wait_s: float
    reason: str
    deaths: int = 0  # > 0: it gives nodes, and they die at start


@dataclass(frozen=True)
class PoolSeen:
    """What was seen of a pool since the run's first start."""

    node_s: float = 0.0  # node-seconds
    reclaims: int = 0  # nodes that were taken, with a notice or without
    moments: int = 0  # at which some were taken, few or many at once
    taken_at_s: float | None = None  # the last of them
    there_s: float = 0.0  # seconds in which any node of it was there
    # nodes that the cloud said are likelier to be taken, and that were not taken since
    warnings: int = 0
    losses: int = 0  # nodes that were gone before they had been released
    start_s: float = 0.0  # from the request to the prepared node, a running mean; 0 = none yet
    deaths: int = 0  # starts in a row that ended before a node was prepared
    died_at_s: float = 0.0
    dry_since_s: float | None = None  # when it said no for the first time since it gave a node
    dry_s: float = 0.0  # of all droughts that have ended
    droughts: int = 0
    unanswered: int = 0  # requests in a row that were withdrawn, since it gave a node
    reclaimed_starts: int = 0  # as `deaths`, of a spot pool that had started nodes: by reclaims


@dataclass(frozen=True)
class Failure:
    """Why the running or entering generation cannot continue."""

    cause: FailureCause
    reason: str
    at_s: float
    workers: frozenset[WorkerId] = frozenset()  # that are gone
    kill: tuple[WorkerId, ...] = ()  # that do not answer


@dataclass(frozen=True)
class Aborting:
    """A generation that is being aborted: which workers still owe a Quiesced. Stays until the next
    plan is ordered."""

    generation: int
    at_s: float
    owing: Set[WorkerId]
    failure: Failure
    # the step that those who missed its commit were told to apply; at most once
    forward: RollForward | None = None


@dataclass(frozen=True)
class Apart:
    """Two nodes that did not reach each other when these generations met, one after another;
    `since_s`: when that was told first."""

    nodes: tuple[str, str]
    since_s: float
    generations: tuple[int, ...] = ()


@dataclass(frozen=True)
class Forming:
    """Process groups that are made ahead for a plan that may come. `since_s`: since when any are;
    `nodes`: see standing_of."""

    plan: Plan
    since_s: float
    nodes: tuple[tuple[str, str, float | None], ...]
    seconds: float | None = None  # that it took; None = not there yet
    error: str = ""

    @property
    def ended(self) -> bool:
        return self.seconds is not None

    @property
    def there(self) -> bool:
        return self.ended and not self.error


@dataclass(frozen=True)
class StopWish:
    """A person's or the budget's wish to stop. `limit`: of the budget or the deadline, which wait
    for nobody. `done`: of the script, which has trained enough."""

    reason: str
    at_s: float
    limit: bool = False
    done: bool = False


@dataclass(frozen=True)
class Window:
    """From `from_s` to `at_s` a unit of work took a worker `unit_s`, a mean of medians over
    `n_steps` steps up to `step`."""

    from_s: float
    at_s: float
    unit_s: float
    n_steps: int
    spread: float = 0.0
    data_s: float = 0.0
    generation: int = 0
    step: int = 0


@dataclass(frozen=True)
class MeasuredSteps:
    """What steps of a plan took, data and copies left out; the newest last. `waited`: of each with
    its data, the share that was spent waiting for it."""

    plan: Plan
    seconds: tuple[float, ...] = ()
    waited: tuple[float, ...] = ()


@dataclass(frozen=True)
class Profiling:
    """A profile that was asked for and has not ended. `order`: None = not begun; `again`: by a
    driver that is gone, and may not have reached all."""

    asked: ProfileAsked
    at_s: float
    order: StartProfile | None = None
    again: bool = False
    written: frozenset[int] = frozenset()  # ranks
    error: str = ""  # of the first rank that has none


@dataclass(frozen=True)
class Moved:
    """Shares or stages that were made to follow the measured speeds: when, and after how many
    measured steps."""

    at_s: float
    n_steps: int


@dataclass(frozen=True)
class State(Gates):
    """Mappings and sets are never changed in place."""

    phase: Phase = "waiting"
    run: str = ""
    epoch: int = 0
    job: Job = Job()
    pools: tuple[Pool, ...] = ()
    model: ModelProfile | None = None
    hardware: tuple[HardwareProfile, ...] = ()
    pool_hardware: tuple[tuple[str, HardwareProfile], ...] = ()  # see DriverStarted
    started_at_s: float = 0.0
    first_started_at_s: float | None = None  # the run's, whatever drivers it has had since
    unseen: frozenset[str] = frozenset()  # nodes that an attached driver has not heard of yet
    attached_at_s: float = 0.0
    # orders that a driver that died may not have carried out
    repeat: tuple[EnterPlan | Quiesce | Abort | DropGroups, ...] = ()

    # in order of arrival; lost ones stay, with their status
    nodes: Mapping[str, Node] = field(default_factory=dict)
    prepared: frozenset[str] = frozenset()  # their workers live and have imported the program
    prepared_at_s: float = 0.0  # when the last node was prepared
    # node -> when it was asked, or has made progress last
    preparing: Mapping[str, float] = field(default_factory=dict)
    # nodes that may not take part -> why, until they are quarantined
    refused: Mapping[str, str] = field(default_factory=dict)
    releasing: frozenset[str] = frozenset()
    # whose device has failed -> how; until their node is left
    faulty: Mapping[WorkerId, str] = field(default_factory=dict)
    device_errors: tuple[tuple[int, str], ...] = ()  # step, node: of the newest such errors
    asserts: tuple[int, ...] = ()  # steps in which a device-side assert was reported, newest last
    # nodes on which memory was not free again -> what was missing, each time since it was prepared
    short: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # nodes that we leave without being told to; released when no state is left on them
    given_up: frozenset[str] = frozenset()
    dead: frozenset[WorkerId] = frozenset()  # processes that are continued nodes that are not
    requests: Mapping[str, Request] = field(default_factory=dict)
    instances: Mapping[str, InstancesSeen] = field(default_factory=dict)  # of a pool, no nodes
    backoff: Mapping[str, Backoff] = field(default_factory=dict)
    n_requests: int = 0
    history: Mapping[str, PoolSeen] = field(default_factory=dict)  # pool -> what was seen of it
    scores: Mapping[str, int] = field(default_factory=dict)  # pool -> placement score, 1 to 10
    # nodes whose torch rounds pinned buffers up to a power of two bytes
    pinned_rounded: frozenset[str] = frozenset()
    unpinned: Mapping[str, str] = field(default_factory=dict)  # whose copies are pageable -> why
    warned: frozenset[str] = frozenset()  # nodes that the cloud said are likelier to be taken
    # nodes never prepared yet -> when they were asked for
    born: Mapping[str, float] = field(default_factory=dict)

    generation: int = 0  # the newest that was ever ordered
    plan: Plan | None = None  # the running one
    target: Plan | None = None  # ordered, not entered yet
    ordered_at_s: float = 0.0
    plans: Mapping[int, Plan] = field(default_factory=dict)
    failure: Failure | None = None
    forming: Forming | None = None
    setup_s: float = 0.0  # that the groups took that were made ahead last; 0 = none were
    aborting: Aborting | None = None
    quiescing: tuple[int, float] | None = None  # generation, since when
    quiesced: Set[WorkerId] = frozenset()  # workers that have left the running generation
    sent: Set[tuple[int, WorkerId]] = frozenset()  # generation, worker that only sent to it: left
    # of a script that is restarted: the order behind `quiescing`, kept until the next generation
    asked: Quiesce | None = None
    # the same: workers whose processes have ended by themselves, and well
    script_ended: frozenset[WorkerId] = frozenset()
    considered: tuple[str, ...] = ()  # the nodes that the newest plan was made from
    stored_generation: int = 0  # a checkpoint of this generation was ordered, because of a notice
    copy_asked_step: int = 0  # at which a checkpoint out of turn was ordered last

    step: int = 0
    best_step: int = 0
    entered_at_s: float = 0.0
    entered_step: int = 0
    last_step: StepDone | None = None
    last_step_at_s: float = 0.0
    # when rank 0 last said that it makes progress between steps, or any rank that it saves
    busy_at_s: float = 0.0
    loading_at_s: float = 0.0  # when any rank last said that it loads
    move_pace: float = 1.0  # measured by predicted seconds of moves between memories
    step_time_s: float = 0.0  # running mean; 0 = not measured
    measured: tuple[MeasuredSteps, ...] = ()  # by plan, the newest last
    # worker-seconds per step, data and copies included; 0 = not measured
    worker_step_s: float = 0.0
    # of the newest live transitions: from step to step, less an ordinary one; of a script that is
    # restarted: what its starts took, and its end before
    pauses_s: tuple[float, ...] = ()
    copy_stall_s: float = 0.0  # of a peer replica; 0 = not measured
    copy_slowed_s: float = 0.0  # by which a peer replica made the steps of its flight longer
    copy_flight_s: float = 0.0  # from its boundary until it was stored
    n_copies_timed: int = 0  # since the plan was entered or its cadence changed
    cadence_at_s: float = 0.0  # when the running plan's cadence was changed
    durable_stall_s: float = 0.0
    # from its boundary until a checkpoint was stored; of a script that is restarted: from SIGTERM
    # until all of its processes had ended
    durable_s: float = 0.0
    durable_ranks: int = 0  # that wrote what `durable_s` was measured of; 0 = not known
    peer: Copy | None = None  # the newest acknowledged peer replica
    durable: tuple[Copy, ...] = ()  # newest first
    verified: frozenset[str] = frozenset()  # URIs of checkpoints that were read back and are right
    being_read: str = ""  # URI of the one that is being read back
    damaged: Mapping[str, str] = field(default_factory=dict)  # URIs of unreadable ones -> why
    damaged_copies: tuple[Copy, ...] = ()  # those whose markers are whole; newest first
    copy_failed: CopyFailed | None = None  # the newest checkpoint that was not made
    copy_failed_at_s: float = 0.0
    copy_failures: int = 0  # in a row; of the last step's copy alone
    validation: Mapping[int, float] = field(default_factory=dict)  # step -> validation_loss
    # as last reported by Quiesced
    holdings: Mapping[WorkerId, tuple[Holding, ...]] = field(default_factory=dict)
    # that of the live step there, likewise
    commits: Mapping[WorkerId, tuple[float, ...]] = field(default_factory=dict)
    # step whose gradients are there, its commit was not seen
    pending: Mapping[WorkerId, int] = field(default_factory=dict)
    distrusted: frozenset[int] = frozenset()  # generations whose content was found wrong
    # (g, s): of generations up to g, steps after s hold corrupted results
    wrong: tuple[tuple[int, int], ...] = ()
    spoilt: tuple[str, ...] = ()  # URIs of checkpoints of such steps, to be removed
    checked_step: int = 0  # of the newest comparison of ranks that found nothing
    suspects: frozenset[str] = frozenset()  # nodes that may have silently corrupted results
    # nodes that have -> what; quarantined by the next decision
    blamed: Mapping[str, str] = field(default_factory=dict)
    below_step: int | None = None  # recover only to copies of less than this step (NaN)
    infeasible: Mapping[Layout, int] = field(default_factory=dict)  # layout -> measured bytes
    # layout -> of the GPUs where that was, the memory of the smallest; 0 = not known
    infeasible_on: Mapping[Layout, int] = field(default_factory=dict)
    # as `infeasible`, of the job's other phases
    infeasible_in: Mapping[int, Mapping[Layout, int]] = field(default_factory=dict)
    # what a sample asks of the model in each phase of the job; () = not told, or it has none
    phase_samples: tuple[SampleProfile | None, ...] = ()
    lengths: tuple[int, ...] = ()  # of the dataset, or of those of the phases; () = not told
    # pp, tp, cp, dp or `layout ...` -> why (see refused_layouts.py)
    unusable: Mapping[str, str] = field(default_factory=dict)
    astray: Mapping[int, int] = field(default_factory=dict)  # generation of one -> its first step
    probes: Mapping[int, float] = field(default_factory=dict)  # step -> loss of the probe sample
    probed_in: Mapping[int, int] = field(default_factory=dict)  # step -> generation that told it
    # step -> train_loss when it was done first, digest of its sample ids
    losses: Losses = field(default_factory=dict)
    compared: frozenset[str] = frozenset()  # axes found right by a transition
    # generation -> its layout, also of the drivers before: what `probes` and `losses` are of
    layouts: Mapping[int, Layout] = field(default_factory=dict)
    unrepeatable: str = ""  # why a step that is done again is not compared with what it was

    speeds: Mapping[WorkerId, tuple[Window, ...]] = field(default_factory=dict)  # newest last
    timed_at_s: float = -1.0  # when the newest of them came
    device_notes: Mapping[WorkerId, str] = field(default_factory=dict)  # what GPUs say themselves
    shares_ordered: tuple[SetShares, float] | None = None  # not confirmed yet, since when
    shares_moved: tuple[Moved, ...] = ()  # newest last
    stages_moved: tuple[Moved, ...] = ()
    # generations whose shares were changed while they ran, or did not fit
    reshared: frozenset[int] = frozenset()
    uneven_failed: str = ""  # why shares stay equal: unequal ones did not fit

    profiling: Profiling | None = None
    # id -> why it ended before its time, '' = it did not; the newest last
    profiles: Mapping[str, str] = field(default_factory=dict)
    profiled_step: int = 0  # up to which steps tell nothing, after the newest that has ended

    retries: int = 0  # infrastructure errors in a row without progress
    retry_step: int = -1
    progress_at_s: float = 0.0  # when a step was done that no one had done before
    # nodes on which a process died first in a generation and that had no notice and were not lost
    # with it, in a row without progress past `death_step`, and what was said of the last one
    deaths: tuple[str, ...] = ()
    death: str = ""
    death_step: int = 0
    death_generation: int = 0
    breaks: tuple[Break, ...] = ()  # of one step, in a row without progress past it
    # kind of WorkerFailed -> what could not be read, without progress since (unread_data.py)
    unread: Mapping[str, ReadFailures] = field(default_factory=dict)
    mismatches: Mapping[int, str] = field(default_factory=dict)  # of generations there, likewise
    stood: Mapping[WorkerId, str] = field(default_factory=dict)  # where, in the aborted generation
    apart: tuple[Apart, ...] = ()  # in order of their names; until they have met
    # generations behind which nodes were left out for that, in a row without progress
    left_out_behind: tuple[int, ...] = ()
    # nodes that were -> how often, and until when they are not prepared should they come back
    kept_out: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    rollbacks: int = 0
    rolled_back: tuple[tuple[str, int], ...] = ()  # guards and the steps that were rolled back for
    n_skipped: int = 0  # steps that a guard has skipped
    n_losses: int = 0
    n_notices: int = 0
    node_s: float = 0.0  # node-seconds so far
    process_failures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    silences: Mapping[str, tuple[tuple[float, str], ...]] = field(default_factory=dict)  # when, why
    fatal: str = ""
    stop: StopWish | None = None
    away: StorageSeen | None = None  # storage is, as seen last
    outcome_reason: str = ""
    digests: Mapping[int, str] = field(default_factory=dict)  # step -> of all samples up to it
    usd: float = 0.0
    billed_at_s: float = 0.0

    @property
    def steps(self) -> int:
        return self.job.steps

    @property
    def rest_steps(self) -> float:
        """That are still to be done; of a script that is restarted nobody knows."""
        return inf if self.job.restarted else self.steps - self.step

    @property
    def rest_work(self) -> float:
        """Those steps in steps of the phase that the run is in."""
        return self.work_between(self.step, self.steps) if self.job.phases else self.rest_steps

    def work_between(self, begin: float, end: float) -> float:
        """The steps from `begin` to `end` in steps of the phase that the run is in, by what their
        samples ask of the model (where nobody knows that: by their number)."""
        job, known = self.job, [sample.flop if sample else 0.0 for sample in self.phase_samples]
        if not job.phases:
            return end - begin
        per_sample = known if known and all(known) else [1.0] * len(job.phases)
        work = [flop * float(job.keys_of(k)["global_batch"]) for k, flop in enumerate(per_sample)]
        begins = [*(phase.from_step for phase in job.phases), job.steps]
        return sum(
            max(0.0, min(end, begins[k + 1]) - max(begin, begins[k])) * each / work[job.phase]
            for k, each in enumerate(work)
        )

    @property
    def phase_ends_at(self) -> int:
        """So many steps are done when the running plan ends by itself."""
        plan = self.plan
        return self.steps if plan is None else self.job.in_phase(plan.phase).until_step

    @property
    def phase_over(self) -> bool:
        """Has the running plan ended with its phase, and not with the job?"""
        return self.plan is not None and self.phase_ends_at <= self.step < self.steps

    @property
    def digest(self) -> str:
        """Running digest of the sample ids of all steps up to the newest."""
        return self.digests.get(self.step, "")

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint, 0 when there is none."""
        return self.durable[0].step if self.durable else 0

    @property
    def committed(self) -> frozenset[str]:
        """URIs of the checkpoints that were stored and not removed since, damaged ones too."""
        return frozenset((*(copy.uri for copy in self.durable), *self.damaged))

    @derived("nodes")
    def alive(self) -> tuple[Node, ...]:
        """Nodes that are paid for."""
        return tuple(node for node in self.nodes.values() if node.status != "lost")

    @derived("nodes")
    def by_status(self) -> Mapping[str, tuple[Node, ...]]:
        """Those of each status that there are, in order of arrival."""
        found = defaultdict[str, list[Node]](list)
        for node in self.nodes.values():
            found[node.status].append(node)
        return {status: tuple(nodes) for status, nodes in found.items()}

    @property
    def available(self) -> tuple[Node, ...]:
        """Nodes that a plan may use: prepared, and nothing known against them."""
        return self.by_status.get("prepared", ())

    @property
    def draining(self) -> tuple[Node, ...]:
        """Nodes that are going to be left."""
        return self.by_status.get("draining", ())

    @derived("nodes")
    def available_names(self) -> tuple[str, ...]:
        return tuple(node.node_id for node in self.available)

    @derived("nodes")
    def there(self) -> Mapping[str, tuple[int, int]]:
        """Pool -> its nodes that are or will be of use, and their workers."""
        found: dict[str, tuple[int, int]] = {}
        for status in ("pending", "ready", "prepared"):
            alike = Counter(map(attrgetter("pool", "gpus"), self.by_status.get(status, ())))
            for (pool, gpus), n in alike.items():
                before, workers = found.get(pool, (0, 0))
                found[pool] = (before + n, workers + n * gpus)
        return found

    @derived("nodes")
    def alive_by_pool(self) -> Mapping[str, int]:
        """How many nodes of each pool are paid for."""
        return dict(Counter(map(attrgetter("pool"), self.alive)))

    @derived("nodes", "plan")
    def plan_by_pool(self) -> Mapping[str, int]:
        """How many nodes of each pool the running plan has, as far as they are known."""
        names = self.plan.nodes if self.plan is not None else ()
        return dict(Counter(map(attrgetter("pool"), filter(None, map(self.nodes.get, names)))))

    @derived("nodes", "pools", "instances", "job")
    def usd_per_h(self) -> float:
        """Of nodes, of machines that are not nodes yet or any more, and of the head."""
        prices = defaultdict(float, {pool.name: pool.usd_per_node_h for pool in self.pools})
        machines = sum(
            prices[name] * (seen.starting + seen.leaving) for name, seen in self.instances.items()
        )
        nodes = sum(map(prices.__getitem__, map(attrgetter("pool"), self.alive)))
        return nodes + machines + self.head_usd_per_h

    @property
    def head_usd_per_h(self) -> float:
        return self.job.head_usd_per_h

    @property
    def starting_usd_per_h(self) -> float:
        """Of machines that are not nodes yet."""
        return sum(
            pool.usd_per_node_h * seen.starting
            for pool in self.pools
            if (seen := self.instances.get(pool.name))
        )

    def usd_at(self, now_s: float) -> float:
        """The bill so far."""
        return self.usd + self.usd_per_h * max(0.0, now_s - self.billed_at_s) / 3600

    @derived("pools")
    def pool_by_name(self) -> Mapping[str, Pool]:
        return {pool.name: pool for pool in reversed(self.pools)}

    def pool(self, name: str) -> Pool | None:
        return self.pool_by_name.get(name)

    def pools_of(self, nodes: Iterable[str]) -> list[Pool]:
        """The pools that these nodes are of, as far as they are known."""
        used = {node.pool for name in nodes if (node := self.nodes.get(name))}
        return [pool for pool in self.pools if pool.name in used]

    @property
    def faulty_nodes(self) -> set[str]:
        """Those on which a device has failed."""
        return {worker.node_id for worker in self.faulty}

    @derived("plan", "target")
    def members(self) -> frozenset[WorkerId]:
        """Every worker that takes part in the running generation or in the transition to the
        next."""
        found = self.plan.workers if self.plan else frozenset[WorkerId]()
        return found.union(self.target.workers, self.target.senders) if self.target else found

    @derived("plan", "target")
    def member_nodes(self) -> frozenset[str]:
        """Their nodes."""
        running = self.plan.nodes if self.plan else ()
        return frozenset(running).union(self.target.nodes_taking_part if self.target else ())

    def takes_part(self, worker: WorkerId) -> bool:
        """Is it one of `members`?"""
        plan, target = self.plan, self.target
        entering = target is not None and (worker in target.workers or worker in target.senders)
        return entering or (plan is not None and worker in plan.workers)

    def takes_part_on(self, node_id: str) -> bool:
        """Has the running plan ranks on that node?"""
        return self.plan is not None and node_id in self.plan.workers_per_node

    def lives(self, worker: WorkerId) -> bool:
        """Is the process believed to be there?"""
        node = self.nodes.get(worker.node_id)
        return (
            node is not None
            and node.status not in ("lost", "quarantined")
            and worker not in self.dead
        )

    def is_current(self, generation: int) -> bool:
        """Does a message of this generation count?"""
        return generation in (p.generation for p in (self.plan, self.target) if p)


def standing_of(state: State) -> tuple[tuple[str, str, float | None], ...]:
    """The nodes that there are, how they stand, and when they go."""
    return tuple(
        (node.node_id, node.status, node.deadline_s)
        for node in state.nodes.values()
        if node.status != "lost"
    )
