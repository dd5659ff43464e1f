"""Options: what the word none means, and that what is written reads back as the same."""

from __future__ import annotations

import pytest

from ntkfl.errors import ConfigError
from ntkfl.federation.config import ModelConfig, RunConfig
from ntkfl.options import Options, written


class Kinds(Options):
    number: float | None = 2.0
    numbers: tuple[int, ...] | None = None
    flag: bool | None = True
    text: str | None = "a"
    needed: float = 1.0


def test_none_is_a_word_for_options_that_may_be_none_and_are_no_text() -> None:
    kinds = Kinds(number="none", numbers="none", flag="none", text="none")
    assert (kinds.number, kinds.numbers, kinds.flag, kinds.text) == (None, None, None, "none")
    assert RunConfig(model={"name": "mlp", "gain": "none"}).model == ModelConfig(name="mlp")  # inside another too
    for given in ("none", None):
        with pytest.raises(ConfigError, match="option 'needed' must be a number, not"):
            Kinds(needed=given)


def test_none_is_written_where_it_is_not_the_default() -> None:
    kinds = Kinds(number=None, flag=None)
    assert written(kinds) == {"number": "none", "numbers": None, "flag": "none", "text": "a", "needed": 1.0}
    assert Kinds(**{name: value for name, value in written(kinds).items() if value is not None}) == kinds
