"""Starts bare_torch.py, or another module, in one process per rank, as torchrun would, and reads
what rank 0 printed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from elastic.certify.harness.place import Place
from elastic.cluster.ray.processes import free_port
from elastic.scenarios.limit import Failed, Limit
from elastic.scenarios.watched_run import TAIL, last_json
from elastic.version import python_path
from elastic.worker.process.environment import die_with_parent

BARE_TORCH = "elastic.certify.reference.bare_torch"
MOST_S = 90.0
WIRE_BYTES = 16 << 20


def wire(place: Place, limit: Limit) -> float:
    """GB/s of bare messages between all ranks at once."""
    return float(run(place, (BARE_TORCH, "wire", str(WIRE_BYTES)), limit)["gb_per_s"])


def train(place: Place, n_steps: int, limit: Limit) -> list[float]:
    """Seconds of each step of the plain loop."""
    return [float(s) for s in run(place, (BARE_TORCH, "train", str(n_steps)), limit)["step_s"]]


def run(
    place: Place, module: tuple[str, ...], limit: Limit, *, most_s: float = MOST_S
) -> dict[str, Any]:
    """The JSON object that rank 0 prints last. Raises Failed with what they wrote, OutOfTime."""
    if place.address:
        return _on_cluster(place, module, limit, most_s=most_s)
    environments, port = place.environments(), free_port()
    with tempfile.TemporaryFile("w+") as out:
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, environment in enumerate(environments):
                there = _rank(rank, len(environments), "127.0.0.1", port=port)
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", *module], stdin=subprocess.DEVNULL,
                        stdout=out, stderr=subprocess.STDOUT, env={**os.environ,
                        "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), **environment,
                        **there}, start_new_session=True, preexec_fn=die_with_parent,
                    )
                )  # fmt: skip
            _wait(ranks, limit, " ".join(module), most_s=most_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        out.seek(0)
        text = out.read()
    return _result(module, text, any(process.returncode for process in ranks))


def _rank(rank: int, world: int, host: str, *, port: int) -> dict[str, str]:
    """What torchrun tells each rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def _result(module: tuple[str, ...], text: str, failed: bool) -> dict[str, Any]:
    if failed:
        raise Failed(f"{' '.join(module)} failed: {text[-TAIL:]}")
    return last_json(text)


def _on_cluster(
    place: Place, module: tuple[str, ...], limit: Limit, *, most_s: float
) -> dict[str, Any]:
    """At the seats of the place."""
    from elastic.cluster.workers import remote_processes

    seats = place.seats[: place.ranks]
    port = remote_processes.free_port(seats[0])
    environments = tuple(
        {"OMP_NUM_THREADS": "1", **own, **_rank(rank, len(seats), seats[0].host, port=port)}
        for rank, own in enumerate(place.environments())
    )
    what = " ".join(module)
    try:
        ended = remote_processes.run(
            seats,
            remote_processes.RemoteCommand(("-m", *module), environments, most_s),
            lambda: limit.look(what),
        )
    except TimeoutError as error:
        raise Failed(str(error)) from error
    return _result(module, "\n".join(text for _, text in ended), any(code for code, _ in ended))


def _wait(ranks: list[subprocess.Popen[bytes]], limit: Limit, what: str, *, most_s: float) -> None:
    """Until all have ended, or one has failed."""
    end_s = time.monotonic() + most_s
    while any(process.poll() is None for process in ranks):
        if any(process.returncode for process in ranks):
            time.sleep(1.0)  # the others may say why
            return
        limit.look(what)
        if time.monotonic() > end_s:
            raise Failed(f"{what} did not end within {most_s:.0f} s")
        time.sleep(0.05)
