"""The files in deploy/: they parse, every command in them exists with its options, and the steps of the containers run
here without a container engine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.images import environment
from tests.deployment.federation import free_port
from tests.docs.test_blocks import parse
from tests.services.processes import Process

yaml = pytest.importorskip("yaml", reason="needs PyYAML")
ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def stages() -> dict[str, dict[str, Any]]:
    """Of the Dockerfile: by name, what it is made from, what it copies, and its ENTRYPOINT and CMD."""
    found: dict[str, dict[str, Any]] = {}
    for line in (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = {"base": base, "copies": []}
        elif word == "COPY":
            found[name]["copies"].append(rest.split())
        elif word in ("ENTRYPOINT", "CMD"):
            found[name][word] = json.loads(rest)
    return found


STAGES = stages()
ROLES = ("key-server", "shuffler", "aggregator", "client")


def strings(value: object) -> list[list[str]]:
    """Every list of words in a document, and every text that is a shell's, as words."""
    if isinstance(value, dict):
        return [words for inner in value.values() for words in strings(inner)]
    if isinstance(value, list):
        if value and all(isinstance(word, str) for word in value):
            return [value, *(shlex.split(word) for word in value if " && " in word)]
        return [words for inner in value for words in strings(inner)]
    return []


def commands(words: list[str]) -> list[list[str]]:
    """The `ntkfl` commands among words: without that word, up to the next part of a shell's line."""
    found = []
    while "ntkfl" in words:
        words = words[words.index("ntkfl") + 1 :]
        end = words.index("&&") if "&&" in words else len(words)
        found.append(words[:end])
    return found


def test_every_command_exists_with_its_options() -> None:
    found = [STAGES[role]["ENTRYPOINT"][1:] + STAGES[role]["CMD"] for role in ROLES]
    for document in (COMPOSE, *KUBERNETES):
        found += [command for words in strings(document) for command in commands(words)]
    for container in containers():
        if "args" in container:
            found.append(container["command"][1:] + container["args"])
    for unit in UNITS:
        (line,) = re.findall(r"^ExecStart=/opt/ntkfl/bin/ntkfl (.*)$", unit.read_text(), re.MULTILINE)
        found.append(line.split())
    assert len(found) > 15
    for command in found:
        parse([*command, "--data", "x"] if command[0] == "join" and "--data" not in command else command)


def test_the_images_copy_what_is_there_and_only_two_have_torch() -> None:
    assert set(ROLES) < set(STAGES)
    for stage in STAGES.values():
        assert stage["base"] in STAGES or stage["base"] == "python:3.12-slim"
        for words in stage["copies"]:
            sources = [word for word in words[:-1] if not word.startswith("--")]
            assert words[0] == "--from=wheel" or all((ROOT / source).exists() for source in sources), words
    assert {role: STAGES[role]["base"] for role in ROLES} == {
        "key-server": "services",
        "shuffler": "services",
        "aggregator": "torch",
        "client": "torch",
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {*project["dependencies"], *project["optional-dependencies"]["services"]}
    wanted = [line for line in (DEPLOY / "services.txt").read_text().splitlines() if line and line[0] != "#"]
    assert set(wanted) <= known
    assert not any(re.match("torch|numpy|matplotlib", line) for line in wanted)


def test_compose_names_images_folders_and_services_that_there_are() -> None:
    services = COMPOSE["services"]
    built = {service["image"]: service["build"]["target"] for service in services.values() if "build" in service}
    assert built == {f"ntkfl-{role}": role for role in ROLES}
    made = {f"./trial/federation/{role}" for role in ("key-server", "shuffler", "aggregator")}
    made |= {f"./trial/federation/clients/{name}" for name in (*(f"client-{i}" for i in range(4)), "evaluator-0")}
    mounted = [volume.split(":") for service in services.values() for volume in service["volumes"]]
    assert {source for source, *rest in mounted if rest[0] == "/federation"} == made
    for name, service in services.items():
        assert service["image"] in built
        assert set(service.get("depends_on", ())) <= set(services)
        for waited in service.get("depends_on", {}):
            assert "healthcheck" in services[waited], f"{name} waits until {waited} is healthy"


def containers() -> list[dict[str, Any]]:
    pods = [document["spec"]["template"]["spec"] for document in KUBERNETES if "template" in document.get("spec", {})]
    return [container for pod in pods for container in pod["containers"]]


def test_kubernetes_probes_ask_what_is_served_and_every_name_is_known() -> None:
    for document in KUBERNETES:
        spec = document["spec"]
        if document["kind"] == "Service":
            (target,) = (d for d in KUBERNETES if d["kind"] == "StatefulSet" and d["metadata"] == document["metadata"])
            labels = target["spec"]["template"]["metadata"]["labels"]
            assert spec["selector"].items() <= labels.items()
            ports = {p["name"] for c in target["spec"]["template"]["spec"]["containers"] for p in c["ports"]}
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        if "template" not in spec:
            continue
        pod = spec["template"]["spec"]
        volumes = {v["name"] for v in pod.get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
        for container in (*pod["initContainers"], *pod["containers"]):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["image"] in {f"ntkfl-{role}" for role in ROLES}
        for container in pod["containers"]:
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            for kind in ("livenessProbe", "readinessProbe"):
                if kind in container:
                    asked = container[kind]["httpGet"]
                    assert asked["port"] in ports
                    assert asked["path"] == ("/health" if kind == "livenessProbe" else "/ready")
                    assert (asked.get("scheme") == "HTTPS") == (asked["port"] != "metrics")
            assert f"0.0.0.0:{ports['metrics']}" in container["args"]
        annotations = spec["template"]["metadata"]["annotations"]
        assert annotations["prometheus.io/port"] == "9464"
    assert [len(containers()), len(KUBERNETES)] == [3, 6]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """With a program that there is in place of /opt/ntkfl/bin/ntkfl; users are looked up on the machine itself."""
    for unit in UNITS:
        text = unit.read_text().replace("/opt/ntkfl/bin/ntkfl", sys.executable).replace("User=ntkfl\n", "User=root\n")
        (tmp_path / unit.name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / unit.name) for unit in UNITS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    own = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "ntkfl" in line]
    assert own == []
    (tmp_path / UNITS[0].name).write_text(text.replace("Restart=on-failure", "Restart=sometimes"))
    broken = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "sometimes" in broken.stderr  # it does look


START = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"  # another Python, as this process


def requirements(stage: str) -> list[str]:
    """Of the two images that others are made from."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (DEPLOY / "services.txt").read_text().splitlines()
    if stage == "services":
        return [line for line in lines if line and line[0] != "#"]
    return [*project["dependencies"], *project["optional-dependencies"]["services"]]


def test_an_environment_has_what_its_image_has_and_no_more(tmp_path: Path) -> None:
    """The fast slice: key server and shuffler load in one without torch and numpy, which are nowhere in it."""
    python = environment(tmp_path / "services", requirements("services"))
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = (
        "import importlib.util as found, ntkfl.services.key_server.app, ntkfl.services.shuffler.app;"
        "print([name for name in ('torch', 'numpy', 'fastapi') if found.find_spec(name)])"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60, env=alone)
    assert (done.stdout, done.stderr) == ("['fastapi']\n", "")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_containers_steps_without_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose's steps, each in a fresh environment with what its image contains: setup, key server and shuffler and
    their health checks, clients, evaluator and aggregator, which trains to the end. Health checks fail when the
    services do not run.
    """
    monkeypatch.delenv("PYTHONPATH", raising=False)
    pythons = {stage: environment(tmp_path / stage, requirements(stage)) for stage in ("services", "torch")}
    trial, (key_port, client_port, aggregator_port) = tmp_path / "trial", (free_port(), free_port(), free_port())
    here = {"/trial": str(trial), "--key-server-host key-server": "", "--shuffler-host shuffler": ""}
    (setup,) = COMPOSE["services"]["setup"]["command"]
    for there, instead in here.items():
        assert there in setup
        setup = setup.replace(there, instead)
    ports = f"--key-server-port {key_port} --shuffler-port {client_port} --aggregator-port {aggregator_port}"
    setup = setup.replace("ntkfl keys init", f"ntkfl keys init {ports}")
    trial.mkdir()
    program = f"{shlex.quote(str(pythons['torch']))} -m ntkfl"
    subprocess.run(
        ["sh", "-c", setup.replace("ntkfl ", f"{program} ")], check=True, timeout=120, stdout=subprocess.DEVNULL
    )
    assert (trial / "data" / "client-3.npz").exists()

    def words(service: str, command: list[str]) -> list[str]:
        """With what compose mounts in the place of where it is mounted, and addresses of this machine."""
        mounts = [volume.split(":")[:2] for volume in COMPOSE["services"][service]["volumes"]]
        changed = [word.replace("0.0.0.0:9464", "127.0.0.1:0").replace("0.0.0.0", "127.0.0.1") for word in command]
        for source, place in mounts:
            own = str(trial / Path(source).relative_to("trial"))
            changed = [re.sub(rf"^{re.escape(place)}(?=/|$)", own, word) for word in changed]
        return changed

    def start(service: str, listeners: int = 0) -> Process:
        role = COMPOSE["services"][service]["image"].removeprefix("ntkfl-")
        own = words(service, [*STAGES[role]["ENTRYPOINT"][1:], *STAGES[role]["CMD"]])
        return Process("-c", START, pythons[STAGES[role]["base"]], "-m", "ntkfl", *own, listeners=listeners)

    def healthy(service: str, port: int) -> bool:
        _, program, *check = COMPOSE["services"][service]["healthcheck"]["test"]
        assert program == "python"
        asked = [re.sub(r"https://[\w-]+:\d+", f"https://127.0.0.1:{port}", word) for word in words(service, check)]
        return subprocess.run([pythons["services"], *asked], capture_output=True, timeout=60).returncode == 0

    with start("key-server", 1) as key_server, start("shuffler", 2) as shuffler, ExitStack() as stack:
        assert healthy("key-server", key_port)
        assert healthy("shuffler", client_port)
        names = [name for name in COMPOSE["services"] if name.startswith(("client-", "evaluator-"))]
        members = [stack.enter_context(start(name)) for name in names]
        aggregator = stack.enter_context(start("aggregator"))
        assert aggregator._process.wait(400) == 0, aggregator.output()
        for member in members:
            assert member._process.wait(60) == 0, member.output()
        assert (trial / "run" / "model.safetensors").exists()
        assert key_server.stop() == shuffler.stop() == 0
        assert json.loads(key_server.err[-1])["event"] == "stopped"  # as JSON, as the images ask for
    assert not healthy("key-server", key_port)
