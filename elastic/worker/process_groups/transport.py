"""Over what the collectives of a generation go: all that differs between gloo and NCCL in making,
aborting and taking down."""

from __future__ import annotations

import dis
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

# Private, each with a test in test_transport.py: torch's tables of groups, which init_process_group
# and new_group fill while they make a group, and destroy_process_group clears only when every
# shutdown has worked.
from torch._C._distributed_c10d import _register_process_group, _unregister_all_process_groups
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import BackendConfig, GroupName, _update_default_pg, _world

from elastic.user_frames import INSTALLED, STDLIB
from elastic.version import PACKAGE
from elastic.worker.process_groups.control_tree import Pairs
from elastic.worker.process_groups.first_use import Use, use_once
from elastic.worker.process_groups.sockets import shut_new

log = logging.getLogger(__name__)

# The connections of a group for tensors in host memory: each rank with each other, or those of
# Pairs; `device`: where another backend than gloo takes the device's tensors, none.
Host = Literal["mesh", "device"] | Pairs

COLLECTIVE_WORDS = (
    "gloo", "nccl", "connection closed", "connection reset", "broken pipe", "socket", "rendezvous",
    "store", "process group", "timed out waiting", "timeout", "peer closed", "wait for",
    "connectfullmesh",
)  # fmt: skip
OURS = (f"{PACKAGE}{os.sep}", f"{Path(torch.__file__).resolve().parent}{os.sep}")
ABORT_MOST_S = 10.0  # for all communicators of a generation, which are aborted at once
TAKE_DOWN_MOST_S = 10.0
# NCCL's own time limit of a collective. The driver finds out who hangs, and a watchdog that wakes
# holds locks that abort needs.
NCCL_TIMEOUT = timedelta(days=1)


def is_collective_error(error: BaseException) -> bool:
    """Did a process group or its store raise this (a peer is gone), and not the user's code?
    Pipelining wraps such errors."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError):
            return True
        known = isinstance(seen, ConnectionError)
        if isinstance(seen, RuntimeError):
            known = any(word in str(seen).lower() for word in COLLECTIVE_WORDS)
        if known and not _raised_by_program(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _raised_by_program(error: BaseException) -> bool:
    """Its innermost frame is neither torch's nor ours (Python's own library aside), and it was
    raised there: torch's C++ code has no frame of its own, and its errors are RuntimeErrors at the
    place that called it. Unknown without a traceback."""
    trace, place = error.__traceback__, None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        of_python = file.startswith(STDLIB) and not file.startswith(INSTALLED)
        if not of_python and not file.startswith("<frozen"):
            place = trace
        trace = trace.tb_next
    if place is None or place.tb_frame.f_code.co_filename.startswith(OURS):
        return False
    called = dis.opname[place.tb_frame.f_code.co_code[place.tb_lasti]] != "RAISE_VARARGS"
    return not (isinstance(error, RuntimeError) and called and place.tb_next is None)


@dataclass(frozen=True)
class _Asked:
    """A group that is to be made, and where its ranks meet."""

    store: Store
    name: str
    ranks: list[int]
    timeout: timedelta
    host: Host


class Transport:
    """gloo: connections are made with the group, and shutting them frees who waits
    (elastic.worker.process_groups.sockets)."""

    backend = "gloo"

    def make(
        self,
        store: Store,
        name: str,
        ranks: Sequence[int],
        *,
        me: int,
        timeout: timedelta,
        host: Host = "mesh",
    ) -> dist.ProcessGroup:
        """A group of these ranks, in which this one is the `me`-th. Waits for all of them, if their
        host memory is a `mesh`. torch does not know of it until `enlist`: its tables may still be
        those of another generation."""
        asked = _Asked(PrefixStore(f"{name}/", store), name, list(ranks), timeout, host)
        group = dist.ProcessGroup(asked.store, me, len(ranks))
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._connect(group, asked)
        group._set_group_name(GroupName(name))
        group._set_group_desc("undefined")
        return group

    def _connect(self, group: Any, asked: _Asked) -> None:
        store, timeout = PrefixStore("cpu/", asked.store), asked.timeout
        gloo = gloo_of(store, group.rank(), group.size(), timeout=timeout, host=asked.host)
        gloo.options.global_ranks_in_group = asked.ranks
        gloo.options.group_name = GroupName(asked.name)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)

    def warm_up(self, groups: Mapping[dist.ProcessGroup, Collection[Use]]) -> None:
        """Sets up what is made at first use. Collective: each rank gives its groups in the one
        order of the layout's axes, and how a step uses each."""

    def break_set_up(self, before: Collection[int]) -> None:
        """Frees whoever waits in `warm_up` for a rank that does not come. `before`: inodes of this
        process's sockets when that began."""

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> int:
        """Frees what waits in a kernel. Returns how many groups could not be aborted within
        ABORT_MOST_S."""
        return 0

    def host_only(self) -> Transport:
        """That of a participant whose device has failed: it meets the others, and only its host
        memory can be sent."""
        return HostOnly()

    def wire(
        self, world: dist.ProcessGroup, device: torch.device, whole: bool
    ) -> tuple[dist.ProcessGroup, torch.device]:
        """By which state moves, and of which memory. `whole`: every participant has its device."""
        return world, device if whole else torch.device("cpu")

    def counters(self, group: dist.ProcessGroup) -> tuple[Any, ...]:
        """What counts the collectives that were begun in the group."""
        return (group._get_backend(torch.device("cpu")),)

    def take_down(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Shuts the groups down, whatever state they are in."""
        _shut_down(groups)


class HostOnly(Transport):
    """The part of NCCL's and gloo's groups that needs no CUDA context."""

    backend = "cpu:gloo"


class Nccl(Transport):
    """NCCL for tensors on `device`, gloo for those in host memory.

    A communicator is set up at its group's first use, by all of its ranks; a batch of sends and
    receives by some of them would wait for the others. `abort` of a group frees its own
    communicator only, may block while another one's kernel hangs, and raises nothing in those that
    waited: their results are garbage (`Groups.check`).
    """

    backend = "cpu:gloo,cuda:nccl"
    large_bytes = 8 << 20

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def communicator(self, group: dist.ProcessGroup) -> Any:
        return group._get_backend(self.device)

    def _connect(self, group: Any, asked: _Asked) -> None:
        if asked.host != "device":
            super()._connect(group, asked)
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout, options.group_name = NCCL_TIMEOUT, GroupName(asked.name)
        options.global_ranks_in_group = asked.ranks
        store = PrefixStore("cuda/", asked.store)
        nccl = dist.ProcessGroupNCCL(store, group.rank(), group.size(), options)
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)

    def warm_up(self, groups: Mapping[dist.ProcessGroup, Collection[Use]]) -> None:
        one = torch.ones(1, device=self.device)
        for group, uses in groups.items():
            group.allreduce([one]).wait()
            use_once(group, uses, self.device, large_bytes=self.large_bytes, batch=self._batch)
            float(one)  # one after the other: two that are set up at once can wait for each other

    @contextmanager
    def _batch(self, group: Any) -> Iterator[list[Any]]:
        """By the connections of the whole group; else a pair of ranks would have its own. What is
        to be waited for is there when it ends."""
        works: list[Any] = []
        group._start_coalescing(self.device)
        yield works
        works[:] = [group._end_coalescing(self.device)]

    def break_set_up(self, before: Collection[int]) -> None:
        """torch holds the lock that `abort` needs while it waits for NCCL's set-up, which ends with
        an error when its sockets do."""
        shut_new(before)

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> int:
        return _at_once("abort", self._abort, groups, most_s=ABORT_MOST_S)

    def _abort(self, group: dist.ProcessGroup) -> None:
        try:
            self.communicator(group).abort()
        except (
            RuntimeError
        ) as error:  # of a device that is gone, too: it waits for nothing any more
            log.warning("a communicator could not be aborted: %s", error)

    def counters(self, group: dist.ProcessGroup) -> tuple[Any, ...]:
        in_host_memory = torch.device("cpu") in group._device_types
        return (*(super().counters(group) if in_host_memory else ()), self.communicator(group))

    def take_down(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """All at once: each waits for threads and connections of its own. A shutdown may raise, or
        wait for a peer that is gone: after TAKE_DOWN_MOST_S its thread is left to it."""
        if left := _at_once(
            "take-down", lambda group: _shut_down([group]), groups, most_s=TAKE_DOWN_MOST_S
        ):
            log.warning(
                "%d process groups are still being taken down after %.0f s, and are forgotten",
                left,
                TAKE_DOWN_MOST_S,
            )


class Pretended(Transport):
    """Collectives return at once and move nothing."""

    backend = "fake"

    def host_only(self) -> Transport:
        return self

    def _connect(self, group: Any, asked: _Asked) -> None:
        import torch.testing._internal.distributed.fake_pg
        from torch._C._distributed_c10d import FakeProcessGroup

        custom = dist.ProcessGroup.BackendType.CUSTOM
        group._set_default_backend(custom)
        fake: Any = FakeProcessGroup._create_internal(group.rank(), group.size(), None)  # type: ignore[call-arg]
        for device in BackendConfig(dist.Backend(self.backend)).get_device_backend_map():
            group._register_backend(torch.device(device), custom, fake)


def gloo_of(
    store: Store, rank: int, size: int, *, timeout: timedelta, host: Host
) -> dist.ProcessGroupGloo:
    """Of the network interfaces that GLOO_SOCKET_IFNAME names, Pairs use the first."""
    if not isinstance(host, Pairs):
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    how: dict[str, Any] = {"interface": interface} if interface else {}
    create = gloo.create_device if interface else gloo.create_default_device
    options._timeout, options._threads = timeout, 2
    options._devices = [create(**how, lazy_init=True)]
    made: dist.ProcessGroupGloo = gloo(host.store, rank, size, options)
    return made


def _at_once(
    name: str,
    work: Callable[[dist.ProcessGroup], None],
    groups: Sequence[dist.ProcessGroup],
    *,
    most_s: float,
) -> int:
    """Does it to each group in a thread of its own. Returns how many were not done by then."""
    threads = [
        threading.Thread(target=work, args=(group,), name=name, daemon=True) for group in groups
    ]
    for thread in threads:
        thread.start()
    ends_s = time.monotonic() + most_s
    for thread in threads:
        thread.join(max(0.0, ends_s - time.monotonic()))
    return sum(thread.is_alive() for thread in threads)


def _shut_down(groups: Sequence[dist.ProcessGroup]) -> None:
    """The newest first."""
    for group in reversed(groups):
        try:
            group.shutdown()
        except RuntimeError as error:
            log.warning("a process group could not be shut down: %s", error)


def enlist(
    groups: Sequence[tuple[dist.ProcessGroup, Sequence[int]]], backend: str, store: Store
) -> None:
    """Tells torch of groups, each with its ranks, as init_process_group and new_group do; the first
    becomes the default group. Names are free again, and another default group can be enlisted,
    after `forget_groups`."""
    kind = dist.Backend(backend)
    for group, ranks in groups:
        name = group.group_name
        _world.pg_map[group] = kind, PrefixStore(f"{name}/", store)
        _world.pg_names[group] = name
        _world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
        _world.pg_backend_config[group] = str(BackendConfig(kind))
        _world.pg_to_tag[group] = f"ptd:{name}"
        for tag in ("", f"ptd:{name}"):
            _world.tags_to_pg.setdefault(tag, []).append(group)
        _register_process_group(name, group)
    _update_default_pg(groups[0][0])
    _world.group_count = 1  # the default group's name is "0", like torch's own


def forget_groups() -> None:
    """As destroy_process_group does when every shutdown has worked."""
    _update_default_pg(None)
    for known in (
        _world.pg_map, _world.pg_names, _world.pg_group_ranks, _world.pg_backend_config,
        _world.pg_to_tag, _world.tags_to_pg, _world.pg_coalesce_state,
    ):  # fmt: skip
        known.clear()
    _unregister_all_process_groups()
    _world.group_count = 0


def transport_of(device: torch.device) -> Transport:
    return Nccl(device) if device.type == "cuda" else Transport()
