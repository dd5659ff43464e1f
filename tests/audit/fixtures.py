"""Small rounds on the built-in digits for the audit's tests."""

from __future__ import annotations

from typing import Any

from ntkfl.federation.config import RunConfig


def config(method: dict[str, Any], **more: Any) -> RunConfig:
    """Six clients of digits, three a round, a network of 16 hidden units."""
    data = {"dataset": "digits", "clients": 6, "partition": "iid"}
    given = {"data": data, "model": {"hidden": (16,)}, "clients_per_round": 3, "rounds": 2} | more
    steps = {"steps": (50.0, 200.0)} if method["name"] in ("ntk-fl", "cp-ntk-fl") else {}
    return RunConfig(method=steps | method, **given)
