"""How a service or a client is doing, from its folder or its address: what needs no torch.

Nothing is asked of a client, and no name is told that the role does not know already.
"""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ntkfl.crypto.certificates import read_certificate
from ntkfl.crypto.credentials import Credential
from ntkfl.errors import NTKFLError
from ntkfl.extras import missing
from ntkfl.progress import plural, span
from ntkfl.services.announcement import EVALUATION
from ntkfl.services.key_server.store import KeyServer
from ntkfl.services.status import ENDED, STOPPED, read_status
from ntkfl.services.trusted_peers import FILE, TrustedPeers

try:
    import httpx
    from cryptography import x509
except ImportError as error:
    raise missing("a federation's status", "services") from error

SOON = timedelta(days=30)  # before a certificate ends
_TIMEOUT_S = 3.0


@dataclass
class RoleStatus:
    """A role, a service or a run: what it is, and lines about it; `problems` are those that want somebody to act, and
    `waits_for` names what has not begun yet.
    """

    title: str
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    waits_for: list[str] = field(default_factory=list)

    def problem(self, line: str) -> None:
        self.lines.append(line)
        self.problems.append(f"{self.title}: {line}")


def look_at_role(folder: Path, *, ended: bool = False) -> RoleStatus | None:
    """A key server, a shuffler or a client, by what its folder holds; None for any other folder. Once the run has
    `ended`, a client that died before is no problem.
    """
    if not (folder / FILE).exists() or (folder / "run.toml").exists():
        return None
    peers = TrustedPeers.read(folder)
    if (folder / "aggregator-ca.pem").exists():
        return _shuffler(folder, peers, ended)
    return _key_server(folder, peers) if (folder / "tls.pem").exists() else _client(folder, peers, ended)


def _is_to_answer(status: dict[str, Any]) -> bool:
    """Whether a service has begun, and was not stopped in order."""
    return bool(status) and status.get("state") != STOPPED


def _shuffler(folder: Path, peers: TrustedPeers, ended: bool) -> RoleStatus:
    part, status = begin("shuffler", folder)
    if _is_to_answer(status):
        add_health(part, peers.shuffler.url, folder / "ca.pem")
    add_progress(part, status)
    for role, names in (status.get("present") or {}).items():
        part.lines.append(f"{role}s that have greeted: {listed(names)}")
    if status.get("running") and not ended:
        add_lapsed(part, status.get("lapsed") or {})
    refused = status.get("refused") or {}
    if refused:
        part.lines.append("refused: " + ", ".join(f"{count} {reason}" for reason, count in sorted(refused.items())))
    if "late" in refused:
        part.lines.append("late: rows came after their batch was closed: from a slow client, or a second copy of one")
    if "replayed" in refused:
        part.problem(
            f"replayed: {refused['replayed']} answers came where their client's were already: one identity may run in "
            "two places"
        )
    add_certificate(part, folder / "tls.pem")
    return part


def _key_server(folder: Path, peers: TrustedPeers) -> RoleStatus:
    part, status = begin("key server", folder)
    if _is_to_answer(status):
        add_health(part, peers.key_server.url, folder / "ca.pem")
    clients = KeyServer.open(folder).clients()
    for title, found in (
        ("enrolled", [c.name for c in clients if c.enrolled and not c.revoked]),
        ("expected", [c.name for c in clients if not c.enrolled and not c.revoked]),
        ("revoked", [c.name for c in clients if c.revoked]),
    ):
        if found:
            part.lines.append(f"{title}: {listed(found)}")
    ends = {c.name: c.ends for c in clients if c.enrolled and not c.revoked and c.ends is not None}
    if ends:
        name = min(ends, key=lambda name: ends[name])
        add_end(part, f"the first credential to end, {name}'s,", datetime.fromtimestamp(ends[name], UTC), timedelta(0))
    add_certificate(part, folder / "tls.pem")
    return part


def _client(folder: Path, peers: TrustedPeers, ended: bool) -> RoleStatus:
    part, status = begin(folder.name, folder)
    if ended and not status.get("running"):
        part.problems.clear()
        part.lines += ["the run has ended since: it need not be started again"] * (status.get("state") != ENDED)
    if "answered" in status:
        part.lines.append(f"answered protocol round {status['answered']} last, {_ago(status)} ago")
    elif "heard" in status:
        part.lines.append(f"heard of protocol round {status['heard']}, and was not asked")
    credential = folder / "credential"
    if credential.is_file():
        signer = bytes.fromhex(peers.key_server.signing_key)
        known = Credential.check(credential.read_text(), signer, peers.federation, allow_expired=True)
        add_end(part, "its credential", datetime.fromtimestamp(known.ends, UTC), timedelta(0))
    else:
        part.lines.append("has not enrolled")
    return part


def begin(what: str, folder: Path) -> tuple[RoleStatus, dict[str, Any]]:
    """The part, and what the role says of itself."""
    part, status = RoleStatus(f"{what}, {folder}"), read_status(folder)
    if status is None:
        part.lines.append("has not run here")
        part.waits_for.append(what)
        return part, {}
    state = str(status.get("state", ""))
    if status["running"]:
        part.lines.append(f"runs, pid {status.get('pid')}{f': {state}' if state else ''}")
    elif state == ENDED:
        part.lines.append(f"left {_ago(status)} ago: the run has ended")
    elif state == STOPPED:
        part.lines.append(f"was stopped {_ago(status)} ago{_when(status)}{_by(status)}")
    elif "problem" in status:  # what made it end: one fault
        part.problem(f"does not run; its last sign was {_ago(status)} ago{_when(status)}: {status['problem']}")
        return part, status
    else:
        part.problem(f"does not run; its last sign was {_ago(status)} ago{_when(status)}")
    if "problem" in status:
        part.problem(str(status["problem"]))
    return part, status


def add_lapsed(part: RoleStatus, lapsed: dict[str, list[str]]) -> None:
    """Those that are not waited for any more: somebody should look at them."""
    for role, names in lapsed.items():
        if names:
            part.problem(f"{role}s that do not answer and have not called since: {listed(names)}; start them again")


def add_progress(part: RoleStatus, status: dict[str, Any], rounds: int | None = None) -> None:
    key, batch = status.get("key"), status.get("batch")
    if not (status.get("running") and key):
        return
    exchange = "evaluation" if key[1] == EVALUATION else f"exchange {key[1] + 1}"
    line = f"protocol round {key[0]}, {exchange}"
    if isinstance(batch, dict):
        line += f": {batch.get('answered')} of {batch.get('asked')} have answered"
        if batch.get("seconds_left") is not None and batch.get("state", "open") == "open":
            line += f", {batch['seconds_left']} s left"
    part.lines.append(line + (f" (the run has {plural(rounds, 'round')})" if rounds else ""))


def look_at_service(url: str, ca: Path | None = None) -> RoleStatus:
    """At an address alone: whether it answers, whether it is ready, when its certificate ends."""
    part = RoleStatus(f"service, {url}")
    add_health(part, url, ca)
    try:
        parts = urlsplit(url)
        pem = ssl.get_server_certificate((parts.hostname or "", parts.port or 443), timeout=_TIMEOUT_S)
        add_end(part, "its certificate", x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc)
    except (OSError, ValueError):
        pass  # said above: nobody answers
    if ca is None:
        part.lines.append("its certificate was not checked: --ca takes the authority's, a role's ca.pem")
    return part


def add_health(part: RoleStatus, url: str, ca: Path | None) -> None:
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


def add_certificate(part: RoleStatus, path: Path) -> None:
    try:
        add_end(part, f"certificate {path.name}", read_certificate(path).not_valid_after_utc)
    except NTKFLError as error:
        part.problem(str(error))


def add_end(part: RoleStatus, what: str, ends: datetime, soon: timedelta = SOON) -> None:
    left = ends - datetime.now(UTC)
    if left <= timedelta(0):
        part.problem(f"{what} ended on {ends:%Y-%m-%d}")
    elif left < soon:
        part.problem(f"{what} ends on {ends:%Y-%m-%d}, in {plural(left.days, 'day')}: ntkfl keys renew")
    else:
        part.lines.append(f"{what} ends on {ends:%Y-%m-%d}, in {plural(left.days, 'day')}")


def _ago(status: dict[str, Any]) -> str:
    when = _time(status)
    return "some time" if when is None else span(max(0.0, time.time() - when.timestamp()))


def _when(status: dict[str, Any]) -> str:
    when = _time(status)
    return "" if when is None else f", at {when:%Y-%m-%d %H:%M:%SZ}"


def _time(status: dict[str, Any]) -> datetime | None:
    """Of the role's last sign; None where the file has none that a calendar knows."""
    try:
        return datetime.fromtimestamp(status["time"], UTC)
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return None


def _by(status: dict[str, Any]) -> str:
    return f", by {status['by']}" if "by" in status else ""


def listed(names: list[str], shown: int = 8) -> str:
    """How many, and the first of them."""
    more = ", …" if len(names) > shown else ""
    return f"{len(names)} ({', '.join(names[:shown])}{more})" if names else "none"
