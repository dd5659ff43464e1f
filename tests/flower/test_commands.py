"""A SuperNode that is not taken at once."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ntkfl.errors import ConfigError
from ntkfl.flower import commands

# Taken the third time, as one that was killed is once the SuperLink has missed it.
PROGRAM = """
import pathlib, sys, time
tries = pathlib.Path(sys.argv[1])
tries.write_text(tries.read_text() + "x")
if len(tries.read_text()) < int(sys.argv[2]):
    sys.exit("ERROR: Failed to activate SuperNode.")
print("taken", flush=True)
time.sleep(60 if sys.argv[3] == "stay" else 0)
"""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "RETRY_S", 0.01)


def keep(tmp_path: Path, taken_at: int, then: str) -> tuple[int, list[str]]:
    """How often it was started, and what was said; ended once it is taken."""
    tries, log, said, ended = tmp_path / "tries", tmp_path / "log", list[str](), threading.Event()
    tries.write_text("")
    log.write_text("Failed to activate SuperNode, said another one, long ago\n")
    command = commands.Command((sys.executable, "-c", PROGRAM, str(tries), str(taken_at), then), {})

    def attend(alive: Callable[[], bool]) -> None:
        while alive():
            if then == "stay" and "taken" in log.read_text():
                ended.set()
            time.sleep(0.01)

    commands.keep_supernode(command, log, attend, ended, said.append)
    return len(tries.read_text()), said


def test_it_is_started_again_until_it_is_taken(tmp_path: Path) -> None:
    tries, said = keep(tmp_path, 3, "stay")
    assert tries == 3
    assert len(said) == 2
    assert all("does not take it" in line for line in said)


def test_one_that_was_taken_and_ends_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the SuperNode ended: taken; its log is"):
        keep(tmp_path, 1, "end")


def test_it_is_not_tried_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MISSED_S", 0.0)
    with pytest.raises(ConfigError, match="the SuperNode ended: ERROR: Failed to activate SuperNode"):
        keep(tmp_path, 3, "stay")
    assert (tmp_path / "tries").read_text() == "x"


def test_a_superlink_that_is_not_there_is_said_at_once_and_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    said, ended = list[str](), threading.Event()
    watch = (f"127.0.0.1:{port}", ended, said.append, 0.01)
    watching = threading.Thread(target=commands.watch_superlink, args=watch, daemon=True)
    watching.start()
    until(lambda: bool(said))
    assert said == [f"nobody answers at 127.0.0.1:{port} (Connection refused); tries again"]
    time.sleep(0.1)
    assert len(said) == 1  # though it has tried again many times
    with socket.create_server(("127.0.0.1", port)):
        until(lambda: len(said) == 2)
    assert said[1] == f"the SuperLink at 127.0.0.1:{port} answers"
    until(lambda: len(said) == 3)  # and it is gone again
    ended.set()
    watching.join(5)
    assert not watching.is_alive()


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
