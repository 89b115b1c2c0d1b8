"""Programs of this machine without which scenes of the tests are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

TOOLS = {  # of scenes on hosts that are namespaces -> the package that has it
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "rsync": "rsync",
    "ip": "iproute2",
    "make": "make",
    "nft": "nftables",
}
UP = ("sshd", "ssh", "rsync", "ip", "make")  # of `ray up`


def missing_tools(wanted: Sequence[str] = tuple(TOOLS)) -> str:
    """Those that are not here, and what brings them; '' = all are."""
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
    gone = [tool for tool in wanted if shutil.which(tool, path=path) is None]
    if not gone:
        return ""
    packages = " ".join(TOOLS[tool] for tool in gone)
    return f"not on this machine: {', '.join(gone)} (apt-get install {packages})"
