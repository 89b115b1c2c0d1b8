"""A small AWS in namespaces of its own: EC2, IAM and S3 by moto, and for each instance a host with
a kernel's view of its own (network, processes, mounts, name), a real sshd, its private address and
its metadata on 169.254.169.254.

`python aws_hosts.py FOLDER` runs inside; `Aws` is the account with its hosts. Nothing here leads
out: no route, no name server.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.cluster.autoscaled import not_allowed
from support.cluster.metadata_server import MetadataServer, iso
from support.scene_tools import UP, missing_tools
from support.waiting import until

GATEWAY, METADATA, PORT = "172.31.255.254", "169.254.169.254", 5000
ENDPOINT = f"http://{GATEWAY}:{PORT}"
REGION, BUCKET = "us-east-1", "elastic-runs"
USER, HOME = "ubuntu", "/mnt/ubuntu"  # of the image
SHUT_DOWN = "/mnt/shut-down"  # what `sudo shutdown` leaves on a host
LOOK_S = 0.5
SETUP = f"""
set -e
ip link set lo up
mkdir -p /tmp/ray /run/netns /run/sshd
for folder in /run/netns /tmp/ray /dev/shm; do mount -t tmpfs tmpfs $folder; done
sed 's|^root:|{USER}:x:0:0::{HOME}:/bin/bash\\n&|' /etc/passwd >"$3/passwd"
mount --bind "$3/passwd" /etc/passwd
exec "$@"
"""
HOST = f"""
set -e
hostname "$1"
mount -t tmpfs tmpfs /tmp/ray; mount -t tmpfs -o size=2g tmpfs /dev/shm; mount -t tmpfs tmpfs /mnt
if [ -d /sys/class/dmi/id ]; then mount -t tmpfs tmpfs /sys/class/dmi/id; fi
cp -a "$2/image" {HOME}; cp "$2/sshd_config" "$2/host_key" "$3" /mnt; cp "$3" /mnt/authorized_keys
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$1" >/mnt/hosts; mount --bind /mnt/hosts /etc/hosts
echo 'nameserver 127.0.0.1' >/mnt/resolv; mount --bind /mnt/resolv /etc/resolv.conf
cd /; exec "$(command -v sshd || echo /usr/sbin/sshd)" -D -e -f /mnt/sshd_config
"""
SSHD = f"""
Port 22
HostKey /mnt/host_key
AuthorizedKeysFile /mnt/authorized_keys
StrictModes no
PasswordAuthentication no
UsePAM no
PermitRootLogin yes
MaxStartups 100
PidFile none
SetEnv AWS_ENDPOINT_URL={ENDPOINT}
"""


def missing() -> str:
    """Why there can be no such hosts here; '' = there can."""
    return missing_tools(UP) or not_allowed()


def sh(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def answers(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((address, port)) == 0


def moto() -> None:
    """In a process of its own. EC2 starts up to MaxCount instances, moto alone always MinCount of
    them."""
    from moto.ec2.responses.instances import InstanceResponse
    from moto.server import main as serve

    plain = InstanceResponse._get_param

    def asked(self: Any, name: str, *more: Any, **named: Any) -> Any:
        return plain(self, "MaxCount" if name == "MinCount" else name, *more, **named)

    InstanceResponse._get_param = asked  # type: ignore[method-assign]
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    serve(["-H", GATEWAY, "-p", str(PORT)])


@dataclass
class Host:
    """`link`: its cable's end on the side of the network."""

    instance_id: str
    address: str
    node_type: str
    link: str
    process: subprocess.Popen[bytes]
    init: int = 0
    booted: bool = False  # Ray has started there

    def path(self, path: str) -> Path:
        """A file of its own mounts."""
        return Path(f"/proc/{self.init}/root", path.lstrip("/"))

    def processes(self) -> dict[int, str]:
        """Command lines of all that lives in its process namespace."""
        found: dict[int, str] = {}
        try:
            own = os.readlink(f"/proc/{self.init}/ns/pid")
        except OSError:  # it is gone
            return found
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == own:
                    words = (
                        (entry / "cmdline")
                        .read_bytes()
                        .replace(b"\0", b" ")
                        .decode(errors="replace")
                        .strip()
                    )
                    if words:  # a zombie has none
                        found[int(entry.name)] = words
            except OSError:
                continue
        return found


@dataclass
class Aws:
    """The account. `hosts`: instance id -> host. `held`: instances whose host continues though EC2
    has ended them."""

    folder: Path
    hosts: dict[str, Host] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    launched: list[str] = field(default_factory=list)  # node types, in their order
    shut_down: list[str] = field(default_factory=list)  # instances that ended themselves
    metadata: MetadataServer = field(init=False)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        import boto3

        self._network()
        with (self.folder / "moto.log").open("w") as log:
            subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until(lambda: answers(GATEWAY, PORT), "moto's port")
        self.ec2, self.iam = boto3.client("ec2", REGION), boto3.client("iam", REGION)
        boto3.client("s3", REGION).create_bucket(Bucket=BUCKET)
        self.metadata = MetadataServer((METADATA, 80), by_client=True)
        self._image()
        threading.Thread(target=self._reconcile, daemon=True).start()

    def _network(self) -> None:
        for words in (
            "link add br0 type bridge", "link set br0 up", f"addr add {GATEWAY}/16 dev br0",
            f"addr add {METADATA}/32 dev br0"
        ):  # fmt: skip
            sh("ip", *words.split())

    def _image(self) -> None:
        """What a machine image of one's own holds: ~/venv with all that is needed but this
        package."""
        from ray import __file__ as ray_file

        image, base = self.folder / "image", os.path.realpath(sys.executable)
        packages = (
            image
            / f"venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        )
        (image / "venv/bin").mkdir(parents=True)
        packages.mkdir(parents=True)
        for name in ("python", "python3"):
            (image / "venv/bin" / name).symlink_to(base)
        (image / "venv/pyvenv.cfg").write_text(
            f"home = {Path(base).parent}\ninclude-system-site-packages = false\n"
        )
        (packages / "image.pth").write_text(f"{HOME}/elastic\n{Path(ray_file).parents[1]}\n")
        for name, module in (
            ("ray", "ray.scripts.scripts"),
            ("elastic", "elastic.cli.command_line"),
        ):
            self._script(
                f"venv/bin/{name}",
                f"{HOME}/venv/bin/python",
                f"import sys\nfrom {module} import main\nsys.exit(main())",
            )
        self._script("venv/bin/sudo", "/bin/sh", f'[ "$1" = shutdown ] && touch {SHUT_DOWN}')
        (image / ".bashrc").write_text("\n")
        (image / ".profile").write_text(". ~/.bashrc\n")
        stamp = image / "venv/.installed"
        stamp.touch()
        os.utime(stamp, (time.time() + 86400,) * 2)  # newer than any checkout
        (self.folder / "sshd_config").write_text(SSHD)
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "host_key"))

    def _script(self, path: str, interpreter: str, text: str) -> None:
        script = self.folder / "image" / path
        script.write_text(f"#!{interpreter}\n{text}\n")
        script.chmod(0o755)

    # -------------------------------------------------------------------------------- what EC2 says

    def instances(self) -> list[dict[str, Any]]:
        return [
            i for page in self.ec2.describe_instances()["Reservations"] for i in page["Instances"]
        ]

    def paid(self, kind: str = "worker") -> dict[str, str]:
        """Instance id -> node type of those that cost money."""
        found = {}
        for instance in self.instances():
            tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}
            if (
                instance["State"]["Name"] in ("pending", "running")
                and tags.get("ray-node-type") == kind
            ):
                found[instance["InstanceId"]] = tags.get("ray-user-node-type", "")
        return found

    def end(self, instance_id: str) -> None:
        self.ec2.terminate_instances(InstanceIds=[instance_id])

    # ---------------------------------------------------------------------------------------- hosts

    def head(self) -> Host:
        (head,) = self.paid("head")
        return self.hosts[head]

    def _reconcile(self) -> None:
        while True:
            try:
                time.sleep(LOOK_S)  # sleeps: AWS follows what is asked of it with a delay
                live = {
                    i["InstanceId"]: i
                    for i in self.instances()
                    if i["State"]["Name"] in ("pending", "running")
                }
                for instance_id, instance in live.items():
                    if (
                        instance_id not in self.hosts
                        and instance.get("Tags")
                        and not self._one_boots()
                    ):
                        self._start(instance)
                for instance_id in set(self.hosts) - set(live) - self.held:
                    self._stop(self.hosts.pop(instance_id))
                self._shut_down()
            except Exception as error:  # noqa: BLE001 - the account continues; the test is told
                self.problems.append(f"{type(error).__name__}: {error}")
                print(self.problems[-1], file=sys.stderr, flush=True)

    def _one_boots(self) -> bool:
        """Machines come up at different times. Here they share the cores, and `ray start` gives up
        after 30 s."""
        for host in self.hosts.values():
            if not host.booted and host.process.poll() is None:
                running = host.processes().values()
                raylet, start = (
                    any(word in words for words in running)
                    for word in ("raylet/raylet", "ray start")
                )
                host.booted = raylet and not start
        return any(not host.booted and host.process.poll() is None for host in self.hosts.values())

    def _shut_down(self) -> None:
        for instance_id, host in list(self.hosts.items()):
            if instance_id not in self.shut_down and host.init and host.path(SHUT_DOWN).exists():
                self.shut_down.append(instance_id)
                self.held.discard(instance_id)
                said = self.ec2.describe_instance_attribute(
                    InstanceId=instance_id, Attribute="instanceInitiatedShutdownBehavior"
                )
                assert said["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate", said
                self.end(instance_id)

    def _start(self, instance: dict[str, Any]) -> None:
        instance_id, address = instance["InstanceId"], instance["PrivateIpAddress"]
        space, link = f"h{instance_id[-8:]}", f"v{instance_id[-8:]}"
        tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
        key = self.folder / f"{instance['KeyName']}.pub"
        key.write_text(
            sh("ssh-keygen", "-y", "-f", str(self.folder / f"home/.ssh/{instance['KeyName']}.pem"))
        )
        self._tell(instance)
        sh("ip", "netns", "add", space)
        sh("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        sh("ip", "link", "set", link, "master", "br0", "up")
        for words in (
            "link set lo up", f"addr add {address}/16 dev eth0", "link set eth0 up",
            f"route add default via {GATEWAY}"
        ):  # fmt: skip
            sh("ip", "-n", space, *words.split())
        spaces = [
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount",
            "--mount-proc",
            "--uts",
            "--ipc",
        ]
        with (self.folder / f"{space}.log").open("w") as log:
            words = [
                "sh",
                "-c",
                HOST,
                "sh",
                f"ip-{address.replace('.', '-')}",
                str(self.folder),
                str(key),
            ]
            process = subprocess.Popen(
                ["ip", "netns", "exec", space, *spaces, *words], stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, env={"PATH": os.environ["PATH"]},
            )  # fmt: skip
        host = Host(instance_id, address, tags.get("ray-user-node-type", ""), link, process)

        def begun() -> bool:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            host.init = int(children[0]) if children else 0
            return bool(children) or process.poll() is not None

        until(begun, f"the first process of {instance_id}")
        self.hosts[instance_id] = host
        self.launched.append(host.node_type)
        print(
            f"{time.monotonic():.1f} up: {instance_id} {address} {host.node_type}",
            file=sys.stderr,
            flush=True,
        )

    def _tell(self, instance: dict[str, Any]) -> None:
        """Its metadata, the role's credentials with them."""
        # moto gives one to the first of several instances
        profile = instance.get("IamInstanceProfile")
        role = profile["Arn"].rpartition("/")[2] if profile else "elastic-worker"
        keys = {
            "Code": "Success", "Type": "AWS-HMAC", "AccessKeyId": f"ASIA{role.upper()}",
            "SecretAccessKey": "secret", "Token": "session", "LastUpdated": iso(time.time()),
            "Expiration": iso(time.time() + 6 * 3600),
        }  # fmt: skip
        said = self.metadata.node(instance["PrivateIpAddress"])
        said.aws_only = True
        said.aws = {
            "instance-id": instance["InstanceId"],
            "instance-life-cycle": instance.get("InstanceLifecycle", "on-demand"),
            "iam/security-credentials/": role, f"iam/security-credentials/{role}": keys,
        }  # fmt: skip

    def _stop(self, host: Host) -> None:
        host.process.kill()
        host.process.wait()
        print(
            f"{time.monotonic():.1f} down: {host.instance_id} {host.address} {host.node_type}",
            file=sys.stderr,
            flush=True,
        )

    def kill(self, host: Host) -> None:
        """The whole machine at once, its cable first: nobody says goodbye. EC2 does not know
        yet."""
        sh("ip", "link", "set", host.link, "down")
        os.kill(host.process.pid, signal.SIGKILL)

    def cut(self, host: Host) -> None:
        """Its cable. What runs there continues, alone, and EC2 cannot end it soon."""
        self.held.add(host.instance_id)
        sh("ip", "link", "set", host.link, "down")


def main(folder: Path) -> None:
    from support.cluster.autoscaled import answer_scenes, own_output
    from support.cluster.aws_scenes import SCENES, Stagehand

    answers = own_output()
    home = folder / "home"
    (home / ".ssh").mkdir(parents=True)
    for name in [name for name in os.environ if name.startswith(("AWS_", "RAY_", "ELASTIC_"))]:
        del os.environ[name]
    os.environ.update(
        HOME=str(home), AWS_ENDPOINT_URL=ENDPOINT, AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b",
        AWS_DEFAULT_REGION=REGION, RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="token",
    )  # fmt: skip
    hand = Stagehand(folder, Aws(folder))
    answer_scenes(answers, lambda name: SCENES[name](hand), hand.state)


if __name__ == "__main__":
    main(Path(sys.argv[1])) if len(sys.argv) > 1 else moto()
