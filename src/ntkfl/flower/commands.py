"""The exact commands of Flower that a deployment consists of, and running one of them beside this process."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from ntkfl.atomic import check_private
from ntkfl.errors import ConfigError
from ntkfl.extras import missing
from ntkfl.flower.folders import CA, NODE_KEY, SECRET, TLS_CERT, TLS_KEY, ClientFile, ServerFile
from ntkfl.flower.superlink import SECRET_OPTION
from ntkfl.processes import block_sigint, end_with_parent

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Command:
    """What to run, and the environment variables it needs beside those there are."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*words, shlex.join(self.arguments)])


def superlink(folder: Path, host: str | None = None, database: Path | None = None) -> Command:
    """TLS, nodes admitted by their keys, control by a token, nothing run or installed by it; on loopback unless told
    otherwise.
    """
    options = {
        "--host": host or LOOPBACK,
        "--port": str(ServerFile.read(folder).port),
        "--ssl-ca-certfile": _file(folder, CA),
        "--ssl-certfile": _file(folder, TLS_CERT),
        "--ssl-keyfile": _secret(folder, TLS_KEY),
        "--isolation": "process",
        SECRET_OPTION: _secret(folder, SECRET),
    }
    if database is not None:
        options["--database"] = str(database.absolute())
    switches = ("--enable-supernode-auth", "--disable-runtime-dependency-installation")
    return _command((sys.executable, "-m", "ntkfl.flower.superlink"), folder, options, *switches)


def supernode(folder: Path, port: int) -> Command:
    """Its own interface, for the process that answers, is on loopback always."""
    options = {
        "--superlink": ClientFile.read(folder).superlink,
        "--root-certificates": _file(folder, CA),
        "--auth-supernode-private-key": _secret(folder, NODE_KEY),
        "--isolation": "process",
        SECRET_OPTION: _secret(folder, SECRET),
        "--host": LOOPBACK,
        "--port": str(port),
    }
    program = Path(sys.executable).parent / "flower-supernode"
    if not program.exists():
        raise missing(f"{program.name}, which is not beside {sys.executable},", "flower")
    return _command((str(program),), folder, options)


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as sock:
        return int(sock.getsockname()[1])


# In the log of a SuperNode that did not get as far as taking part.
_NOT_TAKEN = b"Failed to activate SuperNode"
_NO_CONNECTION = b"Failed to initialize the connection"
# A certificate that is not trusted, and a peer that speaks no TLS, in the words of older and newer OpenSSL: they stay.
_FOR_GOOD = (b"certificate verify failed", b"wrong version number", b"record layer failure")
_PORT_IN_USE = b"address already in use"
# Flower's last words: a heading, the reason, what the code stands for, an empty line. Lines of no interest follow.
_LAST_WORDS = re.compile(r"Exit Code: \d+\s*\n(.*?)(?:\n\s*\n|\Z)", re.DOTALL)
_INFO, _WRONG, _LINES = "INFO", re.compile(r"error|fail", re.IGNORECASE), 20
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
MISSED_S, RETRY_S = 120.0, 5.0
_MINUTE_S = 60.0  # between two lines about a SuperLink that is still not there


@contextmanager
def running(command: Command, log: Path, patience: float = 8) -> Iterator[subprocess.Popen[bytes]]:
    """The command as a process that ends with this one, within `patience`; what it says goes to `log`.

    A SuperNode signs off at the SuperLink, which takes seconds; one that could not is refused for a while afterwards.
    """
    # Deaf to the Ctrl-C that a terminal sends to all: a second signal, after the one below, would cut its end short.
    with open(log, "ab") as sink, block_sigint():
        process = subprocess.Popen(
            command.arguments,
            env=os.environ | dict(command.environment),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent,
        )
    try:
        yield process
    finally:
        stop(process, patience)


def stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Ask it to end; after `seconds`, make it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


Attend = Callable[[int, Callable[[], bool]], None]


def keep_supernode(
    command: Callable[[int], Command], log: Path, attend: Attend, ended: Event, say: Callable[[str], None]
) -> None:
    """Run a SuperNode (`command` of a port) and `attend` to it there (for as long as what it is given says so) until
    `ended`.

    A SuperLink takes no second SuperNode of a client before it has missed the first for a minute, and none whose key
    it does not know. A free port may be another program's by the time a SuperNode binds it, and a connection may break
    off before it stands. So one that does not get as far as taking part is started again for a while.
    """
    until = time.monotonic() + MISSED_S
    while True:
        before, port = size(log), free_port()
        with running(command(port), log) as process:
            attend(port, lambda: not ended.is_set() and process.poll() is None)
        if ended.is_set():
            return
        reason = why_again(log.read_bytes()[before:], port)
        if reason is None or time.monotonic() > until:
            raise ConfigError(f"the SuperNode ended: {what_failed(log, before)}; its log is {log}")
        say(f"{reason}; again")
        if ended.wait(RETRY_S):
            return


def why_again(said: bytes, port: int) -> str | None:
    """Why a SuperNode that said this ended, where the next one may do better."""
    if _NOT_TAKEN in said:
        return "the SuperLink does not take it: the key is not known there yet, or the last SuperNode not missed"
    if _PORT_IN_USE in said:
        return f"another program took port {port} before the SuperNode did"
    if _NO_CONNECTION in said and not any(words in said for words in _FOR_GOOD):
        return "the connection to the SuperLink broke off before it stood"
    return None


def watch_superlink(address: str, ended: Event, say: Callable[[str], None], every: float = RETRY_S) -> None:
    """Say when nobody answers at the SuperLink's address, at once and then every minute, and when somebody does again.
    A SuperNode keeps trying by itself, and only its log hears of it.
    """
    host, _, port = address.rpartition(":")
    said: float | None = None
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=5):
                if said is not None:
                    say(f"the SuperLink at {address} answers")
                said = None
        except OSError as error:
            if said is None or time.monotonic() > said + _MINUTE_S:
                said = time.monotonic()
                say(f"nobody answers at {address} ({error.strerror or error}); tries again")
        if ended.wait(every):
            return


def size(log: Path) -> int:
    """In bytes; whoever starts next is heard from there on."""
    return log.stat().st_size if log.exists() else 0


def what_failed(log: Path, since: int = 0) -> str:
    """What was said there last of what went wrong, else the last thing that was said, for an error message."""
    try:
        said = _COLOUR.sub("", log.read_bytes()[since:].decode(errors="replace"))
    except OSError:
        said = ""
    if last := _stripped("".join(_LAST_WORDS.findall(said)[-1:])):
        kept = last[:-1] if len(last) > 2 else last  # what the code stands for adds nothing to a heading and a reason
        return ": ".join([*(line.rstrip(".:") for line in kept[:-1]), *kept[-1:]])
    lines = _stripped(said)[-_LINES:]  # further back are troubles that it got over
    wrong = [line for line in lines if _INFO not in line and _WRONG.search(line)]
    return (wrong or lines or ["it said nothing"])[-1]


def _stripped(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _command(program: tuple[str, ...], folder: Path, options: Mapping[str, str], *switches: str) -> Command:
    environment = {
        "FLWR_HOME": str((folder / ".flwr").absolute()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }
    words = [word for pair in options.items() for word in pair]
    return Command((*program, *words, *switches), environment)


def _file(folder: Path, name: str) -> str:
    path = folder / name
    if not path.is_file():
        raise ConfigError(f"no {name} in {folder}: is it a folder of `ntkfl flower init`?")
    return str(path.absolute())


def _secret(folder: Path, name: str) -> str:
    path = _file(folder, name)
    check_private(Path(path))
    return path
