"""Which version of this package it is, and of what else must be the same on all nodes of a run;
where it lies, and what it keeps. Imports none of it."""

from __future__ import annotations

import errno
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).resolve().parent  # the folder of this package
COMPILED = "compiled"  # the kind of folder that torch.compile fills, see own_folder


def python_path(*first: str) -> str:
    """PYTHONPATH of a process that is to find this package, and what lies in the `first` folders.
    With -P it imports nothing from the folder in which the user stands."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys(filter(None, (*first, str(PACKAGE.parent), *given))))


def own_path() -> list[str]:
    """The folders that this process imports from, for one that is to import the same."""
    return [folder or os.getcwd() for folder in sys.path]


def source_folder() -> str:
    """Of a checkout, which other hosts import this package from as this one does; "" = it is
    installed beside other packages, which are each host's own."""
    folder = PACKAGE.parent
    return "" if folder.name in ("site-packages", "dist-packages") else str(folder)


def user_cache(variable: str, kind: str = "", environment: Mapping[str, str] = os.environ) -> Path:
    """The folder in which files of a kind are kept for this user: what the variable names, else one
    in $XDG_CACHE_HOME (~/.cache)."""
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environment.get(variable) or Path(base, "elastic", kind)).expanduser()


def own_folder(kind: str) -> str:
    """A folder on this machine's own disk that this user alone may enter, as code is loaded from
    it; one for all processes. Where somebody else's is in its place it is one in the user's cache,
    and where none can be made there, a new one."""
    with suppress(OSError):
        return _owned(Path(tempfile.gettempdir(), f"elastic-{kind}-{os.getuid()}"))
    with suppress(OSError, RuntimeError):  # RuntimeError: a user without a home folder
        return _owned(user_cache("", kind))
    return tempfile.mkdtemp(prefix=f"elastic-{kind}-")


def _owned(folder: Path) -> str:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_own(folder)
    return str(folder)


def check_own(folder: Path) -> None:
    """Raises PermissionError where others may enter it or it is a link; OSError."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "it is not a folder of this user alone", str(folder))


@cache
def version_of(package: str) -> str:
    """Of what is installed; '' = nothing by that name is. The file system is asked once."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except (metadata.PackageNotFoundError, ValueError):  # ValueError: it is no package's name
        return ""


def versions() -> dict[str, str]:
    """Builds of torch for CPU and for CUDA count as one."""
    found = {"elastic": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    if torch := version_of("torch"):  # the driver's machine may do without
        found["torch"] = torch.partition("+")[0]
    return found
