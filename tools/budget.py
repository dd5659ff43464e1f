"""What the project measures, against the most that `budget.toml` allows. Budgets only go down.

    python tools/budget.py           fails where something is over its budget, and says what
    python tools/budget.py --table   everything there is, as a table in Markdown
    python tools/budget.py --set     makes what is reached the budget, here and in CONTRIBUTING.md; raises none

Tokens are those of Python's own tokenizer without comments, docstrings, line ends and indentation.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, BUDGET, SHOWN = ROOT / "src" / "ntkfl", ROOT / "budget.toml", ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- tools/budget.py --set writes this -->\n", "\n<!-- until here -->"
SPACING = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
EXPLAINED = "percent docstrings and comments"  # the one number that may not fall
Measures = dict[str, dict[str, int]]  # where → what → how much


def docstring_lines(text: str) -> set[int]:
    """Numbers of the lines that docstrings take."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            found.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return found


def code_tokens(text: str) -> int:
    docstrings, tokens = docstring_lines(text), tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in SPACING and token.start[0] not in docstrings for token in tokens)


def explaining_lines(text: str) -> int:
    return len(docstring_lines(text)) + sum(line.lstrip().startswith("#") for line in text.splitlines())


def lines(paths: list[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def words(paths: list[Path]) -> int:
    return sum(len(path.read_text().split()) for path in paths)


def size(paths: list[Path]) -> dict[str, int]:
    return {"lines": lines(paths), "tokens": sum(code_tokens(p.read_text()) for p in paths), "files": len(paths)}


def interface() -> dict[str, int]:
    """What people meet: verbs and flags, options of methods, and what Method shows to an author of one."""
    import click
    import typer

    sys.path.insert(0, str(PACKAGE.parent))  # this tree, whatever is installed
    from ntkfl.cli import app
    from ntkfl.methods import METHODS, Method

    command = typer.main.get_command(app)
    assert isinstance(command, click.Group)
    verbs = command.list_commands(click.Context(command))
    train = command.resolve_command(click.Context(command), ["train"])[1]
    assert train is not None
    shown: set[str] = set()
    for kind in Method.__mro__:
        if kind.__module__.startswith("ntkfl."):
            names = vars(kind).keys() | getattr(kind, "__annotations__", {}).keys()
            shown |= {name for name in names if not name.startswith(("_", "model_"))}
    return {
        "verbs": len(verbs),
        "flags of train": sum(isinstance(parameter, click.Option) for parameter in train.params),
        "options of one method": max(len(method.model_fields) for method in METHODS.values()),
        "options of all methods": len({name for method in METHODS.values() for name in method.model_fields}),
        "public names of Method": len(shown - Method.model_fields.keys()),
    }


def measured() -> Measures:
    """Lines, tokens and files of the package, of each room in it and of the files beside the rooms; then the rest."""
    everything, docs = sorted(PACKAGE.rglob("*.py")), sorted((ROOT / "docs").rglob("*.md"))
    explained = sum(explaining_lines(path.read_text()) for path in everything)
    found = {"src/ntkfl": size(everything) | {EXPLAINED: round(100 * explained / lines(everything))}}
    for folder in sorted(path.parent for path in PACKAGE.glob("*/__init__.py")):
        found[folder.name] = size(sorted(folder.rglob("*.py")))
    found["beside the rooms"] = size(sorted(PACKAGE.glob("*.py")))
    found["tests"] = {"lines": lines(sorted((ROOT / "tests").rglob("*.py")))}
    found["experiments"] = {"lines": lines(sorted((ROOT / "experiments").rglob("*.py")))}
    found["README"], found["docs"] = {"words": words([ROOT / "README.md"])}, {"words": words(docs), "pages": len(docs)}
    return found | {"what people meet": interface()}


def exceeded(found: Measures, budget: Measures) -> Iterator[str]:
    """A line on each number beyond its budget. A room without a budget may hold nothing."""
    for where, numbers in found.items():
        for what, number in numbers.items():
            limit = budget.get(where, {}).get(what, 0)
            if number < limit if what == EXPLAINED else number > limit:
                yield f"| {where} | {what} | {number:,} | {limit:,} |"


def table(found: Measures) -> str:
    rows = [f"| {where} | {', '.join(f'{n:,} {what}' for what, n in kept.items())} |" for where, kept in found.items()]
    return "\n".join(["| where | at most |", "| --- | --- |", *rows])


def written(found: Measures) -> str:
    items = {where: ", ".join(f'"{what}" = {n}' for what, n in kept.items()) for where, kept in found.items()}
    return "".join(f'"{where}" = {{ {text} }}\n' for where, text in items.items())


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--table"], ["--set"]):
        print(__doc__, file=sys.stderr)
        return 2
    found = measured()
    if arguments == ["--table"]:
        print(table(found))
        return 0
    beyond = [*exceeded(found, tomllib.loads(BUDGET.read_text()))]
    if beyond:
        print("over the budget:\n| where | what | now | budget |\n| --- | --- | ---: | ---: |", *beyond, sep="\n")
        return 1
    if arguments == ["--set"]:
        BUDGET.write_text(written(found))
        before, rest = SHOWN.read_text().split(BEGIN)
        SHOWN.write_text(before + BEGIN + table(found) + END + rest.split(END, 1)[1])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
