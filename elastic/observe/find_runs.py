"""Run folders: a run by its name, its folder or its URI; all runs of a storage folder; orders to a
live run."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from elastic.config.masking import masked
from elastic.errors import (
    LINE_MOST,
    ElasticError,
    SpecError,
    StorageFailed,
    alike,
    in_one_line,
    meant,
)
from elastic.ledger.journal import Line
from elastic.ledger.run_folder import DEFAULT_STORAGE, JOURNAL, RunFolder
from elastic.observe.run_view import View, view_of
from elastic.policy.state.fold import EMPTY
from elastic.storage import Storage, open_storage
from elastic.text import one_line, printable
from elastic.types import DriverStarted, Job

__all__ = [
    "DEFAULT_STORAGE", "JOURNAL", "RunFolder", "again", "all_runs", "lines_of", "now", "open_run",
    "open_storage_of", "order", "remember", "resuming", "storage_uri", "view", "view_begun",
]  # fmt: skip


log = logging.getLogger(__name__)

# what the name of a run adds to that of its job, where none was given
DATED = re.compile(r"-\d{8}-\d{6}")
# in the folder where runs lie by default: the places of runs in other folders, by their names
ELSEWHERE = ".elsewhere"
COMMAND = "command.json"  # in a run's folder: what was typed to start it, and where
LOOKED_INTO = 50  # the newest runs, for the name of their job
OF_PYTHON = re.compile(r"-[BbdEhiIOPqsSuvVx]+")  # its options but -c and -m, which start no file
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by `ray job submit`
OF_SUBMITTED = "~/elastic_runs"  # its working directory is a copy that Ray removes


def storage_uri(asked: str | None) -> str:
    """Where runs lie: what was asked for, else $ELASTIC_STORAGE, else ./elastic_runs; under `ray
    job submit` ~/elastic_runs."""
    default = OF_SUBMITTED if os.environ.get(SUBMITTED) else DEFAULT_STORAGE
    return open_storage(asked or os.environ.get("ELASTIC_STORAGE") or default).uri


def open_run(run: str, storage: str | None = None, exact: bool = False) -> RunFolder:
    """A run that is there; unless `exact` also by the name of its job, the newest one, or by how
    its name begins. Raises SpecError."""
    for place in _places(run, storage):
        found = RunFolder.of(open_storage(place))
        if found.exists():
            return found
    known = dict(all_runs(storage))
    begins = [run] if run in known else [] if exact else _beginning(run, known)
    if len(begins) == 1:
        return known[begins[0]]
    if not begins and (submitted := _submitted(run, storage)):
        return submitted
    what = f"; several begin so: {', '.join(begins[-8:])}" if begins else ""
    near = alike(run, known, 3)
    listed = f"; runs there: {', '.join(list(known)[-8:])}" if known and not begins else ""
    if near and not begins:
        listed = f"; {meant(near)}"
    raise SpecError(f"no run '{run}' here or in {storage_uri(storage)}{what}{listed}")


def _places(run: str, storage: str | None) -> list[str]:
    if "://" in run:
        return [run]
    return [run, f"{storage_uri(storage)}/{run}"]


def _submitted(run: str, storage: str | None) -> RunFolder | None:
    """One of `ray job submit`, from a shell that says nothing of where runs lie."""
    if "://" in run or storage or os.environ.get("ELASTIC_STORAGE"):
        return None
    found = RunFolder.of(open_storage(f"{OF_SUBMITTED}/{run}"))
    return found if found.exists() else None


def _beginning(run: str, known: Mapping[str, RunFolder]) -> list[str]:
    """The newest run of the job of that name; else all that begin so; else the newest whose job is
    called so, whatever its own name is. `known`: in order of their last news."""
    of_job = [
        name for name in known if DATED.fullmatch(name.removeprefix(run)) and name.startswith(run)
    ]
    if of_job:
        return [max(of_job)]
    begin_so = [name for name in known if run and name.startswith(run)]
    newest = list(known)[: -LOOKED_INTO - 1 : -1]
    return begin_so or [name for name in newest if _job_of(known[name]) == run][:1]


def _job_of(run: RunFolder) -> str:
    """The name of its job; '' = it cannot be read."""
    try:
        for line in islice(run.lines(), 1):
            for _, event in line.events:
                if isinstance(event, DriverStarted):
                    return str(event.job.get("name", ""))
    except (ElasticError, OSError) as error:
        log.info("%s: its job is not known: %s", run.uri, error)
    return ""


def remember(run: RunFolder, words: Sequence[str] = ()) -> None:
    """What was typed to start it, for `resuming`. Of a run in another folder than runs lie in here:
    from here its name is enough to find it."""
    if words:
        typed = {"words": masked([*words]), "folder": os.getcwd()}
        run.storage.put(COMMAND, json.dumps(typed).encode())
    root, uri = open_storage(storage_uri(None)), run.storage.uri
    if root.remote or run.storage.remote or uri == root.uri_of(run.name):
        return
    try:
        root.put(f"{ELSEWHERE}/{run.name}", uri.encode())
    except OSError as error:  # where the run was started nothing may be written
        log.info("%s is found by its folder only: %s", uri, error)


def _elsewhere(root: Storage) -> list[str]:
    """Where runs in other folders are, that were started here."""
    uris: list[str] = []
    with _left_out():
        for key in root.list(f"{ELSEWHERE}/") if not root.remote else ():
            with _left_out():
                uris.append(root.get(key).decode(errors="replace"))
    return [uri for uri in uris if "://" not in uri]


@contextmanager
def _left_out() -> Iterator[None]:
    """What another user may have made so that this one cannot read it is left out, with a line."""
    try:
        yield
    except StorageFailed:  # nothing can be read there now
        raise
    except (SpecError, OSError) as error:
        _say_left_out(in_one_line(error))


@lru_cache(maxsize=1000)
def _say_left_out(why: str) -> None:
    """Once each: a page lists the runs every few seconds."""
    log.warning("left out: %s", why)


def _there(uris: Iterable[str]) -> list[tuple[float, RunFolder]]:
    """The runs among these, each with the age of its last news."""
    found: list[tuple[float, RunFolder]] = []
    for uri in uris:
        with _left_out():
            run = RunFolder.of(open_storage(uri))
            found += [(run.age_s(), run)] if run.exists() else []
    return found


def open_storage_of(run: str, storage: str | None = None, exact: bool = False) -> Storage:
    """The storage of a run, also of one that has checkpoints but no journal yet (imported). Raises
    SpecError."""
    for place in _places(run, storage):
        found = RunFolder.of(open_storage(place))
        if not found.exists() and found.storage.list("checkpoints/"):
            return found.storage
    return open_run(run, storage, exact).storage


def lines_of(run: RunFolder) -> Iterable[Line]:
    """The journal of a run. Raises SpecError where it has no line."""
    lines = iter(run.lines())
    first = next(lines, None)
    if first is None:
        raise _not_begun(run)
    return chain((first,), lines)


def _not_begun(run: RunFolder) -> SpecError:
    right = "it has not started, or its journal was emptied; elastic ls lists the runs"
    return SpecError(f"run '{run.name}': {run.uri} holds no line of a journal: {right}")


def view_begun(run: RunFolder) -> View:
    """As `view`. Raises SpecError where the journal has no line."""
    found = view(run)
    if found.state is EMPTY:
        raise _not_begun(run)
    return found


def view(run: RunFolder) -> View:
    """Of the whole journal."""
    with uncollected():
        return view_of(run.lines())


def now(run: RunFolder) -> View:
    """How it is now, from its newest State and the lines since: of a run of weeks, in a second."""
    with uncollected():
        return view_of(run.newest())


@contextmanager
def uncollected() -> Iterator[None]:
    """Reading a journal makes no circles, and looking for them among all that it makes takes a
    tenth of the time."""
    looked = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looked:
            gc.enable()


def again(words: Sequence[str], run: str) -> str:
    """The command line that resumes `run`, by the words of the one that began it: what was typed
    behind `elastic`, or a whole command that names the run in its own file."""
    if words[0] != "run":
        return shlex.join(words)
    own = words[: words.index("--")] if "--" in words else words
    named = any(word.split("=")[0] == "--run-name" for word in own)
    return shlex.join(["elastic", words[0], *([] if named else ["--run-name", run]), *words[1:]])


def stopped_lines(run: str, reason: str, words: Sequence[str], *, naming: str = "") -> str:
    """What a run that was stopped ends with; `naming`: what its file has to say first, so that the
    same command means this run."""
    first = f"{naming}, then: " if naming else ""
    resumed = f"elastic: to resume it: {first}{again(words, run)}\n" if words else ""
    return f"elastic: run {run} stopped: {one_line(reason, LINE_MOST)}\n{printable(resumed)}"


def python_words() -> tuple[str, ...]:
    """The command that started this process with a file of the user's; () = there is none, as in a
    notebook."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return ("python", *sys.orig_argv[1:]) if file and "ipykernel" not in file else ()


def resuming(run: RunFolder, job: Job) -> str:
    """The command that resumes a run, typed in this folder; '' = it was not started by `elastic
    run`, or its files are not on this machine."""
    if typed := _typed(run, job):
        return typed
    words, folder = ["elastic", "run", "--run-name", run.name], run.uri.rpartition("/")[0]
    if storage_uri(None) != folder:
        words += ["--storage", folder]
    if job.folder and (Path(job.folder) / "job.yaml").is_file():
        return shlex.join([*words, os.path.relpath(job.folder)])
    if job.script is None or not Path(job.script).is_file():
        return ""
    args = ["--", *job.args] if job.args else []
    return shlex.join([*words, "--script", os.path.relpath(job.script), *args])


def exporting(run: RunFolder, job: Job) -> str:
    """The command that writes the newest model of a run, typed in this folder."""
    words, folder = ["elastic", "checkpoint", "export", run.name], run.uri.rpartition("/")[0]
    if storage_uri(None) != folder:
        words += ["--storage", folder]
    if job.script is None and job.folder and (Path(job.folder) / "job.yaml").is_file():
        words += ["--job", os.path.relpath(job.folder)]  # its program knows what stands beside it
    return f"{shlex.join(words)} --to FOLDER"


def _typed(run: RunFolder, job: Job) -> str:
    """The same from what was typed when it was started last; '' = that is not known, was elsewhere,
    or would start something else than the job of the journal: whoever may write the run's storage
    may have written it."""
    try:
        found = json.loads(run.storage.get(COMMAND))
        words, folder = list(map(str, found["words"])), str(found["folder"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return ""
    if not words or not os.path.isdir(folder) or not _starts(words, folder, job):
        return ""
    line = again(words, run.name)
    return line if os.getcwd() == folder else f"cd {shlex.quote(folder)} && {line}"


def _starts(words: Sequence[str], folder: str, job: Job) -> bool:
    """Is `elastic run` or `python FILE`, typed there, of this job?"""
    if words[0] == "python":
        file = next((word for word in words[1:] if not OF_PYTHON.fullmatch(word)), "-")
        place = Path(folder, file).resolve()
        return (
            not file.startswith("-")
            and bool(job.folder)
            and place.is_relative_to(os.path.realpath(job.folder))
        )
    given = words[1 : words.index("--")] if "--" in words else words[1:]
    there = [os.path.realpath(Path(folder, word.rpartition("=")[2])) for word in given]
    files = [place for place in there if place.endswith(".py")]
    named = files or [place for place in there if Path(place, "job.yaml").is_file()]
    own = {os.path.realpath(name) for name in (job.folder, job.script, job.program) if name}
    return words[0] == "run" and bool(named) and own.issuperset(named)


def all_runs(storage: str | None = None) -> list[tuple[str, RunFolder]]:
    """Runs of a storage folder, by name, in order of their last news; of the one where runs lie by
    default also those that were started here and lie elsewhere."""
    root = open_storage(storage_uri(storage))
    found = _there(map(root.uri_of, root.folders()))
    if storage is None:
        names = {run.name for _, run in found}
        found += [one for one in _there(_elsewhere(root)) if one[1].name not in names]
    return [(run.name, run) for _, run in sorted(found, key=lambda one: -one[0])]


def order(run: Storage, data: dict[str, Any]) -> str:
    """Put an order, such as {"stop": reason} or {"drill": {...}}, into the inbox of a run; returns
    its key."""
    key = f"inbox/{time.time_ns():020d}-{secrets.token_hex(4)}.json"
    run.put(key, json.dumps(data).encode(), if_absent=True)
    return key
