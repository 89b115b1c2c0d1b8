"""`python -m elastic` is `elastic`."""

import gc
import os
import signal
from types import FrameType


def main() -> int:
    """Ctrl-C or SIGTERM while this is imported is one line, too, whatever a library that is being
    imported makes of an exception."""

    def end(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        os.write(2, f"elastic: ended by {name} before anything was started\n".encode())
        os._exit(128 + number)

    ended_by = (signal.SIGINT, signal.SIGTERM)
    before = {one: signal.getsignal(one) for one in ended_by}
    heard = [one for one in ended_by if before[one] is not signal.SIG_IGN]  # nohup stays nohup
    for one in heard:
        signal.signal(one, end)
    gc.disable()  # what is imported stays, and makes thousands of objects to look through
    from elastic.cli import command_line

    gc.enable()
    for one in heard:
        signal.signal(one, before[one])
    return command_line.main()


if __name__ == "__main__":
    raise SystemExit(main())
