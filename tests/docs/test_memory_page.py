"""docs/memory.md: its command runs, its keys are those of a job, its table of collectives is tested
in test_zero_stages.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import ROOT

from elastic.config.job import JobSpec
from elastic.types import LAYOUT_OPTIONS

PAGE = (ROOT / "docs" / "memory.md").read_text()


def test_the_table_names_keys_of_a_job_and_which_a_layout_may_say() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (layout)? ?\|", PAGE, re.MULTILINE)
    assert len(rows) == 10
    assert {key for key, _ in rows} <= set(JobSpec.model_fields)
    assert {key for key, layout in rows if layout} == set(LAYOUT_OPTIONS) & {key for key, _ in rows}


# such a command: tests/worker/standalone/test_standalone_run.py; its layout's options: test_zero_stages.py
@pytest.mark.whole
def test_the_command_runs(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        f"name: page\nprogram: program.py\nsteps: 3\nglobal_batch: 12\nstorage: {tmp_path}/runs\n"
    )
    (tmp_path / "program.py").write_text((ROOT / "tests" / "programs" / "tiny.py").read_text())
    command = re.findall(r"^```sh\n(.*?)\n```", PAGE, re.MULTILINE | re.DOTALL)[0].split()
    assert command[0] == "torchrun"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1:]],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    last = json.loads(done.stdout.strip().splitlines()[-1])
    assert (last["outcome"], last["steps"]) == ("succeeded", 3)
    assert (
        last["layout"]
        == "dp_shard=2,microbatch_size=2,zero_stage=2,activation_checkpointing=selective"
    )
