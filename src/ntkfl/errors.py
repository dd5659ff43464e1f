"""Errors a user or a peer can cause. Each message is one line: what was wrong, what was expected, what to do."""

from __future__ import annotations

import difflib
import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

_PATHS = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
_LIBRARIES = [Path(path).resolve() for path in (f"{__file__}/..", *(sysconfig.get_path(name) for name in _PATHS))]


class NTKFLError(Exception):
    """Base of every error this package raises on purpose; the command line prints it and exits with `exit_code`."""

    exit_code = 2


class ConfigError(NTKFLError):
    """An option, a configuration file or an argument that cannot work."""


class DataError(NTKFLError):
    """Data that is missing, broken or of the wrong kind."""


class ModelError(NTKFLError):
    """A model that does not do what is asked of it."""


class NumericalError(NTKFLError):
    """A computation that diverged or met a value that is not finite."""


class MessageError(NTKFLError):
    """Bytes from a peer that are no valid message."""


class NotFinite(MessageError):
    """A message with values that are not finite."""


class RunFolderError(NTKFLError):
    """A run folder or checkpoint that cannot be used."""


class TrustError(NTKFLError):
    """A key, seal, signature or credential that does not hold."""


class TooFew(NTKFLError):
    """An exchange that ended without enough clients or good rows."""

    exit_code = 75  # EX_TEMPFAIL: the same command may succeed later


class Diverged(TooFew):
    """An exchange in which no client's reply was finite."""


class Refused(NTKFLError):
    """What a role will not do: `reason` is one word for programs. Its HTTP status is known to `services/http` alone."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        if reason in ("unreachable", "busy", "storage"):
            self.exit_code = TooFew.exit_code


def unknown(kind: str, name: object, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not one of `known`: with the nearest of them, or all where none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"valid are {', '.join(names)}"
    return ConfigError(f"unknown {kind} {name!r}: {hint}")


def own_frames(error: BaseException) -> list[str]:
    """'file, line 12, in answer: source' for each frame outside of installed packages and of `ntkfl_…`, which add verbs
    to this one, outermost first.

    An error that has none may have another for its cause: of a network, say, that fails on its inputs.
    """
    at: BaseException | None = error
    found: list[str] = []
    while at is not None and not found:
        frames = traceback.extract_tb(at.__traceback__)
        for frame, (running, _) in zip(frames, traceback.walk_tb(at.__traceback__), strict=True):
            file, module = Path(frame.filename), str(running.f_globals.get("__name__"))
            installed = any(file.resolve().is_relative_to(library) for library in _LIBRARIES)
            if file.exists() and not installed and not module.startswith("ntkfl_"):
                found.append(f"{near(file)}, line {frame.lineno}, in {frame.name}: {frame.line}")
        at = at.__cause__
    return found


def said(error: BaseException) -> str:
    """An error of ours says what to do by itself; others go by their type."""
    text = " ".join(str(error).split())
    return text if isinstance(error, NTKFLError) else f"{type(error).__name__}: {text}".removesuffix(": ")


def near(path: Path) -> str:
    """Relative to the working folder where it lies there."""
    there = path.resolve()
    return os.path.relpath(there) if there.is_relative_to(Path.cwd()) else str(there)
