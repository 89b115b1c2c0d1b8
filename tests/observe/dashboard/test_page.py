"""The page itself: its built files are those of its sources; in a real browser it shows a run as it
is, asks no other host, takes names as text, and can be used by everybody."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.observe import devtools
from support.observe.devtools import Page, opened
from support.observe.long_run import LongRun
from support.places import ROOT

from elastic.ledger.journal import Line, write_line
from elastic.ledger.run_folder import RunFolder
from elastic.observe.dashboard.dashboard_server import DashboardServer, listening
from elastic.observe.dashboard.followed_run import PageSources
from elastic.observe.dashboard.run_shelf import RunShelf
from elastic.storage import LocalStorage
from elastic.types import DeviceNoted, DriverStarted, NodeLoadSeen, NodesMute, WorkerId

SOURCES = ROOT / "elastic" / "observe" / "dashboard" / "page"
BUILT = SOURCES.with_name("static")
BAD = '<script>window.broken=1</script><img src="//example.org/x" onerror="window.broken=1">'
READY = "document.querySelector('.tiles') && document.querySelectorAll('.plot canvas').length >= 3"

whole = pytest.mark.whole
needs_browser = pytest.mark.skipif(devtools.CHROMIUM is None, reason="there is no chromium")
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm")


def source_files() -> list[str]:
    files = (p for p in SOURCES.rglob("*") if p.is_file() and "node_modules" not in p.parts)
    return sorted(path.relative_to(SOURCES).as_posix() for path in files)


def test_the_built_files_are_those_of_the_sources() -> None:
    """`make dashboard` makes them; with npm the whole tier makes them again and compares."""
    total = sha256()
    for name in source_files():
        one = sha256((SOURCES / name).read_bytes()).hexdigest()
        total.update(f"{name}\n{one}\n".encode())
    built_from = (BUILT / "built-from.txt").read_text().strip()
    assert total.hexdigest() == built_from, "the page was changed: make dashboard"


def test_versions_are_pinned_and_no_registry_is_named() -> None:
    package = json.loads((SOURCES / "package.json").read_text())
    locked = (SOURCES / "package-lock.json").read_text()
    for version in {**package["dependencies"], **package["devDependencies"]}.values():
        assert version[0].isdigit()
    assert '"resolved"' not in locked and "://registry" not in locked
    assert '"integrity"' in locked


def test_what_is_bundled_has_its_license_beside_it() -> None:
    package = json.loads((SOURCES / "package.json").read_text())
    text = (BUILT / "licenses.txt").read_text()
    for name, version in package["dependencies"].items():
        assert f"{name} {version} (MIT)" in text
    assert text.count("Permission is hereby granted") == len(package["dependencies"])


def test_no_name_becomes_markup_and_the_page_is_light() -> None:
    for path in (SOURCES / "src").iterdir():
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in path.read_text(), f"{path.name}: {word}"
    assert sum(path.stat().st_size for path in BUILT.rglob("*.js")) < 160_000


@whole
@needs_npm
def test_building_it_again_gives_the_same_files(tmp_path: Path) -> None:
    copy = tmp_path / "page"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("node_modules"))
    made = subprocess.run(["npm", "ci"], cwd=copy, capture_output=True, text=True)
    if made.returncode and any(
        word in made.stderr for word in ("ENOTFOUND", "EAI_AGAIN", "ETIMEDOUT")
    ):
        pytest.skip("npm's registry is out of reach")
    assert made.returncode == 0, made.stderr
    built = subprocess.run(["npm", "run", "build"], cwd=copy, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert contents(tmp_path / "static") == contents(BUILT)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


# ---------------------------------------------------------------------------------------- in chromium


def lines() -> list[Line]:
    """A run whose nodes, devices and reasons are called as an attacker would call them."""
    made = LongRun(6, 400, 10)
    made.nodes[2] = f"spot-{BAD}"
    found = list(made.lines())
    at_s = found[30].at_s
    told = (
        DeviceNoted(WorkerId("spot-1", 0), BAD),
        NodeLoadSeen("spot-4", 0.43, 1 * 10**9, 4 * 10**9, 10**9, 8, 0.91, 6 * 10**11, 640 * 10**9, 5200.0, 67.0),
        NodeLoadSeen("on-demand-1", 0.27, 3 * 10**9, 4 * 10**9, 10**9),
    )  # fmt: skip
    found.insert(31, Line(at_s, 1, tuple((at_s, event) for event in told), None))
    for k, one in enumerate(found):
        if one.decision is not None and k > 3:
            found[k] = replace(
                one, decision=replace(one.decision, reason=f"{one.decision.reason} {BAD}")
            )
    return found


class Shown:
    """A served run, `n` of whose lines are written."""

    def __init__(self, folder: Path) -> None:
        self.place = folder / BAD.replace("/", "_")
        self.place.mkdir(parents=True, exist_ok=True)
        self.other = folder / "another"
        self.other.mkdir(exist_ok=True)
        self.text = [write_line(one) + "\n" for one in lines()]
        self.other_text = "".join(write_line(one) + "\n" for one in LongRun(2, 60, 3).lines())
        (self.other / "journal.jsonl").write_text(self.other_text)
        self.holder = "process 1 on here"
        self.stop = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def write(self, n: int | None = None, cut: int = 0) -> None:
        text = "".join(self.text[:n])
        (self.place / "journal.jsonl").write_text(text[: len(text) - cut])

    async def serve(self, port: int = 0) -> DashboardServer:
        runs = [RunFolder(LocalStorage(one), one) for one in (self.place, self.other)]
        shelf = RunShelf(tuple(runs), PageSources(holder=lambda run: lambda: self.holder))
        await asyncio.to_thread(shelf.look)
        server, self.stop = DashboardServer(shelf, listening("127.0.0.1", port)), asyncio.Event()
        self.task = asyncio.create_task(server.serve(self.stop))
        return server

    async def end(self) -> None:
        self.stop.set()
        if self.task is not None:
            await self.task


def shown(folder: Path, work: Callable[[Shown, DashboardServer, Page], Awaitable[None]]) -> None:
    async def main() -> None:
        found = Shown(folder)
        found.write()
        server = await found.serve()
        try:
            async with opened() as page:
                await page.size(1400, 1000)
                await page.go(server.url)
                await page.until(READY)
                await work(found, server, page)
        finally:
            await found.end()

    asyncio.run(main())


@whole
@needs_browser
def test_it_asks_no_other_host_and_takes_names_as_text(tmp_path: Path) -> None:
    async def work(found: Shown, server: DashboardServer, page: Page) -> None:
        await page.until("document.querySelectorAll('table.log tbody tr').length > 20")
        text = await page.value("document.body.innerText")
        assert "window.broken=1" in text
        for name in (found.place.name, f"spot-{BAD}"[:-4]):
            assert name in await page.value("document.body.textContent")
        await page.value(
            "[...document.querySelectorAll('button.node')].find(n => n.textContent.includes('script')).click()"
        )
        await page.until("document.querySelector('.details h3').textContent.startsWith('spot-')")
        assert BAD in await page.value("document.querySelector('.details').textContent")
        assert await page.value("window.broken === undefined")
        assert await page.value("document.querySelectorAll('main img, main script').length") == 0
        assert await page.value("document.title.includes('<script>')")
        await asyncio.sleep(0.5)  # sleeps: complaints that come late are the subject
        assert page.complaints == []
        asked = [urlsplit(url) for url in page.requests if not url.startswith("data:")]
        assert {one.netloc for one in asked} == {f"127.0.0.1:{server.port}"}

    shown(tmp_path, work)


@whole
@needs_browser
@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1400), ("dark", 1400), ("light", 390), ("dark", 390)]
)
def test_everybody_can_use_it(tmp_path: Path, scheme: str, width: int) -> None:
    """By axe-core: contrast, names, roles, order; in both colors, on a screen and on a phone."""
    axe = SOURCES / "node_modules" / "axe-core" / "axe.min.js"
    if not axe.is_file():
        pytest.skip("axe-core is not installed: make dashboard")

    async def work(found: Shown, server: DashboardServer, page: Page) -> None:
        await page.size(width, 900)
        await page.colors(scheme)
        await page.until(f"document.documentElement.dataset.theme === '{scheme}'")
        await page.value("document.querySelectorAll('button.node')[3].click()")
        await page.value(axe.read_text() + "; true")
        result = await page.value("axe.run(document, {resultTypes: ['violations']})")
        said = [
            (one["id"], one["help"], [node["html"][:200] for node in one["nodes"][:3]])
            for one in result["violations"]
        ]
        assert said == []
        # nothing is wider than the screen
        assert await page.value("document.documentElement.scrollWidth") <= width
        await page.picture(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 20_000

    shown(tmp_path, work)


@whole
@needs_browser
def test_the_keyboard_alone_will_do(tmp_path: Path) -> None:
    async def work(found: Shown, server: DashboardServer, page: Page) -> None:
        focused = "document.activeElement"
        await page.value("document.querySelector('button.node').focus()")
        first = await page.value(f"{focused}.textContent")
        await page.key("ArrowRight")
        assert (name := await page.value(f"{focused}.textContent")) != first
        await page.value(f"{focused}.click()")
        await page.until("document.querySelector('.details .ranks b').textContent === 'worker 0'")
        assert (await page.value("document.querySelector('.details h3').textContent")) in name
        await page.value("document.querySelector('.zoom button').focus()")
        await page.value(
            "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: '+', bubbles: true}))"
        )
        await page.until("!document.querySelectorAll('.zoom button')[1].disabled")
        for _ in range(40):
            await page.key("Tab")
        assert (
            await page.value(
                'document.querySelectorAll(\'[tabindex]:not([tabindex="0"]):not([tabindex="-1"])\').length'
            )
            == 0
        )

    shown(tmp_path, work)


@whole
@needs_browser
def test_a_node_shows_its_load_to_eyes_and_to_readers(tmp_path: Path) -> None:
    async def work(found: Shown, server: DashboardServer, page: Page) -> None:
        def box(name: str) -> str:
            return f"[...document.querySelectorAll('button.node')].find(n => n.textContent.includes('node {name},'))"

        hidden = ".querySelector('.hidden').textContent"
        assert "GPU 91 % · mem 94 %" in await page.value(box("spot-4") + hidden)
        assert (
            await page.value(box("spot-4") + ".querySelector('.load').innerText")
            == "GPU 91 % · mem 94 %"
        )
        assert "CPU 27 % · mem 25 %" in await page.value(box("on-demand-1") + hidden)
        assert await page.value(box("on-demand-2") + ".querySelector('.load')") is None
        await page.value(box("spot-4") + ".click()")
        await page.until("document.querySelector('.details h3').textContent === 'spot-4'")
        details = await page.value("document.querySelector('.details').innerText")
        for said in (
            "43 % of its cores",
            "75 % (3.0 GB of 4.0 GB)",
            "91 % of the time, 5,200 W, the hottest 67 °C",
        ):
            assert said in details
        await page.value(box("on-demand-2") + ".click()")
        await page.until("document.querySelector('.details h3').textContent === 'on-demand-2'")
        assert "CPU" not in await page.value("document.querySelector('.details').innerText")

    shown(tmp_path, work)


@whole
@needs_browser
def test_colors_follow_the_system_and_the_switch(tmp_path: Path) -> None:
    async def work(found: Shown, server: DashboardServer, page: Page) -> None:
        background = "getComputedStyle(document.body).backgroundColor"
        await page.colors("light")
        await page.until("document.documentElement.dataset.theme === 'light'")
        light = await page.value(background)
        await page.colors("dark")
        await page.until("document.documentElement.dataset.theme === 'dark'")
        assert await page.value(background) != light
        await page.value(
            "(() => { const one = document.querySelector('select[aria-label=\"colors\"]');"
            "one.value = 'light'; one.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )
        await page.until("document.documentElement.dataset.theme === 'light'")
        await page.go(server.url)
        await page.until(READY)
        assert await page.value(background) == light  # it is remembered

    shown(tmp_path, work)


@whole
@needs_browser
def test_it_stays_true_while_the_run_and_the_server_change(tmp_path: Path) -> None:
    async def work(found: Shown, server: DashboardServer, page: Page) -> None:
        headline = "document.querySelector('.headline')?.textContent"
        link = "document.querySelector('.link').textContent"
        tile = "document.querySelector('.tiles dd').textContent"
        await page.until(f"{headline}.includes('succeeded')")
        found.write(len(found.text) - 1)
        await page.until(f"{tile}.includes('all steps done')")
        found.write(230)  # it is another journal now
        await page.until(f"{headline}.includes('running')")
        await page.until(f"{link}.includes('live')")
        found.holder = ""
        await page.until(f"{headline}.includes('interrupted')")
        assert "connected" in await page.value(link)
        assert "once it is resumed" in await page.value(tile)
        found.holder = "process 2 on here"
        await page.until(f"{headline}.includes('running')")
        step = await page.value(headline)
        found.write(260, cut=20)  # the last line is cut
        await page.until(f"{headline} !== {json.dumps(step)}")
        assert "running" in await page.value(headline)
        await found.end()
        await page.until(f"{link}.includes('no connection')")
        found.write()
        await found.serve(server.port)
        await page.until(f"{link}.includes('run has ended')", 40)
        await page.until(f"{headline}.includes('succeeded')")
        await found.end()  # what is shown of a run that has ended is not old
        await page.until(f"{link}.includes('run has ended, and so has this page')")
        # what could not be reached is the server that was gone
        assert all("ERR_" in one or "Failed to load" in one for one in page.complaints)

    shown(tmp_path, work)


@whole
@needs_browser
def test_a_driver_that_no_other_host_answers_is_told_of_while_it_is(tmp_path: Path) -> None:
    async def work(found: Shown, server: DashboardServer, page: Page) -> None:
        since_s = lines()[229].at_s

        def written(after_s: float, over: str = "") -> str:
            at_s = since_s + after_s
            return write_line(Line(at_s, 1, ((at_s, NodesMute(5, since_s, over)),))) + "\n"

        banners = "[...document.querySelectorAll('.banner')].map(b => b.innerText).join()"
        assert await page.value(banners) == ""
        begun = [*found.text[:230], written(12)]
        found.text = begun
        found.write()
        await page.until(f"{banners}.includes('none of the 5 other hosts has answered since ')")
        said = await page.value(banners)
        assert said.endswith("the driver's own host is cut off; no node counts as lost for that")
        advice = "document.querySelector('.advice').innerText"
        assert "driver's host cut off: 1, the last at step" in await page.value(advice)
        found.text = [*begun, written(100, f"10.0.0.2 answers again {BAD}")]
        found.write()
        await page.until(f"{banners} === ''")
        await page.until(f"{advice}.includes('no other host had answered the driver\\'s for 1:40')")
        kinds = "document.querySelector('.card.wide .legend').innerText"
        assert "\nn\ndriver's network" in await page.value(kinds)
        assert await page.value("window.broken === undefined")
        assert page.complaints == []

    shown(tmp_path, work)


@whole
@needs_browser
def test_a_run_that_nobody_drives_has_its_prices_and_what_is_left(tmp_path: Path) -> None:
    async def work(found: Shown, server: DashboardServer, page: Page) -> None:
        cost, left = (
            f"[...document.querySelectorAll('.tiles > *')].map(e => e.innerText.toLowerCase())"
            f".find(text => text.startsWith('{name}'))"
            for name in ("cost", "to the end")
        )
        begun = lines()[0]
        (at_s, start), *rest = begun.events
        assert isinstance(start, DriverStarted)
        start = replace(start, job={**start.job, "budget_usd": 0.0})
        begun = replace(begun, events=((at_s, start), *rest))
        found.text[0] = write_line(begun) + "\n"
        found.write(200)
        await page.until(f"{cost}.includes('/h') && !{cost}.includes('of $')")
        found.holder = ""
        await page.go(server.url)
        await page.until(f"{left}?.includes('once it is resumed')")
        said = await page.value(cost)
        assert "$" in said and "/h" not in said and "no prices known" not in said

    shown(tmp_path, work)


@whole
@needs_browser
def test_pages_that_were_left_hold_no_connection(tmp_path: Path) -> None:
    """A browser keeps them for the way back, and has six connections to a host."""

    async def work(found: Shown, server: DashboardServer, page: Page) -> None:
        for number in range(8):
            await page.go(f"about:blank#{number}")
            await page.until("location.protocol === 'about:'")
            await page.go(server.url)
            await page.until(READY, 20)
        await page.back(2)
        await page.until("document.querySelector('.link')?.textContent.includes('run has ended')")

    shown(tmp_path, work)


@whole
@needs_browser
def test_searching_comparing_and_choosing_a_run(tmp_path: Path) -> None:
    async def typed(page: Page, selector: str, text: str) -> None:
        await page.value(
            f"(() => {{ const one = document.querySelector({selector!r}); one.value = {text!r};"
            "one.dispatchEvent(new Event('input', {bubbles: true}));"
            "one.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    async def work(found: Shown, server: DashboardServer, page: Page) -> None:
        await page.until("document.querySelectorAll('table.log tbody tr').length > 20")
        await typed(page, "input[aria-label='search decisions']", "leaves in 120 s")
        rows = "[...document.querySelectorAll('table.log tbody tr')].map(r => r.innerText)"
        await page.until(f"{rows}.length && {rows}.every(row => row.includes('leaves in 120 s'))")
        compared = "[...document.querySelectorAll('section[aria-labelledby=compare] tbody tr')].map(r => r.innerText)"
        await page.until(f"{compared}.filter(t => t.includes('succeeded')).length === 2")
        key = await page.value("document.querySelectorAll('.top select option')[1].value")
        await typed(page, ".top select", key)
        await page.until("document.title.endsWith('another')")
        assert await page.value("location.hash") == f"#{key}"
        await page.until(
            "document.querySelector('.headline')?.textContent.includes('step 60 of 60')"
        )

    shown(tmp_path, work)


@whole
@needs_browser
def test_hundreds_of_nodes_and_thousands_of_steps(tmp_path: Path) -> None:
    async def work(found: Shown, server: DashboardServer, page: Page) -> None:
        text = [write_line(one) + "\n" for one in LongRun(512, 5000, 8).lines()]
        (found.other / "journal.jsonl").write_text("".join(text))
        key = next(one["id"] for one in server.shelf.listed() if one["name"] == "another")
        await page.value(f"location.hash = '{key}'")
        await page.until(
            "document.querySelector('.headline')?.textContent.includes('step 5,000 of 5,000')", 240
        )
        await page.until("document.querySelectorAll('.nodes .cell').length >= 4096")
        assert await page.value("performance.memory.usedJSHeapSize") < 100e6
        assert page.complaints == []

    shown(tmp_path, work)
