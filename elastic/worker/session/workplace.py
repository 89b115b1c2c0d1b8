"""What outlives a generation in a worker process, and the order to enter one."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from elastic.data.loader_processes import Readers, readers_of
from elastic.data.sample_draws import SampleDraws
from elastic.data.streams import Stream
from elastic.errors import InternalError, StateLost
from elastic.program import Program
from elastic.reshard.transfer_plan import participants
from elastic.storage import Storage
from elastic.types import Event, Job, ModelProfile, PinningFailed, Plan, SampleProfile, WorkerId
from elastic.types.orders import Rendezvous, WorkerOrder
from elastic.worker.checkpoint.checkpoint_saver import Saving
from elastic.worker.parallel.keyed_draws import from_another
from elastic.worker.process.allocator import trim
from elastic.worker.process.fault_injection import DeviceFaults
from elastic.worker.process.side_stream import SideStream, run_on
from elastic.worker.process_groups.rendezvous import STORE_S, host_store, new_secret
from elastic.worker.program.extra_state import ExtraState
from elastic.worker.program.model_profile import extra_of
from elastic.worker.state.host_copy import HostMemory
from elastic.worker.state.train_state import Held

log = logging.getLogger(__name__)
T = TypeVar("T")

if TYPE_CHECKING:
    from elastic.worker.loop.script_host import Script


@dataclass(frozen=True)
class EnterOrder:
    """What a worker needs to enter a generation. `me`: its index among the participants."""

    plan: Plan
    me: int
    rendezvous: Rendezvous

    @property
    def nodes(self) -> frozenset[str]:
        """Those of all participants."""
        return frozenset(worker.node_id for worker in self.rendezvous.participants)

    @classmethod
    def of(cls, plan: Plan, order: WorkerOrder, worker: WorkerId) -> EnterOrder:
        if order.rendezvous is None:
            raise InternalError(
                f"an order to enter generation {plan.generation} says not where its participants "
                "meet"
            )
        return cls(plan, order.rendezvous.participants.index(worker), order.rendezvous)


def host_rendezvous(
    plan: Plan, host: str, timeout_s: float, *, store_s: float = STORE_S, epoch: int = 0
) -> tuple[Rendezvous, Any]:
    """Where the participants of the plan meet, and the store there, which this process hosts.
    `store_s`: that one waits there for another. `epoch`: as Rendezvous."""
    store = host_store(host, store_s)
    return Rendezvous(
        participants(plan.ranks, plan.resume), (host, store.port), timeout_s, new_secret(), epoch
    ), store


@dataclass
class Workplace:
    """What outlives a generation in a worker process."""

    me: WorkerId
    program: Program
    profile: ModelProfile
    job: Job
    dataset: Any
    validation: Any
    storage: Storage
    device: torch.device
    report: Callable[[Event], None]
    # phase, step: tells the outside that this worker makes progress
    at_phase: Callable[[str, int], None]
    background: Callable[..., Future[Any]]  # runs a function behind the steps, on `device`
    held: list[Held] = field(default_factory=list)
    sample_draws: SampleDraws = field(init=False)  # what datasets draw in this process
    saving: Saving = field(init=False)
    host_memory: HostMemory = field(init=False)
    side: SideStream = field(init=False)  # of what is done beside the steps
    # what reads old boxes, which stay in memory until it has: a thread of its own, as others behind
    # the steps take as long as they take
    checks: list[Future[Any]] = field(default_factory=list)
    # done when the last host copy of the generation before has read its state
    copying: Future[None] | None = None
    _reader: ThreadPoolExecutor = field(init=False)
    # per block, of one sample; for rehearsals
    block_inputs: list[torch.Tensor | None] = field(default_factory=list)
    sample: SampleProfile | None = None  # on the first worker of a node
    phase_samples: tuple[SampleProfile | None, ...] = ()  # likewise, in each phase of the job
    extra: ExtraState = field(init=False)
    readers: Readers | None = None  # loader processes, where the job asks for them
    script: Script | None = None  # a job whose script enters elastic.loop
    faults: DeviceFaults = field(default_factory=DeviceFaults)  # of a drill
    good_step: int = 0  # of the newest comparison of ranks that found nothing
    validated: int = -1  # step of the newest validation that was made to its end
    # step -> generation, its loss of the probe sample
    probes: dict[int, tuple[int, float]] = field(default_factory=dict)
    probe_repeats: bool = True  # is that loss the same each time?
    # of some samples, as this worker reads them (loss_probe.py); [] = not read yet
    samples_read: list[float] = field(default_factory=list)
    axes: frozenset[str] = frozenset()  # with more than one rank, of the generation entered last
    # by the phase of the job that begins with them; {} = there is one
    datasets: Mapping[int, Any] = field(default_factory=dict)
    left_at_s: float | None = None  # when the last step of the generation before was finished
    device_lost: bool = False

    def __post_init__(self) -> None:
        self.saving = Saving(self)
        self.sample_draws = SampleDraws(self.job.seed, from_another)
        if isinstance(self.dataset, Stream):
            self.dataset.keyed = self.sample_draws.of_stream
        self.extra = extra_of(self.program, self.profile.specs, self.profile.optimizers)
        self.host_memory = HostMemory(self.device.type == "cuda", self._unpinned)
        self.side = SideStream(self.device)
        self._reader = ThreadPoolExecutor(1, "old-boxes")
        submit = self.background
        self.background = lambda work, *arguments: submit(run_on(self.device, work), *arguments)

    def enter_phase(self, number: int) -> None:
        """Job and data become those of that phase of the job. Nothing of the phase before reads
        them any more."""
        before, self.job = self.job, self.job.in_phase(number)
        if self.job.data_phase == before.data_phase:
            return
        self.dataset = self.datasets[self.job.data_phase]
        self.probes.clear()  # of another sample
        self.samples_read = []
        if self.readers is not None:
            self.readers.close()
            self.readers = readers_of(self.job, self.dataset)

    def _unpinned(self, why: str) -> None:
        log.warning(
            "pinned host memory is not to be had, copies go through pageable memory: %s", why
        )
        self.report(PinningFailed(self.me, why))

    def lose_device(self) -> None:
        """After a CUDA error that stays. What is in host memory is served on: nothing here uses the
        device any more."""
        self.device_lost, self.device = True, torch.device("cpu")
        self.side = SideStream(self.device)

    def keep(self, held: list[Held]) -> None:
        """From now on only these are held; the host buffers of the others are free again.

        A model and its hooks refer to each other in circles, so what an older generation left is
        collected here: the garbage collector by itself comes for it many generations later, and
        until then it holds a shard each time."""
        kept = {id(one) for one in held}
        dropped = [one for one in self.held if id(one) not in kept]
        for one in dropped:
            if one.lease is not None:
                one.lease.release()
        self.held = held
        left_behind = any(one.kind == "live" for one in dropped)
        del dropped
        if left_behind:
            gc.collect()
            if self.device.type == "cuda":
                with suppress(RuntimeError):  # of a device that is lost
                    torch.cuda.empty_cache()
            self.background(trim)

    def check(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Reads old boxes behind the steps; `wait_for_checks` waits for it."""
        self.checks = [one for one in self.checks if not one.done()]
        self.checks.append(self._reader.submit(run_on(self.device, work), *arguments))
        return self.checks[-1]

    def wait_for_checks(self) -> None:
        """Until nothing behind the steps reads boxes of earlier generations. What a check raised is
        not raised here."""
        wait(self.checks)
        self.checks.clear()

    def find(self, generation: int, rank: int, step: int) -> Held:
        """Boxes held here for that rank. Raises StateLost when there are none."""
        for held in self.held:
            if held.serves(generation, rank, step):
                return held
        have = [(h.kind, h.generation, h.rank, h.step) for h in self.held]
        raise StateLost(
            f"{self.me} should hold rank {rank} of generation {generation} at step {step}; it "
            f"holds {have}"
        )


def live_step(held: list[Held], generation: int) -> int:
    """Step of the live boxes of that generation, -1 when there are none."""
    return next((h.step for h in held if h.kind == "live" and h.generation == generation), -1)
