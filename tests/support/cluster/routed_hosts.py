"""A Ray cluster whose hosts are networks of their own, each on a link to one router, which swallows
what it is told to: both ways or one way, between any of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterable
from itertools import product
from pathlib import Path

from support.cluster.autoscaled import not_allowed
from support.cluster.namespace import Namespace, ray_command
from support.places import ROOT
from support.scene_tools import missing_tools
from support.waiting import until

GCS, S3 = 6379, 5000
BUCKET = "elastic-runs"
HEAD, STORAGE = "head", "storage"
RULES = "inet cut"
ROUTER = f"""
set -e
mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns
echo 'nameserver 127.0.0.1' >"$1/resolv" && mount --bind "$1/resolv" /etc/resolv.conf
echo 1 >/proc/sys/net/ipv4/ip_forward
nft add table {RULES}
nft add chain {RULES} between '{{ type filter hook forward priority 0; policy accept; }}'
"""
LINK = """
set -e
ip netns add "$1"
ip link add "to-$1" type veth peer name eth0 netns "$1"
ip addr add "10.77.$2.1/24" dev "to-$1" && ip link set "to-$1" up
ip -n "$1" link set lo up
ip -n "$1" addr add "10.77.$2.2/24" dev eth0 && ip -n "$1" link set eth0 up
ip -n "$1" route add default via "10.77.$2.1"
"""
MAKE_BUCKET = f"import boto3; boto3.client('s3').create_bucket(Bucket='{BUCKET}')"


def missing() -> str:
    """Why there can be no such hosts here; '' = there can."""
    return missing_tools(("ip", "nft")) or not_allowed()


class RoutedHosts:
    """A head, on which the driver is to run, a storage, and nodes of one worker each. `environment`:
    of all of them."""

    def __init__(self, folder: Path, nodes: Iterable[str], environment: dict[str, str]) -> None:
        self.folder, self.nodes = folder, tuple(nodes)
        names = (HEAD, STORAGE, *self.nodes)
        self.address = {name: f"10.77.{number}.2" for number, name in enumerate(names, 1)}
        self.head = f"{self.address[HEAD]}:{GCS}"
        self.space = Namespace(
            {
                "HOME": str(folder),
                "PYTHONPATH": str(ROOT),
                "RAY_AUTH_MODE": "disabled",
                "AWS_ACCESS_KEY_ID": "a",
                "AWS_SECRET_ACCESS_KEY": "b",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
                "AWS_ENDPOINT_URL_S3": f"http://{self.address[STORAGE]}:{S3}",
                **environment,
            }
        )
        self._started: list[subprocess.Popen[str]] = []
        try:
            self._up()
        except BaseException:
            self.close()
            raise

    def _up(self) -> None:
        self.space.run("sh", "-c", ROUTER, "sh", str(self.folder))
        for number, name in enumerate(self.address, 1):
            self.space.run("sh", "-c", LINK, "sh", name, str(number))
        log = self.folder / "s3.log"
        serve = f'exec "$@" >{log} 2>&1'
        words = (sys.executable, "-m", "moto.server", "-H", self.address[STORAGE], "-p", str(S3))
        self.start(STORAGE, "sh", "-c", serve, "sh", *words)
        until(lambda: log.is_file() and "Running on" in log.read_text(), "moto's port")
        self.space.run(sys.executable, "-c", MAKE_BUCKET, at=STORAGE)
        self._ray(HEAD, "--head", f"--port={GCS}", "--num-cpus=0", "--include-dashboard=False")
        for name in self.nodes:
            self.join(name)

    def join(self, name: str) -> None:
        """A node's Ray, for the first time or again."""
        labels = f"--labels=elastic-node={name},elastic-pool=spot,ray.io/market-type=spot"
        self._ray(name, f"--address={self.head}", "--num-cpus=1", labels, ELASTIC_TEST_NODE=name)

    def _ray(self, name: str, *words: str, **environment: str) -> None:
        more = ("--object-store-memory=80000000", "--disable-usage-stats")
        where = f"--node-ip-address={self.address[name]}"
        command = ray_command("start", *words, where, *more)
        self.space.run(*command, at=name, **environment)

    def start(self, name: str, *words: str, **environment: str) -> subprocess.Popen[str]:
        """On that host, in `folder`."""
        command = ("env", "-C", str(self.folder), *words)
        process = self.space.start(*command, at=name, **environment)
        self._started.append(process)
        return process

    def run(self, name: str, *words: str) -> str:
        return self.space.run("env", "-C", str(self.folder), *words, at=name)

    # ------------------------------------------------------------------------------------- the router

    def swallow(self, senders: Collection[str], receivers: Collection[str]) -> None:
        """What these send to those does not arrive, from now on; nobody is told."""
        for sender, receiver in product(senders, receivers):
            rule = f"ip saddr {self.address[sender]} ip daddr {self.address[receiver]} drop"
            self.space.run("nft", "add", "rule", *RULES.split(), "between", *rule.split())

    def cut(self, some: Collection[str], others: Collection[str]) -> None:
        """Both ways."""
        self.swallow(some, others)
        self.swallow(others, some)

    def mend(self) -> None:
        self.space.run("nft", "flush", "chain", *RULES.split(), "between")

    def close(self) -> None:
        self.space.close()
        for process in self._started:
            process.communicate(timeout=60)
