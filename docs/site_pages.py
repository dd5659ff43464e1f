"""Pages of the documentation site that are written elsewhere: the README, results, examples and the commands' help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from site_options import method_options, run_settings

from ntkfl.methods import METHODS

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    for path in sorted((ROOT / "results").rglob("*")):
        if path.suffix in (".png", ".svg", ".json", ".md"):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, content=path.read_bytes()))
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.is_file() and path.suffix in (".py", ".md"):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), content=path.read_bytes()))
    made = {"commands.md": commands(), "options.md": method_options(), "settings.md": run_settings()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the repository, to where the same pages are on the site; classes lead to their options."""
    if page.file.src_uri.startswith("examples/"):
        return markdown.replace("](../docs/", "](../")
    linked = re.sub(r"(\]\(|src=\")(?:docs/|\.\./)", r"\1", markdown)
    for name, method in METHODS.items():
        directive = f"::: ntkfl.methods.{method.__name__}\n"
        linked = linked.replace(
            directive,
            f"{directive}    options: {{ members: false }}\n\n[Every option of `{name}`](options.md#{name})\n",
        )
    return linked


def commands() -> str:
    """Every verb's help, as the command line prints it."""
    import click

    from ntkfl.cli.verbs import listed, load

    parts = ["# Commands\n\nEvery verb, as `ntkfl VERB --help` says it.\n"]
    for name in listed():
        command = load(name)
        parts.append(f"\n## ntkfl {name}\n\n{_help(command)}\n")
        if isinstance(command, click.Group):
            for inner, sub in command.commands.items():
                parts.append(f"\n### ntkfl {name} {inner}\n\n{_help(sub)}\n{_options(sub)}")
        else:
            parts.append(_options(command))
    return "".join(parts)


def _help(command: Any) -> str:
    text = (command.help or "").strip()
    return re.sub(r"Example: (.+)", r"```\n\1\n```", re.sub(r"\n\s+", "\n", text))


def _options(command: Any) -> str:
    rows = []
    for parameter in command.params:
        names = (
            ", ".join(f"`{n}`" for n in parameter.opts)
            if parameter.param_type_name == "option"
            else f"`{parameter.human_readable_name}`"
        )
        rows.append(f"| {names} | {(getattr(parameter, 'help', '') or '').replace('|', chr(92) + '|')} |\n")
    return "\n| option | what |\n| --- | --- |\n" + "".join(rows)
