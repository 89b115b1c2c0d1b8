"""GPU memory that NCCL and CUDA take beside what torch allocates: the one place where these numbers
stand.

They are estimates: no GPU of this project has measured them. By NCCL's source (src/init.cc,
src/include/device.h) one end of a connection has buffers of 512 KiB, 4.7 MiB and 4 MiB for its
three protocols, in each channel: in grains of 2 MiB that is 10 MiB where it receives, and 2 MiB
where it sends. 8 H100 use up to 32 channels. A ring has one end of each kind however many ranks
there are. For sends and receives each peer of the same node takes more (nccl issue 1685: 470 MB, 14
MiB in each of 32 channels); peers in other nodes share one buffer (nccl issue 2363: 512 MiB).
"""

from __future__ import annotations

from elastic.types import Layout

MIB = 1 << 20
CHANNELS = 32
RING_BYTES = CHANNELS * 12 * MIB  # of a communicator that has been used once
# more, for each peer in the same node that messages are exchanged with
PEER_BYTES = CHANNELS * 14 * MIB
NETWORK_BYTES = 512 * MIB  # more, where messages are exchanged with any peers in other nodes
CONTEXT_BYTES = 512 * MIB  # CUDA's context of the process, with the kernels that are loaded


def n_communicators(layout: Layout) -> int:
    """Of a rank that is in most groups, the world's left out. Axes with the same ranks share one
    (process_groups.groups)."""
    sizes = [layout.pp, layout.dp_replicate, layout.dp_shard * layout.cp, layout.tp]
    sizes += [layout.cp] if layout.dp_shard > 1 else []  # else it is the sharded axis itself
    sizes += [2] if layout.pp > 2 else []  # first and last stage
    return sum(size > 1 for size in sizes)


def set_up_bytes(layout: Layout, n_participants: int) -> int:
    """Of a generation whose groups have been used once each."""
    return (n_communicators(layout) + (n_participants > 1)) * RING_BYTES


def messages_bytes(n_in_node: int, across: bool) -> int:
    """What messages add, by how many peers of the node they go to or come from, and whether any
    cross nodes."""
    return n_in_node * PEER_BYTES + across * NETWORK_BYTES


def running_bytes(layout: Layout, n_participants: int) -> int:
    """Of a generation that trains, what its move has added left out: a stage exchanges messages
    with those next to it."""
    return set_up_bytes(layout, n_participants) + messages_bytes(
        min(2, layout.pp - 1), across=False
    )
