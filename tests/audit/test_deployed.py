"""An audit of a deployment: its terms on data that are given, or which option to give."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

from ntkfl.audit.capture import captures
from ntkfl.audit.deployed import is_deployment, plan, settings_file
from ntkfl.cli import app
from ntkfl.data.npz import deal
from ntkfl.deployment.aggregator import Aggregator
from ntkfl.errors import ConfigError, NTKFLError
from ntkfl.safe_parse import read_toml
from tests.deployment.roles import Roles, digits


@pytest.fixture
def roles(tmp_path: Path) -> Roles:
    """Folders of a deployment, and of its run the settings that it keeps."""
    roles = Roles(tmp_path, clients=3, clients_per_round=3)
    aggregator = Aggregator(roles.folder / "aggregator", roles.out, lambda line: None)
    described = aggregator._described(aggregator.server.method)
    (roles.out / "config.toml").write_text(tomli_w.dumps(_without_none(described)))
    return roles


def _without_none(values: object) -> dict[str, object]:
    assert isinstance(values, dict)
    return {k: _without_none(v) if isinstance(v, dict) else v for k, v in values.items() if v is not None}


def test_the_round_played_has_the_deployments_terms(roles: Roles) -> None:
    """Rows of the contract's shape, from the clients that a round asks, behind its projection."""
    for source in (roles.out, roles.folder / "aggregator", roles.folder / "aggregator" / "run.toml"):
        file = settings_file(source)
        assert is_deployment(read_toml(file))
        config, data = plan(file, str(roles.data), allow_code=False)
        assert (len(data), config.clients_per_round) == (3, 3)
    caught = captures(config, [1], data=data)[1]
    assert caught.cohort == (0, 1, 2)
    assert caught.projection is not None
    assert caught.task.like.dtype.itemsize == 4  # the deployment's is 8: attacks are in float32
    sealed = caught.exchanges[0].submitted
    assert len(set(sealed)) == 1  # every client sends as many rows: max_rows, padding among them
    assert config.method["rows_per_client"] == 90


def test_without_data_the_option_to_give_is_named(roles: Roles) -> None:
    def refusal(*words: str) -> str:
        outcome = CliRunner().invoke(app, ["audit", *words])
        assert isinstance(outcome.exception, NTKFLError), outcome.output
        return str(outcome.exception)

    assert f"here: --data {roles.data}" in refusal(str(roles.out))
    assert "give --data, a folder of client-0.npz" in refusal("--config", str(roles.folder / "aggregator" / "run.toml"))
    assert "no client-0.npz" in refusal(str(roles.out), "--data", str(roles.folder))
    (roles.out.parent / "plan.toml").write_text("rounds = 1\n[data]\ndataset = 'digits'\nclients = 4\n")
    assert "says itself which data" in refusal("--config", str(roles.out.parent / "plan.toml"), "--data", "digits")


def test_data_of_another_shape_or_too_few_clients_are_refused(roles: Roles, tmp_path: Path) -> None:
    file = settings_file(roles.out)
    deal(digits(2), tmp_path / "two")
    with pytest.raises(ConfigError, match="has 2 clients, and a round asks 3"):
        plan(file, str(tmp_path / "two"), allow_code=False)
    values = read_toml(file) | {"inputs": [64]}
    (tmp_path / "other.toml").write_text(tomli_w.dumps(values))
    with pytest.raises(ConfigError, match=r"has inputs \[1, 8, 8\] and 10 outputs, the deployment \[64\] and 10"):
        plan(tmp_path / "other.toml", "digits", allow_code=False)
    values = read_toml(file) | {"model": {"name": "os:system"}}
    (tmp_path / "other.toml").write_text(tomli_w.dumps(values))
    with pytest.raises(NTKFLError, match="os:system"):
        plan(tmp_path / "other.toml", "digits", allow_code=False)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_whole_audit_of_a_deployments_run(roles: Roles, tmp_path: Path) -> None:
    words = ["audit", str(roles.out), "--data", str(roles.data), "--quick", "--out", str(tmp_path / "audit")]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 0, outcome.output
    assert "its terms are played on the data given" in outcome.output
    for role in ("curious aggregator", "curious shuffler", "aggregator and shuffler together"):
        assert f"{role}: learns" in " ".join(outcome.output.split())
    assert (tmp_path / "audit" / "index.html").exists()
