"""The exception tree.

    ElasticError
    ├── SpecError        the user's input is wrong (exit code 2)
    │   ├── StorageRefused   storage says no: permission, credentials, bucket, region (also an
    │   │                    OSError)
    │   └── RunDone          the run of that name has finished all of its steps (exit code 0)
    ├── StorageFailed    storage is out of reach, after all retries: run it again (exit code 4; also
                         an OSError)
    │   ├── StorageDamaged   it answers with other bytes than were written (exit code 1)
    │   └── StorageFull      nothing more can be written there (exit code 1)
    ├── LostContact      the run continues without this driver, or can: run it again (exit code 4)
    │   └── DriverCrashed    a fault has ended the driver, and not its run; the traceback says which
    ├── CloudFailed      a cloud's API does not answer, or did not do what it was asked
    ├── InfeasiblePlan   no layout fits the nodes or their memory
    ├── NoCapacity       no pool can give what the job needs
    ├── DataUnread       a node's disk or network did not give the data; read again, there or on
                         another node (also an OSError)
    ├── StateLost        no copy of some part of the training state is left
    ├── PeerGarbled      a rank has sent what no rank sends; the ranks meet anew (also a
                         ConnectionError)
    ├── NodeMemoryFull   a node has no memory for what stands before a script's loop; tried again,
                         there or on another node
    ├── ProgramError     the user's program raised; never retried
    │   └── NoHandler        a script set a handler of a signal (also a ValueError)
    └── InternalError    a fault of this package
        └── JournalDamaged   a journal is not as it was written (exit code 2)

The loss of a node is an event, never an exception. Every message says what happened, with the
numbers, and the next step. All of them take one string and are picklable.
"""

import difflib
import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from elastic.text import one_line
from elastic.user_frames import plainly

Made = TypeVar("Made")
LINE_MOST = 4000  # characters of an error on a terminal
ALIKE = 0.66  # of two names: less, and one was hardly meant by the other


class ElasticError(Exception):
    """Root of the tree; `exit_code` is what the command line returns for it."""

    exit_code = 1


class SpecError(ElasticError):
    """The user's input is wrong: the message says where, what, and what would be right."""

    exit_code = 2


class StorageRefused(SpecError, OSError):
    """Storage says no: permission, credentials, bucket or region. Asking again would not help."""


class RunDone(SpecError):
    """The run of that name has finished all of its steps. For the command line that is what was
    asked for: what starts it again (--supervise, `backoffLimit` of a RayJob) is done as well."""

    exit_code = 0

    def __init__(self, message: str, run: str = "", steps: int = 0) -> None:
        super().__init__(message)
        self.run, self.steps = run, steps


class StorageFailed(ElasticError, OSError):
    """Storage did not answer, or not rightly, however often it was asked. To be run again."""

    exit_code = 4


class StorageDamaged(StorageFailed):
    """Storage answers with other bytes than were written, however often it is asked."""

    exit_code = 1


class StorageFull(StorageFailed):
    """The disk or the quota is full: somebody has to make room."""

    exit_code = 1


class LostContact(ElasticError):
    """This driver has lost its run: another one drives it, the Ray cluster under it is gone, or its
    storage was out of reach to the end. To be run again."""

    exit_code = 4


class DriverCrashed(LostContact):
    """A fault that nobody thought of, which is its cause, has ended this driver and not its run:
    the next driver resumes it."""


class Interrupted(SystemExit):
    """A signal has asked this process to end: before the loop of a run heard of it whatever was
    started is taken down; out of `fit()` and `elastic.run` the run is saved. The exit code is 128 +
    its number, as a shell has it."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


FULL = (errno.ENOSPC, errno.EDQUOT)
# of a file system: settings, which asking again does not change
REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS)
# of a dataset: its own, of what it asks for, which no other node would be given either
OF_DATASETS = (
    errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
    errno.EINVAL, errno.EBADF, errno.EMFILE, errno.ENAMETOOLONG,
)  # fmt: skip


def is_of_node(error: BaseException) -> bool:
    """Does a system call report it of a node's disk or network, rather than of what was asked for?
    Errors without a number are of libraries, which have read what they cannot use."""
    return isinstance(error, OSError) and error.errno not in (None, *OF_DATASETS)


def unwritten(trouble: BaseException, text: str) -> ElasticError:
    """What a driver ends with that could not write what it owes: a full disk is the user's to mend,
    the rest passes."""
    return (StorageFull if getattr(trouble, "errno", None) in FULL else LostContact)(
        f"{text}: {trouble}"
    )


class CloudFailed(ElasticError):
    """A cloud's API does not answer, or did not do what it was asked."""


class InfeasiblePlan(ElasticError):
    """No layout fits the nodes that there are."""

    exit_code = 2


class NoCapacity(ElasticError):
    """No pool can give the nodes that the job needs."""


class StateLost(ElasticError):
    """Some part of the training state has no holder left, neither in memory nor in storage."""


class DataUnread(ElasticError, OSError):
    """The disk or the network of a node did not give what the dataset reads: to be read again,
    there or on another node."""


class PeerGarbled(ElasticError, ConnectionError):
    """A rank has sent what no rank of this run sends: its memory is damaged, or it is a stranger.
    The generation is aborted as after any fault of its connections, and the next one meets anew."""


class ProgramError(ElasticError):
    """The user's program raised or asked for what cannot be done; the run stops at once."""


class NoHandler(ProgramError, ValueError):
    """A script sets a handler of a signal. A script that is a thread of its process gets a
    ValueError of Python's there, which it may catch."""


class NodeMemoryFull(ElasticError):
    """A script has no memory before its loop, on a node where others may have taken it: to be tried
    again, there or on another node."""


# what is wrong is not this package's: the line says all
OF_ITS_USER = (
    SpecError, ProgramError, InfeasiblePlan, NoCapacity, StateLost, StorageFailed, LostContact,
)  # fmt: skip


class InternalError(ElasticError):
    """A promise of this package is broken; the journal of the run is the bug report."""


class JournalDamaged(InternalError):
    """A journal is not as it was written. The run's checkpoints are whole: it resumes from the
    newest (`--from-checkpoint`)."""

    exit_code = 2


# ------------------------------------------------------------------------ names that are misspelled


def alike(name: str, known: Iterable[str], n: int = 1, *, least: float = 0.6) -> list[str]:
    """The known names that are most like one, at most `n`, the nearest first. `least`: 1 = the
    same."""
    return difflib.get_close_matches(name, list(known), n=n, cutoff=least)


def meant(names: Sequence[str]) -> str:
    return f"did you mean {' or '.join(names)}?"


def nearest(name: str, names: Iterable[str], called: str) -> str:
    """How a message about an unknown name ends; `called`: what the names are."""
    known = list(names)
    words = sorted(name.split("_"))
    found = [one for one in known if name in one.split("_") or sorted(one.split("_")) == words]
    found = found or alike(name, known, least=ALIKE)
    near = meant([f"'{one}'" for one in found])
    return f"; {near}" if found else f"; {called} are {', '.join(known)}"


def in_one_line(error: BaseException) -> str:
    """What it says, for a terminal: what a file or a stranger has put into it moves no cursor and
    fills no screen."""
    return one_line(str(error), LINE_MOST)


def unknown_keyword(where: str, name: str, names: Iterable[str]) -> str:
    return f"{where}({name}=...): unknown keyword '{name}'{nearest(name, names, 'keywords')}"


def known_keywords(
    where: str, same: Mapping[str, str] = {}, *, instead: Mapping[str, str] = {}
) -> Callable[[type[Made]], type[Made]]:
    """Decorates what users make by keywords: one that is unknown is a SpecError with the nearest
    name, not a TypeError without. `same`: another's names -> ours; `instead`: names that mean
    nothing here -> what to write."""

    def decorated(kind: type[Made]) -> type[Made]:
        make = kind.__init__
        names = [name for name in signature(make).parameters if name != "self"]

        @wraps(make)
        def checked(self: Any, *args: Any, **given: Any) -> None:
            given = {same.get(name, name): value for name, value in given.items()}
            with plainly(SpecError):
                for name in given:
                    if name in instead:
                        raise SpecError(f"{where}({name}=...): {instead[name]}")
                    if name not in names:
                        raise SpecError(unknown_keyword(where, name, names))
                make(self, *args, **given)

        kind.__init__ = checked  # type: ignore[method-assign]
        return kind

    return decorated
