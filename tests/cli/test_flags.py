"""Flags and settings as the command line spells them: what they are read as, and which there are."""

from __future__ import annotations

import pytest

from ntkfl.cli.flags import from_schemas, nested
from ntkfl.cli.options import parse_setting, parse_steps
from ntkfl.cli.train_flags import FLAGS
from ntkfl.cli.verbs import load
from ntkfl.errors import ConfigError
from ntkfl.federation.config import DataConfig, RunConfig


class TestParsing:
    def test_steps(self) -> None:
        assert parse_steps("paper") == tuple(float(t) for t in range(100, 2001, 100))
        assert parse_steps("100:500:200") == (100, 300, 500)
        assert parse_steps("1.5,2") == (1.5, 2)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("lr=0.5", ("lr", 0.5)),
            ("local-steps=3", ("local_steps", 3)),
            ("choose=validation", ("choose", "validation")),
            ("steps=[1, 2]", ("steps", [1, 2])),
        ],
    )
    def test_settings(self, text: str, expected: tuple[str, object]) -> None:
        assert parse_setting(text) == expected

    def test_bad_setting(self) -> None:
        with pytest.raises(ConfigError):
            parse_setting("=3")


@pytest.mark.parametrize("text", ["0:1e18:1", "0:inf:1", "nan:1:1", "1:2:nan"])
def test_a_range_of_steps_without_end_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--steps"):
        parse_steps(text)


def test_a_value_that_no_parser_survives_is_a_word() -> None:
    assert parse_setting("a=" + "[" * 100_000) == ("a", "[" * 100_000)
    assert parse_setting("a=" + "9" * 5000) == ("a", "9" * 5000)


def test_flags_are_those_of_the_schemas() -> None:
    """What `--help` knows without importing the schemas is what they say: else run `python -m ntkfl.cli.flags`."""
    assert from_schemas() == FLAGS
    settings = {flag.setting for flag in FLAGS}
    assert {f"data.{name}" for name in DataConfig.model_fields} <= settings
    assert {name for name in RunConfig.model_fields if name not in ("data", "model", "method")} <= settings
    assert len({flag.parameter for flag in FLAGS}) == len(FLAGS)
    options = {name for option in load("train").params for name in option.opts}
    assert {f"--{flag.parameter.replace('_', '-')}" for flag in FLAGS} <= options


def test_every_flag_reaches_the_setting_that_it_names() -> None:
    given = dict.fromkeys((flag.parameter for flag in FLAGS), None) | {"alpha": 0.5, "method": "fedavg", "rounds": 3}
    assert nested(FLAGS, given) == {
        "data": {"alpha": 0.5}, "model": {}, "method": {"name": "fedavg"}, "rounds": 3,
    }  # fmt: skip
