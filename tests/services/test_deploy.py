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
    assert installed - {"numpy", "uvicorn"} <= set(found) | {"uvicorn"}
    pins = text("requirements/services.txt")
    pinned = {re.split("==", line)[0] for line in pins.splitlines() if not line.startswith(" ")}
    assert {name.replace("_", "-") for name in installed} <= pinned
    assert not {"torch", "flwr"} & pinned
    for pin in re.findall(r"^\S.*(?:\\\n.*)+", pins, re.MULTILINE):
        assert "==" in pin
        assert "--hash=sha256:" in pin
        assert all(block in text("requirements/test.txt") for block in re.findall(r"--hash=sha256:\w+", pin)), pin


def test_the_image_is_built_from_pins_alone_and_runs_as_nobody() -> None:
    lines = text("deploy/Dockerfile").splitlines()
    commands = [line for line in lines if not line.startswith("#")]
    assert [line for line in commands if line.startswith(("ARG", "FROM"))] == [
        "ARG PYTHON_IMAGE",  # no default: who builds names the digest
        "FROM ${PYTHON_IMAGE}",
    ]
    assert not re.search(r"sha256:[0-9a-f]", "\n".join(lines))  # a digest that nobody looked up
    assert any("imagetools inspect" in line for line in lines)
    installs = [line for line in commands if "pip install" in line]
    assert "--require-hashes -r services.txt" in installs[0]
    assert all("--no-deps" in line for line in installs)
    assert "--no-build-isolation" in installs[1]
    assert commands[-2:] == ["USER 10001", 'ENTRYPOINT ["ntkfl", "serve"]']


def test_both_services_run_without_rights_as_a_user_each() -> None:
    page = text("deploy/compose.yaml")
    common, services = page.split("\nservices:\n")
    for line in ("read_only: true", "cap_drop: [ALL]", 'security_opt: ["no-new-privileges:true"]'):
        assert f"\n  {line}" in common
    assert "default seccomp profile" in common
    assert 'PYTHON_IMAGE: "${PYTHON_IMAGE:?' in common
    roles = re.findall(r"^  (\S+):\n((?:    .*\n)+)", services, re.MULTILINE)
    assert [name for name, _ in roles] == ["key-server", "shuffler"]
    assert all("<<: *service" in role for _, role in roles)
    users = [re.findall(r'user: "(\d+)"', role) for _, role in roles]
    assert users == [["10001"], ["10002"]]
    for word in ("unconfined", "privileged: true", "cap_add", "read_only: false", "network_mode"):
        assert word not in page
