"""Process groups of one generation: made together, aborted together.

They are made without torch's tables of groups, of which a process has one set (`form`), and put
into them when the generation before has left (`join`): so they can be made while that one trains.
All groups hang on one TCPStore that the driver's side hosts. On gloo a blocked collective is freed
by shutting the generation's own connected sockets (`abort`); what NCCL needs besides is in
elastic.worker.process_groups.transport.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

# The private names of torch, each with a test in test_groups.py. DTensor caches what it has worked
# out about a mesh, and meshes compare equal without their groups: a cached mesh finds its groups by
# the names that it was made with.
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from elastic.types import Layout
from elastic.types.grid import (
    MESH_MOST,
    ROW,
    axis_groups,
    control_tree,
    coordinates,
    expert_groups,
    stage_ranks,
)
from elastic.types.orders import Rendezvous
from elastic.worker.process_groups import rendezvous, wire
from elastic.worker.process_groups.control_tree import Control, Pairs, connect
from elastic.worker.process_groups.first_use import MESSAGES, Use
from elastic.worker.process_groups.network_interfaces import choose_for_gloo, outward
from elastic.worker.process_groups.reach import Reach
from elastic.worker.process_groups.sockets import address_of, inodes, knock, listening, shut
from elastic.worker.process_groups.transport import (
    Host,
    Pretended,
    Transport,
    enlist,
    forget_groups,
    transport_of,
)

log = logging.getLogger(__name__)

CONNECT_S = 5.0
LOOK_S = 0.02
LOOK_MOST_S = 10.0  # after an abort, for pairs that connect just then

# a mesh by its ranks and axes, and one of these axes
Key = tuple[tuple[int, ...], tuple[str, ...], str]
Axis = tuple[str, int, dist.ProcessGroup]  # its name, its size, this rank's group
# the names by which cached meshes look for their group: those of every generation
_known_names: dict[Key, set[Any]] = {}
# the generation that has begun to last: newer sockets are of none before it
_forming: list[int] = []


def keep_names(mesh: DeviceMesh) -> bool:
    """Lets the groups of this mesh answer to the names that equal meshes of earlier generations
    know, so that what DTensor has cached stays right. False: such a name is another group's now;
    the cache was cleared instead."""
    names = mesh.mesh_dim_names or ()
    mine: dict[Key, dist.ProcessGroup] = {}
    for n in range(1, len(names) + 1):
        for axes in combinations(names, n):
            part = mesh if axes == names else mesh[axes]
            ranks = tuple(part.mesh.flatten().tolist())
            mine.update({(ranks, axes, axis): mesh.get_group(axis) for axis in axes})
    for key, group in mine.items():
        known = _known_names.setdefault(key, set())
        known.add(group.group_name)
        for name in known:
            try:
                found = _resolve_process_group(name)
            except RuntimeError:
                _register_process_group(name, group)
                continue
            if found is not group:
                _known_names.clear()
                _known_names.update({k: {g.group_name} for k, g in mine.items()})
                _clear_sharding_prop_cache()
                return False
    return True


class Groups:
    """The groups of one generation as one rank sees them.

    `world`, the default group, spans all participants (ranks of the plan first, then workers that
    only send); messages go over it, and those of peer replicas over `copies`. `control` is for
    numbers from all participants, `commit` for those of the plan's ranks. Above MESH_MOST ranks
    these four have no full mesh of connections (elastic.worker.process_groups.control_tree). `mesh`
    is this rank's pipeline stage with the axes dp_replicate, fsdp (= dp_shard x cp), tp that are
    larger than 1; with `fsdp` that axis is there in any case. `stage`, where it is asked for, spans
    these ranks. Where ep is larger than 1 `experts` is the mesh of the ranks that have parts of the
    same experts (dp_replicate, fsdp, the latter in any case), and tokens go over `ep`.
    """

    def __init__(
        self,
        generation: int,
        layout: Layout,
        device: torch.device,
        *,
        fsdp: bool = False,
        stage: bool = False,
        transport: Transport | None = None,
    ) -> None:
        self.generation = generation
        self.fsdp, self._wants_stage = fsdp, stage
        self.stage: dist.ProcessGroup | None = None
        self.layout = layout
        self.device = device
        self.transport = transport or transport_of(device)
        self.mesh: DeviceMesh | None = None
        self.pp: dist.ProcessGroup | None = None
        self.cp: dist.ProcessGroup | None = None  # ranks that have the parts of one sequence
        self.ep: dist.ProcessGroup | None = None
        self.experts: DeviceMesh | None = None
        self.control = self.commit = Control(0, 1, ())
        self.copies: dist.ProcessGroup | None = None
        self.tie: dist.ProcessGroup | None = None  # first and last stage of this rank's pipeline
        self._world: dist.ProcessGroup | None = None
        self._made: list[tuple[dist.ProcessGroup, tuple[int, ...]]] = []  # with ranks, world first
        self._rows: list[dist.ProcessGroup] = []  # of trees: torch need not know of them
        self._near: set[int] = set()  # participants that it is connected with from the start
        self._pairs: list[Pairs] = []
        self._listeners: list[tuple[int, Any]] = []  # family and address
        self._secret = ""
        self._axes: list[Axis] = []  # of the mesh
        self._alike: list[list[int]] = []  # ranks of the mesh `experts`
        self._same_experts: dist.ProcessGroup | None = None  # this one's row of them
        self._formed = self._enlisted = False
        # those that tensors on the device go through, the world first, and how a step uses each
        self._device_groups: dict[dist.ProcessGroup, set[Use]] = {}
        self._addresses: set[tuple[str, int]] = set()  # at which the participants listen
        self._store_port = 0
        self._before: set[int] = set()
        # this process's sockets when communicators began to be set up; None: they are not just now
        self._warming: set[int] | None = None
        self._store: Store | None = None
        # name, first rank, group and its backends, of the groups that count
        self._counted: tuple[tuple[str, int, Any, tuple[Any, ...]], ...] = ()
        self._aborted = False
        self._joining = threading.Event()
        self._n_participants = 0
        # has this participant, have all of them a device that works?
        self._has_device = self._whole = True

    @property
    def world(self) -> dist.ProcessGroup:
        assert self._world is not None
        return self._world

    @property
    def formed(self) -> bool:
        """All groups are made, whether torch knows of them or not."""
        return self._formed

    @property
    def pretended(self) -> bool:
        """There are no other ranks: a rehearsal."""
        return isinstance(self.transport, Pretended)

    @property
    def data_parallel(self) -> list[dist.ProcessGroup]:
        """Of the ranks that have other samples, or parts of them, the innermost first."""
        return [group for name, _, group in reversed(self._axes) if name != "tp"]

    def axis_names(self) -> dict[str, str]:
        """Name of a group -> the axis that it is of, as a profile needs it; once it is joined."""
        groups = [(group, name) for name, _, group in self._axes]
        groups += [(g, "pp") for g in (self.tie, self.pp) if g is not None]
        groups += [(g, name) for g, name in ((self.cp, "cp"), (self.ep, "ep")) if g is not None]
        return {str(group.group_name): name for group, name in groups}

    @property
    def wire(self) -> tuple[dist.ProcessGroup, torch.device]:
        """By which state moves, and of which memory: host memory where a participant has lost its
        device."""
        return self.transport.wire(self.world, self.device, self._whole)

    def lose_device(self) -> None:
        """This participant has no device that works; before `join`."""
        self._has_device, self.transport = False, self.transport.host_only()

    @property
    def aborted(self) -> bool:
        return self._aborted

    def join(self, at: Rendezvous, me: int) -> None:
        """The groups of this process from now on, made now unless they are `formed` already. Raises
        as `form`."""
        if not self._formed:
            self.form(at, me)
        self.check()
        self._enlist()

    def form(self, at: Rendezvous, me: int) -> None:
        """Meets the other participants and makes all groups. Blocks until everyone is there;
        `abort` frees it. Other groups may be in use meanwhile: nothing here is known to torch
        before `join`.

        Raises PeerGarbled where somebody came who does not know the secret, PeersUnreached where
        nodes that have come do not answer this one."""
        self._n_participants = len(at.participants)
        _forming[:] = [self.generation]
        self._before = inodes()  # known to `abort`: it must not knock at what others listen at
        self._joining.set()
        reach = Reach(at, me, self.abort)
        try:
            self._form(at, me, reach)
        except Exception:
            reach.check()
            raise
        finally:
            self._joining.clear()
            reach.end()
        self.check()
        self._formed = True

    def _form(self, at: Rendezvous, me: int, reach: Reach) -> None:
        secret, n_participants = at.secret, len(at.participants)
        timeout = timedelta(seconds=at.timeout_s)
        self.check()
        # known to `abort` from here on: a connection that it shuts while it is made is made again
        self._store_port = at.store[1]
        tcp, here = rendezvous.connect_store(*at.store, lambda: self._aborted)
        here = outward(here, at)
        choose_for_gloo(here)  # the way to the store is that to others
        tcp.set_timeout(timeout)
        self.check()
        place = rendezvous.place(self.generation, secret)
        self._store, self._secret = PrefixStore(place, tcp), secret
        if (listens := reach.begin(self._store, place, here)) is not None:
            self._before.add(listens)
        self._make_world(me, n_participants, timeout)
        if me < self.layout.world_size:
            self._make_groups(me, timeout)
        self._share_addresses(me)
        if secret and n_participants > 1:
            self.control.prove(secret, self.generation)
        self._tell_all()
        cold = {
            group: uses - MESSAGES
            for group, uses in self._device_groups.items()
            if group.size() > 1 and (self._whole or group is not self.world)
        }
        self._warm_up(cold)

    def first_messages(self) -> None:
        """Connects those that exchange messages in a step. Of all ranks of the plan, when the state
        has moved: until then others need the memory."""
        each = ((group, uses & MESSAGES) for group, uses in self._device_groups.items())
        self._warm_up({group: uses for group, uses in each if uses})
        self.check()

    def _warm_up(self, groups: Mapping[dist.ProcessGroup, Collection[Use]]) -> None:
        self._warming = inodes()
        try:
            self.check()  # an abort from here on sees that it runs, and frees it
            self.transport.warm_up(groups)
        finally:
            self._warming = None

    def pretend(self, rank: int) -> None:
        """Groups of a layout without the other ranks: collectives return at once and move nothing.
        For rehearsals."""
        self.transport, self._store = Pretended(), HashStore()
        timeout, self._n_participants = timedelta(seconds=CONNECT_S), self.layout.world_size
        self._make_world(rank, self._n_participants, timeout)
        self._make_groups(rank, timeout)
        self._enlist()

    def _make_world(self, me: int, n: int, timeout: timedelta) -> None:
        if n <= MESH_MOST:
            self._world = self._make("0", range(n), me, timeout=timeout)
            self.control = Control(me, n, (self._world,))
        else:
            self.control = self._tree("control", me, n, timeout=timeout)
            self._world = self._make("0", range(n), me, timeout=timeout, host=self._new_pairs())
        self._of_device(self._world)

    def _tree(self, name: str, me: int, n: int, *, timeout: timedelta) -> Control:
        assert self._store is not None
        tree, rows = control_tree(n), []
        alone = self.transport.host_only()
        mine = [(level, row) for level, each in enumerate(tree) for row in each if me in row]
        for level, row in ((level, row) for level, row in mine if len(row) > 1):
            store = PrefixStore(f"{name}/{level}/", self._store)
            made = alone.make(store, str(row[0]), row, me=row.index(me), timeout=timeout)
            self._near.update(row)
            rows.append(made)
        self._rows += rows
        return Control(me, n, rows, highest=me in tree[-1][0])

    def _new_pairs(self) -> Pairs:
        self._pairs.append(Pairs())
        return self._pairs[-1]

    def _make(
        self, name: str, ranks: Sequence[int], me: int, *, timeout: timedelta, host: Host = "mesh"
    ) -> dist.ProcessGroup:
        assert self._store is not None
        # below the default group's, as torch has them
        store = PrefixStore("0/", self._store) if self._made else self._store
        made = self.transport.make(
            store, name, ranks, me=ranks.index(me), timeout=timeout, host=host
        )
        self._made.append((made, tuple(ranks)))
        if not isinstance(host, Pairs):
            self._near.update(ranks)
        return made

    def _make_groups(self, rank: int, timeout: timedelta) -> None:
        layout = self.layout
        everyone = list(range(layout.world_size))
        # never the default group: its name means another set each time
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}

        def new(ranks: list[int], host: Host = "mesh") -> dist.ProcessGroup:
            """Its name counts the groups made before it: equal in each generation of that
            layout."""
            words = "_".join(map(str, [*ranks, len(self._made)]))
            name = hashlib.sha1(words.encode(), usedforsecurity=False).hexdigest()
            return self._make(name, ranks, rank, timeout=timeout, host=host)

        def group(ranks: list[int]) -> dist.ProcessGroup:
            key = tuple(ranks)
            if key not in made:
                made[key] = new(ranks, "mesh" if self._n_participants <= MESH_MOST else "device")
            return made[key]

        def on_device(ranks: list[int], *uses: Use) -> dist.ProcessGroup:
            return self._of_device(group(ranks), *uses)

        def mine(axes: tuple[str, ...]) -> list[int]:
            return next(g for g in axis_groups(layout, axes) if rank in g)

        if len(everyone) <= MESH_MOST:
            made[tuple(everyone)] = new(everyone)
            self.commit = Control(rank, len(everyone), (made[tuple(everyone)],))
        elif self._n_participants == len(everyone):
            self.commit = self.control.again()
        else:
            self.commit = self._tree("commit", rank, len(everyone), timeout=timeout)
        if len(everyone) > 1:
            self.copies = new(everyone, "mesh" if len(everyone) <= MESH_MOST else self._new_pairs())
        if layout.pp > 1:
            self.pp = on_device(mine(("pp",)), "line" if layout.n_stages == layout.pp else "ring")
        fsdp = layout.dp_shard * layout.cp
        if layout.dp_replicate > 1:
            replicas = on_device(mine(("dp_replicate",)), "sums", "parts")
            self._axes.append(("dp_replicate", layout.dp_replicate, replicas))
        if fsdp > 1 or layout.dp_replicate > 1 or self.fsdp:
            self._axes.append(("fsdp", fsdp, on_device(mine(("dp_shard", "cp")), "parts")))
        if layout.tp > 1:
            self._axes.append(("tp", layout.tp, on_device(mine(("tp",)), "sums", "parts")))
        if layout.cp > 1:
            self.cp = on_device(mine(("cp",)), "parts")
        if layout.ep > 1:
            neighbors, self._alike = expert_groups(layout, rank)
            self.ep = on_device(neighbors, "pieces")
            row = next(row for row in self._alike if rank in row)
            self._same_experts = on_device(row, "parts")
        here = stage_ranks(layout, coordinates(layout, rank).pp)
        if self._wants_stage and len(here) > 1:
            self.stage = on_device(here, "pieces")
        if layout.pp > 1:
            line = mine(("pp",))
            if rank in (line[0], line[-1]):  # made last: group names count the groups made before
                self.tie = on_device([line[0], line[-1]], "sums")

    def _enlist(self) -> None:
        """torch knows of the groups from now on, and of no others."""
        assert self._store is not None
        self._enlisted = True
        enlist(self._made, self.transport.backend, self._store)
        if self._axes:
            rank = self.world.rank()
            ranks = stage_ranks(self.layout, coordinates(self.layout, rank).pp)
            self.mesh = self._mesh_of(self._axes, ranks)
        if self._same_experts is not None:
            axes = [axis for axis in self._axes if axis[0] == "dp_replicate"]
            axes += [("fsdp", len(self._alike[0]), self._same_experts)]
            self.experts = self._mesh_of(axes, self._alike)
        self._count()

    def _mesh_of(self, axes: Sequence[Axis], ranks: Sequence[Any]) -> DeviceMesh:
        groups = [group for _, _, group in axes]
        mesh = DeviceMesh.from_group(
            groups[0] if len(groups) == 1 else groups,
            self.device.type,
            mesh=torch.tensor(ranks).view([size for _, size, _ in axes]),
            mesh_dim_names=tuple(name for name, _, _ in axes),
        )
        keep_names(mesh)
        return mesh

    def _of_device(self, group: dist.ProcessGroup, *uses: Use) -> dist.ProcessGroup:
        self._device_groups.setdefault(group, set()).update(uses)
        return group

    def _count(self) -> None:
        """Which groups' numbers say who has not come, or has come to something else."""
        named = (("tie", self.tie), ("cp", self.cp), ("ep", self.ep))
        names = {id(group): name for name, group in named}
        merged = "dp_shard" if self.layout.cp == 1 else "dp_shard x cp"
        names.update(
            {id(group): merged if axis == "fsdp" else axis for axis, _, group in self._axes}
        )
        if self.pp is not None:
            names[id(self.pp)] = "pp"
        self._counted = tuple(
            (names[id(group)], ranks[0], group, self.transport.counters(group))
            for group, ranks in self._made
            if len(ranks) > 1 and names.get(id(group))
        )

    def arrived(self) -> tuple[tuple[str, int, int], ...]:
        """Of each group that this rank is in: its axis, its first rank, and how many collectives
        this rank has begun there. From any thread. Of the commit's tree only the lowest row: in the
        others a rank comes after its whole row."""
        with suppress(RuntimeError):  # a backend that does not count
            row = ROW if self.commit.size > MESH_MOST else self.commit.size
            plan = ("plan", self.commit.rank // row * row, self.commit.n_begun)
            return (plan,) * (self.commit.size > 1) + tuple(
                (name, first, sum(backend._get_sequence_number_for_group() for backend in backends))
                for name, first, _, backends in self._counted
            )
        return ()

    def named(self, group: dist.ProcessGroup | None) -> tuple[str, int] | None:
        """Axis and first rank, as `arrived` names it; None: it is none of those that count."""
        asked = self._world if group is None else group
        return next(((name, first) for name, first, one, _ in self._counted if one is asked), None)

    def _share_addresses(self, me: int) -> None:
        """Tells those that this rank has a connection to where it listens: by that `abort` knows
        the generation's connections from all others."""
        assert self._store is not None
        self._listeners = listening(self._before)
        self._store.set(f"addresses/{me}", json.dumps(self._own_words([])))
        near = sorted(self._near)
        for rank, words in zip(
            near, self._store.multi_get([f"addresses/{i}" for i in near]), strict=True
        ):
            self._addresses.update(wire.addresses(words, rank)[1])

    def _tell_all(self) -> None:
        """Tells all participants whether this one's device works, and where its pairs connect.
        Raises PeerGarbled where one says anything else."""
        mine = self._own_words([pairs.words(self.control.rank) for pairs in self._pairs])
        for rank, words in enumerate(wire.gather_words(mine, self.control)):
            has_device, theirs, pairs = wire.addresses(words, rank)
            self._whole = self._whole and has_device
            self._addresses.update(theirs)
            for of, where in zip(self._pairs, pairs, strict=False):  # who only sends has fewer
                of.know(rank, where)

    def _own_words(self, pairs: list[str]) -> list[Any]:
        return [self._has_device, [address_of(at) for _, at in self._listeners], pairs]

    def connect(self, group: dist.ProcessGroup, peers: Collection[int]) -> None:
        """Before the first messages between this rank of `world` or `copies` and these; each of
        them calls it for this one. In a mesh they are connected."""
        if group.size() > MESH_MOST:
            connect(group, peers, self._secret, generation=self.generation)

    def abort(self) -> None:
        """Breaks off everything that waits on this generation. Safe from another thread, and twice.

        gloo first: where a commit cannot come through any more, nobody applies what an aborted
        kernel has left (`check`). While the participants still meet, or where pairs connect when
        they need it, connections are made all the time, and one that is made after the look would
        wait for a peer that is gone: the look is repeated until they are made (of pairs: until
        this generation is closed), and who waits to be connected to is freed too."""
        self._aborted = True
        try:
            self._shut_own()
        finally:
            # before the communicators, which may keep this thread for long
            if self._joining.is_set() or self._warming is not None or self._pairs:
                threading.Thread(
                    target=self._shut_until_joined, name="abort-join", daemon=True
                ).start()
            left = self.transport.abort(list(self._device_groups))
        if left:
            log.warning(
                "generation %d: %d communicators could not be aborted", self.generation, left
            )

    def check(self) -> None:
        """After results of the device were read, before they are believed: an aborted kernel ends
        like one that is done. Raises ConnectionAbortedError when this generation was aborted."""
        if self._aborted:
            raise ConnectionAbortedError(f"generation {self.generation} was aborted")

    def _shut_until_joined(self) -> None:
        knocked: set[Any] = set()
        n_aborted, ends_s = len(self._device_groups), time.monotonic() + LOOK_MOST_S
        while (
            (joining := self._joining.is_set())
            or self._warming is not None
            or (self._pairs and time.monotonic() < ends_s)
        ):
            self._shut_own()
            if (warming := self._warming) is not None and _forming == [self.generation]:
                self.transport.break_set_up(warming)
            for family, address in listening(self._before) if joining else self._listeners:
                if address not in knocked:
                    knocked.add(address)
                    knock(family, address, self._n_participants)
            made = list(self._device_groups)
            if len(made) > n_aborted:
                self.transport.abort(made[n_aborted:])
                n_aborted = len(made)
            time.sleep(LOOK_S)

    def _shut_own(self) -> None:
        """Before `join` ends the addresses are not known: only the store's connection is shut."""
        shut(self._before, self._addresses, self._store_port, at_once=self._joining.is_set())

    def close(self) -> None:
        """Takes the groups down; needs no peer."""
        if self._enlisted:
            forget_groups()
        made, self._made, self._rows = [*(group for group, _ in self._made), *self._rows], [], []
        if made:
            self.transport.take_down(made)
        for mesh in (self.mesh, self.experts):
            if mesh is not None:  # cached meshes must not keep the sockets of groups that are gone
                mesh._pg_registry.clear()
        self.mesh = self.pp = self.cp = self.copies = self.tie = self.stage = self._world = None
        self.ep = self.experts = self._same_experts = None
        self.control = self.commit = Control(0, 1, ())
        self._counted, self._device_groups, self._axes, self._pairs = (), {}, [], []
        self._store = None
        self._formed = self._enlisted = False
