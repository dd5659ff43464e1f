"""The command line: parse, call, print."""

from __future__ import annotations

import os
import sys

import click
import typer

from ntkfl.cli.verbs import Verbs
from ntkfl.errors import NTKFLError, own_frames, said
from ntkfl.version import __version__

TRACEBACK = "NTKFL_TRACEBACK"  # set: errors in a user's own code are shown with all frames

app = typer.Typer(
    cls=Verbs,
    rich_markup_mode=None,  # plain: a line a verb
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Federated learning by neural tangent kernels. Help on a verb: ntkfl VERB --help.",
)


@app.callback(invoke_without_command=True)
def top(version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True)) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line. An error a user can cause is one line and exit code 2, one that may pass by itself one line
    and 75, Ctrl-C one line and 130; none has a traceback. An error in a user's own code is told with its lines there.
    """
    try:
        sys.exit(app(prog_name="ntkfl", standalone_mode=False) or 0)
    except NTKFLError as error:
        sys.exit(_tell(error, error.exit_code))
    except click.UsageError as error:
        text = error.format_message()
        if "\n" in text:  # no verb was given: this is the help
            typer.echo(text, err=True)
            sys.exit(error.exit_code)
        help = f"; for help: {error.ctx.command_path} --help" if error.ctx else ""
        text = text.replace(". (Did", " (did").rstrip(".")
        sys.exit(_tell(NTKFLError(f"{text[:1].lower()}{text[1:]}{help}"), error.exit_code))
    except click.Abort:  # Ctrl-C, where no verb has more to say of it
        typer.echo("stopped", err=True)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a disk that is full, a file that is not there: nothing a traceback would explain
        where = f"{error.filename}: " if error.filename else ""
        sys.exit(_tell(NTKFLError(f"{where}{error.strerror or error}"), 2))
    except Exception as error:
        if not own_frames(error) or os.environ.get(TRACEBACK):
            raise
        sys.exit(_tell(error, 1, f"for the whole traceback: {TRACEBACK}=1"))


def _tell(error: Exception, code: int, *more: str) -> int:
    """Print the error, the notes on how to mend it, and the user's own lines on the way to it, in red unless its reader
    wants none.
    """
    notes = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
    lines = [f"ntkfl: {said(error)}", *(f"  {line.strip()}" for line in [*notes, *own_frames(error), *more])]
    text = "\n".join(lines)
    typer.echo(text if os.environ.get("NO_COLOR") else typer.style(text, fg=typer.colors.RED), err=True)
    return code
