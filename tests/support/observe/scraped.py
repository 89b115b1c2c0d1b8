"""What an endpoint for Prometheus answers."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def scraped(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {one.name: one.value for family in families for one in family.samples}
