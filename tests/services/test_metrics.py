"""Metrics in Prometheus' text format, of this process and of real services; readiness beside them."""

from __future__ import annotations

import re
import sqlite3
import time
from pathlib import Path
from urllib.request import urlopen

import httpx
import pytest

from ntkfl.errors import ConfigError
from ntkfl.services.metrics import KNOWN, Metrics, serving_metrics
from tests.deployment.federation import Deployment, free_port
from tests.services.processes import Process

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
    metrics.set("ntkfl_round", 3)
    metrics.set("ntkfl_round", 4)
    found = parsed(metrics.text())
    label = r'service="a \"quoted\"\nname\\"'
    assert found["ntkfl_requests_total{" + label + ',status="200"}'] == 2
    assert found["ntkfl_requests_total{" + label + ',status="503"}'] == 1
    assert found["ntkfl_round"] == 4
    metrics.set("ntkfl_no_such_thing", 1)
    with pytest.raises(KeyError):
        metrics.text()


def test_every_metric_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    assert [name for name in KNOWN if f"`{name}`" not in page] == []


@pytest.mark.parametrize("address", ["here", "127.0.0.1:seventy", "127.0.0.1:70000"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--metrics takes HOST:PORT"), serving_metrics(address):
        pass


def scraped(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def test_services_as_prometheus_and_a_kubelet_see_them(tmp_path: Path) -> None:
    """Both services as processes: metrics on a port of the operator's, health and readiness on the clients'."""
    deployment, ports = Deployment(tmp_path), (free_port(), free_port())
    serve = ("-m", "ntkfl", "serve")
    with (
        Process(*serve, "key-server", deployment.folder / "key-server", "--metrics", f"127.0.0.1:{ports[0]}") as keys,
        Process(
            *serve, "shuffler", deployment.folder / "shuffler", "--port", "0", "--aggregator-port", "0",
            "--metrics", f"127.0.0.1:{ports[1]}", listeners=2,
        ) as shuffler,
    ):  # fmt: skip
        deployment.urls = shuffler.urls
        client, aggregator = deployment.client("client-0"), deployment.aggregator()
        client.ask("POST", "/hello")
        deployment.client("evaluator-0", "evaluator").ask("POST", "/hello")
        batch = deployment.batch("client-0", "client-1")
        aggregator.publish(batch)
        client.submit(batch.key)
        client.submit(batch.key)  # refused: it is there already
        assert client.ask("GET", "/announcement?after=0", headers={}).status_code == 401
        for urls in (keys.urls, shuffler.urls):
            for url in urls.values():
                if url != shuffler.urls["shuffler-aggregator"]:  # that one needs the aggregator's certificate
                    with httpx.Client(verify=deployment.tls(), trust_env=False) as http:
                        assert http.get(f"{url}/health").json()["status"] == "ok"
                        assert http.get(f"{url}/ready").status_code == 200
        known = wait_for(ports[1], "ntkfl_batch_answered", 1)
        assert known['ntkfl_present{role="client"}'] == known['ntkfl_present{role="evaluator"}'] == 1
        assert (known["ntkfl_batch_round"], known["ntkfl_batch_asked"]) == (batch.key.round, 2)
        assert known['ntkfl_refusals_total{reason="replayed",service="shuffler"}'] == 1
        assert known['ntkfl_requests_total{service="shuffler",status="401"}'] == 1
        assert "client-0" not in scraped(ports[1])  # counts, and no names
        assert parsed(scraped(ports[0]))['ntkfl_key_server_clients{state="expected"}'] == 5
        assert parsed(scraped(ports[0]))["ntkfl_certificate_end_seconds"] > 1.7e9
        # The state is gone: the process is healthy, as a restart would not help, and not ready: nobody is sent to it.
        with sqlite3.connect(deployment.folder / "key-server" / "state.sqlite") as db:
            db.execute("DROP TABLE runs")
        with httpx.Client(verify=deployment.tls(), trust_env=False) as http:
            assert http.get(f"{keys.urls['key-server']}/health").status_code == 200
            assert http.get(f"{keys.urls['key-server']}/ready").status_code == 503
        deployment.hang_up()
        assert [line for line in shuffler.err if "request" in line] == []  # those are of level debug


def wait_for(port: int, name: str, value: float) -> dict[str, float]:
    """The shuffler looks once a second."""
    for _ in range(100):
        known = parsed(scraped(port))
        if known.get(name) == value:
            return known
        time.sleep(0.1)
    raise AssertionError(known)
