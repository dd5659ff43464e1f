"""How a federation is doing, as far as one role can tell: from its folder, a whole federation's, or a service's address.

Nothing is asked of a client, and no name is told that the role does not know already: the aggregator learns how many
answered a round, never which.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from cryptography import x509

from ntkfl.crypto.certificates import read_certificate
from ntkfl.crypto.credentials import Credential
from ntkfl.errors import ConfigError, NTKFLError
from ntkfl.federation.run_folder import Record, RunFolder
from ntkfl.federation.server import remarks
from ntkfl.progress import plural, span
from ntkfl.safe_parse import read_toml
from ntkfl.services.announcement import EVALUATION
from ntkfl.services.key_server.store import KeyServer
from ntkfl.services.shuffler.client import ShufflerClient
from ntkfl.services.status import ENDED, STOPPED, read_status
from ntkfl.services.trusted_peers import FILE, TrustedPeers

SOON = timedelta(days=30)
_ROUNDS = 5  # of a run, the last ones
_TIMEOUT_S = 3.0


@dataclass
class Part:
    """A role, a service or a run: what it is, and lines about it; `problems` are those that want somebody to act."""

    title: str
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def problem(self, line: str) -> None:
        self.lines.append(line)
        self.problems.append(f"{self.title}: {line}")


def look(where: str, ca: Path | None = None) -> list[Part]:
    """At a folder or an address."""
    if where.startswith("https://"):
        return [_service("service", where, ca)]
    folder = Path(where)
    if not folder.is_dir():
        raise ConfigError(f"no folder {folder}: give a role's folder, a federation's, a run's, or https://HOST:PORT")
    parts = list(_folder(folder))
    if not parts:
        raise ConfigError(f"{folder} is the folder of no role and of no run that is known here")
    return parts


def _folder(folder: Path) -> Iterator[Part]:
    if (folder / "history.jsonl").exists() or (folder / "config.toml").exists():
        yield _run(folder)
    elif (folder / FILE).exists():
        yield from _role(folder)
    elif (folder / "server.toml").exists() or (folder / "client.toml").exists():
        yield _flower(folder)
    else:
        for name in ("key-server", "shuffler", "aggregator", "server"):
            if (folder / name).is_dir():
                yield from _folder(folder / name)
        for client in sorted((folder / "clients").glob("*")) if (folder / "clients").is_dir() else ():
            yield from _folder(client)


def _role(folder: Path) -> Iterator[Part]:
    peers = TrustedPeers.read(folder)
    if (folder / "run.toml").exists():
        yield _aggregator(folder, peers)
    elif (folder / "aggregator-ca.pem").exists():
        yield _shuffler(folder, peers)
    elif (folder / "tls.pem").exists():
        yield _key_server(folder, peers)
    else:
        yield _client(folder, peers)


def _aggregator(folder: Path, peers: TrustedPeers) -> Part:
    part, status = _begin("aggregator", folder)
    _progress(part, status, status.get("rounds"))
    if status.get("state") != ENDED:
        try:
            shuffler = ShufflerClient(peers, folder)
            shuffler.http.patience = 0
            for role in ("client", "evaluator"):
                part.lines.append(f"{role}s that have greeted the shuffler: {_names(shuffler.clients(role))}")
        except NTKFLError as error:
            part.problem(str(error))
    if isinstance(out := status.get("out"), str) and Path(out).is_dir():
        part.lines += _rounds(RunFolder(Path(out)))
    _certificate(part, folder / "tls.pem")
    return part


def _shuffler(folder: Path, peers: TrustedPeers) -> Part:
    part, status = _begin("shuffler", folder)
    if status.get("state") != STOPPED:
        _health(part, peers.shuffler.url, folder / "ca.pem")
    _progress(part, status)
    for role, names in (status.get("present") or {}).items():
        part.lines.append(f"{role}s that have greeted: {_names(names)}")
    refused = status.get("refused") or {}
    if refused:
        part.lines.append("refused: " + ", ".join(f"{count} {reason}" for reason, count in sorted(refused.items())))
    _certificate(part, folder / "tls.pem")
    return part


def _key_server(folder: Path, peers: TrustedPeers) -> Part:
    part, status = _begin("key server", folder)
    if status.get("state") != STOPPED:
        _health(part, peers.key_server.url, folder / "ca.pem")
    clients = KeyServer.open(folder).clients()
    for title, found in (
        ("enrolled", [c.name for c in clients if c.enrolled and not c.revoked]),
        ("expected", [c.name for c in clients if not c.enrolled and not c.revoked]),
        ("revoked", [c.name for c in clients if c.revoked]),
    ):
        if found:
            part.lines.append(f"{title}: {_names(found)}")
    ends = {c.name: c.ends for c in clients if c.enrolled and not c.revoked and c.ends is not None}
    if ends:
        name = min(ends, key=lambda name: ends[name])
        _end(part, f"the first credential to end, {name}'s,", datetime.fromtimestamp(ends[name], UTC), timedelta(0))
    _certificate(part, folder / "tls.pem")
    return part


def _client(folder: Path, peers: TrustedPeers) -> Part:
    part, status = _begin(folder.name, folder)
    if "answered" in status:
        part.lines.append(f"answered round {status['answered']} last, {_ago(status)} ago")
    elif "heard" in status:
        part.lines.append(f"heard of round {status['heard']}, and was not asked")
    if "problem" in status:
        part.problem(str(status["problem"]))
    credential = folder / "credential"
    if credential.is_file():
        signer = bytes.fromhex(peers.key_server.signing_key)
        known = Credential.check(credential.read_text(), signer, peers.federation, allow_expired=True)
        _end(part, "its credential", datetime.fromtimestamp(known.ends, UTC), timedelta(0))
    else:
        part.lines.append("has not enrolled")
    return part


def _flower(folder: Path) -> Part:
    part = Part(f"{'server' if (folder / 'server.toml').exists() else folder.name} on Flower, {folder}")
    values = {name: folder / f"{name}.pem" for name in ("tls", "ca") if (folder / f"{name}.pem").exists()}
    file = "server.toml" if (folder / "server.toml").exists() else "client.toml"
    host, _, port = str(read_toml(folder / file)["superlink"]).rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S):
            part.lines.append(f"the SuperLink at {host}:{port} answers")
    except OSError as error:
        part.problem(f"nobody answers at {host}:{port}: {error.strerror or error}")
    for path in values.values():
        _certificate(part, path)
    return part


def _run(folder: Path) -> Part:
    part = Part(f"run, {folder}")
    part.lines += _rounds(RunFolder(folder))
    return part


def _rounds(folder: RunFolder) -> list[str]:
    """The last rounds: asked, answered, seconds, and what was left out."""
    try:
        history, timings = folder.records("history.jsonl"), folder.records("timings.jsonl")
    except NTKFLError as error:
        return [str(error)]
    lines = [f"run {folder.path}: {plural(len(history), 'round')} finished{', and one goes on' if folder.in_use else ''}"]
    for record, timing in list(zip(history, timings, strict=False))[-_ROUNDS:]:
        lines.append(f"  {_round(record, timing)}")
        lines += [f"    {line}" for line in remarks(record, timing)]
        lines += [f"    attempt failed: {why}" for why in record.get("failed_attempts", ())]
    return lines


def _round(record: Record, timing: Record) -> str:
    accuracy = record.get("test_accuracy")
    reached = "" if accuracy is None else f", accuracy {100 * accuracy:.1f} %"
    asked = f", {record['answered']} of {record['asked']} answered" if "asked" in record else ""
    return f"round {record['round']}: {timing['seconds']:.1f} s{asked}{reached}"


def _begin(what: str, folder: Path) -> tuple[Part, dict[str, Any]]:
    """The part, and what the role says of itself."""
    part, status = Part(f"{what}, {folder}"), read_status(folder)
    if status is None:
        part.lines.append("has not run here")
        return part, {}
    state = str(status.get("state", ""))
    if status["running"]:
        part.lines.append(f"runs, pid {status.get('pid')}{f': {state}' if state else ''}")
    elif state == ENDED:
        part.lines.append(f"left {_ago(status)} ago: the run has ended")
    elif state == STOPPED:
        part.lines.append(f"was stopped {_ago(status)} ago")
    else:
        part.problem(f"does not run; its last sign was {_ago(status)} ago")
    return part, status


def _progress(part: Part, status: dict[str, Any], rounds: object = None) -> None:
    key, batch = status.get("key"), status.get("batch")
    if not (status.get("running") and isinstance(key, list) and len(key) == 2):
        return
    exchange = "evaluation" if key[1] == EVALUATION else f"exchange {key[1] + 1}"
    line = f"protocol round {key[0]}, {exchange}"
    if isinstance(batch, dict):
        line += f": {batch.get('answered')} of {batch.get('asked')} have answered"
        if batch.get("seconds_left") is not None and batch.get("state", "open") == "open":
            line += f", {batch['seconds_left']} s left"
    part.lines.append(line + (f" (the run has {rounds} rounds)" if rounds else ""))


def _service(name: str, url: str, ca: Path | None) -> Part:
    part = Part(f"{name}, {url}")
    _health(part, url, ca)
    try:
        parts = urlsplit(url)
        pem = ssl.get_server_certificate((parts.hostname or "", parts.port or 443), timeout=_TIMEOUT_S)
        _end(part, "its certificate", x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc)
    except (OSError, ValueError):
        pass  # said above: nobody answers
    if ca is None:
        part.lines.append("its certificate was not checked: --ca takes the authority's, a role's ca.pem")
    return part


def _health(part: Part, url: str, ca: Path | None) -> None:
    try:
        context = ssl.create_default_context(cafile=ca)
        if ca is None:  # nothing is believed that it says, and nothing is sent to it
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with httpx.Client(verify=context, timeout=_TIMEOUT_S, trust_env=False) as http:
            health, ready = http.get(f"{url}/health"), http.get(f"{url}/ready")
            name = health.json()["service"]
    except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
        part.problem(f"{url} does not answer: {error}")
        return
    if ready.is_success:
        part.lines.append(f"{url} answers and is ready ({name})")
    else:
        part.problem(f"{url} answers and is not ready (status {ready.status_code})")


def _certificate(part: Part, path: Path) -> None:
    try:
        _end(part, f"certificate {path.name}", read_certificate(path).not_valid_after_utc)
    except NTKFLError as error:
        part.problem(str(error))


def _end(part: Part, what: str, ends: datetime, soon: timedelta = SOON) -> None:
    left = ends - datetime.now(UTC)
    if left <= timedelta(0):
        part.problem(f"{what} ended on {ends:%Y-%m-%d}")
    elif left < soon:
        part.problem(f"{what} ends on {ends:%Y-%m-%d}, in {plural(left.days, 'day')}: ntkfl keys renew")
    else:
        part.lines.append(f"{what} ends on {ends:%Y-%m-%d}, in {plural(left.days, 'day')}")


def _ago(status: dict[str, Any]) -> str:
    when = status.get("time")
    return span(max(0.0, time.time() - when)) if isinstance(when, int | float) else "some time"


def _names(names: list[str], shown: int = 8) -> str:
    """How many, and the first of them."""
    more = ", …" if len(names) > shown else ""
    return f"{len(names)} ({', '.join(names[:shown])}{more})" if names else "none"
