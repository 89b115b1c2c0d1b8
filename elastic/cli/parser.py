"""What all commands share: --json and --storage, exit codes, how a RUN is named, errors in one
line, Ctrl-C."""

from __future__ import annotations

import argparse
import errno
import json
import math
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from elastic.errors import DriverCrashed, ElasticError, Interrupted, SpecError, alike, in_one_line
from elastic.ledger.run_folder import RunFolder
from elastic.observe import find_runs
from elastic.text import printable

if TYPE_CHECKING:
    from rich.console import Console

EXIT = {"succeeded": 0, "failed": 1, "stopped": 3}
RUN = "run name (or how it begins, or the job's name: its newest run), its folder or its URI"

Handler = Callable[[argparse.Namespace], int]  # what was asked -> the exit code


ALIKE = 0.75  # of a name that is meant
# options of several verbs that ask for the same
SAME = (("--deadline", "--within"), ("--name", "--run-name"), ("--pools", "--cluster"))


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """An unknown option is answered by the verb that it was given to, with what was meant."""
        given, rest = self.parse_known_args(args, namespace)
        if rest:
            made: argparse.ArgumentParser = getattr(given, "verb", self)
            text = f"unrecognized arguments: {' '.join(rest)}"
            made.error(f"{text}{_meant(rest, made.format_usage())}")
        return given


def _meant(rest: Sequence[str], usage: str) -> str:
    """Of the options in a verb's usage, or of the keys of a job where it takes these."""
    options = re.findall(r"--[a-z-]+", usage)
    name, _, value = rest[0].partition("=")
    if not name.startswith("--"):
        return ""
    keys = _keys() if "--set" in options else []
    word = name[2:].replace("-", "_")
    of_job = [key for key in keys if key == word or key.startswith(f"{word}_")]
    same = [other for names in SAME if name in names for other in names if other in options]
    if found := same or ([] if of_job else alike(name, options, least=ALIKE)):
        return f"; did you mean {found[0]}?"
    if not (of_job := of_job or alike(word, keys, least=ALIKE)):
        return ""
    value = value or next((more for more in rest[1:] if not more.startswith("--")), "VALUE")
    return f"; a key of the job: --set {of_job[0]}={value}"


def _keys() -> list[str]:
    from elastic.config.job import JobSpec
    from elastic.config.key_names import DOCUMENTED

    return [DOCUMENTED.get(key, key) for key in JobSpec.model_fields]


def verb(verbs: Any, name: str, handler: Handler, *, about: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = verbs.add_parser(
        name, help=about, description=about[:1].upper() + about[1:] + "."
    )
    made.set_defaults(handler=handler, verb=made)
    option(made, "--json", "print JSON")
    option(
        made,
        "--storage URI",
        "folder that holds the runs (default: $ELASTIC_STORAGE or ./elastic_runs)",
    )
    return made


def option(made: Any, usage: str, help_: str, **more: Any) -> None:
    """`usage`: as `--cluster FILE`, `--json` (a flag) or `JOB` (no option, but an argument).
    `more`: for argparse."""
    names, metavar = usage.split(), None
    if not names[-1].startswith("-"):
        metavar = names.pop()
    elif not more:
        more = {"action": "store_true"}
    made.add_argument(
        *(names or [usage.lower()]), help=help_, **({"metavar": metavar} if metavar else {}), **more
    )


def run_verb(
    verbs: Any, name: str, handler: Handler, *, about: str, optional: bool = False
) -> argparse.ArgumentParser:
    """A verb about one RUN. `optional`: the handler finds out which one is meant."""
    made = verb(verbs, name, handler, about=about)
    option(made, "RUN", RUN, nargs="?" if optional else None)
    return made


def verb_group(verbs: Any, name: str, about: str) -> Any:
    """Verbs of two words, as `checkpoint ls`: the second ones are added to what this returns."""
    made = verbs.add_parser(name, help=about, description=about.capitalize() + ".")
    return made.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )


def add_job_or_script(made: Any) -> None:
    option(made, "JOB", "folder with job.yaml and program.py", nargs="?")
    option(
        made,
        "--script FILE",
        "or a training script that enters elastic.loop; its arguments come last, after --",
    )


def add_overrides(made: Any) -> None:
    option(
        made,
        "--set KEY=VALUE",
        "over job.yaml; repeatable",
        action="append",
        default=[],
        dest="overrides",
    )


def overrides(given: argparse.Namespace) -> tuple[str, ...]:
    """What --set and --storage say over job.yaml."""
    return (*given.overrides, *([f"storage={given.storage}"] if given.storage else []))


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Reads such a number."""
    span = f"of at least {least}" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        value = int(text) if text.isdigit() else -1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"'{text}' must be a whole number {span}")
        return value

    return read


def number(right: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """Reads a number that `holds`; what would be `right` is said of another."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"'{text}' must be {right}")
        return value

    return read


def opened(given: argparse.Namespace) -> RunFolder:
    """The run that RUN names."""
    return find_runs.open_run(given.run, given.storage)


def show(
    given: argparse.Namespace,
    data: Any,
    lines: Sequence[str],
    *,
    safe: Callable[[str], str] = printable,
) -> None:
    """One JSON document, or lines; what they tell of a run, anybody may have written who may write
    its storage. `safe`: makes a text one that commands no terminal."""
    print(json.dumps(data, default=str) if given.json else safe("\n".join(lines)))


def drawn_on() -> Console | None:
    """The terminal that tables can be drawn on; None: lines are what is wanted, or all that is
    shown."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    console = Console(highlight=False)
    drawn = not console.is_dumb_terminal and console.encoding.startswith("utf")
    return console if drawn else None


def carry_out(given: argparse.Namespace) -> int:
    """The exit code of the verb that was given. An error of ours is one line."""
    try:
        if given.args and getattr(given, "script", None) is None:
            raise SpecError(
                f"'{given.args[0]}' after -- is an argument of a script; name that by --script "
                "FILE before the --"
            )
        return int(given.handler(given))
    except ElasticError as error:
        if isinstance(error, DriverCrashed):
            traceback.print_exception(error.__cause__)
        print(f"elastic: {in_one_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("elastic: interrupted", file=sys.stderr)
        return EXIT["stopped"]
    except Interrupted as error:
        name = signal.Signals(error.number).name
        print(f"elastic: ended by {name}; nothing that it had started is left", file=sys.stderr)
        return 128 + error.number
    except BrokenPipeError:
        sys.stderr.close()  # the reader, as in `| head`, has had enough
        return 0
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"elastic: {in_one_line(error)}", file=sys.stderr)
        return SpecError.exit_code
