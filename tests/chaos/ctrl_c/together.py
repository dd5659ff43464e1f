"""Verbs of a federation: the services and roles of this package's own, and Flower's, all on loopback."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import tomli_w

import ntkfl
from ntkfl.data.npz import deal
from tests.chaos.ctrl_c.case import Case
from tests.chaos.ctrl_c.kept import rounds
from tests.cli.command import Command
from tests.deployment.roles import free_ports

CLIENTS = 3
RUN = {
    "inputs": [1, 8, 8], "outputs": 10, "rounds": 100000, "clients": CLIENTS, "clients_per_round": CLIENTS,
    "round_seconds": 10.0, "model": {"hidden": [8]},
}  # fmt: skip
TRIAL = {"patience": 120.0, "evaluators": 1} | RUN
SHUFFLED = {"name": "cp-ntk-fl", "projected_dim": 20, "subsample_rate": 0.5, "sparsity": 0.8}


def key_server(folder: Path, stack: ExitStack) -> Case:
    _federation(folder, stack)
    words = ("serve", "key-server", folder / "demo" / "key-server")
    return Case("serve key-server", words, begun="listen", within=2, code=0)


def shuffler(folder: Path, stack: ExitStack) -> Case:
    _federation(folder, stack)
    words = ("serve", "shuffler", folder / "demo" / "shuffler")
    return Case("serve shuffler", words, begun="listen", within=2, code=0)


def shuffler_at_work(folder: Path, stack: ExitStack) -> Case:
    """While a run goes on behind it: clients and the aggregator have requests under way all the time."""
    _federation(folder, stack)
    _start(stack, "serve", "key-server", folder / "demo" / "key-server", begun="listen")
    words = ("serve", "shuffler", folder / "demo" / "shuffler")
    with ExitStack() as first:
        _start(first, *words, begun="listen")
        _clients(folder, stack, CLIENTS)
        _start(stack, "aggregate", folder / "demo" / "aggregator", "--out", folder / "run", begun="\n +1 ")
    return Case("… while a run goes on", words, begun="listen", kept=lambda: rounds(folder / "run"), code=0)


def aggregate(folder: Path, stack: ExitStack) -> Case:
    _services(folder, stack)
    _clients(folder, stack, CLIENTS)
    out = folder / "run"
    words = ("aggregate", folder / "demo" / "aggregator", "--out", out)
    line = f"stopped by SIGINT; go on with: ntkfl aggregate .* --out {out}"
    return Case("aggregate", words, line=line, kept=lambda: rounds(out))


def join(folder: Path, stack: ExitStack) -> Case:
    """The last client: with it the rounds begin, and without it they wait."""
    _services(folder, stack)
    _clients(folder, stack, CLIENTS - 1)
    _start(stack, "aggregate", folder / "demo" / "aggregator", "--out", folder / "run", begun="waits for")
    name = f"client-{CLIENTS - 1}"
    words = ("join", folder / "demo" / "clients" / name, "--data", folder / "data" / f"{name}.npz")
    line = "stopped by SIGINT; the same command takes part again: ntkfl join"
    return Case("join", words, begun="answered round", line=line, kept=lambda: rounds(folder / "run"))


def flower_simulate(folder: Path, _: ExitStack) -> Case:
    config = {
        "rounds": 100000, "clients_per_round": 4, "data": {"dataset": "digits", "clients": 10},
        "model": {"hidden": [8]}, "method": {"name": "ntk-fl"},
    }  # fmt: skip
    (folder / "simulate.toml").write_text(tomli_w.dumps(config))
    words = ("flower", "simulate", folder / "simulate.toml", "--out", folder / "run")
    again = (*words, "--resume")
    line = "stopped; go on with: ntkfl flower simulate .* --resume --out"
    return Case("flower simulate", words, line=line, again=again, kept=lambda: rounds(folder / "run"))


def flower_server(folder: Path, _: ExitStack) -> Case:
    _flower(folder)
    return Case("flower server", ("flower", "server", folder / "fl" / "server"), begun="SuperLink is up", code=0)


def flower_client(folder: Path, stack: ExitStack) -> Case:
    """One of those whom a run asks all the time."""
    _flower(folder)
    _start(stack, "flower", "server", folder / "fl" / "server", begun="SuperLink is up")
    for number in range(1, CLIENTS):
        _flower_client(folder, stack, number)
    with ExitStack() as first:
        _flower_client(folder, first, 0)
        _start(stack, "flower", "run", folder / "fl" / "server", "--out", folder / "run", begun="\n +1 ")
    words = _client_words(folder, 0)
    return Case("flower client", words, begun="takes part", kept=lambda: rounds(folder / "run"), code=0)


def flower_run(folder: Path, stack: ExitStack) -> Case:
    _flower(folder)
    _start(stack, "flower", "server", folder / "fl" / "server", begun="SuperLink is up")
    for number in range(CLIENTS):
        _flower_client(folder, stack, number)
    out = folder / "run"
    words = ("flower", "run", folder / "fl" / "server", "--out", out)
    line = f"stopped; the same command goes on after the last whole round in {out}"
    return Case("flower run", words, line=line, kept=lambda: rounds(out))


def flower_bench(folder: Path, _: ExitStack) -> Case:
    words = ("flower", "bench", "--clients", "4", "--rounds", "20", "--large", "0", "--json", folder / "bench.json")
    line = "stopped; nothing was written"
    return Case("flower bench", words, begun="one process  \\(", within=30, line=line, nowhere=folder / "bench.json")


def _federation(folder: Path, stack: ExitStack) -> None:
    """Folders of every role, and data; the services' ports are free ones."""
    _deal(folder)
    (folder / "run.toml").write_text(tomli_w.dumps(TRIAL | {"method": SHUFFLED}))
    ports = [str(port) for port in free_ports(3)]
    options = zip(("--key-server-port", "--shuffler-port", "--aggregator-port"), ports, strict=True)
    words = ("keys", "init", folder / "demo", "--config", folder / "run.toml", "--clients", str(CLIENTS))
    _start(stack, *words, *(word for pair in options for word in pair), begun="In production")


def _services(folder: Path, stack: ExitStack) -> None:
    _federation(folder, stack)
    for role in ("key-server", "shuffler"):
        _start(stack, "serve", role, folder / "demo" / role, begun="listen")


def _clients(folder: Path, stack: ExitStack, count: int) -> None:
    files = {f"client-{number}": f"client-{number}.npz" for number in range(count)} | {"evaluator-0": "test.npz"}
    for name, file in files.items():
        words = ("join", folder / "demo" / "clients" / name, "--data", folder / "data" / file, "--patience", "600")
        _start(stack, *words, begun="is enrolled")


def _deal(folder: Path) -> None:
    partition = ntkfl.data.Dirichlet(clients=CLIENTS, alpha=1.0)
    deal(ntkfl.data.load("digits").partition(partition, seed=0), folder / "data")


def _flower(folder: Path) -> None:
    from ntkfl.flower import folders

    _deal(folder)
    (folder / "run.toml").write_text(tomli_w.dumps(RUN | {"method": {"name": "ntk-fl"}}))
    folders.init(folder / "fl", folder / "run.toml", CLIENTS, "127.0.0.1", free_ports(1)[0])


def _client_words(folder: Path, number: int) -> tuple[str | Path, ...]:
    name = f"client-{number}"
    return ("flower", "client", folder / "fl" / "clients" / name, "--data", folder / "data" / f"{name}.npz")


def _flower_client(folder: Path, stack: ExitStack, number: int) -> None:
    _start(stack, *_client_words(folder, number), begun="takes part")


def _start(stack: ExitStack, *words: str | Path, begun: str) -> None:
    """In the background until the stack ends."""
    command = Command(*words)
    stack.callback(command.kill)
    command.until(begun)
    command.drain()
