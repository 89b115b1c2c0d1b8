"""`torchrun ... -m elastic.worker JOB`: a job at a fixed layout, without Ray. Rank 0 drives it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import NoReturn

from elastic.worker.process.environment import settle, start_again_with_hashes, tell_launcher

EXIT = {"succeeded": 0, "failed": 1, "stopped": 3}
EPILOG = """exit codes: 0 done, 1 the run failed, 2 the input is wrong (one line says where),
3 stopped by a signal, state saved, 4 another process has taken the run over

Started alone it is one process; started by torchrun, one rank of WORLD_SIZE. SIGTERM saves at the
next step and leaves."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="python -m elastic.worker",
        description="Train a job at a fixed layout on the ranks that torchrun has started.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("job", metavar="JOB", help="folder with job.yaml and program.py")
    made.add_argument(
        "--layout", help="such as dp_shard=2,tp=2; default: the job's, else dp_shard over all ranks"
    )
    made.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="over job.yaml; repeatable",
    )
    made.add_argument(
        "--storage",
        metavar="URI",
        help="folder that holds the runs (default: $ELASTIC_STORAGE or ./elastic_runs)",
    )
    made.add_argument(
        "--run-name", metavar="NAME", help="default: the job's name; a known name is resumed"
    )
    made.add_argument(
        "--allow-changed",
        action="store_true",
        help="resume although program, data or mathematics have changed",
    )
    made.add_argument(
        "--from-checkpoint",
        action="store_true",
        help="of a run whose journal is damaged: set that aside, resume from the newest checkpoint",
    )
    made.add_argument(
        "--every", metavar="N", type=int, default=10, help="a line per N steps (default: 10)"
    )
    made.add_argument("--json", action="store_true", help="end with one line of JSON")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    given = parser().parse_args(argv)
    settle()  # before torch is imported
    from elastic.errors import ElasticError

    asked = SimpleQueue[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.put(number))
    try:
        return _run(given, asked)
    except ElasticError as error:
        if type(error).__name__ != "StartRefused":  # rank 0 has said it
            print(f"elastic.worker: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        tell_launcher(f"elastic.worker: {error}")
        return error.exit_code


def _run(given: argparse.Namespace, asked: SimpleQueue[int]) -> int:
    from elastic.config.job import load_job
    from elastic.errors import SpecError
    from elastic.types.events import SIGNAL
    from elastic.worker.standalone.progress_lines import Lines
    from elastic.worker.standalone.standalone_run import (
        StandaloneOptions,
        StandaloneRun,
        StartRefused,
    )

    try:
        spec = load_job(given.job, given.overrides)
    except SpecError as error:  # the same on every rank
        raise error if os.environ.get("RANK", "0") == "0" else StartRefused(str(error)) from error
    lines = Lines(
        spec.steps, max(1, given.every), sys.stderr if given.json else sys.stdout, spec.global_batch
    )
    wishes = StandaloneOptions(
        given.layout, given.run_name, given.storage, given.allow_changed, given.from_checkpoint,
        lines.hear,
    )  # fmt: skip
    alone = StandaloneRun(spec, wishes)
    stopped = threading.Event()

    def wait() -> None:
        name = signal.Signals(asked.get()).name
        if not stopped.is_set():
            alone.stop(f"{SIGNAL}{name}")

    threading.Thread(target=wait, name="signals", daemon=True).start()
    # not in the main thread: torchrun and the terminal both send a signal, which is one wish
    ended = ThreadPoolExecutor(1, "run").submit(alone.to_the_end).result()
    stopped.set()
    if alone.leads or (ended.outcome == "failed" and not alone.peer_is_gone):
        where = "" if alone.leads else f" (rank {alone.me.rank})"
        lines.say(f"{ended.outcome}{where}: {ended.reason}")
    if ended.outcome == "failed" and not alone.peer_is_gone:
        tell_launcher(f"elastic.worker: {ended.reason}")
    if alone.leads and given.json:
        print(json.dumps(ended.summary()), flush=True)
    return EXIT[ended.outcome]


if __name__ == "__main__":
    start_again_with_hashes()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing waits for threads of a group that is gone
