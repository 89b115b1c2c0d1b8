"""The checkpoints of a run: list, verify, export, import, remove."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

from elastic.api.running.entry import loaded
from elastic.api.running.options import check_run_name
from elastic.config.job import JobSpec
from elastic.errors import JournalDamaged, SpecError, StateLost
from elastic.ledger.lease import holder
from elastic.ledger.run_folder import RunFolder
from elastic.observe import find_runs
from elastic.program import Program, load_program
from elastic.storage import Storage, open_storage
from elastic.types import DriverStarted, Evaluated, TensorSpec


def checkpoints(run: Storage) -> tuple[list[dict[str, Any]], list[str]]:
    """Checkpoints, newest first, those not committed too, and what is wrong with markers that are
    not whole. `validation_loss`: of its step, as the run's journal has it; `best`: it is the least
    of those that are committed."""
    from elastic.worker.checkpoint.checkpoint_verbs import listed

    problems: list[str] = []
    now_s = time.time()
    found = listed(run, problems)
    losses = _validation_losses(RunFolder.of(run), problems)
    scored = (losses[item.step] for item in found if item.committed and item.step in losses)
    least = min(filter(math.isfinite, scored), default=None)
    rows = []
    for item in found:
        loss = losses.get(item.step)
        rows.append(
            asdict(item)
            | {
                "age_s": None if item.saved_at_s is None else max(0.0, now_s - item.saved_at_s),
                "validation_loss": loss,
                "best": item.committed and loss is not None and loss == least,
            }
        )
    return rows, problems


def _validation_losses(run: RunFolder, problems: list[str]) -> dict[int, float]:
    """By step, as far as the run's journal tells them."""
    found: dict[int, float] = {}
    try:
        for line in run.lines() if run.exists() else ():
            for _, event in line.events:
                if isinstance(event, Evaluated) and "validation_loss" in event.metrics:
                    found[event.step] = event.metrics["validation_loss"]
    except JournalDamaged as error:
        problems.append(str(error))
    return found


def _best_step(run: Storage) -> int:
    """Of the checkpoint with the least validation loss. Raises SpecError where there is none."""
    rows, problems = checkpoints(run)
    found = next((int(row["step"]) for row in rows if row["best"]), None)
    if found is not None:
        return found
    made = sorted(_validation_losses(RunFolder.of(run), []))
    why = "this run has made no validation (data.validation or validation=, and eval_every)"
    if made:
        why = (
            f"no checkpoint is of a step with a finite validation loss; there were {len(made)} "
            f"validations, the last one of step {made[-1]} (keep_best: 1, and checkpoint_every as "
            "eval_every)"
        )
    there = ", ".join(str(row["step"]) for row in rows if row["committed"]) or "none"
    raise SpecError(
        f"{run.uri}: --step best: {problems[0] if problems else why}; steps there: {there}"
    )


def verify(run: Storage) -> list[dict[str, Any]]:
    """Reads every byte of every committed checkpoint: its step, URI and what is wrong with it.
    `removed`: the run did that while it was read."""
    from elastic.worker.checkpoint import checkpoint_index

    problems: list[str] = []
    checked: list[dict[str, Any]] = []
    for item in checkpoint_index.find(run, problems):
        wrong = checkpoint_index.verify(item.uri)
        removed = bool(wrong) and _is_removed(item.uri)
        about = {"problems": [] if removed else wrong, "removed": removed}
        checked.append({"step": item.step, "uri": item.uri} | about)
    rest = {"step": None, "uri": run.uri, "removed": False}
    return checked + [rest | {"problems": [problem]} for problem in problems]


def _is_removed(uri: str) -> bool:
    """Has a checkpoint lost its marker, which a removal takes away first?"""
    from elastic.worker.checkpoint.checkpoint_format import MARKER

    return not open_storage(uri).exists(MARKER)


@contextmanager
def _exporting(run: Storage, step: int | None, to: str) -> Iterator[tuple[int, Storage]]:
    """The step, and the empty folder. Of an export that fails nothing is in the way of a second
    try. Raises SpecError where the run has removed the checkpoint meanwhile."""
    from elastic.worker.checkpoint import checkpoint_verbs as checkpoints

    target, item = checkpoints.open_target(to), checkpoints.chosen(run, step)
    try:
        yield item.step, target
    except BaseException as error:
        for key in target.list():
            if key.endswith(".safetensors"):  # there were none
                target.delete(key)
        if isinstance(error, StateLost) and _is_removed(item.uri):
            raise SpecError(
                f"{item.uri}: the run removed it while it was read; export another one, or let the "
                "run keep more of them (keep_last, keep_every) and give --step"
            ) from error
        raise


def export(
    run: Storage,
    step: int | Literal["best"] | None,
    to: str,
    *,
    job: str | None = None,
    merged: bool = False,
    weights: str = "",
    state: str = "",
) -> dict[str, Any]:
    """The weights of a checkpoint (None: the newest; `best`: of the least validation loss) as
    safetensors in the folder `to`, with what the run has kept to stand beside them (config.json, a
    tokenizer); of a script with a model of peft its adapter alone, as peft has it. `job`: the
    folder of its job, whose program says what that is; then adapters alone, or `merged` into the
    weights. `weights`: the type that they are written in ('bfloat16', 'int8', 'float8'). `state`:
    in their place what the optimizer keeps of them under that name, as an average. Raises
    SpecError."""
    from elastic.models.lora import ADAPTER_NAMES
    from elastic.models.weight_types import with_config
    from elastic.worker.checkpoint import checkpoint_verbs as checkpoints
    from elastic.worker.program.job_program import with_frozen

    number = _best_step(run) if isinstance(step, str) else step
    if job is None:
        if weights not in ("", "bfloat16"):
            raise SpecError(f"--weights {weights} needs --job JOB: the program knows its layers")
        if merged:
            raise SpecError(
                "--merged needs --job JOB: the program knows the weights that its adapters belong "
                "to"
            )
        specs, beside = _specs_of(run), RunFolder.of(run).files()
        if weights and ADAPTER_NAMES in beside:
            raise SpecError(
                f"--weights {weights}: the run trains an adapter of peft, which is written as it "
                "is; leave it out"
            )
        if state and ADAPTER_NAMES in beside:
            raise SpecError(f"--state {state}: the run trains an adapter of peft; leave it out")
        if weights:
            beside = with_config(weights, beside)
        with _exporting(run, number, to) as (step, target):
            return checkpoints.export(
                run,
                step,
                target,
                tied=checkpoints.tied_names(specs),
                beside=beside,
                bfloat16={spec.fqn for spec in specs if weights and not spec.buffer},
                state=state,
            )
    spec, program = loaded(job)
    program = with_frozen(program, spec.job())
    with _exporting(run, number, to) as (step, target):
        return checkpoints.export_for(
            run, step, target, program=program, merged=merged, weights=weights, state=state
        )


def _specs_of(run: Storage) -> tuple[TensorSpec, ...]:
    """The tensors of the model that a run trains, by its journal; none where it has no journal, as
    under torchrun."""
    place = RunFolder.of(run)
    events = (event for line in place.lines() for _, event in line.events) if place.exists() else ()
    started = next((event for event in events if isinstance(event, DriverStarted)), None)
    return started.model.specs if started is not None else ()


@dataclass(frozen=True)
class Import:
    """Where a state comes from, and which run begins with it. `at_step`: that the run resumes
    from."""

    source: str
    into: str
    job: str
    storage: str | None = None
    at_step: int | None = 0  # None: the optimizer's own count of steps
    ignore_extra: bool = False


def import_state(order: Import) -> dict[str, Any]:
    """Makes a committed checkpoint in a new run from safetensors or plain DCP. Raises SpecError."""
    spec, program = loaded(order.job)
    check_run_name(order.into)
    if order.at_step is not None and order.at_step >= spec.steps:
        raise SpecError(f"--at-step {order.at_step}: the job ends at step {spec.steps}")
    run = open_storage(f"{find_runs.storage_uri(order.storage or spec.storage)}/{order.into}")
    return import_into(order, spec, run, program=program)


def import_into(
    order: Import, spec: JobSpec, run: Storage, *, program: Program | None = None
) -> dict[str, Any]:
    """The same for a job that was read. Raises SpecError when the state there is that of the job's
    last step already."""
    from elastic.worker.checkpoint import checkpoint_verbs as checkpoints
    from elastic.worker.program.job_program import with_job
    from elastic.worker.program.model_profile import fresh_buffers
    from elastic.worker.step.loss_scale import fresh_scale, profile_of

    job = spec.job()
    program = with_job(program or load_program(spec.program), job)
    profile = profile_of(program, job)

    def buffers() -> dict[str, Any]:
        return fresh_buffers(program, spec.seed, profile) | fresh_scale(job)

    wanted = checkpoints.ImportRequest(
        profile, spec.seed, order.at_step, order.ignore_extra, buffers, spec.steps, program.packed
    )
    return checkpoints.import_state(order.source, run, wanted)


def remove(run: Storage, step: int, force: bool) -> list[str]:
    """Removes the checkpoints of a step; returns their URIs. Raises SpecError for the only good
    one, or a live run's newest."""
    from elastic.worker.checkpoint import checkpoint_verbs as checkpoints

    newest = max((item.step for item in checkpoints.listed(run) if item.committed), default=-1)
    if step >= newest and not force and (driver := holder(run)):
        raise SpecError(
            f"step {step} is the newest checkpoint of a run that is driven by {driver}; --force "
            "removes it"
        )
    return checkpoints.remove(run, step, force)
