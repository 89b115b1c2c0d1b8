"""`elastic`: main(), and all commands in the order of --help. Importing this module imports neither
torch nor ray."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from elastic import __version__
from elastic.certify import certify_command as certify
from elastic.cli import (
    checkpoint_commands,
    cluster_commands,
    init_command,
    order_commands,
    plan_command,
    profile_command,
    read_commands,
    run_command,
    simulate_command,
    why_command,
)
from elastic.cli.parser import Parser, carry_out, verb

EPILOG = """exit codes: 0 done, 1 the run failed, 2 the input is wrong (one line says where),
3 stopped by a person or budget, 4 the driver has lost its run (storage out of reach, its Ray
cluster gone, or another one drives it): run it again, 130 or 143 a signal ended it before
the run began

JOB is a folder with job.yaml and program.py; RUN is a run name, its folder or its URI;
or how its name begins, or the name of a job: its newest run.
Runs are stored in ./elastic_runs, unless the job's `storage`, --storage or $ELASTIC_STORAGE says
otherwise."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # what follows belongs to the user's script
    cut = words.index("--") if "--" in words else len(words)
    return carry_out(
        parser().parse_args(words[:cut], argparse.Namespace(args=words[cut + 1 :], words=words))
    )


def parser() -> argparse.ArgumentParser:
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
    for group in (
        init_command,
        run_command,
        plan_command,
        simulate_command,
        read_commands,
        why_command,
        order_commands,
        checkpoint_commands,
        cluster_commands,
        profile_command,
    ):
        group.add(verbs)
    certify.add_arguments(verb(verbs, "certify", certify.run, about=certify.ABOUT))
    return top
