"""The pages about deployments as a reader follows them: every command of their console blocks, in order, in an empty
folder and one terminal.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.deployment.federation import free_port
from tests.docs.test_blocks import BLOCKS

# What a page's commands must have left behind.
LEFT = {
    "deploy.md": [
        "runs/demo/model.safetensors",
        "model",
        "runs/private/model.safetensors",
    ],
    "flower.md": [f"runs/{name}/model.safetensors" for name in ("simulated", "three", "cp")],
}


def console(page: str) -> list[str]:
    """The commands of a page's blocks; one may have several lines, of which the later have no prompt."""
    text = "".join(block.text for block in BLOCKS if block.page == page and block.language == "console")
    assert text.startswith("$ ")
    return text[2:].rstrip("\n").split("\n$ ")


def with_free_ports(commands: list[str]) -> list[str]:
    """Others on this machine may use the ports that a reader would: each federation gets its own, and what asks for
    addresses asks for these.
    """
    changed, ports = [], dict[str, int]()
    for command in commands:
        if command.startswith("ntkfl keys init"):
            ports |= {usual: free_port() for usual in ("8441", "8442", "8443")}
            roles = zip(("key-server", "shuffler", "aggregator"), ports.values(), strict=False)
            command += "".join(f" --{role}-port {port}" for role, port in roles)
        for usual in re.findall(r"(?:127\.0\.0\.\d:|--port )(9\d{3})\b", command):
            ports.setdefault(usual, free_port())
        for usual, port in ports.items():
            command = re.sub(rf"(127\.0\.0\.\d:|--port ){usual}\b", rf"\g<1>{port}", command)
        changed.append(command)
    return changed


def shell(folder: Path, commands: list[str], seconds: float) -> str:
    """Run them in one shell that stops at the first that fails; all that it said. Nothing it started is left."""
    (folder / "bin").mkdir()
    program = folder / "bin" / "ntkfl"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ntkfl "$@"\n')
    program.chmod(0o755)
    empty = folder / "empty"
    empty.mkdir()
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    # Each command is said before it runs, so that a failure has a place.
    lines = [f"echo {shlex.quote('$ ' + command)}\n{command}" for command in commands]
    process = subprocess.Popen(
        ["bash", "-e", "-o", "pipefail", "-c", "\n".join(lines)],
        cwd=empty,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said[-4000:]
    return said


@pytest.mark.long
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("page", sorted(LEFT))
def test_a_pages_commands_work_one_after_the_other(page: str, tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="needs the extra services")
    if page == "flower.md":
        pytest.importorskip("flwr", reason="needs the extra flower")
    said = shell(tmp_path, with_free_ports(console(page)), 1200)
    for left in LEFT[page]:
        assert (tmp_path / "empty" / left).exists(), said[-2000:]
    for log in (tmp_path / "empty").rglob("*log"):
        if log.is_file():
            assert "Traceback" not in log.read_text(), log
    assert "Traceback" not in said
    # A service's requests do not flood the terminal, nor its log.
    assert not re.search("GET /v1|POST /v1", said)


@pytest.mark.parametrize("page", sorted(LEFT))
def test_commands_need_no_file_that_is_not_made_before(page: str, tmp_path: Path) -> None:
    """The fast slice: no command names a file of the repository, and those that start nothing run."""
    commands = console(page)
    assert not [c for c in commands if re.search(r"\b(configs|examples|results)/", c)]
    made = [c for c in commands if c.startswith(("mkdir", "cat >")) or c.split()[:2] in (["ntkfl", "data"],)]
    keys = [c for c in commands if c.startswith("ntkfl keys init")][:1]
    said = shell(tmp_path, [*made, *with_free_ports(keys)], 120)
    assert "one folder per client" in said
