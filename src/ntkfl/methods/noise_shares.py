"""Sums of integers to which each client adds its share of discrete Gaussian noise: what methods of such sums share.

ε counts on the noise of `noise_clients` clients in each round. With `secure_sum` the server sees the total alone. What
happens to it from there on is post-processing of noisy numbers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from ntkfl.errors import ConfigError, MessageError, TooFew
from ntkfl.methods.additive import Addend, Summand
from ntkfl.methods.base import Method, Task
from ntkfl.privacy.sum_accounting import Release
from ntkfl.wire import Message

LARGEST = 2.0**30  # of a client's numbers: with noise they still fit into 32 bits
_TAILS = 10.0  # standard deviations of a client's noise that fit below a sum's limit


class NoiseShares(Method):
    """Σ_m (integers_m + noise_m), of ε and δ."""

    shows: ClassVar[str] = "sums"
    additive: ClassVar[bool] = True
    vector: ClassVar[str] = ""  # the array that `sum_limit` is of; all others grow with samples alone

    epsilon: float | None = Field(3.0, gt=0, description="ε; none: no noise, no privacy")
    delta: float = Field(1e-5, gt=0, lt=1, description="δ")
    noise_clients: int = Field(
        1, ge=1, description="clients of each round whose noise ε counts on; rounds of fewer fail"
    )

    @property
    def adds_noise(self) -> bool:
        return True

    def add_up(self, task: Task, replies: list[Message]) -> dict[str, Tensor]:
        """The replies' sum by name: float64 on the CPU. Each reply is let go once it is added."""
        if not self.secure_sum and len(replies) < self.noise_clients:
            raise TooFew(f"the noise of {len(replies)} clients, where ε counts on that of {self.noise_clients}")
        total: dict[str, Tensor] = {}
        while replies:
            one = self.read(task, replies.pop(0))
            if total and one.keys() != total.keys():
                raise MessageError("sums of different parts do not add up")
            total = {name: array + total[name] if total else array for name, array in one.items()}
        if not total:
            raise TooFew("no client's sums came")
        return total

    def check_honest(self, cohort: int) -> None:
        """An error where a round has fewer clients than ε counts on."""
        if cohort < self.noise_clients:
            raise ConfigError(
                f"ε counts on {self.noise_clients} clients per round (noise_clients), and there are {cohort}"
            )

    def conditions(self, cohort: int) -> str:
        """What ε counts on where clients add the noise, for a line of `promise`."""
        spare = cohort - self.noise_clients
        others = f"{spare} may not be" if spare else "one that is not voids it: set noise_clients below that"
        apart = " and server and shuffler do not collude" if self.secure_sum else ""
        return f"if at least {self.noise_clients} of {cohort} clients are honest ({others}){apart}"

    @abstractmethod
    def read(self, task: Task, reply: Message) -> dict[str, Tensor]:
        """A client's integers, or the total of many, checked: float64 on the CPU."""

    @abstractmethod
    def widths(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """σ of the noise that each client adds to arrays of so many numbers, in integers; 0 without ε."""

    @abstractmethod
    def releases(self, rounds: int) -> list[Release]:
        """ρ of what so many rounds release, where the noise of `noise_clients` clients counts; none without ε.

        `budget_rounds`, an option or a constant of the class, is how many rounds there may be.
        """

    @abstractmethod
    def limit(self, name: str) -> float:
        """The largest number that a client contributes, in integers: cut there for the fixed point, not for privacy."""

    def check(self, task: Task, reply: Message) -> Tensor | None:
        self.read(task, reply)
        return None

    def summand(self, task: Task, message: Message, reply: Message) -> Summand:
        """Integers as they are."""
        arrays = self.read(task, reply)
        wide = self.widths({name: array.numel() for name, array in arrays.items()})
        limits = {name: self.limit(name) + _TAILS * wide[name] for name in arrays}
        return {name: Addend(array, limits[name], name != self.vector) for name, array in arrays.items()}

    def from_total(self, task: Task, message: Message, total: Mapping[str, Tensor], clients: int) -> Message:
        if clients < self.noise_clients:
            raise TooFew(f"a sum of {clients} clients, where ε counts on the noise of {self.noise_clients}")
        return Message("update", message.round, dict(total))
