"""In the place of one of Ray's agents: it says that it offers nothing, and sleeps.

`python -I -S no_agent.py SESSION_FOLDER NODE_ID NAME...`: a raylet waits for a file per port (NAME)
that its agent offers, and ends itself when the agent is not up within 15 s; -1 = no such port. It
runs twice per node, so it imports nothing and leaves its process to `sleep`.
"""

import os
import sys


def main() -> None:
    folder, node, *names = sys.argv[1:]
    for name in names:
        path = f"{folder}/{name}_{node}"
        with open(f"{path}.{os.getpid()}", "w") as file:
            file.write("-1")
        os.replace(file.name, path)
    os.execvp("sleep", ["sleep", "infinity"])


if __name__ == "__main__":
    main()
