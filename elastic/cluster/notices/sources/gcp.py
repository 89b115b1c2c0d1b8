"""GCP: preemption of a Spot VM, and maintenance that ends the VM or moves it.

`instance/preempted` turns from FALSE to TRUE with the preemption notice, about 30 s before the end.
`instance/maintenance-event` is NONE, MIGRATE_ON_HOST_MAINTENANCE (it stalls for a moment) or
TERMINATE_ON_HOST_MAINTENANCE, 60 s ahead, an hour where the VM has GPUs. Neither names a time: it
counts from when it was seen. `instance/upcoming-maintenance`, where the VM has GPUs, is {} or
{"window_start_time": "2026-12-01T19:00:01Z", "maintenance_status": "PENDING", ...}, days ahead: a
warning until an hour before. All are polled: a request that is held until a value changes
(wait_for_change) would need a connection for each value, to hear of it a second earlier. Source:
https://cloud.google.com/compute/docs/ instances/spot, metadata/getting-live-migration-notice,
gpus/gpu-host-maintenance, instances/monitor-plan-host-maintenance-event
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime

from elastic.cluster.notices.sources.metadata_request import Finding, MetadataAnswer, ask

ADDRESS = "169.254.169.254"  # the name metadata.google.internal would have to be resolved first
PREEMPTED_S = 30.0
MAINTENANCE_S, GPU_MAINTENANCE_S = 60.0, 3600.0
UPCOMING_EVERY_S = 30.0
GPU_FILE = "/dev/nvidia0"


def endpoint_of(environ: Mapping[str, str]) -> str:
    """Where Google's libraries would ask."""
    return f"http://{environ.get('GCE_METADATA_HOST') or environ.get('GCE_METADATA_IP') or ADDRESS}"


class Gcp:
    name = "GCP"
    every_s = 1.0

    def __init__(self, endpoint: str, gpus: bool | None = None) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._gpus = os.path.exists(GPU_FILE) if gpus is None else gpus
        self._maintenance_s = GPU_MAINTENANCE_S if self._gpus else MAINTENANCE_S
        # when it was asked last, what it said
        self._upcoming: tuple[float, Finding | None] = (-UPCOMING_EVERY_S, None)

    def greet(self) -> None:
        if self._get("instance/id").headers.get("metadata-flavor") != "Google":
            raise ConnectionError(f"{self._endpoint}: not a metadata server of Google")

    def read(self) -> Sequence[Finding]:
        found = []
        if self._get("instance/preempted").text.strip().upper() == "TRUE":
            found.append(Finding("GCP: instance/preempted", PREEMPTED_S))
        event = self._get("instance/maintenance-event").text.strip()
        if event.startswith("TERMINATE"):
            found.append(Finding(f"GCP: maintenance-event {event}", self._maintenance_s))
        elif event.startswith("MIGRATE"):
            found.append(Finding(f"GCP: maintenance-event {event} (it stalls for a moment)"))
        planned = self._planned() if self._gpus and not event.startswith("TERMINATE") else None
        return [*found, planned] if planned is not None else found

    def _planned(self) -> Finding | None:
        """Maintenance that has a time. The key is young, and not there for every machine: without
        an answer it says nothing."""
        asked_s, known = self._upcoming
        if time.monotonic() - asked_s >= UPCOMING_EVERY_S:
            with suppress(OSError):
                answer = self._ask("instance/upcoming-maintenance?alt=json")
                known = _maintenance(answer) if answer.status == 200 else None
            self._upcoming = (time.monotonic(), known)
        return known

    def _ask(self, path: str) -> MetadataAnswer:
        return ask(f"{self._endpoint}/computeMetadata/v1/{path}", {"Metadata-Flavor": "Google"})

    def _get(self, path: str) -> MetadataAnswer:
        """Raises OSError also for the 503 that the server may answer during maintenance: asked
        again. 404 = nothing is said."""
        answer = self._ask(path)
        if answer.status == 404:
            return MetadataAnswer(404, "", answer.headers)
        if answer.status != 200:
            raise ConnectionError(f"{self._endpoint}: HTTP {answer.status} for {path}")
        return answer


def _maintenance(answer: MetadataAnswer) -> Finding | None:
    """None: nothing is planned, or it cannot be read."""
    try:
        said = json.loads(answer.text)
        status, at = (
            str(said.get("maintenance_status", "")),
            str(said.get("window_start_time") or ""),
        )
        at_s = datetime.fromisoformat(at).timestamp() if at else None
    except (ValueError, TypeError, AttributeError):
        return None
    if at_s is None or status == "COMPLETE":
        return None
    in_s = answer.seconds_until(at_s, GPU_MAINTENANCE_S)
    if status != "ONGOING" and in_s > GPU_MAINTENANCE_S:
        return Finding(f"GCP: maintenance is planned for {at}")
    return Finding(
        f"GCP: upcoming-maintenance {status.lower() or 'pending'} at {at}",
        0.0 if status == "ONGOING" else in_s,
    )
