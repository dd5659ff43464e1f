"""One verb and its Ctrl-C: started as its user does, interrupted at a random moment of its work, and looked at."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

from tests.cli.command import UNWANTED, Command, wait_until_gone

Words = Sequence[str | Path]
ORDINARY = "(?!)"  # the end of a verb that runs until it is stopped needs no line: it matches nothing


@dataclass(frozen=True)
class Case:
    """`ntkfl WORDS`, interrupted up to `within` seconds after `begun`: a pattern in what it says, or a condition; None:
    once there is more of what is kept.

    `line` is a pattern of the one line that says how to go on. Where that promises that work is kept, `kept` counts it
    (and raises where it is not whole): the count never falls, and grows when `again` (or the same command) is started.
    Where nothing is to be written, `nowhere` is the place that must not be there. `before` is done before each start.
    """

    verb: str
    words: Words
    begun: str | Callable[[], bool] | None = None
    within: float = 3.0
    line: str = ORDINARY
    code: int = 130
    again: Words | None = None
    kept: Callable[[], int] | None = None
    nowhere: Path | None = None
    before: Callable[[], object] = lambda: None
    env: Mapping[str, str] = field(default_factory=dict)
    program: str = ""  # to start instead of `python -m ntkfl`


@dataclass
class Found:
    """What was seen of a verb: seconds to its end, and whatever was not as promised, each once."""

    verb: str
    seconds: list[float] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    lines: list[bool] = field(default_factory=list)
    goes_on: str = "—"
    wrong: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        if what not in self.wrong:
            self.wrong.append(what)

    def cells(self, ordinary: bool) -> tuple[str, ...]:
        times = (f"{median(self.seconds):.2f}", f"{max(self.seconds):.2f}") if self.seconds else ("—", "—")
        codes = ", ".join(map(str, sorted(set(self.codes)))) or "—"
        line = "none needed" if ordinary else f"{sum(self.lines)} of {len(self.lines)}"
        wrong = "; ".join(self.wrong) or "as promised"
        return (self.verb, str(len(self.seconds)), *times, codes, line, self.goes_on, wrong)


def attempts(case: Case, times: int, rng: Random) -> Found:
    """Interrupt it `times` times; where it goes on, once more to see that it does."""
    found = Found(case.verb)
    words = case.words
    have = 0
    for number in range(times + (case.kept is not None)):
        case.before()
        # Every second time in a terminal, where displays are other ones; patterns are of what a log is told.
        terminal = number % 2 == 1 and not isinstance(case.begun, str)
        command = Command(*words, env=case.env, program=case.program, terminal=terminal)
        try:
            _begin(case, command, have)
            if number < times:
                command.listen(rng.uniform(0, case.within))
                _interrupt(case, command, found)
                words = case.again or case.words
        except AssertionError as error:
            found.note(short(error))
            break
        finally:
            command.kill()
        if case.kept is not None:
            have, before = _count(case.kept, found), have
            if have < before:
                found.note(f"of {before} kept {have} are left")
            if number:
                found.goes_on = "yes"
    if case.kept is not None and found.goes_on == "—":
        found.goes_on = "NO"
    return found


def _begin(case: Case, command: Command, have: int) -> None:
    """Wait until it is at work: where work is kept, until there is more of it than before."""
    if case.begun:
        command.until(case.begun)
    if case.kept is not None:
        kept = case.kept
        command.until(lambda: kept() > have, 240)


def _interrupt(case: Case, command: Command, found: Found) -> None:
    if command.process.poll() is not None:
        raise AssertionError(f"ended before it was interrupted: {command.text[-2000:]}")
    said = len(command.text)
    found.seconds.append(command.ctrl_c())
    found.codes.append(command.process.returncode)
    if command.process.returncode != case.code:
        found.note(f"exit code {command.process.returncode}")
    after = command.text[said:]
    if case.line != ORDINARY:
        found.lines.append(bool(re.search(case.line, after)) and after.count("stopped") == 1)
        if not found.lines[-1]:
            found.note(f"its line is not there: {after[-200:]!r}")
    for unwanted in UNWANTED:
        if unwanted in command.text:
            found.note(f"{unwanted} in what it says")
    if left := wait_until_gone(command, 2):
        found.note(f"left behind: {left[0][:80]}")
    if case.nowhere is not None and case.nowhere.exists():
        found.note(f"wrote {case.nowhere.name}")


def _count(kept: Callable[[], int], found: Found) -> int:
    try:
        return kept()
    except Exception as error:  # whatever a file that is not whole makes its reader raise
        found.note(f"not whole: {type(error).__name__}: {error}")
        return 0


def short(error: AssertionError) -> str:
    said = " ".join(str(error).split())
    return said if len(said) < 300 else f"{said[:100]} … {said[-200:]}"
