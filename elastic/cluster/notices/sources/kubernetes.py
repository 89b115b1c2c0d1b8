"""Kubernetes: the pod's own deletion timestamp, read from the API server with the pod's service
account.

It is set when the pod is deleted, evicted or its node is drained, and names the time at which the
grace period ends. Needs the right to `get` pods in the own namespace. What the containers learn
themselves (a preStop hook, SIGTERM) comes through a file: see notice_file.py.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from elastic.cluster.notices.sources.metadata_request import Finding, ask

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MOST_S = 3600.0  # of a grace period, where the server does not tell its clock
API_WAIT_S = 3.0  # it is not on this host


class Kubernetes:
    """`account`: the folder with token, namespace and ca.crt; the token is read anew each time,
    since it is replaced hourly."""

    name = "Kubernetes"
    every_s = 3.0

    def __init__(
        self, environ: Mapping[str, str], account: Path = ACCOUNT, scheme: str = "https"
    ) -> None:
        host, port = (
            environ["KUBERNETES_SERVICE_HOST"],
            environ.get("KUBERNETES_SERVICE_PORT", "443"),
        )
        namespace = environ.get("POD_NAMESPACE") or (account / "namespace").read_text().strip()
        pod = environ.get("POD_NAME") or environ.get("HOSTNAME", "")
        host = f"[{host}]" if ":" in host else host
        self._url = f"{scheme}://{host}:{port}/api/v1/namespaces/{namespace}/pods/{pod}"
        self._account, self._what = account, f"pod {namespace}/{pod}"
        self._tls = (
            ssl.create_default_context(cafile=str(account / "ca.crt"))
            if scheme == "https"
            else None
        )

    def greet(self) -> None:
        self.read()

    def read(self) -> Sequence[Finding]:
        token = (self._account / "token").read_text().strip()
        answer = ask(
            self._url, {"Authorization": f"Bearer {token}"}, wait_s=API_WAIT_S, tls=self._tls
        )
        if answer.status in (401, 403):
            raise PermissionError(
                f"Kubernetes: the service account may not read {self._what} (HTTP {answer.status})"
            )
        if answer.status != 200:
            raise ConnectionError(f"Kubernetes: HTTP {answer.status} for {self._what}")
        try:
            at = json.loads(answer.text)["metadata"].get("deletionTimestamp")
            at_s = datetime.fromisoformat(at).timestamp() if at else None
        except (ValueError, TypeError, KeyError) as error:
            raise ConnectionError(f"Kubernetes: {self._what} cannot be read") from error
        if at_s is None:
            return ()
        return [
            Finding(
                f"Kubernetes: {self._what} is deleted at {at}", answer.seconds_until(at_s, MOST_S)
            )
        ]
