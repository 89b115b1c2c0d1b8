"""Over what the collectives of a generation go: all that differs between gloo and NCCL in making, aborting and taking down."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Private, each with a test in test_transport.py: what destroy_process_group forgets only when every shutdown has worked.
from torch._C._distributed_c10d import _unregister_all_process_groups
from torch.distributed.distributed_c10d import _update_default_pg, _world

log = logging.getLogger(__name__)

COLLECTIVE_WORDS = (
    "gloo", "nccl", "connection closed", "connection reset", "broken pipe", "socket", "rendezvous", "store",
    "process group", "timed out waiting", "timeout", "peer closed", "wait for", "connectfullmesh",
)  # fmt: skip
ABORT_MOST_S = 10.0  # for all communicators of a generation, which are aborted at once
TAKE_DOWN_MOST_S = 10.0
# NCCL's own time limit of a collective. The driver finds out who hangs, and a watchdog that wakes holds locks that abort needs.
NCCL_TIMEOUT = timedelta(days=1)


def is_collective_error(error: BaseException) -> bool:
    """Did a process group or its store raise this (a peer is gone), and not the user's code? Pipelining wraps such errors."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError | ConnectionError):
            return True
        text = str(seen).lower()
        if isinstance(seen, RuntimeError) and any(word in text for word in COLLECTIVE_WORDS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


class Transport:
    """gloo: connections are made with the group, and shutting them frees who waits (elastic.worker.sockets)."""

    backend = "gloo"

    def made(self, group: dist.ProcessGroup) -> None:
        """Called with each new group, before its first use."""

    def warm_up(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Sets up what is made at first use. Collective: each rank gives its groups in the one order of the layout's axes."""

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> int:
        """Frees what waits in a kernel. Returns how many groups could not be aborted within ABORT_MOST_S."""
        return 0

    def host_only(self) -> Transport:
        """That of a participant whose device has failed: it meets the others, and only its host memory can be sent."""
        return HostOnly()

    def wire(self, world: dist.ProcessGroup, device: torch.device, whole: bool) -> tuple[dist.ProcessGroup, torch.device]:
        """By which state moves, and of which memory. `whole`: every participant has its device."""
        return world, device if whole else torch.device("cpu")

    def counters(self, group: dist.ProcessGroup) -> tuple[Any, ...]:
        """What counts the collectives that were begun in the group."""
        return (group._get_backend(torch.device("cpu")),)

    def take_down(self) -> None:
        """Takes down all groups of this process; afterwards a new default group can be made, whatever happened."""
        try:
            dist.destroy_process_group()
        except (AssertionError, RuntimeError, ValueError) as error:
            log.warning("the process groups could not be taken down, and are forgotten: %s", error)
            forget_groups()


class HostOnly(Transport):
    """The part of NCCL's and gloo's groups that needs no CUDA context."""

    backend = "cpu:gloo"


class Nccl(Transport):
    """NCCL for tensors on `device`, gloo for those in host memory.

    A communicator is set up at its group's first use, by all of its ranks; a batch of sends and receives by some of them would
    wait for the others. `abort` of a group frees its own communicator only, may block while another one's kernel hangs, and
    raises nothing in those that waited: their results are garbage (`Groups.check`).
    """

    backend = "cpu:gloo,cuda:nccl"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def communicator(self, group: dist.ProcessGroup) -> Any:
        return group._get_backend(self.device)

    def made(self, group: dist.ProcessGroup) -> None:
        self.communicator(group)._set_default_timeout(NCCL_TIMEOUT)

    def warm_up(self, groups: Sequence[dist.ProcessGroup]) -> None:
        one = torch.ones(1, device=self.device)
        for group in groups:
            dist.all_reduce(one, group=group)
            float(one)  # one after the other: two that are set up at once can wait for each other

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> int:
        threads = [threading.Thread(target=self._abort, args=(group,), name="abort", daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        ends_s = time.monotonic() + ABORT_MOST_S
        for thread in threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        return sum(thread.is_alive() for thread in threads)

    def _abort(self, group: dist.ProcessGroup) -> None:
        try:
            self.communicator(group).abort()
        except RuntimeError as error:  # of a device that is gone, too: it waits for nothing any more
            log.warning("a communicator could not be aborted: %s", error)

    def counters(self, group: dist.ProcessGroup) -> tuple[Any, ...]:
        return (*super().counters(group), self.communicator(group))

    def take_down(self) -> None:
        """Its shutdown may raise, or wait for a peer that is gone: after TAKE_DOWN_MOST_S a thread is left to it."""
        groups = sorted(_world.pg_names, key=lambda group: _world.pg_names[group], reverse=True)
        thread = threading.Thread(target=_shut_down, args=(groups,), name="take-down", daemon=True)
        thread.start()
        thread.join(TAKE_DOWN_MOST_S)
        if thread.is_alive():
            log.warning("the process groups are still being taken down after %.0f s, and are forgotten", TAKE_DOWN_MOST_S)
        forget_groups()


def _shut_down(groups: list[dist.ProcessGroup]) -> None:
    for group in groups:
        try:
            group.shutdown()
        except RuntimeError as error:
            log.warning("a process group could not be shut down: %s", error)


def forget_groups() -> None:
    """What destroy_process_group does when every shutdown has worked: names and the default group can be used again."""
    _update_default_pg(None)
    for known in (
        _world.pg_map, _world.pg_names, _world.pg_group_ranks, _world.pg_backend_config, _world.pg_to_tag, _world.tags_to_pg,
        _world.pg_coalesce_state,
    ):  # fmt: skip
        known.clear()
    _unregister_all_process_groups()
    _world.group_count = 0


def transport_of(device: torch.device) -> Transport:
    return Nccl(device) if device.type == "cuda" else Transport()
