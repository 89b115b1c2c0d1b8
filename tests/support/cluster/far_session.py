"""A worker session on a host of its own: the folders of this machine are there another disk's."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.cluster.fake_session import FakeSession

from elastic.types import Admission, NodePrepared, NodeRefused
from elastic.types.orders import WorkerOrder
from elastic.worker.profile.node_checks import NodeRejected, answer

# a folder that stands for the root of the host's disk; not set = that of the driver's host
DISK = "ELASTIC_TEST_DISK"


class FarSession(FakeSession):
    def prepare(self, order: WorkerOrder) -> None:
        entry: Any = order.entry
        mark = entry.terms.mark
        here = replace(mark, uri=os.environ.get(DISK, "") + mark.uri)
        Path(here.uri).mkdir(parents=True, exist_ok=True)
        try:
            answer(here)
        except NodeRejected as refused:
            self.put(NodeRefused(self.me.node_id, str(refused)))
            return
        found = Admission(0.0, 0.0, dict(entry.terms.versions), 1.0, 1, mark=mark.text)
        self.put(NodePrepared(self.me.node_id, (os.getpid(),), admission=found))
