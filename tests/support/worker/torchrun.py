"""Jobs that torchrun starts, as a user does."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import yaml
from support.child import child
from support.places import PROGRAMS, ROOT

from elastic.cli.command_line import main

TINY, SLOW = PROGRAMS / "tiny.py", PROGRAMS / "tiny_slow.py"


def job(folder: Path, **more: Any) -> Path:
    spec = {"name": "tiny", "program": str(TINY), "steps": 12, "global_batch": 12, "seed": 3,
        "clip_grad_norm": 1.0,
            "durable_every": 4, **more}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))
    return folder


def environment(**more: str) -> dict[str, str]:
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ELASTIC_STORAGE")
    }
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }


def command(n: int, folder: Path, *more: str, torchrun: tuple[str, ...] = ()) -> list[str]:
    """`torchrun`: instead of --standalone."""
    start = ["-m", "torch.distributed.run", *(torchrun or ("--standalone",))]
    start = [*start, "--nproc-per-node", str(n)] if n > 1 or torchrun else []
    own = ["-m", "elastic.worker", str(folder), "--storage", str(folder / "runs")]
    return [sys.executable, *start, *own, "--every", "1", "--json", *more]


@contextmanager
def started(words: list[str], log: Path, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """The command, which writes all that it says to `log`; see support/child.py."""
    with log.open("w") as out:
        options = {"stdout": out, "stderr": out, "text": True, "env": environment(**environ)}
        with child(words, **options) as process:
            yield process


def run(n: int, folder: Path, *more: str, **environ: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the last line, and what was said."""
    ended = subprocess.run(
        command(n, folder, *more),
        capture_output=True,
        text=True,
        env=environment(**environ),
        timeout=3000,
    )
    lines = ended.stdout.strip().splitlines()
    return ended.returncode, json.loads(lines[-1]) if lines else {}, ended.stderr


def elastic(*words: str) -> str:
    """What `elastic WORDS` prints, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    assert code == 0, err.getvalue()
    return out.getvalue()


def losses(said: str) -> dict[int, float]:
    found = [
        line.split()
        for line in said.splitlines()
        if line.startswith("step ") and "train_loss" in line
    ]
    return {int(words[1].split("/")[0]): float(words[3]) for words in found}


def ranks_of(pid: int) -> list[int]:
    """Processes of the ranks that a torchrun has started, in their order."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if "elastic.worker" in cmdline(int(child))]


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
