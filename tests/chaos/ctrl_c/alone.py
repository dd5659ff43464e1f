"""Verbs that need nobody else: training, comparing, attacking, measuring, drawing, handing on, making keys."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ntkfl.data.catalog import CATALOG, locate
from ntkfl.federation.config import RunConfig
from ntkfl.federation.simulation import execute
from tests.chaos.ctrl_c.case import Case
from tests.chaos.ctrl_c.kept import documents, rounds, size

DATA = {"dataset": "digits", "clients": 10, "alpha": 1.0}
COMPARISON = """
name = "ctrl-c"
rounds = {rounds}
clients_per_round = 3
seeds = {seeds}
data = {{dataset = "digits", clients = 10, alpha = 1.0}}
model = {{hidden = [{hidden}]}}
[[methods]]
label = "FedAvg"
method = {{name = "fedavg"}}
[[methods]]
label = "NTK-FL"
method = {{name = "ntk-fl"}}
"""
SERVED = "fashion-mnist"  # its upstream has no TLS, so a proxy can stand in for it
WEIGHTS = 1 << 30  # bytes of the model that is exported, so that writing it takes seconds


def train(folder: Path, _: ExitStack) -> Case:
    out, small = folder / "run", ("--dataset", "digits", "--clients", "10", "--clients-per-round", "3", "--hidden", "8")
    words = ("train", *small, "--rounds", "100000", "--out", out)
    line = f"stopped after \\d+ whole rounds?; continue with: ntkfl train --resume --out\\s+{out}"
    again = ("train", "--resume", "--out", out)
    return Case("train", words, line=line, again=again, kept=lambda: rounds(out))


def train_kept_nowhere(folder: Path, _: ExitStack) -> Case:
    words = ("train", "--dataset", "digits", "--clients", "10", "--clients-per-round", "3", "--rounds", "100000")
    return Case("train, no --out", words, begun="\n +2 ", line="stopped; nothing was kept")


def compare(folder: Path, _: ExitStack) -> Case:
    config = _comparison(folder, rounds=100000, seeds=[0, 1], hidden=4)
    words = ("compare", config, "--out", folder / "out", "--workers", "2")
    line = "stopped; finished runs are kept, continue with: ntkfl compare"
    return Case("compare --workers 2", words, line=line, kept=lambda: rounds(folder / "out"))


def reproduce_pieces(folder: Path, _: ExitStack) -> Case:
    runs = folder / "runs"
    words = ("reproduce", "lemma3", "--scale", "full", "--runs", runs, "--out", folder / "out")
    line = "stopped; finished work is kept, continue with: ntkfl reproduce lemma3"
    return Case("reproduce lemma3", words, line=line, kept=lambda: documents(runs), nowhere=folder / "out")


def reproduce_runs(folder: Path, _: ExitStack) -> Case:
    runs = folder / "runs"
    words = ("reproduce", "fig4c", "--scale", "full", "--workers", "2", "--runs", runs, "--out", folder / "out")
    line = "stopped; finished work is kept, continue with: ntkfl reproduce fig4c"
    return Case("reproduce fig4c", words, line=line, kept=lambda: rounds(runs), nowhere=folder / "out")


def audit(folder: Path, _: ExitStack) -> Case:
    (folder / "plan.toml").write_text(
        'rounds = 3\nclients_per_round = 5\ndata = {dataset = "digits", clients = 10}\n'
        'model = {hidden = [50]}\nmethod = {name = "ntk-fl"}\n'
    )
    words = ("audit", "--config", folder / "plan.toml", "--out", folder / "out")
    line = "stopped; nothing was written"
    return Case("audit", words, begun=" left\\)", within=1, line=line, nowhere=folder / "out" / "index.html")


def bench(folder: Path, _: ExitStack) -> Case:
    words = ("bench", "round", "kernel", "--json", folder / "bench.json")
    line = "stopped; nothing was written"
    return Case("bench", words, begun="round  \\(", within=8, line=line, nowhere=folder / "bench.json")


def fetch(folder: Path, stack: ExitStack) -> Case:
    """From a proxy that gives a megabyte a second of something that will never be the file; to a command that has not
    heard of the system's own datasets, which may have it.
    """
    cache = folder / "cache"
    (folder / "none").mkdir()
    proxy = stack.enter_context(_slow_proxy())
    env = {"http_proxy": proxy, "HTTP_PROXY": proxy, "no_proxy": "", "NO_PROXY": ""}
    env |= {"XDG_CACHE_HOME": str(cache), "NTKFL_DATA": str(folder / "none")}
    line = f"stopped; what is here is kept, go on with: ntkfl data fetch {SERVED}"
    words = ("data", "fetch", SERVED)
    program = "from ntkfl.data import catalog\ncatalog.SYSTEM_FOLDERS = ()\nfrom ntkfl.cli import main\nmain()"
    kept = lambda: size(cache, "*.part")  # noqa: E731
    return Case("data fetch", words, within=2, line=line, kept=kept, env=env, program=program)


def report(folder: Path, _: ExitStack) -> Case:
    """Of so many runs that their spectra take long."""
    config: dict[str, Any] = {"data": DATA, "model": {"hidden": [400]}, "method": {"name": "ntk-fl"}, "rounds": 1}
    execute(RunConfig(**config, clients_per_round=5), out=folder / "runs" / "run-0")
    for number in range(1, 200):
        shutil.copytree(folder / "runs" / "run-0", folder / "runs" / f"run-{number}")
    page = folder / "report.html"
    line = "stopped; no page was written, spectra computed so far are kept"
    found = lambda: documents(folder / "runs", "insight.json")  # noqa: E731
    words = ("report", folder / "runs", "--out", page)
    return Case("report", words, within=2, line=line, kept=found, nowhere=page)


def export(folder: Path, _: ExitStack) -> Case:
    """A run whose weights were replaced by a gigabyte of zeros, which are copied like any."""
    method = {"name": "ntk-fl", "projected_dim": 20}
    config = RunConfig(data=DATA, model={"hidden": [4]}, method=method, rounds=1, clients_per_round=2)
    execute(config, out=folder / "run")
    with open(folder / "run" / "model.safetensors", "r+b") as file:
        file.truncate(WEIGHTS)
    out = folder / "model"
    words = ("export", folder / "run", "--out", out, "--plain-projection")
    line = "stopped; no model was written, begin anew: ntkfl export"
    begun = lambda: any(out.glob("model.safetensors.*"))  # noqa: E731
    return Case("export", words, begun=begun, within=0.5, line=line, nowhere=out / "export.toml")


def keys_init(folder: Path, _: ExitStack) -> Case:
    (folder / "run.toml").write_text('inputs = [4]\noutputs = 2\nclients_per_round = 2\n[method]\nname = "ntk-fl"\n')
    made = folder / "made"
    words = ("keys", "init", made, "--config", folder / "run.toml", "--clients", "10000")
    return Case(
        "keys init", words, begun=lambda: any(made.glob("clients/client-*")), within=2,
        line=f"stopped; begin anew: rm -r {made}", before=lambda: shutil.rmtree(made, ignore_errors=True),
    )  # fmt: skip


def watch(folder: Path, _: ExitStack) -> Case:
    words = ("watch", folder, "--port", "0")
    return Case("watch", words, begun="Ctrl-C ends it", within=2, code=0)


def _comparison(folder: Path, **values: object) -> Path:
    path = folder / "comparison.toml"
    path.write_text(COMPARISON.format(**values))
    return path


@contextmanager
def _slow_proxy() -> Iterator[str]:
    lengths = {remote.url: remote.bytes for remote in CATALOG[SERVED].downloads}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = lengths[self.path]
            asked = self.headers.get("Range", "")
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(length - start))
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{length - 1}/{length}")
            self.end_headers()
            while start < length:
                part = bytes(min(1 << 16, length - start))
                try:
                    self.wfile.write(part)
                except OSError:  # whom it was for has been interrupted
                    return
                start += len(part)
                time.sleep(0.06)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def lacks_fashion_mnist() -> str:
    return "" if locate("fashion-mnist") else "fashion-mnist is not on this machine"
