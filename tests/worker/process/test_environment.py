"""One table of variables, and every way of starting a worker applies it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.worker.process.environment import DEFAULTS, ENVIRONMENT, REQUIRED, settle


def test_what_recovery_needs_is_overridden_and_a_users_choice_stays() -> None:
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "OMP_NUM_THREADS": "8", "PATH": "/bin"}
    assert settle(environment) == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    assert environment == ENVIRONMENT | {"OMP_NUM_THREADS": "8", "PATH": "/bin"}
    assert settle(environment) == {}
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert settle(environment) == {}, "torchrun's own, of which the user knows nothing"
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_it_can_be_applied_before_torch_is_imported() -> None:
    code = (
        "import elastic.worker.process.environment, sys; assert not {'torch', 'ray'} & "
        "set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def actor() -> None:
    from elastic.cluster.workers import worker_actor

    made = worker_actor.Worker.__new__(worker_actor.Worker)
    with pytest.raises(AttributeError):  # goes no further than the environment without a setup
        made.__init__(SimpleNamespace(job={}))  # type: ignore[misc,arg-type]


def remote_process() -> None:
    from elastic.cluster.workers.remote_processes import ProcessOrder, _Hosted

    with pytest.raises(ModuleNotFoundError):
        _Hosted(ProcessOrder("no.such.module:Thing", (), environment={}))


def served() -> None:
    from elastic.worker.hosting import served_session

    with pytest.raises(ModuleNotFoundError):
        served_session.serve(None, {}, "no.such.module:Thing", arguments=())  # type: ignore[arg-type]


def fork_server() -> None:
    from elastic.cluster.local import fork_server as made

    class Ends(Exception):
        pass

    def server(folder: str) -> Any:
        class None_:
            def serve(self) -> None:
                raise Ends

        return None_()

    patch = pytest.MonkeyPatch()
    patch.setattr(made, "_Server", server)
    patch.setattr(made, "PRELOADED", ())
    patch.setattr(made.gc, "disable", lambda: None)
    patch.setattr(made.gc, "freeze", lambda: None)
    patch.setattr(made.signal, "signal", lambda *_: None)
    patch.setattr(made, "die_with_parent", lambda: None)
    try:
        with pytest.raises(Ends):
            made.main("", os.getppid())
    finally:
        patch.undo()


def torchrun() -> None:
    from elastic.worker.__main__ import main

    assert main(["no/such/job"]) == 2


@pytest.mark.parametrize(
    "way", [actor, remote_process, served, fork_server, torchrun], ids=lambda way: way.__name__
)
def test_every_way_of_starting_a_worker_applies_it(
    way: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "unset")  # restored by the fixture, whatever the way sets
        monkeypatch.delenv(name)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        way()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert {name: os.environ.get(name) for name in REQUIRED} == REQUIRED
    assert {name: os.environ.get(name) for name in DEFAULTS} == DEFAULTS


def test_hashes_of_texts_are_those_of_all_workers() -> None:
    """Where something else has started Python without them, it starts anew, with its arguments."""
    code = (
        "import sys; from elastic.worker.process.environment import start_again_with_hashes; "
        "start_again_with_hashes(); print(hash('text'), sys.argv[1])"
    )
    own = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}

    def printed(**more: str) -> list[str]:
        asked = [sys.executable, "-c", code, "x y"]
        done = subprocess.run(asked, env=own | more, capture_output=True, text=True, check=True)
        return done.stdout.split(maxsplit=1)

    assert printed() == printed(PYTHONHASHSEED="0") != printed(PYTHONHASHSEED="7")
    assert printed()[1] == "x y\n"
