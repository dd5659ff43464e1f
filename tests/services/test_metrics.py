"""Metrics in Prometheus' text format."""

from __future__ import annotations

import re

import pytest

from ntkfl.services.metrics import Metrics

LINE = re.compile(
    r'(?P<name>[a-z_]+)(\{(?P<labels>[a-z_]+="([^"\\\n]|\\.)*"(,[a-z_]+="([^"\\\n]|\\.)*")*)\})? (?P<value>\S+)'
)


def parsed(text: str) -> dict[str, float]:
    """Samples by name and labels. Every line is one, or a comment that declares what follows."""
    found = {}
    declared = set(re.findall(r"^# TYPE (\S+) (?:counter|gauge)$", text, re.MULTILINE))
    for line in text.splitlines():
        if not line.startswith("# "):
            match = LINE.fullmatch(line)
            assert match is not None, line
            assert match["name"] in declared
            found[line.rpartition(" ")[0]] = float(match["value"])
    return found


def test_counters_add_up_and_gauges_are_replaced() -> None:
    metrics = Metrics()
    for status in (200, 200, 503):
        metrics.count("ntkfl_requests_total", service='a "quoted"\nname\\', status=status)
    metrics.set("ntkfl_certificate_end_seconds", 3)
    metrics.set("ntkfl_certificate_end_seconds", 4)
    found = parsed(metrics.text())
    label = r'service="a \"quoted\"\nname\\"'
    assert found["ntkfl_requests_total{" + label + ',status="200"}'] == 2
    assert found["ntkfl_requests_total{" + label + ',status="503"}'] == 1
    assert found["ntkfl_certificate_end_seconds"] == 4
    metrics.set("ntkfl_no_such_thing", 1)
    with pytest.raises(KeyError):
        metrics.text()
