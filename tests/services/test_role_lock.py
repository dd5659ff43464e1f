"""A role's folder has one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ntkfl.errors import ConfigError
from ntkfl.services.role_lock import role_lock

PROGRAM = """
import sys, time
from pathlib import Path
from ntkfl.services.role_lock import role_lock
with role_lock(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_second_process_of_a_role_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with pytest.raises(ConfigError, match="in use"), role_lock(tmp_path):
            pass
    finally:
        process.kill()
        process.wait()
    with role_lock(tmp_path):
        pass
    with pytest.raises(ConfigError, match="cannot use"), role_lock(tmp_path / "none"):
        pass
