"""Where the ranks of a generation meet: a store that listens at one address, a place in it that
nobody can guess, and a proof that all who came were told of it.

torch's TCPStore lets everyone in and lists its keys to whoever asks, so the place alone keeps
nobody out who looks twice. That no stranger has come in a rank's place is known once each has shown
what only who knows the secret can: the secret itself went over Ray, and is in no store and in no
journal.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from elastic.worker.process.environment import DEFAULTS

log = logging.getLogger(__name__)
# of the process that hosts a store, too
os.environ.setdefault("RES_OPTIONS", DEFAULTS["RES_OPTIONS"])

SECRET_BYTES = PROOF_BYTES = 32
BACKLOG = 4096
STORE_S = 300.0  # torch's own default
# for a connection to a store to be seen, for one try of torch's to make one, and for all of them
ANSWERS_S, TRY_S, CONNECT_MOST_S = 5.0, 1.0, 15.0


def new_secret() -> str:
    """For one generation."""
    return secrets.token_hex(SECRET_BYTES)


def host_store(host: str, timeout_s: float = STORE_S) -> TCPStore:
    """A store that this process hosts, and that listens at `host` only. At all addresses where that
    is a name, which others may resolve otherwise, or an address that this machine does not have
    itself (behind NAT)."""
    timeout = timedelta(seconds=timeout_s)
    listener = _listener("127.0.0.1" if host == "localhost" else host)
    if listener is None:
        return TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
    port = int(listener.getsockname()[1])
    return TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener.detach()
    )  # fmt: skip


def connect_store(host: str, port: int, aborted: Callable[[], bool]) -> tuple[TCPStore, str]:
    """The store that somebody else hosts, and this machine's address on the way to it.

    A store that is gone refuses at once, but TCPStore asks again for twice its timeout and more,
    and nothing frees it: so its tries are short, and each comes behind a look of our own. Raises
    ConnectionError where the store is gone, ConnectionAbortedError when the generation was
    aborted."""
    ends_s = time.monotonic() + CONNECT_MOST_S
    while True:
        with socket.create_connection((host, port), timeout=ANSWERS_S) as there:
            here = str(there.getsockname()[0])
        if aborted():
            raise ConnectionAbortedError("the generation was aborted before it met")
        try:
            timeout = timedelta(seconds=TRY_S)
            store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        except DistError:
            if time.monotonic() > ends_s:
                raise
        else:
            return store, here


def listening(host: str) -> socket.socket:
    """A socket that listens at `host` only, or at all addresses as `host_store` does."""
    found = _listener("127.0.0.1" if host == "localhost" else host)
    if found is not None:
        return found
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
        )
    return socket.create_server(("", 0), backlog=BACKLOG)


def _listener(host: str) -> socket.socket | None:
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return None
    try:
        return socket.create_server((host, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        log.warning(
            "the store of a generation listens at all addresses: %s cannot be listened at (%s)",
            host,
            error,
        )
        return None


def place(generation: int, secret: str) -> str:
    """Prefix of the generation's keys in its store."""
    return f"generation-{generation}" + (f"-{proof(secret, 'place')[:16].hex()}" if secret else "")


def proof(secret: str, what: str) -> bytes:
    """PROOF_BYTES that nobody can say without the secret."""
    return hmac.digest(secret.encode(), what.encode(), "sha256")
