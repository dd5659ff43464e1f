"""What a run asks of its clients: both ends build the method from it alone, so they cannot differ."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

from ntkfl.errors import MessageError, TrustError
from ntkfl.federation.build import build_method
from ntkfl.federation.config import method_code
from ntkfl.methods import Method
from ntkfl.options import Options


class Terms(Options):
    """Travels as one JSON string with every question."""

    method: dict[str, Any]
    rounds: int
    min_clients: int
    precision: str
    inputs: tuple[int, ...]
    outputs: int

    def text(self) -> str:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()

    @staticmethod
    def parse(text: str) -> Terms:
        try:
            values = json.loads(text)
        except ValueError:
            raise MessageError("the run's terms are no JSON") from None
        return Terms(**values)


def build(terms: Terms) -> Method:
    """The method. Code that the terms name is used only where the client's app has imported it: nobody else can make
    a client import any.
    """
    for name in method_code(terms.method):
        if (module := name.partition(":")[0]) not in sys.modules:
            raise TrustError(f"the run's terms name {name!r}: import {module} in the client app, if you trust it")
    return build_method(terms.method)
