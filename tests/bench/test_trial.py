"""A bench that is killed, as by Ctrl-C in the test that runs it, takes its run with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import until

from elastic.cluster.ray import processes

HERE = Path(__file__).resolve().parent
BENCH = """
import sys, time
from pathlib import Path
from trial import Clock, Trial
folder = Path(sys.argv[1])
sys.executable = str(folder / "run")
trial = Trial(folder, {}, Clock(60.0))
trial.start()
print(trial.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.e2e
def test_no_run_outlives_its_bench(tmp_path: Path) -> None:
    run = tmp_path / "run"  # in the place of the Python that runs `elastic run`
    run.write_text("#!/bin/sh\nexec sleep 600\n")
    run.chmod(0o755)
    bench = subprocess.Popen(
        [sys.executable, "-c", BENCH, str(tmp_path)], cwd=HERE, stdout=subprocess.PIPE, text=True
    )
    assert bench.stdout is not None
    try:
        pid = int(bench.stdout.readline())
        assert processes.started(pid) is not None
    finally:
        bench.kill()
        bench.communicate()
    try:
        until(lambda: processes.started(pid) is None, "the run to end with its bench", 10.0)
    finally:
        processes.send([pid])
