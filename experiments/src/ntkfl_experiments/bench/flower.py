"""What Flower costs: the same rounds in one process, and deployed on loopback."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from ntkfl.data.npz import deal
from ntkfl.federation.build import load_data
from ntkfl.federation.config import RunConfig
from ntkfl.federation.run_folder import Record
from ntkfl.federation.simulation import execute
from ntkfl.flower import commands, folders
from ntkfl.flower.apps import server_app
from ntkfl.flower.quiet import quiet
from ntkfl.flower.runtime import SuperLink
from ntkfl.flower.server import FlowerRun
from ntkfl_experiments.bench.relay import Relay
from ntkfl_experiments.bench.rows import BenchRow

METHODS: dict[str, dict[str, Any]] = {"NTK-FL": {"name": "ntk-fl"}, "FedAvg": {"name": "fedavg"}}
VERSIONS = {name: version(name) for name in ("flwr",)}
WAYS = 2 * len(METHODS)  # that `overhead` tries
Say = Callable[[str], None]


def overhead(clients: int, rounds: int, say: Say) -> list[BenchRow]:
    """Rounds of digits with a small network, so that what shows is the carrying; all clients in every round."""
    rows = []
    for label, method in METHODS.items():
        data = {"dataset": "digits", "clients": clients, "alpha": 1.0}
        config = RunConfig(rounds=rounds, clients_per_round=clients, data=data, model={"hidden": (50,)}, method=method)
        say(f"{label}, {clients} clients: one process")
        here = execute(config)
        base = _typical(here.timings)
        payload = _payload(here.history)
        rows.append(BenchRow(f"{label}, {clients} clients", base, 1.0, note="one process", details=payload, ours=True))
        say(f"{label}, {clients} clients: Flower, deployed on loopback")
        rows.append(_deployed(config, base, payload))
    return rows


def large(megabytes: int, say: Say) -> BenchRow:
    """One message of that size from each of two clients, through SuperNodes and SuperLink."""
    say(f"a message of {megabytes} MB from each of two clients")
    features, rows = 1000, megabytes * 250
    method = {"name": "centralized", "local_steps": 1, "lr": 0.01}
    settings = {"inputs": [features], "outputs": 2, "clients": 2, "clients_per_round": 2, "round_seconds": 900.0}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files = [root / f"client-{i}.npz" for i in range(2)]
        for i, file in enumerate(files):
            rng = np.random.default_rng(i)
            np.savez(file, x=rng.standard_normal((rows, features), np.float32), y=rng.integers(0, 2, rows))
        run = FlowerRun(**settings, rounds=1, model={"hidden": (2,)}, method=method)
        with _world(root, run, files) as (link, relay, names):
            out: list[Record] = []
            began = time.perf_counter()
            link.run(server_app(names, run, root / "run", test=_none(features), say=say, history=out), root / "note")
            seconds = time.perf_counter() - began
        details = _payload(out) | {"measured_uplink": float(relay.up), "measured_downlink": float(relay.down)}
    return BenchRow(f"a message of {megabytes} MB", seconds, note="from each of two clients at once", details=details)


def _deployed(config: RunConfig, base: float, payload: dict[str, float]) -> BenchRow:
    """Seconds of a round, and the bytes between the SuperNodes and the SuperLink, TLS and all."""
    data = load_data(config)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files = deal(data, root / "data")[:-1]
        run = FlowerRun(
            inputs=data.input_shape,
            outputs=data.output_dim,
            rounds=config.rounds,
            clients=len(files),
            clients_per_round=len(files),
            round_seconds=300,
            model=config.model,
            method=config.method,
        )
        with _world(root, run, files) as (link, relay, names):
            marks: list[tuple[int, int]] = []
            timings: list[Record] = []

            def on_round(_: Record, timing: Record) -> None:
                marks.append((relay.up, relay.down))
                timings.append(timing)

            app = server_app(names, run, root / "run", test=data.test, on_round=on_round, say=lambda _: None)
            link.run(app, root / "note")
        between = len(marks) - 1
        up, down = ((marks[-1][i] - marks[0][i]) / between for i in range(2))
    seconds = _typical(timings)
    details = payload | {"measured_uplink": up, "measured_downlink": down}
    return BenchRow("  Flower, deployed", seconds, seconds / base, note="loopback, TLS, keys", details=details)


@contextmanager
def _world(root: Path, run: FlowerRun, files: list[Path]) -> Iterator[tuple[SuperLink, Relay, dict[str, int]]]:
    """A SuperLink and a client for each file, all processes; the clients reach it through a relay."""
    with ExitStack() as stack:
        (root / "run.toml").write_text(tomli_w.dumps(run.model_dump(mode="json", exclude_none=True)))
        port = commands.free_port()
        folders.init(root / "fl", root / "run.toml", len(files), port=port)
        server = root / "fl" / "server"
        stack.enter_context(commands.running(commands.superlink(server), root / "superlink.log"))
        relay = Relay(port)
        stack.callback(relay.close)
        link = SuperLink(f"127.0.0.1:{port}", server / folders.CA, folders.read_secret(server))
        link.wait(120)
        names = link.admit(folders.known_keys(server))
        for name, file in zip(names, files, strict=True):
            about = root / "fl" / "clients" / name / "client.toml"
            about.write_text(about.read_text().replace(f":{port}", f":{relay.port}"))
            words = (sys.executable, "-m", "ntkfl", "flower", "client", str(about.parent), "--data", str(file))
            command = commands.Command(words, {"OMP_NUM_THREADS": "1"})
            stack.enter_context(commands.running(command, root / f"{name}.log"))
        stack.enter_context(quiet())
        yield link, relay, names


def _typical(timings: list[Record]) -> float:
    """The median round, the first not counted: it waits for everybody to have started."""
    return float(statistics.median(t["seconds"] for t in timings[1:]))


def _payload(history: list[Record]) -> dict[str, float]:
    """Bytes of messages a round, as this package counts them."""
    last = history[-1]
    return {"uplink_bytes": float(last["uplink_bytes"]), "downlink_bytes": float(last["downlink_bytes"])}


def _none(features: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, features), torch.zeros(1, dtype=torch.int64)
