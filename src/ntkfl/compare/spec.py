"""A comparison as people write it down: methods, their options and grids, seeds, rounds and targets, in one TOML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from ntkfl.data import NAMES, load
from ntkfl.errors import ConfigError, DataError, unknown
from ntkfl.federation.byzantine import Byzantine
from ntkfl.federation.config import DataConfig, ModelConfig, RunConfig, build_method, load_data, method_class
from ntkfl.methods.base import settle
from ntkfl.methods.robust import Robust
from ntkfl.options import Options, read_from
from ntkfl.privacy.settings import Privacy
from ntkfl.safe_parse import read_toml

ALONE = "each client alone"  # the row that `alone = true` adds


class Search(Options, title="[search]"):
    """Successive halving over the entries' grids, scored on held-out clients and never on the test set."""

    hold_out: int | None = Field(
        None,
        ge=1,
        description="clients set aside to score settings on; default: a tenth, or of few clients five or a quarter",
    )
    rounds: tuple[int, ...] | None = Field(
        None,
        min_length=1,
        description="rounds of each rung; runs continue, not repeat; default: 10 and 30, no more than are reported",
    )
    keep: float = Field(0.25, gt=0, le=1, description="part of the settings that goes on to the next rung")
    keep_at_least: int = Field(1, ge=1, description="settings that go on, where that part of a small grid is fewer")
    seed: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0,), min_length=1, description="of a setting's runs: one, or several whose scores are averaged"
    )


class Entry(Options, title="[[methods]]"):
    """One curve: a method with fixed options, and lists of values to search for others."""

    label: str = Field(min_length=1, description="the curve's name in tables and charts, another for each entry")
    method: dict[str, Any] = Field(
        description='a name such as "fedavg" or "package.module:Class", or a table of name and options'
    )
    grid: dict[str, tuple[int | float, ...]] = Field(
        default_factory=dict,
        description="for each option to search, the numbers to try; all their combinations are",
    )
    privacy: Privacy = Field(Privacy(), description="the table [privacy] of this curve's runs: what clients do to hide")
    robust: Robust | Literal["on"] = Field(
        Robust(), description='the table [robust]: bounds on Byzantine clients, or "on" for all; default: none'
    )
    rounds: int | None = Field(None, ge=1, description="if other than the comparison's")
    clients_per_round: int | None = Field(None, ge=1, description="if other than the comparison's")
    model: ModelConfig | None = Field(None, description="if other than the comparison's")
    stop_at: float | None = Field(None, gt=0, le=1, description="end a run once its test accuracy is this")
    byzantine: Byzantine | None = Field(
        None,
        description="clients that corrupt what they reply in this curve's runs, though not in its search",
    )

    @field_validator("method", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def model_post_init(self, _: object) -> None:
        probe = {name: values[0] for name, values in self.grid.items() if values}
        if len(probe) != len(self.grid):
            raise ConfigError(f"{self.label}: a grid needs at least one value for each option")
        given = self.with_options(probe)  # a wrong name or value is said before anything runs
        method = build_method(given["method"])
        settle(method, given["privacy"], given["robust"])
        if self.byzantine is not None:
            self.byzantine.check(method)

    def with_options(self, options: Mapping[str, float]) -> dict[str, Any]:
        """`method`, `privacy` and `robust` of a run with these searched options, each where it belongs."""
        own, robust = method_class(self.method).model_fields, self.robust
        of_privacy, of_robust = (
            {name: value for name, value in options.items() if name in kind.model_fields and name not in own}
            for kind in (Privacy, Robust)
        )
        of_method = {name: value for name, value in options.items() if name not in of_privacy | of_robust}
        if of_robust:
            robust = Robust(**(Robust() if robust == "on" else robust).model_dump() | of_robust)
        privacy = Privacy(**self.privacy.model_dump(exclude_unset=True) | of_privacy)
        return {"method": self.method | of_method, "privacy": privacy, "robust": robust}


class Comparison(Options, title="a comparison"):
    """The whole file."""

    name: str = Field(
        pattern=r"^[\w.-]+$",
        description="letters, digits, '.', '-' and '_'; runs are kept in runs/NAME",
        json_schema_extra={"default": "the file's name"},
    )
    rounds: int = Field(10, ge=1, description="communication rounds of every run")
    clients_per_round: int = Field(
        20, ge=1, description="clients drawn each round; by default all where fewer are there"
    )
    seeds: tuple[int, ...] = Field(
        (0,), min_length=1, description="each method runs once with each; tables show mean ± standard deviation"
    )
    targets: tuple[float, ...] = Field((0.8, 0.85), description="test accuracies whose rounds and bytes are reported")
    show_rounds: tuple[int, ...] = Field(
        (1, 5, 10, 25, 50), description="rounds whose accuracy the table shows, beside the last"
    )
    figure: tuple[str, ...] | None = Field(None, description="labels of the curves to draw; default: all")
    data: DataConfig = Field(DataConfig(), description="the table [data] of a run: dataset, partition, clients, …")
    model: ModelConfig = Field(ModelConfig(), description="the table [model] of a run: name, hidden, options, …")
    search: Search = Field(Search(), description="how grids are searched")
    alone: bool = Field(False, description="add a row of clients that each train on their own data only, ten at most")
    fallback: DataConfig | None = Field(None, description="data to use where those named cannot be downloaded")
    methods: tuple[Entry, ...] = Field(min_length=1, description="one entry per curve: [[methods]]")

    def model_post_init(self, _: object) -> None:
        labels = [entry.label for entry in self.methods]
        if len(set(labels)) != len(labels):
            raise ConfigError(
                f"two methods have the label {max(labels, key=labels.count)!r}: give each a label of its own"
            )
        for label in self.figure or ():
            if label not in labels:
                raise unknown("label in figure", label, labels)
        if self.alone and ALONE in labels:
            raise ConfigError(f"{ALONE!r} is the label of the row that alone = true adds: choose another")

    @staticmethod
    def read(path: Path) -> Comparison:
        """From a TOML file; its name is the comparison's, unless the file gives one."""
        values = read_toml(path)
        values.setdefault("name", path.stem)
        with read_from(path):
            return Comparison(**values)

    def prepared(self) -> tuple[Comparison, str]:
        """This comparison as it is carried out, and a line where that is on its `fallback`, as its data cannot be
        downloaded. The number of clients that score settings is filled in where some are searched.
        """
        found, note = self, ""
        if self.fallback is not None and self.data.dataset in NAMES:
            try:
                load(self.data.dataset)
            except DataError as error:
                own, other = self.data.dataset, self.fallback.dataset
                note = f"{own} could not be downloaded, so the built-in {other} serve instead.\n{error}"
                found = self.model_copy(update={"data": self.fallback})
        if self.search.hold_out is None and any(entry.grid for entry in self.methods):
            clients = len(load_data(found.run(self.methods[0], self.seeds[0], {})))
            few = max(1, min(5, clients // 4))  # of fewer, classes are missing
            search = self.search.model_copy(update={"hold_out": max(few, round(clients / 10))})
            found = found.model_copy(update={"search": search})
        return found, note

    @property
    def rungs(self) -> tuple[int, ...]:
        """Rounds after which settings are compared: a setting is not to be chosen for rounds that nobody reports."""
        most = max(entry.rounds or self.rounds for entry in self.methods)
        return self.search.rounds or tuple(sorted({min(10, most), min(30, most)}))

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The methods, and where `alone` is asked for, gradient descent on a client's own data: as the comparison's
        `centralized` curve has it, if it has one.
        """
        if not self.alone:
            return self.methods
        pooled = (entry.method for entry in self.methods if entry.method.get("name") == "centralized")
        return *self.methods, Entry(label=ALONE, method=next(pooled, {"name": "centralized"}), clients_per_round=1)

    @property
    def common(self) -> dict[str, Any]:
        """The settings that all runs have unless an entry has its own, as plain values."""
        cohort = self.cohort or f"up to {self.clients_per_round}"
        return {**self.model_dump(mode="json", include={"data", "model"}), "clients_per_round": cohort}

    @property
    def cohort(self) -> int | None:
        """Clients per round, if a number was given: else there are as many as the data have, up to the default."""
        return self.clients_per_round if "clients_per_round" in self.model_fields_set else None

    def run(self, entry: Entry, seed: int, options: Mapping[str, Any], **changes: Any) -> RunConfig:
        """The run of one entry with these searched options."""
        cohort = entry.clients_per_round or self.cohort
        values = {
            "rounds": entry.rounds or self.rounds,
            "seed": seed,
            "stop_at": entry.stop_at,
            "data": self.data,
            "model": entry.model or self.model,
            "byzantine": entry.byzantine,
            **entry.with_options(options),
            **({"clients_per_round": cohort} if cohort else {}),
        }
        return RunConfig(**(values | changes))
