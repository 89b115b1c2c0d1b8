"""One command in a process of its own, with what it wrote; it ends with its time, and with this
process."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.certify.tasks import Failed, Limit
from elastic.cluster.ray.processes import end_tree
from elastic.scenarios.watched_run import environment_of, in_short
from elastic.worker.process.environment import die_with_parent

END_S = 10.0


@dataclass(frozen=True)
class Setting:
    """Where it runs; `environment`: over what this process has."""

    folder: Path
    environment: Mapping[str, str]


def run(words: Sequence[str], setting: Setting, limit: Limit, *, what: str) -> str:
    """Its output and its errors. Raises Failed with the end of them where its exit code is not 0,
    OutOfTime."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            list(words), cwd=setting.folder, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, text=True, env=environment_of(setting.environment),
            start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        try:
            while process.poll() is None:
                limit.look(what)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                end_tree(process.pid)
                process.wait(END_S)
        out.seek(0)
        text = out.read()
    if process.returncode:
        raise Failed(f"{what} failed: {in_short(text)}")
    return text
