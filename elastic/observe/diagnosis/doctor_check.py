"""One thing that `elastic doctor` has looked at, and where the checks of a machine look."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

Mark = Literal["ok", "look", "bad"]
ANSWERS_WITHIN_S = 20


@dataclass(frozen=True)
class DoctorCheck:
    """`hint` says what to do where it is not ok."""

    name: str
    found: str
    verdict: Mark = "ok"
    hint: str = ""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def checked(name: str, found: str, fine: bool, *, hint: str) -> DoctorCheck:
    return DoctorCheck(name, found) if fine else DoctorCheck(name, found, "look", hint)


class ProgramHangs(Exception):
    """A program hangs."""


def answer(words: Sequence[str]) -> str | None:
    """What a program prints; None = it is not there, or fails. Raises ProgramHangs."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWERS_WITHIN_S)
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired as error:
        raise ProgramHangs(words[0]) from error
    return done.stdout if done.returncode == 0 else None


def installed(package: str) -> str:
    """Its version; '' = it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class HostView:
    """`root`: of its files; `ask`: runs a program (see `answer`); `version`: of a package."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")
    ask: Callable[[Sequence[str]], str | None] = answer
    version: Callable[[str], str] = installed

    def text(self, path: str) -> str:
        """Of a small file; '' = it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def libraries(self, pattern: str, folders: Sequence[str]) -> list[Path]:
        """Files of that name there, the dynamic linker's own places first."""
        searched = [
            one for one in self.environment.get("LD_LIBRARY_PATH", "").split(":") if one
        ] + list(folders)
        return [
            path for one in searched for path in sorted((self.root / one.lstrip("/")).glob(pattern))
        ]
