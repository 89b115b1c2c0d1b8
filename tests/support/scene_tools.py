"""Programs of this machine without which scenes of the tests are skipped."""

from __future__ import annotations

import os
import shutil

TOOLS = {  # of `ray up` on hosts that are namespaces -> the package that has it
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "rsync": "rsync",
    "ip": "iproute2",
    "make": "make",
}


def missing_tools() -> str:
    """Those that are not here, and what brings them; '' = all are."""
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
    gone = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if not gone:
        return ""
    packages = " ".join(TOOLS[tool] for tool in gone)
    return f"not on this machine: {', '.join(gone)} (apt-get install {packages})"
