"""Ctrl-C in real processes, in a terminal and in a log: one line, 130, no traceback, nobody left behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ntkfl.cli.stopping import stoppable
from ntkfl.deployment.demo_setup import DemoSetup, init
from tests.cli.command import UNWANTED, Command, wait_until_gone

TERMS = 'inputs = [64]\noutputs = 10\nclients_per_round = 2\n[method]\nname = "ntk-fl"\n'

SMALL = ["--dataset", "digits", "--clients", "10", "--clients-per-round", "2", "--hidden", "4", "--method", "fedavg"]
COMPARISON = """
name = "stopped"
rounds = 100000
clients_per_round = 3
seeds = [0, 1]
data = {dataset = "digits", clients = 10, alpha = 1.0}
model = {hidden = [4]}
[[methods]]
label = "FedAvg"
method = {name = "fedavg"}
[[methods]]
label = "NTK-FL"
method = {name = "ntk-fl"}
"""


def stop(command: Command, line: str, code: int = 130) -> str:
    """Interrupt it: it ends with one line that says so, and nothing is left of it."""
    before = len(command.text)
    assert command.interrupt() == code, command.text[-2000:]
    said = command.text[before:]
    assert re.search(line, said), command.text[-2000:]
    assert said.count("stopped") == 1
    for unwanted in UNWANTED:
        assert unwanted not in command.text, command.text[-2000:]
    assert not wait_until_gone(command)
    return said


@pytest.mark.parametrize("terminal", [False, True])
def test_training_shows_the_time_left_and_says_how_to_go_on(tmp_path: Path, terminal: bool) -> None:
    out = tmp_path / "run"
    command = Command("train", *SMALL, "--rounds", "100000", "--out", out, terminal=terminal)
    command.until("left.*\\d:\\d\\d:\\d\\d" if terminal else "\n +3 .* \\d+[:h]\\d\\d\n")
    stop(command, f"stopped after \\d+ whole rounds?; continue with: ntkfl train --resume --out\\s+{out}")


def test_a_comparison_ends_with_its_workers(tmp_path: Path) -> None:
    """From a terminal, which interrupts the workers too; while they work, and while they are being started."""
    (tmp_path / "c.toml").write_text(COMPARISON)
    words = ("compare", tmp_path / "c.toml", "--out", tmp_path / "out", "--workers", "2")
    command = Command(*words, terminal=True)
    command.until("runs to do")
    stop(command, "continue with: ntkfl compare .*c.toml --out")
    command = Command(*words, terminal=True)
    command.until(r"0 of 4 runs finished, [\d:]+ (s|min|h) left")
    stop(command, "finished runs are kept, continue with")


@pytest.mark.long
def test_what_is_measured_can_be_stopped_in_a_log() -> None:
    command = Command("bench", "round", "kernel")
    command.until("round  \\(\\d+ %, .* left\\)")
    stop(command, "stopped; nothing was written")


@pytest.mark.long
def test_folders_of_a_large_federation(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TERMS.replace("64", "4"))
    command = Command(
        "keys", "init", tmp_path / "t", "--config", tmp_path / "run.toml", "--clients", "10000", terminal=True
    )
    command.until("folders of clients.*left")
    stop(command, "stopped; begin anew: rm -r")


def test_a_client_whose_key_server_is_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "t" / "clients" / "client-0"
    (tmp_path / "run.toml").write_text(TERMS)
    init(tmp_path / "t", tmp_path / "run.toml", DemoSetup(key_server_port=1, shuffler_port=2, aggregator_port=3))
    np.savez(tmp_path / "x.npz", x=np.zeros((3, 64), np.float32), y=np.zeros(3, np.int64))
    command = Command("join", folder, "--data", tmp_path / "x.npz", "--patience", "600")
    while not (folder / "signing-key.pem").exists():  # from then on it asks
        time.sleep(0.1)
    stop(command, "client-0: stopped by SIGINT; the same command takes part again: ntkfl join")


def test_a_role_that_a_supervisor_ends_says_so_too() -> None:
    """By SIGTERM, in a call into C that gives Python no moment: the same line, and the code that supervisors know."""
    program = """
import hashlib
from ntkfl.cli.stopping import stoppable, stopped_by
with stoppable(lambda: f"stopped by {stopped_by()}", terminable=True):
    print("begun", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.3)  # it is inside the call
    process.terminate()
    assert process.communicate(timeout=30)[1] == "stopped by SIGTERM\n"
    assert process.returncode == 143


def test_outside_of_such_a_block_sigterm_ends_as_ever() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stoppable(terminable=True):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.long
def test_a_load_ends_with_the_services_it_started(tmp_path: Path) -> None:
    load = Command("serve", "load", "--clients", "20", "--at-once", "5", "--rows", "2", "--out", tmp_path / "load")
    load.until("round 1: .* left\\)")
    stop(load, "stopped; nothing was written")
    assert not (tmp_path / "load").exists()


def test_a_computation_that_does_not_listen_is_ended_all_the_same() -> None:
    """One call into C that takes hours and gives Python no moment to notice anything."""
    program = """
import hashlib
from ntkfl.cli.stopping import hear_interrupts, stoppable
hear_interrupts()
with stoppable(lambda: "stopped; as it was told"):
    print("begun", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
    command = Command(program=program)
    command.until("begun")
    time.sleep(0.5)  # it is inside the call
    stop(command, "stopped; as it was told")


def test_an_interrupt_that_gets_lost_ends_the_command_all_the_same() -> None:
    """As in a library in C that clears whatever error it meets."""
    program = """
import time
from ntkfl.cli.stopping import hear_interrupts, stoppable
hear_interrupts()
with stoppable(lambda: "stopped; as it was told"):
    while True:
        try:
            print("begun", flush=True)
            time.sleep(100)
        except KeyboardInterrupt:
            pass
"""
    command = Command(program=program)
    command.until("begun")
    stop(command, "stopped; as it was told")


def test_where_interrupts_are_ignored_they_stay_ignored() -> None:
    program = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from ntkfl.cli.stopping import hear_interrupts
hear_interrupts()
assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
