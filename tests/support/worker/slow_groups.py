"""Process groups whose set-up takes as long as NCCL's, on the CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from elastic.worker.process_groups import groups
from elastic.worker.process_groups.transport import Host, Transport
from elastic.worker.session.session import Session

SETUP_S = 0.4  # of each group with more than one rank


class SlowGroups(Transport):
    setup_delay_s = SETUP_S
    noted_in: ClassVar[str] = os.devnull  # a line for each set-up

    def make(
        self,
        store: Store,
        name: str,
        ranks: Sequence[int],
        me: int,
        timeout: timedelta,
        host: Host = "mesh",
    ) -> dist.ProcessGroup:
        if len(ranks) > 1:
            with open(self.noted_in, "a") as file:
                file.write(f"{name}\n")
            time.sleep(self.setup_delay_s)  # sleeps: a slow set-up
        return super().make(store, name, ranks, me=me, timeout=timeout, host=host)


class SlowestGroups(SlowGroups):
    setup_delay_s = 10.0  # as over hundreds of ranks


def _note_set_ups(session: Session, path: str) -> None:
    SlowGroups.noted_in = path


Session.note_set_ups = _note_set_ups  # type: ignore[attr-defined]


def use_slowest(device: Any = None) -> None:
    groups.transport_of = lambda _: SlowestGroups()


def use(device: Any = None) -> None:
    """In a worker's process: its groups take long from now on."""
    groups.transport_of = lambda _: SlowGroups()
