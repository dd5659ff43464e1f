"""Methods of differential privacy are refused between machines, wherever their terms are read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from ntkfl.deployment.aggregator import Aggregator
from ntkfl.deployment.client import ShuffledClient
from ntkfl.deployment.contract import Contract, Deployment, Terms
from ntkfl.errors import ConfigError
from ntkfl.flower.folders import ClientFile
from ntkfl.flower.folders import init as flower_init
from ntkfl.flower.server import FlowerRun
from ntkfl.methods import PrivateSums
from tests.deployment.test_aggregator import made

REFUSED = "refused between machines: sites' terms are not checked against the aggregator's"
PRIVATE: dict[str, dict[str, Any]] = {
    "records": {"name": "private-sums", "secure_sum": True, "noise_clients": 2},
    "ridge": {"name": "private-ridge", "secure_sum": True},
    "ridge, exact counts": {"name": "private-ridge", "epsilon": "none"},
    "clients": {"name": "dp-fedavg", "secure_sum": True},
}
SHAPE: dict[str, Any] = {"inputs": (4,), "outputs": 2}
COHORT: dict[str, Any] = SHAPE | {"clients_per_round": 2}


class Own(PrivateSums):
    """A user's own, whose code is imported after its terms were read."""


@pytest.mark.parametrize("kind", PRIVATE)
def test_terms_with_noise_are_refused_in_a_line(kind: str) -> None:
    method = PRIVATE[kind]
    for read in (
        lambda: Terms(**SHAPE, method=method),
        lambda: Contract(**COHORT, method=method),
        lambda: Deployment(**COHORT, clients=2, method=method),
        lambda: FlowerRun(**COHORT, clients=2, method=method),
    ):
        with pytest.raises(ConfigError, match=REFUSED) as error:
            read()
        assert "\n" not in str(error.value)


def test_terms_without_noise_are_not() -> None:
    for method in ({"name": "sum-ntk-fl", "secure_sum": True}, {"name": "fedavg"}, {"name": "sum-ridge"}):
        assert Terms(**SHAPE, method=method).build_method().name == method["name"]


def test_a_method_of_ones_own_is_refused_before_it_is_used() -> None:
    terms = Terms(**SHAPE, method={"name": f"{__name__}:Own"})
    for use in (terms.spelled_out, terms.build_method, lambda allow_code: terms.build_model(0, allow_code=allow_code)):
        with pytest.raises(ConfigError, match=REFUSED):
            use(allow_code=True)


def test_folders_with_such_terms_start_nobody(tmp_path: Path) -> None:
    """Folders that an older version made, or that somebody has edited."""
    aggregator = made(tmp_path, method={"name": "fedavg", "shuffle": True})
    client = aggregator.parent / "clients" / "client-0"
    (tmp_path / "fl.toml").write_text((tmp_path / "run.toml").read_text().replace("shuffle = true", ""))
    flower_init(tmp_path / "fl", tmp_path / "fl.toml", 3)
    member = tmp_path / "fl" / "clients" / "client-0"
    for path in (aggregator / "federation.toml", client / "federation.toml", member / "client.toml"):
        said = tomllib.loads(path.read_text())
        terms = said.get("terms", said)
        assert terms["method"]["name"] == "fedavg"
        terms["method"] = PRIVATE["clients"]
        path.write_text(tomli_w.dumps(said))
    for start in (
        lambda: Aggregator(aggregator, tmp_path / "run"),
        lambda: ShuffledClient(client, torch.zeros(1, 4), torch.zeros(1).long()),
        lambda: ClientFile.read(member),
    ):
        with pytest.raises(ConfigError, match=REFUSED):
            start()
