"""What a run refuses before it starts; what of it is known before any of the user's code is run."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from elastic.api.running.local_pools import adapted
from elastic.api.running.observers import check_port
from elastic.api.running.options import Options, check_run_name, ray_address
from elastic.catalog.validation import first_problem
from elastic.config.drill import NODE_WORD, NODE_WORDS, DrillSpec
from elastic.config.fingerprint import KEY, code_digest, differences
from elastic.config.job import JobSpec, job_of
from elastic.config.key_names import LEAST, OF_A_SCRIPT, STORED, stored_keys
from elastic.config.pool_checks import check_fit
from elastic.driver import restored
from elastic.errors import ElasticError, SpecError
from elastic.ledger.journal import Line
from elastic.ledger.run_folder import RunFolder
from elastic.observe import event_messages, find_runs
from elastic.storage import Storage, open_storage
from elastic.storage.local import LocalStorage
from elastic.text import n_of, size
from elastic.types import DriverStarted, ModelProfile, Pool, Stop, WorkerFailed
from elastic.types.typed_job import IN_JOB, orphans_paid_s
from elastic.worker.hosting.resume_checks import (
    check_not_done,
    found_copies,
    other_values,
    writable,
)

# what JobSpec.where says of a job that no job.yaml describes
BY_SET, IN_PYTHON, IN_A_MAPPING = "--set", "ElasticTrainer(", "job"
SETTINGS = (".py", ".yaml", ".yml", ".json", ".toml", ".ini", ".cfg")
# keys that say where a job could run
OF_THE_POOLS = (
    "name", "pools", "layout", "min_workers", "max_workers", "on_demand_floor", "drill",
)  # fmt: skip


def check_first(
    data: Mapping[str, Any],
    file: Path,
    where: str,
    *,
    options: Options,
    settled: Callable[[str], bool],
    args: Sequence[str] = (),
) -> None:
    """What can be said of a job before its script is run, which takes long; that its run is done,
    too. `data`: its keys as they were given, which count before those that the script gives;
    `settled`: the script does not give that one; `args`: of the script. Raises SpecError."""
    check_keys(data, file, where)
    check_port(options.metrics_port, data)
    if options.run_name is not None:
        check_run_name(options.run_name)
    # prices and prompts are told once, by the run
    quiet, address = replace(options, show=False), ray_address(options)
    known = {key: data[key] for key in OF_THE_POOLS if key in data}
    spec = adapted(job_of(LEAST | known, file, where), quiet, address)
    pools = tuple(pool.pool() for pool in spec.pools)
    if file.is_file():  # a script or a train function, whatever it holds
        _check_uncut(spec)
    if "pools" in data or options.cluster is not None or settled("pools"):
        check_fit(spec, pools)
        check_drill(spec.drill, pools, embedded=address is None)
    if data.get("storage") is not None or settled("storage"):
        check_storage(data.get("storage"), options.run_name or "")
        if options.run_name is not None and not options.from_checkpoint:
            root = find_runs.storage_uri(data.get("storage"))
            place = RunFolder.of(open_storage(f"{root}/{options.run_name}"))
            if not options.allow_changed:
                check_args(args, place)
            _check_not_done(file, args, data, place=place, options=options)


def _check_uncut(spec: JobSpec) -> None:
    """Raises SpecError for a layout that no loop of a script can have."""
    for layout in spec.least_layouts():
        for axis, why in (
            ("pp", "its script calls the whole model"),
            ("cp", "a script gets whole sequences"),
        ):
            if getattr(layout, axis) > 1:
                raise SpecError(f"layout '{layout}': no {axis}: {why}; take {axis}=1")


def check_args(args: Sequence[str], place: RunFolder) -> None:
    """Raises SpecError where the run there has checkpoints of a script with other arguments: told
    before it is run with these."""
    stored = found_copies(place.storage).meta.get(KEY) or {}
    if not _changed(stored, args=list(args)):
        return
    # a driver since may have had others, and have stored nothing
    started = [e for line in place.lines() for _, e in line.events if isinstance(e, DriverStarted)]
    was = (started[-1].job.get(KEY) or stored) if started else stored
    if changed := _changed(was, args=list(args)):
        raise other_values(place.name, changed)


def _changed(was: Mapping[str, Any], **now: Any) -> str:
    """What of it is another now; what it does not know is not compared."""
    return differences(was, {**was, **now})  # all of it: the digests of secrets follow from that


def _check_not_done(
    file: Path, args: Sequence[str], data: Mapping[str, Any], *, place: RunFolder, options: Options
) -> None:
    """Raises SpecError where the run there has done all steps that this one will ask for: those of
    its keys, or, where its script says them, the steps of before while the script, its arguments
    and the settings in files are those of before."""
    saved = _finished_at(place)
    if not saved or OF_A_SCRIPT in data:  # what epochs mean only the script knows
        return
    steps = data.get("steps")
    if steps is not None:
        check_not_done(place.name, int(steps), saved, succeeded=True, script=file.is_file())
    elif not options.allow_changed and _unchanged(file, args, place):
        elsewhere = "; where its steps come from elsewhere, --allow-changed runs the script to see"
        check_not_done(
            place.name, saved, saved, succeeded=True, script=True, further=elsewhere
        )  # fmt: skip


def check_program_not_done(place: RunFolder, steps: int) -> None:
    """Raises SpecError where the run there has done all of its steps: told before its program is
    read."""
    if saved := _finished_at(place):
        check_not_done(place.name, steps, saved, succeeded=True)


def _finished_at(place: RunFolder) -> int:
    """The last step of a run that has succeeded; 0 = it has not, or that is found out later."""
    try:
        lines = place.newest()
        last = next((line.decision for line in reversed(lines) if line.decision is not None), None)
        if last is None or not any(isinstance(action, Stop) for action in last.actions):
            return 0
        state = restored(lines)
    except ElasticError:  # the run tells it, and what to do about it
        return 0
    return state.saved_step if state is not None and state.phase == "succeeded" else 0


def _unchanged(file: Path, args: Sequence[str], place: RunFolder) -> bool:
    """Since the run there has ended: the script, its arguments, and the files of settings beside it
    or among the arguments."""
    stored = found_copies(place.storage).meta.get(KEY) or {}
    if not stored or _changed(stored, args=list(args), program=code_digest(file)):
        return False
    beside = [str(path) for path in file.parent.iterdir() if path.suffix in SETTINGS]
    read = [*beside, *(word.rpartition("=")[2] for word in args)]
    ended_s = time.time() - place.age_s()
    return all(os.path.getmtime(path) <= ended_s for path in read if os.path.isfile(path))


def check_keys(data: Mapping[str, Any], file: Path, where: str) -> None:
    """Raises SpecError for a key that does not exist, or whose value is wrong whatever the other
    keys are."""
    stored_keys(data, where)
    for name, value in data.items():
        # phases are of so many steps
        if name == OF_A_SCRIPT or (name == "phases" and "steps" not in data):
            continue
        if name not in (*JobSpec.__pydantic_fields__, *STORED) or not _may_be(name, value):
            job_of({"name": "a", **LEAST, name: value}, file, where)


def _may_be(name: str, value: Any) -> bool:
    try:
        JobSpec.model_validate(
            {"name": "a", "folder": "", "program": "", **LEAST, STORED.get(name, name): value}
        )
    except ValidationError as error:
        return not first_problem(error)["loc"]  # else several keys do not go together
    except SpecError:
        return False
    return True


def keys_in(spec: JobSpec, *, restarted: bool = False) -> str:
    """Where who gave this job would give another key of it, as advice names the place."""
    if spec.where.startswith(IN_PYTHON):
        return f"in {spec.where}"
    if spec.where == IN_A_MAPPING:
        return "in job={...}"
    if spec.where != BY_SET:
        return IN_JOB
    if restarted or spec.script is None:
        return f"by {BY_SET}"
    entered = "prepare_trainer" if "prepare_trainer" in Path(spec.script).read_text() else "loop"
    return f"in elastic.{entered}(...)"


def reads_back(spec: JobSpec, storage: Storage, model: ModelProfile) -> str:
    """A sentence where each checkpoint comes to the driver over a network that may be paid for, and
    nobody has asked for that; '' = none does."""
    from elastic.worker.checkpoint.checkpoint_saver import state_bytes

    asked = "verify_copies" in spec.model_fields_set
    if asked or not spec.verify_copies or not storage.remote:
        return ""
    return (
        f"the driver reads every checkpoint back from {storage.uri}, about "
        f"{size(state_bytes(model))} each (verify_copies); where what leaves that storage is paid "
        "for, as to another region, cloud or site, set verify_copies: false"
    )


def check_storage(asked: str | None, run: str) -> None:
    """Raises SpecError where a folder cannot be written. `run`: the name of the run, where it is
    known. (What a service answers is heard when the run takes its lease.)"""
    root = find_runs.storage_uri(asked)
    storage = open_storage(root)
    if not isinstance(storage, LocalStorage):
        return
    mine = storage.root / run
    with writable(str(mine)):
        storage.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=mine if os.path.lexists(mine) else storage.root):
            pass


def paid_until_s(before: Sequence[Line], orphan_lease_s: float, embedded: bool) -> float | None:
    """Until when the nodes of a driver that is gone may have been paid for. One that has ended the
    run has given them back. None = there was no driver."""
    if not before:
        return None
    last = before[-1]
    ended = last.decision is not None and any(
        isinstance(action, Stop) for action in last.decision.actions
    )
    return last.at_s + (0.0 if embedded or ended else orphans_paid_s(orphan_lease_s))


def check_drill(drill: Sequence[DrillSpec], pools: Sequence[Pool], embedded: bool) -> None:
    """Raises SpecError for nodes that there can never be. `embedded`: they are called POOL-1,
    POOL-2 ..."""
    added = Counter(entry.add for entry in drill if entry.add is not None)
    most = {pool.name: pool.max_nodes + added[pool.name] for pool in pools}
    n_workers = sum(most[pool.name] * pool.gpus_per_node for pool in pools)
    listed = ", ".join(
        f"{name}-1" + (f" to {name}-{n}" if n > 1 else "") for name, n in most.items() if n
    )
    for entry in drill:
        where = "the drill" + ("" if entry.at_step is None else f", at_step {entry.at_step}")
        if entry.add is not None and entry.add not in most:
            raise SpecError(
                f"{where}: no pool '{entry.add}' to add to; pools are {', '.join(most)}"
            )
        for name in entry.nodes():
            check_market(name, pools, where)
            if name.startswith("rank:") and int(name[5:]) >= n_workers:
                raise SpecError(
                    f"{where}: '{name}', but there are at most {n_of(n_workers, 'worker')}, "
                    f"rank:0 to rank:{n_workers - 1}"
                )
            pool, _, number = name.rpartition("-")
            known = NODE_WORD.fullmatch(name) or name == "partner"
            if (
                embedded
                and not known
                and not (number.isdigit() and 1 <= int(number) <= most.get(pool, 0))
            ):
                raise SpecError(
                    f"{where}: there is never a node '{name}'; nodes here are {listed}; or give "
                    f"{NODE_WORDS}"
                )


def check_market(name: str, pools: Sequence[Pool], where: str) -> None:
    """Raises SpecError for `any-spot` where no node is ever of the spot market."""
    if name == "any-spot" and all(pool.market_type != "spot" for pool in pools):
        kinds = ", ".join(f"{pool.name} is {pool.market_type}" for pool in pools)
        raise SpecError(
            f"{where}: 'any-spot', but no pool is of the spot market ({kinds}); take any"
        )


def failed_by_itself(before: Sequence[Line]) -> str:
    """How a script that is restarted has ended its run, by the last driver's lines; '' = it has
    not."""
    why = ""
    for _, event in (entry for line in before for entry in line.events):
        if isinstance(event, DriverStarted):
            why = ""
        elif isinstance(event, WorkerFailed) and event.kind == "program":
            why = event.error
    return why


def comes_again(
    run: str, step: int, saved: int, *, carried_out: Sequence[Mapping[str, Any]]
) -> str:
    """What is said where a run that had reached `step` resumes from step `saved`: that it begins
    anew, and which drills of these steps do not come again; '' = nothing is."""
    once = [entry for entry in carried_out if max(1, entry.get("at_step") or 0) > saved]
    said = f"resumes from step {saved}"
    if not saved:
        said = "begins at step 0 again"
        said += f": it had reached step {step}, and no checkpoint was stored" if step else ""
    if once:
        names = ", ".join(event_messages.drill(dict(entry)) for entry in once)
        said += (
            f"; drills that were carried out do not come again: {names}; another --run-name, or "
            "none, has them (of an ElasticTrainer: RunConfig(name=...))"
        )
    return f"run '{run}' {said}" if once or (step and not saved) else ""
