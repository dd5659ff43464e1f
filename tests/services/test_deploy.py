"""What `deploy/` installs is what the services import, in the versions that pyproject.toml allows: no torch."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORTS = """
import sys
import ntkfl.cli.keys, ntkfl.cli.serve, ntkfl.services.setup, ntkfl.services.shuffler, ntkfl.services.key_server
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_the_services_need_what_is_installed_for_them() -> None:
    lines = [line for line in (ROOT / "deploy" / "services.txt").read_text().splitlines() if not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = project["dependencies"] + project["optional-dependencies"]["services"]
    assert set(lines) <= set(known)
    assert set(project["optional-dependencies"]["services"]) <= set(lines)
    found = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "flwr", "pandas"} & set(found)
    installed = {re.split("[>=<]", line)[0].replace("-", "_") for line in lines}
    assert installed - {"numpy", "uvicorn"} <= set(found) | {"uvicorn"}
