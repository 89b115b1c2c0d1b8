"""All that one GPU can show, in one command of at most 540 s, without network or Ray:
`python3 tests/gpu/one_shot.py --out FOLDER`.

Each part runs in a process of its own with its own bound, and prints a line of JSON for each number
as it comes: {"part", "name", "value", "unit", "expected", "ok"}. What is cut has said what it knew.
`--cpu`: a dry run of the same code at tiny sizes with what stands in for NCCL; its numbers mean
nothing. docs/gpu.md says what each part shows.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
for place in (HERE.parent, HERE.parents[1], HERE):  # tests, the repository, this folder
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

from elastic.worker.process import allocator, environment  # noqa: E402 - neither imports torch

SECONDS = 540.0
LEAST_S = 8.0  # a part is not begun with less
LOG_MOST = 8 << 20  # bytes of what the parts print besides


@dataclass(frozen=True)
class Part:
    """`most_s`: its bound; 0 = all that is left."""

    name: str
    module: str
    most_s: float
    what: str


PARTS = (  # what is cheap and tells most comes first
    Part(
        "facts",
        "parts_train",
        40,
        "versions, imports, allocator settings in force, three steps at dp_shard=1",
    ),
    Part(
        "nccl",
        "parts_nccl",
        100,
        "abort of world and of groups, SIGKILL of a peer, a first batch by some, abort in set-up",
    ),
    Part(
        "faults",
        "parts_faults",
        90,
        "a CUDA error that stays in one of two sessions; a kernel that does not end, there or back",
    ),
    Part(
        "step",
        "parts_train",
        100,
        "1.2 B bf16: plain FSDP2 beside elastic's step, synchronizations, host copies",
    ),
    Part(
        "memory", "parts_memory", 70, "pinned memory, copies to the host, memory free after SIGKILL"
    ),
    Part(
        "generations",
        "parts_nccl",
        60,
        "30 x set-up and take-down of four ranks' groups: what leaks",
    ),
    Part(
        "live",
        "parts_train",
        60,
        "50 live generations in one process: what leaks; out of memory, then a smaller batch",
    ),
    Part("digest", "parts_memory", 30, "digests by block, sums and packs of moves"),
    Part("compile", "parts_train", 60, "a block compiled cold, warm, after reset"),
    Part("certify", "parts_faults", 0, "what certify says of one GPU, with the time that is left"),
)


class Rows:
    """To the standard output and to FOLDER/rows.jsonl."""

    def __init__(self, out: Path | None) -> None:
        self.file: TextIO | None = (out / "rows.jsonl").open("a") if out is not None else None
        self.wrong = self.broken = 0

    def line(self, text: str) -> None:
        row = json.loads(text)
        self.wrong += row["ok"] is False
        self.broken += row["name"] in ("error", "cut")
        for stream in (sys.stdout, self.file):
            if stream is not None:
                print(text, file=stream, flush=True)


def run(part: Part, seconds: float, cpu: bool, rows: Rows, log: TextIO) -> None:
    """One part, until it has ended or its seconds have."""
    from one_shot_rows import Tell, end, over, start

    reads, writes = os.pipe()
    tell = Tell(part.name, writes, cpu)

    def work() -> None:
        os.close(reads)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        getattr(import_module(part.module), part.name)(tell, cpu, seconds)

    began, rest = time.monotonic(), b""
    pid = start(work, tell)
    try:
        while True:
            ended = over(pid)
            while select.select([reads], [], [], 0.0 if ended else 0.05)[0]:
                *lines, rest = (rest + os.read(reads, 1 << 16)).split(b"\n")
                for text in lines:
                    rows.line(text.decode())
            if ended:
                break
            if time.monotonic() - began > seconds:
                end(pid)
                tell("cut", f"after {seconds:.0f} s")
                pid = -1
                break
    finally:
        if pid > 0 and not _gone(pid):
            end(pid)
    tell("seconds", round(time.monotonic() - began, 1))
    while select.select([reads], [], [], 0.0)[0]:
        *lines, rest = (rest + os.read(reads, 1 << 16)).split(b"\n")
        for text in lines:
            rows.line(text.decode())
    os.close(reads)
    os.close(writes)


def _gone(pid: int) -> bool:
    with suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return True


def settle() -> None:
    """Before torch is imported: the environment that every worker has."""
    environment.settle()
    for name, value in allocator.cuda_environment().items():
        os.environ.setdefault(name, value)
    for name in ("torch", "elastic.worker.process_groups.groups", "elastic.worker.session.session"):
        with suppress(ImportError):  # said by the part `facts`; no process that forks may use CUDA
            import_module(name)


def has_gpu() -> bool:
    """Asked by a fork: this process must not use CUDA."""
    pid = os.fork()
    if not pid:
        torch: Any = import_module("torch")
        os._exit(0 if torch.cuda.is_available() else 1)
    return os.waitpid(pid, 0)[1] == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        help="rows.jsonl and log.txt, beside the standard output",
    )
    parser.add_argument("--only", metavar="A,B", default="", help="only these parts")
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=float,
        default=SECONDS,
        help="of all parts together (default: 540)",
    )
    parser.add_argument("--cpu", action="store_true", help="a dry run without a GPU")
    parser.add_argument("--list", action="store_true", help="the parts and their bounds")
    given: Any = parser.parse_args()
    if given.list:
        for part in PARTS:
            print(
                f"{part.name:12} {f'{part.most_s:g} s' if part.most_s else 'the rest':>9}  "
                f"{part.what}"
            )
        return 0
    only = [name for name in given.only.split(",") if name]
    unknown = set(only) - {part.name for part in PARTS}
    if unknown or given.seconds <= 0:
        wrong = (
            f"--only: no part {', '.join(sorted(unknown))}"
            if unknown
            else f"--seconds {given.seconds:g}: more than 0"
        )
        print(f"one_shot: {wrong}; see --list", file=sys.stderr)
        return 2
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    ends_s, rows = time.monotonic() + given.seconds, Rows(given.out)
    settle()
    if not given.cpu and not has_gpu():
        print("one_shot: torch sees no GPU here; --cpu is a dry run without one", file=sys.stderr)
        return 2
    with (given.out / "log.txt" if given.out is not None else Path(os.devnull)).open("a") as log:
        for part in PARTS:
            left_s = ends_s - time.monotonic()
            if only and part.name not in only:
                continue
            if left_s < LEAST_S:
                row = {
                    "part": part.name,
                    "name": "skipped",
                    "value": "skipped",
                    "unit": "",
                    "expected": "no time",
                    "ok": None,
                }
                rows.line(json.dumps(row))
                continue
            run(part, min(part.most_s or left_s, left_s), given.cpu, rows, log)
    if given.out is not None and (given.out / "log.txt").stat().st_size > LOG_MOST:
        os.truncate(given.out / "log.txt", LOG_MOST)
    print(f"{rows.wrong} not as expected, {rows.broken} aborted", file=sys.stderr)
    return int(bool(rows.broken))


if __name__ == "__main__":
    sys.exit(main())
