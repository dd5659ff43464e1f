"""What `deploy/` installs and how it runs: the services' packages alone, pinned with hashes, with no right to spare."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORTS = """
import sys
import ntkfl.cli.sites, ntkfl.services.setup, ntkfl.services.shuffler, ntkfl.services.key_server
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def text(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_services_need_what_is_installed_for_them() -> None:
    lines = [line for line in text("deploy/services.txt").splitlines() if not line.startswith("#")]
    project = tomllib.loads(text("pyproject.toml"))["project"]
    known = project["dependencies"] + project["optional-dependencies"]["services"]
    assert set(lines) <= set(known)
    assert set(project["optional-dependencies"]["services"]) <= set(lines)
    found = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "flwr", "pandas"} & set(found)
    installed = {re.split("[>=<]", line)[0].replace("-", "_") for line in lines}
    assert installed - {"numpy", "uvicorn"} <= set(found)
    pins = text("requirements/services.txt")
    pinned = {re.split("==", line)[0] for line in pins.splitlines() if not line.startswith(" ")}
    assert {name.replace("_", "-") for name in installed} <= pinned
    assert not {"torch", "flwr"} & pinned
    for pin in re.findall(r"^\S.*(?:\\\n.*)+", pins, re.MULTILINE):
        assert "==" in pin
        assert "--hash=sha256:" in pin
        assert all(block in text("requirements/test.txt") for block in re.findall(r"--hash=sha256:\w+", pin)), pin


def test_services_are_built_from_pins_alone_and_run_without_rights_as_a_user_each() -> None:
    image, page = text("deploy/Dockerfile"), text("deploy/compose.yaml")
    assert "FROM ${PYTHON_IMAGE}" in image
    assert not re.search(r"sha256:[0-9a-f]", image)  # a digest that nobody looked up
    assert "--require-hashes -r services.txt" in image
    assert image.splitlines()[-2:] == ["USER 10001", 'ENTRYPOINT ["ntkfl", "serve"]']
    common, services = page.split("\nservices:\n")
    for line in ("read_only: true", "cap_drop: [ALL]", 'security_opt: ["no-new-privileges:true"]'):
        assert f"\n  {line}" in common
    assert re.findall(r"^  (\S+):\n    <<: \*service\n", services, re.MULTILINE) == ["key-server", "shuffler"]
    assert re.findall(r'user: "(\d+)"', services) == ["10001", "10002"]
    for word in ("unconfined", "privileged: true", "cap_add", "read_only: false", "network_mode"):
        assert word not in page
