"""`--set NAME=VALUE`: what values are read as, and where they go."""

from __future__ import annotations

from typing import Any

import pytest

from ntkfl.cli.settings import assign, parse_setting
from ntkfl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr=0.5", (["lr"], 0.5)),
        ("local-steps=3", (["local_steps"], 3)),
        ("kernel=trace", (["kernel"], "trace")),
        ("steps=[1, 2]", (["steps"], [1, 2])),
        ("data.standardize=true", (["data", "standardize"], True)),
        ("byzantine={kind='sign-flip', scale=5}", (["byzantine"], {"kind": "sign-flip", "scale": 5})),
        ("lr=1\nseed = 2", (["lr"], "1\nseed = 2")),  # no second setting
        ("a=" + "[" * 100_000, (["a"], "[" * 100_000)),
        ("a=" + "9" * 5000, (["a"], "9" * 5000)),
    ],
)
def test_a_value_is_toml_or_else_a_word(text: str, expected: tuple[list[str], object]) -> None:
    assert parse_setting(text) == expected


@pytest.mark.parametrize("text", ["=3", ".lr=3", "data.=3"])
def test_what_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="has no value: write NAME=VALUE"):
        parse_setting(text)


def test_a_name_alone_finds_its_table() -> None:
    settings: dict[str, Any] = {"method": {"name": "fedavg", "lr": 0.3}}
    assign(settings, ["lr=0.1", "stop_at=0.9", "standardize=true", "hidden=[64]", "model.options.width=32"])
    assert settings == {
        "method": {"name": "fedavg", "lr": 0.1}, "stop_at": 0.9, "data": {"standardize": True},
        "model": {"hidden": [64], "options": {"width": 32}},
    }  # fmt: skip
