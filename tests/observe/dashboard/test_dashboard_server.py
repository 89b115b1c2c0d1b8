"""The server of the page: what it sends, to whom, and that it sends nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.observe import small_run

from elastic.errors import SpecError
from elastic.ledger.journal import write_line
from elastic.ledger.run_folder import RunFolder
from elastic.observe.dashboard import dashboard_server
from elastic.observe.dashboard.dashboard_server import (
    DashboardServer,
    assets,
    is_loopback,
    listening,
)
from elastic.observe.dashboard.followed_run import PageSources
from elastic.observe.dashboard.run_shelf import RunShelf
from elastic.storage import LocalStorage

Session = aiohttp.ClientSession
NAME = "<script>alert(1)<"  # of a run; a folder may be called so


def shelf(folder: Path, n_lines: int | None = None) -> RunShelf:
    place = folder / NAME
    place.mkdir(parents=True, exist_ok=True)
    text = "".join(write_line(one) + "\n" for one in small_run.lines()[:n_lines])
    (place / "journal.jsonl").write_text(text)
    return RunShelf((RunFolder(LocalStorage(place), place),), PageSources())


@contextlib.asynccontextmanager
async def serving(
    found: RunShelf, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[DashboardServer, Session]]:
    await asyncio.to_thread(found.look)
    server, stop = DashboardServer(found, listening(host, 0), host), asyncio.Event()
    task = asyncio.create_task(server.serve(stop))
    base = f"http://127.0.0.1:{server.port}"
    try:
        async with Session(base, cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
            yield server, session
    finally:
        stop.set()
        await task


def with_server(
    folder: Path,
    work: Callable[[DashboardServer, Session], Awaitable[None]],
    host: str = "127.0.0.1",
) -> None:
    async def main() -> None:
        async with serving(shelf(folder), host) as (server, session):
            await work(server, session)

    asyncio.run(main())


async def get(session: Session, path: str, **more: Any) -> tuple[int, Any, Any]:
    async with session.get(path, **more) as answer:
        text = await answer.text()
        kind = answer.headers["Content-Type"]
        return answer.status, json.loads(text) if "json" in kind else text, answer.headers


def test_the_api_tells_of_a_run(tmp_path: Path) -> None:
    async def work(server: DashboardServer, session: Session) -> None:
        _, found, _ = await get(session, "/api/runs")
        ((one,), name) = (found["runs"], found["server"])
        assert one["name"] == NAME and one["read"] and name == server.name
        status, run, headers = await get(session, f"/api/runs/{one['id']}")
        assert status == 200 and run["run"] == NAME and run["step"] == 12
        assert headers["Cache-Control"] == "no-store"
        _, series, _ = await get(session, f"/api/runs/{one['id']}/series?by=step&from=3&to=5")
        assert series["x"] == [2, 3, 4, 5, 6]
        _, notes, _ = await get(session, f"/api/runs/{one['id']}/notes?q=lost")
        assert notes["rows"]

    with_server(tmp_path, work)


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/api/runs/nothing", 404, "no such run"),
        ("/api/runs/{id}/series?by=moon", 400, "must be time or step"),
        ("/api/runs/{id}/series?from=nan", 400, "must be numbers"),
        ("/api/runs/{id}/series?buckets=x", 400, "must be numbers"),
        ("/api/runs/{id}/notes?before=-1", 400, "whole number"),
        ("/nothing.js", 404, "not found"),
        ("/../../journal.jsonl", 404, "not found"),
        ("/assets/..%2f..%2fdashboard_server.py", 404, "not found"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(
    tmp_path: Path, path: str, status: int, said: str
) -> None:
    async def work(server: DashboardServer, session: Session) -> None:
        (key,) = server.shelf.versions
        found, text, headers = await get(session, path.replace("{id}", key))
        assert found == status and said in json.dumps(text)
        assert "default-src 'none'" in headers["Content-Security-Policy"]

    with_server(tmp_path, work)


def test_nothing_of_another_host_and_nothing_inline_is_allowed(tmp_path: Path) -> None:
    async def work(server: DashboardServer, session: Session) -> None:
        for path in ("/", "/api/runs", "/icon.svg"):
            _, _, headers = await get(session, path)
            policy = dict(
                part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";")
            )
            assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
            allowed = {word for words in policy.values() for word in words.split()}
            assert allowed == {"'none'", "'self'", "data:"}
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"

    with_server(tmp_path, work)


def test_it_only_answers_get_and_only_to_its_own_name(tmp_path: Path) -> None:
    async def work(server: DashboardServer, session: Session) -> None:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            async with session.request(method, "/api/runs") as answer:
                assert answer.status == 405
        status, text, _ = await get(session, "/api/runs", headers={"Host": "evil.example:80"})
        assert status == 403 and server.url in text
        for host in ("localhost", f"127.0.0.1:{server.port}", f"[::1]:{server.port}"):
            status, _, _ = await get(session, "/api/runs", headers={"Host": host})
            assert status == 200

    with_server(tmp_path, work)


def test_another_address_asks_for_the_token(tmp_path: Path) -> None:
    async def work(server: DashboardServer, session: Session) -> None:
        assert len(server.token) >= 32 and server.url.endswith(f"/?token={server.token}")
        for path in ("/", "/api/runs", "/api/events", "/icon.svg", "/?token=wrong"):
            status, text, headers = await get(session, path)
            assert status == 401 and text.count("\n") == 1 and "token missing or wrong" in text
            assert "Content-Security-Policy" in headers
        bearer = {"Authorization": f"Bearer {server.token}"}
        assert (await get(session, "/api/runs", headers=bearer))[0] == 200
        async with session.get(f"/?token={server.token}", allow_redirects=False) as answer:
            assert answer.status == 303 and answer.headers["Location"] == "/"
            cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        # the cookie is known from now on
        assert (await get(session, "/api/runs"))[0] == 200

    with_server(tmp_path, work, "0.0.0.0")


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.3", False),
    ],
)
def test_which_addresses_need_no_token(host: str, is_here: bool) -> None:
    assert is_loopback(host) is is_here


@pytest.mark.slow
def test_a_page_hears_of_what_is_new_and_of_another_server(tmp_path: Path) -> None:
    async def heard(session: Session, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async with session.get("/api/events") as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            async for line in answer.content:
                if line.startswith(b"data: ") and wanted(found := json.loads(line[6:])):
                    return dict(found)
        raise AssertionError("the server has ended")

    async def main() -> None:
        first = shelf(tmp_path, 6)
        async with serving(first) as (server, session):
            news = await heard(session, lambda found: True)
            (key, version) = next(iter(news["runs"].items()))
            listening_on = asyncio.create_task(
                heard(session, lambda found: found["runs"][key] > version)
            )
            shelf(tmp_path)  # the rest of the run
            await asyncio.wait_for(listening_on, 10)
            _, run, _ = await get(session, f"/api/runs/{key}")
            assert run["phase"] == "succeeded"
            name = news["server"]
        # the same run has the same address after a restart
        async with serving(shelf(tmp_path)) as (server, session):
            again = await heard(session, lambda found: True)
            assert again["server"] != name and set(again["runs"]) == {key}

    asyncio.run(main())


@pytest.mark.slow
def test_a_page_beside_a_run_is_shown_how_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last lines are written between two looks, and the last answer is not old enough for a
    new one."""
    monkeypatch.setattr(dashboard_server, "LOOK_S", 3600.0)
    monkeypatch.setattr(dashboard_server, "QUIET_S", 1.0)

    async def main() -> None:
        given = shelf(tmp_path, 6)
        given.look(3600.0)
        server, stop = DashboardServer(given, listening("127.0.0.1", 0)), asyncio.Event()
        task = asyncio.create_task(server.serve(stop, last_look=True))
        async with Session(f"http://127.0.0.1:{server.port}") as session:
            (key,) = given.versions
            _, before, _ = await get(session, f"/api/runs/{key}")
            given._answers[key, None].again_at_s = float("inf")
            async with session.get("/api/events") as told:
                await told.content.readline()
                shelf(tmp_path)
                stop.set()
                async for line in told.content:
                    if line.startswith(b"data: "):
                        break
                _, after, _ = await get(session, f"/api/runs/{key}")
            assert (before["phase"], after["phase"]) == ("interrupted", "succeeded")
            assert json.loads(line[6:])["runs"][key] == after["version"]
        await asyncio.wait_for(task, dashboard_server.LAST_S + 10)

    asyncio.run(main())


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SpecError, match=f"--port {port}: is taken by another process"):
            listening("127.0.0.1", port)
    with pytest.raises(SpecError, match="--host 203.0.113.7"):
        listening("203.0.113.7", 0)


def test_without_a_port_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(
            "elastic.observe.dashboard.dashboard_server.PORT", taken.getsockname()[1]
        )
        with listening("127.0.0.1", None) as found:
            assert found.getsockname()[1] not in (0, taken.getsockname()[1])


def test_who_takes_no_gzip_gets_none(tmp_path: Path) -> None:
    async def work(server: DashboardServer, session: Session) -> None:
        _, page, headers = await get(session, "/", headers={"Accept-Encoding": "identity"})
        assert "Content-Encoding" not in headers and page.startswith("<!doctype html>")

    with_server(tmp_path, work)


def test_a_page_that_was_not_built_is_told(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="make dashboard"):
        assets(tmp_path)


def test_a_server_that_can_read_no_more_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = shelf(tmp_path)

    def broken(every_s: float) -> bool:
        raise AssertionError("a fault of ours")

    monkeypatch.setattr(found, "look", broken)
    with listening("127.0.0.1", 0) as place:
        server = DashboardServer(found, place)
        with pytest.raises(AssertionError, match="a fault of ours"):
            asyncio.run(asyncio.wait_for(serve_for_ever(server), 10))


async def serve_for_ever(server: DashboardServer) -> None:
    await server.serve(asyncio.Event())


def test_while_nobody_asks_journals_are_looked_at_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_server, "UNWATCHED_S", 3600.0)
    monkeypatch.setattr(dashboard_server, "LOOK_S", 0.0)
    monkeypatch.setattr(dashboard_server, "LOOK_LEFT_S", 0.001)

    async def main() -> None:
        given = shelf(tmp_path)
        looks, look = list[float](), given.look

        def counted(every_s: float = 0.0) -> bool:
            looks.append(every_s)
            return look(every_s)

        async def looked(every_s: float) -> None:
            async with asyncio.timeout(30):
                n = len(looks)
                while looks[n:].count(every_s) < 3:
                    await asyncio.sleep(0.01)  # sleeps: within an event loop

        monkeypatch.setattr(given, "look", counted)
        async with serving(given) as (server, session):
            await asyncio.sleep(4 * dashboard_server.LEAST_S)  # sleeps: nobody is to look
            assert len(looks) <= 2  # by `serving`, and the first of the server
            await get(session, "/api/runs")
            await looked(0.001)
            await get(session, "/")
            await looked(0.0)
            server._opened_s -= dashboard_server.LEFT_S  # the page is left open
            await looked(0.001)

    asyncio.run(main())
