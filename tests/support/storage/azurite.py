"""Azurite, Microsoft's emulator of Azure Blob Storage, where npm has installed it (`npm install -g
azurite`)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import pytest
from support.waiting import until

ACCOUNT, VERSION = "devstoreaccount1", "2023-11-03"
KEY = base64.b64encode(b"a key of tests, which nobody keeps secret").decode()


@contextmanager
def running_azurite(folder: Path, container: str) -> Iterator[int]:
    """The port of a server with an empty container. Skips where it is not installed."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not installed (npm install -g azurite)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    words = [
        program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder),
        "--silent", "--disableTelemetry", "--skipApiVersionCheck",
    ]  # fmt: skip
    environment = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL) as server:
        try:
            until(lambda: _made(port, container), "azurite")
            yield port
        finally:
            server.kill()


def _made(port: int, container: str) -> bool:
    """Creates the container: obstore does not."""
    path, date = f"/{ACCOUNT}/{container}", formatdate(usegmt=True)
    said = f"x-ms-date:{date}\nx-ms-version:{VERSION}\n/{ACCOUNT}{path}\nrestype:container"
    text = "PUT" + "\n" * 12 + said
    mark = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("PUT", f"{path}?restype=container", headers={
            "x-ms-date": date, "x-ms-version": VERSION,
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(mark).decode()}",
        })  # fmt: skip
        status = connection.getresponse().status
    except ConnectionError:
        return False
    finally:
        connection.close()
    assert status in (201, 409), status
    return True


def point_here(patch: pytest.MonkeyPatch, url: str) -> None:
    """This process and its children take `url` for Azure's server."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        patch.delenv(name)
    patch.setenv("AZURE_STORAGE_ENDPOINT", f"{url}/{ACCOUNT}")
    patch.setenv("AZURE_STORAGE_ACCOUNT", ACCOUNT)
    patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
