"""One command in a process of its own, with what it wrote; it ends with its time, and with this
process."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.certify.tasks import Failed, Limit
from elastic.worker.process.environment import die_with_parent

# that a check sets itself
LEFT_OUT = ("RAY_ADDRESS", "ELASTIC_STORAGE", "RAY_JOB_CONFIG_JSON_ENV_VAR")
ALWAYS = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
TAIL = 1500
END_S = 10.0


@dataclass(frozen=True)
class Setting:
    """Where it runs; `environment`: over what this process has."""

    folder: Path
    environment: Mapping[str, str]


def environment_of(more: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    return {**inherited, **ALWAYS, **more}


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
            _end(process)
        out.seek(0)
        text = out.read()
    if process.returncode:
        raise Failed(f"{what} failed: {' '.join(text[-TAIL:].split())}")
    return text


def _end(process: subprocess.Popen[str]) -> None:
    """With all that it started."""
    from elastic.cluster.ray import processes

    if process.poll() is None:
        processes.end_tree(process.pid)
        process.wait(END_S)


def last_json(text: str) -> dict[str, Any]:
    """The last line that is a JSON object. Raises Failed."""
    found = [line for line in text.splitlines() if line.startswith("{")]
    if not found:
        raise Failed(f"it printed no result: {' '.join(text[-TAIL:].split())}")
    return dict(json.loads(found[-1]))
