"""The file in which a Program stands that was given as an object."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from elastic.errors import SpecError
from elastic.program import Program, load_program


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
