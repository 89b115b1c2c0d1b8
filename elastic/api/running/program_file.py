"""The job that a run is given: a folder, or a Program and the file in which it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from elastic.api.running.options import Options
from elastic.api.running.start_checks import IN_A_MAPPING, check_first
from elastic.config.job import JobSpec, job_of, load_job
from elastic.errors import SpecError
from elastic.program import Program, load_program


def job_given(
    program: str | Path | Program, job: str | Path | Mapping[str, Any] | None, options: Options
) -> JobSpec:
    if not isinstance(program, Program):
        if job is not None:
            raise SpecError(
                f"run('{program}', job=...): a job folder has its own job.yaml; give job only "
                "with a Program"
            )
        return load_job(program, options.overrides)
    if isinstance(job, Mapping):  # before the file is imported again
        check_first(job, Path(), IN_A_MAPPING, options=options, settled=lambda key: True)
    file = file_of(program)
    if isinstance(job, Mapping):
        return job_of(job, file, IN_A_MAPPING)
    if job is None:
        raise SpecError(
            "run(program): give job={'steps': ..., 'global_batch': ...} or the folder of a job.yaml"
        )
    return load_job(job, options.overrides).model_copy(
        update={"program": str(file), "folder": str(file.parent)}
    )


def file_of(program: Program) -> Path:
    """The file in which a Program stands as `program`: workers import it. Raises SpecError when
    there is no such file."""
    files = dict.fromkeys(Path(file) for file, _ in _places(program))
    if not any(file.is_file() for file in files):
        raise SpecError(
            "run(program): Program.model must be a function or lambda in a file, so that workers "
            "can import it"
        )
    problem = ""
    for file in files:
        try:
            if file.is_file() and _places(load_program(file)) == _places(program):
                return file
            problem = (
                problem
                or f"none of {', '.join(map(str, files))} defines it as `program`; name it so"
            )
        except SpecError as error:  # it is defined elsewhere, or this is the reason
            problem = str(error)
    raise SpecError(
        "run(program): it must stand in a file as `program`, so that workers can import it: "
        f"{problem}"
    )


def _places(program: Program) -> list[tuple[str, int]]:
    """File and line of each function of a Program."""
    codes = [getattr(getattr(program, field.name), "__code__", None) for field in fields(program)]
    return [
        (str(Path(code.co_filename).resolve()), code.co_firstlineno)
        for code in codes
        if code is not None
    ]
