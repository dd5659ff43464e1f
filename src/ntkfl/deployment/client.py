"""A client of a federation: enrols, and answers what the aggregator announces, with data that stay here.

All its talk is with the key server (once) and the shuffler. What it gives away, in how many rounds and in how large a
crowd is fixed by the contract it pins; an announcement that asks for anything else, comes twice, or changes a round's
cohort is not answered. What was answered is counted on the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ntkfl.crypto.receipt import check_receipt
from ntkfl.crypto.row_frames import Announced, BatchKey
from ntkfl.deployment.contract import Federation
from ntkfl.deployment.ledger import Ledger
from ntkfl.errors import ConfigError, DataError, MessageError, NTKFLError, Refused, TrustError
from ntkfl.federation.client_randomness import Draws, SystemDraws
from ntkfl.federation.evaluation import counts, noisy_counts, rounded, score_rows
from ntkfl.federation.shuffled import seal_messages, seal_reply
from ntkfl.methods import ClientRound, State, Task
from ntkfl.privacy.subsample import subsample
from ntkfl.services.announcement import EVALUATION, MOST_EXCHANGES, Announcement
from ntkfl.services.http.client import ANNOUNCED, HttpClient
from ntkfl.services.key_server.client import Identity
from ntkfl.wire import Message


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
        allow_code: bool = False,
    ) -> None:
        self.pins, self.draws, self.say = Federation.read(folder), draws or SystemDraws(), say
        terms = self.pins.terms
        check_data(x, y, terms.inputs, terms.outputs)
        model = terms.build_model(seed=0, allow_code=allow_code)  # before anybody hears of this client
        self.identity = Identity(folder, self.pins, patience)
        self.shuffler = HttpClient(self.pins.shuffler.url, folder / "ca.pem", patience=patience)
        self.shuffler.identify(self.identity.current, self.identity.signing)
        self.name, self.role = self.identity.known.client, self.identity.known.role
        self.method = terms.build_method(allow_code=allow_code)
        dtype = getattr(torch, terms.precision)
        x = x.to(dtype)
        if self.method.projected_dim is not None:
            projection = self.method.make_projection(self.identity.seed(), terms.inputs)
            assert projection is not None
            x = projection(x)
        self.x, self.y = x, y.to(dtype) if y.is_floating_point() else y.long()
        self.task = Task(model, terms.outputs, self.method.loss, label_smoothing=self.method.label_smoothing)
        self.ledger = Ledger(folder, self.pins.run)
        self._client: tuple[int, ClientRound] | None = None
        self._memory: State = {}
        self._path = f"/v1/runs/{self.pins.run}"

    def run(self) -> int:
        """Take part until the aggregator ends the run; the number of exchanges answered."""
        self.hello()
        self.say(f"{self.name} is enrolled as {self.role} and waits for {self.pins.federation}/{self.pins.run}")
        sequence, answered = 0, 0
        while True:
            response = self.shuffler.ask("GET", f"{self._path}/announcement?after={sequence}", most=ANNOUNCED)
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
        """An announcement the aggregator signed, that is newer than the last and keeps to the contract; older ones are
        left alone. On return it is in the ledger: it is answered now or never.
        """
        said = Announcement.check(
            signed, bytes.fromhex(self.pins.aggregator.signing_key), self.pins.federation, self.pins.run
        )
        if said.kind != "end":
            self._check_contract(said)
        cohort = "" if said.batch is None else said.batch.cohort_digest().hex()
        return said if self.ledger.take(said.key, cohort) else None

    def _check_contract(self, said: Announcement) -> None:
        """`TrustError` where an announcement asks for something else than the run's contract says."""
        terms, (round, exchange), batch = self.pins.terms, said.key, said.batch
        if not 1 <= round <= terms.most_rounds:
            raise TrustError(f"round {round} is none of the {terms.most_rounds} that the contract allows")
        if MOST_EXCHANGES <= exchange < EVALUATION:
            raise TrustError(f"round {round} asks more often than a round needs to")
        if (said.kind == "evaluate") != (exchange == EVALUATION):
            raise TrustError(f"round {round} mixes up training and evaluation")
        if batch is None:
            return
        if batch.min_clients < self.pins.shuffler.min_clients:
            raise TrustError(f"round {round} asks for a crowd below {self.pins.shuffler.min_clients} clients")
        if len(batch.cohort) != terms.clients_per_round:
            raise TrustError(f"round {round} asks {len(batch.cohort)} clients, not {terms.clients_per_round}")
        usual = terms.max_rows if self.method.sampled or exchange == EVALUATION else 1
        # Replies to later questions may have one row per client: which do is known once there is one (`_check_rows`).
        if batch.max_rows not in ((usual,) if exchange in (0, EVALUATION) else (usual, 1)):
            raise TrustError(f"round {round} asks for {batch.max_rows} rows, the contract for {usual}")
        if batch.seconds is not None and batch.seconds < 1:
            raise TrustError(f"round {round} would be released before a crowd could come")

    def answer(self, said: Announcement) -> bytes | None:
        """Send what was asked for: the shuffler's receipt; None if this client was not asked."""
        asked = said.batch is not None and self.name in said.batch.cohort
        if said.message is None or said.announced is None or said.sealing_key is None:
            return None
        where = (said.sealing_key, self.pins.federation, self.pins.run, said.announced)
        if said.kind == "evaluate":
            if self.role != "evaluator" and not asked:
                return None
            if self.role == "evaluator":
                rows, kind = [self._counts(said.message)], "reports"
            else:  # on the round's samples alone: no more of this client shows than in training
                client = self.method.private(self.task, self._sampled(said.key, said.message.round))
                rows, kind = score_rows(self.task, said.message, client.x, client.y), "rows"
            count = 1 if said.batch is None else self.pins.terms.max_rows
            self._check_rows(said, count)
            if len(rows) > count:
                rows = self.draws.subsampling(said.message.round).sample(rows, count)
            return self._send(kind, said.announced, seal_messages(rows, count, *where))
        if not asked or said.batch is None or self.role != "client":
            return None
        client = self._sampled(said.key, said.message.round)
        reply = self.method.answer(self.task, said.message, [client])[0]
        self._memory = client.memory
        count = self.pins.terms.max_rows if reply.kind in self.method.sampled else 1
        self._check_rows(said, count)
        return self._send("rows", said.announced, seal_reply(self.method, reply, count, *where))

    def _check_rows(self, said: Announcement, count: int) -> None:
        """`TrustError` where every client is to send another number of rows than such a reply has by contract."""
        if said.batch is not None and said.batch.max_rows != count:
            raise TrustError(f"round {said.key.round} asks for {said.batch.max_rows} rows, the contract for {count}")

    def _counts(self, message: Message) -> Message:
        """An evaluator's answer, no more exact than the contract says."""
        terms = self.pins.terms
        if terms.private:
            answer = noisy_counts(self.task, message, self.x, self.y, terms.count_epsilon)
        else:
            answer = counts(self.task, message, self.x, self.y)
        return rounded(answer, terms.count_multiple) if terms.count_multiple > 1 else answer

    def _send(self, kind: str, announced: Announced, framed: bytes) -> bytes:
        """The shuffler's receipt, which says that it holds the rows for the announcement that this client heard."""
        answer = self.shuffler.ask("POST", f"{self._path}/{kind}", framed).json()
        try:
            receipt = bytes.fromhex(answer.get("receipt", ""))
        except (ValueError, TypeError, AttributeError):
            raise MessageError("the shuffler's answer holds no receipt that can be read") from None
        shuffler = bytes.fromhex(self.pins.shuffler.signing_key)
        check_receipt(receipt, shuffler, self.pins.federation, self.pins.run, announced)
        return receipt

    def _sampled(self, key: BatchKey, number: int) -> ClientRound:
        """This round's client, with the samples drawn at its first exchange. A round that is tried again has another
        key, and gets other samples; `number` is that of training, which only seeded draws look at.
        """
        if key.exchange == 0:
            draw = self.draws.subsampling(number)
            most = self.pins.terms.max_rows if self.method.sampled else None
            rows = subsample(len(self.y), self.method.subsample_rate, draw, most)
            own = self.draws.randomness(number)
            client = ClientRound(0, self.x[rows], self.y[rows], own, dict(self._memory))
            self._client = (key.round, client)
        if self._client is None or self._client[0] != key.round:
            raise ConfigError(f"round {key.round} goes on, but this client was not there at its beginning")
        return self._client[1]


def _sequence(said: str, before: int) -> int:
    """The number of the announcement just received; the next one, if the shuffler does not say."""
    return max(before + 1, int(said)) if said.isdecimal() and len(said) < 19 else before + 1


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
        raise DataError(f"labels must be whole numbers from 0 to {outputs - 1}, one per sample")
