"""What went over the wire in one round, kept byte for byte: `wire/round-NNN/` of a run's folder.

    wire.json      the cohort, and of every exchange: kinds, sizes, counts, and (for scoring attacks) who sent which row
    E-down-K       the question of exchange E: one for all, or (E-down-0, E-down-1 …) one per client
    E-up-K         the replies as the aggregator decoded them: one per client, or, shuffled, all rows joined

A simulation plays all roles, so it can keep what no single role of a deployment knows: it keeps no secret anyway.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ntkfl.errors import MessageError, RunFolderError
from ntkfl.federation.run_folder import RunFolder
from ntkfl.methods import Method
from ntkfl.methods.base import Outgoing
from ntkfl.safe_parse import parse_json
from ntkfl.wire import Message


@dataclass(frozen=True)
class Exchange:
    """One question and its answers. `submitted` has the bytes each client sent, in order of the cohort."""

    questions: tuple[bytes, ...]  # one for all, or one per client
    replies: tuple[bytes, ...]  # as the aggregator has them: one per client, or the joined rows
    submitted: tuple[int, ...]
    rows: tuple[int, ...]  # messages in each client's submission: 1, or shuffled its sealed rows, padding too
    row_bytes: int | None  # of a sealed row; None where nothing is sealed
    senders: tuple[int, ...] | None  # shuffled: whose each row of the joined reply is
    samples: tuple[int, ...] | None  # and which of its sender's rows


@dataclass(frozen=True)
class Transcript:
    """A round's exchanges in their order."""

    round: int
    cohort: tuple[int, ...]
    exchanges: tuple[Exchange, ...]

    def save(self, folder: RunFolder) -> None:
        """Into the run's folder; wire.json last, so that what can be found is whole."""
        where = _place(self.round)
        notes = []
        for e, exchange in enumerate(self.exchanges):
            for way, payloads in (("down", exchange.questions), ("up", exchange.replies)):
                for k, payload in enumerate(payloads):
                    folder.write(f"{where}/{e}-{way}-{k}", payload)
            note = asdict(exchange)
            note |= {"questions": len(exchange.questions), "replies": len(exchange.replies)}
            notes.append(note)
        text = json.dumps({"round": self.round, "cohort": self.cohort, "exchanges": notes}, indent=1)
        folder.write(f"{where}/wire.json", text.encode())

    @staticmethod
    def read(folder: RunFolder, round: int) -> Transcript:
        """`RunFolderError` where the round was not recorded, or not whole."""
        path = folder.path / _place(round)
        try:
            note = parse_json((path / "wire.json").read_text())
            for e, values in enumerate(note["exchanges"]):
                for way, name in (("down", "questions"), ("up", "replies")):
                    values[name] = [(path / f"{e}-{way}-{k}").read_bytes() for k in range(values[name])]
            return _WIRE.validate_python(note)
        except FileNotFoundError:
            raise RunFolderError(f"{folder.path} holds no whole recording of round {round}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:  # of pydantic too
            raise RunFolderError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


_WIRE = TypeAdapter(Transcript)


def recorded_rounds(folder: Path) -> list[int]:
    """The rounds a run's folder has recordings of."""
    names = (p.parent.name.removeprefix("round-") for p in folder.glob("wire/round-*/wire.json"))
    return sorted(int(name) for name in names if name.isdecimal())


class TranscriptRecorder:
    """Listens to a round as it is played."""

    def __init__(self, round: int, cohort: Sequence[int]) -> None:
        self.round, self.cohort = round, tuple(cohort)
        self._done: list[Exchange] = []
        self._sent: dict[bytes, list[tuple[int, int]]] = defaultdict(list)  # digest of a row -> who sent it, his n-th

    def asked(self, method: Method, outgoing: Outgoing, answers: Sequence[Message], rows_each: int = 1) -> None:
        """Before the answers travel; shuffled ones of samples as `rows_each` rows, padding among them."""
        each = [outgoing] if isinstance(outgoing, Message) else [outgoing[i] for i in self.cohort]
        self._questions = tuple(message.encode() for message in each)
        self._shuffled = method.shuffle
        if not self._shuffled:
            self._submitted = tuple(len(answer.encode()) for answer in answers)
            self._rows, self._row_bytes = (1,) * len(answers), None
            return
        from ntkfl.crypto.hpke import SEAL_BYTES
        from ntkfl.crypto.row_frames import FRAME_BYTES  # sealing is an extra, and only shuffled runs need it

        self._sent.clear()
        rows, submitted, size = [], [], 0
        for client, answer in zip(self.cohort, answers, strict=True):
            own = [row.encode() for row in method.split(answer)]
            size = len(own[0]) + SEAL_BYTES
            rows.append(max(len(own), rows_each if answer.kind in method.sampled else 1))
            submitted.append(FRAME_BYTES + rows[-1] * size)
            for n, row in enumerate(own):
                self._sent[hashlib.sha256(row).digest()].append((client, n))
        self._submitted, self._rows, self._row_bytes = tuple(submitted), tuple(rows), size

    def answered(self, method: Method, replies: Sequence[Message]) -> None:
        """As the aggregator has them."""
        senders = samples = None
        if self._shuffled:
            received = [row for reply in replies for row in method.split(reply)]
            try:
                found = [self._sent[hashlib.sha256(row.encode()).digest()].pop() for row in received]
            except IndexError:
                raise MessageError("a row arrived that nobody sent") from None
            senders, samples = tuple(c for c, _ in found), tuple(n for _, n in found)
        encoded = tuple(reply.encode() for reply in replies)
        sizes = (self._submitted, self._rows, self._row_bytes)
        self._done.append(Exchange(self._questions, encoded, *sizes, senders, samples))

    def transcript(self) -> Transcript:
        return Transcript(self.round, self.cohort, tuple(self._done))


def _place(round: int) -> str:
    return f"wire/round-{round:03d}"
