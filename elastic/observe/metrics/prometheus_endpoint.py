"""An endpoint that Prometheus scrapes: the newest values of the metric table."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from elastic.config.numbers.metrics_port import MetricsPort
from elastic.errors import SpecError
from elastic.observe.metrics.metric_names import METRICS
from elastic.observe.metrics.run_numbers import Sample


class _Newest(Collector):
    """A scrape reads what was told last; it computes nothing."""

    def __init__(self) -> None:
        self.run = ""
        self.samples: Sequence[Sample] = ()

    def collect(self) -> Iterator[Metric]:
        run, by_name = self.run, dict[str, list[Sample]]()
        for sample in self.samples:
            by_name.setdefault(sample.name, []).append(sample)
        for metric in METRICS:
            found = by_name.get(metric.name)
            if not found:
                continue
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            made = family(metric.name, metric.about, labels=("run", *metric.labels))
            for sample in found:
                made.add_metric((run, *sample.labels), sample.value)
            yield made


class PrometheusEndpoint:
    """Serves from its making on until `close`. Raises SpecError where the port is not to be had."""

    def __init__(self, where: MetricsPort) -> None:
        self._newest = _Newest()
        registry = CollectorRegistry()
        registry.register(self._newest)
        try:
            self._server, self._thread = _started(where, registry)
        except OSError as error:
            raise SpecError(
                f"metrics_port: {where.host}:{where.port} is not to be had ({error.strerror}); "
                "take another port, or 0 for any that is free"
            ) from error
        host = f"[{where.host}]" if ":" in where.host else where.host
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def tell(self, run: str, samples: Sequence[Sample]) -> None:
        self._newest.run, self._newest.samples = run, samples

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _started(
    where: MetricsPort, registry: CollectorRegistry
) -> tuple[WSGIServer, threading.Thread]:
    return start_http_server(where.port or 0, where.host, registry)
