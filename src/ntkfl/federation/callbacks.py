"""Callbacks: objects that `ntkfl.train` calls as a run proceeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ntkfl.errors import ConfigError
from ntkfl.federation.run_folder import Record
from ntkfl.progress import ProgressBar, percent, plural


class Callback:
    """Override what you need; the methods here do nothing.

    A callback runs in the training process, between rounds. By the time `on_round` is called, the run's folder holds
    that round, so an exception raised there stops training and loses nothing: the run can be resumed. The exception
    reaches the caller of `train` as it was raised.
    """

    def on_begin(self, rounds: int) -> None:
        """Once, first of all: how many rounds are planned."""

    def on_start(self, note: str) -> None:
        """Before the first round: one line about the run, such as the memory a round needs, or a warning. May be called
        several times.
        """

    def on_round(self, record: Record, timing: Record) -> None:
        """After each round: its line of `history.jsonl` and its line of `timings.jsonl`."""

    def on_end(self) -> None:
        """Once, after the last round, or after an error or interrupt that ends the run."""


class CallbackList:
    """Several callbacks as one: `tell("on_round", …)` calls that method of each, in the order given."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.callbacks = tuple(callbacks)
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(f"a callback must be an instance of a subclass of ntkfl.Callback, not {callback!r}")

    def tell(self, what: str, *about: object) -> None:
        for callback in self.callbacks:
            getattr(callback, what)(*about)


class Functions(Callback):
    """A callback made of functions, for those who need one or two."""

    def __init__(
        self,
        *,
        on_start: Callable[[str], None] | None = None,
        on_round: Callable[[Record, Record], None] | None = None,
    ) -> None:
        vars(self).update({name: f for name, f in (("on_start", on_start), ("on_round", on_round)) if f})


class Progress(Callback):
    """Rounds, accuracy and the time left on standard error: a bar in a terminal, in a notebook or log a line every ten
    seconds or so. With `log=False`, not in a log.
    """

    def __init__(self, log: bool = True) -> None:
        self.log = log
        self._bar: ProgressBar | None = None

    def on_begin(self, rounds: int) -> None:
        bar = ProgressBar(rounds, f"training, {plural(rounds, 'round')}")
        if self.log or bar.live or bar.console.is_jupyter:
            self._bar = bar.__enter__()

    def on_round(self, record: Record, timing: Record) -> None:
        if self._bar is not None:
            accuracy, loss = record["test_accuracy"], record["test_loss"]
            reached = "" if loss is None else f", test loss {loss:.4g}"
            if accuracy is not None:
                reached = f", test accuracy {percent(accuracy)}"
            if not self._bar.done:  # the first round heard of is a later one where a run was resumed
                self._bar.done = self._bar.skipped = record["round"] - 1
            self._bar.end(what=f"round {record['round']} of {self._bar.total}{reached}")

    def on_end(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar.console.print(self._bar.what, soft_wrap=True)
