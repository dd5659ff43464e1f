"""How a federation is doing, as far as one role can tell: from its folder, a whole federation's, or a run's.

The aggregator learns how many answered a round, never which, and that is what is told.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

from ntkfl.deployment.demo_setup import partial
from ntkfl.errors import ConfigError, NTKFLError
from ntkfl.federation.run_folder import Record, RunFolder
from ntkfl.federation.server import remarks, why_rejected
from ntkfl.federation.validation import TOO_LARGE
from ntkfl.progress import percent, plural
from ntkfl.safe_parse import read_toml
from ntkfl.services.probe import RoleStatus, add_certificate, add_lapsed, add_progress, begin, listed, look_at_role
from ntkfl.services.shuffler.client import ShufflerClient
from ntkfl.services.status import ENDED, STOPPED, read_status
from ntkfl.services.trusted_peers import FILE, TrustedPeers

_ROUNDS = 5  # of a run, the last ones
_TIMEOUT_S = 3.0
_EXTREME = (
    "extreme rows are far larger than the others', often because a client's data are in other units: have every client "
    "look at the warnings of its own log"
)


def look(folder: Path) -> list[RoleStatus]:
    """At a folder: a role's, a federation's or a run's."""
    if folder.name and partial(folder).is_dir():
        raise ConfigError(f"{folder} is being made by `ntkfl deploy try`: look again in a few seconds")
    if not folder.is_dir():
        raise ConfigError(f"no folder {folder}: give a role's folder, a federation's, a run's, or https://HOST:PORT")
    parts = list(_folder(folder))
    if not parts:
        raise ConfigError(f"{folder} is the folder of no role and of no run that is known here")
    return parts


def _folder(folder: Path, *, ended: bool = False) -> Iterator[RoleStatus]:
    try:
        yield from _parts(folder, ended)
    except NTKFLError as error:  # half made, or damaged: the others are still looked at
        part = RoleStatus(f"{folder.name}, {folder}")
        part.problem(str(error))
        yield part


def _parts(folder: Path, ended: bool) -> Iterator[RoleStatus]:
    if (folder / "history.jsonl").exists() or (folder / "config.toml").exists():
        yield _run(folder)
    elif (part := look_at_role(folder, ended=ended)) is not None:
        yield part
    elif (folder / "run.toml").exists() and (folder / FILE).exists():
        yield _aggregator(folder, TrustedPeers.read(folder))
    elif (folder / "server.toml").exists() or (folder / "client.toml").exists():
        yield _flower(folder)
    else:
        ended = (read_status(folder / "aggregator") or {}).get("state") == ENDED
        for name in ("key-server", "shuffler", "aggregator", "server"):
            if (folder / name).is_dir():
                yield from _folder(folder / name, ended=ended)
        for client in sorted((folder / "clients").glob("*")) if (folder / "clients").is_dir() else ():
            yield from _folder(client, ended=ended)


def _aggregator(folder: Path, peers: TrustedPeers) -> RoleStatus:
    part, status = begin("aggregator", folder)
    add_progress(part, status, status.get("rounds"))
    if status.get("state") not in (None, ENDED, STOPPED):
        try:
            shuffler = ShufflerClient(peers, folder)
            shuffler.http.patience = 0
            for role in ("client", "evaluator"):
                found = shuffler.presence(role)
                part.lines.append(f"{role}s that have greeted the shuffler: {listed(found.clients)}")
                add_lapsed(part, {role: found.lapsed})
                if found.away and not found.lapsed:
                    what = f"{role}s that do not answer and have not called since: {found.away}"
                    part.problem(f"{what}; the shuffler's status names them, and does not tell this role")
        except NTKFLError as error:
            if "key" in status:
                part.problem(str(error))
            else:  # it has asked nobody yet, and tries again by itself
                part.lines.append(f"waits for the shuffler: {error}")
                part.waits_for.append("shuffler")
    if isinstance(out := status.get("out"), str) and Path(out).is_dir():
        _add_rounds(part, RunFolder(Path(out)))
    add_certificate(part, folder / "tls.pem")
    return part


def _flower(folder: Path) -> RoleStatus:
    part = RoleStatus(f"{'server' if (folder / 'server.toml').exists() else folder.name} on Flower, {folder}")
    values = {name: folder / f"{name}.pem" for name in ("tls", "ca") if (folder / f"{name}.pem").exists()}
    file = "server.toml" if (folder / "server.toml").exists() else "client.toml"
    host, _, port = str(read_toml(folder / file).get("superlink", "")).rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S):
            part.lines.append(f"the SuperLink at {host}:{port} answers")
    except (OSError, ValueError) as error:
        part.problem(f"nobody answers at {host}:{port}: {getattr(error, 'strerror', '') or error}")
    for path in values.values():
        add_certificate(part, path)
    return part


def _run(folder: Path) -> RoleStatus:
    part = RoleStatus(f"run, {folder}")
    _add_rounds(part, RunFolder(folder))
    return part


def _add_rounds(part: RoleStatus, folder: RunFolder) -> None:
    """The last rounds: asked, answered, seconds, and what was left out."""
    lines = part.lines
    try:
        history, timings = folder.records("history.jsonl"), folder.records("timings.jsonl")
    except NTKFLError as error:
        lines.append(str(error))
        return
    going = ", and one goes on" if folder.in_use else ""
    lines.append(f"run {folder.path}: {plural(len(history), 'round')} finished{going}")
    for record, timing in list(zip(history, timings, strict=False))[-_ROUNDS:]:
        try:
            lines.append(f"  {_round(record, timing)}")
            lines += [f"    {line}" for line in remarks(record, timing)]
            lines += [f"    attempt failed: {why}" for why in record.get("failed_attempts", ())]
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
            lines.append("  a record that cannot be read")
    for record in history[-1:]:
        if what := _left_out(record):
            part.problem(what)


def _left_out(record: Record) -> str:
    """Of a round of a deployment that lost a client's worth of rows, or a tenth of them: what was rejected, in words.
    Rows come without names, so whose they were is not known here.
    """
    try:
        rejected, answered = record.get("rejected") or {}, max(1, int(record.get("answered", 1)))
        lost, clients = sum(rejected.values()), record.get("rejected_clients", 0)
        rows = lost + record["samples"] if "samples" in record else answered
        if "attempt" not in record or not lost or (not clients and lost < min(rows / answered, rows / 10)):
            return ""
        of = (
            f"what {plural(clients, 'client')} sent was not used" if clients else f"{lost} of {rows} rows were not used"
        )
        line = f"round {record['round']}: {of}: {why_rejected(rejected)}"
        return f"{line}; {_EXTREME}" if TOO_LARGE in rejected else line
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
        return ""


def _round(record: Record, timing: Record) -> str:
    accuracy = record.get("test_accuracy")
    reached = "" if accuracy is None else f", accuracy {percent(accuracy)}"
    asked = f", {record['answered']} of {record['asked']} answered" if "asked" in record else ""
    return f"round {record['round']}: {timing['seconds']:.1f} s{asked}{reached}"
