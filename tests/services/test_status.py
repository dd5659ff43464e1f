"""`status.json`: what a role says of itself, and whether it is still there."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ntkfl.errors import ConfigError
from ntkfl.services.status import FILE, StatusFile, read_status, refuse_second

PROGRAM = """
import sys, time
from pathlib import Path
from ntkfl.services.status import StatusFile
status = StatusFile(Path(sys.argv[1]), "client", name="client-0", state="waiting")
status.update(answered=3, problem="none yet")
status.update(problem=None)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_role_that_was_killed_is_told_from_one_that_waits(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        there = read_status(tmp_path)
        assert there is not None
        assert (there["running"], there["pid"], there["answered"]) == (True, process.pid, 3)
        assert there["state"] == "waiting"
        assert "problem" not in there
        second = StatusFile(tmp_path, "client", name="another")  # a second process of one role: the first has the word
        second.update(answered=9)
        assert read_status(tmp_path) == there
        with pytest.raises(ConfigError, match=f"process {process.pid} runs this role"):
            refuse_second(tmp_path)
    finally:
        process.kill()
        process.wait()
    gone = read_status(tmp_path)
    assert gone == there | {"running": False}
    refuse_second(tmp_path)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("text", [b"", b"[1]", b'{"pid": 1', b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_is_no_error(tmp_path: Path, text: bytes) -> None:
    (tmp_path / FILE).write_bytes(text)
    assert read_status(tmp_path) == {"running": False}
