"""report.html in headless Chromium: light, dark, as wide as a phone, on paper."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from support.observe.bound_runs import BoundRun
from support.observe.browser import DARK, LIGHT, MISSING, Browser
from support.observe.priced_run import long_run, priced

from elastic.observe.diagnosis.step_verdicts import verdicts
from elastic.observe.reporting.report_page import page
from elastic.observe.reporting.run_seen import seen_of

pytestmark = [pytest.mark.whole, pytest.mark.skipif(bool(MISSING), reason=MISSING)]


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    return Browser(tmp_path)


@pytest.fixture(params=["short", "long", "bound"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    found = {"short": priced, "long": long_run, "bound": BoundRun(late_s=0.3).lines}[
        request.param
    ]()
    target = tmp_path / "report.html"
    target.write_text(page(seen := seen_of(found), verdicts(seen.evidence), 5.0))
    return target


def brightness(picture: Path) -> float:
    """0 = black, 255 = white."""
    pixels = Image.open(picture).convert("L").resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))
    assert isinstance(pixels, int | float)
    return float(pixels)


def test_it_is_light_or_dark_as_the_reader_likes(browser: Browser, written: Path) -> None:
    light = browser.picture(written, "light", scheme=LIGHT, size=(1280, 2400))
    dark = browser.picture(written, "dark", scheme=DARK, size=(1280, 2400))
    assert brightness(light) > 200 and brightness(dark) < 80


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_nothing_is_wider_than_the_screen(browser: Browser, written: Path, width: int) -> None:
    assert browser.widths(written, width) == f"{width} of {width}"


def test_it_is_printed_light(browser: Browser, written: Path) -> None:
    target = browser.folder / "page.pdf"
    browser.run(written, f"--print-to-pdf={target}", "--blink-settings=preferredColorScheme=0")
    assert target.read_bytes().startswith(b"%PDF") and target.stat().st_size > 20_000
