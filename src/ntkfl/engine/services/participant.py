"""A client of a federation: enrols, and answers what the aggregator announces, with data that stay here.

All its talk is with the key server (once) and the shuffler. What it gives away is fixed by the terms it pins; where an
announcement asks for less of a crowd, or comes twice, it is not answered.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ntkfl.engine.crowd import send, send_rows
from ntkfl.engine.draws import Draws, SystemDraws
from ntkfl.engine.folder import write_atomically
from ntkfl.engine.services.announcement import EVALUATION, MOST_ATTEMPTS, MOST_EXCHANGES, Announcement
from ntkfl.engine.services.evaluation import counts, score_rows
from ntkfl.engine.services.identity import Identity
from ntkfl.engine.services.peer import Peer
from ntkfl.engine.services.terms import Federation
from ntkfl.errors import ConfigError, DataError, MessageError, NTKFLError, Refused, TrustError
from ntkfl.methods import Client, State, Task
from ntkfl.privacy.rows import BatchKey
from ntkfl.privacy.subsample import subsample


class Participant:
    """One client or evaluator, its folder and its data: x [n, *inputs], y classes [n] or real [n, outputs]."""

    def __init__(
        self,
        folder: Path,
        x: Tensor,
        y: Tensor,
        *,
        draws: Draws | None = None,
        patience: float = 60,
        say: Callable[[str], None] = print,
    ) -> None:
        self.pins, self.draws, self.say = Federation.read(folder), draws or SystemDraws(), say
        terms = self.pins.terms
        check_data(x, y, terms.inputs, terms.outputs)
        self.identity = Identity(folder, self.pins, patience)
        self.shuffler = Peer(self.pins.shuffler.url, folder / "ca.pem", patience=patience)
        self.shuffler.identify(self.identity.credential, self.identity.signing)
        self.name, self.role = self.identity.known.client, self.identity.known.role
        self.method = terms.build_method()
        dtype = getattr(torch, terms.precision)
        x = x.to(dtype)
        if self.method.projected_dim is not None:
            projection = self.method.make_projection(self.identity.seed(), terms.inputs)
            assert projection is not None
            x = projection(x)
        self.x, self.y = x, y.to(dtype) if y.is_floating_point() else y.long()
        self.task = Task(
            terms.build_model(seed=0), terms.outputs, self.method.loss, label_smoothing=self.method.label_smoothing
        )
        self._seen_file = folder / "seen"
        self.seen = _read_seen(self._seen_file)
        self._client: tuple[int, Client] | None = None
        self._memory: State = {}
        self._path = f"/v1/runs/{self.pins.run}"

    def run(self) -> int:
        """Take part until the aggregator ends the run; the number of exchanges answered."""
        self.hello()
        self.say(f"{self.name} is enrolled as {self.role} and waits for {self.pins.federation}/{self.pins.run}")
        sequence, answered = 0, 0
        while True:
            response = self.shuffler.ask("GET", f"{self._path}/announcement?after={sequence}")
            if response.status_code == 204:
                continue
            sequence = _sequence(response.headers.get("ntkfl-sequence", ""), sequence)
            try:
                said = self.heed(response.content)
                if said is None:
                    continue
                if said.kind == "end":
                    self.say(f"{self.name}: the run has ended")
                    return answered
                if self.answer(said) is not None:
                    answered += 1
                    what = "evaluation" if said.kind == "evaluate" else f"exchange {said.key.exchange + 1}"
                    self.say(f"{self.name}: answered round {said.key.round}, {what}")
            except Refused as refusal:
                if refusal.reason == "revoked":
                    raise
                self.say(f"{self.name}: {refusal.reason}: {refusal}")
            except NTKFLError as error:
                self.say(f"{self.name}: not answered: {error}")
            except Exception as error:  # whatever an announcement does to this client, the next may be sound
                self.say(f"{self.name}: not answered: {type(error).__name__}")

    def hello(self) -> None:
        """Tell the shuffler that this client is there."""
        self.shuffler.ask("POST", f"{self._path}/hello")

    def heed(self, signed: bytes) -> Announcement | None:
        """An announcement the aggregator signed and that is newer than the last; older ones are left alone."""
        said = Announcement.check(
            signed, bytes.fromhex(self.pins.aggregator.signing_key), self.pins.federation, self.pins.run
        )
        if self.seen is not None and said.key <= self.seen:
            return None
        self.seen = said.key
        write_atomically(self._seen_file, " ".join(map(str, said.key)).encode())
        batch, key = said.batch, said.key
        if batch is not None and min(len(batch.cohort), batch.min_clients) < self.pins.shuffler.min_clients:
            raise TrustError(f"round {key.round} asks for a crowd below {self.pins.shuffler.min_clients} clients")
        if batch is not None and batch.seconds is not None and batch.seconds < 1:
            raise TrustError(f"round {key.round} would be released before a crowd could come")
        if key.attempt >= MOST_ATTEMPTS or MOST_EXCHANGES <= key.exchange < EVALUATION:
            raise TrustError(f"round {key.round} asks more often than a round needs to")
        if (said.kind == "evaluate") != (key.exchange == EVALUATION):
            raise TrustError(f"round {key.round} mixes up training and evaluation")
        return said

    def answer(self, said: Announcement) -> bytes | None:
        """Send what was asked for: the shuffler's receipt (empty for a report); None if this client was not asked."""
        asked = said.batch is not None and self.name in said.batch.cohort
        if said.message is None:
            return None
        if said.kind == "evaluate":
            if self.role != "evaluator" and not asked:
                return None
            if self.role == "evaluator":
                rows, kind = [counts(self.task, said.message, self.x, self.y)], "reports"
            else:  # on the round's samples alone: no more of this client shows than in training
                client = self.method.private(self.task, self._sampled(said.key, 0))
                rows, kind = score_rows(self.task, said.message, client.x, client.y), "rows"
            count = 1 if said.batch is None else said.batch.max_rows
            if len(rows) > count:
                rows = self.draws.subsampling(said.key.round).sample(rows, count)
            return self._send(kind, send_rows(rows, count, *self._to_aggregator(), said.key))
        if not asked or said.batch is None or self.role != "client":
            return None
        client = self._sampled(said.key, said.batch.max_rows)
        reply = self.method.answer(self.task, said.message, [client])[0]
        self._memory = client.memory
        return self._send("rows", send(self.method, reply, said.batch.max_rows, *self._to_aggregator(), said.key))

    def _send(self, kind: str, framed: bytes) -> bytes:
        answer = self.shuffler.ask("POST", f"{self._path}/{kind}", framed).json()
        try:
            return bytes.fromhex(answer.get("receipt", ""))
        except (ValueError, TypeError, AttributeError):
            raise MessageError("the shuffler's answer holds no receipt that can be read") from None

    def _sampled(self, key: BatchKey, max_rows: int) -> Client:
        """This round's client, with the samples drawn at its first exchange; attempts at a round get the same ones."""
        if key.exchange == 0 and (self._client is None or self._client[0] != key.round):
            draw = self.draws.subsampling(key.round)
            most = max_rows if self.method.sampled else None
            rows = subsample(len(self.y), self.method.subsample_rate, draw, most)
            seed = self.draws.training(key.round)
            client = Client(0, self.x[rows], self.y[rows], seed, dict(self._memory))
            self._client = (key.round, client)
        if self._client is None or self._client[0] != key.round:
            raise ConfigError(f"round {key.round} goes on, but this client was not there at its beginning")
        return self._client[1]

    def _to_aggregator(self) -> tuple[bytes, str, str]:
        return bytes.fromhex(self.pins.aggregator.sealing_key), self.pins.federation, self.pins.run


def _sequence(said: str, before: int) -> int:
    """The number of the announcement just received; the next one, if the shuffler does not say."""
    return max(before + 1, int(said)) if said.isdecimal() and len(said) < 19 else before + 1


def _read_seen(path: Path) -> BatchKey | None:
    """The newest announcement heeded before a restart: what came before it is not answered again."""
    try:
        return BatchKey(*map(int, path.read_text().split())).check()
    except (OSError, ValueError, TypeError, MessageError):
        return None


def check_data(x: Tensor, y: Tensor, inputs: tuple[int, ...], outputs: int) -> None:
    if len(x) == 0 or len(x) != len(y):
        raise DataError(f"{len(x)} inputs and {len(y)} labels: at least one, and as many of one as of the other")
    if tuple(x.shape[1:]) != inputs:
        raise DataError(f"inputs of shape {list(x.shape[1:])}; the run's terms say {list(inputs)}")
    if not bool(x.isfinite().all()):
        raise DataError("an input is not finite")
    if y.is_floating_point():
        if y.ndim != 2 or y.shape[1] != outputs or not bool(y.isfinite().all()):
            raise DataError(f"real targets must be finite and of shape [n, {outputs}], got {list(y.shape)}")
    elif y.ndim != 1 or not 0 <= int(y.min()) <= int(y.max()) < outputs:
        raise DataError(f"labels must be whole numbers from 0 to {outputs - 1}, one a sample")
