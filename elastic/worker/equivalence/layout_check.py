"""`python -m elastic.worker.equivalence.layout_check OUT < ASKED`: which layouts compute what a
program does.

A process of its own, without a GPU and beside whatever else starts; what it finds is kept
(elastic/api/running/layout_question.py). First the structure (structure.py), without values and of
any size; then, for each axis that it leaves open, loss and gradients of a small copy in two real
processes (compare_values.py). Of a script that enters a loop the values alone, with tp: what the
first call of its model gives (loop/called_program.py) in the place of a loss.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elastic.config.fingerprint import digest_of_file
from elastic.data.budget import budget_of
from elastic.data.open_datasets import dataset_of
from elastic.data.streams import N_POSITIONS, with_stream
from elastic.errors import ElasticError, ProgramError, SpecError
from elastic.program import Program, load_program
from elastic.types import Job, Layout, ModelProfile
from elastic.user_frames import told
from elastic.version import PACKAGE, version_of
from elastic.worker.equivalence.compare_values import (
    FAMILIES,
    OF_A_PROGRAM,
    Words,
    compare,
    kept_between,
    sees_others,
)
from elastic.worker.equivalence.forward_trace import Batch
from elastic.worker.equivalence.loss_is_sum import check_before_start
from elastic.worker.equivalence.passes.between_passes import (
    gradients_stand,
    limits_weights,
    loss_beside,
    remembers,
)
from elastic.worker.equivalence.passes.drawn_together import drawn_together
from elastic.worker.equivalence.passes.kept_by_passes import gradients_see_others, kept_by_passes
from elastic.worker.equivalence.passes.loop_body import BodyPasses, not_known
from elastic.worker.equivalence.passes.over_a_run import (
    check_seeds,
    counts_others,
    follows_the_clock,
    keeps_old_weights,
    sees_a_step,
    sees_others_later,
)
from elastic.worker.equivalence.passes.recomputed_blocks import recomputed_blocks
from elastic.worker.equivalence.small_batch import batch_of, check_rows, check_samples, shortened
from elastic.worker.equivalence.small_copy import (
    WHOLE_MOST_PARAMETERS,
    SmallCopy,
    TooLarge,
    job_of_copy,
)
from elastic.worker.equivalence.structure import Structure, structure_of
from elastic.worker.loop.called_program import called_program
from elastic.worker.loop.script_host import NO_CALL, ScriptSource, TrainFunction, called_of, tried
from elastic.worker.loop.trial import LATE
from elastic.worker.parallel.context_parallel import check_calls, check_possible
from elastic.worker.process.environment import die_with_parent
from elastic.worker.process.free_memory import free_host_bytes
from elastic.worker.program.job_program import with_job
from elastic.worker.program.model_profile import trace

INSTALLED = tuple(
    f"{path}{os.sep}"
    for path in (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], PACKAGE)
)
SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/")
READS_MOST = 10_000
# files that say what a program is
SETTINGS = (".py", ".json", ".yaml", ".yml", ".toml", ".cfg", ".ini")
READ_MOST_BYTES = 1 << 20  # of a file that counts as part of the program; larger ones are data
COMPARE_S = 40.0
BODY_MOST_BYTES = 4 * WHOLE_MOST_PARAMETERS  # of a model that the body of a loop is tried with


@dataclass(frozen=True)
class CheckRequest:
    """`axes`: that the run may use, of dp, tp, cp, pp, ep; `tps`: sizes of tp besides the smallest
    that are tried too; `trusted`: axes that are not to be checked. `most_s`: for comparing values
    on all axes; what it does not suffice for is not compared. Of a script, which is run up to its
    loop's first call of its model: `model_bytes` of the whole model, `function`: the digest of the
    train function that is called."""

    job: Job
    axes: Sequence[str] = tuple(FAMILIES)
    tps: Sequence[int] = (2,)
    trusted: Sequence[str] = ()
    values: bool = True
    most_s: float = COMPARE_S
    model_bytes: int = 0
    function: str = ""


@dataclass(frozen=True)
class Verdict:
    """What was found. `equal`: axis -> seconds that comparing took; `skipped`: why values were not
    compared, '' = they were. `files`: that the program consists of or has read -> digest of their
    content; `packages` -> versions."""

    structure: Structure = Structure()
    equal: Mapping[str, float] | None = None
    tp_limit: int = 0  # 0 = as the profile says
    skipped: str = ""
    followed: bool = True  # False: not even the structure is known
    trusted: Sequence[str] = ()
    steady: bool = True  # False: another try may find something else, so that it is not kept
    seconds: float = 0.0
    files: Mapping[str, str] | None = None
    packages: Mapping[str, str] | None = None

    def apply(self, profile: ModelProfile) -> ModelProfile:
        """The profile of the program that this was found of."""
        closed = self.structure.close(profile)
        limit = min(closed.tp_limit, self.tp_limit) if self.tp_limit else closed.tp_limit
        return replace(closed, tp_limit=limit, proven=tuple(self.equal or ()))

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Verdict:
        """From plain data. Raises TypeError, KeyError or ValueError where it is none."""
        structure = dict(data["structure"])
        structure["notes"] = tuple(structure["notes"])
        return cls(**{**data, "structure": Structure(**structure)})


def check(asked: CheckRequest, function: TrainFunction | None = None) -> Verdict:
    """Raises ElasticError where the program cannot be built. `function`: in the place of a job's
    script."""
    began = time.monotonic()
    found = _of_script(asked, function) if asked.job.script else _of_program(asked)
    found = replace(found, structure=_trusted(found.structure, asked.trusted))
    seconds = round(time.monotonic() - began, 3)
    files = files_of(asked.job.program)
    return replace(found, seconds=seconds, files=files, packages=packages())


def _of_script(asked: CheckRequest, function: TrainFunction | None) -> Verdict:
    """Its body, by what it trains on samples together and on each alone; tp, by what its loop calls
    its model with first to train it, and by what before."""
    if asked.model_bytes > free_host_bytes() // 2:
        size = f"{asked.model_bytes / 1e9:.1f} GB"
        room = "more than there is room for: start it where twice as much memory is free"
        return Verdict(skipped=f"its model has {size}, {room}", steady=False)
    job, axes, found = asked.job, [*asked.axes], Verdict()
    if "dp" in axes and asked.model_bytes > BODY_MOST_BYTES:
        axes.remove("dp")
        size = (
            f"its model has {asked.model_bytes / 1e6:.0f} MB, {BODY_MOST_BYTES / 1e6:.0f} at most"
        )
        found = replace(found, structure=Structure(notes=(not_known(size),)))
    if not axes:
        return found
    body = BodyPasses(with_first="tp" in axes) if "dp" in axes else None
    began = time.monotonic()
    source = ScriptSource.of(job, function)
    wrong: list[ProgramError] = []
    trial, why = tried(source, partial(_first, wrong), body)
    for error in wrong:
        raise SpecError(f"{source.file}: {error}") from error
    if body is not None:
        found = _of_body(body, why, found, seconds=time.monotonic() - began)
    if "tp" not in axes:
        return found
    if body is not None and not trial.calls:
        return replace(found, skipped=NO_CALL.format(why=why), steady=False)
    program = called_of(trial, why)
    asked = replace(asked, job=replace(job, script=None), axes=["tp"])
    for call, words in ((program.called, OF_A_CALL), (program.called_before, OF_A_FIRST_CALL)):
        if call is not None and not found.structure.no_tp and not found.skipped:
            own, batch = called_program(program, call)
            own = with_job(own, job)
            found = _compared(asked, own, trace(own), batch=batch, found=found, words=words)
    notes = (*program.notes, *found.structure.notes)
    return replace(found, structure=replace(found.structure, notes=notes))


def _first(wrong: list[ProgramError], dataset: Any) -> Batch:
    """The samples that a loop's body is tried with; `wrong`: is told what is wrong with these."""
    try:
        check_samples(dataset)
    except ProgramError as error:
        wrong.append(error)
    return batch_of(dataset, None, pair=True)


def _of_body(body: BodyPasses, why: str, found: Verdict, *, seconds: float) -> Verdict:
    """`why`: it was followed no further; `seconds`: that it took."""
    if note := body.note(why):
        structure = replace(found.structure, notes=(*found.structure.notes, note))
        return replace(found, structure=structure, steady=LATE not in why)
    if lost := body.lost():
        return replace(found, structure=replace(found.structure, no_dp=lost, no_tp=lost))
    if sees := body.sees_others():
        return replace(found, structure=replace(found.structure, no_dp=sees, at_once=True))
    return replace(found, equal={"dp": round(seconds, 3)})


def _of_program(asked: CheckRequest) -> Verdict:
    job = asked.job
    program = with_job(load_program(job.program), job)
    dataset = dataset_of(program, job)
    if len(dataset) != N_POSITIONS:  # a stream moves on when it is looked at
        check_before_start(program, job, dataset)
        check_samples(dataset)
    program = with_stream(program, dataset, job)
    profile = trace(program)
    batch = batch_of(dataset, budget_of(job, dataset, 4))
    found = Verdict(structure_of(program, profile, {key: x[:1] for key, x in batch.items()}))
    if "cp" in asked.axes and not found.structure.no_cp:
        found = replace(found, structure=replace(found.structure, no_cp=_no_cp(program, batch)))
    if asked.values:
        found = _compared(asked, program, profile, batch=batch, found=found)
    return found


def _trusted(found: Structure, axes: Sequence[str]) -> Structure:
    """A person has said that these are right."""
    keys = [f"no_{axis}" for axis in axes] + ["no_pp_checkpointing"] * ("pp" in axes)
    known = {key: getattr(found, key) for key in keys}
    notes = [
        f"{key.removeprefix('no_')} is trusted, though: {why}" for key, why in known.items() if why
    ]
    values: dict[str, Any] = (
        asdict(found) | dict.fromkeys(known, "") | {"notes": (*found.notes, *notes)}
    )
    values["at_once"] = found.at_once and "dp" not in axes
    return Structure(**values)


def _no_cp(program: Program, batch: Batch) -> str:
    one = {key: x[:1] for key, x in batch.items()}
    try:
        check_possible(program, 2)
        check_calls(program, one, 2)
    except ElasticError as error:
        return (
            str(error)
            .removeprefix("cp=2, but ")
            .removesuffix("; take cp=1")
            .removesuffix(", or take cp=1")
        )
    return ""


def _compared(
    asked: CheckRequest,
    program: Program,
    profile: ModelProfile,
    *,
    batch: Batch,
    found: Verdict,
    words: Words = OF_A_PROGRAM,
) -> Verdict:
    structure = found.structure
    closed = structure.close(profile)
    possible = {
        "dp": True,
        "tp": closed.tp_limit > 1,
        "cp": True,
        "pp": closed.pipeline and closed.n_blocks > 1,
        "ep": bool(closed.n_experts) and closed.n_experts % 2 == 0 and not closed.no_dp,
    }
    axes = [
        a for a in FAMILIES if a in asked.axes and possible[a] and not getattr(closed, f"no_{a}")
    ]
    if not axes:
        return found
    try:
        small = SmallCopy(program, profile)
        batch = shortened(small, batch)
        check_rows(small, batch)
    except Exception as error:  # noqa: BLE001 - the user's model
        return replace(found, skipped=_not_compared(error), steady=False)
    structure, wrong = _by_one_process(asked, structure, small, batch=batch, axes=axes, words=words)
    axes = [axis for axis in axes if axis not in wrong]
    found = replace(found, structure=structure)
    job, equal, limit, took = job_of_copy(asked.job), dict(found.equal or {}), 0, 0.0
    until_s = time.monotonic() + asked.most_s
    for axis in axes:
        if time.monotonic() + took > until_s:
            notes = (
                *structure.notes,
                f"{axis} was not compared: comparing takes at most {asked.most_s:.0f} s, which "
                "are spent",
            )
            structure, found = replace(structure, notes=notes), replace(found, steady=False)
            continue
        layout = FAMILIES[axis]
        if axis == "tp":
            layout = Layout(
                tp=next(n for n in range(2, closed.tp_limit + 1) if closed.tp_limit % n == 0)
            )
        one = compare(small, job, batch, layout=layout, words=words)
        took = one.seconds
        if one.problem:
            lost = one.problem.startswith(UNSTEADY)
            found = replace(found, steady=found.steady and not lost)
            mend = MENDS[axis].format(tp=words.tp) + words.lost * lost
            why: dict[str, Any] = {f"no_{axis}": f"{one.layout}: {one.problem}{mend}"}
            # a part of the samples in a pass of one rank is what two ranks have
            at_once = structure.at_once or (axis == "dp" and one.problem.startswith(OTHERWISE))
            structure = replace(structure, at_once=at_once, **why)
            continue
        if one.unclear:
            structure = replace(
                structure, notes=(*structure.notes, f"{axis} was compared {one.unclear}")
            )
            continue
        equal[axis] = round(equal.get(axis, 0.0) + one.seconds, 3)
        if axis == "tp":
            limit, note = _largest_tp(asked, small, batch, limit=closed.tp_limit, words=words)
            structure = replace(structure, notes=(*structure.notes, *note))
    most = min(filter(None, (limit, found.tp_limit)), default=0)
    return replace(found, structure=structure, equal=equal, tp_limit=most)


def _by_one_process(
    asked: CheckRequest,
    structure: Structure,
    small: SmallCopy,
    *,
    batch: Batch,
    axes: Sequence[str],
    words: Words,
) -> tuple[Structure, dict[str, str]]:
    """What is found of these axes without another process."""
    n_rows = asked.job.global_batch
    why_not, closed = _in_one_process(small, batch, words=words, n_rows=n_rows)
    wrong = dict.fromkeys([axis for axis in axes if axis in closed], why_not) if why_not else {}
    found: dict[str, Any] = {f"no_{axis}": why for axis, why in wrong.items()}
    if "pp" in axes and "pp" not in wrong:
        found["no_pp_checkpointing"] = recomputed_blocks(small, batch)
    return replace(structure, at_once=structure.at_once or bool(why_not), **found), wrong


def _in_one_process(
    small: SmallCopy, batch: Batch, *, words: Words, n_rows: int = 0
) -> tuple[str, tuple[str, ...]]:
    """What is wrong with what one process computes, and the axes that are closed by it. `n_rows`:
    samples of a step."""
    left = kept_by_passes(small, batch)
    if why := kept_between(small, batch) or left.lost:
        return why, tuple(FAMILIES)
    if words is OF_A_PROGRAM:
        check_seeds(small, batch)
        for keeps in (remembers, keeps_old_weights, follows_the_clock, limits_weights, loss_beside):
            if why := keeps(small, batch):
                return why, tuple(FAMILIES)
    if why := left.of_samples:
        return why, ("dp", "pp", "ep", "cp")
    if words is OF_A_PROGRAM:
        sees_step = partial(sees_a_step, n_rows=n_rows)
        each_by_itself = (counts_others, sees_others, sees_step, sees_others_later)
        for sees in (*each_by_itself, gradients_stand, gradients_see_others, drawn_together):
            if why := sees(small, batch):
                return why, ("dp", "pp", "ep")
    return "", ()


def _not_compared(error: Exception) -> str:
    if isinstance(error, TooLarge):
        return f"too large to be compared on this machine: {error}"
    return str(error) if isinstance(error, ElasticError) else told(error)


OF_A_CALL = Words(
    "the weighted sum of what run.model(...) gives for",
    "its tp=",
    "; trusted_axes: [tp] takes it as right",
)
OF_A_FIRST_CALL = replace(
    OF_A_CALL, value="the weighted sum of what its first run.model(...), before training, gives for"
)
OTHERWISE = "it computes"  # another function, or other gradients
UNSTEADY = "its ranks"  # have lost each other: it may have been the machine
MENDS = {
    "dp": "",
    "tp": "; look at {tp} and at what the cut modules do with sizes",
    "cp": "; all but elastic.attention must act on each position alone",
    "pp": "; look at what `forward` does outside of the blocks",
    "ep": "; an expert must act on each token alone, and give its sum by the weights that it gets",
}


def _largest_tp(
    asked: CheckRequest, small: SmallCopy, batch: Batch, *, limit: int, words: Words
) -> tuple[int, tuple[str, ...]]:
    """Sizes of tp that the run may take, tried in as many processes: 0 = all; else up to the first
    that does not go."""
    for tp in sorted(set(asked.tps)):
        if tp > 2 and limit % tp == 0:
            layout = Layout(tp=tp)
            one = compare(small, job_of_copy(asked.job), batch, layout=layout, words=words)
            if one.problem:
                most = max(n for n in range(1, tp) if limit % n == 0)
                return most, (f"tp is at most {most}: tp={tp}: {one.problem}",)
    return 0, ()


# ----------------------------------------------------------------------------- what it was found of


_read: set[str] = set()  # files that were opened since `note_reads`


def note_reads() -> None:
    """From now on it is noted which files are opened: a program may take its sizes from one."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and len(_read) < READS_MOST:
            _read.add(arguments[0])

    sys.addaudithook(hook)


def files_of(program: str | Path) -> dict[str, str]:
    """The program's own files that are imported or were read: names (relative to its folder if they
    lie there) -> digests."""
    folder, found = Path(program).resolve().parent, {}
    imported = {
        str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())
    }
    for file in {name for name in imported if name.endswith(".py")} | _read:
        path = Path(file)
        if (
            not path.is_absolute()
            or path.suffix not in SETTINGS
            or file.startswith((*INSTALLED, *SYSTEM))
        ):
            continue
        if path.is_file() and path.stat().st_size <= READ_MOST_BYTES:
            path = path.resolve()
            name = str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
            found[name] = digest_of_file(path)
    return found


def packages() -> dict[str, str]:
    """Versions of what is installed and imported; the program's own modules have none."""
    imported = {module.partition(".")[0] for module in list(sys.modules)}
    found = {name: version_of(name) for name in imported - sys.stdlib_module_names}
    return {name: version for name, version in found.items() if version}


def main(arguments: Iterable[str], function: TrainFunction | None = None) -> int:
    """Reads one question (or a list of them) from standard input, writes one JSON line for each."""
    (out,) = arguments
    die_with_parent()
    os.register_at_fork(after_in_child=die_with_parent)
    torch.set_num_threads(1)
    note_reads()
    given = json.load(sys.stdin)
    with open(out, "w") as file:
        for one in given if isinstance(given, list) else [given]:
            try:
                asked = CheckRequest(**{**one, "job": Job.from_plain(one["job"])})
                line = check(asked, function).plain()
            except ProgramError as error:
                line = {"error": str(error), "program": True}
            except ElasticError as error:
                line = {"error": str(error)}
            except Exception as error:  # noqa: BLE001 - the boundary of the process
                line = {"error": told(error)}
            file.write(json.dumps(line) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.exit(main(sys.argv[1:]))
