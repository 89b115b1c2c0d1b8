"""`elastic init`: a job folder and a cluster file to begin with."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from elastic.api.init_job import KINDS, PLACES, NewJob, asked_for, init
from elastic.cli.parser import option, show, verb

ABOUT = "write a job folder and a cluster file that work as they are, to begin with"
EPILOG = """examples:
  elastic init                                       # asks five questions
  elastic init my-job --kind lora --on aws           # asks for nothing that is given
  elastic init my-job --kind script --on laptop --yes

Without a terminal nothing is asked: what is not given is as usual (module, laptop)."""


def add(verbs: Any) -> None:
    made = verb(verbs, "init", _init, about=ABOUT)
    made.epilog, made.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    option(made, "FOLDER", "of the job (default: job)", nargs="?")
    option(made, "--kind", "what is trained (default: module)", choices=tuple(KINDS))
    option(made, "--on", "where it runs (default: laptop)", choices=tuple(PLACES), dest="place")
    option(made, "--cluster FILE", "the cluster file (default: cluster.yaml beside FOLDER)")
    option(made, "--yes", "ask nothing")


def _init(given: argparse.Namespace) -> int:
    fields = ("folder", "kind", "place", "cluster", "storage")
    said = {name: value for name in fields if (value := getattr(given, name)) is not None}
    asked = NewJob(**{"folder": "job", **said})
    if not (given.yes or given.json) and sys.stdin.isatty() and sys.stdout.isatty():
        asked = asked_for(asked, _ask, frozenset(said))
    written = init(asked)
    paths = [str(path) for path in written.files]
    width = max(len(command) for command, _ in written.then[:3])
    lines = [f"wrote {', '.join(paths)}", "", "next:"]
    lines += [f"  {command:<{width}}  # {about}" for command, about in written.then]
    show(given, {"files": paths, "next": [command for command, _ in written.then]}, lines)
    return 0


def _ask(question: str, usual: str) -> str:
    return input(f"{question}{' ' if not question.endswith(chr(10)) else ''}[{usual}] ")
