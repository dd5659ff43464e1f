"""The files in deploy/: they parse, every command in them exists with its options, and the steps of the containers run
here without a container engine.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_blocks import parse

yaml = pytest.importorskip("yaml", reason="needs PyYAML")
ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


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
    found += [command for words in strings(COMPOSE) for command in commands(words)]
    assert len(found) > 5
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
