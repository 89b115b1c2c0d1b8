"""One request to a metadata server, bounded in time and never through a proxy; what a source says,
and how long that is away.

Clocks of a cloud, of its nodes and of the driver may disagree by minutes. So an absolute time is
compared with the clock of the server that said it (its Date header), and what leaves the node are
seconds from now.
"""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Protocol
from urllib.parse import urlsplit

WAIT_S = 0.9  # for a metadata server: it answers within milliseconds
DATE_STEP_S = 1.0  # a Date header leaves out the part of a second
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Finding:
    """`in_s`: seconds until the node is taken; None = a warning: it may be taken, or will only
    stall. `what` names the source, and is another text where it is another notice. `risk`: a
    warning that makes a reclaim more likely."""

    what: str
    in_s: float | None = None
    risk: bool = False


class NoticeSource(Protocol):
    """Something that knows of this node's end. Both raise OSError where it gives no answer."""

    name: str
    every_s: float

    def greet(self) -> None:
        """Returns where the source is there and answers as it should."""

    def read(self) -> Sequence[Finding]:
        """All that it says now."""


@dataclass(frozen=True)
class MetadataAnswer:
    """`said_s`: the server's clock, in epoch seconds; None = it did not say."""

    status: int
    text: str
    headers: Mapping[str, str]  # names in lower case
    said_s: float | None = None

    def seconds_until(self, at_s: float, most_s: float) -> float:
        """From now until `at_s` (epoch seconds of the server's clock). Where a server does not tell
        its clock, this node's counts, and then the answer is at most `most_s`: as long as such a
        notice is at the most."""
        if self.said_s is None:
            return min(most_s, max(0.0, at_s - time.time()))
        return max(0.0, at_s - self.said_s - DATE_STEP_S)


def ask(
    url: str,
    headers: Mapping[str, str] | None = None,
    method: str = "GET",
    *,
    wait_s: float | None = None,
    tls: ssl.SSLContext | None = None,
) -> MetadataAnswer:
    """Raises OSError where nothing that speaks HTTP answers within `wait_s` (default: WAIT_S)."""
    wait_s = WAIT_S if wait_s is None else wait_s
    parts = urlsplit(url)
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(host, parts.port, timeout=wait_s, context=tls)
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=wait_s)
    try:
        connection.request(
            method,
            parts.path + (f"?{parts.query}" if parts.query else ""),
            headers=dict(headers or {}),
        )
        response = connection.getresponse()
        text = response.read(MOST_BYTES).decode(errors="replace")
        names = {name.lower(): value for name, value in response.getheaders()}
        return MetadataAnswer(response.status, text, names, _date_s(names.get("date", "")))
    except (http.client.HTTPException, UnicodeError) as error:
        raise ConnectionError(f"{url}: {type(error).__name__} {error}") from error
    finally:
        connection.close()


def _date_s(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except ValueError:
        return None
