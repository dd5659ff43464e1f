"""Options: what the word none means, and that what is written reads back as the same."""

from __future__ import annotations

import inspect
import pydoc

import pytest
from pydantic import Field

from ntkfl.errors import ConfigError
from ntkfl.federation.config import ModelConfig, RunConfig
from ntkfl.methods import FedAvg
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


class Mine(FedAvg):
    lr: float = Field(0.3, gt=0)
    depth: int


def test_help_shows_the_options_with_their_defaults() -> None:
    """Also of a class whose schema is not built yet, and the same once it is."""
    before = inspect.signature(Mine)
    assert list(before.parameters) == list(Mine.model_fields)
    assert str(before.parameters["lr"]) == "lr: float = 0.3"
    assert str(before.parameters["depth"]) == "depth: int"
    Mine(depth=2)
    assert inspect.signature(Mine) == before
    assert "batch_size: int = 200" in pydoc.render_doc(FedAvg)
    assert inspect.signature(RunConfig).parameters["method"].default == RunConfig().method
