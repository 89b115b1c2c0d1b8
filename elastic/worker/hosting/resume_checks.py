"""What a run refuses before it starts, whoever starts it, and what is found of one before."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.config.fingerprint import JOB_KEYS, KEY, batch_changed, differences
from elastic.config.job import JobSpec
from elastic.data.batches import few_samples, item_of
from elastic.data.budget import budget_of
from elastic.data.open_datasets import PhaseData, dataset_of
from elastic.data.streams import N_POSITIONS
from elastic.errors import (
    FULL,
    REFUSALS,
    ElasticError,
    ProgramError,
    RunDone,
    SpecError,
    StateLost,
    StorageFailed,
)
from elastic.ledger.journal import Line, built
from elastic.ledger.lease import Lease, Sign
from elastic.program import Program
from elastic.storage import Storage
from elastic.text import n_of, size
from elastic.types import Copy, CopyDamaged, DriverStarted, Job, Layout, ModelProfile

if TYPE_CHECKING:
    from elastic.worker.checkpoint.checkpoint_index import CheckpointInfo

log = logging.getLogger(__name__)

CLOCK_S = 5.0  # that two clocks may differ by, unsaid
# storage that does not answer is said, and waited for, before a run has begun
TELL_AFTER_S, TAKE_MOST_S, LEFT_MOST_S = 5.0, 300.0, 2.0


@dataclass(frozen=True)
class FoundCopies:
    """Checkpoints in the run's storage, the newest first; `meta`: of the newest; `damaged`: those
    whose markers cannot be read, or are gone; `known`: URIs of all that were ever committed, as far
    as that is known."""

    copies: tuple[Copy, ...]
    meta: Mapping[str, Any]
    damaged: tuple[CopyDamaged, ...]
    known: frozenset[str] = frozenset()


def found_copies(
    storage: Storage, known: Iterable[str] = (), *, attached: bool = False
) -> FoundCopies:
    """`known`: URIs of those that earlier drivers have committed. Raises StateLost where there are
    some, and no marker can be read, or none is left (`attached`: workers may hold a state all the
    same)."""
    from elastic.worker.checkpoint import checkpoint_index
    from elastic.worker.checkpoint.checkpoint_format import FOLDER, MARKER

    problems: list[str] = []
    found = checkpoint_index.find(storage, problems)
    if problems and not found:
        raise StateLost(
            f"{problems[0]}; no other checkpoint is whole: mend it, or remove it with elastic "
            "checkpoint rm"
        )
    damaged = {problem.partition(f"/{MARKER}:")[0]: problem for problem in problems}
    here = {storage.uri_of(f"{FOLDER}/{uri.rpartition('/')[2]}") for uri in known}
    newest = found[0].step if found else -1
    gone = _gone(storage, here - damaged.keys() - {item.uri for item in found}, newest)
    if gone and not found and not attached:
        raise StateLost(
            f"{next(iter(gone.values()))}; no other checkpoint is there: bring it back, or start "
            "over with another --run-name"
        )
    return FoundCopies(
        tuple(_copy(item) for item in found),
        found[0].meta if found else {},
        tuple(CopyDamaged(uri, reason) for uri, reason in (damaged | gone).items()),
        frozenset((*here, *(item.uri for item in found))),
    )


def _gone(storage: Storage, uris: Collection[str], newest: int) -> dict[str, str]:
    """Those of later steps than `newest` that nobody has removed, the newest first -> what is said
    of them."""
    from elastic.worker.checkpoint.checkpoint_format import FOLDER_NAME, MARKER, REMOVED

    names = {uri: FOLDER_NAME.fullmatch(uri.rpartition("/")[2]) for uri in uris}
    steps = {uri: int(match[1]) for uri, match in names.items() if match}
    return {
        uri: f"{uri}/{MARKER}: missing; the journal says that step {steps[uri]} was stored there"
        for uri in sorted(steps, key=lambda uri: steps[uri], reverse=True)
        if steps[uri] > newest and not storage.exists(f"{REMOVED}/{uri.rpartition('/')[2]}")
    }


def _copy(found: CheckpointInfo) -> Copy:
    """A checkpoint as the policy knows it; how it is cut matters to nobody who reads it."""
    from elastic.worker.checkpoint.checkpoint_format import SAMPLES

    layout, said = Layout(dp_shard=found.world_size), found.meta.get(SAMPLES)
    text = said if isinstance(said, str) else ""
    return Copy(
        found.step, "durable", found.generation, layout, uri=found.uri, n_bytes=found.n_bytes,
        samples=text,
    )  # fmt: skip


def check_not_done(
    run: str, steps: int, saved: int, *, succeeded: bool, script: bool = False, further: str = ""
) -> None:
    """`saved`: the step that the run would go on from; `script`: it enters elastic.loop; `further`:
    what else may be done. Raises RunDone where it has nothing left to do, SpecError where it is
    beyond its steps and did not end."""
    if saved and (steps <= saved if succeeded else steps < saved):
        at = f"is at step {saved} of now {n_of(steps, 'step')}"
        at = f"is done ({n_of(saved, 'step')})" if succeeded else at
        longer = "--set steps=N with more of them lets it continue"
        if script:
            longer = (
                "more steps (or epochs) in elastic.loop(...), or --set steps=N, let it continue"
            )
        text = (
            f"run '{run}' {at}; {longer}; another --run-name, or none, starts "
            f"over (of an ElasticTrainer: RunConfig(name=...)){further}"
        )
        raise RunDone(text, run, saved) if succeeded else SpecError(text)


def taken(storage: Storage, run: str, *, patient: bool = False) -> Lease:
    """The run's lease; `patient`: see Lease. Says so where that takes a while, and where this
    machine's clock is not that of storage. Raises SpecError where that cannot be written,
    StorageFailed where it does not answer."""
    with writable(storage.uri):
        lease = _waited_for(lambda: Lease(storage, run, patient=patient), storage.uri, run)
        try:
            warn_of_storage_clock(storage, lease.sign)
        except BaseException:
            lease.release()
            raise
        return lease


@contextmanager
def writable(where: str) -> Iterator[None]:
    """What a file system says to the first things that a run writes there becomes a SpecError."""
    try:
        yield
    except ElasticError:
        raise
    except OSError as error:
        what = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
        right = "give a folder, or s3://bucket/prefix (likewise gs://, az://)"
        if error.errno in FULL:
            right = "make room there, or give another storage"
        elif error.errno in REFUSALS:
            right = f"let user {os.getuid()} write there, or give another storage"
        raise SpecError(f"storage {where} cannot be written ({what}); {right}") from error


def _waited_for(take: Callable[[], Lease], where: str, run: str) -> Lease:
    """A lease that comes when nobody waits for it any more is released, also at a signal: the
    process may end right behind this."""
    answer: Future[Lease] = Future()

    def work() -> None:
        lease, fault = None, None
        try:
            lease = take()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            fault = error
        if answer.set_running_or_notify_cancel():
            answer.set_exception(fault) if lease is None else answer.set_result(lease)
        elif lease is not None:
            lease.release()

    thread = threading.Thread(target=work, name="lease-begin", daemon=True)
    text = "run '%s': %s has not answered after %.0f s, or a driver before it may live: %s"
    try:
        thread.start()
        if not wait([answer], TELL_AFTER_S).done:
            log.warning(text, run, where, TELL_AFTER_S, f"waits {TAKE_MOST_S:.0f} s at most")
        if not wait([answer], TAKE_MOST_S).done:
            raise StorageFailed(
                f"run '{run}': {where} has not answered for {TELL_AFTER_S + TAKE_MOST_S:.0f} s; "
                "run it again when it does"
            )
        return answer.result()
    except BaseException:
        if answer.cancel():
            with suppress(RuntimeError):  # it has not begun
                thread.join(LEFT_MOST_S)
        elif answer.exception() is None:
            answer.result().release()
        raise


def warn_of_storage_clock(storage: Storage, sign: Sign) -> None:
    """Says where this machine's clock is not that of its storage, by a sign of life that was just
    written there: ahead, it would spend `deadline_h` unseen. What writing took is never counted."""
    try:
        written_s = storage.modified_s(sign.key)
    except FileNotFoundError:  # the next one has replaced it
        return
    ahead_s, behind_s = sign.at_s - written_s, written_s - time.time()
    if max(ahead_s, behind_s) > CLOCK_S:
        log.warning(
            "this machine's clock is %.0f s %s that of %s: set it right (NTP); bill and deadline "
            "continue by this machine's clock",
            max(ahead_s, behind_s),
            "ahead of" if ahead_s > 0 else "behind",
            storage.uri,
        )


def warn_of_clock(before: Sequence[Line], now_s: float) -> None:
    """Says where this machine's clock is behind that of the run's last driver: which of them is
    wrong nobody knows."""
    behind_s = before[-1].at_s - now_s if before else 0.0
    if behind_s > CLOCK_S:
        log.warning(
            "this machine's clock is %.0f s behind the newest line of the run's journal (%s): set "
            "it right (NTP); bill and deadline continue by this clock",
            behind_s,
            time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(before[-1].at_s)),
        )


def check_layouts(spec: JobSpec, model: ModelProfile) -> None:
    """Raises SpecError for a layout that the model cannot be cut into, whatever the nodes."""
    for layout in (layout for phase in spec.each_phase() for layout in phase.least_layouts()):
        if why := model.refusal(layout):
            raise SpecError(f"layout '{layout}': {why}")
        if model.tp_limit % layout.tp:
            more = (
                f"give {'elastic.loop(tp=...)' if spec.script else 'Program.tp'} the modules to cut"
                if model.tp_limit == 1
                else "take a tp that divides it"
            )
            raise SpecError(
                f"layout '{layout}': tp={layout.tp}, but tp must divide {model.tp_limit} for this "
                f"model; {more}"
            )
        if layout.pp > 1 and not model.pipeline:
            raise SpecError(
                f"layout '{layout}': pp={layout.pp}, but no pipeline stages are possible here; "
                "take pp=1"
            )
        unit = max(1, model.together)
        if unit > 1 and layout.dp > spec.global_batch // unit:
            raise SpecError(
                f"layout '{layout}': {layout.dp} data-parallel ranks, but a step has "
                f"{spec.global_batch // unit} groups of {unit} samples (batch_norm); take fewer "
                "ranks, or a smaller group"
            )
        if 0 < layout.microbatch_size < unit:
            raise SpecError(
                f"layout '{layout}': microbatch_size={layout.microbatch_size} cuts the groups of "
                f"{unit} samples (batch_norm); take {unit} or more"
            )
        if layout.microbatch_size and spec.script:
            raise SpecError(
                f"layout '{layout}': a script gets its whole share of a step at once; leave "
                "microbatch_size out"
            )
        if layout.cp > 1 and spec.script:
            raise SpecError(
                f"layout '{layout}': cp={layout.cp}, but a script gets whole sequences; take cp=1"
            )
        if layout.n_stages > max(1, model.n_blocks):
            stages = (
                f"pp={layout.pp}"
                if layout.n_stages == layout.pp
                else f"{layout.n_stages} pipeline stages"
            )
            raise SpecError(
                f"layout '{layout}': {stages}, but the program's `blocks` "
                f"matches only {model.n_blocks} modules"
            )


def check_quota(spec: JobSpec, model: ModelProfile, *, stored: bool) -> None:
    """Raises SpecError where storage_quota_gb is less than two checkpoints: the newest stays until
    the next one is stored, so that none would be after the first. One is enough where the job
    stores that of its last step alone, and none is `stored`."""
    from elastic.worker.checkpoint.checkpoint_saver import state_bytes
    from elastic.worker.checkpoint.disk_space import GB, OVERHEAD

    quota_gb, every = spec.storage_quota_gb, spec.durable_every
    once = not stored and every != "auto" and not 0 < every < spec.steps
    needs = OVERHEAD * state_bytes(model) * (1 if once else 2)
    if quota_gb is not None and quota_gb * GB < needs:
        why = "" if once else ": the newest stays until the next one is stored"
        raise SpecError(
            f"storage_quota_gb={quota_gb:g} ({size(quota_gb * GB)}) is less than "
            f"{'one checkpoint' if once else 'two checkpoints'} ({size(needs)}){why}; raise it, or "
            "leave it out"
        )


def check_loss(job: Job, program: Program) -> tuple[str, ...]:
    """Raises SpecError where the loss is a mean, the first sample cannot be read or is no input, or
    the program raises over it: found here, before a worker starts. Returns notes."""
    notes: dict[str, None] = {}  # each once
    if job.script:  # whose own the loss is
        return ()
    from elastic.worker.equivalence.loss_is_sum import check_before_start

    try:
        opened = PhaseData.of(program, job)
    except ProgramError as error:
        raise SpecError(f"{job.program}: {error}") from error
    for number in range(max(1, len(job.phases))):
        of = job.in_phase(number)
        dataset = opened.datasets[of.data_phase]
        if len(dataset) == N_POSITIONS:  # a stream, which moves on
            continue
        try:
            _check_readable(of, dataset)
            if note := check_before_start(program, of, dataset):
                notes[note] = None
        except ProgramError as error:
            where = f"phases, entry {number}: " if number else ""
            raise SpecError(f"{job.program}: {where}{error}") from error
    return tuple(notes)


def _check_readable(job: Job, dataset: Any) -> None:
    """Raises ProgramError with the line where the dataset's first sample cannot be had."""
    from elastic.user_frames import told
    from elastic.worker.equivalence.loss_is_sum import first_sample

    try:
        first_sample(job, dataset, 1)
    except ElasticError:
        raise
    except Exception as error:
        raise ProgramError(f"the dataset's sample 0 cannot be read: {told(error)}") from error


def with_few(model: ModelProfile, spec: JobSpec, n_samples: int) -> ModelProfile:
    """With a note where a step takes more samples than there are."""
    note = few_samples(n_samples, spec.global_batch)
    return replace(model, notes=(*model.notes, note)) if note else model


def check_cp(spec: JobSpec, program: Program) -> None:
    """Raises SpecError for a layout with cp where the model, run on the meta device, cannot have
    parts of sequences."""
    for phase in spec.each_phase():
        cp = max(layout.cp for layout in phase.least_layouts())
        if cp > 1:
            from elastic.data.collate import collate
            from elastic.worker.parallel.context_parallel import check_calls

            job = phase.job()
            dataset = dataset_of(program, job)
            budget = budget_of(job, dataset, 2 * cp)
            length = budget.of_one(0, 1).length if budget is not None else None
            check_calls(program, collate([item_of(dataset, 0, length)]), cp)


def check_same(
    before: list[Line],
    start: DriverStarted,
    meta: Mapping[str, Any],
    *,
    allow_changed: bool = False,
) -> None:
    """A run continues with the program, data and mathematics that it had; `meta`: of its newest
    checkpoint. Raises SpecError that names what differs."""
    started = [e for line in before for _, e in line.events if isinstance(e, DriverStarted)]
    # only parts of one: the whole takes long
    states = [line.state for line in before if line.state is not None]
    job: dict[str, Any] = started[-1].job if started else states[-1]["job"] if states else {}
    was = {key: job[key] for key in JOB_KEYS if key in job}
    was |= meta.get(KEY) or {}
    was |= job.get(KEY) or {}
    models = [built(ModelProfile, state["model"]) for state in states[:1] if state["model"]]
    for model in models or [event.model for event in started[:1]]:
        _check_same_model(start.run, model, start.model)
    now = start.job.get(KEY) or start.job
    batch = batch_changed(start.run, was, now)
    if batch:
        raise SpecError(batch)
    file = Path(start.job.get("script") or "program.py").name
    changed = differences(was, now, file=file)
    if changed and not allow_changed:
        raise other_values(start.run, changed)


def other_values(run: str, changed: str) -> SpecError:
    return SpecError(
        f"run '{run}' was started with other values: {changed}; change them back, start another "
        "run with --run-name, or continue with --allow-changed (of an ElasticTrainer: "
        "RunConfig(name=...), allow_changed=True)"
    )


def check_not_failed(run: str, fatal: str) -> None:
    """Raises ProgramError where the program has ended the run (`fatal`: how), as it would again:
    what starts runs again (`backoffLimit` of a RayJob) may not pay for that once more. A person who
    continues by hand is not asked."""
    if fatal:
        raise ProgramError(
            f"run '{run}' has failed by its program, which is the same: {fatal}; after a change "
            "continue with --allow-changed, or once more as it is without --supervise"
        )


def check_not_stopped(run: str, reason: str, how: str = "without --started-again") -> None:
    """Raises SpecError where a person has stopped the run (`reason`): what begins commands again by
    itself would train on, and pay for it, where nobody wants that. `how` a person starts it."""
    if reason:
        raise SpecError(
            f"run '{run}' was stopped: {reason}; it trains on once somebody starts it {how}"
        )


def _check_same_model(run: str, old: ModelProfile, new: ModelProfile) -> None:
    was, now = ({spec.fqn: spec.shape for spec in model.specs} for model in (old, new))
    for fqn in {**was, **now}:
        if was.get(fqn) != now.get(fqn):
            raise SpecError(
                f"run '{run}' was started with another model: {fqn} was {_shape(was.get(fqn))}, "
                f"it is {_shape(now.get(fqn))}; start another run with --run-name "
                "(of an ElasticTrainer: RunConfig(name=...))"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else str(list(shape))
