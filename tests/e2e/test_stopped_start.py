"""A run that is told to end while it starts, before there is anything to save: it leaves nothing."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.e2e.shell import Shell
from support.e2e.soak import Before
from support.waiting import until

from elastic.ledger.lease import newest
from elastic.storage import LocalStorage

pytestmark = [pytest.mark.e2e, pytest.mark.whole]

# moments of a start, by what then lies in the folder for temporary files
MOMENTS: dict[str, Callable[[Path], bool]] = {
    "the layouts are compared": lambda folder: any(folder.glob("elastic-layouts-*/asked")),
    "the head starts": lambda folder: any(folder.glob("elastic-*/cluster.log")),
    "the head stands": lambda folder: any(folder.glob("elastic-*/ray/session_latest/sockets")),
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """For temporary files; with a name that is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="el") as found:
        yield Path(found)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", [*MOMENTS])
def test_nothing_is_left_of_it(
    shell: Shell, folder: Path, moment: str, number: signal.Signals
) -> None:
    shell.environment |= {
        "TMPDIR": str(folder), "ELASTIC_LAYOUTS": str(shell.root / "layouts"),
        "TORCHINDUCTOR_CACHE_DIR": str(shell.root / "torch"),  # which it makes when it is imported
    }  # fmt: skip
    before = Before.now("", folder)
    process = shell.start("run", shell.job(), "--run-name", "one")
    until(
        lambda: MOMENTS[moment](folder) or process.poll() is not None, f"the moment when {moment}"
    )
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number, err
    assert err == f"elastic: ended by {number.name}; nothing that it had started is left\n"
    assert [*folder.iterdir()] == [], "no folder is left"
    assert before.left_in_memory() == []
    sign = newest(LocalStorage(shell.root / "elastic_runs" / "one"))
    assert sign is None or sign.released, "the next driver need not wait"
