"""report.html: well formed, by itself, escaped, and its numbers are the ledger's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.observe.bound_runs import BoundRun
from support.observe.html_pages import PageSeen
from support.observe.odd_runs import two_drivers
from support.observe.priced_run import PAID, changed, long_run, priced
from support.observe.small_run import T0, lines, tick
from support.places import ROOT
from support.sim.market import SLOW, play

from elastic.catalog.restart_times import RESTARTS
from elastic.errors import SpecError
from elastic.ledger.journal import Journal, Line
from elastic.ledger.run_folder import JOURNAL, RunFolder
from elastic.observe.diagnosis.step_verdicts import verdicts
from elastic.observe.reporting import page_words, report, savings
from elastic.observe.reporting.charts import Scale, line, thinned, ticks
from elastic.observe.reporting.report_page import page, rounded, usd
from elastic.observe.reporting.run_seen import RunSeen, seen_of
from elastic.observe.reporting.story import MOST, story
from elastic.policy.state.fold import changes
from elastic.sim.scripted_faults import Fault, FaultKind
from elastic.storage import open_storage
from elastic.types import DriverStarted, InstancesSeen, NodeLost, NodeReady, Pool, StepDone, Stop

KINDS: list[FaultKind] = ["notice", "loss", "notice", "drought", "loss", "hang"]
EVIL = '<script>alert(1)</script>"><img src=x onerror=alert(2)>'


def shown(found: list[Line], target_loss: float | None = None) -> tuple[RunSeen, PageSeen]:
    seen = seen_of(found)
    return seen, PageSeen(page(seen, verdicts(seen.evidence), target_loss))


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    for found in (priced(), lines(), lines()[:3], BoundRun().lines()):
        text = page(seen := seen_of(found), verdicts(seen.evidence))
        read = PageSeen(text)
        assert (read.wrong, read.loads) == ([], [])
        assert "script" not in read.tags and "link" not in read.tags
        assert not re.search(r"url\(|@import|https?://", text)
        assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text


def test_what_the_run_says_is_shown_as_text() -> None:
    def evil(event: Any) -> Any:
        if isinstance(event, DriverStarted):
            return replace(event, run=EVIL, job={**event.job, "name": EVIL})
        if isinstance(event, NodeLost):
            return replace(event, cause=EVIL)
        return event

    pools = (replace(PAID[0], name="spot"), replace(PAID[1], name=EVIL))
    found = changed(priced(pools=pools), evil)
    found = [*found[:-1], tick(14, actions=(Stop("failed", EVIL),), reason=EVIL)]
    found.insert(3, tick(3.5, NodeReady(node_named(EVIL))))
    text = page(seen := seen_of(found), verdicts(seen.evidence))
    read = PageSeen(text)
    assert read.wrong == [] and not {"script", "img"} & set(read.tags)
    assert EVIL in read.text and "<script>alert" not in text


def node_named(name: str) -> Any:
    from elastic.types import Node

    return Node(name, "spot", 2)


def test_the_numbers_are_the_ledgers() -> None:
    seen, read = shown(priced())
    books = seen.account
    for kind, exact in (("usd", books.totals.usd), ("gpu", books.totals.gpu_seconds)):
        rows = [row for row in read.data if row[:2] == ("tbody", kind)]
        (whole,) = [row for row in read.data if row[:2] == ("tfoot", kind)]
        assert sum(row[2] for row in rows) == pytest.approx(exact) == whole[2]
        as_shown = [float(row[3].strip("$").replace(",", "")) for row in (*rows, whole)]
        assert sum(as_shown[:-1]) == pytest.approx(as_shown[-1]), "a reader adds them up"
    plain = report.ledger(priced())[0]["categories"]
    assert {row["usd"] for row in plain.values() if row["usd"]} == {
        row[2] for row in read.data if row[:2] == ("tbody", "usd") if row[2]
    }


def test_a_run_without_prices_has_no_dollars() -> None:
    _, read = shown(lines())
    assert "$" not in read.text and "the machines of this run have no price" in read.text
    assert "Not compared: its nodes have no price" in read.text


def test_every_category_cause_phase_and_bound_has_plain_words() -> None:
    from typing import get_args

    from elastic.observe.accounting.accounts import CATEGORIES
    from elastic.observe.accounting.transitions import PHASES
    from elastic.observe.diagnosis.verdicts import Bound
    from elastic.types.nouns import Cause, Source

    assert set(page_words.CATEGORIES) == set(CATEGORIES)
    assert set(page_words.PHASES) == set(PHASES)
    assert set(page_words.BOUNDS) == set(get_args(Bound))
    assert set(page_words.CAUSES) == set(get_args(Cause))
    assert set(page_words.SOURCES) == set(get_args(Source))


def test_the_story_of_a_short_run_has_each_change() -> None:
    seen = seen_of(priced())
    told = story(seen.view, seen.account, seen.incidents)
    assert [one.mark for one in told] == ["start", "notice", "loss", "end"]
    assert told[1].text == (
        "The cloud announced that it takes back machine b: training continued at step 4 on 4 "
        "workers of 2 machines, with everything kept in memory. It paused for 0.5 s, and no work was "
        "lost."
    )
    assert told[2].text.startswith("Machine a failed without warning: training continued at step 6")
    assert "2 steps had to be trained again." in told[2].text
    assert told[3].text == "The run finished all of its 12 steps after 13.2 s."


def test_the_story_of_a_long_run_is_told_by_periods() -> None:
    seen = seen_of(long_run())
    told = story(seen.view, seen.account, seen.incidents)
    assert len(told) <= MOST + 2
    assert told[0].mark == "start" and told[-1].text.startswith("So far: step 31 of 12")
    assert {one.mark for one in told[1:-1]} == {"period"}
    assert re.match(r"Week \d", told[1].when)
    assert "divided anew 6 times" in told[1].text


def test_against_on_demand_machines() -> None:
    seen = seen_of(priced())
    books, found = seen.account, savings.against_on_demand(seen.account, seen.history)
    assert isinstance(found, savings.OnDemand)
    needed = sum(books.gpu_seconds[name] for name in savings.TRAINED)
    assert found.usd == pytest.approx(needed / 3600 * 36.0)  # 72 dollars, two GPUs
    assert found.saved_usd == pytest.approx(found.usd - books.totals.usd)
    assert found.prices == ("$36.00 per GPU-hour, pool on-demand of this run",)


@pytest.mark.parametrize(
    ("pools", "why"),
    [
        ((PAID[1], replace(PAID[1], name="spot")), "all nodes that trained were on-demand"),
        (PAID[:1] + (replace(PAID[1], market_type="owned"),), "the on-demand price of pool spot"),
        (tuple(replace(pool, usd_per_node_h=0.0) for pool in PAID), "its nodes have no price"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_says_why(pools: tuple[Pool, ...], why: str) -> None:
    seen = seen_of(priced(pools=pools))
    found = savings.against_on_demand(seen.account, seen.history)
    assert isinstance(found, str) and found.startswith(why)


def test_pools_that_the_newest_driver_has_no_more_have_their_price() -> None:
    other = Pool("late", gpus_per_node=2, market_type="spot", usd_per_node_h=18.0)
    seen = seen_of(two_drivers(60.0, (other,)))
    assert set(seen.history.trained_gpu_s) == {"spot", "late"}
    found = savings.against_on_demand(seen.account, seen.history)
    assert isinstance(found, savings.OnDemand)
    needed = sum(seen.account.gpu_seconds[name] for name in savings.TRAINED)
    assert found.usd == pytest.approx(needed / 3600 * 36.0)  # 72 dollars, two GPUs
    assert found.gpu_hours == pytest.approx(needed / 3600)


def test_of_such_a_pool_the_price_may_be_unknown() -> None:
    other = Pool("late", "A100", 2, "spot", 18.0)
    seen = seen_of(two_drivers(60.0, (other,)))
    found = savings.against_on_demand(seen.account, seen.history)
    assert found == "the on-demand price of pool late is not known"


def test_against_trainers_that_restart() -> None:
    seen = seen_of(priced())
    found = savings.against_restarts(seen.view, seen.account, seen.history)
    assert [one.trainer for one in found] == [one.trainer for one in RESTARTS]
    notice, loss = seen.account.transitions[1:]
    first = found[0]
    assert (first.changes, first.steps_again) == (2, 8)  # eight steps, and no checkpoint yet
    each_s = RESTARTS[0].by_cause["loss"]
    assert first.idle_s == pytest.approx(2 * each_s)
    again_s = (8 - loss.steps_lost) * 0.5
    assert first.saved_s == pytest.approx(2 * each_s - notice.pause_s - loss.pause_s + again_s)
    assert seen_of(lines()[:5]).account.transitions and not savings.against_restarts(
        seen_of(lines()[:5]).view, seen_of(lines()[:5]).account, seen.history
    )


def test_dollars_to_a_target_loss() -> None:
    seen, read = shown(priced(), target_loss=5.0)
    found = savings.to_target(seen.view, seen.history, 5.0)
    assert (found.step, found.by) == (12, "validation loss")
    assert found.usd == pytest.approx(seen.history.usd_at[12])
    assert "Cost to a loss of 5 Reached at step 12" in read.text
    missed = savings.to_target(seen.view, seen.history, 1.0)
    assert (missed.step, missed.best) == (None, 4.9)
    assert "It was not reached: the lowest" in shown(priced(), target_loss=1.0)[1].text
    trained = [one for one in priced() if "validation" not in str(one.events)]
    by_steps = savings.to_target(seen_of(trained).view, seen_of(trained).history, 5.3)
    assert by_steps.by == "mean train loss of 10 steps" and by_steps.step == 12


@pytest.mark.parametrize("seed", range(4))
def test_the_bill_at_a_step_is_the_ledgers(seed: int) -> None:
    faults = [Fault(900.0 * k + 97 * seed, kind, k, 120.0) for k, kind in enumerate(KINDS)]
    found = list(play(faults, delays=replace(SLOW, work_s=60.0), steps=200).journal.lines)
    last = max(
        k for k, one in enumerate(found) if any(isinstance(e, StepDone) for _, e in one.events)
    )
    events = found[last].events
    n = max(k for k, (_, event) in enumerate(events) if isinstance(event, StepDone)) + 1
    seen = seen_of([*found[:last], replace(found[last], events=events[:n], decision=None)])
    (step,) = [e.step for _, e in events[n - 1 : n] if isinstance(e, StepDone)]
    assert seen.history.usd_at[step] == pytest.approx(seen.account.totals.usd, rel=1e-6)
    assert len(seen.account.transitions) > 2


def test_capacity_counts_who_trains() -> None:
    moments = seen_of(priced()).history.moments
    assert [(m.gpus, m.training) for m in moments][-1] == ({"spot": 2, "on-demand": 2}, 0)
    assert max(m.training for m in moments) == 6
    assert {sum(m.gpus.values()) for m in moments if m.at_s > T0 + 8.6} == {4}


def test_machines_that_are_no_nodes_are_on_the_bill_and_not_among_those_that_train() -> None:
    found = priced()
    found.insert(5, tick(5.2, InstancesSeen("spot", starting=3)))
    more, less = seen_of(found), seen_of(priced())
    assert more.history.usd_at[12] > less.history.usd_at[12]
    assert max(m.training for m in more.history.moments) == 6


def test_pictures_keep_the_least_and_the_most() -> None:
    points = [(float(k), float(k % 977)) for k in range(100_000)]
    kept = thinned(points)
    assert len(kept) <= 800 and {0.0, 976.0} <= {y for _, y in kept}
    assert line([(0, 0), (10, 5)], Scale(0, 10), Scale(0, 5)) == "M0.0 300.0L1000.0 0.0"
    assert ticks(0, 260, 8) == [0, 50, 100, 150, 200, 250]
    assert ticks(3.0, 3.0) == [3.0]


def test_rounded_amounts_add_up() -> None:
    assert rounded([0.333, 0.333, 0.334], 2) == pytest.approx([0.33, 0.33, 0.34])
    assert sum(rounded([1 / 3] * 3, 2)) == pytest.approx(1.0)
    assert (usd(12.3456), usd(0.01234), usd(-3.2), usd(None)) == ("$12.35", "$0.0123", "-$3.200",
        "-")  # fmt: skip


def stored(folder: Path, found: list[Line]) -> RunFolder:
    folder.mkdir(parents=True)
    journal = Journal(folder / JOURNAL, 1)
    for one in found:
        journal.append(one.at_s, one.events, one.decision)
    journal.close()
    return RunFolder.of(open_storage(folder))


def test_the_page_and_its_pictures_are_written(tmp_path: Path) -> None:
    run = stored(tmp_path / "tiny-1", priced())
    asked = report.Asked(tmp_path / "for-my-manager.html", 5.0)
    data, said = report.write(run, asked=asked)
    written = (run.folder / "report.html").read_text()
    assert (tmp_path / "for-my-manager.html").read_text() == written
    assert (run.folder / "capacity.png").read_bytes().startswith(b"\x89PNG")
    assert f"page:  {tmp_path}/for-my-manager.html" in said
    assert data["target_loss"]["step"] == 12 and data["usd_per_million"] > 0
    assert {one["trainer"] for one in data["restarts"]} == {r.trainer for r in RESTARTS}
    assert data["on_demand"]["usd"] > 0 and data["verdicts"][0]["advice"]
    assert "BOUND BY" in said
    with pytest.raises(SpecError, match="--html .*cannot be written.*give a file in a folder"):
        report.write(run, asked=report.Asked(tmp_path / "no" / "such.html"))


def test_an_empty_journal_is_one_line(tmp_path: Path) -> None:
    run = stored(tmp_path / "one", [])
    with pytest.raises(SpecError, match="run 'one': .* holds no line of a journal"):
        report.write(run)


def test_a_hundred_thousand_steps_stay_a_small_page() -> None:
    found = priced()[:5] + [
        tick(10 + 0.5 * k, StepDone(1, k, 4.0 + (k % 7) / 7, 1024, 0.5)) for k in range(5, 3000)
    ]
    text = page(seen := seen_of(found), ())
    assert len(text) < 60_000 and len(list(changes(found))) > 3000
    assert seen.account.totals.steps == 2999


def test_what_is_written_can_be_read_on_its_ground() -> None:
    """WCAG 2.1, 1.4.3: a contrast of 4.5 for text, light and dark."""
    style = (ROOT / "elastic/observe/reporting/report_page.html").read_text()
    palettes = re.findall(r":root \{(.*?)\}", style, re.S)
    assert len(palettes) == 3
    for palette in palettes:
        colors = dict(re.findall(r"--(\w+): (#\w+)", palette))
        for ink in ("text", "quiet", "accent", "good", "warn", "bad"):
            for ground in ("sheet", "page"):
                assert contrast(colors[ink], colors[ground]) >= 4.5, (ink, ground, palette)


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    text = color[1:] if len(color) == 7 else "".join(2 * c for c in color[1:])
    parts = [int(text[k : k + 2], 16) / 255 for k in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
