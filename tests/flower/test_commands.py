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
    sys.exit("ERROR: " + sys.argv[4])
print("taken at", sys.argv[5], flush=True)
time.sleep(60 if sys.argv[3] == "stay" else 0)
"""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "RETRY_S", 0.01)


HEADING = "Failed to initialize the connection to the SuperLink."


def last_words(reason: str) -> str:
    """What a SuperNode of Flower 1.41 ends with that does not get as far as taking part."""
    return f"""\x1b[0m:     Exit Code: 305
{HEADING}
{reason}
The SuperNode could not establish a connection to the SuperLink.

For more information, visit: <https://flower.ai/docs/framework/1.41/en/ref-exit-codes/305.html>
INFO:     Shutting down
\x1b[92mINFO \x1b[0m:      FastAPI lifespan: shutdown
INFO:     Finished server process [17522]"""


NOT_TAKEN = last_words("[code: 2004] Failed to activate SuperNode.")
NO_TLS = "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)"


def keep(tmp_path: Path, taken_at: int, then: str, why: str = NOT_TAKEN) -> tuple[list[int], list[str]]:
    """The ports it was started with, and what was said; ended once it is taken. Until then it ends saying `why`."""
    tries, log, said, ended = tmp_path / "tries", tmp_path / "log", list[str](), threading.Event()
    tries.write_text("")
    log.write_text("Failed to activate SuperNode, said another one, long ago\n")
    ports = list[int]()

    def command(port: int) -> commands.Command:
        words = (str(tries), str(taken_at), then, why, str(port))
        return commands.Command((sys.executable, "-c", PROGRAM, *words), {})

    def attend(port: int, alive: Callable[[], bool]) -> None:
        ports.append(port)
        while alive():
            if then == "stay" and "taken" in log.read_text():
                ended.set()
            time.sleep(0.01)

    commands.keep_supernode(command, log, attend, ended, said.append)
    assert len(tries.read_text()) == len(ports)
    assert f"taken at {ports[-1]}" in log.read_text()
    return ports, said


@pytest.mark.parametrize(
    ("why", "line"),
    [
        (NOT_TAKEN, "the SuperLink does not take it"),
        ("[Errno 98] error while attempting to bind: address already in use", "another program took port"),
        (last_words("The handshake timed out"), "broke off before it stood"),
    ],
)
def test_it_is_started_again_until_it_is_taken(tmp_path: Path, why: str, line: str) -> None:
    ports, said = keep(tmp_path, 3, "stay", why)
    assert len(ports) == 3
    assert len(said) == 2
    assert all(line in one for one in said)


@pytest.mark.parametrize(
    "reason",
    [
        "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local issuer certificate",
        NO_TLS,
        "[SSL] record layer failure (_ssl.c:1033)",  # the same, in the words of OpenSSL 3.2
    ],
)
def test_one_that_cannot_trust_the_superlink_is_not_started_again(tmp_path: Path, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        keep(tmp_path, 3, "stay", last_words(reason))
    assert f"the SuperNode ended: {HEADING[:-1]}: {reason}; its log is" in str(caught.value)
    assert (tmp_path / "tries").read_text() == "x"


def test_one_that_was_taken_and_ends_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the SuperNode ended: taken at .*; its log is"):
        keep(tmp_path, 1, "end")


def test_it_is_not_tried_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MISSED_S", 0.0)
    with pytest.raises(
        ConfigError, match=r"the SuperNode ended: Failed to initialize .*: \[code: 2004\] Failed to activate SuperNode"
    ):
        keep(tmp_path, 3, "stay")
    assert (tmp_path / "tries").read_text() == "x"


def test_an_error_message_has_what_went_wrong_and_not_the_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert commands.what_failed(log) == "it said nothing"
    log.write_text("INFO: starts\nINFO: ready\n")
    assert commands.what_failed(log) == "INFO: ready"
    before = commands.size(log)
    log.write_text(log.read_text() + "ERROR: Exit Code: 305\ncertificate verify failed\n\nsee the page\nINFO: ended\n")
    assert commands.what_failed(log, before) == "certificate verify failed"
    assert commands.what_failed(log, commands.size(log)) == "it said nothing"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (last_words(NO_TLS), f"{HEADING[:-1]}: {NO_TLS}"),
        (
            last_words("[Errno -2] Name or service not known"),
            f"{HEADING[:-1]}: [Errno -2] Name or service not known",
        ),
        (last_words("an older reason") + "\n" + last_words("the last one"), f"{HEADING[:-1]}: the last one"),
        (last_words("[code: 1] no.\nasked too late"), f"{HEADING[:-1]}: [code: 1] no: asked too late"),
        ("ERROR : Exit Code: 301\n\nThe key is no key.\n\nFor more information, ask\n", "The key is no key."),
        ("ERROR : Exit Code: 301\n", "ERROR : Exit Code: 301"),
        ("ERROR : a call failed, and was made again\n" + 30 * "WARNING : busy\n" + "killed\n", "killed"),
        ("\x1b[91mERROR \x1b[0m: it failed\nINFO : ended\n", "ERROR : it failed"),
    ],
)
def test_the_reason_is_told_with_its_heading(tmp_path: Path, said: str, told: str) -> None:
    (tmp_path / "log").write_text(said)
    assert commands.what_failed(tmp_path / "log") == told


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
