"""`python -m elastic` is `elastic`."""

import signal
import sys


def main() -> int:
    """Ctrl-C while this is imported is one line, too."""
    try:
        from elastic.cli import command_line
    except KeyboardInterrupt:
        print("elastic: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return command_line.main()


if __name__ == "__main__":
    raise SystemExit(main())
