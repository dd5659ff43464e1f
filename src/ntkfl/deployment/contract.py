"""What the federation trains, and how, as agreed in `federation.toml` before anybody takes part.

A client that pins the terms of the run cannot be talked into weaker ones: announcements carry weights, never options.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import tomli_w
import torch
from pydantic import Field, field_validator
from torch import nn

from ntkfl.atomic import write_atomically
from ntkfl.data.folders import Images
from ntkfl.errors import ConfigError
from ntkfl.federation.build import build_method, build_network, describe_method
from ntkfl.federation.config import ModelConfig, method_code, own_method
from ntkfl.methods import Method
from ntkfl.options import Options
from ntkfl.safe_parse import read_toml
from ntkfl.services.shuffler.batch import LEAST_EVALUATORS
from ntkfl.services.trusted_peers import FILE, TrustedPeers
from ntkfl.user_code import refuse_code


class Terms(Options):
    """What is trained, and how: all that decides what a client gives away."""

    inputs: tuple[int, ...] = Field(min_length=1, description="shape of one input, before any projection")
    outputs: int = Field(ge=1)
    real_targets: bool = Field(False, description="regression: targets are `outputs` real numbers, not a class")
    mean: tuple[float, ...] = Field((), description="of byte images, a number a channel: x = (bytes/255 - mean)/std")
    std: tuple[float, ...] = Field((), description="of byte images, a number a channel, above 0")
    class_names: tuple[str, ...] = Field((), description="in order, where folders of pictures are called by name")
    feature_names: tuple[str, ...] | None = Field(
        None, description="columns of every client's table, in order; without them tables go by position"
    )
    precision: str = Field("float32", pattern="^float(32|64)$")
    model: ModelConfig = ModelConfig()
    method: dict[str, Any] = Field(default_factory=lambda: {"name": "cp-ntk-fl"})

    @field_validator("method")
    @classmethod
    def _spell_out(cls, method: dict[str, Any]) -> dict[str, Any]:
        """Every option with its value: defaults are not part of an agreement.

        Of a user's own method this waits for `spelled_out`: reading terms runs nobody's code.
        """
        return method if own_method(method) else _agreed(build_method(method))

    @property
    def images(self) -> Images:
        """How a client's data become inputs."""
        return Images(self.inputs, self.mean, self.std, self.class_names, self.feature_names or ())

    def spelled_out(self, *, allow_code: bool = False) -> Self:
        """With every option of a user's own method too, which imports it."""
        self.check_code(allow_code)
        return self.model_copy(update={"method": _agreed(build_method(self.method))})

    def build_method(self, *, allow_code: bool = False) -> Method:
        self.check_code(allow_code)
        method = build_method(self.method)
        missing = sorted(_agreed(method).keys() - self.method.keys())
        if missing:  # the defaults of one machine's class are not those of another's
            raise ConfigError(f"the terms of {method.name} leave options to its code: give {', '.join(missing)}")
        return method

    def check_code(self, allowed: bool) -> None:
        """Terms come in folders that others made: code that they name is run where that is allowed, nowhere else."""
        if not allowed:
            refuse_code([*self.model.code, *method_code(self.method)], "the run's terms")

    def build_model(self, seed: int, *, allow_code: bool = False) -> nn.Module:
        """The network, for inputs as it gets them; first weights drawn from `seed`."""
        method = self.build_method(allow_code=allow_code)
        shape = method.model_input_shape(self.inputs)
        model = build_network(self.model.suited(method), shape, self.outputs, seed)
        return model.to(getattr(torch, self.precision))


class Contract(Terms):
    """Terms of a run behind a shuffler: also how often a client is asked, for how many rows, among how many others."""

    rounds: int = Field(10, ge=1)
    retries: int = Field(10, ge=0, description="rounds of the whole run that may fail; each uses up a round number")
    clients_per_round: int = Field(ge=2, description="clients asked in a round, exactly")
    max_rows: int = Field(200, ge=1, description="rows of samples that every client sends, padding among them")
    sum_counts: bool = Field(
        False,
        description="counts of evaluators, and of a shuffled round's clients, as a secure sum; by default where "
        "replies are summed and there are several evaluators",
    )
    count_multiple: int = Field(1, ge=1, description="evaluators round their counts to multiples of it")

    @staticmethod
    def of(values: Mapping[str, Any]) -> Contract:
        """The contract in a run.toml."""
        values = with_sums(values)
        return Contract(**{name: values[name] for name in Contract.model_fields if name in values})

    def check_evaluators(self, evaluators: int) -> None:
        """`ConfigError` where counts are summed, and there is one evaluator."""
        if self.sum_counts and 0 < evaluators < LEAST_EVALUATORS:
            raise ConfigError(
                f"a sum of counts needs {LEAST_EVALUATORS} evaluators, and there is {evaluators}: set sum_counts = "
                "false, and the aggregator sees its counts"
            )

    @property
    def most_rounds(self) -> int:
        """Round numbers that clients answer under, failed rounds included."""
        return self.rounds + self.retries


def with_sums(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a run.toml says, and of `sum_counts`, where it says nothing: a sum hides each of several evaluators."""
    method, evaluators = values.get("method"), values.get("evaluators")
    summed = isinstance(method, Mapping) and method.get("secure_sum") is True
    return {"sum_counts": summed and isinstance(evaluators, int) and evaluators > 1} | dict(values)


def _agreed(method: Method) -> dict[str, Any]:
    """Name and options of a method that runs on several machines, as sites and aggregator pin them.

    No private one: nobody compares the aggregator's terms with the sites', so that it would report an ε that their
    noise is not for; and where a method has no `budget_rounds`, no site counts how often it answers.
    """
    if method.adds_noise:
        raise ConfigError(
            f"{method.name} with differential privacy is refused between machines: sites' terms are not checked "
            "against the aggregator's, so no ε would hold; simulate it with `ntkfl train`, or take a method without "
            "noise"
        )
    return {name: value for name, value in describe_method(method).items() if value is not None}


class Deployment(Contract):
    """run.toml: the contract, and what only the aggregator decides."""

    clients: int = Field(ge=2, description="clients to wait for before the first round")
    evaluators: int = Field(0, ge=0, description="evaluators to wait for; without any, each round's clients count")
    seed: int = Field(0, ge=0, description="of the first weights and the choice of clients")
    quorum: int = Field(1, ge=1, description="good rows, or clients of a secure sum, below which a round is not built")
    round_seconds: float = Field(120, ge=1, description="until an exchange goes on without those who have not answered")
    patience: float = Field(600, gt=0, description="seconds to wait for enough clients before a round has failed")
    attempts: int = Field(3, ge=1, description="times in a row that a round may fail before the run stops")

    @staticmethod
    def read(path: Path) -> Deployment:
        """From run.toml."""
        return Deployment(**with_sums(read_toml(path)))


class Federation(TrustedPeers):
    """The whole file."""

    terms: Contract

    def write(self, folder: Path) -> None:
        path = folder / FILE
        try:
            write_atomically(path, tomli_w.dumps(self.model_dump(mode="json", exclude_none=True)).encode())
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
