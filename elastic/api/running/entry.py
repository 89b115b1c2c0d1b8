"""run(): a job, its program or its script, to the end. run_script(): a script instead of a Program;
changed live where it enters `elastic.loop`, started over where it does not.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from elastic.api.running import restarted_script
from elastic.api.running.options import Options
from elastic.api.running.program_file import job_given
from elastic.api.running.run import Result, run_job
from elastic.api.running.start_checks import BY_SET, check_first, check_keys
from elastic.config.job import JobSpec, folder_job, job_data, job_of, overridden
from elastic.config.script import check_starts_nothing, enters_loop, leaves_out, script_file
from elastic.errors import OF_ITS_USER, Interrupted, SpecError
from elastic.observe import find_runs
from elastic.observe.metrics.metrics_files import OnStep
from elastic.observe.terminal import start_line
from elastic.program import Program, load_program
from elastic.user_frames import plainly

if TYPE_CHECKING:
    from elastic.worker.program.loop_program import LoopProgram

NEEDED = ("steps", "global_batch")  # keys that a job cannot do without


@plainly(*OF_ITS_USER, KeyboardInterrupt)
def run(
    program: str | Path | Program,
    job: str | Path | Mapping[str, Any] | None = None,
    options: Options | None = None,
    *,
    on_step: OnStep | None = None,
) -> Result:
    """Run a job to its end.

    `on_step` is called with the numbers of each step (as `options.on_step`).
    `program`: a job folder; or a Program that stands in a file as `program` (workers import that
    file), with `job` as a mapping of the keys of job.yaml or as a job folder. A run that fails, or
    that `elastic stop`, its budget or its deadline stops, returns, as `Result.outcome` says. Raises
    SpecError where the input is wrong; KeyboardInterrupt after Ctrl-C and SystemExit after SIGTERM,
    once the run is saved.
    """
    options = options or Options()
    if on_step is not None:
        options = replace(options, on_step=on_step)
    if not isinstance(program, Program) and job is None:
        result = run_folder(program, options)
    else:
        result = run_job(job_given(program, job, options), options)
    return _ended(result, options)


def _ended(result: Result, options: Options) -> Result:
    if options.words:  # whoever has typed them is told how it ended by the command, and its code
        return result
    naming = "" if options.run_name else f"give elastic.Options(run_name='{result.run}')"
    return not_interrupted(result, find_runs.python_words(), naming=naming)


def not_interrupted(result: Result, words: Sequence[str], *, naming: str) -> Result:
    """The result, for a caller in Python, which goes on behind it. `words`, `naming`: as
    `stopped_lines` tells how a run that was stopped is resumed. Raises what the signal that has
    stopped it raises where nobody handles it: KeyboardInterrupt, or Interrupted."""
    if result.outcome == "stopped":
        lines = find_runs.stopped_lines(result.run, result.reason, words, naming=naming)
        print(lines, end="", file=sys.stderr, flush=True)
    if result.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if result.signal:
        raise Interrupted(result.signal)
    return result


@plainly(*OF_ITS_USER, KeyboardInterrupt)
def run_script(
    script: str | Path,
    args: Sequence[str] = (),
    job: str | Path | None = None,
    *,
    options: Options | None = None,
) -> Result:
    """Run `script` with the arguments `args` to its end; `job`: a folder with a job.yaml (and no
    program). Returns and raises as `run`."""
    options = options or Options()
    file = script_file(script)
    check_starts_nothing(file)
    data, where = keys_beside(file, job, options.overrides)
    return _ended(run_file(file, args, data, where=where, options=options), options)


def keys_beside(
    file: Path, job: str | Path | None, overrides: Sequence[str]
) -> tuple[dict[str, Any], str]:
    """The keys of a job whose script is given by itself, and where they stand; `job`: as in
    `run_script`. Raises SpecError."""
    if job is None:
        return {"name": file.stem} | overridden(overrides), BY_SET
    data, where = job_data(job, overrides)
    for way in ("program", "script"):
        if way in data:
            raise SpecError(
                f"{where}: its key '{way}' and --script {file} are two ways at once; give one of "
                "them"
            )
    if (Path(job) / "program.py").is_file():
        raise SpecError(
            f"{Path(job) / 'program.py'} and --script {file} are two ways at once; give one of them"
        )
    return {"name": Path(job).resolve().name} | data, where


def run_file(
    file: Path, args: Sequence[str], data: Mapping[str, Any], *, where: str, options: Options
) -> Result:
    """The same with the job's keys as they were read."""
    if not enters_loop(file):
        return restarted_script.run_restarting(file, args, data, where=where, options=options)
    settled = partial(leaves_out, file)
    check_first(data, file, where, options=options, settled=settled, args=args)
    doing = "the script runs up to its loop, which is tried"
    with start_line("the script ran up to its loop, which was tried", _shown(options), doing=doing):
        spec, program = _loop_job(file, args, data, where=where, stream=options.stream)
    return run_job(spec, options, program)


def run_folder(folder: str | Path, options: Options) -> Result:
    """A job folder, whose job.yaml names a `program` (default: program.py) or a `script` with its
    `args`."""
    data, where = job_data(folder, options.overrides)
    if "script" not in data:
        return run_job(folder_job(folder, data, where), options)
    file, args, data = _script_of(folder, data, where)
    return run_file(file, args, data, where=where, options=options)


def loaded(folder: str | Path, overrides: Sequence[str] = ()) -> tuple[JobSpec, Program]:
    """The job of a folder and its program, whichever way it is given. Raises SpecError."""
    return loaded_from(folder, *job_data(folder, overrides))


def loaded_from(folder: str | Path, data: Mapping[str, Any], where: str) -> tuple[JobSpec, Program]:
    """The same of what `job_data` has read."""
    if "script" not in data:
        spec = folder_job(folder, data, where)
        return spec, load_program(spec.program)
    file, args, data = _script_of(folder, data, where)
    if not enters_loop(file):
        raise SpecError(
            f"{where}: {file.name} does not enter elastic.loop: what it trains is not known; a "
            "model of its size can be planned: elastic plan --model 1b --gpus H100:8"
        )
    check_keys(data, file, where)  # said before the script is run
    return _loop_job(file, args, data, where=where)


def _shown(options: Options) -> TextIO | None:
    return (options.stream or sys.stdout) if options.show else None


def _script_of(
    folder: str | Path, data: Mapping[str, Any], where: str
) -> tuple[Path, list[str], dict[str, Any]]:
    """A job folder's script, its arguments and the other keys."""
    if "program" in data:
        raise SpecError(f"{where}: 'program' and 'script' are two ways at once; give one of them")
    args = data.get("args") or []
    if not isinstance(args, list):
        raise SpecError(
            f"{where}: key 'args' must be a list of the script's arguments, not {args!r}"
        )
    rest = {key: value for key, value in data.items() if key not in ("args", "script")}
    file = script_file(Path(folder) / str(data["script"]))
    check_starts_nothing(file)
    return file, [str(word) for word in args], {"name": Path(folder).resolve().name} | rest


def _loop_job(
    file: Path,
    args: Sequence[str],
    data: Mapping[str, Any],
    *,
    where: str,
    stream: TextIO | None = None,
) -> tuple[JobSpec, Program]:
    """Runs the script up to its loop, in this process; what it prints goes to `stream`."""
    from elastic.worker.equivalence.draw_trial import with_notes
    from elastic.worker.loop.script_host import capture

    with redirect_stdout(stream or sys.stdout):
        program = with_notes(capture(file, args, _seed(data)))
    return _spec_of(program, file, args, data=data, where=where), program


def run_train_function(
    data: bytes, file: Path, keys: Mapping[str, Any], *, where: str, options: Options
) -> Result:
    """A train function as it was pickled, which stands in `file`, to its end. It runs up to its
    loop in this process. Raises SpecError."""
    from elastic.cluster.workers import train_function
    from elastic.worker.equivalence.draw_trial import with_notes
    from elastic.worker.loop.script_host import capture

    args, settled = sys.argv[1:], partial(leaves_out, file)
    check_first(keys, file, where, options=options, settled=settled, args=args)
    done = start_line(
        "the train function ran up to its loop, which was tried", _shown(options),
        doing="the train function runs up to its loop, which is tried",
    )  # fmt: skip
    with done, train_function.as_they_are():
        program = capture(file, args, _seed(keys), function=lambda: train_function.loaded(data))
    program = with_notes(program)
    spec = _spec_of(program, file, args, data=keys, where=where)
    return run_job(spec, options, program, train_function=data)


def _spec_of(
    program: LoopProgram, file: Path, args: Sequence[str], *, data: Mapping[str, Any], where: str
) -> JobSpec:
    """The job of what a script has entered its loop with. Raises SpecError."""
    batch = {**program.settings, **data}.get("global_batch")
    own = _with_steps(program.settings, program, batch, where=f"{file}: elastic.loop(...)")
    data = _with_steps(data, program, batch, where=where)
    started = {"script": str(file), "args": list(args)}
    data = {**own, **data, **started}
    for key in NEEDED:
        if key not in data:
            raise SpecError(
                f"{file}: '{key}' is missing; give it to elastic.loop({key}=...), or by --set "
                f"{key}=N, or in a job.yaml"
            )
    if own:  # what is wrong with these is not the fault of job.yaml
        alone = {key: data[key] for key in NEEDED} | own | started
        job_of(alone, file, f"{file}: elastic.loop(...)")
    return job_of(data, file, where)


def _with_steps(
    keys: Mapping[str, Any], program: LoopProgram, global_batch: Any, *, where: str
) -> dict[str, Any]:
    """The keys with `steps` in the place of `epochs`. Raises SpecError."""
    found = dict(keys)
    epochs = found.pop("epochs", None)
    if epochs is None:
        return found
    if "steps" in found:
        raise SpecError(f"{where}: 'epochs' and 'steps' both say how long it trains; give one")
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise SpecError(f"{where}: 'epochs' must be a whole number of at least 1, not {epochs!r}")
    assert program.dataset is not None
    known = isinstance(global_batch, int) and global_batch > 0  # else it is refused by its own name
    found["steps"] = -(-epochs * len(program.dataset()) // (global_batch if known else 1))
    return found


def _seed(data: Mapping[str, Any]) -> int:
    seed = data.get("seed", 0)
    # what it must be is checked with the other keys
    return seed if isinstance(seed, int) and seed >= 0 else 0
