"""Which layouts compute what a job's program does: asked of a process of its own before a run, kept
by what the program is.

The process (elastic/worker/equivalence/layout_check.py) starts beside everything else that a run
starts; what it has found is kept in the user's cache folder and holds for as long as no file of the
program, no version and no key of the job that matters has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO, get_args

from elastic.api.planning.made_up_data import with_made_up_data
from elastic.config.fingerprint import digest_of_code, digest_of_file
from elastic.config.job import JobSpec
from elastic.errors import SpecError
from elastic.program import Program
from elastic.types import Job, ModelProfile, Pool
from elastic.types.grid import axes_of
from elastic.types.typed_job import Axis
from elastic.version import own_path, python_path, user_cache, version_of

if TYPE_CHECKING:
    from elastic.worker.equivalence.layout_check import Verdict

# names the folder where answers are kept, instead of one in the user's cache
PLACE = "ELASTIC_LAYOUTS"
MOST_S = 90.0  # for all of it
MOST_TP = 4  # ranks of a comparison: as many processes on this machine
KEYS = (
    "data",
    "args",
    "optimizer",
    "microbatch_tokens",
    "batch_norm",
)  # of a job, that decide what is compared
TELL_AFTER_S = 2.0
COMPUTES = ("worker", "models", "data", "types/grid.py")  # an answer of other code is none
OF_A_BODY = "the body of its loop trains on samples together as on each alone"
AXES: tuple[str, ...] = get_args(Axis)


def asked_of(
    spec: JobSpec, pools: Sequence[Pool], program: Program | None = None
) -> dict[str, Any] | None:
    """What is to be found out for a run on these pools; None where nothing can differ: one worker,
    or a script that is none of ours. `program`: of a script."""
    n_workers = sum(pool.max_nodes * pool.gpus_per_node for pool in pools) + sum(
        entry.add is not None for entry in spec.drill
    )
    if n_workers < 2 or (spec.script and program is None):
        return None
    possible = axes_of_loop(program) if spec.script and program is not None else AXES
    most = max((pool.gpus_per_node for pool in pools), default=1)
    each = [_open_axes(one.job(), one.layouts(), most) for one in spec.each_phase()]
    axes = [axis for axis in possible if any(axis in found for found, _ in each)]
    if not axes:
        return None
    asked: dict[str, Any] = {
        "job": replace(spec.job(), drill=()),
        "axes": axes,
        "tps": sorted({tp for _, found in each for tp in found}),
        "trusted": list(spec.trusted_axes),
    }
    if spec.script and program is not None:
        from elastic.worker.program.model_profile import build_meta

        asked["model_bytes"] = sum(p.nbytes for p in build_meta(program).parameters())
    return asked


def axes_of_loop(program: Program) -> tuple[str, ...]:
    """That a script which enters a loop can be asked for."""
    return ("dp", "tp") if program.tp else ("dp",)


def _open_axes(job: Job, texts: Sequence[str], most_per_node: int) -> tuple[list[str], list[int]]:
    """Axes with more than one rank in a layout that the run may enter, and the sizes of tp among
    these. `texts`: the layouts that the job names whole."""
    if texts:
        layouts = [job.layout_of(text) for text in texts]
        axes = {axis for layout in layouts for axis in axes_of(layout)}
        return [axis for axis in AXES if axis in axes], sorted(
            {min(layout.tp, MOST_TP) for layout in layouts if layout.tp > 1}
        )
    pins, unequal = job.pins, bool(job.microbatch_tokens)
    closed = {
        "tp": job.float8 or most_per_node < 2 or (job.compile and unequal),
        "cp": job.compile or unequal or most_per_node < 2,
        "pp": unequal,
        "ep": job.compile,
    }
    found = [axis for axis in AXES if not closed.get(axis) and int(pins.get(axis, 2)) > 1]
    return found, list(range(2, min(most_per_node, MOST_TP) + 1))


class LayoutCheck:
    """A question that is being answered. `close` in any case."""

    def __init__(
        self,
        asked: Mapping[str, Any] | None,
        stream: TextIO | None = None,
        *,
        train_function: bytes = b"",
    ) -> None:
        """`stream`: where it is said that this takes a moment, None = nowhere. `train_function`: as
        it was pickled, in the place of a job's script."""
        if asked is not None and train_function:
            asked = {**asked, "function": hashlib.sha256(train_function).hexdigest()}
        self.asked, self.stream, self.train_function = asked, stream, train_function
        self.known = _kept(asked) if asked is not None else None
        self._folder: TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if asked is not None and self.known is None:
            self._begin(asked)

    def _begin(self, asked: Mapping[str, Any]) -> None:
        self._folder = TemporaryDirectory(prefix="elastic-layouts-")
        here = Path(self._folder.name)
        (here / "data").mkdir()
        (here / "asked").write_text(
            json.dumps({**asked, "job": with_made_up_data(asked["job"], here / "data").plain()})
        )
        own = {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": python_path(asked["job"].folder, *own_path()),
        }
        environment = {**os.environ, **own}
        command = ["elastic.worker.equivalence.layout_check"]
        if self.train_function:
            (here / "function").write_bytes(self.train_function)
            command = ["elastic.cluster.workers.train_function", str(here / "function")]
        with open(here / "asked") as question, open(here / "said", "w") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *command, str(here / "found")], stdin=question,
                stdout=said, stderr=said, env=environment, start_new_session=True,
            )  # fmt: skip

    def result(self, most_s: float = MOST_S) -> Verdict | None:
        """Waits for the answer; None where nothing was asked. A driver that is killed later leaves
        nothing of it. Raises SpecError where the program itself is wrong."""
        if self.asked is None or self.known is not None:
            return self.known
        try:
            self.known = self._answered(self.asked, most_s)
        finally:
            self.close()
        return self.known

    def _answered(self, asked: Mapping[str, Any], most_s: float) -> Verdict:
        from elastic.worker.equivalence.layout_check import Verdict

        assert self._process is not None and self._folder is not None
        try:
            self._process.wait(TELL_AFTER_S)
        except subprocess.TimeoutExpired:
            if self.stream is not None:
                print(
                    "compares what each layout computes with one process (a small copy, once per "
                    "program)",
                    file=self.stream,
                )
        try:
            self._process.wait(most_s)
        except subprocess.TimeoutExpired:
            return Verdict(
                skipped=f"it took longer than {most_s:.0f} s",
                followed=False,
                trusted=tuple(asked["trusted"]),
                steady=False,
            )
        found = _answer(Path(self._folder.name), asked["job"].program)
        if isinstance(found, Verdict):
            if found.steady:
                _keep(asked, found)
            return found
        trusted = tuple(asked["trusted"])
        return Verdict(skipped=found, followed=False, trusted=trusted, steady=False)

    def close(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = None


def _answer(folder: Path, program: str) -> Verdict | str:
    """Raises SpecError where the program itself is wrong, whatever the layout."""
    from elastic.worker.equivalence.layout_check import Verdict

    try:
        data = json.loads((folder / "found").read_text().splitlines()[0])
        if data.get("program"):
            raise SpecError(f"{program}: {data['error']}")
        return str(data["error"]) if "error" in data else Verdict.of(data)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        last = (folder / "said").read_text(errors="replace").strip().splitlines()[-1:]
        return f"the process that compares has ended: {' '.join(last)[:200]}"


def checked(model: ModelProfile, verdict: Verdict | None, program: Program) -> ModelProfile:
    """The profile with what was found, and a line that says so. Where nothing could be found out,
    blocks are not spread over stages, unless the program has stages of its own."""
    if verdict is None:
        return model
    found = verdict.apply(model)
    if (
        not verdict.followed
        and program.stage is None
        and found.pipeline
        and "pp" not in verdict.trusted
    ):
        why = (
            f"its forward pass could not be followed here ({verdict.skipped}); trusted_axes: [pp] "
            f"{program.keys} allows it"
        )
        found = replace(found, pipeline=False, no_pp=why)
    return replace(found, notes=(*_said(verdict, program), *found.notes))


def _said(verdict: Verdict, program: Program) -> Iterator[str]:
    loop = type(program).__name__ == "LoopProgram"
    equal = dict(verdict.equal or {})
    if loop and "dp" in equal:
        yield (f"dp: {OF_A_BODY} ({equal.pop('dp'):.1f} s, cached)")
    if equal:
        what = "outputs of its first call" if loop else "loss"
        yield (
            f"{', '.join(equal)}: {what} and gradients of a small copy match those of one "
            f"process ({sum(equal.values()):.1f} s, cached)"
        )
    if verdict.skipped:
        one = "auto,tp=1" if program.tp else "dp_shard=1"
        more = f"; compare the first losses with those of --layout {one}" if loop else ""
        yield f"the layouts' values were not compared before the start: {verdict.skipped}{more}"


def check_open(spec: JobSpec, model: ModelProfile) -> None:
    """Raises SpecError where the run would have one worker of many, since no axis is open to its
    program."""
    if model.no_dp and not spec.layouts() and model.tp_limit == 1 and not model.pipeline:
        raise SpecError(
            f"{spec.name}: no data-parallel ranks: {model.no_dp}; or one worker: layout: dp_shard=1"
        )


# ------------------------------------------------------------------------------------- what is kept


def _key(asked: Mapping[str, Any]) -> str:
    job = asked["job"].plain()
    program = Path(job["program"])
    parts = {key: job[key] for key in KEYS} | {
        name: asked[name] for name in ("axes", "tps", "trusted")
    }
    parts |= {"function": asked.get("function", ""), "script": job["script"]}
    parts |= {
        "code": digest_of_code(*COMPUTES),
        "program": digest_of_file(program),
        "name": program.name,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _file(asked: Mapping[str, Any]) -> Path:
    return user_cache(PLACE, "layouts") / f"{_key(asked)}.json"


def _kept(asked: Mapping[str, Any]) -> Verdict | None:
    """What was found of the same program before."""
    folder = Path(asked["job"].program).resolve().parent
    try:
        text = _file(asked).read_text()
    except OSError:
        return None
    from elastic.worker.equivalence.layout_check import Verdict  # torch comes with it

    try:
        found = Verdict.of(json.loads(text))
    except (ValueError, KeyError, TypeError):
        return None
    same = all(
        digest_of_file(folder / name) == digest for name, digest in (found.files or {}).items()
    )
    same = same and all(version_of(name) == its for name, its in (found.packages or {}).items())
    return found if same else None


def _keep(asked: Mapping[str, Any], found: Verdict) -> None:
    """Where it cannot be written it is found anew next time."""
    file = _file(asked)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        half = file.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps(found.plain()))
        half.replace(file)
    except OSError:
        return
