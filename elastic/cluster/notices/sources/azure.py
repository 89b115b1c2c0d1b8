"""Azure: scheduled events. Preempt (a Spot VM, at least 30 s ahead), Terminate, Reboot and Redeploy
end what runs on the VM; Freeze lets it stall for seconds. The document lists events of all VMs of a
scale or availability set: only those that name this one count. `NotBefore` is empty once an event
has started. Source: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

from elastic.cluster.notices.sources.metadata_request import Finding, MetadataAnswer, ask

ADDRESS = "http://169.254.169.254"
ENDPOINT = "ELASTIC_AZURE_METADATA_ENDPOINT"  # Azure's own libraries have no variable for it
EVENTS, NAME = (
    "scheduledevents?api-version=2020-07-01",
    "instance/compute/name?api-version=2021-02-01&format=text",
)
# the first question switches the service on, which may take two minutes: asked again
FIRST_WAIT_S = 10.0
# ahead, by the document
LEAST_S = {"Preempt": 30.0, "Terminate": 300.0, "Redeploy": 600.0, "Reboot": 900.0}


def endpoint_of(environ: Mapping[str, str]) -> str:
    return environ.get(ENDPOINT) or ADDRESS


class Azure:
    name = "Azure"
    every_s = 1.0

    def __init__(self, endpoint: str) -> None:
        self._endpoint, self._me, self._wait_s = endpoint.rstrip("/"), "", FIRST_WAIT_S

    def greet(self) -> None:
        self._me = self._get(NAME).text.strip()

    def read(self) -> Sequence[Finding]:
        if not self._me:
            self.greet()
        answer = self._get(EVENTS, self._wait_s)
        try:
            events = json.loads(answer.text)["Events"]
        except (ValueError, TypeError, KeyError) as error:
            raise ConnectionError(
                f"{self._endpoint}: scheduled events that cannot be read"
            ) from error
        mine = [event for event in events if self._me in event.get("Resources", ())]
        return [found for event in mine if (found := _finding(event, answer)) is not None]

    def _get(self, path: str, wait_s: float | None = None) -> MetadataAnswer:
        url, headers = f"{self._endpoint}/metadata/{path}", {"Metadata": "true"}
        answer = ask(url, headers, wait_s=wait_s)
        if answer.status != 200:
            raise ConnectionError(f"{self._endpoint}: HTTP {answer.status} for {path}")
        return answer


def _finding(event: Mapping[str, Any], answer: MetadataAnswer) -> Finding | None:
    kind, at = str(event.get("EventType", "")), str(event.get("NotBefore") or "")
    what = f"Azure: {kind} {event.get('EventId', '')}" + (
        f" not before {at}" if at else ", started"
    )
    if kind == "Freeze":
        return Finding(f"{what} (it stalls for seconds)")
    if kind not in LEAST_S:
        return None
    try:
        at_s = parsedate_to_datetime(at).timestamp() if at else None
    except ValueError:
        return Finding(what, LEAST_S[kind])
    return Finding(what, 0.0 if at_s is None else answer.seconds_until(at_s, LEAST_S[kind]))
