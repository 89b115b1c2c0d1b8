"""GCP: preemption of a Spot VM, and maintenance that ends the VM or moves it.

`instance/preempted` turns from FALSE to TRUE with the preemption notice, about 30 s before the end.
`instance/maintenance-event` is NONE, MIGRATE_ON_HOST_MAINTENANCE (it stands still for a moment) or
TERMINATE_ON_HOST_MAINTENANCE, 60 s ahead, an hour where the VM has GPUs. Neither names a time: it counts from when it was seen.
Source: https://cloud.google.com/compute/docs/ instances/spot, metadata/getting-live-migration-notice, gpus/gpu-host-maintenance
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from elastic.cluster.probes.ask import Answer, Finding, ask

ADDRESS = "169.254.169.254"  # the name metadata.google.internal would have to be resolved first
PREEMPTED_S = 30.0
MAINTENANCE_S, GPU_MAINTENANCE_S = 60.0, 3600.0
GPU_FILE = "/dev/nvidia0"


def endpoint_of(environ: Mapping[str, str]) -> str:
    """Where Google's libraries would ask."""
    return f"http://{environ.get('GCE_METADATA_HOST') or environ.get('GCE_METADATA_IP') or ADDRESS}"


class Gcp:
    name = "GCP"
    every_s = 1.0

    def __init__(self, endpoint: str, gpus: bool | None = None) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._maintenance_s = GPU_MAINTENANCE_S if (os.path.exists(GPU_FILE) if gpus is None else gpus) else MAINTENANCE_S

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
            found.append(Finding(f"GCP: maintenance-event {event} (it stands still for a moment)"))
        return found

    def _get(self, path: str) -> Answer:
        """Raises OSError also for the 503 that the server may answer during maintenance: asked again. 404 = nothing is said."""
        answer = ask(f"{self._endpoint}/computeMetadata/v1/{path}", {"Metadata-Flavor": "Google"})
        if answer.status == 404:
            return Answer(404, "", answer.headers)
        if answer.status != 200:
            raise ConnectionError(f"{self._endpoint}: HTTP {answer.status} for {path}")
        return answer
