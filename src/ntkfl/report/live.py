"""The page while runs go on: a small server for this machine that reads run folders and writes nothing.

    /               the page, without runs
    /events         the runs, then those that changed, as server-sent events
    /details/ID     clients and classes, spectrum, clients' values, audit
    /files/ID/NAME  one of a run's own files, by names from a fixed list

What is asked for is looked up by id and name in what was found; no path is ever made out of an address.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from ntkfl.errors import ConfigError, NTKFLError
from ntkfl.report.page import details, render, title
from ntkfl.report.runs import FoundRun, find
from ntkfl.report.view import files, view
from ntkfl.version import __version__

_KINDS = {".toml": "text/plain", ".jsonl": "text/plain", ".json": "application/json", ".png": "image/png"}
_BREATH = 15  # seconds between signs of life on a quiet stream


class Watched:
    """The runs in some folders, looked at again and again; readers wait for news."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self.found: dict[str, FoundRun] = {}
        self.views: dict[str, dict[str, Any]] = {}
        self.numbers: dict[str, int] = {}  # when each run last changed, counted in looks
        self.targets: tuple[float, ...] = ()
        self.look_number = 0
        self.changed = threading.Condition()
        self._marks: dict[str, Any] = {}
        self.look()

    def look(self) -> bool:
        """Read what changed on disk; whether anything did."""
        runs, targets = find(self.paths)
        fresh: dict[str, dict[str, Any]] = {}
        for run in runs:
            mark = _mark(run)
            if self._marks.get(run.id) != mark:
                fresh[run.id] = view(run) | {"links": _links(run)}
                self._marks[run.id] = mark
        found = {run.id: run for run in runs}
        self._marks = {id: mark for id, mark in self._marks.items() if id in found}
        with self.changed:
            news = bool(fresh) or list(found) != list(self.found)
            if news:
                self.look_number += 1
                self.found, self.targets = found, targets
                self.views = {id: fresh.get(id) or self.views[id] for id in found}
                self.numbers = {id: self.look_number if id in fresh else self.numbers[id] for id in found}
                self.changed.notify_all()
        return news

    def news(self, since: int, wait: float) -> tuple[int, dict[str, Any] | None]:
        """(the look's number, runs that changed since look `since`), or None after `wait` seconds without any."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.look_number > since, wait):
                return since, None
            changed = [self.views[id] for id, number in self.numbers.items() if number > since]
            return self.look_number, {"runs": changed, "order": list(self.found)}

    def details(self, id: str) -> dict[str, Any] | None:
        run = self.found.get(id)
        return None if run is None else details(run)


def _mark(run: FoundRun) -> tuple[object, ...]:
    """What changes whenever the run's view does: sizes and times of its files, and who holds it."""
    marks: list[object] = [run.name, run.rounds, run.stop_at, run.folder.in_use]
    for name in ("config.toml", "history.jsonl", "timings.jsonl", "failed.txt", "model.safetensors", "audit"):
        try:
            state = (run.folder.path / name).stat()
            marks.append((state.st_mtime_ns, state.st_size))
        except OSError:
            marks.append(None)
    return tuple(marks)


def _links(run: FoundRun) -> dict[str, str]:
    return {name: f"files/{run.id}/{quote(name)}" for name in files(run)}


class Handler(BaseHTTPRequestHandler):
    server: LiveServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = f"ntkfl/{__version__}", ""

    def do_GET(self) -> None:
        try:
            welcome = self._welcome()
            parts = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
        except ValueError:  # half an address in brackets
            return self._answer(HTTPStatus.BAD_REQUEST, b"this is no address\n")
        if not welcome:
            return self._answer(HTTPStatus.FORBIDDEN, b"this server answers to its own address only\n")
        watched = self.server.watched
        match parts:
            case [""]:
                return self._answer(HTTPStatus.OK, self.server.page().encode(), "text/html")
            case ["events"]:
                return self._events()
            case ["details", id] if (found := watched.details(id)) is not None:
                return self._answer(HTTPStatus.OK, json.dumps(found).encode(), "application/json")
            case ["files", id, *name] if id in watched.found:
                path = files(watched.found[id]).get("/".join(name))
                if path is not None:
                    kind = _KINDS.get(path.suffix, "application/octet-stream")
                    return self._answer(HTTPStatus.OK, path.read_bytes(), kind)
        self._answer(HTTPStatus.NOT_FOUND, b"there is nothing here\n")

    do_HEAD = do_GET

    def _welcome(self) -> bool:
        """A page elsewhere that makes its name resolve to this machine cannot read runs through a browser here."""
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        return self.server.open_to_all or host in ("localhost", "127.0.0.1", "::1", self.server.host)

    def _head(self, status: HTTPStatus, kind: str, length: int | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8" if kind.startswith("text/") else kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain") -> None:
        self._head(status, kind, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _events(self) -> None:
        self.close_connection = True
        self._head(HTTPStatus.OK, "text/event-stream", None)
        if self.command == "HEAD":
            return
        since = 0
        while not self.server.closing.is_set():
            since, news = self.server.watched.news(since, _BREATH)
            text = ": still here\n\n" if news is None else f"event: runs\ndata: {json.dumps(news)}\n\n"
            self.wfile.write(text.encode())
            self.wfile.flush()

    def handle(self) -> None:
        with suppress(ConnectionError, TimeoutError):  # the reader has left
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Requests are nobody's news."""


class LiveServer(ThreadingHTTPServer):
    """Serves the page until it is shut down."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], host: str, port: int, every: float = 1.0) -> None:
        self.host, self.every = host, every
        self.open_to_all = host in ("0.0.0.0", "::", "")
        self.closing = threading.Event()
        self.watched = Watched(paths)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}, port {port}: {error.strerror}; choose another --port"
            ) from None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def page(self) -> str:
        watched = self.watched
        document = {"title": title(watched.paths), "version": __version__, "live": True, "targets": watched.targets}
        return render(document | {"runs": [], "details": {}})

    def run(self) -> None:
        """Look for news and serve, until `stop` or Ctrl-C."""
        threading.Thread(target=self._look, daemon=True).start()
        self.serve_forever(poll_interval=0.2)

    def stop(self) -> None:
        self.closing.set()
        with self.watched.changed:
            self.watched.changed.notify_all()
        self.shutdown()

    def _look(self) -> None:
        while not self.closing.is_set():
            time.sleep(self.every)
            try:
                self.watched.look()
            except (NTKFLError, OSError):
                continue  # a folder that is being moved or written: the next look sees it whole
