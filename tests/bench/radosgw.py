"""A Ceph radosgw on loopback, in memory: one monitor, one OSD, one gateway, everything in one
folder.

Debian: apt-get install --no-install-recommends ceph-mon ceph-osd radosgw

    python tests/bench/radosgw.py start FOLDER     # prints the environment that clients need
    python tests/bench/radosgw.py stop FOLDER
    python tests/bench/radosgw.py --json --smoke   # starts one, stores and reads an object, stops it
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
from trial import Clock, Failed

from elastic.cluster.ray.processes import free_port

PROGRAMS = (
    "ceph-mon",
    "ceph-osd",
    "ceph",
    "radosgw",
    "radosgw-admin",
    "ceph-authtool",
    "monmaptool",
)
ACCESS, SECRET = "elastic-bench", "elastic-bench-secret"
START_S = 60.0
CONFIG = """[global]
fsid={fsid}
mon_host=127.0.0.1:{mon}
public_addr=127.0.0.1
mon_initial_members=a
auth_cluster_required=cephx
auth_service_required=cephx
auth_client_required=cephx
osd_pool_default_size=1
osd_pool_default_min_size=1
osd_pool_default_pg_num=8
osd_crush_chooseleaf_type=0
mon_allow_pool_size_one=true
mon_warn_on_pool_no_redundancy=false
mon_max_pg_per_osd=1000
ms_bind_ipv6=false
run_dir={folder}
keyring={folder}/keyring
admin_socket={folder}/$cluster-$name.asok
log_file={folder}/$name.log
pid_file={folder}/$name.pid
mon_data={folder}/mon
osd_data={folder}/osd
osd_objectstore=memstore
memstore_device_bytes={memory}
osd_memory_target=1073741824
rgw_data={folder}/rgw
[client.rgw.a]
rgw_frontends=beast endpoint=127.0.0.1:{port}
"""


@dataclass(frozen=True)
class Server:
    """A gateway that answers."""

    folder: Path
    port: int

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{self.port}", "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip


def installed() -> bool:
    return all(shutil.which(program) for program in PROGRAMS)


def start(folder: Path, memory_bytes: int = 8 << 30) -> Server:
    """About 10 s. Raises CalledProcessError or TimeoutError; what was started is stopped then."""
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir(parents=True)
    fsid, mon, port = str(uuid.uuid4()), free_port("127.0.0.1"), free_port("127.0.0.1")
    config = folder / "ceph.conf"
    config.write_text(
        CONFIG.format(fsid=fsid, mon=mon, port=port, folder=folder, memory=memory_bytes)
    )
    try:
        _monitor(folder, fsid, mon)
        _osd(folder)
        _call(folder, "radosgw-admin", "user", "create", "--uid=bench", "--display-name=bench",
            f"--access-key={ACCESS}",
              f"--secret-key={SECRET}")  # fmt: skip
        _gateway(folder, port)
    except BaseException:
        stop(folder)
        raise
    return Server(folder, port)


def stop(folder: Path) -> None:
    """Ends the processes that `start` began in this folder."""
    for file in folder.glob("*.pid"):
        with suppress(ProcessLookupError, ValueError):
            pid = int(file.read_text())
            if str(folder).encode() in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)
        file.unlink()


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    server = start(folder)
    try:
        yield server
    finally:
        stop(folder)


def _monitor(folder: Path, fsid: str, port: int) -> None:
    _call(
        folder,
        "monmaptool",
        "--create",
        "--fsid",
        fsid,
        "--add",
        "a",
        f"127.0.0.1:{port}",
        "monmap",
    )
    _call(
        folder,
        "ceph-authtool",
        "-C",
        "keyring",
        "--gen-key",
        "-n",
        "mon.",
        "--cap",
        "mon",
        "allow *",
    )
    for name, caps in (
        ("client.admin", "mon osd mgr"),
        ("client.rgw.a", "mon osd"),
        ("osd.0", "mon osd"),
    ):
        wanted = [word for cap in caps.split() for word in ("--cap", cap, "allow *")]
        _call(folder, "ceph-authtool", "keyring", "--gen-key", "-n", name, *wanted)
    as_root = ("--setuser", "root", "--setgroup", "root")
    _call(
        folder,
        "ceph-mon",
        "--mkfs",
        "-i",
        "a",
        "--monmap",
        "monmap",
        "--keyring",
        "keyring",
        *as_root,
    )
    _call(folder, "ceph-mon", "-i", "a", *as_root)


def _osd(folder: Path) -> None:
    secret = _call(folder, "ceph-authtool", "keyring", "-n", "osd.0", "--print-key").strip()
    (folder / "secret.json").write_text(json.dumps({"cephx_secret": secret}))
    # it is in the monitor's first keyring already; `osd new` makes it anew
    with suppress(subprocess.CalledProcessError):
        _call(folder, "ceph", "auth", "del", "osd.0")
    name = str(uuid.uuid4())
    _call(folder, "ceph", "osd", "new", name, "-i", "secret.json")
    as_root = ("--setuser", "root", "--setgroup", "root")
    _call(folder, "ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", name, *as_root)
    _call(folder, "ceph-osd", "-i", "0", *as_root)


def _gateway(folder: Path, port: int) -> None:
    with (folder / "gateway.log").open("wb") as log:
        process = subprocess.Popen(
            ["radosgw", "-n", "client.rgw.a", "-f"], cwd=folder, env=_environment(folder),
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    (folder / "gateway.pid").write_text(str(process.pid))
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1):
            return
        time.sleep(0.2)
    raise TimeoutError(f"radosgw does not answer after {START_S:.0f} s; see {folder}/gateway.log")


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "CEPH_CONF": str(folder / "ceph.conf")}


def _call(folder: Path, *words: str) -> str:
    done = subprocess.run(
        words,
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        text=True,
        check=True,
        timeout=START_S,
    )
    return done.stdout


def once_through(clock: Clock) -> dict[str, Any]:
    if not installed():
        raise Failed(f"one of {', '.join(PROGRAMS)} is not installed")
    import boto3

    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as folder:
        with running(Path(folder) / "ceph") as server:
            start_s = time.monotonic() - clock.began_s
            os.environ.update(server.environment)
            client, data = boto3.session.Session().client("s3"), os.urandom(1 << 20)
            client.create_bucket(Bucket="smoke")
            client.put_object(Bucket="smoke", Key="some", Body=data)
            equal = client.get_object(Bucket="smoke", Key="some")["Body"].read() == data
    return {"start_s": round(start_s, 2), "contents_equal": equal}


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("verb", nargs="?", choices=("start", "stop"))
    parser.add_argument("folder", nargs="?", type=Path)
    given = parser.parse_args()
    if given.smoke:
        given.most_s = 3 * START_S
        return report.finish("radosgw", given, once_through)
    if given.verb is None or given.folder is None:
        parser.error("start FOLDER, stop FOLDER or --smoke")
    if given.verb == "stop":
        stop(given.folder.absolute())
        return 0
    for key, value in start(given.folder.absolute()).environment.items():
        print(f"export {key}={value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
