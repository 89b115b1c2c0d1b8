"""`elastic` as a person starts it: in a process of its own, with a job folder and a storage folder
of its own."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.child import end
from support.places import ROOT

from elastic.cli.command_line import main

PROGRAMS = ROOT / "tests" / "programs"
LEFT_OUT = ("RAY_ADDRESS", "ELASTIC_STORAGE", "PYTHONUNBUFFERED")  # what a person's shell has not
OWN = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
JOB = {
    "steps": 12, "global_batch": 8, "seed": 1, "eval_samples": 8, "peer_every": 2,
    "durable_every": 5, "layout": {"2": "dp_shard=2", "1": "dp_shard=1"},
    "program": str(PROGRAMS / "tiny.py"), "pools": [{"name": "spot", "market_type": "spot",
    "gpus_per_node": 1, "max_nodes": 2}],
}  # fmt: skip


@dataclass
class Shell:
    """A folder with jobs and runs."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def job(self, name: str = "tiny", **changes: Any) -> str:
        """Writes a job folder; returns its path relative to `root`. A key that is None is left
        out."""
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        data = {key: value for key, value in (JOB | changes).items() if value is not None}
        (folder / "job.yaml").write_text(json.dumps(data))  # JSON is YAML
        return name

    def start(self, *words: str) -> subprocess.Popen[str]:
        """The fixture ends it where the test does not."""
        inherited = {k: v for k, v in os.environ.items() if k not in LEFT_OUT}
        process = subprocess.Popen(
            [sys.executable, "-m", "elastic", *words], cwd=self.root, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**inherited,
            **OWN, **self.environment},
        )  # fmt: skip
        self.processes.append(process)
        return process

    def end(self) -> None:
        for process in self.processes:
            end(process)

    def call(self, *words: str, timeout_s: float = 600.0) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        process = self.start(*words)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
            raise AssertionError(
                f"elastic {' '.join(words)} took more than {timeout_s} s\n{out}\n{err}"
            ) from None
        return process.returncode, out, err

    def here(self, *words: str) -> tuple[int, str, str]:
        """As `call`, but in this process, which has imported torch and Ray already: that takes a
        process of its own some four seconds of a core. For all that is neither killed nor signalled
        and is not about how a process starts or ends."""
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.chdir(self.root)
            for name in LEFT_OUT:
                patch.delenv(name, raising=False)
            for name, value in (OWN | self.environment).items():
                patch.setenv(name, value)
            code = main(words)
        return code, out.getvalue(), err.getvalue()

    def status(self, run: str) -> dict[str, Any]:
        code, out, err = self.here("status", run, "--json")
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    def files(self) -> dict[str, bytes]:
        """Everything below the runs but leases, to see that nothing is written over."""
        found = (
            p
            for p in (self.root / "elastic_runs").rglob("*")
            if p.is_file() and "lease" not in p.parts
        )
        return {str(p): p.read_bytes() for p in found}


def last_line(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


def children(marker: str) -> list[int]:
    """Processes whose command line or environment holds `marker`: what a run has left behind."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if marker.encode() in text:
            found.append(int(entry.name))
    return found
