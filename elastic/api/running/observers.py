"""Who reads a run's journal along while it is written, each in a thread or a process of its own:
files of numbers, Prometheus, Ray's metrics, trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from elastic.config.job import JobSpec
from elastic.config.numbers.metrics_port import MetricsPort
from elastic.config.numbers.trackers import check_installed
from elastic.errors import SpecError
from elastic.ledger.journal import Line
from elastic.ledger.run_folder import RunFolder
from elastic.observe.metrics.live_numbers import LiveNumbers
from elastic.observe.metrics.metric_names import BY_NAME
from elastic.observe.metrics.metrics_files import MetricsFiles, OnStep
from elastic.observe.metrics.run_numbers import Sample
from elastic.observe.trackers.tracking import Tracking

KEPT_OF_TRACKERS = "live-trackers.kept"  # in the run's folder


def check_port(asked: int | str | None, keys: Mapping[str, Any]) -> None:
    """Raises SpecError where the port is taken that an option, or else the job's unchecked keys,
    name: told before a program is read, which takes long."""
    port = keys.get("metrics_port") if asked is None else asked
    if port is None:
        return
    try:
        where = _place_of(port)
    except SpecError:
        if asked is None:
            return  # what it must be is checked with the other keys
        raise
    if where.port:  # 0 = any that is free
        from elastic.observe.metrics.prometheus_endpoint import PrometheusEndpoint

        PrometheusEndpoint(where).close()


class Observers:
    """Made before the run begins: raises SpecError where a port is taken or a library is not
    here. `say`: a line for a person; `ray`: Ray's own metrics are told too."""

    def __init__(
        self,
        place: RunFolder,
        spec: JobSpec,
        on_step: OnStep | None,
        *,
        port: int | str | None,
        say: Callable[[str], None],
        ray: bool = True,
    ) -> None:
        trackers = spec.trackers.chosen()
        check_installed(trackers, spec.where)
        self._stack, self._started = ExitStack(), False
        self._files = MetricsFiles(place, on_step)
        tracking = Tracking(place, spec, trackers) if trackers else None
        if tracking is not None:
            self._stack.callback(tracking.close)
        # its port is free again before trackers are waited for: the next driver may want it
        tell = self._tellers(spec.metrics_port if port is None else port, say, ray)
        self._live = [LiveNumbers(place, tell)] if tell else []
        if tracking is not None:  # waits for libraries, and the numbers do not
            self._live.append(LiveNumbers(place, (), (tracking,), kept=KEPT_OF_TRACKERS))

    def _tellers(
        self, port: int | str | None, say: Callable[[str], None], ray: bool
    ) -> list[Callable[[str, Sequence[Sample]], None]]:
        if port is None:
            return []
        where = _place_of(port)
        found = [_through_ray()] if ray else []
        if where.port is not None:
            from elastic.observe.metrics.prometheus_endpoint import PrometheusEndpoint

            endpoint = PrometheusEndpoint(where)
            self._stack.callback(endpoint.close)
            say(f"metrics for Prometheus: {endpoint.url}")
            found.append(endpoint.tell)
        elif not ray:
            raise SpecError(
                f"metrics_port: '{port}' goes through Ray's own metrics, and there is no Ray here; "
                "give a port, or 0 for any that is free"
            )
        return found

    def start(self, before: Sequence[Line], epoch: int) -> None:
        """`before`: the newest lines of earlier drivers; `epoch`: this driver's."""
        self._started = True
        self._files.start(before)
        for live in self._live:
            live.start(before, epoch)

    def hear(self, line: Line) -> None:
        self._files.hear(line)
        for live in self._live:
            live.hear(line)

    def close(self) -> None:
        """Waits a bounded time until all is sent."""
        if self._started:
            self._started = False
            self._files.close()
            for live in self._live:
                live.close()
        self._stack.close()


def _place_of(port: Any) -> MetricsPort:
    try:
        return MetricsPort.of(port)
    except SpecError as error:
        raise SpecError(f"--metrics-port: {error}") from None


def _through_ray() -> Callable[[str, Sequence[Sample]], None]:
    from elastic.cluster.ray.ray_metrics import RayMetrics

    ray = RayMetrics()

    def tell(run: str, samples: Sequence[Sample]) -> None:
        for sample in samples:
            metric = BY_NAME[sample.name]
            labels = {"run": run, **dict(zip(metric.labels, sample.labels, strict=True))}
            ray.tell(metric.name, metric.about, sample.value, labels=labels)

    return tell
