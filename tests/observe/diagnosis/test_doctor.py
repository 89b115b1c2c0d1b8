"""What `elastic doctor` says of the place where runs go."""

from __future__ import annotations

from pathlib import Path

from support.storage.faulty_proxy import FaultyProxy, expired

from elastic.observe.diagnosis.doctor import machine
from elastic.observe.diagnosis.doctor_check import DoctorCheck
from elastic.observe.diagnosis.machine_checks import open_clusters
from elastic.storage.s3 import S3Storage


def of_storage(uri: str) -> DoctorCheck:
    return next(check for check in machine(uri) if check.name.startswith(("disk free", "storage")))


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    found = of_storage(str(tmp_path / "a" / "b"))
    assert found.name == f"disk free at {tmp_path}/a/b" and found.verdict in ("ok", "look")


def test_object_storage(s3: S3Storage, proxy: FaultyProxy) -> None:
    s3.put("one/k", b"")
    assert of_storage(s3.uri) == DoctorCheck(f"storage {s3.uri}", "answers; holds 1 folders")
    assert s3.list() == ["one/k"], "what was tried is removed again"
    proxy.faults.append(expired(times=9))  # also of the keys that are read again
    refused = of_storage(s3.uri)
    assert refused.verdict == "bad" and "the credentials have expired" in refused.found


def test_a_ray_cluster_without_a_token_is_named(tmp_path: Path) -> None:
    def process(pid: str, words: str, environ: str) -> None:
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cmdline").write_text(words.replace(" ", "\0"))
        (tmp_path / pid / "environ").write_text(environ.replace(" ", "\0"))

    assert open_clusters(tmp_path).found == "none"
    process(
        "10",
        "/ray/gcs_server --gcs_server_port=1 --node-ip-address=10.0.0.1",
        "A=1 RAY_AUTH_MODE=token",
    )
    process("11", "/ray/gcs_server --node-ip-address=127.0.0.1", "RAY_AUTH_MODE=disabled")
    process("12", "python gcs_server", "RAY_AUTH_MODE=disabled")
    assert open_clusters(tmp_path) == DoctorCheck(
        "ray clusters here", "2, none open to the network"
    )
    process("13", "/ray/gcs_server --node-ip-address=10.0.0.1", "RAY_AUTH_MODE=disabled")
    (tmp_path / "14").mkdir()  # it has just ended
    found = open_clusters(tmp_path)
    assert found.verdict == "look" and found.found.startswith("process 13 takes code from anyone")
