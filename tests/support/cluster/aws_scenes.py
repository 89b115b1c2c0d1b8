"""Scenes on a cluster that `ray up` launched on the small AWS of aws_hosts.py; one run of the
quickstart goes through all."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from support.cluster.aws_hosts import BUCKET, Aws, Host, answers
from support.places import ROOT
from support.waiting import HOSTS_S, WITHIN_S, until

from elastic.ledger.journal import Line, read
from elastic.types import DrainNode, EnterPlan, Event, NodeLost, Notice, PlanEntered, StepDone

FILE = ROOT / "cluster_configs" / "aws_g6e_g5_cheap.yaml"
AMI = "ami-12c6146b"  # one that moto knows
RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
RUN = "rayup"
STEPS, LEASE_S, NOTICE_S = 100_000, 45, 30
LEAVE_S = 120  # that an orphan is given to stop and store
WORKER = re.compile(r"ray::(Worker\b|\S+/\d+\.\d+:)")
UNPAID_MOST_S = 120.0
ADDRESS = "http://127.0.0.1:8265"


def cluster_file(aws: Aws) -> dict[str, Any]:
    """The shipped file with what it says REPLACE, on an image that moto knows; its pools without
    GPUs: there are none here."""
    vpc = aws.ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    group = aws.ec2.create_security_group(GroupName="elastic", Description="elastic", VpcId=vpc)[
        "GroupId"
    ]
    for name in ("elastic-head", "elastic-worker"):
        aws.iam.create_instance_profile(InstanceProfileName=name)
    text = re.sub(r"resolve:ssm:\S+", AMI, FILE.read_text()).replace("sg-0REPLACE000000000", group)
    data: dict[str, Any] = yaml.safe_load(text.replace("LIMIT_S=1200", "LIMIT_S=120"))
    types = data["available_node_types"]
    pools = {
        "spot": (types.pop("g6e-small-spot"), 2),
        "on-demand": (types.pop("g6e-small-on-demand"), 1),
    }
    data["available_node_types"] = {"head": types["head"]}
    for name, (pool, most) in pools.items():
        del pool["labels"]["ray.io/accelerator-type"]
        pool["node_config"]["InstanceType"] = "m7i.large"
        data["available_node_types"][name] = {**pool, "resources": {"CPU": 2}, "max_workers": most}
    data["provider"]["use_internal_ips"] = True
    # the catalog has no spot price of it
    data["metadata"]["elastic"]["pools"] = {"spot": {"usd_per_node_h": 0.04}}
    return data


@dataclass
class Stagehand:
    folder: Path
    aws: Aws
    submitted: Path = field(init=False)
    driven: bool = False  # the job's driver was seen
    tunnel: subprocess.Popen[str] | None = None
    _state: Any = None

    def __post_init__(self) -> None:
        self.submitted = self.folder / "submitted"
        shutil.copytree(ROOT / "jobs" / "quickstart", self.submitted / "jobs" / "quickstart")
        self.file = self.submitted / "cluster.yaml"
        self.file.write_text(yaml.safe_dump(cluster_file(self.aws)))

    def ray(self, *words: str, within_s: float = WITHIN_S) -> str:
        return self.command([*RAY, *words], within_s)

    def elastic(self, *words: str) -> str:
        return self.command([sys.executable, "-m", "elastic", *words])

    def command(self, words: list[str], within_s: float = WITHIN_S, folder: Path = ROOT) -> str:
        """On the user's machine."""
        done = subprocess.run(
            words,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
        )
        text = done.stdout + done.stderr
        with (self.folder / "commands.log").open("a") as log:
            log.write(f"$ {' '.join(words)}\n{text}\n")
        assert done.returncode == 0, f"{words}: {text[-4000:]}"
        return text

    def submit(self) -> None:
        tunnel = (self.folder / "tunnel.log").open("w")
        # no input: ssh would make this process's own one non-blocking
        own = {"stdin": subprocess.DEVNULL, "stdout": tunnel, "stderr": tunnel}
        self.tunnel = subprocess.Popen(
            [*RAY, "dashboard", str(self.file)], cwd=ROOT, text=True, **own
        )
        settings = {
            "steps": STEPS,
            "storage": f"s3://{BUCKET}",
            "budget_usd": 50,
            "orphan_lease_s": LEASE_S,
            "eval_every": 0,
        }
        words = [
            "elastic",
            "run",
            "jobs/quickstart",
            "--cluster",
            "cluster.yaml",
            "--run-name",
            RUN,
            "--json",
        ]
        words += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        until(lambda: answers("127.0.0.1", 8265), "the dashboard's port", 60)
        submit = [
            "job",
            "submit",
            "--no-wait",
            "--address",
            ADDRESS,
            "--working-dir",
            ".",
            "--",
            *words,
        ]
        self.command([*RAY, *submit], folder=self.submitted)

    def drives(self) -> bool:
        """Is the job's driver there? It was once, where `driven`."""
        there = any(
            "jobs/quickstart --cluster" in words for words in self.aws.head().processes().values()
        )
        self.driven |= there
        return there

    def output(self) -> str:
        """What the job has printed."""
        logs = (
            self.aws.head().path("/tmp/ray").glob("session_*/logs/job-driver-*.log")
            if self.aws.paid("head")
            else []
        )
        return "".join(path.read_text() for path in logs)

    # ---------------------------------------------------------------------------- what the run says

    def lines(self) -> list[Line]:
        """The driver's own journal, on the head."""
        found = list(
            self.aws.head()
            .path("/tmp/ray")
            .glob(f"session_*/runtime_resources/working_dir_files/*/elastic_runs/{RUN}")
        )
        path = found[0] / "journal.jsonl" if found else None
        return read(path) if path is not None and path.is_file() else []

    def events(self, kind: type[Event]) -> list[tuple[float, Any]]:
        return [
            (at_s, event)
            for line in self.lines()
            for at_s, event in line.events
            if isinstance(event, kind)
        ]

    def step(self) -> int:
        return max((event.step for _, event in self.events(StepDone)), default=-1)

    def decided(self, kind: type[DrainNode], node: str) -> list[float]:
        orders = [
            (line.at_s, a) for line in self.lines() if line.decision for a in line.decision.actions
        ]
        return [
            at_s for at_s, action in orders if isinstance(action, kind) and action.node_id == node
        ]

    def members(self) -> set[str]:
        """Nodes of the newest plan that was entered."""
        entered = self.events(PlanEntered)
        orders = [
            a
            for line in self.lines()
            if line.decision
            for a in line.decision.actions
            if isinstance(a, EnterPlan)
        ]
        plans = {order.plan.generation: order.plan for order in orders}
        return (
            {worker.node_id for worker in plans[entered[-1][1].generation].ranks}
            if entered
            else set()
        )

    def a_spot(self) -> tuple[Host, str]:
        """A host of the pool that trains, and its node."""
        hosts = {host.address: host for host in self.aws.hosts.values() if host.node_type == "spot"}
        for entry in self.ray_state().node_table():
            found = [
                node for node in self.members() if entry["NodeID"].endswith(node.rpartition("-")[2])
            ]
            if found and entry["NodeManagerAddress"] in hosts:
                return hosts[entry["NodeManagerAddress"]], found[0]
        raise AssertionError(f"no spot host trains: {self.aws.hosts}, {self.members()}")

    def workers_on(self, host: Host) -> dict[int, str]:
        return {pid: words for pid, words in host.processes().items() if WORKER.match(words)}

    # -------------------------------------------------------------------------------- what Ray says

    def ray_state(self) -> Any:
        if self._state is None:
            from ray._private.state import GlobalState
            from ray._raylet import GcsClientOptions

            address = f"{self.aws.head().address}:6379"
            self._state = GlobalState()
            self._state._initialize_global_state(
                GcsClientOptions.create(
                    address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
                )
            )
        return self._state

    def alive(self) -> list[str]:
        return [node["NodeID"] for node in self.ray_state().node_table() if node["Alive"]]

    def ray_id(self, node: str) -> str:
        return next(ray_id for ray_id in self.alive() if ray_id.endswith(node.rpartition("-")[2]))

    def draining(self) -> dict[str, int]:
        return dict(self.ray_state().get_draining_nodes())

    def until(self, done: Callable[[], Any], what: str, within_s: float = HOSTS_S) -> None:
        def look() -> Any:
            if not self.drives() and self.driven:
                raise AssertionError(f"the job ended while it was waited for: {what}")
            return done()

        until(look, what, within_s)

    def goes_on(self, steps: int = 10) -> None:
        """Training does."""
        now = self.step()
        self.until(lambda: self.step() >= now + steps, f"{steps} steps after step {now}")

    def state(self) -> str:
        """For a person."""
        said = [f"problems of the account: {self.aws.problems[-3:]}", f"hosts: {self.aws.hosts}"]
        said.append(self.output()[-3000:])
        for line in self.lines()[-15:] if self.aws.paid("head") else []:
            said.append(
                f"{line.at_s:.1f} {[e for _, e in line.events if not isinstance(e, StepDone)]} "
                f"{line.decision}"
            )
        return "\n".join(said)


# --------------------------------------------------------------------------------------- the scenes


def launched(hand: Stagehand) -> Any:
    """`ray up` takes the file: a head, and nobody else."""
    began = time.monotonic()
    hand.elastic("cluster", "check", str(hand.file))
    hand.ray("get-auth-token", "--generate")
    hand.ray("up", "-y", "--no-config-cache", str(hand.file))
    assert len(hand.aws.paid("head")) == 1
    return {"ray_up_s": round(time.monotonic() - began, 1)}


def reaches_steps(hand: Stagehand) -> Any:
    """The run gets the workers that it asks for, all of them launched for it."""
    began = time.monotonic()
    hand.submit()
    hand.until(lambda: hand.step() >= 20, "20 steps")
    hand.until(lambda: len(hand.members()) == 3, "both spot nodes")
    assert sorted(hand.aws.launched) == ["head", "on-demand", "spot", "spot"]
    return {"submitted_to_grown_s": round(time.monotonic() - began, 1)}


def notice(hand: Stagehand) -> Any:
    """AWS takes a spot instance, as it does: two lines on its metadata service, and later the
    instance."""
    host, node = hand.a_spot()
    ray_id = hand.ray_id(node)
    written_s = time.time()
    hand.aws.metadata.interrupt(host.address, in_s=NOTICE_S)
    hand.until(lambda: any(event.node_id == node for _, event in hand.events(Notice)), "the notice")
    ((heard_s, heard),) = [
        (at_s, event) for at_s, event in hand.events(Notice) if event.node_id == node
    ]
    assert heard.origin.startswith("AWS: spot instance-action terminate at "), heard
    assert written_s + NOTICE_S - 5 < heard.deadline_s < written_s + NOTICE_S + 5
    hand.until(
        lambda: ray_id in hand.draining() or ray_id not in hand.alive(), "the node drained in Ray"
    )
    drained_s = time.time()
    (decided_s,) = hand.decided(DrainNode, node)
    hand.until(lambda: node not in hand.members(), "a plan without the node")
    until(lambda: time.time() >= written_s + NOTICE_S, "the end of the notice")
    hand.aws.end(host.instance_id)
    hand.goes_on()
    spans = {
        "event": heard_s - written_s,
        "decided": decided_s - heard_s,
        "drained": drained_s - decided_s,
    }
    return {f"{name}_s": round(span, 2) for name, span in spans.items()}


def killed(hand: Stagehand) -> Any:
    """A machine is gone without a word; nobody pays for it any longer."""
    hand.until(
        lambda: any(node.startswith("spot-") for node in hand.members()), "a spot node that trains"
    )
    host, node = hand.a_spot()
    at_s = time.time()
    hand.aws.kill(host)
    hand.until(lambda: any(event.node_id == node for _, event in hand.events(NodeLost)), "its loss")
    (lost_s,) = [at_s for at_s, event in hand.events(NodeLost) if event.node_id == node]
    hand.goes_on()
    began_s = time.monotonic()
    hand.until(lambda: host.instance_id not in hand.aws.paid(), "its instance ended")
    return {
        "lost_s": round(lost_s - at_s, 2),
        "instance_ended_s": round(time.monotonic() - began_s, 1),
    }


def cut(hand: Stagehand) -> Any:
    """A machine that nobody reaches runs on: the driver's side continues, the other one ends
    itself, workers and machine."""
    hand.until(
        lambda: any(node.startswith("spot-") for node in hand.members()), "a spot node that trains"
    )
    host, node = hand.a_spot()
    began, at_s = time.monotonic(), time.time()
    hand.aws.cut(host)
    assert hand.workers_on(host)
    hand.until(lambda: any(event.node_id == node for _, event in hand.events(NodeLost)), "its loss")
    (lost_s,) = [at_s for at_s, event in hand.events(NodeLost) if event.node_id == node]
    hand.goes_on()
    hand.until(
        lambda: not hand.workers_on(host),
        "no worker on the other side",
        LEASE_S + LEAVE_S + WITHIN_S,
    )
    alone_s = time.monotonic() - began
    hand.until(lambda: host.instance_id in hand.aws.shut_down, "the machine shut down")
    down_s = time.monotonic() - began
    hand.goes_on()
    return {
        "lost_s": round(lost_s - at_s, 2),
        "workers_left_s": round(alone_s, 1),
        "shut_down_s": round(down_s, 1),
    }


def ended(hand: Stagehand) -> Any:
    """Nobody pays for a worker after the run, nor for the head after `ray down`."""
    assert hand.drives()
    began = time.monotonic()
    hand.elastic("stop", RUN, "--storage", f"s3://{BUCKET}")
    until(lambda: not hand.drives(), "the end of the job")
    summary = json.loads(next(line for line in hand.output().splitlines() if line.startswith('{"')))
    over_s = time.monotonic()
    began_s = time.monotonic()
    until(lambda: not hand.aws.paid(), "no worker that is paid for", UNPAID_MOST_S)
    unpaid_s = time.monotonic() - began_s
    hand.ray("down", "-y", str(hand.file))
    until(lambda: not hand.aws.paid("head"), "no head")
    assert (
        json.loads(hand.elastic("cluster", "reap", str(hand.file), "--json").splitlines()[-1])[
            "instances"
        ]
        == []
    )
    left = [t for t in summary["transitions"] if t["cause"] == "notice"]
    assert [(t["steps_lost"], t["source"]) for t in left] == [(0, "live")], left
    # the start has nothing to compare with
    assert all(t["digest_ok"] for t in summary["transitions"][1:])
    causes = [
        f"{t['cause']}: {t['steps_lost']} lost, {t['pause_s']:.1f} s"
        for t in summary["transitions"]
    ]
    return {
        "stopped_s": round(over_s - began, 1),
        "unpaid_s": round(unpaid_s, 1),
        "steps": summary["steps"],
        "transitions": causes,
    }


SCENES: dict[str, Callable[[Stagehand], Any]] = {
    scene.__name__: scene for scene in (launched, reaches_steps, notice, killed, cut, ended)
}
