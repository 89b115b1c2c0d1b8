"""AWS: the interruption notice and the rebalance recommendation of a spot instance, through IMDSv2.

`spot/instance-action` is 404 until about two minutes before, then {"action": "terminate", "time":
"2026-01-01T00:02:00Z"}. `events/recommendations/rebalance` is 404, then {"noticeTime": ...}: the
instance is likelier to be interrupted than others. Source:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/: spot-instance-termination-notices and
rebalance-recommendations
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime

from elastic.cluster.notices.sources.metadata_request import Finding, MetadataAnswer, ask

ENDPOINTS = {"ipv4": "http://169.254.169.254", "ipv6": "http://[fd00:ec2::254]"}
TOKEN_S = 21600  # the longest that there is
NOTICE_S = 120.0


def endpoint_of(environ: Mapping[str, str]) -> str | None:
    """Where the SDKs of AWS would ask; None = they were told not to."""
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    mode = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "ipv4").lower()
    return environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or ENDPOINTS.get(
        mode, ENDPOINTS["ipv4"]
    )


class Aws:
    """`token_s`: how long a session token is asked to hold; a new one is fetched after half of it,
    or when it is refused."""

    name = "AWS"
    every_s = 1.0

    def __init__(self, endpoint: str, token_s: int = TOKEN_S) -> None:
        self._endpoint, self._token_s = endpoint.rstrip("/"), token_s
        self._token, self._renew_s = "", 0.0

    def greet(self) -> None:
        self._renew()

    def read(self) -> Sequence[Finding]:
        found = []
        action = self._get("spot/instance-action")
        if action.status == 200:
            found.append(_taken(action))
        if self._get("events/recommendations/rebalance").status == 200:
            found.append(
                Finding("AWS: rebalance recommendation (a higher risk of interruption)", risk=True)
            )
        return found

    def _get(self, path: str) -> MetadataAnswer:
        if time.monotonic() >= self._renew_s:
            self._renew()
        answer = self._ask(path)
        if answer.status == 401:
            self._renew()
            answer = self._ask(path)
        if answer.status not in (200, 404):
            raise ConnectionError(f"{self._endpoint}: HTTP {answer.status} for {path}")
        return answer

    def _ask(self, path: str) -> MetadataAnswer:
        return ask(
            f"{self._endpoint}/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token}
        )

    def _renew(self) -> None:
        asked_s = time.monotonic()
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._token_s)}
        answer = ask(f"{self._endpoint}/latest/api/token", ttl, "PUT")
        if answer.status != 200:
            raise ConnectionError(f"{self._endpoint}: HTTP {answer.status} for a session token")
        self._token, self._renew_s = answer.text, asked_s + self._token_s / 2


def _taken(answer: MetadataAnswer) -> Finding:
    """A notice that cannot be read is still a notice."""
    try:
        said = json.loads(answer.text)
        action, at = str(said["action"]), str(said["time"])
        at_s = datetime.fromisoformat(at).timestamp()
    except (ValueError, TypeError, KeyError):
        return Finding("AWS: spot instance-action that cannot be read", NOTICE_S)
    return Finding(
        f"AWS: spot instance-action {action} at {at}", answer.seconds_until(at_s, NOTICE_S)
    )
