"""A run as it is drawn on a terminal, live and by `elastic status`: on wide and narrow ones, without
color, with and without prices, of few nodes and of many."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType
from support.observe.long_run import LongRun
from support.observe.small_run import POOLS, T0, lines, tick

from elastic.cli.command_line import main
from elastic.ledger.journal import Line, write_line
from elastic.observe import run_tables
from elastic.observe.diagnosis.step_verdicts import verdicts
from elastic.observe.picture_parts import share_bar, trend
from elastic.observe.reporting.run_seen import RunSeen, seen_of
from elastic.observe.status_picture import StatusPicture
from elastic.observe.terminal import LivePicture, Terminal
from elastic.policy.state.fold import changes
from elastic.types import DriverStarted, RequestNodes, StopAsked

COLOR = re.compile(r"\x1b\[[0-9;]*(?:3[0-9]|4[0-9]|9[0-7])[;m]")
PRICED = tuple(replace(pool, usd_per_node_h=36.0) for pool in POOLS)


def priced(until_s: float = 8.5) -> list[Line]:
    """The small run with prices and a budget, as far as it is then."""
    first, *rest = (line for line in lines() if line.at_s <= T0 + until_s)
    start = first.events[0][1]
    assert isinstance(start, DriverStarted)
    start = replace(start, pools=PRICED, job={**start.job, "budget_usd": 20.0})
    return [replace(first, events=((first.at_s, start),)), *rest]


def shown(picture: RenderableType, width: int) -> str:
    """Plain, and never wider than the terminal."""
    console = Console(width=width, file=io.StringIO(), force_terminal=True, record=True)
    console.print(picture)
    text = console.export_text()
    assert max(cell_len(line) for line in text.splitlines()) <= width
    return text


def status(seen: RunSeen, width: int, holder: str = "process 7 on here") -> str:
    return shown(StatusPicture(seen, holder, verdicts(seen.evidence)), width)


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 100, 130, 200])
def test_a_status_says_all_there_is_at_any_width(width: int) -> None:
    found = words(status(seen_of(priced()), width))
    for said in (
        "tiny-1 ▶ running", "8 of 12 (67%) ETA 0:02", "train_loss 5.2000", "2,048 ▄",
        "generation 2 pp=2,dp_shard=2 4 workers", "stage 1 [C0] [C1] 4 blocks",
        "spot spot 1 1 72.00", "on-demand on-demand 1 · 36.00", "draining 28 s", "goodput 51 %",
        "$0.20 of $20.00, $108.00 an hour", "productive 51.3 % 20.00 0.1000", "waiting for capacity",
        "→ another pool",
    ):  # fmt: skip
        assert said in found, said
    assert "2 notice 0.50 s b goes in 30 s: 6 -> 4 workers" in found or (
        "notice 0.50 s · b goes in 30 s: 6 -> 4 workers" in found
    )


def test_on_a_wide_terminal_tables_stand_side_by_side() -> None:
    seen = seen_of(priced())
    narrow, wide = status(seen, 60), status(seen, 130)
    assert any("layout" in line and "time and money" in line for line in wide.splitlines())
    assert not any("layout" in line and "time and money" in line for line in narrow.splitlines())
    assert "pp=2,dp_shard=2   notice" in wide and "0:00:06" in wide
    assert len(wide.splitlines()) < len(narrow.splitlines())


def test_of_many_nodes_the_pools_and_those_that_change_are_shown() -> None:
    many = seen_of(LongRun(40, 300, 20).lines())
    text = status(many, 100)
    assert len(text.splitlines()) < 75
    assert re.search(r"p5-spot +spot +\d\d", text) and "the last 5 of" in text
    live = shown(LivePicture(many.view, 0.5), 100)
    assert len(live.splitlines()) < 45 and "p5-on-demand" in live


def test_what_a_run_says_is_never_markup() -> None:
    odd = [*priced(), tick(8.5, actions=(RequestNodes("spot", 1, "r9"),), reason="[red]5 [/nodes]")]
    assert "reason [red]5 [/nodes]" in words(status(seen_of(odd), 90))
    assert "why: [red]5 [/nodes]" in shown(LivePicture(seen_of(odd).view), 90)


def test_a_long_reason_gives_way_to_the_other_columns() -> None:
    def longer(line: Line) -> Line:
        known = line.decision
        told = known is not None and known.reason
        return (
            replace(line, decision=replace(known, reason=f"{known.reason} {'so ' * 60}"))
            if told
            else line
        )

    text = status(seen_of([longer(line) for line in priced()]), 60)
    assert re.search(r"  2     notice   0.50 s   b goes in 30 s: .*…", text)


def told(seen: RunSeen, holder: str) -> list[str]:
    """In each of its forms."""
    view = seen.view
    return [
        words(status(seen, 100, holder)), " ".join(run_tables.status(view, holder)),
        run_tables.brief(view, holder, 0.5),
    ]  # fmt: skip


def test_of_a_run_that_nobody_drives_neither_an_end_nor_dollars_an_hour_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a cluster its nodes may be paid until their lease is over."""
    seen = seen_of(priced())
    for driven in told(seen, "process 7 on here"):
        assert ("ETA" in driven or driven.startswith("tiny-1")) and "$108.00 an hour" in driven
    for text in told(seen, ""):
        assert "interrupted" in text and "$0.20 of $20.00" in text
        assert "ETA" not in text and "an hour" not in text and "may be paid" not in text
    plain = run_tables.status_plain(seen.view)
    assert (plain["eta_s"], plain["usd_per_h"], plain["paid_until_s"]) == (None, 0.0, None)
    until_s = T0 + 8.5 + 60.0 + 900.0 + 150.0
    monkeypatch.setattr(run_tables.time, "time", lambda: until_s - 1.0)
    for text in told(seen, ""):
        assert f"$0.20 of $20.00, nodes may be paid until {run_tables.clock(until_s)}" in text
    assert run_tables.status_plain(seen.view)["paid_until_s"] == until_s
    assert run_tables.status_plain(seen.view, "process 7 on here")["paid_until_s"] is None
    monkeypatch.setattr(run_tables.time, "time", lambda: until_s + 1.0)
    assert "may be paid" not in "".join(told(seen, ""))


def test_nodes_of_an_embedded_cluster_end_with_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_of(priced())
    monkeypatch.setattr(run_tables.time, "time", lambda: T0 + 9.0)
    assert run_tables.paid_until_s(seen.view, False) is not None
    here = {name: replace(n, shared_cores=8) for name, n in seen.view.state.nodes.items()}
    seen.view.state = replace(seen.view.state, nodes=here)
    assert run_tables.paid_until_s(seen.view, False) is None


def test_before_the_first_line() -> None:
    nothing = seen_of([])
    assert "no generation yet" not in status(nothing, 80) and "step" in status(nothing, 80)
    assert "no generation yet" in shown(LivePicture(nothing.view), 80)


@pytest.mark.parametrize("width", [60, 140])
def test_the_live_picture_has_goodput_dollars_and_nodes(width: int) -> None:
    seen = seen_of(priced())
    found = words(
        shown(LivePicture(seen.view, seen.account.totals.goodput), width).replace("│", "")
    )
    assert "8 / 12 (running)" in found and "goodput 51%" in found
    assert "dollars $0.20 of $20.00, $108.00 an hour" in found
    assert "nodes spot 2, on-demand 1" in found
    assert "stage 1 [C0] [C1]" in found and "draining 28 s" in found
    assert ("workers speed samples" in found) is (width == 140)
    unpriced = seen_of(line for line in lines() if line.at_s <= T0 + 8.5)
    assert "dollars" not in shown(LivePicture(unpriced.view), width)


def test_nodes_that_are_requested_are_shown_while_they_do_not_come() -> None:
    asked = [*priced(), tick(8.5, actions=(RequestNodes("spot", 3, "r9"),))]
    live = shown(LivePicture(seen_of(asked).view), 100)
    assert "requested" in live and re.search(r"spot +spot +1 +1 +3 ", live)


def test_the_live_picture_counts_goodput_as_the_ledger_does() -> None:

    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Tty()
    terminal = Terminal(stream)
    for change in changes(lines()[:6]):
        terminal.earlier(change)
    terminal.start()
    for line in lines()[6:]:
        terminal.hear(line)
    terminal.stop()
    goodput = seen_of(lines()).account.totals.goodput
    assert f"{goodput:.0%}" in stream.getvalue() and terminal.view.step == 12


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "elastic_runs" / "tiny-1"
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_text("".join(write_line(one) + "\n" for one in priced()))
    monkeypatch.chdir(tmp_path)
    for name in ("ELASTIC_STORAGE", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "90")
    return folder


def test_a_status_is_drawn_on_a_terminal_and_plain_elsewhere(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["status", str(run)]) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain and "│" not in plain and "━" not in plain
    for row in ("goodput     51 %", "dollars     $0.20 of $20.00\n", "speed       2,048"):
        assert row in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["status", str(run)]) == 0
    assert capsys.readouterr().out == plain, (
        "into a pipe it is the same whatever is asked of colors"
    )
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["status", str(run)]) == 0
    drawn = capsys.readouterr().out
    assert COLOR.search(drawn) and "time and money" in drawn
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["status", str(run)]) == 0
    gray = capsys.readouterr().out
    assert "time and money" in gray and not COLOR.search(gray)
    monkeypatch.setenv("TERM", "dumb")
    assert main(["status", str(run)]) == 0
    assert capsys.readouterr().out == plain
    assert main(["status", str(run), "--json"]) == 0
    assert '"goodput": 0.51' in capsys.readouterr().out


HOSTILE = "\x1b]0;x\x07\x1b[2J"


@pytest.mark.filterwarnings("ignore:Glyph")  # of a font, in a plot
@pytest.mark.parametrize("words", ["status", "status -q", "why", "why --all", "report", "ledger"])
def test_nothing_that_a_run_says_commands_the_terminal(
    run: Path, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain and drawn; the colors of the picture stay."""
    first, *rest = priced()
    start = first.events[0][1]
    assert isinstance(start, DriverStarted)
    start = replace(start, run=f"tiny{HOSTILE}", job={**start.job, "name": HOSTILE})
    asked = Line(rest[-1].at_s, 1, ((rest[-1].at_s, StopAsked(HOSTILE)),), None)
    ordered = tick(8.5, actions=(RequestNodes("spot", 1, "r9"),), reason=f"so{HOSTILE}")
    hostile = [replace(first, events=((first.at_s, start),)), *rest, asked, ordered]
    (run / "journal.jsonl").write_text("".join(write_line(one) + "\n" for one in hostile))
    verb, *more = words.split()
    assert main([verb, str(run), *more]) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain and "\x07" not in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main([verb, str(run), *more]) == 0
    drawn = capsys.readouterr().out
    assert "\x1b]" not in drawn and "\x1b[2J" not in drawn and "\x07" not in drawn
    if verb == "status":
        assert "x1b]0;x" in plain + drawn
    assert COLOR.search(drawn) or words not in ("status", "why")


@pytest.mark.parametrize("tty", [True, False])
def test_nothing_that_a_live_run_says_commands_the_terminal(tty: bool) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return tty

    stream = Stream()
    terminal = Terminal(stream)
    terminal.start()
    for line in lines()[:6]:
        terminal.hear(line)
    terminal.hear(tick(8.5, actions=(RequestNodes("spot", 1, "r9"),), reason=f"so{HOSTILE}"))
    terminal.say(f"step 7{HOSTILE}")
    terminal.stop()
    said = stream.getvalue()
    assert "so\\x1b]0;x" in said and "step 7\\x1b]0;x" in said
    assert "\x1b]" not in said and "\x1b[2J" not in said and "\x07" not in said


@pytest.mark.parametrize("shows", ["colors", "no colors", "no terminal"])
def test_what_a_worker_prints_comes_as_it_was_meant(
    shows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return shows != "no terminal"

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if shows == "no colors":
        monkeypatch.setenv("NO_COLOR", "1")
    stream = Stream()
    terminal = Terminal(stream)
    terminal.say("\x1b[A\x1b[32m10\u00a0000 👩\u200d🔬 ok\r")
    terminal.say("after\x1b[K")
    terminal._told()
    color, end = ("\x1b[32m", "\x1b[0m") if shows == "colors" else ("", "")
    assert stream.getvalue() == f"{color}10\u00a0000 👩\u200d🔬 ok{end}\nafter\n"


def test_a_quiet_status_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run), "-q"]) == 0
    said = "tiny-1  interrupted  step 8 of 12  train_loss 5.2000  goodput 51 %  $0.20 of $20.00\n"
    assert capsys.readouterr().out == said
    assert run_tables.brief(seen_of([]).view, "", 0.0) == "  interrupted  step 0  goodput 0 %"


def test_trends_and_bars() -> None:
    assert trend([3.0, 2.0, 1.0], 3) == "█▅▁" and trend([1.0] * 9, 4) == "▄▄▄▄"
    assert trend([5.0], 9) == trend([float("nan"), 1.0], 9) == ""
    assert [len(share_bar(share, 10)) for share in (0.0, 0.001, 0.5, 1.2)] == [0, 1, 5, 10]
