"""Events: what backend and workers report, as facts in the past tense."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elastic.types.admission import Admission
from elastic.types.gates import Gates
from elastic.types.nouns import Copy, FailureKind, Holding, Node, Plan, Pool, WorkerId
from elastic.types.profiles import HardwareProfile, ModelProfile, SampleProfile


@dataclass(frozen=True)
class Event:
    """A fact, in the past tense."""


@dataclass(frozen=True)
class DriverStarted(Gates, Event):
    """All that policy and replay need: job and pools as plain data, model and hardware profiles.

    `hardware`: one of each kind; `pool_hardware`: of pools, by name, whose nodes are not as that.
    `attached`: a driver was here before; its journal has been folded and its workers may still run.
    `durable`: copies found in the run's storage at start. `cut`: lines of earlier drivers are
    missing before this one, in one sentence; '' = none. `paid_until_s`: until when nodes of the
    driver before may have been paid for, whatever this one's clock says; None = until it attached,
    or no longer than that driver lived. `supervised`: no person has started it, but
    `--supervise` after the driver before.
    """

    run: str
    epoch: int
    job: dict[str, Any]
    pools: tuple[Pool, ...]
    model: ModelProfile
    hardware: tuple[HardwareProfile, ...] = ()
    attached: bool = False
    durable: tuple[Copy, ...] = ()
    cut: str = ""
    paid_until_s: float | None = None
    pool_hardware: tuple[tuple[str, HardwareProfile], ...] = ()
    supervised: bool = False


@dataclass(frozen=True)
class NodeReady(Event):
    node: Node


@dataclass(frozen=True)
class NodePrepared(Event):
    """All workers of the node have imported the program and wait for a plan. `pids` are their
    process ids, `n_samples` is the length of the dataset that they have opened (0 = not told);
    `sample`: what one sample asks of the model, None = it could not be found out; `admission`: what
    was found when it was admitted, None = nobody looked. `pinned_rounded`: its torch rounds pinned
    host buffers up to a power of two bytes. `phase_samples`, `phase_lengths`: sample and length of
    the dataset in each phase of the job; () = it has none. `notes`: what a person should know of
    the data, a line each, that no node before has said."""

    node_id: str
    pids: tuple[int, ...] = ()
    n_samples: int = 0
    sample: SampleProfile | None = None
    admission: Admission | None = None
    pinned_rounded: bool = False
    phase_samples: tuple[SampleProfile | None, ...] = ()
    phase_lengths: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the dataset, or of those of the phases; () = not told."""
        return self.phase_lengths or ((self.n_samples,) if self.n_samples else ())


@dataclass(frozen=True)
class NodeRefused(Event):
    """The node was looked at when it started and may not take part: `reason` says why, in one line.
    It is still paid for. `may_pass`: it lacks memory that a process which is gone may still hold.
    `neighbors`: the nodes that it did not reach, where that is why."""

    node_id: str
    reason: str
    pool: str = ""
    may_pass: bool = False
    neighbors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Notice(Event):
    """The node will be preempted at `deadline_s` (backend's clock)."""

    node_id: str
    deadline_s: float
    origin: str = ""


@dataclass(frozen=True)
class NoticeWithdrawn(Event):
    node_id: str


@dataclass(frozen=True)
class NodeWarned(Event):
    """The cloud says something of the node that is no notice: it stays, and no deadline is known.
    `risk`: a reclaim has become more likely (AWS's rebalance recommendation), which may count for
    its pool's hazard; else it will stall a moment."""

    node_id: str
    what: str
    risk: bool = False


@dataclass(frozen=True)
class NodeLost(Event):
    """The node and all its workers are gone. `cause`: why, as is believed ('released' = by us)."""

    node_id: str
    cause: str = ""


@dataclass(frozen=True)
class InstancesSeen(Event):
    """Machines of the pool that the run pays for and that are none of its nodes: `starting` have
    been launched for it and have not joined, `leaving` were released and have not ended."""

    pool: str
    starting: int = 0
    leaving: int = 0


@dataclass(frozen=True)
class RequestFailed(Event):
    """`coming`: nodes of it that start nevertheless; told again when fewer do."""

    pool: str
    request_id: str
    reason: str
    coming: int = 0


@dataclass(frozen=True)
class PlanEntered(Event):
    """Every rank of the plan holds its state; the next message is its first step."""

    generation: int
    step: int
    # groups, build, transfer of rank 0, waiting for others included
    phases_s: dict[str, float] = field(default_factory=dict)
    bytes_moved: int = 0
    peak_bytes: int = 0
    left_at_s: float | None = None  # when the old generation's last step ended (backend's clock)


@dataclass(frozen=True)
class GroupsMade(Event):
    """A participant of a generation that may come has its process groups, or could not make them
    (`error`; `unreached`: nodes that did not answer it, where that is why). `port`: of the store at
    which it met the others. Goes from worker to backend, which tells the policy GroupsFormed."""

    generation: int
    port: int
    participant: int
    seconds: float = 0.0
    error: str = ""
    unreached: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupsFormed(Event):
    """The process groups that FormGroups has asked for are made on all participants, the last one
    `seconds` after it began; or they are not, and `error` says why. `apart`: a node, and those that
    did not answer it, where that is why."""

    generation: int
    seconds: float = 0.0
    error: str = ""
    apart: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanFailed(Event):
    """A generation cannot run as planned; `measured_bytes` > 0 where memory was the reason."""

    generation: int
    reason: str
    infeasible: bool = False
    measured_bytes: int = 0


@dataclass(frozen=True)
class StepDone(Event):
    """One per group and step. `step` counts optimizer steps finished, this one included."""

    generation: int
    step: int
    train_loss: float
    tokens: int
    step_time_s: float
    data_s: float = 0.0
    copy_s: float = 0.0
    grad_norm: float = 0.0
    digest: str = ""  # of the sample ids of this step
    skipped: bool = False  # its samples are used up, its update was left out (guard, overflow)
    # tokens per sample of the rank that had the most, over the mean of the step; 0 = not known
    imbalance: float = 0.0
    # of the places of all its micro-batches, those that were filled up; 0 = none, or not known
    pad_share: float = 0.0
    logged: dict[str, float] = field(default_factory=dict)  # told by the user's code, by name
    # with ep: tokens that came to the experts of the rank with most, over the mean; 0 = not known
    expert_load: float = 0.0


@dataclass(frozen=True)
class NoiseSeen(Event):
    """Unbiased estimates out of `step`: the trace of the covariance of one sample's gradient, and
    the square norm of the true gradient. The ratio of their means over many steps is the gradient
    noise scale, in samples."""

    generation: int
    step: int
    trace: float
    square_norm: float


@dataclass(frozen=True)
class GuardTripped(Event):
    """A guard of the job has tripped at `step`, and all ranks do the same about it. `rank`: where
    it went bad first, -1 = that cannot be told; `samples`: what that rank (or, at -1, every rank)
    trained on; () where they have no ids (a stream)."""

    generation: int
    step: int
    guard: str
    do: str  # skip, rollback or stop
    reason: str
    rank: int = -1
    worker: WorkerId | None = None
    samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class GroupRan(Event):
    """A generation that does not tell of its steps (a script that is restarted) ran until now."""

    generation: int


@dataclass(frozen=True)
class ScriptEnded(Event):
    """The worker's process of a script that is restarted has ended by itself, and well; nobody had
    asked it to."""

    worker: WorkerId
    generation: int


@dataclass(frozen=True)
class Evaluated(Event):
    """`seconds`: for which the steps stalled meanwhile."""

    generation: int
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Probed(Event):
    """`loss`: of the run's probe sample (one fixed sample, evaluation mode, forward pass only), per
    token, after `step` steps in the layout of that generation. Told where a generation has entered,
    before its first step, and where it has stopped at a boundary. `expected`: the same at that step
    in the layout before; None = nobody knew. `seconds`: that it took."""

    generation: int
    step: int
    loss: float
    expected: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class CopyStored(Event):
    """A whole copy is acknowledged (peer: by every partner; durable: its commit marker is written).

    `seconds`: from its boundary until it was stored at both ends. `stall_s`: the steps waited for
    it. `slowed_s`: the steps that ran meanwhile took so much longer in all; 0 = no difference could
    be told.
    """

    copy: Copy
    seconds: float = 0.0
    stall_s: float = 0.0
    slowed_s: float = 0.0


@dataclass(frozen=True)
class CopyFailed(Event):
    """A checkpoint was not made; training continues, the copies before it stay. `skipped`: it fell
    due while the one before was being written, and nothing has failed. `rank`: whose part of it was
    not stored; None = it is of no single rank."""

    generation: int
    step: int
    reason: str
    skipped: bool = False
    rank: int | None = None


@dataclass(frozen=True)
class CopyDamaged(Event):
    """A checkpoint could not be read, or was found wrong when it was read back: `reason` names the
    file. Nothing resumes from it; the files stay."""

    uri: str
    reason: str


@dataclass(frozen=True)
class CopyReadBegun(Event):
    """A checkpoint is being read back; it ends with CopyVerified or CopyDamaged, unless storage
    does not answer or it is removed."""

    uri: str


@dataclass(frozen=True)
class CopyVerified(Event):
    """Every byte of a checkpoint was read back, in `seconds`, and is what its digests say."""

    uri: str
    n_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class CopyRemoved(Event):
    """A checkpoint was removed, as RemoveCopy had ordered."""

    uri: str


@dataclass(frozen=True)
class WorkerFailed(Event):
    """A worker raised or its process is gone. The process lives unless `kind` is 'process'.

    collective: a peer went away; `unreached`: the nodes that did not answer this worker when its
    generation met, where that is why. program: the user's code raised. out_of_memory: with
    `measured_bytes`. not_finite: the loss or the gradients of `step` are no numbers. guard: another
    guard has tripped at `step`. In both cases the step was not applied, every rank says the same,
    and `do` is what the job's guard wants: rollback or stop. layout: the generation has entered,
    and its layout computes another function than the one before (see Probed); every rank says the
    same, and no step was made. device: its GPU cannot be used any more (a sticky CUDA error, or a
    critical Xid), in `step` (0 = in no step); the process still serves what it has in host memory.
    program with `do` = retry: a device-side assert in `step`, after which the process cannot use
    its GPU either. mismatch: the ranks have made collectives that do not match, each in the belief
    that the others make the same. storage, refused: what is read, data or a checkpoint, lies in
    storage that does not answer, or says no; unread: the disk or the network of the worker's node
    did not give its data. `frames`: of an error of the user's code, from its traceback.
    """

    worker: WorkerId
    generation: int
    kind: FailureKind
    error: str
    measured_bytes: int = 0
    step: int = 0
    guard: str = ""
    do: str = ""
    unreached: tuple[str, ...] = ()
    frames: str = ""


@dataclass(frozen=True)
class Quiesced(Event):
    """A worker has left its generation and is idle; `holdings` is all that it can still give to
    others.

    `commit`: what its last commit all-reduce gave it (that of step `step`). `pending_step`: it
    holds the reduced gradients of this step, but the commit broke before it had the result; -1 =
    none. `earlier`: steps before `step`, the newest last, and what is to be told of each. Goes from
    worker to backend, which tells the policy those that nobody has reported. `at`: where its
    program stood in a collective that broke, or was aborted; '' = in none.
    """

    worker: WorkerId
    generation: int
    step: int
    holdings: tuple[Holding, ...] = ()
    commit: tuple[float, ...] = ()
    pending_step: int = -1
    earlier: tuple[tuple[int, tuple[float, ...]], ...] = ()
    at: str = ""


@dataclass(frozen=True)
class Silent(Event):
    """The worker has not answered for `silent_s`, its bound for `phase` is passed, and no peer
    progresses."""

    worker: WorkerId
    generation: int
    phase: str
    silent_s: float
    why: str = ""  # where it answers, and others wait for it: in which collective


@dataclass(frozen=True)
class Progress(Event):
    """A worker makes progress with what has no steps (preparing, evaluating, finishing), takes over
    its state (loading), or writes its part of a checkpoint behind the steps (saving); told once a
    minute, by one worker of the node or of the generation (0 = none), of loading and saving by
    each."""

    worker: WorkerId
    generation: int
    phase: str


@dataclass(frozen=True)
class DigestChecked(Event):
    """The content of every logical tensor before and after a transition was compared."""

    generation: int
    ok: bool
    n_bytes: int = 0


@dataclass(frozen=True)
class ShardStored(Event):
    """A rank has written its part of a checkpoint. Goes from worker to backend, which tells the
    policy CopyStored."""

    generation: int
    step: int
    rank: int
    n_bytes: int
    seconds: float = 0.0
    stall_s: float = 0.0
    digest: int = 0  # sum (mod 2**64) over the elements that the rank owns
    ordered: int = 0  # the epoch of the driver that ordered the generation


@dataclass(frozen=True)
class DigestPart(Event):
    """One participant's sums (mod 2**64) over the elements that it owned before and owns after a
    transition. Goes from worker to backend, which adds them up and tells the policy DigestChecked.
    None = it owned nothing on that side."""

    generation: int
    participant: int
    n_participants: int
    before: int | None
    after: int | None
    n_bytes: int = 0


@dataclass(frozen=True)
class RanksTimed(Event):
    """How fast each rank of the plan computes by itself, waiting for others left out: `unit_s` are
    seconds per unit of work on one GPU, the median over the `n_steps` steps up to `step`; a unit is
    the forward pass of one sample through one block (of one sample through the model, where it has
    no blocks). `spread`: the median deviation from it over the same steps, relative. `data_s`: what
    the rank has waited for its batches, seconds per step. 0 = it has done no such work. Told by
    rank 0: soon where the numbers have changed, else rarely."""

    generation: int
    step: int
    n_steps: int
    unit_s: tuple[float, ...]
    spread: tuple[float, ...] = ()
    data_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class SharesSet(Event):
    """The generation continues with other numbers of samples per data-parallel rank, from the step
    after `from_step` on."""

    generation: int
    samples: tuple[int, ...]
    from_step: int


@dataclass(frozen=True)
class NumbersChecked(Event):
    """Ranks that must have equal results have them, after `step` steps of that generation."""

    generation: int
    step: int


@dataclass(frozen=True)
class WrongNumbers(Event):
    """Ranks that must have equal results have not, since `step` or some time before it; after
    `good_step` steps they still had. `workers`: those that differ from the majority; where there is
    none, all that may be wrong."""

    generation: int
    step: int
    good_step: int
    workers: tuple[WorkerId, ...]
    reason: str


@dataclass(frozen=True)
class DeviceNoted(Event):
    """What the worker's GPU says of itself that may explain why it is slow (clocks lowered,
    temperature, errors of a link or of memory); '' = nothing any more."""

    worker: WorkerId
    note: str


@dataclass(frozen=True)
class NodeLoadSeen(Event):
    """How busy the node's machine was since its report before, whoever used it: `cpu_share` of all
    its cores. `worker_bytes`: resident memory of the worker that tells it, the node's first. Of the
    GPUs that its NVML shows the mean share of time in which they computed, memory and power of all,
    and the temperature of the hottest; None = not told."""

    node_id: str
    cpu_share: float
    memory_free_bytes: int
    memory_size_bytes: int
    worker_bytes: int
    n_gpus: int = 0
    gpu_share: float | None = None
    gpu_memory_bytes: int | None = None
    gpu_memory_size_bytes: int | None = None
    gpu_power_w: float | None = None
    gpu_celsius: float | None = None


@dataclass(frozen=True)
class PinningFailed(Event):
    """The worker could not have pinned host memory (told once in its life): its host copies are in
    pageable memory from now on, and go to and from the GPU more slowly. `reason`: what was asked
    for, what the system said."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True)
class PriceSeen(Event):
    """`score`: AWS's placement score of a spot pool's zone, 1 to 10: how likely its nodes are to be
    had; 0 = not known."""

    pool: str
    usd_per_node_h: float
    score: int = 0


@dataclass(frozen=True)
class StorageSeen(Event):
    """The run's storage has taken no word of the driver (no sign of life, or no journal line) since
    `since_s`, for the reason `what`; or `answers` again, after that time."""

    answers: bool
    what: str
    since_s: float


@dataclass(frozen=True)
class NodesMute(Event):
    """None of the `hosts` other hosts has answered since `since_s`: the driver's own is taken for
    cut off, and none of their nodes for lost. `over`: why that has ended."""

    hosts: int
    since_s: float
    over: str = ""


@dataclass(frozen=True)
class PlansFound(Event):
    """An attached driver has learned from the workers which plans they were given last, the newest
    last: the driver before it gave these orders while storage was away, and no line tells of
    them."""

    plans: tuple[Plan, ...]


SIGNAL = "signal "  # how the reason of a stop begins that a signal has asked for


@dataclass(frozen=True)
class StopAsked(Event):
    """A person (or a signal, or the script) asked the run to stop; the state is saved first.
    `done`: what was to be trained is trained, and the run has succeeded with that."""

    reason: str
    done: bool = False


@dataclass(frozen=True)
class ProfileAsked(Event):
    """A person asked for a profile of the next `steps` steps on these ranks: numbers with commas,
    `all`, or `node` (the first of each node). One whose id is known changes nothing."""

    profile_id: str
    steps: int
    ranks: str = "node"


@dataclass(frozen=True)
class RankProfiled(Event):
    """A rank has written its part of a profile, of `n_steps` steps behind `first_step`; or has
    none, and `error` says why."""

    generation: int
    profile_id: str
    rank: int
    first_step: int = 0
    n_steps: int = 0
    n_bytes: int = 0
    error: str = ""


@dataclass(frozen=True)
class DrillAsked(Event):
    """A drill was carried out (kill, hang ...) or asks for something (add). `drill` as in the drill
    file."""

    drill: dict[str, Any]
