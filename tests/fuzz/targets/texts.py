"""TOML that people write, and options of the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tomli_w

from ntkfl.cli.options import parse_numbers, parse_setting, parse_steps
from ntkfl.compare.spec import Comparison
from ntkfl.deployment.contract import Contract, Federation
from ntkfl.federation.build import build_method, build_network, spelled_out
from ntkfl.federation.config import RunConfig
from ntkfl.flower.folders import ClientFile, ServerFile
from ntkfl.flower.server import FlowerRun
from ntkfl.services.trusted_peers import TrustedPeers
from tests.fuzz.target import Target
from tests.fuzz.targets.twists import twisted_toml

TOML_WORDS = (
    b'[data]\n', b'[model]\n', b'[method]\n', b'[[methods]]\n', b'self = 1\n', b'name = []\n', b'name = {}\n',
    b'= true\n', b'\nseed = 1e400\n', b'nan', b'inf', b'"""', b"'''", b'hidden = [-1]\n', b'hidden = [1000000000]\n',
    b'options = {x = 1}\n', b'1979-05-27T07:32:00Z', b'\nsimulation = true\n', b'\nmodel = 3\n', b'\nmethod = 3\n',
    b'start = 1\n', b'\xff', b'\x00', b'clients = 99999999999999999999\n', b'lr = -1\n', b'steps = []\n',
    b'grid = {lr = []}\n', b'grid = {lr = [1e300]}\n', b'projected_dim = 0\n', b'mean = [1.0]\n', b'std = [0.0]\n',
    b'inputs = []\n', b'inputs = [-1]\n', b'outputs = 0\n',
)  # fmt: skip
_RUN = b"""rounds = 3
clients_per_round = 5
seed = 7
[data]
dataset = "digits"
clients = 20
alpha = 0.5
[model]
name = "mlp"
hidden = [10, 5]
[method]
name = "cp-ntk-fl"
lr = 0.01
steps = [10.0, 100.0]
projected_dim = 20
"""
_COMPARISON = b"""name = "c"
rounds = 2
seeds = [0, 1]
targets = [0.5]
[data]
dataset = "digits"
[search]
rounds = [1, 2]
[[methods]]
label = "FedAvg"
method = { name = "fedavg", local_steps = 3 }
grid = { lr = [0.1, 0.3] }
[[methods]]
label = "NTK-FL"
method = { name = "ntk-fl" }
stop_at = 0.9
"""
_DEPLOYED = b"""inputs = [8, 8]
outputs = 10
clients = 4
clients_per_round = 2
rounds = 3
[method]
name = "fedavg"
lr = 0.1
"""


def targets(scratch: Path) -> list[Target]:
    key = "ab" * 32
    federation = Federation(
        federation="f", run="r", key_server={"url": "https://a", "signing_key": key},  # type: ignore[arg-type]
        shuffler={"url": "https://b", "aggregator_url": "https://c", "signing_key": key},  # type: ignore[arg-type]
        aggregator={"signing_key": key},  # type: ignore[arg-type]
        terms=Contract(inputs=(4,), outputs=2, clients_per_round=2, method={"name": "cp-ntk-fl", "projected_dim": 2}),
    )  # fmt: skip
    terms = tomli_w.dumps({"terms": {"inputs": [4], "outputs": 2, "method": {"name": "fedavg"}}}).encode()
    client = b'name = "a"\nnumber = 0\nclients = 2\nsuperlink = "127.0.0.1:80"\n' + terms
    pinned = tomli_w.dumps(federation.model_dump(mode="json", exclude_none=True)).encode()

    def toml(name: str, seed: bytes, read: Callable[[Path], object], file: str) -> Target:
        folder = scratch / name.replace(" ", "-")
        folder.mkdir()

        def check(data: bytes) -> None:
            (folder / file).write_bytes(data)
            read(folder / file)

        return Target(name, (seed,), check, twist=twisted_toml, words=TOML_WORDS)

    return [
        toml("run.toml", _RUN, _run, "run.toml"),
        toml("comparison.toml", _COMPARISON, _comparison, "comparison.toml"),
        toml("deployment.toml", _DEPLOYED, lambda path: FlowerRun.read(path).build_method(), "run.toml"),
        toml(
            "federation.toml", pinned, lambda path: Federation.read(path.parent).terms.build_model(0), "federation.toml"
        ),
        toml("federation.toml of services", pinned, lambda path: TrustedPeers.read(path.parent), "federation.toml"),
        toml("client.toml", client, lambda path: ClientFile.read(path.parent).terms.build_model(0), "client.toml"),
        toml("server.toml", b'superlink = "[::1]:80"\n', lambda path: ServerFile.read(path.parent).port, "server.toml"),
        Target(
            "option steps", (b"100:2000:100", b"1,2,3.5", b"paper"), _steps, words=(b":", b",", b"e9", b"nan", b"inf")
        ),
        Target("option hidden", (b"200,100", b"5"), lambda data: parse_numbers("hidden", _text(data), int)),
        Target("option set", (b"lr=0.1", b"steps=[1, 2]", b"name=word"), lambda data: parse_setting(_text(data))),
    ]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")  # as arguments of a command come


def _run(path: Path) -> None:
    config = RunConfig.read(path)
    method = build_method(config.method)
    tomli_w.dumps({k: v for k, v in spelled_out(config).items() if v is not None and k == "ntkfl"})
    config.data.how()
    if ":" not in config.model.name:  # which is code of its user's
        build_network(config.model.suited(method), (8,), 3, config.seed)


def _comparison(path: Path) -> None:
    comparison = Comparison.read(path)
    for entry in comparison.methods:
        for seed in comparison.seeds:
            spelled_out(comparison.run(entry, seed, {}))


def _steps(data: bytes) -> None:
    steps = parse_steps(_text(data))
    assert steps is not None
    assert len(steps) <= 100_000
