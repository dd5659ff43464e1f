"""Callbacks: objects that `ntkfl.train` calls as a run proceeds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ntkfl.errors import ConfigError
from ntkfl.extras import missing
from ntkfl.federation.run_folder import Record
from ntkfl.progress import ProgressBar, percent, plural

if TYPE_CHECKING:
    from ntkfl.federation.transcript import Transcript


class Callback:
    """Override what you need; the methods here do nothing.

    A callback runs in the training process, between rounds. By the time `on_round` is called, the run's folder holds
    that round, so an exception raised there stops training and loses nothing: the run can be resumed. The exception
    reaches the caller of `train` as it was raised, with a note that names the callback and the method.
    """

    transcript_rounds: Collection[int] = ()
    """Rounds of which this callback wants the messages: only those are passed to `on_transcript`."""

    def on_begin(self, rounds: int) -> None:
        """Once, first of all: how many rounds are planned."""

    def on_start(self, note: str) -> None:
        """Before the first round: one line about the run, such as the memory a round needs, or a warning. May be called
        several times.
        """

    def on_round(self, record: Record, timing: Record) -> None:
        """After each round: its line of `history.jsonl` and its line of `timings.jsonl`."""

    def on_transcript(self, transcript: Transcript) -> None:
        """After a round listed in `transcript_rounds`, before `on_round`: every message of that round."""

    def on_end(self) -> None:
        """Once, after the last round, or after an error or interrupt that ends the run."""


class CallbackList(Callback):
    """Several callbacks as one, called in the order given."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self.callbacks = tuple(callbacks)
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"a callback must be an instance of a subclass of ntkfl.Callback, not {_name(callback)}"
                )
        self.transcript_rounds = frozenset().union(*(callback.transcript_rounds for callback in self.callbacks))

    def on_begin(self, rounds: int) -> None:
        for callback in self.callbacks:
            _call(callback.on_begin, rounds)

    def on_start(self, note: str) -> None:
        for callback in self.callbacks:
            _call(callback.on_start, note)

    def on_round(self, record: Record, timing: Record) -> None:
        for callback in self.callbacks:
            _call(callback.on_round, record, timing)

    def on_transcript(self, transcript: Transcript) -> None:
        for callback in self.callbacks:
            if transcript.round in callback.transcript_rounds:
                _call(callback.on_transcript, transcript)

    def on_end(self) -> None:
        for callback in self.callbacks:
            _call(callback.on_end)


class Functions(Callback):
    """A callback made of functions, for those who need one or two."""

    def __init__(
        self,
        *,
        on_start: Callable[[str], None] | None = None,
        on_round: Callable[[Record, Record], None] | None = None,
        on_transcript: Callable[[Transcript], None] | None = None,
        transcript_rounds: Collection[int] = (),
    ) -> None:
        self._on_start, self._on_round, self._on_transcript = on_start, on_round, on_transcript
        self.transcript_rounds = transcript_rounds

    def on_start(self, note: str) -> None:
        if self._on_start:
            self._on_start(note)

    def on_round(self, record: Record, timing: Record) -> None:
        if self._on_round:
            self._on_round(record, timing)

    def on_transcript(self, transcript: Transcript) -> None:
        if self._on_transcript:
            self._on_transcript(transcript)


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
            self._bar.round(record, timing, what=f"round {record['round']} of {self._bar.total}{reached}")

    def on_end(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar.console.print(self._bar.what, soft_wrap=True)


class TensorBoardCallback(Callback):
    """Writes each round as a point of TensorBoard's event files into `<run folder>/tensorboard`.

    They have what `history.jsonl` and `timings.jsonl` have. Needs the extra `tensorboard`.
    """

    def __init__(self, run_folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise missing("--tensorboard", "tensorboard") from None
        self.folder = Path(run_folder) / "tensorboard"
        self._make: Callable[..., Any] = SummaryWriter
        self._writer: Any = None

    def on_round(self, record: Record, timing: Record) -> None:
        number = int(record["round"])
        if self._writer is None:
            # Not before: a run's folder must be empty when the run begins. A resumed run's later points are replaced.
            self._writer = self._make(str(self.folder), purge_step=number)
        values = {f"{_group(name)}/{name}": value for name, value in record.items() if name != "round"}
        values |= {f"time/{name}": value for name, value in timing.items() if name != "round"}
        for direction in ("uplink", "downlink"):
            values |= {f"messages/{direction}_{kind}": count for kind, count in (record.get(direction) or {}).items()}
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def on_end(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _group(name: str) -> str:
    """TensorBoard opens with the first group by name: the accuracies."""
    return next((group for group in ("accuracy", "loss") if name.endswith(group)), "round")


def _call(method: Callable[..., None], *values: Any) -> None:
    try:
        method(*values)
    except Exception as error:
        error.add_note(f"raised by {method.__qualname__}, a callback of ntkfl.train")
        raise


def _name(value: object) -> str:
    return f"the class {value.__name__}: add ()" if isinstance(value, type) else repr(value)
