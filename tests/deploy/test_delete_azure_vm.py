"""A worker on Azure deletes its own machine: the script against a metadata service and a Resource
Manager on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from support.places import ROOT

SCRIPT = ROOT / "deploy" / "delete_azure_vm.sh"
VM = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/ray-own-worker0"
TOKEN = "of.the-managed_identity"


class Azure(ThreadingHTTPServer):
    """Both services. `refuses`: the status of a deletion; `no_identity`: the machine has none."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.deleted: list[str] = []
        self.refuses, self.no_identity = 0, False


class _Handler(BaseHTTPRequestHandler):
    server: Azure

    def log_message(self, *arguments: Any) -> None:
        return

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if self.headers.get("Metadata") != "true" or "api-version=" not in query:
            self._answer(400)
        elif path == "/metadata/instance/compute/resourceId" and "format=text" in query:
            self._answer(200, VM)
        elif path == "/metadata/identity/oauth2/token" and not self.server.no_identity:
            assert "resource=https%3A%2F%2Fmanagement.azure.com%2F" in query
            said = {"client_id": "c", "access_token": TOKEN, "token_type": "Bearer"}
            self._answer(200, json.dumps(said, separators=(",", ":")))
        else:
            self._answer(400)

    def do_DELETE(self) -> None:
        path, _, query = self.path.partition("?")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" or "api-version=" not in query:
            self._answer(401)
        elif self.server.refuses:
            self._answer(self.server.refuses)
        else:
            self.server.deleted.append(path)
            self._answer(202)

    def _answer(self, status: int, text: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def azure() -> Iterator[Azure]:
    with Azure() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ended(azure: Azure) -> int:
    address = f"http://127.0.0.1:{azure.server_address[1]}"
    environment = os.environ | {"IMDS": address, "ARM": address, "WAIT_S": "0"}
    done = subprocess.run(
        ["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert TOKEN not in done.stdout + done.stderr
    return done.returncode


@pytest.mark.e2e
def test_it_deletes_its_own_machine_and_no_other(azure: Azure) -> None:
    # where it returns the machine is there still: end_without_head.sh calls it again
    assert ended(azure) == 1
    assert azure.deleted == [VM]


@pytest.mark.e2e
def test_what_is_refused_is_a_failure_that_is_tried_again(azure: Azure) -> None:
    azure.refuses = 403
    assert ended(azure) != 0
    azure.refuses, azure.no_identity = 0, True
    assert ended(azure) != 0
    assert azure.deleted == []
