"""What reaches the running parts: their state files, Flower's records, requests to `ntkfl watch`, peers' answers."""

from __future__ import annotations

import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from ntkfl.crypto.mask_format import SEED_BYTES
from ntkfl.crypto.masking import pack_words, unpack_words
from ntkfl.crypto.row_frames import Announced, BatchKey, pack_rows, unpack_rows
from ntkfl.deployment.client import next_sequence
from ntkfl.deployment.contract import Terms
from ntkfl.deployment.ledger import Ledger
from ntkfl.errors import Refused
from ntkfl.federation.secure_sum import SumSchema
from ntkfl.flower.client import FlowerClient
from ntkfl.flower.records import notes_of, payload_of
from ntkfl.flower.transport import one_line
from ntkfl.methods import ClientRound, SumNTKFL, Task
from ntkfl.privacy.randomness import Randomness
from ntkfl.report.live import Handler, LiveServer
from ntkfl.services.key_server.store import KeyServer
from ntkfl.services.shuffler.batch import Batch
from ntkfl.services.shuffler.store import Shuffler
from ntkfl.wire import Message as WireMessage
from tests.fuzz.target import Target
from tests.fuzz.targets.trust import SIGNER
from tests.fuzz.targets.twists import sealed_again, twisted

KEY = BatchKey(1, 0)
SAID = Announced.of(KEY, b"signed")


def targets(scratch: Path) -> list[Target]:
    return [
        *_states(scratch),
        *_sums(scratch),
        *_flower(scratch),
        _watch(scratch),
        *_answered(scratch),
    ]


def _states(scratch: Path) -> list[Target]:
    """A disk that gives back other bytes than it got: the state is refused, or what is asked of it is."""
    path = scratch / "shuffler.sqlite"
    shuffler = Shuffler(path, run="f/r")
    shuffler.present("a", "client")
    shuffler.publish(b"signed", KEY, Batch(KEY, ("a", "b"), 1, 4, 2, None))
    shuffler.submit("a", SAID, [b"abcd"])
    shuffler.close()
    keys = scratch / "keys.sqlite"
    KeyServer.create(keys, "f", SIGNER).add_run("r")
    KeyServer(keys, "f", SIGNER).make_token("a", "client")

    def shuffled(data: bytes) -> None:
        with _alone(path, data) as file:
            _use(file)

    def _use(file: Path) -> None:
        state = Shuffler(file, run="f/r")
        try:
            state.clients("client")
            state.latest()
            state.submission_limit()
            state.status(KEY)
            state.submit("b", SAID, [b"efgh"])
            assert sorted(state.release(KEY)) == [b"abcd", b"efgh"]
        finally:
            state.close()

    def served(data: bytes) -> None:
        with _alone(keys, data) as file:
            server = KeyServer(file, "f", SIGNER)
            server.clients()
            server.runs()
            server.revoked()
            server.make_token("b", "client")

    return [
        Target("shuffler state", (path.read_bytes(),), shuffled, share=0.4),
        Target("key server state", (keys.read_bytes(),), served, share=0.4),
    ]


def _sums(scratch: Path) -> list[Target]:
    """Secure sums: a damaged state, what a client submits, and a masked vector that is none of its reply."""
    path, seed = scratch / "sums.sqlite", bytes(range(32))
    asked = Batch(KEY, ("a", "b"), 1, 60, 2, None, 3)
    shuffler = Shuffler(path, run="f/r")
    shuffler.publish(b"signed", KEY, asked)
    shuffler.submit("a", SAID, [bytes(60)], seed)
    shuffler.close()

    def state(data: bytes) -> None:
        with _alone(path, data) as file:
            used = Shuffler(file, run="f/r")
            try:
                used.submit("b", SAID, [bytes([1]) * 60], seed)
                used.release(KEY)
                assert len(used.masks(KEY)) == 12
            finally:
                used.close()

    def submitted(data: bytes) -> None:
        taken = Shuffler(run="f/r")
        try:
            taken.publish(b"signed", KEY, asked)
            said, rows = unpack_rows(memoryview(data)[SEED_BYTES:])
            taken.submit("a", said, rows, data[:SEED_BYTES])
            assert taken.status(KEY).clients == 1
        finally:
            taken.close()

    method = SumNTKFL(secure_sum=True)
    task = Task(torch.nn.Linear(4, 3), 3, "ce")
    message = next(method.round(task, method.start(task, task.like), 1, range(2)))
    assert isinstance(message, WireMessage)
    client = ClientRound(0, torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]), Randomness.simulated(0))
    summand = method.summand(task, message, method.answer(task, message, [client])[0])
    schema = SumSchema.of("update", summand, 2)
    words = schema.encode(summand, client.randomness)

    def total(data: bytes) -> None:
        """Of an honest client and one that may have sent anything."""
        arrays, bounded = schema.decode(words + unpack_words(data, schema.numbers), 2)
        assert all(bool(array.isfinite().all()) for array in arrays.values())
        assert abs(bounded) <= 3
        method.check(task, method.from_total(task, message, arrays, 2))

    framed = seed + pack_rows(SAID, [bytes(60)])
    return [
        Target("shuffler state of a sum", (path.read_bytes(),), state, share=0.3),
        Target("masked submission", (framed,), submitted, share=0.3),
        Target("masked vector", (pack_words(words), bytes(4 * schema.numbers)), total, share=0.3),
    ]


@contextmanager
def _broken() -> Iterator[None]:
    """As the key server says it of its file."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError):
        raise Refused("no-state", "cannot be read") from None


@contextmanager
def _alone(path: Path, data: bytes) -> Iterator[Path]:
    """A file that nobody used before: a connection that a failure left behind keeps its lock until it is collected."""
    file = path.with_name(f"{path.stem}-{time.monotonic_ns()}")
    file.touch(0o600)
    file.write_bytes(data)
    try:
        yield file
    finally:
        for left in path.parent.glob(f"{file.name}*"):
            left.unlink()


def _flower(scratch: Path) -> list[Target]:
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # Flower makes no message without
    terms = Terms(inputs=(4,), outputs=3, method={"name": "scaffold", "local_steps": 1})
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    member = FlowerClient(terms, scratch / "member", lambda: (x, y))
    weights = WireMessage(
        "weights", 1, {"weights": member.client.task.like, "control": torch.zeros_like(member.client.task.like)}
    )
    seeds = [WireMessage("evaluate", 1, {"weights": member.client.task.like}).encode()]
    try:
        member.answer(weights.encode(), "0" * 16)
        seeds.append(weights.encode())
    except Exception:  # the method's own names of arrays are in its own target
        pass

    def answered(data: bytes) -> None:
        WireMessage.decode(member.answer(data, "0" * 16))

    def record(data: bytes) -> None:
        """The first byte says what is wrong with the record, the rest is its payload."""
        how, payload = (data[0], data[1:]) if data else (255, b"")
        array = Array(
            "uint8" if how & 1 else "object",
            (len(payload) if how & 2 else 2**40,),
            "ntkfl.wire" if how & 4 else "numpy",
            payload,
        )
        held = (
            ArrayRecord({"message" if how & 8 else "other": array}) if how & 16 else ConfigRecord({"message": payload})
        )
        notes = ConfigRecord({"run": payload.hex(), "blob": payload, "number": 1.5})
        message = Message(RecordDict({"ntkfl" if how & 32 else "x": held, "notes": notes}), 1, "train")
        assert set(notes_of(message)) <= {"run"}
        WireMessage.decode(payload_of(message))

    return [
        Target("flower member", tuple(seeds), answered, sealed_again, twisted, share=0.25),
        Target("flower record", (bytes([63]) + seeds[0],), record, share=0.5),
        Target("flower reason", (b"no answer within 3 seconds",), lambda data: _line(data.decode("latin-1"))),
    ]


def _line(said: str) -> None:
    line = one_line(said)
    assert len(line) <= 300
    assert line.isprintable()


def _watch(scratch: Path) -> Target:
    (scratch / "runs").mkdir()
    server = LiveServer([scratch / "runs"], "127.0.0.1", 0)
    server.closing.set()  # a stream of events ends at once
    head = b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    paths = (b"/", b"/events", b"/details/0123456789ab", b"/files/0123456789ab/config.toml")

    def check(data: bytes) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(5)
            theirs.settimeout(5)
            ours.sendall(data[:60_000])
            ours.shutdown(socket.SHUT_WR)
            Handler(theirs, ("127.0.0.1", 1), server)
            theirs.shutdown(socket.SHUT_WR)
            answer = b""
            while part := ours.recv(1 << 16):
                answer += part
        assert b" 500 " not in answer[:20]

    words = (b"Host: ", b"HEAD ", b"POST ", b"%00", b"%2e%2e/", b"[::", b"Content-Length: 9999999999\r\n", b"\r\n")
    return Target("watch request", tuple(b"GET " + path + head for path in paths), check, words=words, share=0.5)


def _answered(scratch: Path) -> list[Target]:
    path = scratch / "answered-r.json"

    def ledger(data: bytes) -> None:
        path.write_bytes(data)
        found = Ledger(scratch, "r").read()
        assert found is not None
        assert found[0] == found[0].check()

    def sequence(data: bytes) -> None:
        assert 4 <= next_sequence(data.decode("latin-1"), 3) < 1 << 63

    words = (b"null", b"-1", b"1e3", b"[", b"true", b'"')
    return [
        Target("participant ledger", (b'[3, 1, "ab"]', b'[12, 255, ""]'), ledger, words=words, share=0.3),
        Target("announcement sequence", (b"12",), sequence, share=0.3),
    ]
