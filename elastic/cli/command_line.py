"""`elastic`: main(), and all commands in the order of --help. What a command does not need is not
imported for it; neither torch nor ray is for any before it begins."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib import import_module

from elastic import __version__
from elastic.cli.parser import Parser, carry_out, verb

EPILOG = """exit codes: 0 done, 1 the run failed, 2 the input is wrong (one line says where),
3 stopped by a person or budget, 4 the driver has lost its run (storage out of reach, its Ray
cluster gone, or another one drives it): run it again, 130 or 143 a signal ended it before
the run began

JOB is a folder with job.yaml and program.py; RUN is a run name, its folder or its URI;
or how its name begins, or the name of a job: its newest run.
Runs are stored in ./elastic_runs (under `ray job submit` in ~/elastic_runs), unless the job's
`storage`, --storage or $ELASTIC_STORAGE says otherwise."""

GROUPS = {  # file of elastic.cli -> its verbs
    "init_command": ("init",),
    "run_command": ("run",),
    "plan_command": ("plan",),
    "simulate_command": ("simulate",),
    "read_commands": ("ls", "status", "ledger", "report", "replay", "logs", "doctor", "dashboard"),
    "why_command": ("why",),
    "order_commands": ("stop", "drill"),
    "checkpoint_commands": ("checkpoint",),
    "cluster_commands": ("prices", "cluster"),
    "profile_command": ("profile",),
}


# transformers imports torchao where it is installed, which warns of each file that is not for this
# build of torch; workers, where it matters, have it in their logs
OF_LIBRARIES = ("torchao", "torch.utils._pytree")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    for name in OF_LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    words = list(sys.argv[1:] if argv is None else argv)
    # what follows belongs to the user's script
    cut = words.index("--") if "--" in words else len(words)
    return carry_out(
        parser(words[:1]).parse_args(
            words[:cut], argparse.Namespace(args=words[cut + 1 :], words=words)
        )
    )


def parser(wanted: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Of the first word where that is a verb, else of all verbs."""
    top = Parser(
        prog="elastic",
        description="Elastic training on Ray: the run keeps going while nodes join and leave.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"elastic {__version__}")
    verbs = top.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )
    chosen = [name for name, those in GROUPS.items() if {*those} & {*wanted}]
    for name in chosen or ([] if [*wanted] == ["certify"] else GROUPS):
        import_module(f"elastic.cli.{name}").add(verbs)
    if not chosen:
        from elastic.certify import certify_command as certify

        certify.add_arguments(verb(verbs, "certify", certify.run, about=certify.ABOUT))
    return top
