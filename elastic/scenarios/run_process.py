"""A run of watched_run.py in a process of its own: `elastic.api.run`, whose summary is printed as
one JSON line at the end."""

from __future__ import annotations

import json
import sys

from elastic.worker.process.environment import die_with_parent


def main(folder: str, name: str, address: str) -> int:
    from elastic import api

    where = {"address": address, "spared": True} if address else {"local": True}
    result = api.run(folder, options=api.Options(run_name=name, stream=sys.stderr, **where))
    print(json.dumps(result.summary), flush=True)
    return 0


if __name__ == "__main__":
    die_with_parent()
    raise SystemExit(main(*sys.argv[1:]))
