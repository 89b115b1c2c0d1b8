"""Ray's fake provider of nodes (real raylets on this machine), as `type: external`: with droughts
and failing launches.

Files in the folder of the provider's configuration steer it: TYPE.error (its text is raised by each
launch), TYPE.silent (a launch is taken and nothing comes). It writes `nodes` (id -> type of what
exists) and `launches` (a line for each).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider
from ray.autoscaler.tags import TAG_RAY_USER_NODE_TYPE

from elastic.cluster.ray._ray_private import leave_agents_out


class ScarceProvider(FakeMultiNodeProvider):  # type: ignore[misc]
    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self.folder = Path(provider_config["folder"])
        leave_agents_out()
        self._note()

    def create_node_with_resources_and_labels(
        self, node_config: Any, tags: Any, count: int, *more: Any
    ) -> None:
        kind = tags[TAG_RAY_USER_NODE_TYPE]
        with (self.folder / "launches").open("a") as file:
            file.write(f"{kind} {count}\n")
        error = self.folder / f"{kind}.error"
        if error.exists():
            raise RuntimeError(error.read_text())
        if not (self.folder / f"{kind}.silent").exists():
            super().create_node_with_resources_and_labels(node_config, tags, count, *more)
        self._note()

    def terminate_node(self, node_id: str) -> None:
        super().terminate_node(node_id)
        self._note()

    def _note(self) -> None:
        with self.lock:
            found = {
                name: node["tags"][TAG_RAY_USER_NODE_TYPE]
                for name, node in self._nodes.items()
                if "node" in node
            }
            (self.folder / "nodes.new").write_text(json.dumps(found))
            (self.folder / "nodes.new").rename(self.folder / "nodes")
