"""The values of the metric table, by a journal; and what a scrape gives of them."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.observe.small_run import T0, lines, tick
from support.places import ROOT
from support.storage.remote_folder import Remote
from support.waiting import WITHIN_S, until

from elastic.config.numbers.metrics_port import MetricsPort
from elastic.errors import SpecError
from elastic.ledger.heard_lines import HeardLines
from elastic.ledger.journal import Journal, Line
from elastic.ledger.journal_growth import JournalGrowth
from elastic.ledger.run_folder import RunFolder
from elastic.observe.accounting.accounts import Books, account
from elastic.observe.metrics import live_numbers
from elastic.observe.metrics.live_numbers import LiveNumbers
from elastic.observe.metrics.metric_names import BY_NAME, METRICS, row_of
from elastic.observe.metrics.prometheus_endpoint import PrometheusEndpoint
from elastic.observe.metrics.run_numbers import RunNumbers, Sample
from elastic.policy.state.fold import changes
from elastic.storage import open_storage
from elastic.types import (
    Copy,
    CopyFailed,
    CopyStored,
    DriverStarted,
    GuardTripped,
    HardwareProfile,
    Layout,
    NodeLoadSeen,
    NodePrepared,
    RequestFailed,
    SampleProfile,
    StorageSeen,
    WrongNumbers,
)

Values = dict[tuple[str, ...], float]


def values(samples: Sequence[Sample]) -> Values:
    found = {(one.name, *one.labels): one.value for one in samples}
    assert len(found) == len(samples), "a series twice"
    for one in samples:
        assert len(one.labels) == len(BY_NAME[one.name].labels)
    return found


def numbers(given: Sequence[Line]) -> RunNumbers:
    made = RunNumbers()
    for change in changes(given):
        made.take(change)
    return made


def test_they_are_those_of_the_ledger_and_the_report() -> None:
    found, books = values(numbers(lines()).samples()), account(lines())
    assert found["elastic_goodput_ratio",] == books.totals.goodput
    assert found["elastic_spend_usd_total",] == books.totals.usd
    assert found["elastic_gpu_seconds_total",] == books.totals.gpu_seconds
    for category, gpu_s in books.gpu_seconds.items():
        assert found["elastic_account_gpu_seconds", category] == gpu_s
    assert found["elastic_step",] == 12 == found["elastic_steps_wanted",]
    assert found["elastic_steps_total",] == 14, "two were trained twice"
    assert found["elastic_tokens_total",] == 14 * 1024
    assert found["elastic_train_loss",] == pytest.approx(4.8)
    assert found["elastic_tokens_per_second",] == 2048
    assert found["elastic_validation_loss",] == 4.9
    assert (
        found["elastic_run_phase", "succeeded"]
        == 1
        == sum(value for (name, *_), value in found.items() if name == "elastic_run_phase")
    )
    for one in books.transitions:
        assert found["elastic_transitions_total", one.cause] == 1
        pause_s = found["elastic_transition_pause_seconds_total", one.cause]
        assert pause_s == pytest.approx(one.pause_s)
    assert found["elastic_transition_lost_steps_total", "loss"] == 2
    assert found["elastic_transition_phase_seconds_total", "loss", "first_step"] > 0
    assert found["elastic_notices_total", "spot"] == 1 == found["elastic_nodes_lost_total", "spot"]
    assert found["elastic_copies_total", "durable", "stored"] == 1
    assert found["elastic_checkpoint_step",] == 12
    assert found["elastic_copy_bytes_total", "durable"] == 2_500_000


def test_what_has_not_happened_is_zero_from_the_start_on() -> None:
    found = values(numbers(lines()[:2]).samples())
    for name in ("notices", "nodes_lost", "requests_failed"):
        assert found[f"elastic_{name}_total", "spot"] == 0
    assert found["elastic_transitions_total", "loss"] == 0
    assert "elastic_train_loss" not in {name for name, *_ in found}, "nobody knows one"


def test_what_goes_wrong_is_counted_and_nodes_are_by_pool_and_status() -> None:
    worker = numbers(lines()).state.plans[3].ranks[0]
    more = [
        tick(9.6, RequestFailed("spot", "r1", "no capacity")),
        tick(9.7, CopyFailed(3, 7, "slow"), CopyFailed(3, 7, "busy", skipped=True)),
        tick(9.8, GuardTripped(3, 7, "loss_spike", "skip", "it rose")),
        tick(9.9, WrongNumbers(3, 7, 6, (worker,), "two of four differ")),
        tick(9.9, StorageSeen(False, "timeout", T0 + 9)),
    ]
    given = [*(line for line in lines() if line.at_s <= T0 + 9.5), *more]
    found = values(numbers(given).samples())
    assert found["elastic_requests_failed_total", "spot"] == 1
    assert found["elastic_copies_total", "durable", "failed"] == 1
    assert found["elastic_copies_total", "durable", "skipped"] == 1
    assert found["elastic_guard_trips_total", "loss_spike", "skip"] == 1
    assert found["elastic_wrong_numbers_total",] == 1 == found["elastic_storage_away",]
    assert found["elastic_nodes", "spot", "draining"] == 1
    assert found["elastic_nodes", "on-demand", "prepared"] == 1
    assert found["elastic_workers",] == 2


def test_a_checkpoint_of_a_run_that_went_back_is_the_newest() -> None:
    """Also while its step is an older one; a late one of the generation before is none."""

    def stored(at_s: float, step: int, generation: int) -> Line:
        copy = Copy(step, "durable", generation, Layout(tp=2), uri=f"/copies/{step}")
        return tick(at_s, CopyStored(copy, seconds=0.3))

    back = numbers([*lines(), stored(14, 10, 4), stored(15, 11, 3)])
    found = values(back.samples())
    assert found["elastic_checkpoint_step",] == 10
    assert found["elastic_checkpoint_timestamp_seconds",] == T0 + 14


def load(node_id: str, **more: float) -> NodeLoadSeen:
    return NodeLoadSeen(node_id, 0.25, 6 * 2**30, 8 * 2**30, 2**30, **more)  # type: ignore[arg-type]


def test_the_load_of_nodes_is_theirs_as_long_as_they_are_there() -> None:
    """The newest counts; where no GPU tells anything there is no value, and none is 0."""
    on_gpu = {"gpu_share": 0.5, "gpu_memory_bytes": 30, "gpu_memory_size_bytes": 80}
    gpu = load("a", n_gpus=2, **on_gpu, gpu_power_w=700.0, gpu_celsius=61.0)
    told = tick(3.5, load("c"), gpu, replace(load("c"), cpu_share=0.75))
    given = lines()
    at = next(i for i, line in enumerate(given) if line.at_s > told.at_s)
    early = numbers([*given[:at], told])
    found = values(early.samples())
    assert found["elastic_node_cpu_ratio", "c"] == 0.75
    assert found["elastic_node_cpu_ratio", "a"] == 0.25
    assert found["elastic_node_memory_available_bytes", "a"] == 6 * 2**30
    assert found["elastic_node_memory_size_bytes", "a"] == 8 * 2**30
    assert found["elastic_worker_resident_memory_bytes", "a"] == 2**30
    of_gpus = {
        name: value for name, value in found.items() if name[0].startswith("elastic_node_gpu")
    }
    assert of_gpus == {
        ("elastic_node_gpu_utilization_ratio", "a"): 0.5,
        ("elastic_node_gpu_memory_bytes", "a"): 30,
        ("elastic_node_gpu_memory_size_bytes", "a"): 80,
        ("elastic_node_gpu_power_watts", "a"): 700,
        ("elastic_node_gpu_temperature_celsius", "a"): 61,
    }
    assert early.system() == {
        "cpu_share": 0.5, "memory_share_most": 0.25, "worker_bytes_most": 2**30, "gpu_share": 0.5,
        "gpu_memory_share_most": 0.375, "gpu_power_w_sum": 700, "gpu_celsius_most": 61,
    }  # fmt: skip
    late = values(numbers([*given[:at], told, *given[at:]]).samples())
    assert late["elastic_node_cpu_ratio", "c"] == 0.75
    assert not [name for name in late if name[1:] == ("a",)], "a was lost"


def test_mfu_is_there_where_the_flops_and_the_peaks_are_known() -> None:
    """1e9 FLOPs a sample, 8 samples, 0.5 s, two GPUs of 1e11 FLOP/s: 8 %."""
    given = lines()
    peak = HardwareProfile("CPU", peak_flop_per_s=1e11)
    start = given[0].events[0][1]
    assert isinstance(start, DriverStarted)
    sample = SampleProfile(1e9, (), 0, 0)
    known = replace(start, hardware=(peak,), model=replace(start.model, sample=sample))
    assert numbers(given).mfu is None
    given[0] = replace(given[0], events=((T0, known),))
    assert numbers(given).mfu == pytest.approx(0.08)
    assert values(numbers(given).samples())["elastic_mfu_ratio",] == pytest.approx(0.08)
    given[0] = replace(given[0], events=((T0, replace(known, hardware=())),))
    assert numbers(given).mfu is None
    low = replace(peak, flop_per_s=(("float8", 2e11),))
    in_float8 = replace(known, hardware=(low,), job={**known.job, "float8": True})
    given[0] = replace(given[0], events=((T0, in_float8),))
    assert numbers(given).mfu == pytest.approx(0.04), "the peak is that of its products"
    assert NodePrepared("a", sample=sample).sample == sample


def test_books_of_a_long_run_keep_few_steps_and_say_the_same() -> None:
    given = [line for line in lines() if line.at_s <= T0 + 8.5]
    books = Books(keeps=2)
    for change in changes(given):
        books.take(change)
        assert len(books.steps) <= 4
        books.so_far()
    whole, found = account(given), books.so_far()
    assert found.totals.tokens == whole.totals.tokens and found.totals.steps == whole.totals.steps
    for category, gpu_s in whole.gpu_seconds.items():
        assert found.gpu_seconds[category] == pytest.approx(gpu_s)
    assert books.closed().gpu_seconds == pytest.approx(found.gpu_seconds), "it only looked"


# -------------------------------------------------------------------------------------- the endpoint


@pytest.fixture
def endpoint() -> Iterator[PrometheusEndpoint]:
    made = PrometheusEndpoint(MetricsPort(port=0))
    yield made
    made.close()


def scraped(endpoint: PrometheusEndpoint) -> Values:
    """By prometheus_client's own parser."""
    with urllib.request.urlopen(endpoint.url, timeout=10) as answer:
        text = answer.read().decode()
    found: Values = {}
    for family in text_string_to_metric_families(text):
        metric = BY_NAME.get(family.name) or BY_NAME[f"{family.name}_total"]
        assert family.type == metric.kind and family.documentation == metric.about
        for one in family.samples:
            if one.name.endswith("_created"):
                continue
            assert one.name == metric.name and one.labels["run"] == "tiny-1"
            assert set(one.labels) == {"run", *metric.labels}
            found[one.name, *(one.labels[label] for label in metric.labels)] = one.value
    return found


def test_a_scrape_gives_every_value_as_it_was_told(endpoint: PrometheusEndpoint) -> None:
    assert scraped(endpoint) == {}, "nothing is known yet"
    samples = numbers(lines()).samples()
    endpoint.tell("tiny-1", samples)
    assert scraped(endpoint) == values(samples)


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SpecError) as caught:
            PrometheusEndpoint(MetricsPort(port=port))
    assert str(caught.value) == (
        f"metrics_port: 127.0.0.1:{port} is not to be had (Address already in use); take another "
        "port, or 0 for any that is free"
    )


def test_a_client_that_reads_nothing_holds_no_other_up(endpoint: PrometheusEndpoint) -> None:
    endpoint.tell("tiny-1", numbers(lines()).samples())
    host, port = endpoint.url.split("/")[2].split(":")
    with socket.create_connection((host, int(port))) as idle:
        idle.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert scraped(endpoint)


# ------------------------------------------------------------------------------------- while it runs


def test_a_driver_that_takes_over_counts_on_from_the_whole_journal(tmp_path: Path) -> None:
    place, told = RunFolder.of(open_storage(tmp_path / "r")), list[Sequence[Sample]]()
    given = lines()
    later = [replace(line, epoch=2) for line in given[9:]]
    for before, new in (([], given[:9]), (given[5:9], later)):
        live = LiveNumbers(place, [lambda run, samples: told.append(samples)])
        journal = Journal(place.journal, new[0].epoch)
        for line in new:  # they are there before it looks at what earlier ones wrote
            journal.append(line.at_s, line.events, line.decision)
            live.hear(line)
        journal.close()
        live.start(before, new[0].epoch)
        live.close()
    assert values(told[-1]) == values(numbers(given).samples())


def lines_of_earlier(monkeypatch: pytest.MonkeyPatch) -> list[Line]:
    """Of earlier drivers, as they are read from here on."""
    earlier, take = list[Line](), LiveNumbers._take

    def noted(self: LiveNumbers, line: Line, live: bool) -> None:
        earlier.extend([] if live else [line])
        take(self, line, live)

    monkeypatch.setattr(LiveNumbers, "_take", noted)
    return earlier


@pytest.mark.parametrize("harm", ["", "altered", "another journal", "other code"])
def test_a_driver_that_takes_over_reads_on_from_what_was_kept(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same values as of the whole journal, which is read where what was kept does not
    count."""
    monkeypatch.setattr(live_numbers, "KEPT_EVERY_S", 0.0)
    place, told = RunFolder.of(open_storage(tmp_path / "r")), list[Sequence[Sample]]()
    earlier = lines_of_earlier(monkeypatch)
    given = lines()
    later = [replace(line, epoch=2) for line in given[9:]]
    for before, new in (([], given[:9]), (given[5:9], later)):
        journal = Journal(place.journal, new[0].epoch)
        live = LiveNumbers(place, [lambda run, samples: told.append(samples)])
        for line in new:
            journal.append(line.at_s, line.events, line.decision)
            live.hear(line)
        journal.close()
        kept = place.folder / live_numbers.KEPT
        if before and harm == "altered":
            kept.write_bytes(kept.read_bytes().replace(b'"tokens":', b'"tokens":1', 1))
        elif before and harm == "another journal":
            text = place.journal.read_text()
            place.journal.write_text(text.replace("\n", "\n\n", 1))
        elif before and harm == "other code":
            monkeypatch.setattr("elastic.ledger.kept_reading.code", lambda: "another")
        live.start(before, new[0].epoch)
        live.close()
        assert kept.is_file()
    assert values(told[-1]) == values(numbers(given).samples())
    read = [entry for line in earlier for entry in line.events]
    assert read == ([] if not harm else [entry for line in given[:9] for entry in line.events])


@pytest.mark.parametrize("harm", ["", "altered", "gone"])
def test_a_driver_on_another_machine_reads_on_from_what_was_kept(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run in object storage: the host that drove it before may be gone with its disk, or be
    one that this one has followed already."""
    monkeypatch.setattr(live_numbers, "KEPT_EVERY_S", 0.0)
    bucket, told = Remote(tmp_path / "bucket"), list[Sequence[Sample]]()
    earlier = lines_of_earlier(monkeypatch)
    given = lines()
    parts = [
        [replace(line, epoch=epoch) for line in given[first:last]]
        for epoch, first, last in ((1, 0, 5), (2, 5, 9), (3, 9, len(given)))
    ]
    for machine, before, new in zip("aba", ([], parts[0], parts[1]), parts, strict=True):
        assert not earlier
        place = RunFolder(bucket, tmp_path / machine)
        journal = place.open_journal(new[0].epoch, place.take_over()[1])
        live = LiveNumbers(place, [lambda run, samples: told.append(samples)])
        for line in new:
            journal.append(line.at_s, line.events, line.decision)
            live.hear(line)
        journal.close()
        if harm and new is parts[2]:
            kept = bucket.get(live_numbers.KEPT)
            bucket.delete(live_numbers.KEPT)
            if harm == "altered":
                bucket.put(live_numbers.KEPT, kept.replace(b'"tokens":', b'"tokens":1', 1))
        live.start(before, new[0].epoch)
        live.close()
        assert bucket.exists(live_numbers.KEPT)
    assert values(told[-1]) == values(numbers(given).samples())
    read = [entry for line in earlier for entry in line.events]
    assert read == ([entry for line in parts[1] for entry in line.events] if harm else [])


def test_a_driver_that_has_kept_nothing_leaves_what_is_stored(tmp_path: Path) -> None:
    """What lies on its machine may be older."""
    bucket = Remote(tmp_path / "bucket")
    bucket.put(live_numbers.KEPT, b"of another machine, and of other code")
    place = RunFolder(bucket, tmp_path / "a")
    place.folder.mkdir()
    (place.folder / live_numbers.KEPT).write_bytes(b"older")
    live = LiveNumbers(place, ())
    live.start(lines()[:1], 2)
    live.close()
    assert bucket.get(live_numbers.KEPT) == b"of another machine, and of other code"


@pytest.mark.parametrize("back", [False, True])
def test_storage_is_asked_nothing_while_it_is_away(
    back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread would wait for it, and tell nothing meanwhile."""
    monkeypatch.setattr(live_numbers, "KEPT_EVERY_S", 0.0)
    bucket, given = Remote(tmp_path / "bucket"), lines()
    place = RunFolder(bucket, tmp_path / "a")
    given[2:2] = [tick(0.2, StorageSeen(False, "timeout", T0))]
    if back:
        given += [tick(at_s, StorageSeen(True, "", T0)) for at_s in (900.0, 901.0)]
    journal = place.open_journal(1, place.take_over()[1])
    live, away, look = LiveNumbers(place, ()), list[bool](), JournalGrowth.look

    def noted(self: JournalGrowth) -> Iterator[Line]:
        away.append(live._numbers.state.away is not None)
        return look(self)

    monkeypatch.setattr(JournalGrowth, "look", noted)
    for line in given:
        journal.append(line.at_s, line.events, line.decision)
        live.hear(line)
    journal.close()
    live.start((), 1)
    live.close()
    assert away == [False] * (4 if back else 3)
    assert (place.folder / live_numbers.KEPT).is_file()
    assert bucket.exists(live_numbers.KEPT) is back


def test_who_raises_is_told_no_more_and_who_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live_numbers, "TAKEN_EVERY_S", 0.01)
    release, returned, n_raised = threading.Event(), list[bool](), list[int]()

    def raises(run: str, samples: Sequence[Sample]) -> None:
        n_raised.append(1)
        raise RuntimeError("ray is gone")

    def hangs(run: str, samples: Sequence[Sample]) -> None:
        returned.append(release.wait(WITHIN_S))

    live = LiveNumbers(RunFolder.of(open_storage(tmp_path)), [raises, hangs])
    live._close_most_s = 0.2
    live.start([], 1)
    for line in lines():
        live.hear(line)
    time.sleep(0.1)  # sleeps: it looks again and again
    live.close()
    assert not returned
    release.set()
    live._thread.join()
    assert len(n_raised) == 1 and caplog.text.count("ray is gone") == 1


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text().splitlines()
    assert [line for line in page if line.startswith("| `elastic_")] == [
        row_of(metric) for metric in METRICS
    ]


def test_names_and_units_are_prometheuss() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("elastic_") and metric.name.islower()
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not any(word in metric.name.split("_") for word in ("s", "ms", "gb", "h", "percent"))


def test_numbers_of_a_long_run_cost_little() -> None:
    """A driver that trains has other things to do: a line of its journal, a second of the run, costs
    0.2 ms of CPU, and all values 1 ms, however many steps may still be undone. The bounds are ten
    times that."""
    known = RunNumbers()
    for change in changes(lines()[:9]):
        known.take(change)
    done, at_s = known.last, known.at_s
    assert done is not None

    def second(n: int) -> Line:
        steps = (replace(done, step=done.step + 5 * n + k) for k in range(1, 6))
        return tick(at_s + n - T0, *steps)

    spent = list[float]()
    for n in range(500):
        began_s = time.thread_time()
        for change in changes((second(n),), known.state):
            known.take(change)
        spent.append(time.thread_time() - began_s)
    assert known.last is not None and known.last.step == done.step + 2500
    assert median(spent) < 0.002
    known.samples()
    began_s = time.thread_time()
    assert values(known.samples())["elastic_steps_total",] == known.last.step
    assert time.thread_time() - began_s < 0.010


def test_lines_are_taken_in_batches() -> None:
    """The driver that writes a line wakes nobody."""
    seen = list[list[Line]]()

    def follow() -> None:
        more = True
        while more:
            batch: list[Line] = []
            more = given.take(60.0, batch.append)
            seen.append(batch)

    given = HeardLines(follow, "seen")
    given.start()
    until(lambda: len(seen) == 1, "the first look")
    first, second, *_ = lines()
    given.hear(first)
    given.hear(second)
    given.close()
    assert seen == [[], [first, second]]
