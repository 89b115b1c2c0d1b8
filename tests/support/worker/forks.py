"""Processes that begin as forks of one that has torch imported: a new one stands in
milliseconds."""

from __future__ import annotations

import io
import sys
import traceback
from contextlib import redirect_stdout
from multiprocessing import get_context
from multiprocessing.connection import Connection

FORKS = get_context("forkserver")
# a name that stands on no path of pytest's: Python 3.11 does not hand sys.path on to the server,
# and says nothing
FORKS.set_forkserver_preload(["elastic.worker.session.session"])
WITHIN_S = 300.0


def printed(code: str, *words: str) -> str:
    """What the code prints in a process of its own, as `python -c CODE WORDS` would."""
    here, there = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_run, args=(there, code, words), daemon=True)
    process.start()
    there.close()
    try:
        assert here.poll(WITHIN_S), f"nothing within {WITHIN_S:g} s"
        out, error = here.recv()
    finally:
        process.kill()
        process.join()
    assert not error, error
    return str(out)


def _run(pipe: Connection, code: str, words: tuple[str, ...]) -> None:
    sys.argv, out, error = ["-c", *words], io.StringIO(), ""
    try:
        with redirect_stdout(out):
            exec(compile(code, "<a test>", "exec"), {"__name__": "__main__"})
    except Exception:  # noqa: BLE001 - the test shows it
        error = traceback.format_exc()
    pipe.send((out.getvalue(), error))
