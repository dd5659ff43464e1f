"""A run that ended in an error: where in its user's code; of a comparison's, also how to run it alone."""

from __future__ import annotations

import os
import shlex
import sysconfig
import traceback
from pathlib import Path

import tomli_w

import ntkfl
from ntkfl.atomic import write_atomically
from ntkfl.errors import NTKFLError
from ntkfl.federation.config import RunConfig
from ntkfl.safe_parse import read_unlinked

_TRACEBACK = "\n\nThe whole traceback:\n\n"
_LIBRARIES = (*(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")), ntkfl.__path__[0])


def note_of(folder: Path) -> Path:
    """Where the error of a run in `folder` is written: beside it, so that the run can begin there anew."""
    return folder.with_name(f"{folder.name}.error.txt")


def error_of(folder: Path) -> str:
    """What is said of a run's error, in a few lines; empty where there was none."""
    try:
        return read_unlinked(note_of(folder)).decode(errors="replace").partition(_TRACEBACK)[0].strip()
    except FileNotFoundError:
        return ""


def write_error(folder: Path, config: RunConfig, device: str | None, error: Exception) -> None:
    """What went wrong, the user's own lines on the way there, and the command that runs this one alone."""
    settings = folder.with_name(f"{folder.name}.toml")
    on = ["--device", device] if device else []
    frames = own_frames(error)
    place = f" ({frames[-1].partition(': ')[0]})" if frames else ""
    lines = [f"{said(error)}{place}", *(f"  {line}" for line in frames)]
    lines.append(f"  to run it alone: {shlex.join(['ntkfl', 'train', '--config', _near(settings), *on])}")
    lines.append(f"  the whole traceback: {_near(note_of(folder))}")
    values = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(settings, tomli_w.dumps(values).encode())
    text = "\n".join(lines) + _TRACEBACK + "".join(traceback.format_exception(error))
    write_atomically(note_of(folder), text.encode())


def own_frames(error: BaseException) -> list[str]:
    """'file, line 12, in answer: source' for each frame outside of installed packages, outermost first.

    An error that has none may have another for its cause: of a network, say, that fails on its inputs.
    """
    at: BaseException | None = error
    found: list[str] = []
    while at is not None and not found:
        for frame in traceback.extract_tb(at.__traceback__):
            file = Path(frame.filename)
            if file.exists() and not _is_library(file):
                found.append(f"{_near(file)}, line {frame.lineno}, in {frame.name}: {frame.line}")
        at = at.__cause__
    return found


def _is_library(file: Path) -> bool:
    return any(file.resolve().is_relative_to(Path(folder).resolve()) for folder in _LIBRARIES)


def said(error: BaseException) -> str:
    """An error of ours says what to do by itself; others go by their type."""
    text = " ".join(str(error).split())
    return text if isinstance(error, NTKFLError) else f"{type(error).__name__}: {text}".removesuffix(": ")


def _near(path: Path) -> str:
    """Relative to the working folder where it lies there."""
    there = path.resolve()
    return os.path.relpath(there) if there.is_relative_to(Path.cwd()) else str(there)
