"""JSON and TOML out of files that anybody may have changed: what is read can be used and written again."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

from ntkfl.errors import ConfigError

# Each part of a dotted key costs a TOML parser a copy of all before it: forty kilobytes of dots fill a gigabyte.
_DEEP_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){64}""")


def parse_json(text: str) -> Any:
    """JSON as this package writes it; `ValueError` for all else: NaN, numbers beyond a float, nesting without end, half
    characters.
    """
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if "\\u" in text:  # the only way to half a character
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """A TOML document; `ValueError` for anything that is none, or is nested without end."""
    if _DEEP_KEY.search(text):
        raise ValueError("a key in it has more than 64 parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def open_unlinked(path: Path) -> BinaryIO:
    """A file to read; `OSError` where it is a symbolic link, or no regular file.

    A run's folder may be somebody else's: a link in it must not bring a file of this machine into a report, nor a pipe
    halt whoever looks.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a symbolic link, which is not followed", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return os.fdopen(handle, "rb")


def read_unlinked(path: Path) -> bytes:
    """A file's content; see `open_unlinked` for what is refused."""
    with open_unlinked(path) as file:
        return file.read()


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's values, or one line on why not."""
    try:
        return parse_toml(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not finite")
    return value
