"""A user's own code, named in settings as `package.module:name`, and the refusal to run code that others name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from ntkfl.errors import ConfigError, TrustError

GIVEN = "python:"  # how settings record what was given as an object: a name for people, not to import


def is_code(name: object) -> TypeGuard[str]:
    """Whether a setting names code to import."""
    return isinstance(name, str) and ":" in name and not name.startswith(GIVEN)


def find_factory(name: str) -> Callable[..., Any]:
    """A user's `package.module:factory`; the working directory counts as a place to find packages."""
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, ValueError, TypeError) as error:  # the latter of names such as ':x' and '.x:y'
        raise ConfigError(
            f"cannot import {module_name!r} for {name!r}, from this folder or what is installed: {error}"
        ) from None
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{module_name!r} has no function {attribute!r}, nor a class")
    return found  # type: ignore[no-any-return]  # whatever it is, it can be called


def source_digest(name: str) -> str:
    """SHA-256 of the file that holds `package.module:factory`; empty where there is none to read.

    What that file imports is not seen.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        spec = importlib.util.find_spec(name.partition(":")[0])
        return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest() if spec and spec.origin else ""
    except (ImportError, ValueError, OSError):  # said where the code is used
        return ""


def refuse_code(named: Sequence[str], source: str) -> None:
    """`TrustError` if `source`, a file that may be somebody else's, names code: building from it would run that."""
    if named:
        raise TrustError(
            f"{source} names code that would be imported and run here: {', '.join(named)}; "
            "if you trust whoever wrote it, allow it with --allow-code (in Python: allow_code=True)"
        )
