"""The command line as a newcomer meets it: help, completion, terminals and logs."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest

from ntkfl.cli import verbs
from ntkfl.data import NAMES
from ntkfl.data.partitions import PARTITIONS
from ntkfl.federation.config import DEFAULT_METHOD
from ntkfl.methods import METHODS
from ntkfl.models import MODELS

ROOM = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}


def test_help_is_quick_and_lists_every_verb() -> None:
    program = "import sys; from ntkfl.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    for arguments in (["--help"], ["train", "--help"], ["report", "-h"], ["--version"]):
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ROOM}, timeout=60)
        assert done.returncode == 0, done.stderr
        if arguments == ["--help"]:
            lines = done.stdout.partition("Commands:\n")[2].splitlines()
            assert {line.split()[0] for line in lines} == {*verbs.listed()}  # a line each
        assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_names_known_without_torch_are_the_names_there_are() -> None:
    assert set(verbs.METHODS) == set(METHODS)
    assert verbs.METHODS[0] == DEFAULT_METHOD
    assert tuple(NAMES) == verbs.DATASETS
    assert set(verbs.PARTITIONS) == set(PARTITIONS)
    assert set(verbs.MODELS) == set(MODELS)


@pytest.mark.parametrize("name", verbs.VERBS)
def test_every_verb_has_an_example_that_parses(name: str) -> None:
    command = verbs.load(name)
    text = command.help or ""
    assert text.startswith(verbs.VERBS[name][0].split(",")[0].rstrip(".")[:18])
    words = text.split("Example: ntkfl ")[1].split("\n")[0].split()
    assert words[0] == name
    with click.Context(command) as context:
        command.parse_args(context, words[1:])
    for one in command.commands.values() if isinstance(command, click.Group) else [command]:
        assert one.help, f"{name} {one.name}"
        for parameter in one.params:  # everything that can be given is explained, in a sentence
            text = str(getattr(parameter, "help", None) or "")
            assert text, f"{name} {one.name}: {parameter.name}"
            assert name == "audit" or text.endswith("."), f"{name} {one.name}: {parameter.name}"
