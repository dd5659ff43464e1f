"""CP-NTK-FL with every role a process of its own: key server, shuffler, aggregator, three clients, an evaluator.

What docs/deploy.md starts by hand, in one script on one machine; needs the extra `services`. Each process is given one
folder and nothing else: the aggregator never holds the secret ρ, the shuffler no key that opens rows, and nobody
another client's data.
"""

import multiprocessing
import os
import socket
import tempfile
from pathlib import Path

import ntkfl
from ntkfl.data.npz import deal
from ntkfl.federation.run_folder import RunFolder

CLIENTS = 3
RUN = """
inputs = [1, 8, 8]
outputs = 10
rounds = 2
clients = 3
clients_per_round = 3
evaluators = 1

[model]
hidden = [12]

[method]
name = "cp-ntk-fl"
projected_dim = 20
subsample_rate = 0.5
sparsity = 0.8
steps = [50.0, 200.0, 800.0]
"""


def key_server(folder: Path) -> None:
    """As `ntkfl serve key-server`."""
    from ntkfl.cli.serve import key_server

    log_to(folder.with_suffix(".log"))
    key_server(folder)


def shuffler(folder: Path) -> None:
    """As `ntkfl serve shuffler`."""
    from ntkfl.cli.serve import shuffler

    log_to(folder.with_suffix(".log"))
    shuffler(folder)


def member(folder: Path, data: Path) -> None:
    """As `ntkfl join`: a client, or an evaluator where its token says so."""
    from ntkfl.cli.join import join

    log_to(folder.with_suffix(".log"))
    join(folder, str(data))


def aggregator(folder: Path, out: Path) -> None:
    """As `ntkfl aggregate`."""
    from ntkfl.cli.aggregate import aggregate

    aggregate(folder, out)


def log_to(path: Path) -> None:
    """What this process prints goes to a file: eight processes in one terminal are hard to read."""
    with open(path, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def main() -> None:
    from ntkfl.deployment.demo_setup import DemoSetup, init

    root = Path(tempfile.mkdtemp(prefix="ntkfl-private-"))
    fed = ntkfl.data.load("digits").partition(ntkfl.data.Dirichlet(clients=CLIENTS, alpha=1.0), seed=0)
    deal(fed, root / "data")
    (root / "run.toml").write_text(RUN)
    ports = dict(zip(("key_server_port", "shuffler_port", "aggregator_port"), free_ports(3), strict=True))
    init(root / "demo", root / "run.toml", DemoSetup(clients=CLIENTS, evaluators=1, **ports))

    # One process imports torch, the roles are its children: seconds saved, nothing shared.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["ntkfl.cli.progress", "ntkfl.deployment.aggregator"])
    roles = root / "demo"
    services = [
        processes.Process(target=key_server, args=(roles / "key-server",)),
        processes.Process(target=shuffler, args=(roles / "shuffler",)),
    ]
    members = [
        processes.Process(target=member, args=(roles / "clients" / f"client-{i}", root / "data" / f"client-{i}.npz"))
        for i in range(CLIENTS)
    ]
    members.append(
        processes.Process(target=member, args=(roles / "clients" / "evaluator-0", root / "data" / "test.npz"))
    )
    training = processes.Process(target=aggregator, args=(roles / "aggregator", root / "run"))
    try:
        for process in (*services, *members, training):
            process.start()
        for process in (training, *members):
            process.join()
    finally:
        for process in (*services, *members, training):
            if process.is_alive():
                process.terminate()
            process.join()

    history = RunFolder(root / "run").records()
    print(f"accuracy by round, counted by the evaluator: {[round(r['test_accuracy'], 3) for r in history]}")
    print(f"the aggregator's folder holds: {', '.join(sorted(p.name for p in (roles / 'aggregator').iterdir()))}")
    print(f"everything is in {root}")


if __name__ == "__main__":
    main()
