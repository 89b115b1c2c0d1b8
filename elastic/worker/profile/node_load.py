"""How busy a node's machine is: the host by /proc, its GPUs by NVML. One worker of the node looks,
in a thread of its own, so that a GPU that does not answer holds up nothing else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.types import Event, NodeLoadSeen
from elastic.worker.process.free_memory import free_host_bytes, resident_bytes
from elastic.worker.process.gpu_health import ask, nvml

log = logging.getLogger(__name__)

EVERY_S = 15.0
NODE_S = 0.5  # for each node of the plan: all nodes together tell twice a second at most
PROC = Path("/proc")
IDLE, IOWAIT, KINDS = 3, 4, 8  # columns of /proc/stat; what guests use is in the first ones too


class LoadReports:
    """`report` gets a NodeLoadSeen every few seconds until `close`; `n_nodes`: of the newest plan.
    `on_gpu`: GPUs are looked at too, as far as `pynvml` is installed and tells. `worker_bytes`:
    what the process that trains holds."""

    def __init__(
        self,
        node_id: str,
        report: Callable[[Event], None],
        *,
        on_gpu: bool,
        every_s: float = EVERY_S,
        worker_bytes: Callable[[], int] = resident_bytes,
    ) -> None:
        self.node_id, self.report, self.every_s, self.n_nodes = node_id, report, every_s, 1
        self._worker_bytes = worker_bytes
        self._busy = (0, 0)
        self._nvml: Any = None
        self._on_gpu = on_gpu
        self._end = threading.Event()
        threading.Thread(target=self._watch, name="node-load", daemon=True).start()

    def close(self) -> None:
        self._end.set()

    def _watch(self) -> None:
        self._nvml = _begun(nvml()) if self._on_gpu else None
        try:
            self._busy = _busy_and_all()
            while not self._end.wait(max(self.every_s, self.n_nodes * NODE_S)):
                self.report(self.look())
        except (OSError, ValueError, KeyError) as error:  # /proc of another kernel, or hidden
            log.warning("the load of this node is not told: %s", error)

    def look(self) -> NodeLoadSeen:
        before, self._busy = self._busy, _busy_and_all()
        busy, total = (now - then for now, then in zip(self._busy, before, strict=True))
        return NodeLoadSeen(
            self.node_id, busy / total if total else 0.0, free_host_bytes(), _host_bytes(),
            self._worker_bytes(), **self._gpus(),
        )  # fmt: skip

    def _gpus(self) -> dict[str, Any]:
        handles = [
            ask(self._nvml, "nvmlDeviceGetHandleByIndex", i)
            for i in range(ask(self._nvml, "nvmlDeviceGetCount") or 0)
        ]
        gpus = [handle for handle in handles if handle is not None]
        if not gpus:
            return {}
        shares = self._known("nvmlDeviceGetUtilizationRates", gpus)
        memory = self._known("nvmlDeviceGetMemoryInfo", gpus)
        power = self._known("nvmlDeviceGetPowerUsage", gpus)  # milliwatts
        celsius = self._known("nvmlDeviceGetTemperature", gpus, 0)
        return {
            "n_gpus": len(gpus),
            "gpu_share": sum(one.gpu for one in shares) / len(shares) / 100 if shares else None,
            "gpu_memory_bytes": sum(int(one.used) for one in memory) if memory else None,
            "gpu_memory_size_bytes": sum(int(one.total) for one in memory) if memory else None,
            "gpu_power_w": sum(power) / 1000 if power else None,
            "gpu_celsius": float(max(celsius)) if celsius else None,
        }

    def _known(self, name: str, gpus: list[Any], *more: int) -> list[Any]:
        answers = [ask(self._nvml, name, gpu, *more) for gpu in gpus]
        return [answer for answer in answers if answer is not None]


def _begun(found: Any) -> Any:
    try:
        if found is not None:
            found.nvmlInit()
        return found
    except Exception as error:  # noqa: BLE001 - a boundary: pynvml's errors are its own; the node trains without its GPUs' load being told
        log.warning("the load of GPUs is not told: %s", error)
        return None


def _busy_and_all() -> tuple[int, int]:
    """Ticks of all cores since boot."""
    with (PROC / "stat").open() as file:
        ticks = [int(word) for word in file.readline().split()[1 : 1 + KINDS]]
    return sum(ticks) - ticks[IDLE] - ticks[IOWAIT], sum(ticks)


def _host_bytes() -> int:
    with (PROC / "meminfo").open() as file:
        return int(file.readline().split()[1]) * 1024  # MemTotal is the first row
