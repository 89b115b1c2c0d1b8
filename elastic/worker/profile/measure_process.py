"""One of the processes that `measure` starts: python -m elastic.worker.profile.measure_process
FOLDER RANK.

Rank 0 is timed alone while the others wait; then all of them compute at once, as many as a node may
have; then they talk. What was found is in FOLDER/found.json. A process ends with the one that
started it: its standard input is closed then.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from elastic.types import Attention, Job, Matmul

ALONE, CROWDED, TALK = 0.3, 0.45, 0.25  # shares of the time
LEAD_S = 0.01  # from the word to begin until all begin
# in which they compute at once: so many calls, if it is not too long
WINDOW_S, WINDOW_MOST_S, CALLS = 0.25, 2.0, 4
TIMEOUT_S = 120.0
ARCHITECTURES = {  # compute capability -> as the catalog names it
    (7, 0): "Volta", (7, 5): "Turing", (8, 0): "Ampere", (8, 6): "Ampere", (8, 9): "Ada", (9,
    0): "Hopper", (10, 0): "Blackwell", (10, 3): "Blackwell", (12, 0): "Blackwell",
}  # fmt: skip


def main(folder: Path, rank: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    asked = json.loads((folder / "asked.json").read_text())
    found = _Member(folder, rank, asked).measured()
    if rank == 0:
        (folder / "found.part").write_text(json.dumps(found))
        (folder / "found.part").rename(folder / "found.json")


def _end_with_parent(folder: Path) -> None:
    os.read(0, 1)  # not sys.stdin, whose lock a process cannot end with
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


class _Member:
    def __init__(self, folder: Path, rank: int, asked: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        from elastic.worker.profile.measured_groups import Among
        from elastic.worker.profile.measured_ops import CallLimits, fitting

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as workers do
        on_gpu = asked["device"] == "cuda"
        self.device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        self.settle: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", init_method=f"file://{folder}/store",
            rank=rank, world_size=max(asked["sizes"]), timeout=timedelta(seconds=TIMEOUT_S),
        )  # fmt: skip
        self.rank, self.asked, self.limits = rank, asked, CallLimits.of(self.device)
        self.among = Among(tuple(asked["sizes"]), self.device, self.settle)
        self.dtypes: dict[str, Any] = {name: getattr(torch, name) for name in asked["dtypes"]}
        self.dtype = self.dtypes[asked["dtypes"][0]]
        self.passes = self._passes(folder)
        self.matmuls = fitting(
            [Matmul(**one) for one in asked["matmuls"]], asked["times"], self.limits
        )

    def measured(self) -> dict[str, Any]:
        alone = self._alone() if self.rank == 0 else {}
        self.among.together()
        crowded = self._crowded(CROWDED * self.asked["seconds"])
        collectives = (
            self.among.collectives(TALK * self.asked["seconds"]) if self.among.groups else []
        )
        self.among.together()
        return alone | {"crowded": crowded, "collectives": collectives} | _chip(self.device)

    # ---------------------------------------------------------------------------------- one process

    def _alone(self) -> dict[str, Any]:
        from elastic.worker.profile import measured_ops as ops
        from elastic.worker.profile.timings import medians_s

        large = Matmul(*3 * (self.limits.large,))
        products = {f"large {name}": (large, dtype) for name, dtype in self.dtypes.items()}
        products |= {f"product {i}": (one, self.dtype) for i, one in enumerate(self.matmuls)}
        calls = {name: ops.product(*of, self.device) for name, of in products.items()}
        work: dict[str, float] = {n: ops.product_flop(one) for n, (one, _) in products.items()}
        given = [Attention(**one) for one in self.asked["attentions"]]
        heaviest = max(given, key=lambda one: one.flop * one.count, default=None)
        if heaviest is not None:
            calls["attention"], work["attention"] = ops.attended(
                heaviest, self.asked["times"], self.dtype, device=self.device, limits=self.limits
            )
        calls["ordinary"], work["ordinary"] = self._ordinary()
        calls["launch"], work["launch"] = ops.small_ops(self.device), ops.SMALL_OPS
        calls["memory"], work["memory"] = ops.summed(self.device, self.limits)
        ways, n_bytes = ops.copied(self.device, self.limits)
        calls, work = calls | ways, work | dict.fromkeys(ways, n_bytes)
        began, cpu_began = time.perf_counter(), time.process_time()
        seconds = medians_s(calls, 0.8 * ALONE * self.asked["seconds"], self.settle)
        cpu_share = (time.process_time() - cpu_began) / (time.perf_counter() - began)
        rates = {name: work[name] / seconds[name] for name in calls}
        stored = self._stored(0.2 * ALONE * self.asked["seconds"])
        return self._named(rates) | {"cpu_share": cpu_share} | stored

    def _ordinary(self) -> tuple[Callable[[], object], int]:
        from elastic.worker.profile.measured_ops import ordinary

        wanted = self.asked["hidden_elements"] * self.asked["times"]
        n_elements = min(wanted, self.limits.n_bytes // 16)
        width = min(max(16, self.asked["width"]), n_elements)
        return ordinary(max(1, n_elements // width), width, self.dtype, device=self.device)

    def _named(self, rates: dict[str, float]) -> dict[str, Any]:
        """Rates by what they are of, with their units in the names."""
        found: dict[str, Any] = {
            "flop_per_s": {name: rates[f"large {name}"] for name in self.dtypes},
            "products": [
                {"rows": one.rows, "k": one.k, "n": one.n, "flop_per_s": rates[f"product {i}"]}
                for i, one in enumerate(self.matmuls)
            ],
            "op_bytes_per_s": rates["ordinary"],
            "launch_s": 1 / rates["launch"],
            "memory_bytes_per_s": rates["memory"],
            "copy_bytes_per_s": {w: rates[w] for w in ("to_device", "to_host") if w in rates},
        }
        if "attention" in rates:
            found["attention_flop_per_s"] = rates["attention"]
        return found

    def _stored(self, for_s: float) -> dict[str, Any]:
        from elastic.worker.profile.measured_ops import stored
        from elastic.worker.profile.timings import medians_s

        if not self.asked["storage"]:
            return {}
        ways, clean, n_bytes = stored(self.asked["storage"], self.limits)
        try:
            seconds = medians_s(ways, for_s)
        finally:
            clean()
        return {f"storage_{way}_bytes_per_s": n_bytes / took for way, took in seconds.items()}

    # --------------------------------------------------------------------------------- many at once

    def _crowded(self, for_s: float) -> list[dict[str, Any]]:
        """For 1, 2 ... processes that compute at once: what each of them reaches in the job's
        products, and in the rest."""
        from elastic.worker.profile.measured_ops import mixed
        from elastic.worker.profile.timings import LEAST, MOST

        works: dict[str, tuple[Callable[[], object], float]] = {"bytes_per_s": self._ordinary()}
        if self.passes is not None:
            works["passes_flop_per_s"] = (
                self.passes,
                self.asked["sample_flop"] * self.asked["times"],
            )
        if self.matmuls:
            works["flop_per_s"] = mixed(self.matmuls, self.dtype, self.device)
        found: dict[tuple[int, str], list[float]] = {
            (n, name): [] for n in self.asked["sizes"] for name in works
        }
        took_s = dict.fromkeys(found, 0.0)
        began = time.perf_counter()
        for repetition in range(MOST + 1):  # the first one does not count
            if not self.among.said(repetition <= LEAST or time.perf_counter() - began < for_s):
                break
            for n, name in found:
                self.among.together()
                window_s = min(WINDOW_MOST_S, max(WINDOW_S, CALLS * took_s[n, name]))
                start_s = self.among.said(time.monotonic() + LEAD_S)
                window_s, rate = self.among.said(window_s if repetition else 0.0), 0.0
                if self.rank < n:
                    rate, took_s[n, name] = self._rate(*works[name], start_s, window_s=window_s)
                mean = self.among.mean(rate, n)
                found[n, name] += [mean] if repetition else []
        return [
            {"processes": n} | {name: median(found[n, name]) for name in works}
            for n in self.asked["sizes"]
        ]

    def _rate(
        self, call: Callable[[], object], work: float, start_s: float, *, window_s: float
    ) -> tuple[float, float]:
        """Work per second within a window that all processes have in common, on the clock that they
        have in common, so that none computes while others have not begun or have ended; and seconds
        of a call. A window of 0 s: of one call."""
        time.sleep(max(0.0, start_s - time.monotonic()))
        done, end_s = 0.0, start_s + window_s
        while True:
            began_s = time.monotonic()
            call()
            self.settle()
            ended_s = time.monotonic()
            if not window_s:
                return work / (ended_s - began_s), ended_s - began_s
            if ended_s >= end_s:
                done += max(0.0, end_s - began_s) / (ended_s - began_s)
                return done * work / window_s, window_s / max(done, 0.1)
            done += 1

    def _passes(self, folder: Path) -> Callable[[], object] | None:
        """The program's own forward and backward pass of a batch; None where it is too large for
        this, or fails."""
        if not self.asked["program"]:
            return None
        run: Callable[[], object] | None = None
        try:
            run = self._pass_of(folder)
            run()
        except Exception:  # noqa: BLE001 - the user's program; the numbers are known without it
            traceback.print_exc()
            run = None
        world = max(self.asked["sizes"])
        return run if self.among.mean(float(run is not None), world) > 1 - 0.5 / world else None

    def _pass_of(self, folder: Path) -> Callable[[], object]:
        import torch

        from elastic.program import load_program
        from elastic.worker.program.calls import call_model, loss_of
        from elastic.worker.program.job_program import with_job

        job = Job.from_plain(self.asked["program"])
        program = with_job(load_program(job.program), job)
        model = program.model().to(device=self.device, dtype=self.dtype)
        batch = torch.load(folder / "batch.pt", map_location=self.device, weights_only=True)
        batch = {key: x.to(self.dtype) if x.is_floating_point() else x for key, x in batch.items()}

        def run() -> None:
            loss_of(program, call_model(program, model, batch), batch).backward()
            model.zero_grad()

        return run


def _chip(device: Any) -> dict[str, Any]:
    """What computes here."""
    import torch

    if device.type != "cuda":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        row = next((line for line in lines if line.startswith("model name")), ":unknown CPU")
        return {
            "chip": row.partition(":")[2].strip(), "cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(), "torch": torch.__version__,
        }  # fmt: skip
    about = torch.cuda.get_device_properties(device)
    return {
        "chip": about.name, "units": about.multi_processor_count,
        "memory_bytes": about.total_memory, "arch": ARCHITECTURES.get((about.major, about.minor),
        ""), "torch": torch.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
