"""What a driver does beside a script that is restarted."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic.api import Options
from elastic.api.running.restarted_script import FILLED, _ScriptRun
from elastic.api.running.run import JobRun
from elastic.cluster.ray_train.script_checkpoints import MARKER, REPORTED
from elastic.config.job import job_of


def test_it_keeps_the_newest_checkpoints_that_the_script_has_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobRun, "_watch", lambda run, stack, pages: None)
    file = tmp_path / "train.py"
    file.write_text("")
    spec = job_of({**FILLED, "storage": str(tmp_path / "runs")}, file)
    run = _ScriptRun(file, (), spec, options=Options(run_name="r"))
    with ExitStack() as stack, ExitStack() as pages:
        run._watch(stack, pages)
        for n in (1, 2, 3):
            run.storage.put(f"{REPORTED}/00000001-{n:08d}{MARKER}", b'{"folder": "f"}')
            run.storage.put(f"{REPORTED}/00000001-{n:08d}/f/state", b"")
    assert len(run.storage.list(f"{REPORTED}/")) == 4
