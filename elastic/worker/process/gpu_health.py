"""What a GPU says of itself that may explain why it is slow or fails: read through NVML every few
seconds, and its critical Xid errors as they come, in a thread of its own.

Only where `pynvml` (of the package nvidia-ml-py) can be imported and the worker trains on CUDA;
elsewhere nothing is watched. What a driver or a GPU does not tell is left out of the sentence.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from elastic.types import DeviceNoted, Event, WorkerFailed, WorkerId

log = logging.getLogger(__name__)

PACKAGE = "pynvml"
EVERY_S = 10.0
HOT_C = 85  # degrees Celsius; most boards lower their clocks a little above
# nvmlClocksEventReason* as bits (nvml.h), of those that are no rest and no wish of a person
LOWERED = {
    0x4: "the power limit", 0x8: "a hardware slowdown", 0x20: "the temperature (software)",
    0x40: "the temperature (hardware)", 0x80: "the power brake",
}  # fmt: skip
POWER_CAP = 0x4  # by itself what every busy GPU does
LINKS_MOST = 18
XID_CRITICAL = 0x8  # nvmlEventTypeXidCriticalError
XID_WAIT_MS = 500
# Xid errors after which the GPU must be reset, with all processes on it ("XID Errors",
# docs.nvidia.com/deploy)
LOST = {
    62: "its microcontroller has halted", 79: "it has fallen off the bus",
    95: "an uncontained memory error", 119: "its system processor does not answer",
    120: "an error of its system processor", 140: "an unrecovered memory error",
}  # fmt: skip
CORRECTED, UNCORRECTED, VOLATILE, LINK_REPLAYS, LINK_RECOVERIES = 0, 1, 0, 0, 1
Counters = dict[str, int]


class DeviceNotes:
    """Watches one GPU; `report` gets a DeviceNoted when the sentence is another one, and a
    WorkerFailed of kind `device` (once) after an Xid error that no process on that GPU outlives.
    Errors count from the first look on."""

    def __init__(
        self,
        me: WorkerId,
        device: torch.device,
        report: Callable[[Event], None],
        *,
        every_s: float = EVERY_S,
    ) -> None:
        self.me, self.report, self.every_s = me, report, every_s
        self._note = ""
        self._first: Counters | None = None
        self._end = threading.Event()
        self._xids: list[int] = []
        self._lost = False
        self._events: Any = None  # NVML's event set; None = Xid errors are not told here
        self._nvml = nvml() if device.type == "cuda" else None
        if self._nvml is None:
            return
        try:
            self._nvml.nvmlInit()
            self._handle = _handle(self._nvml, device)
        except Exception as error:  # noqa: BLE001 - a boundary: pynvml's errors are its own; the GPU trains without being watched
            log.warning("the GPU is not watched: %s", error)
            return
        self._events = self._registered()
        threading.Thread(target=self._watch, name="device-notes", daemon=True).start()

    def close(self) -> None:
        self._end.set()

    def _watch(self) -> None:
        while True:
            self.look()
            until_s = time.monotonic() + self.every_s
            while (left_s := until_s - time.monotonic()) > 0 and self._events is not None:
                if self._end.is_set():
                    return
                self.wait_for_xid(min(XID_WAIT_MS, int(1000 * left_s) + 1))
            if self._end.wait(max(0.0, left_s)):
                return

    def _registered(self) -> Any:
        """An event set for the GPU's critical Xid errors; None: this driver, package or GPU has
        none."""
        nvml: Any = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, XID_CRITICAL, events)
        except Exception as error:  # noqa: BLE001 - a boundary: "not supported" is a class of pynvml's own
            log.info("Xid errors are not watched: %s", error)
            return None
        return events

    def wait_for_xid(self, wait_ms: int) -> None:
        """Waits so long for the next Xid error, and reports it."""
        began_s = time.monotonic()
        nvml: Any = self._nvml
        try:
            wait = getattr(nvml, "nvmlEventSetWait_v2", None) or nvml.nvmlEventSetWait
            xid = int(wait(self._events, wait_ms).eventData)
        except Exception as error:  # noqa: BLE001 - a boundary: mostly NVMLError_Timeout, nothing has come
            if time.monotonic() - began_s < wait_ms / 2000:  # it did not wait: it never will
                log.info("Xid errors are not watched any more: %s", error)
                self._events = None
            return
        if xid not in self._xids:
            self._xids.append(xid)
            self.look()
        if xid in LOST and not self._lost:
            self._lost = True
            self.report(WorkerFailed(self.me, 0, "device", f"Xid {xid}: {LOST[xid]}"))

    def look(self) -> None:
        note = self._sentence()
        if note != self._note:
            self._note = note
            self.report(DeviceNoted(self.me, note))

    def _sentence(self) -> str:
        now = self._counters()
        self._first = {**now, **(self._first or {})}
        parts = self._clocks()
        celsius = self._ask("nvmlDeviceGetTemperature", 0) or 0
        parts += [f"{5 * (celsius // 5)} °C or more"] if celsius >= HOT_C else []
        grown = {name: n - self._first[name] for name, n in now.items() if n > self._first[name]}
        # as a power of ten: a counter that grows on is no news each time
        shown = {
            k: n if n < 10 else f"more than {10 ** (len(str(n)) - 1)}" for k, n in grown.items()
        }
        parts += [f"{n} {name} since this worker began" for name, n in shown.items()]
        xids = [f"Xid {xid}" + (f" ({LOST[xid]})" if xid in LOST else "") for xid in self._xids]
        return "; ".join([*xids, *parts, *self._rows()])

    def _clocks(self) -> list[str]:
        asked = "nvmlDeviceGetCurrentClocksEventReasons"
        old = "nvmlDeviceGetCurrentClocksThrottleReasons"  # its name before driver 535
        bits = self._ask(asked if hasattr(self._nvml, asked) else old) or 0
        why = [word for bit, word in LOWERED.items() if bits & bit]
        return (
            [f"clocks lowered by {' and '.join(why)}"] if bits & sum(LOWERED) & ~POWER_CAP else []
        )

    def _rows(self) -> list[str]:
        found = self._ask("nvmlDeviceGetRemappedRows")
        if not found:
            return []
        _, uncorrectable, pending, failed = found
        return [text for yes, text in (
            (uncorrectable,
            f"{uncorrectable} rows of its memory remapped after errors that were not corrected"),
            (pending, "a row is to be remapped: the GPU must be reset"), (failed,
            "a row could not be remapped: the GPU must be replaced"),
        ) if yes]  # fmt: skip

    def _counters(self) -> Counters:
        ecc = "nvmlDeviceGetTotalEccErrors"
        found = {
            "corrected memory errors": self._ask(ecc, CORRECTED, VOLATILE),
            "uncorrected memory errors": self._ask(ecc, UNCORRECTED, VOLATILE),
            "PCIe replays": self._ask("nvmlDeviceGetPcieReplayCounter"),
        }
        links = [
            self._ask("nvmlDeviceGetNvLinkErrorCounter", link, counter)
            for link in range(LINKS_MOST)
            for counter in (LINK_REPLAYS, LINK_RECOVERIES)
        ]
        if any(n is not None for n in links):
            found["NVLink errors"] = sum(n for n in links if n is not None)
        return {name: int(n) for name, n in found.items() if n is not None}

    def _ask(self, name: str, *arguments: Any) -> Any:
        return ask(self._nvml, name, self._handle, *arguments)


def nvml() -> Any:
    """The module pynvml; None where it is not installed."""
    try:
        return importlib.import_module(PACKAGE)
    except ImportError:
        return None


def ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """None: there is no NVML, or this driver, package or GPU does not tell."""
    function = getattr(nvml, name, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except Exception:  # noqa: BLE001 - a boundary: "not supported" and the like are classes of pynvml's own
        return None


def _handle(nvml: Any, device: torch.device) -> Any:
    """By the GPU's own id: NVML numbers the machine's GPUs, whichever of them this process may see.
    torch leaves out whether it is a whole GPU's or that of a part (MIG)."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    if uuid.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception as error:  # noqa: BLE001 - a boundary: pynvml's errors are its own
        log.info("no whole GPU has the id %s (%s): it may be a part of one", uuid, error)
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def memory_holders(device: torch.device) -> tuple[tuple[int, int], ...]:
    """(process id, bytes) of the processes that hold memory of this GPU, the largest first, as far
    as NVML tells; bytes 0 = not known. () where there is no NVML, or it tells nothing."""
    asked = nvml() if device.type == "cuda" else None
    if asked is None:
        return ()
    try:
        asked.nvmlInit()
        found = asked.nvmlDeviceGetComputeRunningProcesses(_handle(asked, device))
        held = ((int(p.pid), int(p.usedGpuMemory or 0)) for p in found)
        return tuple(sorted(held, key=lambda one: (-one[1], one[0])))
    except Exception as error:  # noqa: BLE001 - a boundary: pynvml's errors are its own; the refusal names nobody then
        log.info("NVML does not tell who holds memory: %s", error)
        return ()
