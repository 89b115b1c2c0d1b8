"""Messages of a session: numbered, kept until they are acknowledged, waited for."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from support.waiting import is_waiting, until

from elastic.types import CopyFailed, Event, NodeRefused, Quiesced, WorkerFailed, WorkerId
from elastic.worker.process.beat import Outbox

ME = WorkerId("a", 0)
ONE, TWO = Quiesced(ME, 1, 5), Quiesced(ME, 2, 6)


def test_messages_are_kept_until_they_are_acknowledged() -> None:
    changed = threading.Condition()
    outbox = Outbox(changed)
    outbox.put(ONE)
    outbox.put(TWO)
    with changed:
        assert outbox.after(0, 0.0) == ((1, ONE), (2, TWO)), "nobody has acknowledged them"
        assert outbox.after(0, 0.0) == ((1, ONE), (2, TWO))
        assert outbox.after(1, 0.0) == ((2, TWO),)
        assert outbox.after(0, 0.0) == ((2, TWO),), "what was acknowledged is forgotten"
        assert outbox.after(2, 0.0) == ()
    outbox.put(ONE)
    with changed:
        assert outbox.after(2, 0.0) == ((3, ONE),), "numbers go on"


def test_who_waits_is_woken_by_a_message_and_by_the_end() -> None:
    changed, ended = threading.Condition(), threading.Event()
    outbox, found = Outbox(changed), []

    def poll(ack: int) -> None:
        with changed:
            found.append(outbox.after(ack, 600.0, ended.is_set))

    for ack, wake in ((0, lambda: outbox.put(ONE)), (1, ended.set)):
        waiting = threading.Thread(target=poll, args=(ack,))
        waiting.start()
        until(lambda thread=waiting: is_waiting(thread), "the poll's wait")
        with changed:
            wake()
            changed.notify_all()
        waiting.join(60)
    assert found == [((1, ONE),), ()]


@pytest.mark.parametrize(
    "said",
    [
        WorkerFailed(ME, 1, "program", "401 for {}", frames="    key = '{}'"),
        CopyFailed(1, 5, "403 for {}"),
        NodeRefused("a", "no data at {}"),
    ],
)
def test_what_is_said_is_without_the_secrets_of_this_process(
    said: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "{}" * 20)
    changed = threading.Condition()
    outbox = Outbox(changed)
    told = replace(said, **{k: v.replace("{}", "{}" * 20) for k, v in texts_of(said).items()})
    outbox.put(told)
    outbox.put(ONE)
    with changed:
        ((_, masked), (_, one)) = outbox.after(0, 0.0)
    assert texts_of(masked) == {k: v.replace("{}", "***") for k, v in texts_of(said).items()}
    assert one is ONE


def texts_of(event: Event) -> dict[str, Any]:
    return {k: v for k, v in vars(event).items() if isinstance(v, str)}
