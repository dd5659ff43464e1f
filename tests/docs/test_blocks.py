"""Every code block of the documentation: Python runs, commands parse, TOML and JSON are what they claim."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from ntkfl.cli import verbs
from ntkfl.compare.spec import Comparison
from ntkfl.federation.config import RunConfig
from ntkfl.federation.policy import Policy

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Blocks that other tests run, with the data or files they need.
ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "start.md": "tests/docs/test_start.py",
}


class Block(NamedTuple):
    page: str
    language: str
    text: str


BLOCKS = [
    Block(page.name, language, text)
    for page in PAGES
    for language, text in re.findall(r"^```([\w-]*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
]


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert {b.language for b in BLOCKS} <= {"python", "console", "toml", "json", "mermaid", "text", "diff", ""}
    for block in BLOCKS:
        if block.language == "text":  # drawings alone: commands are tested
            assert "►" in block.text, block.text[:80]
        elif block.language == "":  # commands, or a drawing
            first = block.text.split()[0]
            assert first in ("make", "ntkfl", ".", "pip", "cd") or {"►", "─"} & {*block.text}, block.text[:80]


def commands(text: str) -> list[list[str]]:
    """The words of every `ntkfl` command in a block of shell, without what surrounds it."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words.count("ntkfl"):
            words = words[words.index("ntkfl") + 1 :]
            end = next((i for i, w in enumerate(words) if w in ("&", ";", "&&", "||", "|", ">")), len(words))
            found.append(words[:end])
    return found


def parse(words: list[str]) -> None:
    """As the command line would, up to the point where it would begin."""
    command: click.Command = verbs.load(words[0])
    rest = words[1:]
    if isinstance(command, click.Group):
        if not rest or rest[0].startswith("-"):
            return
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(words[0], list(rest))


SHELL = [(b.page, words) for b in BLOCKS if b.language in ("console", "") for words in commands(b.text)]
INLINE = [
    (page.name, shlex.split(text))
    for page in PAGES
    for text in re.findall(r"`ntkfl ([a-z][^`]*)`", page.read_text())
    if not re.search(r"\||…|[A-Z]{3}", text)
]


@pytest.mark.parametrize(("page", "words"), SHELL, ids=lambda v: v if isinstance(v, str) else " ".join(v))
def test_commands_parse(page: str, words: list[str]) -> None:
    parse(words)


def test_commands_in_the_text_exist() -> None:
    assert len(INLINE) > 10
    for page, words in INLINE:
        assert words[0] in verbs.listed(), f"{page}: ntkfl {' '.join(words)}"
        command = verbs.load(words[0])
        if isinstance(command, click.Group) and len(words) > 1:
            command = command.commands[words[1]]
        known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
        assert {w.split("=")[0] for w in words if w.startswith("--")} <= known, f"{page}: ntkfl {' '.join(words)}"


def test_toml_is_a_configuration() -> None:
    for block in BLOCKS:
        if block.language == "toml":
            values = tomllib.loads(block.text)
            if block.page == "sites.md":
                Policy(**values)
            elif "methods" in values:
                Comparison(name="documented", **values)
            else:
                RunConfig(**values)
        if block.language == "json":
            json.loads(block.text)


@pytest.mark.parametrize("page", sorted({b.page for b in BLOCKS if b.language == "python"} - {"deploy.md"}))
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's blocks one after the other, as a reader would type them."""
    if page in ELSEWHERE:
        assert page in (ROOT / ELSEWHERE[page]).read_text() or page == "README.md"
        return
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in BLOCKS:
        if block.page == page and block.language == "python":
            exec(compile(block.text, page, "exec"), names)
            if page == "data.md" and "print(run.history" in block.text:
                assert names["run"].history[-1]["test_accuracy"] > 0.7  # type: ignore[attr-defined]
    if page == "compare.md":
        assert (tmp_path / "report.html").exists()
